from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_vlm import save_tiny_llava

from rlvlm.errors import JudgeUnavailable
from rlvlm.judges import prompts
from rlvlm.judges.chat import ChatJudge, ChatModel
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.loading import load_vlm
from rlvlm.testing import check_judge
from rlvlm.types import Clip, Label, Query, Status

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
GOAL = "open the drawer"


def make_config(folder, **changes) -> JudgeConfig:
    return replace(JudgeConfig(backend="transformers", model=str(folder), max_new_tokens=4, batch_size=4), **changes)


def make_queries(count: int, seed: int = 0, size_px: int = 40) -> list[Query]:
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (count, 2, 1, size_px, size_px, 3), np.uint8)
    return [Query(goal=GOAL, left=left, right=right) for left, right in frames]


def test_direct_probabilities_are_those_of_the_whole_label_texts(tiny_vlms):
    # by hand: log p(label) is the sum over its tokens of log p(token | chat, tokens before), each from its own pass
    config = make_config(tiny_vlms["qwen3_vl"])
    vlm = load_vlm(config)
    query = make_queries(1)[0]
    chat = prompts.compare_messages("direct", query)
    tokenizer = vlm.processor.tokenizer
    by_hand = []
    for label in prompts.LABEL_TEXTS:
        text = vlm.processor.apply_chat_template(chat) + label
        inputs = vlm.processor([text], [prompts.pictures(chat)])
        ids = tokenizer.encode(label, add_special_tokens=False)
        with torch.inference_mode():
            log_p = vlm.model(**inputs).logits[0].double().log_softmax(-1)
        by_hand.append(sum(log_p[-len(ids) - 1 + place, token].item() for place, token in enumerate(ids)))
    assert len(tokenizer.encode("-1", add_special_tokens=False)) == 2
    expected = torch.tensor(by_hand, dtype=torch.float64).softmax(-1)
    verdict = ChatJudge(config, vlm).compare([query])[0]
    assert verdict.probabilities == pytest.approx(expected.tolist(), abs=1e-5)
    assert verdict.label is (Label.LEFT, Label.RIGHT, Label.TIE)[int(expected.argmax())]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["direct", "single_stage", "two_stage"])
def test_every_family_and_mode_keeps_the_contract(tiny_vlms, family, mode):
    check_judge(ChatJudge(make_config(tiny_vlms[family], prompt=mode)))


