import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvlm.core.judging import Label, Status
from rlvlm.judges.reading.verdicts import parse_label, parse_rating, parse_score, parse_video_score, status_of

LEFT, RIGHT, TIE = Label.LEFT, Label.RIGHT, Label.TIE


def test_the_three_labels_and_the_four_outcomes():
    assert [parse_label(text) for text in ("0", "1", "-1", "perhaps")] == [LEFT, RIGHT, TIE, None]
    assert [status_of(label) for label in (LEFT, RIGHT, TIE, None)] == [
        Status.OK,
        Status.OK,
        Status.NO_PREFERENCE,
        Status.INVALID,
    ]


READABLE = {
    # plain
    "0": LEFT,
    "1": RIGHT,
    "-1": TIE,
    " 1 \n": RIGHT,
    "0.": LEFT,
    "-1.": TIE,
    "1.": RIGHT,
    "1!": RIGHT,
    "\n\n\n0\n\n": LEFT,
    "\t-1": TIE,
    "1\r\n": RIGHT,
    # other minus signs and digits
    "\u22121": TIE,
    "\u20131": TIE,
    "\uff0d\uff11": TIE,
    "\uff11": RIGHT,
    "\u0660": LEFT,
    "\u0967": RIGHT,
    # markdown and quotes
    "**1**": RIGHT,
    "`0`": LEFT,
    "```\n-1\n```": TIE,
    "* 1": RIGHT,
    '"0"': LEFT,
    "(1)": RIGHT,
    "[-1]": TIE,
    "# 0": LEFT,
    # marked
    "\\boxed{1}": RIGHT,
    "So $\\boxed{-1}$.": TIE,
    "<answer>0</answer>": LEFT,
    "I think <label> 1 </label>": RIGHT,
    # named
    "Answer: 1.": RIGHT,
    "Answer: -1": TIE,
    "answer:0": LEFT,
    "Label = 1": RIGHT,
    "**Answer:** 0": LEFT,
    "**Answer: -1**": TIE,
    "The answer is 1.": RIGHT,
    "Final answer: 0": LEFT,
    "label -> 1": RIGHT,
    '{"label": 1}': RIGHT,
    '{"label": -1}': TIE,
    "Answer: 1. Image 2 is more open.": RIGHT,
    "Answer: 0 (the first image)": LEFT,
    "Answer: 0, the first": LEFT,
    "Label: -1 because both look alike": TIE,
    "答案：1": RIGHT,
    "Antwort: 0": LEFT,
    "Réponse : -1": TIE,
    "Ответ: 1": RIGHT,
    "정답은 0": LEFT,
    "答案是 -1。": TIE,
    # reasoning first, label last
    "The first shows a drawer closed by 10 cm.\nThe second is open by 3 cm.\n1": RIGHT,
    "1. The first is shut.\n2. The second is open.\n3. They differ.\n1": RIGHT,
    "1.\nThe first is shut.\n2.\nThe second is shut.\n3.\nThey do not differ.\n-1": TIE,
    "1) The drawer is closed\n2) The drawer is open\nAnswer: 1": RIGHT,
    "A possible answer is 0.\nBut the handle moved.\nFinal answer: 1": RIGHT,
    "Label: 0\n\nLabel: 0": LEFT,
    "1\n\nThe second image is nearer.": RIGHT,
    "-1\n1. Both are shut.": TIE,
    # thinking
    "<think>0? or 1? maybe -1</think>1": RIGHT,
    "<think>\nAnswer: 0\n</think>\n\n-1": TIE,
    "hm, 0\n</think>\n1": RIGHT,
    "<think>a</think>0<think>1</think>0": LEFT,
    "<think></think>0": LEFT,
    # left-over marks of the chat format
    "1<|im_end|>": RIGHT,
    "0</s>": LEFT,
    "<|assistant|>\n-1<|endoftext|>": TIE,
}

