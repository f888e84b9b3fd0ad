from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_vlm import save_tiny_llava_next

from rlvlm.core.judging import Clip, Label, Query, Status
from rlvlm.judges import prompts
from rlvlm.judges.asking import BatchAsker
from rlvlm.judges.build import build_judge
from rlvlm.judges.chat import ChatJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.vlms.chats import images_of
from rlvlm.vlms.engines.transformers import TransformersEngine
from rlvlm.vlms.loading import load_vlm

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
        inputs = vlm.processor([text], [images_of(chat)])
        ids = tokenizer.encode(label, add_special_tokens=False)
        with torch.inference_mode():
            log_p = vlm.model(**inputs).logits[0].double().log_softmax(-1)
        by_hand.append(sum(log_p[-len(ids) - 1 + place, token].item() for place, token in enumerate(ids)))
    assert len(tokenizer.encode("-1", add_special_tokens=False)) == 2
    expected = torch.tensor(by_hand, dtype=torch.float64).softmax(-1)
    verdict = ChatJudge(config, BatchAsker(TransformersEngine(vlm, config), config)).compare([query])[0]
    assert verdict.probabilities == pytest.approx(expected.tolist(), abs=1e-5)
    assert verdict.label is (Label.LEFT, Label.RIGHT, Label.TIE)[int(expected.argmax())]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_unequal_lengths_answers_as_its_items_do_alone(tiny_vlms, family):
    judge = build_judge(make_config(tiny_vlms[family], batch_size=5))
    queries = [replace(query, goal=GOAL + " wide" * index) for index, query in enumerate(make_queries(5))]
    queries[2] = replace(queries[2], left=np.repeat(queries[2].left, 3, axis=0))
    together = judge.compare(queries)
    alone = [judge.compare([query])[0] for query in queries]
    for one, other in zip(together, alone, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)
    assert len({round(verdict.probabilities[0], 6) for verdict in together}) == 5  # the images matter


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "llava_next"])
def test_four_bit_weights_on_a_cpu(tiny_vlms, tmp_path, family):
    folder = tiny_vlms[family] if family in tiny_vlms else save_tiny_llava_next(tmp_path / family)
    judge = build_judge(make_config(folder, quantization="nf4", dtype="bfloat16", score="success"))
    verdicts = judge.compare(make_queries(3))
    assert all(verdict.probabilities for verdict in verdicts)
    assert "quantization=nf4" in judge.stamp.decoding and "bfloat16" in judge.stamp.decoding
    assert judge.score([Clip(goal=GOAL, frames=make_queries(1)[0].left)])[0].status is not Status.FAILED


@pytest.mark.parametrize("size_px", [20, 40, 90])
def test_tiles_of_unequal_images_do_not_mix(tmp_path, size_px):
    judge = build_judge(make_config(save_tiny_llava_next(tmp_path / "vlm"), batch_size=3))
    queries = make_queries(3, size_px=size_px)
    queries[1] = replace(queries[1], left=queries[1].left[:, :, : size_px // 2])  # a tall one among square ones
    together = judge.compare(queries)
    for query, verdict in zip(queries, together, strict=True):
        assert judge.compare([query])[0].probabilities == pytest.approx(verdict.probabilities, abs=1e-4)


def test_sampling_repeats_with_the_seed_and_greedy_ignores_it(tiny_vlms):
    vlm = load_vlm(make_config(tiny_vlms["qwen3_vl"]))
    queries = make_queries(2)

    def texts(**changes) -> list[str]:
        config = make_config(tiny_vlms["qwen3_vl"], prompt="single_stage", **changes)
        return [
            verdict.text
            for verdict in ChatJudge(config, BatchAsker(TransformersEngine(vlm, config), config)).compare(queries)
        ]

    assert texts(temperature=1.0, seed=1) == texts(temperature=1.0, seed=1) != texts(temperature=1.0, seed=2)
    assert texts(seed=1) == texts(seed=2)


def test_a_reply_with_choices_is_the_likeliest_of_them(tiny_vlms):
    vlm = load_vlm(make_config(tiny_vlms["qwen3_vl"]))
    model = TransformersEngine(vlm, make_config(tiny_vlms["qwen3_vl"]))
    chats = [prompts.compare_messages("direct", query) for query in make_queries(3)]
    likeliest = model.choice_log_p(chats, prompts.LABEL_TEXTS).argmax(axis=1)
    replies = model.generate(chats, max_new_tokens=3, temperature=0.0, choices=prompts.LABEL_TEXTS)
    assert [reply.text for reply in replies] == [prompts.LABEL_TEXTS[int(best)] for best in likeliest]
    sampled = model.generate(chats, max_new_tokens=3, temperature=2.0, choices=prompts.LABEL_TEXTS)
    assert {reply.text for reply in sampled} <= set(prompts.LABEL_TEXTS) and all(reply.is_whole for reply in sampled)


def test_a_reply_torn_by_the_token_limit_loses_its_last_line(tiny_vlms):
    vlm = load_vlm(make_config(tiny_vlms["qwen3_vl"]))
    model = TransformersEngine(vlm, make_config(tiny_vlms["qwen3_vl"]))
    chat = prompts.compare_messages("direct", make_queries(1)[0])
    reply = model.generate([chat], max_new_tokens=3, temperature=0.0)[0]
    assert reply.text and reply.readable == reply.text.rpartition("\n")[0]


def test_one_bad_item_fails_alone(tiny_vlms):
    judge = build_judge(make_config(tiny_vlms["qwen3_vl"]))
    queries = make_queries(6)
    expected = judge.compare(queries)
    thin_image = np.zeros((1, 2, 900, 3), np.uint8)  # the processor refuses the aspect ratio
    spoilt = {
        1: replace(queries[1], goal="open <|im_end|>"),
        3: replace(queries[3], left=thin_image),
        4: replace(queries[4], right=queries[4].right.astype(np.float32)),
    }
    verdicts = judge.compare([spoilt.get(index, query) for index, query in enumerate(queries)])
    assert [verdict.status is Status.FAILED for verdict in verdicts] == [index in spoilt for index in range(6)]
    for index in set(range(6)) - set(spoilt):
        assert verdicts[index].probabilities == pytest.approx(expected[index].probabilities, abs=1e-4)
    assert "aspect ratio" in verdicts[3].text
