"""A simulated person on the page of `rlvlm judge-bench FILE.zip --judge.backend human`, for a row of the table.

    rlvlm judge-bench tiny.zip --judge.backend human --name "NAME" --out person > person.log &
    python benchmarks/simulated_person.py tiny.zip --link "$(grep -o 'http://[^ ]*' person.log)"

Answers over HTTP what the page shows, and is wrong in a share of the answers: the other side of a pair, or a rating
that is two steps off. What is true it knows from the file, by the content of the images.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tyro

from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.judge_bench.asking import ask
from rlvlm.judge_bench.bench import make_task
from rlvlm.judge_bench.suites import find_suite, questions_of_person
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.records import describe


@dataclass(frozen=True, kw_only=True)
class Person:
    """The person, and where they answer."""

    file: tyro.conf.Positional[Path]
    """The frozen suite, with its images."""
    link: str
    """As the bench prints it, with the token."""
    mistake: float = 0.05
    """Share of wrong answers, in [0, 1]."""
    seconds: float = 4.0
    """Said of each answer; nobody waits so long."""
    seed: int = 0


class Listener:
    """A judge that notes what it is asked."""

    stamp = Stamp(judge="listener", revision="", prompt="", decoding="")

    def __init__(self) -> None:
        self.asked: list[str] = []

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        self.asked += [describe(query)[0].id for query in queries]
        return [Verdict(status=Status.INVALID, label=None, stamp=self.stamp)] * len(queries)

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        self.asked += [describe(clip)[0].id for clip in clips]
        return [Score(status=Status.INVALID, value=None, stamp=self.stamp)] * len(clips)


def truths(file: Path) -> dict[str, tuple[float, ...]]:
    """True progress of each side of each question that a person is asked, by the question's id."""
    suite, listener, found = find_suite(str(file)), Listener(), dict[str, tuple[float, ...]]()
    assert suite.frozen is not None, "a frozen suite"
    for task in suite.tasks:
        made = make_task(suite, task, size_px=JudgeConfig(backend="human").image_px, seed=0, asks_turns=False)
        frames = min(8, suite.frozen.frames)
        for block in ask(listener, made, frames, 0, most=questions_of_person(suite)):
            for answer, question in zip(block, listener.asked[-len(block) :], strict=True):
                item = made.items[answer.item]
                truth = item.truth if item.is_pair else (1.0 if item.success else min(item.truth[-1], 0.9),)
                found[question] = truth[::-1] if answer.swapped else truth
    return found


def main(person: Person) -> None:
    """Answers until the page is gone."""
    known, rng = truths(person.file), np.random.default_rng(person.seed)
    # so many and not so many on average: of forty answers chance alone would make none wrong, or five
    wrong = set(rng.choice(sorted(known), round(person.mistake * len(known)), replace=False).tolist())
    page, count = httpx.Client(follow_redirects=True, timeout=30), 0
    page.get(person.link).raise_for_status()
    base, client = person.link.split("/?")[0], "0123456789abcdef"

    def post(path: str, **body: Any) -> dict[str, Any]:
        return page.post(f"{base}/{path}", json={"client": client, **body}).raise_for_status().json()

    while True:
        try:
            shown = post("next")["shown"]
            while shown:
                is_wrong, truth = shown["question"] in wrong, known[shown["question"]]
                if shown["kind"] == "score":
                    rating = 1 + round(4 * truth[0])
                    choice: int | str = rating if not is_wrong else rating + 2 if rating < 4 else rating - 2
                else:
                    # sides are shown exchanged in half of the showings, which the last digit of the ticket says
                    left, right = truth[::-1] if int(shown["ticket"][-1], 16) & 1 else truth
                    choice = "equal" if left == right else "left" if (left > right) != is_wrong else "right"
                said = {"question": shown["question"], "ticket": shown["ticket"], "seconds": person.seconds}
                shown, count = post("answer", choice=choice, **said)["shown"], count + 1
        except httpx.ConnectError:  # the bench has all answers
            sys.stdout.write(f"{count} answers\n")
            return
        time.sleep(0.3)


if __name__ == "__main__":
    main(tyro.cli(Person, description=__doc__))