UNREADABLE = [
    "",
    " ",
    "\n\n",
    "-",
    "--",
    ".",
    "\x00",
    "None",
    "null",
    "two",
    "zero",
    "one",
    "I",
    "l",
    "O",
    "true",
    # other numbers
    "2",
    "10",
    "01",
    "11",
    "-10",
    "-2",
    "1.0",
    "0.5",
    "1,5",
    "-1.5",
    "+1",
    "1e0",
    "1/2",
    "100%",
    "1%",
    "1st",
    "0x1",
    "~1",
    "#1",
    "½",
    "²",
    "①",
    "--1",
    "- 1",
    "1:1",
    "1-0",
    "0-1",
    # both labels
    "0 1",
    "0, 1",
    "0 or 1",
    "0\n1",
    "1\n-1",
    "-1 0 1",
    "Answer: 0 or 1",
    "Answer: 1/0",
    "Label: 0. Label: 1",
    "0\nAnswer: 1",
    "Label: 0 = first, 1 = second, -1 = unsure",
    "0 for the first, 1 for the second, -1 if there is no difference",
    "<answer>0</answer><answer>1</answer>",
    "\\boxed{0} or \\boxed{1}",
    "Final answer: 0\nFinal answer: 1",
    # prose with digits
    "In image 1 the drawer is open.",
    "Image 0 and image 1 look alike",
    "The drawer is open by 1 cm",
    "image 1",
    "1 is better",
    "1 of 2",
    "The score is 0.",
    "There is 1 drawer:",
    "Distance to the goal: 0",
    "0 percent",
    "The answer is not 0",
    "Is the answer 0?",
    "Answer: 1 is wrong",
    "Answer: 1 cm",
    "Answer: 10",
    "Answer: 1.5",
    "Answer: -10",
    # lists and truncated text
    "1. The first image shows a drawer",
    "1.\nThe first image shows a dra",
    "1)",
    "1:",
    "0:",
    "1.\nA\n2.\nB",
    "1\nshut\n2\nopen",
    "Answer:",
    "The answer is",
    "Answer: -",
    "Final answer",
    "The first pic",
    # thinking that never ends, or holds the only label
    "<think>the label is 1",
    "<think>\n1",
    "<think>0</think>",
    "1<think>no, 0",
    "0\n</think>",
    "<think>1</think><think>0",
    # refusals and other languages
    "I cannot help with that.",
    "第一张图更好",
    "Первая картинка лучше",
    "첫 번째",
    "الأولى أفضل",
    "🙂",
    "unsure",
    "no difference",
]


@pytest.mark.parametrize(("text", "label"), READABLE.items())
def test_a_readable_answer_gives_its_label(text, label):
    assert parse_label(text) is label


@pytest.mark.parametrize("text", UNREADABLE)
def test_an_unreadable_answer_is_never_guessed(text):
    assert parse_label(text) is None


PLAIN = [
    text
    for text, label in READABLE.items()
    if label is not TIE and set("01") & set(text) and not set("23-") & set(text) and not text.startswith("1\n")
]


@pytest.mark.parametrize("text", PLAIN)
def test_swapping_the_two_labels_swaps_the_verdict(text):
    swapped = text.replace("1", "\x01").replace("0", "1").replace("\x01", "0")
    assert {parse_label(text), parse_label(swapped)} == {LEFT, RIGHT}


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.text(max_size=400))
def test_any_text_has_an_outcome(text):
    assert parse_label(text) in (LEFT, RIGHT, TIE, None)
    for parse in (parse_score, parse_rating, parse_video_score):
        score = parse(text)
        assert score is None or 0 <= score <= 1


@settings(max_examples=300, deadline=None)
@given(st.text("01-. \n*<think>/answerlb:()2\u2212", max_size=60))
def test_text_made_of_the_parsers_own_marks_has_an_outcome(text):
    assert parse_label(text) in (LEFT, RIGHT, TIE, None)


@settings(max_examples=300, deadline=None)
@given(st.text("12345670./%- \n*<think>/answer[]", max_size=60))
def test_scores_of_text_made_of_the_parsers_own_marks_lie_on_their_scales(text):
    assert parse_rating(text) in (None, 0.0, 0.25, 0.5, 0.75, 1.0)
    for parse in (parse_score, parse_video_score):
        assert parse(text) is None or 0 <= parse(text) <= 1


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80), st.sampled_from(["0", "1", "-1"]))
def test_a_label_on_a_line_of_its_own_is_read_or_refused_but_never_changed(prose, label):
    prose = "".join(char for char in prose if not char.isdecimal())
    assert parse_label(f"{prose}\n{label}") in (parse_label(label), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    [
        "0",
        "-1 ",
        "Answer: 1 ",
        "<think>",
        "</think>",
        "<answer>",
        "<answer>5</answer>",
        "1. a\n",
        "(",
        "answer:",
        "* ",
        "\n",
        "1\n",
        "\\boxed{",
        "a",
    ],
)
def test_huge_answers_are_read_in_linear_time(unit):
    def seconds(count: int) -> float:
        text = unit * count
        start = time.process_time()
        parse_label(text)
        parse_score(text)
        parse_rating(text)
        parse_video_score(text)
        return time.process_time() - start

    seconds(1_000)
    assert seconds(300_000) < 5


