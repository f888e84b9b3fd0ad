"""How often does the monitor accuse an honest judge? Simulated runs with a judge that is wrong at random.

    python benchmarks/false_alarms.py

In each run a policy rises from 30 to 95 % success in 60 updates of 64 episodes; the judge calls an episode a success
or a failure, and is wrong in a share of all answers, whatever it is asked: the preflight's known items, episodes,
controls, and known items shown again. Half of the runs have graded scores around its call.
"""

import argparse
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlvlm.core.judging import Score, Stamp, Status
from rlvlm.rewards.config import MonitorConfig
from rlvlm.rewards.monitor import JudgeMonitor
from rlvlm.rewards.scoring_items import ScoringItem

UPDATES, EPISODES, KNOWN = 60, 64, 24
STAMP = Stamp(judge="simulated", revision="1", prompt="none", decoding="")


class RandomErrors:
    """Scorer that calls a moment above 0.5 a success, and is wrong in a share of its answers."""

    num_asked = 0

    def __init__(self, share: float, graded: bool, rng: np.random.Generator) -> None:
        self._share, self._graded, self._rng = share, graded, rng

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Returns one score per item, in order."""
        calls = np.array([item.snapshots[-1, 0] > 0.5 and item.goal == "go" for item in items], bool)
        calls ^= self._rng.random(len(items)) < self._share
        values = 0.2 + 0.6 * calls + (0.2 * self._rng.random(len(items)) if self._graded else 0.0)
        return [Score(status=Status.OK, value=float(value), stamp=STAMP) for value in values]


def episode(success: bool, goal: str = "go") -> ScoringItem:
    """An episode of two moments of two columns: the thing, which is at 1 after a success, and the robot."""
    moments = np.array([[0.0, 0.0], [float(success), 1.0]], np.float32)
    return ScoringItem(goal=goal, snapshots=moments, is_success=success, progress=float(success))


def alarm_of(share: float, seed: int, *, has_preflight: bool, uses_truth: bool) -> int:
    """Returns the kind of alarm of one run; 0 without one."""
    rng = np.random.default_rng((seed, int(1000 * share)))
    scorer = RandomErrors(share, bool(seed % 2), rng)
    watch = JudgeMonitor(MonitorConfig(uses_truth=uses_truth), 0.5, robot_columns=[1])
    known = [episode(index % 2 == 0) for index in range(2 * KNOWN)]
    first, truths = [score.value or 0.0 for score in scorer.score(known)], [bool(item.is_success) for item in known]
    if has_preflight:
        watch.expect(first, truths)
    for update in range(UPDATES):
        rate = 0.3 + 0.65 * update / UPDATES
        items = [episode(bool(rng.random() < rate)) for _ in range(EPISODES)]
        scores = scorer.score(items)
        # a second goal of the run, so that controls with another goal count
        shown = [*items[:-1], episode(False, "elsewhere")]
        watch.note_controls(watch.show_controls(scorer, shown, scores))
        if has_preflight and update % 20 == 19:
            watch.note_again(scorer.score(known[:20]), first[:20], truths[:20])
        watch.note([score.value or 0.0 for score in scores], [bool(item.is_success) for item in items])
    return int(watch.report()["judge/alarm"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    runs = parser.parse_args().runs
    print("share wrong | runs with an alarm of each kind: with preflight | without | without truth")
    for share in (0.0, 0.05, 0.10, 0.15, 0.20, 0.25):
        cells = []
        for settings in (
            {"has_preflight": True, "uses_truth": True},
            {"has_preflight": False, "uses_truth": True},
            {"has_preflight": True, "uses_truth": False},
        ):
            kinds = Counter(alarm_of(share, seed, **settings) for seed in range(runs))
            of = ", ".join(f"kind {kind}: {count}" for kind, count in sorted(kinds.items()) if kind)
            cells.append(f"{runs - kinds[0]} of {runs}" + (f" ({of})" if of else ""))
        print(f"{share:.2f} | {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
