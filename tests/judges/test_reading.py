import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvlm.core.judging import Label, Status
from rlvlm.judges.reading import parse_label, parse_rating, parse_score

LEFT, RIGHT, TIE = Label.LEFT, Label.RIGHT, Label.TIE
READ = {"label": parse_label, "score": parse_score, "rating": parse_rating}
TABLE = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text().splitlines()]
"""What is read as what: kind, value (null where it must not be read), text."""


def test_the_three_labels_and_the_four_outcomes():
    assert [parse_label(text) for text in ("0", "1", "-1", "perhaps")] == [LEFT, RIGHT, TIE, None]
    statuses = [Status.OK, Status.OK, Status.NO_PREFERENCE, Status.INVALID]
    assert [Status.of(label) for label in (LEFT, RIGHT, TIE, None)] == statuses


@pytest.mark.parametrize("kind", READ)
def test_of_the_table_no_answer_is_guessed_and_hardly_one_missed(kind):
    rows = [(text, value, READ[kind](text)) for of, value, text in TABLE if of == kind]
    assert [text for text, value, read in rows if read is not None and read != pytest.approx(value)] == []
    readable = [(text, read) for text, value, read in rows if value is not None]
    missed = [text for text, read in readable if read is None]
    assert len(rows) > 60 and len(readable) > 15 and len(missed) <= 0.02 * len(readable), missed


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("<answer>0</answer> <answer>0</answer>", LEFT),
        ("<answer>1</answer><label>1</label>, \\boxed{1}", RIGHT),
        ("<answer>0</answer> <answer>1</answer>", None),
        ("Answer: 0\nFinal answer: 1", RIGHT),
        ("Answer: 0.\n\n**Final answer:**\n1", RIGHT),
        ("### Answer\n0\n### Final Answer\n1", RIGHT),
        ("Final answer: 1\nAnswer: 0", None),
        ("Final answer: 1\nFinal answer: 0", None),
        ("Answer: 1, the final image shows less.\nAnswer: 0", None),
    ],
)
def test_readings_agree_or_the_last_one_is_the_final_answer(text, label):
    assert parse_label(text) is label


def test_swapping_the_two_labels_swaps_the_verdict():
    texts = [text for kind, value, text in TABLE if kind == "label" and value in ("left", "right")]
    one_label = [text for text in texts if len(set("0123456789-") & set(text)) == 1 and not text.startswith("1\n")]
    plain = [text for text in one_label if not any(word in text for word in ("first", "second"))]
    assert len(plain) > 40
    for text in plain:
        swapped = text.translate(str.maketrans("01", "10"))
        assert {parse_label(text), parse_label(swapped)} == {LEFT, RIGHT}, text


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=400), st.text('01-. \n*<think>/answerlb:()2\u2212345%[]{}"', max_size=60)))
def test_any_text_has_an_outcome(text):
    assert parse_label(text) in (LEFT, RIGHT, TIE, None)
    assert parse_rating(text) in (None, 0.0, 0.25, 0.5, 0.75, 1.0)
    assert parse_score(text) is None or 0 <= parse_score(text) <= 1


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80), st.sampled_from(["0", "1", "-1"]))
def test_a_label_on_a_line_of_its_own_is_read_or_refused_but_never_changed(prose, label):
    prose = "".join(char for char in prose if not char.isdecimal())
    assert parse_label(f"{prose}\n{label}") in (parse_label(label), None)


UNITS = ["0", "-1 ", "Answer: 1 ", "<think>", "</think>", "<answer>", "<answer>5</answer>", "1. a\n", "(", "answer:"]
UNITS += ["* ", "\n", "1\n", "\\boxed{", "a", "because a, ", ", so the answer is ", "{", '{"label":']


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("unit", UNITS)
def test_huge_answers_are_read_in_linear_time(unit):
    """In seconds at most; what goes over them again and again takes hours."""
    for parse in READ.values():
        parse(unit * 300_000)


def test_the_end_of_a_huge_answer_counts_and_a_cut_line_does_not():
    assert parse_label("word " * 100_000 + "\n1") is RIGHT
    assert parse_label("1" * 100_000) is None
