import pytest

from rlvlm.core.judging import Label
from rlvlm.judges.reading import parse_label, parse_score
from rlvlm.pocket.judge import texts

PHRASE = "the drawer is {percent}% open"


def test_report_of_a_pair_worked_by_hand():
    assert texts.report(PHRASE, 0.37, 0.9, 1) == (
        "First: the drawer is 37% open. Second: the drawer is 90% open. The second is nearer to the goal."
    )


@pytest.mark.parametrize(("label", "meaning"), [(0, Label.LEFT), (1, Label.RIGHT), (-1, Label.TIE)])
@pytest.mark.parametrize("task", ["direct", "single_stage", "label"])
def test_answers_are_read_by_the_parser_of_the_judges(task, label, meaning):
    assert parse_label(texts.answer(task, PHRASE, 0.01, 1.0, label)) is meaning


def test_scores_are_read_by_the_parser_of_the_judges():
    assert parse_score(texts.answer("score", PHRASE, 0.37, 0.0, 0)) == 0.37


def test_a_stage_1_report_alone_holds_no_label():
    assert parse_label(texts.report(PHRASE, 0.0, 0.01, -1)) is None


def test_phrases_cover_the_prompts_but_for_the_goal():
    phrases = texts.phrases([PHRASE])
    for task in texts.TASKS:
        for message in texts.messages(task, "open the drawer", texts.report(PHRASE, 0.3, 0.6, 1)):
            for part in message["content"]:
                text = part.get("text", "")
                for phrase in phrases:
                    text = text.replace(phrase, "")
                assert text.replace("open the drawer", "").strip(".0123456789") == ""
