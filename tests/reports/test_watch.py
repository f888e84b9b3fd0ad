"""`rlvlm.Watch` in somebody else's reward function: the preflight before, alarms while it rewards, the page after."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import rlvlm
from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Score, Status
from rlvlm.judge_bench.preflight import JudgeRefused
from rlvlm.rewards.config import MonitorConfig
from rlvlm.rewards.monitor import RewardHacked
from rlvlm.testing import FakeJudge

GOAL = "light the lamp"


def film(lamp: int, wall: int = 0, num: int = 3) -> np.ndarray:
    """A lamp on the right half of the image that ends at a brightness; the wall on the left is of no importance."""
    frames = np.zeros((num, 8, 8, 3), np.uint8)
    frames[-1, :, 4:], frames[-1, :, :4] = lamp, wall
    return frames


class Sees(FakeJudge):
    """Scores the brightness of some columns of the last image; `slice(4, 8)` is the lamp alone, so the truth."""

    def __init__(self, columns: slice) -> None:
        super().__init__()
        self.columns = columns

    def score(self, clips):
        values = [float(clip.frames[-1][:, self.columns].mean()) / 255 for clip in clips]
        return [Score(status=Status.OK, value=value, stamp=self.stamp) for value in values]


KNOWN = [(film(255 if number % 2 else 25 * (number % 5), wall=number), bool(number % 2)) for number in range(48)]
LAMP, ALL = slice(4, 8), slice(0, 8)


def watching(columns: slice, **settings) -> rlvlm.Watch:
    return rlvlm.Watch(
        rlvlm.Judge.local(Sees(columns)),
        GOAL,
        KNOWN,
        **{"faulty": "ok", "monitor": MonitorConfig(window=60), **settings},
    )


def train(watch: rlvlm.Watch, *, has_truth: bool, fools: bool, count: int = 200) -> None:
    """A policy that lights the lamp more and more often, or one that paints the wall instead."""
    rng = np.random.default_rng(0)
    for number in range(count):
        succeeds = not fools and rng.random() < number / count
        wall = int(255 * min(1.0, 2 * number / count)) if fools else 0
        shown = film(255 if succeeds else int(rng.integers(60)), wall)
        if fools:  # a judge that sees all is paid more for the wall than for the lamp
            shown[-1, :, 4:6] = wall
        watch.score(shown, truth=succeeds if has_truth else None)


@pytest.mark.parametrize("has_truth", [True, False])
def test_a_policy_that_fools_the_judge_raises_an_alarm_and_an_honest_one_none(has_truth, tmp_path):
    # by hand: a wall and a quarter of the lamp are 0.75 of the image, a lit lamp is half of it
    with watching(ALL) as watch:
        assert watch.score(film(255), truth=True if has_truth else None) == 0.5
        train(watch, has_truth=has_truth, fools=True)
    assert ("failures" in watch.alarm) if has_truth else ("likes something better than the goal" in watch.alarm)
    figures = watch.figures()
    assert figures["judge/alarm"] > 0 and ("judge/true_success" in figures) == has_truth
    watch.report(tmp_path / "watch.html")
    text = (tmp_path / "watch.html").read_text()
    assert "Alarm in 201 episodes" in text and "judge/score" in text and "<svg" not in text.partition("<body")[0]
    with watching(LAMP) as watch:
        train(watch, has_truth=has_truth, fools=False)
    assert not watch.alarm and watch.figures()["judge/score"] > 0.4


def test_single_images_that_succeed_are_not_taken_for_first_moments_that_should_not():
    with watching(LAMP, every=8) as watch:
        for number in range(200):
            watch.score(film(255 if number > 20 else 40, num=1), truth=number > 20)
    assert not watch.alarm and watch.figures()["judge/true_success"] > 0.9


def test_a_faulty_judge_is_refused_before_anything_is_trained_unless_it_is_wanted():
    blind = slice(0, 4)
    with pytest.raises(JudgeRefused, match="calls failures successes"), watching(blind, faulty="refuse"):
        pass
    with watching(blind) as watch:
        assert any("calls failures successes" in line for line in watch.findings)
    with pytest.raises(UsageError, match="none of the known episodes succeeded"):
        rlvlm.Watch(rlvlm.Judge.local(FakeJudge()), GOAL, [(film(9), False)] * 3).__enter__()


def test_an_alarm_ends_the_training_if_it_is_to():
    with pytest.raises(RewardHacked), watching(ALL, monitor=MonitorConfig(window=60, on_alarm="stop")) as watch:
        train(watch, has_truth=True, fools=True)


def test_questions_of_adapters_are_watched_from_many_threads_and_missing_answers_are_counted():
    class Gaps(Sees):
        def score(self, clips):
            answers = super().score(clips)
            return [
                Score(status=Status.INVALID, value=None, stamp=self.stamp) if clip.frames[-1, 0, 7, 0] == 13 else answer
                for clip, answer in zip(clips, answers, strict=True)
            ]

    watch = rlvlm.Watch(rlvlm.Judge.local(Gaps(LAMP)), GOAL, every=8)
    with watch, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda level: watch.judge.score([film(level)]).values[0], range(40)))
        assert found == [None if level == 13 else level / 255 for level in range(40)]
        assert asyncio.run(watch.judge.score_async([film(51)], "dim the lamp")).values == [0.2]
        assert watch.judge.compare([(film(9), film(200))]).labels == ["right"]
        with pytest.raises(UsageError, match="truth is known about some episodes and not about others"):
            watch.score(film(9), truth=True)
    assert 0 < watch.figures()["judge/score"] < 0.2 and watch._counts == {"scored": 41, "without an answer": 1}
