"""The forms of score that published reward models have: statement, rubric, delta."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted import ScriptedModel

from rlvlm.core.judging import Clip, Status
from rlvlm.judges import prompts
from rlvlm.judges.asking import BatchAsker
from rlvlm.judges.chat import ChatJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.dialogues import score_dialogue
from rlvlm.judges.reading import parse_change
from rlvlm.vlms.chats import ChatReply, images_of

CLIP = Clip(
    goal="open the drawer", frames=np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 3), np.uint8)
)


def judge_of(model: ScriptedModel, score: Any) -> ChatJudge:
    config = JudgeConfig(batch_size=4, score=score)
    return ChatJudge(config, BatchAsker(model, config))


def test_a_statement_is_worth_its_probability_of_true_among_all_words() -> None:
    model = ScriptedModel(log_p=lambda count: [np.log([0.3, 0.1]).tolist()] * count)
    score = judge_of(model, "statement").score([CLIP])[0]
    assert score.value == pytest.approx(0.3) and score.text == "True"  # not 0.3 / 0.4
    parts = model.chats[0][0]["content"]
    assert [part["type"] for part in parts] == ["image"] * 3 + ["text"]
    assert parts[-1]["text"].endswith("The answer is:") and "open the drawer" in parts[-1]["text"]
    lost = judge_of(ScriptedModel(log_p=lambda count: [[-20.0, -20.0]] * count), "statement").score([CLIP])[0]
    assert lost.status is Status.INVALID


def test_a_statement_behind_an_api_that_tells_its_likeliest_tokens() -> None:
    for tokens, value in (
        ([("True", 0.3), (" True", 0.2), ("False", 0.4)], 0.5),
        ([("False", 0.999)], 0.0),
        ([("The", 0.9), ("Sure", 0.1)], None),  # no answer at all, so not certainly a failure
    ):
        dialogue = score_dialogue("statement")(CLIP)
        next(dialogue)
        with pytest.raises(StopIteration) as end:
            dialogue.send(ChatReply(text=tokens[0][0], first_tokens=tuple(tokens)))
        assert end.value.value.value == pytest.approx(value), tokens


def test_a_rubric_is_answered_in_five_steps() -> None:
    for text, value in (("ANSWER: 4", 0.75), ("ANSWER: 1", 0.0), ("5", 1.0), ("ANSWER: 7", None), ("nearly", None)):
        score = judge_of(ScriptedModel([text]), "rubric").score([CLIP])[0]
        assert score.value == value, text
        assert score.status is (Status.INVALID if value is None else Status.OK)


def test_deltas_are_taken_of_what_is_left() -> None:
    # by hand: 0 + 50 % of 100 = 50; then -20 % of the 50 that are left, so 40; a loss at the start stays at 0
    model = ScriptedModel(["50", "-20"])
    score = judge_of(model, "delta").score([CLIP])[0]
    assert score.value == pytest.approx(0.4) and score.text == "50 | -20"
    assert [[int(one[0, 0, 0]) for one in images_of(chat)] for chat in model.chats] == [[0, 1], [1, 2]]
    assert judge_of(ScriptedModel(["-30", "0"]), "delta").score([CLIP])[0].value == 0.0
    lost = judge_of(ScriptedModel(["better"]), "delta").score([CLIP])[0]
    assert lost.status is Status.INVALID
    alone = ScriptedModel(["0"])
    assert judge_of(alone, "delta").score([replace(CLIP, frames=CLIP.frames[:1])])[0].value == 0.0
    assert len(images_of(alone.chats[0])) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 0.12), ("+12%", 0.12), ("-8.5", -0.085), ("\u22127 %", -0.07), ("**100**", 1.0), ("0", 0.0),
        ("101", None), ("12 or 13", None), ("about 12", None), ("", None), ("12\n13", None), ("<think>12", None),
    ],
)  # fmt: skip
def test_a_change_is_one_signed_percentage_and_nothing_else(text: str, value: float | None) -> None:
    assert parse_change(text) == (None if value is None else pytest.approx(value))


def test_every_sentence_has_its_slot() -> None:
    for name in (
        "statement",
        "rubric",
        "delta",
        "video",
        "robometer_progress",
        "robometer_preference",
        "rynnvalue_task",
    ):
        assert prompts.SENTENCES[name].count("{goal}") == 1, name
