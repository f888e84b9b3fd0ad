"""A person as a judge, answered by a thread in the place of the page."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Label, Query, Status
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.records import Question
from rlvlm.labels.store import LabelStore
from rlvlm.plugins.people.config import HumanConfig
from rlvlm.plugins.people.judge import HumanJudge
from rlvlm.plugins.people.queue import PeopleQueue, Said, new_ticket
from rlvlm.testing import check_judge


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("rlvlm.plugins.people.judge.POLL_S", 0.005)


@pytest.fixture
def answer(tmp_path):
    """Starts a person who answers whatever is open, by a rule of images."""
    done = threading.Event()
    threads: list[threading.Thread] = []

    def start(name: str = "anna", rule: Callable[[Question], object] | None = None) -> None:
        def by_digest(question: Question) -> object:
            return int(question.left[0][0], 16) % 5 + 1 if question.kind == "score" else side(question)

        def side(question: Question) -> str:
            return "left" if question.left < question.right else "right"

        def work() -> None:
            page = PeopleQueue(LabelStore(tmp_path))
            while not done.is_set():
                page.refresh()
                for asked in [one for one in page.asked.values() if one.is_open and name not in one.answers]:
                    choice = (rule or by_digest)(asked.question)
                    facts = {"ticket": new_ticket(), "client": name, "seconds": 3.0, "when": time.time()}
                    page.add(Said(question=asked.question.id, name=name, choice=choice, **facts))  # pyright: ignore[reportArgumentType]
                page.keep(undo_s=0)
                time.sleep(0.005)

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()

    yield start
    done.set()
    for thread in threads:
        thread.join()


def judge(folder: Path, agreement: int = 1, **settings) -> HumanJudge:
    config = JudgeConfig(backend="human", human=HumanConfig(agreement=agreement))
    return HumanJudge(config, LabelStore(folder), **settings)


def pairs(count: int = 3) -> list[Query]:
    images = np.random.default_rng(0).integers(0, 256, (count, 2, 1, 8, 8, 3), np.uint8)
    return [Query(goal="open it", left=left, right=right) for left, right in images]


def test_a_person_keeps_the_contract_of_a_judge(tmp_path, answer):
    answer()
    check_judge(judge(tmp_path))


def test_it_asks_once_in_either_order_and_after_a_crash(tmp_path, answer):
    asked, queries = judge(tmp_path, is_stopped=lambda: True), pairs()
    verdicts = asked.compare([*queries, queries[0].swapped])
    assert {verdict.status for verdict in verdicts} == {Status.FAILED} and "labels ask" in verdicts[0].text
    assert asked.waiting() == 3
    assert PeopleQueue(LabelStore(tmp_path)).askers() == "alive"
    answer()
    straight, swapped = judge(tmp_path).compare(queries), judge(tmp_path).compare([query.swapped for query in queries])
    assert [verdict.label for verdict in straight] == [verdict.label and verdict.label.swapped for verdict in swapped]
    assert straight[0].latency_s == 3.0 and straight[0].question != swapped[0].question
    assert asked.waiting() == 0 and asked.answered(queries) == [True] * 3
    assert len(list(LabelStore(tmp_path).answers())) == 3
    assert LabelStore(tmp_path).has_images(next(LabelStore(tmp_path).answers()).question)


def test_disagreement_is_no_preference_and_a_skipped_question_is_invalid(tmp_path, answer):
    clip = Clip(goal="open it", frames=pairs()[0].left)
    answer("anna", lambda question: 2 if question.kind == "score" else "left")
    answer("ben", lambda question: 5 if question.kind == "score" else "right")
    asked = judge(tmp_path, agreement=2)
    assert [(verdict.status, verdict.label) for verdict in asked.compare(pairs(1))] == [
        (Status.NO_PREFERENCE, Label.TIE)
    ]
    assert [score.value for score in asked.score([clip])] == [0.625]
    answer("eve", lambda question: "skip")
    alone = judge(tmp_path, each_order=True)
    assert alone.compare(pairs(1)) != [], "asked of two already"
    [verdict] = judge(tmp_path, agreement=3).compare(pairs(2)[1:])
    assert verdict.status is Status.NO_PREFERENCE, "left, right and skipped"


def test_it_is_built_from_a_config_with_a_store_and_from_none_without(tmp_path):
    with pytest.raises(JudgeUnavailable, match="none is named"):
        build_judge(JudgeConfig(backend="human"))
    built = build_judge(JudgeConfig(backend="human", store=str(tmp_path)))
    assert isinstance(built, HumanJudge) and str(tmp_path) in built.where
    with pytest.raises(ValueError, match="draws the sides at random"):
        JudgeConfig(backend="human", both_orders=True)
    with pytest.raises(ValueError, match=r"judge\.human\.agreement must be >= 1"):
        HumanConfig(agreement=0)
