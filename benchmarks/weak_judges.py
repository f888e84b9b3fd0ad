"""Comparison of ways to ask a weak judge and to fit its answers, by the resulting reward model.

    python benchmarks/weak_judges.py --out weak_judges.csv

Simulated judges of known quality answer about pairs of images of drawer_open, spread evenly over the gaps in true
progress. Each way of asking spends the same number of answers, unless its name says more; a reward model is fitted to
the labels and orders new pairs, played with other seeds, by true progress. No policy is trained, so that many ways,
judges and seeds take minutes. A judge errs at random, anew in each order of a pair and in each member of a committee,
but for a share of pairs on which it gets every question wrong (`hard`): real judges err about the same pairs again.
"""

import csv
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from rlvlm.core.steps import Segment
from rlvlm.envs.images import FrameStore
from rlvlm.envs.registry import make_env, task_env
from rlvlm.judge_bench.items import Item
from rlvlm.judge_bench.prediction import worth_of
from rlvlm.judge_bench.suites import Suite
from rlvlm.judge_bench.task_items import make_items
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Examples
from rlvlm.preferences.networks import reward_input
from rlvlm.preferences.reward_model import RewardModel
from rlvlm.rewards.config import StepRewardConfig

PX = 64
MODEL = RewardModelConfig(ensemble=1, hold_out_every=0, min_updates=400, max_updates=400)
"""All ways train for as long; a fit to wrong labels ends no earlier than one to right ones."""
UNDECIDED = 0.5
Labels = NDArray[np.float64]
"""[N] P(right is nearer): 0, 1 or `UNDECIDED`."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A simulated judge of pairs."""

    accuracy: float
    """Share of decided answers that are right, with `hard` pairs counted in."""
    undecided: float = 0.0
    left: float = 0.0
    """Share of decided answers that name the left side without looking."""
    hard: float = 0.0
    """Share of pairs that it always gets wrong."""

    def ask(self, is_right: NDArray[np.bool_], is_hard: NDArray[np.bool_], rng: np.random.Generator) -> Labels:
        """One answer about each pair [N], of which `is_right` [N] says where the right side is nearer."""
        on_others = (self.accuracy / (1 - self.left) if self.left else self.accuracy) / (1 - self.hard)
        looks_right = np.where(is_hard, False, rng.random(len(is_right)) < min(on_others, 1.0))
        answers = (is_right == looks_right).astype(float)
        answers[rng.random(len(answers)) < self.left] = 0.0
        answers[rng.random(len(answers)) < self.undecided] = UNDECIDED
        return answers


