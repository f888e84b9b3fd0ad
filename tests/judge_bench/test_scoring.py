"""Recorded episodes are asked about side by side where the judge allows it, with the same answers."""

import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Score, Stamp, Status
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.judge_bench.scoring import Asked, score_episodes
from rlvlm.judges import side_by_side
from rlvlm.judges.cache import CachedJudge
from rlvlm.labels.images import image_digest
from rlvlm.labels.store import LabelStore

FRAMES, EPISODES = 40, 12
ASKED = Asked(questions=frozenset(["progress"]), every=1, grows=False, size_px=8)


class SlowJudge:
    """Scores by brightness after a moment, and counts what it is asked, and by how many at a time."""

    stamp = Stamp(judge="slow", revision="", prompt="none", decoding="")

    def __init__(self, at_once: int, failing: int = 0) -> None:
        self.at_once, self.failing = at_once, failing
        self.asked, self.most, self._now, self._lock = Counter[str](), 0, 0, threading.Lock()

    def compare(self, queries):
        raise NotImplementedError

    def score(self, clips):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            self.asked.update(image_digest(clip.frames) for clip in clips)
            number = sum(self.asked.values())
        time.sleep(0.05)
        with self._lock:
            self._now -= 1
        if self.failing and number >= self.failing:
            raise JudgeUnavailable("its budget is spent", "")
        return [Score(status=Status.OK, value=float(clip.frames.mean()) / 255, stamp=self.stamp) for clip in clips]


def films():
    """Episodes that all begin with the same image."""
    for number in range(EPISODES):
        shades = (np.arange(FRAMES) * (number + 1) % 251).astype(np.uint8)
        frames = np.tile(shades[:, None, None, None, None], (1, 1, 8, 8, 3))
        frames[1:, 0, 0, 0] = number + 1
        zeros = np.zeros((FRAMES, 1), np.float32)
        yield RobotTrajectory(
            name=f"e{number}", file=Path("x"), instruction="go", actions=zeros, proprio=zeros,
            look=lambda steps, frames=frames: frames[steps],
        )  # fmt: skip


def test_questions_side_by_side_have_the_same_answers_and_none_is_asked_twice(tmp_path):
    alone, many = SlowJudge(0), SlowJudge(256)
    one, other = (
        list(score_episodes(CachedJudge(judge, LabelStore(tmp_path / name)), films(), ASKED))
        for judge, name in ((alone, "one"), (many, "other"))
    )
    assert alone.most == 1 and many.most > 1
    assert many.asked == alone.asked and set(many.asked.values()) == {1}
    assert [episode.number for episode in other] == list(range(EPISODES))
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left.progress, right.progress)
        assert [(order, answer.item) for order, _, answer in left.rows] == [
            (order, answer.item) for order, _, answer in right.rows
        ]


def test_what_was_under_way_when_the_judge_ended_is_reported():
    episodes = []
    with pytest.raises(JudgeUnavailable):
        for episode in score_episodes(SlowJudge(256, failing=300), films(), ASKED):
            episodes.append(episode)
    assert episodes and all(len(episode.rows) == FRAMES for episode in episodes[:2])
    assert len(episodes) < EPISODES


def test_images_under_way_are_bounded(monkeypatch):
    monkeypatch.setattr(side_by_side, "MAX_BYTES_UNDER_WAY", 1)
    judge = SlowJudge(10_000)
    assert len(list(score_episodes(judge, films(), ASKED))) == EPISODES
    assert judge.most == 1


def test_one_slow_answer_does_not_hold_up_the_others():
    others, judge = threading.Event(), SlowJudge(64)

    def ask(number: int) -> int:
        if number == 20:
            others.set()
        return number if number or others.wait(60) else -1

    work = (side_by_side.Work(partial(ask, number)) for number in range(40))
    assert list(side_by_side.side_by_side(judge, work)) == list(range(40))
