"""What the pocket judge learns: dialogues as a run asks them, pairs of scenes, and the head that reads progress."""

import numpy as np
import pytest
import torch
from tiny_clips import LONG, SHORT, make_scenes
from transformers import AutoTokenizer

from pocket_models.judge import FORMS, JudgeDataset, ProgressHead, answer, chat_of, corpus, phrases, report
from pocket_models.network import IMAGE, SPECIAL, build_tokenizer
from rlvlm.core.judging import Label
from rlvlm.judges.reading import parse_label, parse_score
from rlvlm.pocket.models import weights_folder

PHRASE = "the drawer is {percent}% open"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(corpus([("open the drawer", PHRASE)]), phrases([PHRASE]))


def test_answers_worked_by_hand_are_read_by_the_parser_of_the_judges():
    assert report(PHRASE, 0.37, 0.9, 1) == (
        "First: the drawer is 37% open. Second: the drawer is 90% open. The second is nearer to the goal."
    )
    for label, meaning in ((0, Label.LEFT), (1, Label.RIGHT), (-1, Label.TIE)):
        for form in ("direct", "single_stage", "label"):
            assert parse_label(answer(form, PHRASE, 0.01, 1.0, label)) is meaning
    assert parse_score(answer("score", PHRASE, 0.37, 0.0, 0)) == 0.37
    assert parse_label(report(PHRASE, 0.0, 0.01, -1)) is None, "a stage-1 report alone holds no label"


@pytest.mark.parametrize("form", FORMS)
def test_prompts_are_phrases_and_the_goal_and_still_those_of_the_training(form):
    """Words that a tokenizer does not hold as phrases were not trained on: train anew after a change of prompts."""
    chat = chat_of(form, "open the drawer", report(PHRASE, 0.37, 0.9, 1))
    for message in chat:
        for part in message["content"]:
            text = part.get("text", "")
            for phrase in phrases([PHRASE]):
                text = text.replace(phrase, "")
            assert text.replace("open the drawer", "").strip(".0123456789") == ""
    shipped = AutoTokenizer.from_pretrained(weights_folder())
    prompt = shipped.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert len(shipped(prompt).input_ids) <= 26


def test_tokens_are_phrases_and_as_in_qwen_and_the_saved_folder_gives_the_same(tokenizer, tmp_path):
    assert tokenizer.tokenize("The second is nearer to the goal.") == ["The second is nearer to the goal."]
    assert tokenizer.tokenize("-1") == ["-", "1"] and tokenizer.tokenize("37") == ["3", "7"]
    assert all(len(tokenizer(token).input_ids) == 1 for token in SPECIAL)
    for text in ("open the drawer", "-1", "\n\n  0", "Ünïcödé 語 🙂", "<|im_start|>user\n\t{}"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": corpus([LONG])[7]}]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.count(IMAGE) == 1 and loaded(text).input_ids == tokenizer(text).input_ids


def test_pairs_show_one_set_up_of_one_task_as_often_as_its_share_says():
    data = JudgeDataset([make_scenes(12), make_scenes(20, SHORT, share=3.0)])
    assert data.frames.shape == (32, 96, 96, 3) and data.progress[[11, 12, 31]].tolist() == [1.0, 0.0, 1.0]
    pairs = data.draw_pairs(400, np.random.default_rng(0))
    goals = [[data.setup_of(row).goal for row in pair] for pair in pairs]
    assert all(left == right for left, right in goals)
    assert np.mean([left == SHORT[0] for left, _ in goals]) == pytest.approx(0.75, abs=0.07)
    assert [data.setup_of(row).goal for row in (11, 12)] == [LONG[0], SHORT[0]]
    assert not any(each.images.size for each in data._setups), "all at their full size would be some gigabytes"


def test_only_answers_are_learned_and_a_gap_below_the_tie_gap_is_no_difference():
    data = JudgeDataset([make_scenes(11), make_scenes(11, SHORT)])
    decoded = data.tokenizer.decode
    batch = data.dialogues("single_stage", np.array([[1, 9], [21, 21]]), np.full(2, 0.02))
    learned = batch.targets >= 0
    assert torch.equal(batch.targets[learned], batch.ids[learned])
    assert [decoded(row[row >= 0]) for row in batch.targets] == [
        "First: the bar is 10% long. Second: the bar is 90% long. The second is nearer to the goal.\n1<|im_end|>",
        "First: the bar is 100% gone. Second: the bar is 100% gone. There is no clear difference.\n-1<|im_end|>",
    ]
    batch = data.dialogues("direct", np.array([[0, 5], [0, 5]]), np.array([0.4, 0.6]))
    assert [decoded(row[row >= 0]) for row in batch.targets] == ["1<|im_end|>", "-1<|im_end|>"]
    drawn = data.draw_dialogues(10, np.random.default_rng(0), np.zeros(22, np.float32))
    assert {form: tuple(one.images.shape) for form, one in drawn.items()} == {
        "direct": (20, 2), "single_stage": (8, 2), "two_stage": (8, 2), "label": (4, 0), "score": (6, 1),
    }  # fmt: skip


def test_the_progress_head_is_off_by_the_mean_of_its_tokens():
    head = ProgressHead(4, np.array([0.2, 0.9], np.float32), ["one", "two"])
    torch.nn.init.zeros_(head.amount.weight)
    torch.nn.init.constant_(head.amount.bias, 0.5)
    encoded = torch.ones(2, 2, 9, 4)
    assert head.errors(encoded, np.array([0, 1])).tolist() == pytest.approx([0.3, 0.4])
    _, metrics = head.loss(encoded, np.array([0, 1]))
    assert metrics["error/one"] == pytest.approx(0.3) and metrics["error/two"] == pytest.approx(0.4)
