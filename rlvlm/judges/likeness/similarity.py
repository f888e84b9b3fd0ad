"""Judging by likeness: how well an image fits the goal's words, or an image of the goal. `clip` and `blip2` use it.

These models do not read a question. A clip is scored by its last image, and of two clips the one with the better
last image is nearer to the goal. numpy only; which network sees is `Likeness`'s.

Source: Rocamonde et al. 2023 (VLM-RM), arXiv:2310.12921, sec. 3, for the regularised goal-baseline reward. Departure:
scores are carried from [-1, 1] to [0, 1] by (1 + r) / 2, which keeps their order.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.core.steps import Frames
from rlvlm.judges import prompts
from rlvlm.judges.config import Abilities, JudgeConfig

VERSION = "likeness/1"
ABILITIES = Abilities(compare=frozenset({"direct"}), score=frozenset({"progress"}))

Picture = NDArray[np.uint8]
"""[H, W, 3]."""
Units = NDArray[np.float64]
"""[N, E] rows of length 1."""


class Likeness(Protocol):
    """A network that says how well images fit."""

    revision: str
    """Commit or digest of the weights."""
    traits: str
    """Whatever else changes its numbers at fixed weights, e.g. `dtype=float32`."""
    sees_goal_pictures: bool
    """Whether the goal may be an image."""

    def rate(self, images: Sequence[Picture], goals: Sequence[str | Picture]) -> NDArray[np.float64]:
        """[N] in [0, 1], how well each image fits its goal.

        Raises:
            JudgeUnavailable: the network breaks on them.
        """
        ...


class SimilarityJudge:
    """A `Likeness` behind the `Judge` protocol.

    Args:
        config: sentence, tie band and the rest.
        likeness: the network.

    Raises:
        UnsupportedQuestion: it is to be asked a question, which it cannot read.
    """

    def __init__(self, config: JudgeConfig, likeness: Likeness) -> None:
        ABILITIES.check(config)
        self._settings = config.similarity
        self._likeness = likeness
        self._stamp = Stamp(
            judge=f"{config.backend}:{config.model}",
            revision=likeness.revision,
            prompt=VERSION,
            decoding=" ".join(
                [
                    f"template={config.similarity.template!r}",
                    f"tie_band={config.similarity.tie_band:g}",
                    likeness.traits,
                ]
            ),
        )

    @property
    def stamp(self) -> Stamp:
        """Where the answers come from."""
        return self._stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order; no probabilities, since a difference of likenesses is none.

        Raises:
            JudgeUnavailable: the network breaks.
        """
        start = time.perf_counter()
        problems = [self._problem(query) for query in queries]
        good = [query for query, problem in zip(queries, problems, strict=True) if problem is None]
        rated = self._rate(
            [side for query in good for side in (query.left, query.right)], [query for query in good for _ in range(2)]
        ).reshape(-1, 2)
        elapsed = time.perf_counter() - start
        in_order = iter(rated.tolist())
        return [
            self._verdict(next(in_order), elapsed)
            if problem is None
            else Verdict(status=Status.FAILED, label=None, stamp=self._stamp, text=problem)
            for problem in problems
        ]

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order. Raises as `compare` does."""
        start = time.perf_counter()
        problems = [self._problem(clip) for clip in clips]
        good = [clip for clip, problem in zip(clips, problems, strict=True) if problem is None]
        rated = iter(self._rate([clip.frames for clip in good], good).tolist())
        elapsed = time.perf_counter() - start
        return [
            Score(
                status=Status.OK,
                value=(value := next(rated)),
                stamp=self._stamp,
                text=f"{value:.4f}",
                latency_s=elapsed,
            )
            if problem is None
            else Score(status=Status.FAILED, value=None, stamp=self._stamp, text=problem)
            for problem in problems
        ]

    def _rate(self, shown: Sequence[Frames], items: Sequence[Query | Clip]) -> NDArray[np.float64]:
        if not shown:
            return np.zeros(0)
        return self._likeness.rate([frames[-1] for frames in shown], [self._goal(item) for item in items])

    def _goal(self, item: Query | Clip) -> str | Picture:
        if item.goal_picture is not None:
            return item.goal_picture[0]
        return self._settings.template.replace("{goal}", prompts.check_goal(item.goal))

    def _verdict(self, rated: Sequence[float], latency_s: float) -> Verdict:
        left, right = rated
        text = f"left {left:.4f}, right {right:.4f}"
        if abs(right - left) <= self._settings.tie_band:
            return Verdict(
                status=Status.NO_PREFERENCE, label=Label.TIE, stamp=self._stamp, text=text, latency_s=latency_s
            )
        label = Label.RIGHT if right > left else Label.LEFT
        return Verdict(status=Status.OK, label=label, stamp=self._stamp, text=text, latency_s=latency_s)

    def _problem(self, item: Query | Clip) -> str | None:
        """Why an item cannot be rated; None where it can."""
        if item.goal_picture is not None and not self._likeness.sees_goal_pictures:
            return "this judge compares images with words only; leave out goal_picture"
        return prompts.problem_of(item)


def cosine_reward(states: Units, goals: Units) -> NDArray[np.float64]:
    """[N] cosine of each image and its goal, in [-1, 1]."""
    return (states * goals).sum(-1)


def baseline_reward(states: Units, goals: Units, baseline: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Likeness to the goal with what has nothing to do with the goal partly projected out.

    Args:
        states: [N, E] unit vectors of images.
        goals: [N, E] unit vectors of their goals.
        baseline: [E] unit vector of the scene without its goal.
        alpha: weight of the projection onto the line through baseline and goal, in [0, 1].

    Returns:
        [N] 1 - |alpha * proj(s) + (1 - alpha) * s - g|^2 / 2, in [-1, 1]; the cosine where alpha is 0.
    """
    line = goals - baseline
    length = (line**2).sum(-1, keepdims=True)
    along = ((states - baseline) * line).sum(-1, keepdims=True) / np.where(length == 0, 1.0, length)
    projected = baseline + along * line  # the baseline itself where it equals the goal
    return 1 - ((alpha * projected + (1 - alpha) * states - goals) ** 2).sum(-1) / 2


def to_share(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rewards in [-1, 1] as shares in [0, 1]; what rounding puts outside is put back."""
    return np.clip((1 + rewards) / 2, 0.0, 1.0)


def unit(vectors: NDArray[np.float64]) -> Units:
    """The rows [N, E], each divided by its length."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
