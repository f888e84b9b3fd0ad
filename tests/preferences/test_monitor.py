"""The watch over a teacher's labels, by labels and evaluations made by hand."""

from collections.abc import Callable
from functools import partial

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


def labels(
    count: int, worth: Callable[[float], float], rng: np.random.Generator, wrong: float = 0.0, least: float = 0.0
) -> list[object]:
    """Labels of pairs of any progress from `least` on by what a judge takes them for, a share `wrong` at random."""
    found: list[object] = []
    for index in range(count):
        left, right = rng.uniform(least, 1, 2).tolist()
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


def unsteady(rng: np.random.Generator, progress: float) -> float:
    return progress + 0.1 * rng.normal()


def test_figures_by_hand():
    watch, rng = LabelMonitor(LabelMonitorConfig()), np.random.default_rng(0)
    assert watch.report() == {}
    watch.note(labels(200, lambda progress: progress, rng))
    assert watch.report() == {metrics.JUDGE_ALARM: 0, metrics.JUDGE_CLEAR_RIGHT: 1, metrics.JUDGE_WORST_PART: 0}


@pytest.mark.parametrize("wrong", [0.0, 0.1, 0.2, 0.25])
def test_labels_that_are_wrong_at_random_give_no_alarm(wrong):
    for seed in range(4):
        watch, rng = LabelMonitor(LabelMonitorConfig()), np.random.default_rng(seed)
        for _ in range(20):
            watch.note(labels(100, lambda progress: progress, rng, wrong))
        assert watch.alarm == ""


def test_a_judge_that_cannot_tell_small_gaps_gives_no_alarm_once_the_policy_stays_near_the_goal():
    for seed in range(5):
        watch, rng = LabelMonitor(LabelMonitorConfig()), np.random.default_rng(seed)
        for update in range(20):  # in the end all sides are within .1
            watch.note(labels(100, partial(unsteady, rng), rng, least=min(update / 15, 0.9)))
        assert watch.alarm == ""


def test_a_judge_that_is_wrong_near_the_goal_gives_an_alarm_once_the_policy_is_there():
    watch, rng = LabelMonitor(LabelMonitorConfig()), np.random.default_rng(0)
    watch.note(labels(400, lambda progress: progress, rng))  # before the policy gets beyond where it is right
    for _ in range(4):
        watch.note(labels(100, best_at_65, rng))
    assert watch.report()[metrics.JUDGE_ALARM] == 9 and "likes something better" in watch.alarm


def known_pairs(count: int) -> list[dict[str, object]]:
    """Known pairs of a snapshot of one number, the progress; the right side is nearer in every second one."""
    sides = [(0.2, 0.8) if index % 2 else (0.8, 0.2) for index in range(count)]
    none = np.zeros((0, 1), np.float32)
    return [
        {"snapshots": np.array(pair)[:, None], "paths": [none, none], "truth": np.array(pair, np.float32)}
        for pair in sides
    ]


@pytest.mark.parametrize(
    ("later", "kind"), [(range(20), 0), (range(2, 20), 0), (range(12, 20), 8)], ids=["as before", "two", "most"]
)
def test_known_pairs_that_are_answered_otherwise_are_an_alarm_without_truth(later, kind):
    """Of 20 pairs the judge was right about all, and is right about those of `later` in the sixth session."""
    watch = LabelMonitor(LabelMonitorConfig())
    watch.expect(known_pairs(24))
    pairs = watch.known_pairs(0)
    assert len(pairs) == 20 and not watch.known_pairs(4)
    assert pairs[1].right.progress == pytest.approx(0.8) and pairs[0].left.snapshots == pytest.approx(0.8)
    right = ["right" if index % 2 else "left" for index in range(20)]
    watch.note_known(right)
    watch.note_known([label if index in later else "tie" for index, label in enumerate(right)])
    watch.note(labels(10, lambda progress: progress, np.random.default_rng(0)))
    figures = watch.report()
    assert figures[metrics.JUDGE_ALARM] == kind
    assert figures[metrics.JUDGE_KNOWN_SHIFT] == pytest.approx(len(later) / 20 - 1)
    assert ("no longer the judge" in watch.alarm) == bool(kind)


@pytest.mark.parametrize(("learned", "kind"), [(-1, 11), (1, 0)], ids=["against the truth", "with it"])
def test_a_learned_return_that_rises_while_the_truth_falls_is_an_alarm(learned, kind):
    watch, rng = LabelMonitor(LabelMonitorConfig()), np.random.default_rng(0)
    for number in range(8):
        watch.note_evaluation(learned * number, number)
    watch.note(labels(10, lambda progress: progress, rng))
    assert watch.report()[metrics.JUDGE_ALARM] == kind


def test_labels_by_chance_end_a_run_that_is_to_stop():
    watch, rng = LabelMonitor(LabelMonitorConfig(on_alarm="stop")), np.random.default_rng(0)
    with pytest.raises(RewardHacked, match="clear labels"):
        watch.note(labels(300, lambda _: float(rng.random()), rng))
