"""The watch over a teacher's labels, by labels and evaluations made by hand."""

from collections.abc import Callable

import numpy as np
import pytest

from rlvlm.core import metrics
from rlvlm.core.judging import Label, Stamp, Status, Verdict
from rlvlm.core.steps import Pair, Segment
from rlvlm.preferences.monitor import LabelMonitor
from rlvlm.preferences.records import QueryRecord
from rlvlm.rewards.config import LabelMonitorConfig
from rlvlm.rewards.monitor import RewardHacked

STAMP = Stamp(judge="by_hand", revision="1", prompt="pairs/1", decoding="")


def segment(progress: float) -> Segment:
    one = np.full((1, 1), progress, np.float32)
    return Segment(
        obs=one, actions=one, next_obs=one, snapshots=one, env_rewards=one[0], progress=one[0]
    )  # fmt: skip


def labels(count: int, worth: Callable[[float], float], rng: np.random.Generator, wrong: float = 0.0) -> list[object]:
    """Labels of pairs of any progress by what a judge takes them for, a share of them `wrong` at random."""
    found: list[object] = []
    for index in range(count):
        left, right = rng.random(2).tolist()
        label = Label.of(worth(left), worth(right))
        label = label.swapped if rng.random() < wrong else label
        found.append(
            QueryRecord(
                env_step=0, session=0, index=index, timestamp=0.0, pair=Pair(left=segment(left), right=segment(right)),
                verdict=Verdict(status=Status.of(label), label=label, stamp=STAMP),
            )
        )  # fmt: skip
    return found


def best_at_65(progress: float) -> float:
    return progress if progress <= 0.65 else 0.65 - 0.4 * (progress - 0.65)


def test_figures_by_hand() -> None:
    watch, rng = LabelMonitor(LabelMonitorConfig()), np.random.default_rng(0)
    assert watch.report() == {}
    watch.note(labels(200, lambda progress: progress, rng))
    assert watch.report() == {
        metrics.JUDGE_ALARM: 0,
        metrics.JUDGE_CLEAR_RIGHT: 1,
        metrics.JUDGE_WORST_PART: 0,
    }


@pytest.mark.parametrize("wrong", [0.0, 0.1, 0.2, 0.25])
def test_labels_that_are_wrong_at_random_give_no_alarm(wrong: float) -> None:
    for seed in range(10):
        watch, rng = LabelMonitor(LabelMonitorConfig()), np.random.default_rng(seed)
        for _ in range(20):
            watch.note(labels(100, lambda progress: progress, rng, wrong))
        assert watch.alarm == ""


def test_a_judge_that_is_wrong_near_the_goal_gives_an_alarm_once_the_policy_is_there() -> None:
    watch, rng = LabelMonitor(LabelMonitorConfig()), np.random.default_rng(0)
    watch.note(labels(400, lambda progress: progress, rng))  # before the policy gets beyond where it is right
    for _ in range(4):
        watch.note(labels(100, best_at_65, rng))
    assert watch.report()[metrics.JUDGE_ALARM] == 9 and "likes something better" in watch.alarm


@pytest.mark.parametrize(("learned", "kind"), [(-1, 11), (1, 0)], ids=["against the truth", "with it"])
def test_a_learned_return_that_rises_while_the_truth_falls_is_an_alarm(learned: int, kind: int) -> None:
    watch, rng = LabelMonitor(LabelMonitorConfig()), np.random.default_rng(0)
    for number in range(8):
        watch.note_evaluation(learned * number, number)
    watch.note(labels(10, lambda progress: progress, rng))
    assert watch.report()[metrics.JUDGE_ALARM] == kind


def test_labels_by_chance_end_a_run_that_is_to_stop_and_the_alarm_outlives_a_checkpoint() -> None:
    watch, rng = LabelMonitor(LabelMonitorConfig(on_alarm="stop")), np.random.default_rng(0)
    with pytest.raises(RewardHacked, match="clear labels"):
        watch.note(labels(300, lambda _: float(rng.random()), rng))
    again = LabelMonitor(LabelMonitorConfig())
    again.set_state(watch.get_state())
    assert again.alarm == watch.alarm and again.report() == watch.report()
