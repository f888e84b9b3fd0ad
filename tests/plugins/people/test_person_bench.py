"""A person is benched like any judge: answered through the page, stopped and resumed."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rlvlm.core.console.signals import StopRequest
from rlvlm.core.errors import EXIT_DONE, EXIT_PREEMPTED
from rlvlm.envs.registry import task_env
from rlvlm.judge_bench.suites import SUITES, find_suite, for_person
from rlvlm.judge_bench.task_items import make_items
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.store import LabelStore
from rlvlm.plugins.people import page as label_page
from rlvlm.reports.judge_bench import bench_judge
from rlvlm.reports.options import BenchOptions


def test_a_person_is_asked_about_forty_questions():
    for name, pairs in (("cartpole", 18), ("tiny", 3), ("paper7", 2), ("metaworld50", 2)):
        suite = for_person(find_suite(name))
        assert (suite.pairs, suite.videos, suite.controls, suite.tracks) == (pairs, 1, 0, 0)
    suite = for_person(SUITES["tiny"])
    assert suite == replace(SUITES["tiny"], episodes=8, pairs=3, videos=1, controls=0, tracks=0)
    items = make_items(suite, "cartpole", task_env("cartpole"), 48, 0, False).items
    # pairs are asked in both orders; nothing is asked again
    assert [item.kind for item in items] == ["pair"] * 3 + ["video"] * 4


@pytest.mark.slow
def test_a_person_is_measured_stopped_and_resumed(tmp_path, monkeypatch):
    """A first call is stopped after five answers; the second asks the rest, and each question was asked once."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(label_page, "LAST_UNDO_S", 0.0)
    asked: Counter[str] = Counter()
    ended = threading.Event()

    def person(link: str, is_enough: Callable[[], bool]) -> None:
        # the page ends with the bench, in the middle of a look for more
        with suppress(httpx.TransportError), httpx.Client(follow_redirects=True) as client:
            address = client.get(link).url

            def post(path: str, **body: Any) -> dict[str, Any]:
                return client.post(address.join(path), json={"client": "a", **body}).json()

            shown = None
            while not ended.is_set() and not is_enough():
                if shown is None:
                    time.sleep(0.02)
                    shown = post("/next")["shown"]
                    continue
                asked[shown["question"]] += 1
                choice = 4 if shown["kind"] == "score" else "left"
                shown = post("/answer", question=shown["question"], ticket=shown["ticket"], choice=choice, seconds=3)[
                    "shown"
                ]

    def run(is_enough: Callable[[], bool] = lambda: False) -> int:
        threads: list[threading.Thread] = []

        def listen(line: str) -> None:
            if link := re.search(r"http://\S+", line):
                threads.append(threading.Thread(target=person, args=(link[0], is_enough)))
                threads[-1].start()

        ended.clear()
        monkeypatch.setattr("rlvlm.reports.judge_bench._say", listen)
        try:
            human = JudgeConfig(backend="human")
            options = BenchOptions(suite="cartpole", judge=human, out=tmp_path / "bench", pairs=4, episodes=4)
            return bench_judge(options)
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    monkeypatch.setattr(StopRequest, "__bool__", lambda self: sum(asked.values()) >= 5)
    assert run(lambda: sum(asked.values()) >= 5) == EXIT_PREEMPTED
    monkeypatch.setattr(StopRequest, "__bool__", lambda self: False)
    assert run() == EXIT_DONE
    row = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert row["judge"]["judge"] == "human" and row["bench"]["is_whole"]
    assert set(asked.values()) == {1} and len(list(LabelStore(tmp_path / "bench" / "answers").answers())) == len(asked)
    assert row["figures"]["cost"]["answers_per_s"] == pytest.approx(1 / 3), "their own seconds, also of what was kept"
    assert (tmp_path / "bench" / "bench.html").stat().st_size > 10_000