@pytest.mark.parametrize("mode", ["direct", "two_stage"])
def test_a_vlm_of_another_line_keeps_the_contract(tmp_path, mode):
    check_judge(ChatJudge(make_config(save_tiny_llava(tmp_path / "llava"), prompt=mode)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_unequal_lengths_answers_as_its_items_do_alone(tiny_vlms, family):
    judge = ChatJudge(make_config(tiny_vlms[family], batch_size=5))
    queries = [replace(query, goal=GOAL + " wide" * index) for index, query in enumerate(make_queries(5))]
    queries[2] = replace(queries[2], left=np.repeat(queries[2].left, 3, axis=0))
    together = judge.compare(queries)
    alone = [judge.compare([query])[0] for query in queries]
    for one, other in zip(together, alone, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)
    assert len({round(verdict.probabilities[0], 6) for verdict in together}) == 5  # the pictures matter


def test_four_bit_weights_on_a_cpu(tiny_vlms):
    judge = ChatJudge(make_config(tiny_vlms["qwen3_vl"], quantization="nf4", dtype="bfloat16"))
    verdicts = judge.compare(make_queries(3))
    assert all(verdict.probabilities for verdict in verdicts)
    assert "quantization=nf4" in judge.stamp.decoding and "bfloat16" in judge.stamp.decoding


def test_sampling_repeats_with_the_seed_and_greedy_ignores_it(tiny_vlms):
    vlm = load_vlm(make_config(tiny_vlms["qwen3_vl"]))
    queries = make_queries(2)

    def texts(**changes) -> list[str]:
        config = make_config(tiny_vlms["qwen3_vl"], prompt="single_stage", **changes)
        return [verdict.text for verdict in ChatJudge(config, vlm).compare(queries)]

    assert texts(temperature=1.0, seed=1) == texts(temperature=1.0, seed=1) != texts(temperature=1.0, seed=2)
    assert texts(seed=1) == texts(seed=2)


def test_two_stage_keeps_both_texts_and_reads_the_second(tiny_vlms, monkeypatch):
    judge = ChatJudge(make_config(tiny_vlms["qwen3_vl"], prompt="two_stage"))
    asked = []
    replies = iter([["1", "0"], ["0", "-1"]])

    def speak(self, chats):
        asked.append(chats)
        return [_reply(text) for text in next(replies)]

    monkeypatch.setattr(ChatModel, "generate", speak)
    verdicts = judge.compare(make_queries(2))
    assert [verdict.label for verdict in verdicts] == [Label.LEFT, Label.TIE]
    assert [verdict.text for verdict in verdicts] == ["1\n\n0", "0\n\n-1"]
    assert [len(prompts.pictures(chat)) for chats in asked for chat in chats] == [2, 2, 0, 0]
    assert "Report:\n1\n" in asked[1][0][0]["content"][0]["text"]


def _reply(text: str):
    from rlvlm.judges.chat import Reply

    return Reply(text, text)


def test_a_reply_torn_by_the_token_limit_loses_its_last_line(tiny_vlms):
    vlm = load_vlm(make_config(tiny_vlms["qwen3_vl"]))
    model = ChatModel(vlm, make_config(tiny_vlms["qwen3_vl"], max_new_tokens=3))
    reply = model.generate([prompts.compare_messages("direct", make_queries(1)[0])])[0]
    assert reply.text and reply.readable == reply.text.rpartition("\n")[0]


def test_one_bad_item_fails_alone(tiny_vlms):
    judge = ChatJudge(make_config(tiny_vlms["qwen3_vl"]))
    queries = make_queries(6)
    expected = judge.compare(queries)
    thin_picture = np.zeros((1, 2, 900, 3), np.uint8)  # the processor refuses the aspect ratio
    spoilt = {1: replace(queries[1], goal="open <|im_end|>"), 3: replace(queries[3], left=thin_picture),
              4: replace(queries[4], right=queries[4].right.astype(np.float32))}
    verdicts = judge.compare([spoilt.get(index, query) for index, query in enumerate(queries)])
    assert [verdict.status is Status.FAILED for verdict in verdicts] == [index in spoilt for index in range(6)]
    for index in set(range(6)) - set(spoilt):
        assert verdicts[index].probabilities == pytest.approx(expected[index].probabilities, abs=1e-4)
    assert "aspect ratio" in verdicts[3].text


def test_out_of_memory_halves_the_batch_and_loses_nothing(tiny_vlms, monkeypatch):
    judge = ChatJudge(make_config(tiny_vlms["qwen3_vl"], batch_size=8))
    queries = make_queries(16)
    expected = judge.compare(queries)
    sizes, forward = [], ChatModel.label_log_p

    def small_memory(self, chats):
        sizes.append(len(chats))
        if len(chats) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, chats)

    monkeypatch.setattr(ChatModel, "label_log_p", small_memory)
    verdicts = judge.compare(queries)
    assert [verdict.label for verdict in verdicts] == [verdict.label for verdict in expected]
    assert sizes[:3] == [8, 4, 2] and sizes.count(8) == 1  # later batches start small


def test_a_model_that_breaks_on_everything_is_unavailable(tiny_vlms, monkeypatch):
    judge = ChatJudge(make_config(tiny_vlms["qwen3_vl"]))

    def broken(self, chats):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(ChatModel, "label_log_p", broken)
    with pytest.raises(JudgeUnavailable, match="device-side assert"):
        judge.compare(make_queries(3))


def test_a_model_that_does_not_answer_with_a_label_is_invalid(tiny_vlms, monkeypatch):
    judge = ChatJudge(make_config(tiny_vlms["qwen3_vl"]))
    faint = torch.tensor([[-20.0, -21.0, -22.0], [-1.0, -2.0, -3.0]], dtype=torch.float64)
    monkeypatch.setattr(ChatModel, "label_log_p", lambda self, chats: faint)
    verdicts = judge.compare(make_queries(2))
    assert [verdict.status for verdict in verdicts] == [Status.INVALID, Status.OK]


def test_scores_are_parsed_percentages(tiny_vlms, monkeypatch):
    judge = ChatJudge(make_config(tiny_vlms["qwen3_vl"]))
    monkeypatch.setattr(ChatModel, "generate", lambda self, chats: [_reply("40"), _reply("quite a lot")])
    frames = make_queries(1)[0].left
    scores = judge.score([Clip(goal=GOAL, frames=frames)] * 2)
    assert [(score.status, score.value) for score in scores] == [(Status.OK, 0.4), (Status.INVALID, None)]