def test_the_end_of_a_huge_answer_counts_and_a_cut_line_does_not():
    assert parse_label("word " * 100_000 + "\n1") is RIGHT
    assert parse_label("1" * 100_000) is None


SCORES = {
    "0": 0.0,
    "100": 1.0,
    "37": 0.37,
    "37%": 0.37,
    "37 %": 0.37,
    "Progress: 40": 0.4,
    "Answer: 85%.": 0.85,
    "62.5": 0.625,
    "70/100": 0.7,
    "**5**": 0.05,
    "<think>50</think>20": 0.2,
    "Score: 15 (drawer just open)": 0.15,
    "0.7%": 0.007,
    "1": 0.01,
}


@pytest.mark.parametrize(("text", "score"), SCORES.items())
def test_a_readable_score(text, score):
    assert parse_score(text) == pytest.approx(score)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.7",
        "1.0",
        "101",
        "-5",
        "70-80",
        "about half",
        "7/10",
        "1000",
        "30 or 40",
        "20\n30",
        "<think>50",
    ],
)
def test_an_unreadable_score_is_never_guessed(text):
    assert parse_score(text) is None


RATINGS = {
    "1": 0.0,
    "2": 0.25,
    "3": 0.5,
    "4": 0.75,
    "5": 1.0,
    "4/5": 0.75,
    "4 / 5": 0.75,
    "**3**": 0.5,
    "ANSWER: 4": 0.75,
    "Rating: 2": 0.25,
    "The rating is 5.": 1.0,
    "2.": 0.25,
    "<answer>3</answer>": 0.5,
    "\\boxed{4}": 0.75,
    "<think>2 or 3</think>3": 0.5,
    "1. Shut.\n2. Open.\n3. They differ.\n3": 0.5,
    "The drawer is half open.\n3": 0.5,
}


@pytest.mark.parametrize(("text", "rating"), RATINGS.items())
def test_a_readable_rating(text, rating):
    assert parse_rating(text) == rating


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "6",
        "10",
        "3.5",
        "3,5",
        "-3",
        "4/10",
        "5%",
        "3-4",
        "3 or 4",
        "3\n4",
        "I rate it 3",
        "three",
        "<think>3",
        "1\n2",
        "1. Shut.\n2. Open.\n3",
        "Rating: 3 of 10",
        "Rating: 34",
        "5 stars",
        "Rating: not 4",
    ],
)
def test_an_unreadable_rating_is_never_guessed(text):
    assert parse_rating(text) is None


VIDEO_SCORES = {
    "<think>planning: 3 steps. It is at 30 or 40.</think><answer>45</answer>": 0.45,
    "<answer>\n80%\n</answer>": 0.8,
    "<answer>[[45]]</answer>": 0.45,
    "<ANSWER>7</ANSWER>": 0.07,
    "<think>a</think>\n45": 0.45,
    "Progress: 45%": 0.45,
    "<answer>45</answer> That is <answer>45</answer>": 0.45,
    "<answer>Answer: 100</answer>": 1.0,
    "<answer>1</answer>": 0.01,
    "<answer>1%</answer>": 0.01,  # one percent, not all of it
}


@pytest.mark.parametrize(("text", "score"), VIDEO_SCORES.items())
def test_a_readable_video_score_is_in_percent(text, score):
    assert parse_video_score(text) == pytest.approx(score)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "success",
        "not a success",
        "<answer>success</answer>",
        "<answer>0.7</answer>",
        "<answer></answer>",
        "<answer>45",
        "<think>45",
        "<think>It is at 45",
        "<think><answer>45</answer></think>",
        "<answer>101</answer>",
        "<answer>about 45%</answer>",
        "<answer>30</answer><answer>40</answer>",
        "The task is 45 percent done: step 3",
        "45\n<answer>",
        "<answer>45 or 50</answer>",
        "<answer>x</answer><answer>45</answer>",
    ],
)
def test_an_unreadable_video_score_is_never_guessed(text):
    assert parse_video_score(text) is None
