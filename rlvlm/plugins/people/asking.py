"""Serves the page for `rlvlm labels ask`, and says what people have answered."""

import random
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlvlm.core.console.signals import StopRequest
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.recordings import find_form
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.records import PERSON_PREFIX, Question
from rlvlm.labels.store import LabelStore, is_store, open_store
from rlvlm.plugins.people.config import AskArguments, HumanConfig
from rlvlm.plugins.people.page import label_page, person_judge
from rlvlm.plugins.people.queue import PeopleQueue, people_lines
from rlvlm.reports.options import ScoreOptions
from rlvlm.reports.score import score_data
from rlvlm.runs.files.folder import check_trust, find_folder, label_store

_LINE_EVERY_S = 15.0
"""Minimum interval between two progress lines, in seconds."""


def ask(arguments: AskArguments) -> str:
    """Serves the page until Ctrl-C, or until recorded data are all answered, and returns a summary of the answers."""
    store, is_waited_for = _find_store(arguments.place, trust=arguments.trust)
    if store is None:
        return _ask_about_data(arguments)
    queue = PeopleQueue(store)
    queue.refresh()
    is_waited_for = is_waited_for or bool(queue.asked)
    if arguments.questions == "answered" or (arguments.questions == "auto" and not is_waited_for):
        questions = _of_other_judges(store)
        random.Random(arguments.seed).shuffle(questions)
        queue.ask(questions[: arguments.max_questions], agreement=arguments.agreement)
    before, last_line, last_text = _num_answers(queue), 0.0, ""
    with StopRequest() as stop, label_page(store, arguments.page, _say):
        _say("Ctrl-C ends the page; nothing is lost by that")
        while not stop:
            queue.refresh()
            text = f"{_num_answers(queue) - before:,} answered, {queue.waiting():,} questions wait"
            if text != last_text and time.monotonic() - last_line > _LINE_EVERY_S:
                _say(text)
                last_line, last_text = time.monotonic(), text
            time.sleep(0.2)
    queue.refresh()
    lines = [f"{_num_answers(queue) - before:,} answered now, {queue.waiting():,} questions wait\n"]
    return "".join(lines + people_lines(store))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()  # a link is of no use in a buffer


def _find_store(place: Path, *, trust: bool) -> tuple[LabelStore | None, bool]:
    """Returns the store of a path, None for recorded data, and whether a run asks people; else raises UsageError. A
    run may name a store elsewhere, which is read and written, so its settings must be trusted.
    """
    if is_store(place):
        return open_store(place), False
    with suppress(UsageError):
        find_form(place)
        return None, False
    try:
        folder = find_folder(place)
    except UsageError as error:
        what = f"{place} is neither a run's folder, a label store, nor recorded data" if place.exists() else str(error)
        raise UsageError(
            what, "name one like runs/TASK/<time>, its labels, or data that `rlvlm score` reads"
        ) from error
    check_trust([folder.path], trust=trust)
    config = folder.config()
    return label_store(folder, config), config.judge.is_human or config.kind.asks_person(config)


def _of_other_judges(store: LabelStore) -> list[Question]:
    """Returns the questions that a judge, not a person, has answered, each once, if all of their images exist."""
    found = {
        item.question.id: item.question
        for item in store.answers()
        if not item.answer.stamp.judge.startswith(PERSON_PREFIX)
    }
    return [question for question in found.values() if store.has_images(question)]


def _ask_about_data(arguments: AskArguments) -> str:
    people: dict[str, Any] = {"human": HumanConfig(agreement=arguments.agreement)}  # the section of this guest
    options = ScoreOptions(
        data=arguments.place,
        judge=JudgeConfig(backend="human", **people),
        goal=arguments.goal,
        camera=arguments.camera,
        ask=("pairs",),
        every=arguments.every,
        pairs=arguments.pairs,
        preflight=0,
        trust=arguments.trust,
        seed=arguments.seed,
    )
    score_data(options, partial(person_judge, page=arguments.page))
    return ""


def _num_answers(queue: PeopleQueue) -> int:
    return sum(len(asked.said) for asked in queue.asked.values())
