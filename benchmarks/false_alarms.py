"""How often does the monitor accuse an honest judge? Simulated runs with judges that are wrong at random, or smooth.

    python benchmarks/false_alarms.py

In each run a policy gets better in 60 updates of 64 episodes, until 95 % succeed. A judge of calls says success or
failure, and is wrong in a share of all answers, whatever it is asked: the preflight's known items, episodes, controls,
and known items shown again; half of its runs have graded scores around its call. A smooth judge scores how near the
thing ends to the goal, on both sides of the edge of success, with noise: while the policy learns, failures come close
and score nearly as much as successes, and rightly so. A smooth judge whose best is short of the goal, which a policy
follows there, must be accused.
"""

import argparse
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlvlm.core.judging import Score, Stamp, Status
from rlvlm.core.steps import FloatArray
from rlvlm.rewards.config import MonitorConfig
from rlvlm.rewards.monitor import JudgeMonitor
from rlvlm.rewards.scoring_items import ScoringItem

UPDATES, EPISODES, KNOWN = 60, 64, 24
EDGE = 0.1
"""Distance from the goal, which is at 1, up to which an episode is a success."""
STAMP = Stamp(judge="simulated", revision="1", prompt="none", decoding="")


class Calls:
    """Scorer that calls an end near the goal a success, and is wrong in a share of its answers."""

    num_asked = 0

    def __init__(self, wrong: float, graded: bool, rng: np.random.Generator) -> None:
        self._wrong, self._graded, self._rng = wrong, graded, rng

    def values(self, places: FloatArray) -> FloatArray:
        """Returns the scores of ends at `places` [N]."""
        calls = (places > 1 - EDGE) ^ (self._rng.random(len(places)) < self._wrong)
        return 0.2 + 0.6 * calls + (0.2 * self._rng.random(len(places)) if self._graded else 0.0)

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Returns one score per item, in order; of another goal, that of the start."""
        places = np.array([item.snapshots[-1, 0] if item.goal == "go" else 0.0 for item in items])
        return [Score(status=Status.OK, value=float(value), stamp=STAMP) for value in self.values(places)]


class Smooth(Calls):
    """Scorer of the distance from its `best` place, in shares of the way, with noise."""

    def __init__(self, noise: float, best: float, rng: np.random.Generator) -> None:
        self._noise, self._best, self._rng = noise, best, rng

    def values(self, places: FloatArray) -> FloatArray:
        """Returns the scores of ends at `places` [N]."""
        return np.clip(1 - np.abs(places - self._best) + self._noise * self._rng.normal(size=len(places)), 0, 1)


def episode(place: float, goal: str = "go") -> ScoringItem:
    """Returns an episode of two moments of two columns: the thing, which starts at 0 and ends at `place`, and the robot
    behind it.
    """
    moments = np.array([[0.0, 0.0], [place, 1.0]], np.float32)
    return ScoringItem(goal=goal, snapshots=moments, is_success=place > 1 - EDGE, progress=place)


def alarm_of(
    make: type[Calls], error: float, seed: int, *, has_preflight: bool, uses_truth: bool, best: float = 1.0
) -> tuple[int, int]:
    """Returns the kind of alarm of one run, 0 without one, and the update at which it was raised.

    Args:
        make: kind of judge.
        error: share of wrong answers, or noise.
        seed: seed of the run.
        has_preflight: whether the judge was asked about known items before.
        uses_truth: whether the simulator's truth is known.
        best: place that a smooth judge likes best, and to which its policy goes.
    """
    rng = np.random.default_rng((seed, int(1000 * error)))
    scorer = Smooth(error, best, rng) if make is Smooth else Calls(error, bool(seed % 2), rng)
    watch = JudgeMonitor(MonitorConfig(uses_truth=uses_truth), 0.5, robot_columns=[1])
    # successes end as soon as they succeed
    known = [episode(1 - EDGE * rng.random() if number % 2 == 0 else 0.8 * rng.random()) for number in range(2 * KNOWN)]
    first, truths = [score.value or 0.0 for score in scorer.score(known)], [bool(item.is_success) for item in known]
    if has_preflight:
        watch.expect(first, truths)
    for update in range(UPDATES):
        items = [episode(place) for place in _ends(update / UPDATES, best, rng)]
        scores = scorer.score(items)
        # a second goal of the run, so that controls with another goal count
        shown = [*items[:-1], episode(0.0, "elsewhere")]
        watch.note_controls(watch.show_controls(scorer, shown, scores))
        if has_preflight and update % 20 == 19:
            watch.note_again(scorer.score(known[:20]), first[:20], truths[:20])
        watch.note([score.value or 0.0 for score in scores], [bool(item.is_success) for item in items])
        if watch.alarm:
            return int(watch.report()["judge/alarm"]), update
    return 0, UPDATES


def _ends(done: float, best: float, rng: np.random.Generator) -> FloatArray:
    """Returns where the episodes of an update end, [EPISODES], after a share `done` of the run: about `best`, ever
    nearer. Of those about the goal 10 % succeed at first, and 95 % at the end.
    """
    spread = 0.8 * (0.05 / 0.8) ** done
    return np.clip(best - np.abs(rng.normal(size=EPISODES)) * spread, 0, 1)


SETTINGS = (
    {"has_preflight": True, "uses_truth": True},
    {"has_preflight": False, "uses_truth": True},
    {"has_preflight": True, "uses_truth": False},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    runs = parser.parse_args().runs
    print("judge | runs with an alarm of each kind, and its mean update: with preflight | without | without truth")
    rows = [(f"calls, {share:.0%} wrong", Calls, share, 1.0) for share in (0.0, 0.05, 0.10, 0.15, 0.20, 0.25)]
    rows += [(f"smooth, noise {noise:g}", Smooth, noise, 1.0) for noise in (0.0, 0.03, 0.1)]
    rows += [(f"smooth, best at {best:g}", Smooth, 0.03, best) for best in (0.5, 0.7, 0.85)]
    for name, make, error, best in rows:
        cells = []
        for settings in SETTINGS:
            found = [alarm_of(make, error, seed, best=best, **settings) for seed in range(runs)]
            kinds = Counter(kind for kind, _ in found)
            of = ", ".join(
                f"kind {kind}: {count} at {np.mean([at for each, at in found if each == kind]):.0f}"
                for kind, count in sorted(kinds.items())
                if kind
            )
            cells.append(f"{runs - kinds[0]} of {runs}" + (f" ({of})" if of else ""))
        print(f"{name} | {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