JUDGES = {
    "right in 60 %": Judge(accuracy=0.6),
    "right in 70 %": Judge(accuracy=0.7),
    "right in 85 %": Judge(accuracy=0.85),
    "right in 70 %, half of them always": Judge(accuracy=0.7, hard=0.15),
    "right in 85 %, half undecided": Judge(accuracy=0.85, undecided=0.5),
    "left in 40 %": Judge(accuracy=0.54, left=0.4),
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of asking for labels and of learning from them."""

    questions: int = 1
    """Answers that are paid for, in multiples of the budget."""
    answers: int = 1
    """To each pair, by members of a committee or, `swaps`, in both orders."""
    swaps: bool = False
    ties_count: bool = False
    """Whether a pair without a preference trains as one half."""
    smoothing: Callable[[float], float] = lambda accuracy: 0.0
    """Smoothing of labels, from how often decided ones are right."""


WAYS = {
    "each pair once": Way(),
    "twice the questions": Way(questions=2),
    "four times the questions": Way(questions=4),
    "both orders, half the pairs": Way(answers=2, swaps=True),
    "both orders, all pairs": Way(questions=2, answers=2, swaps=True),
    "majority of three, a third of the pairs": Way(answers=3),
    "majority of three, all pairs": Way(questions=3, answers=3),
    "undecided counts as one half": Way(ties_count=True),
    "labels smoothed by .2": Way(smoothing=lambda accuracy: 0.2),
    "labels as sure as the judge is right": Way(smoothing=lambda accuracy: min(2 * (1 - accuracy), 0.99)),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared."""

    out: Path = Path("weak_judges.csv")
    budget: int = 400
    """Answers that each way has, in multiples as its name says."""
    seeds: int = 3
    task: str = "drawer_open"


def pairs_of(task: str, count: int, seed: int) -> list[Item]:
    """`count` pairs of the bench, by episodes that no other seed plays."""
    suite = Suite(name="pairs", tasks=(task,), episodes=36, pairs=count, videos=0, controls=0, tracks=0)
    made = make_items(suite, task, task_env(task), PX, seed, asks_turns=False).closed()
    return [item for item in made.items if item.is_pair and item.case == "pair"]


def labels_of(way: Way, judge: Judge, is_right: NDArray[np.bool_], rng: np.random.Generator) -> Labels:
    """[N] what is concluded from the answers about each pair."""
    is_hard = rng.random(len(is_right)) < judge.hard
    answers = []
    for number in range(way.answers):
        swapped = way.swaps and number % 2 == 1
        answer = judge.ask(is_right != swapped, is_hard, rng)
        answers.append(1 - answer if swapped else answer)
    votes = np.sign(np.sum([2 * answer - 1 for answer in answers], axis=0))  # two that disagree cancel
    return (votes + 1) / 2


def segment(snapshot: NDArray[np.float32]) -> Segment:
    """A segment of one step, of which nothing but the image is looked at."""
    nothing = np.zeros((1, 1), np.float32)
    return Segment(
        obs=nothing, actions=nothing, next_obs=nothing, snapshots=snapshot, env_rewards=nothing[0], progress=nothing[0]
    )


def main(settings: Settings) -> None:
    """Writes a row for each judge, way and seed, and prints the means."""
    torch.set_num_threads(1)
    most = settings.budget * max(way.questions // way.answers for way in WAYS.values())
    train, test = pairs_of(settings.task, most, 0), pairs_of(settings.task, 400, 1)
    env = make_env(settings.task, task_env(settings.task), 0)
    frames = FrameStore(env, PX, 20_000)
    rows = []
    for seed in range(settings.seeds):
        order = np.random.default_rng(seed).permutation(len(train))
        for judge_name, judge in JUDGES.items():
            for way_name, way in WAYS.items():
                rng = np.random.default_rng((seed, 1))
                chosen = [train[place] for place in order[: settings.budget * way.questions // way.answers]]
                labels = labels_of(way, judge, np.array([item.gap > 0 for item in chosen]), rng)
                correct = labels == np.array([float(item.gap > 0) for item in chosen])
                decided = labels != UNDECIDED
                right = float(correct[decided].mean())
                found = Examples(2)
                found.add(
                    [
                        ((segment(item.sides[0]), segment(item.sides[1])), float(label))
                        for item, label in zip(chosen, labels, strict=True)
                        if label != UNDECIDED or way.ties_count
                    ]
                )
                config = replace(MODEL, label_smoothing=way.smoothing(right))
                model = RewardModel(reward_input(env, frames, StepRewardConfig(), config), config, seed)
                model.fit(found)
                row = {
                    "judge": judge_name,
                    "way": way_name,
                    "seed": seed,
                    "labels": int(decided.sum()),
                    "labels_right": round(right, 3),
                    "worth": round(worth_of(float(correct.mean()), float((decided & ~correct).mean())), 3),
                    "pairs_ordered": round(ordered(model, test), 4),
                }
                rows.append(row)
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()
                with settings.out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, list(row))
                    writer.writeheader()
                    writer.writerows(rows)
    for way_name in WAYS:
        means = [
            f"{statistics.mean(r['pairs_ordered'] for r in rows if (r['judge'], r['way']) == (name, way_name)):.3f}"
            for name in JUDGES
        ]
        sys.stdout.write(f"| {way_name} | {' | '.join(means)} |\n")


def ordered(model: RewardModel, pairs: list[Item]) -> float:
    """Share of pairs that the reward orders as their true progress does."""
    examples = Examples(2)
    examples.add([((segment(item.sides[0]), segment(item.sides[1])), float(item.gap > 0)) for item in pairs])
    rows, places = model.ensemble.rows(examples)
    with torch.no_grad():
        returns = model.ensemble.mean_returns(rows, places)
    agrees = (returns[:, 1] > returns[:, 0]).numpy() == (examples.targets > UNDECIDED)
    return float(agrees.mean())


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
