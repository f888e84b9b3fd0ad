import pytest
from answer_classes import SCALES, UNREADABLE, make_cases

from rlvlm.core.judging import Label
from rlvlm.judges.reading.verdicts import parse_label, parse_rating, parse_score, parse_video_score


def test_each_class_by_hand():
    texts = (
        "I don't think the answer is 1",
        "The answer is 1. No, it's zero.",
        "If it were 1 the drawer would be open.",
        'The sign says "Answer: 1"',
        "Another annotator said: 1",
        "Example answer: 1",
        "Answer: - 1",
        "-\n1",
        "<thinking>the answer is\n1",
        "<THINK>\n1",
        "\u25c1think\u25b7\n1",
        "<|channel|>analysis<|message|>\n1",
        "1\n\nThe first image is nearer to the goal.",
    )
    assert {text: parse_label(text) for text in texts} == dict.fromkeys(texts)


@pytest.mark.parametrize("seed", [0, 1])
def test_of_500_made_answers_none_is_guessed_and_hardly_one_missed(seed):
    cases = make_cases(500, seed)
    read = [(case, parse_label(case.text)) for case in cases]
    assert [case.text for case, label in read if label not in (None, case.label)] == []
    readable = [(case.text, label) for case, label in read if case.label is not None]
    missed = [text for text, label in readable if label is None]
    assert len(readable) > 100 and len(missed) <= 0.02 * len(readable), missed
    assert {case.kind for case in cases} == {"readable", *UNREADABLE}


@pytest.mark.parametrize("text", sorted({scale.format(n=n) for scale in SCALES for n in "2345"}))
def test_a_score_on_another_scale_or_of_somebody_else_is_never_guessed(text):
    assert (parse_score(text), parse_rating(text), parse_video_score(text)) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("The drawer is more open in the second, so the answer is 1.", Label.RIGHT),
        ("1\n\nExplanation: The second image is nearer to the goal.", Label.RIGHT),
        ("-1\nI am not sure.", Label.TIE),
        ("Label: -1 (no difference)", Label.TIE),
        ("<thinking>0?</thinking>\n1", Label.RIGHT),
        ("<|channel|>analysis<|message|>1<|end|><|start|>assistant<|channel|>final<|message|>0<|return|>", Label.LEFT),
        ("1\n\nThe drawer in the second image moved by 1 cm.", Label.RIGHT),
    ],
)
def test_forms_that_models_write_are_read(text, label):
    assert parse_label(text) is label


def test_a_video_score_stands_in_an_answer_of_its_own():
    assert parse_video_score("<think>3 steps of 5</think>\n<answer>45</answer>") == pytest.approx(0.45)
    assert parse_video_score("The format is <answer>45</answer>") is None
    assert parse_rating("4 out of 5") == 0.75 and parse_score("70 out of 100") == pytest.approx(0.7)
