"""Questions that wait for people: what counts, what is taken back, and what is left when a process dies."""

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlvlm.core.judging import Label, Status, Verdict
from rlvlm.labels.records import Question
from rlvlm.labels.segments import encode_line
from rlvlm.labels.store import LabelStore
from rlvlm.plugins.people.queue import Choice, PeopleQueue, Said, check_name, is_swapped, new_ticket

PAIR = Question(kind="compare", goal="open it", left=("a" * 64,), right=("b" * 64,))
CLIP = Question(kind="score", goal="open it", left=("a" * 64, "b" * 64))


def queue(folder: Path, *questions: Question, **asked) -> PeopleQueue:
    queue = PeopleQueue(LabelStore(folder))
    queue.ask(questions, **asked)
    return queue


def kept_labels(page: PeopleQueue) -> dict[str, Label | float | None]:
    """Labels and values in the store, by question."""
    answers = [(item.question.id, item.answer) for item in page.store.answers()]
    return {key: answer.label if isinstance(answer, Verdict) else answer.value for key, answer in answers}


def said(choice: Choice, question: Question = PAIR, name: str = "anna", **changes) -> Said:
    facts = {"ticket": new_ticket(), "client": name, "seconds": 2.0, "when": time.time(), **changes}
    return Said(question=question.id, name=name, choice=choice, **facts)


def test_a_question_is_asked_once_in_either_order_unless_each_order_is_wanted(tmp_path):
    one = queue(tmp_path / "one", PAIR, PAIR.swapped, CLIP)
    assert one.waiting() == 2 and one.find(PAIR.swapped) == (one.asked[PAIR.id], True)
    assert one.ask([PAIR.swapped, CLIP]) == 0
    both = queue(tmp_path / "both", PAIR, PAIR.swapped, each_order=True)
    assert both.waiting() == 2 and both.find(PAIR.swapped) == (both.asked[PAIR.swapped.id], False)


@pytest.mark.parametrize(
    ("question", "choices", "agreed"),
    [
        (PAIR, ["left"], "left"),
        (PAIR, ["left", "right"], "equal"),
        (PAIR, ["left", "skip"], "equal"),
        (PAIR, ["skip", "left", "skip"], "skip"),
        (PAIR, ["right", "left", "right"], "right"),
        (CLIP, [2, 5], 3.5),
        (CLIP, [2, 5, 5], 5),
        (CLIP, [4, "skip"], 4),
    ],
)
def test_agreement_among_people(tmp_path, question, choices, agreed):
    page = queue(tmp_path, question, agreement=len(choices))
    for number, choice in enumerate(choices):
        assert page.asked[question.id].is_open and page.add(said(choice, question, name=f"person{number}"))
    assert page.waiting() == 0
    assert page.asked[question.id].agreed(is_final=True) == agreed
    assert page.asked[question.id].agreed() is None, "an answer that can be taken back is nobody's reward yet"
    assert page.keep(undo_s=0) == len(choices) and page.keep(undo_s=0) == 0
    judge = queue(tmp_path)
    judge.refresh()
    assert judge.asked[question.id].agreed() == agreed
    assert {item.answer.stamp.judge for item in judge.store.answers()} == {
        f"human:person{number}" for number in range(len(choices))
    }


def test_an_answer_counts_once_and_can_be_taken_back_until_it_is_kept(tmp_path):
    page = queue(tmp_path, PAIR)
    first = said("left")
    assert page.add(first)
    assert not page.add(first), "sent twice"
    assert not page.add(said("right")), "the same person in another window"
    assert page.undo("another page") is None and page.undo("anna") == first
    assert page.waiting() == 1 and not page.add(first), "the network's late copy of what was taken back"
    assert page.add(said("right")) and page.keep(undo_s=60) == 0 and page.keep(undo_s=0) == 1
    assert page.undo("anna") is None, "somebody may have learned from it"
    assert kept_labels(page) == {PAIR.id: Label.RIGHT}
    assert next(page.store.answers()).answer.latency_s == 2.0


def test_a_repeat_is_an_answer_in_the_other_order_and_shows_the_person_s_own_error(tmp_path):
    page = queue(tmp_path, PAIR, CLIP)
    page.add(said("left"))
    page.add(said(4, CLIP, seconds=4.0))
    page.add(said("right", ticket=new_ticket(is_repeat=True)))
    page.keep(undo_s=0)
    figures = page.figures("anna")
    assert (figures.answers, figures.median_s, figures.repeats, figures.different) == (2, 3.0, 1, 1)
    # right of the pair as it was asked is left of the other order
    assert kept_labels(page) == {PAIR.id: Label.LEFT, PAIR.swapped.id: Label.LEFT, CLIP.id: 0.75}
    assert math.isnan(page.figures("ben").median_s)


def test_a_question_without_an_answer_is_invalid_and_never_a_tie(tmp_path):
    page = queue(tmp_path, PAIR, CLIP)
    page.add(said("skip"))
    page.add(said("skip", CLIP))
    page.keep(undo_s=0)
    assert {item.answer.status for item in page.store.answers()} == {Status.INVALID}


def test_lines_may_be_read_in_any_order_and_odd_ones_cost_themselves_alone(tmp_path):
    queue(tmp_path, PAIR).add(said("left"))
    folder = tmp_path / "people"
    [written] = folder.glob("*.jsonl")
    asked, answer = written.read_bytes().splitlines(keepends=True)
    written.unlink()
    good = json.loads(answer[9:])
    odd = [
        {**good, "ticket": "../../x"},
        {**good, "ticket": new_ticket(), "choice": 3},
        {**good, "ticket": new_ticket(), "name": "<b>"},
        {**good, "ticket": new_ticket(), "seconds": "many"},
        {**good, "ticket": new_ticket(), "seconds": -1},
        {"kind": "ask", "agreement": 1, "each_order": False, "question": {**asdict(PAIR), "left": ["../a"]}},
        {"kind": "what"},
    ]
    (folder / "1.jsonl").write_bytes(b"".join(map(encode_line, odd)) + answer)
    reader = PeopleQueue(LabelStore(tmp_path))
    reader.refresh()
    assert not reader.asked, "the answer waits for its question"
    (folder / "2.jsonl").write_bytes(asked)
    reader.refresh()
    assert [one.choice for one in reader.asked[PAIR.id].said.values()] == ["left"]
    (folder / "0.jsonl").write_bytes(encode_line({"kind": "undo", "ticket": good["ticket"]}))
    again = PeopleQueue(LabelStore(tmp_path))
    again.refresh()
    assert not again.asked[PAIR.id].said, "taken back by a process whose segment is read first"


def test_names_are_fit_for_links_and_stamps():
    assert check_name("anna-2.b_c") == "anna-2.b_c"
    for name in ("", "a" * 33, "a b", "a;b", "ä", "a\n"):
        with pytest.raises(ValueError, match="use initials or a nickname"):
            check_name(name)
    shown = [new_ticket(swapped=swapped) for swapped in (False, True) for _ in range(20)]
    assert [is_swapped(ticket) for ticket in shown] == [False] * 20 + [True] * 20
    with pytest.raises(ValueError, match="a ticket is"):
        replace(said("left"), ticket="")
