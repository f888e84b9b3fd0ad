"""The judge's own score as reward, or that of a plain function: every new image is looked at once."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Clip, Score, Status
from rlvlm.core.steps import FloatArray, Transitions
from rlvlm.envs.images import FrameStore
from rlvlm.judges.health import JudgeHealth
from rlvlm.judges.judge import Judge
from rlvlm.rewards.source import Labelling, RewardSource, SourceContext

_PICTURES_PER_CALL = 64
"""Drawn and held at once: 17 MB at 300 pixels."""


def to_reward(score: Any) -> Any:
    """A score in [0, 1] as a reward in [-1, 1]: 2 * score - 1, which is the cosine itself for judges by likeness.

    Numbers, arrays and tensors of them alike.
    """
    return 2 * score - 1


@dataclass(frozen=True, slots=True)
class TimedScore:
    """What was said of an image, and when."""

    score: Score
    timestamp: float
    """Unix time, seconds."""


class JudgedReward(RewardSource):
    """What a judge says of the image after each step, in [-1, 1]; images that look the same are judged once.

    An image whose answer cannot be read has no reward, and transitions that lead to it do not train. One that was not
    answered is asked about again when it is met again. A judge who answers nothing of what he is asked, or mostly what
    cannot be read, ends the run; the env's reward never takes his place.

    What is known is part of a checkpoint: asked again in a batch of another size, a judge may answer with other last
    bits, on some processors and on all GPUs.

    Source: the CLIP and BLIP-2 baselines of Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681, and Rocamonde et al. 2023
    (VLM-RM), arXiv:2310.12921. Departure from the former: the cosine c itself and not 2c - 1, which differs by scale.

    Args:
        judge: local or served.
        frames: draws images at the judge's size.
        goal: what the judge is asked about.
    """

    labelling = Labelling.WHERE_ANSWERED

    def __init__(self, judge: Judge, frames: FrameStore, goal: str) -> None:
        self._judge = judge
        self._frames = frames
        self._goal = goal
        self._health = JudgeHealth()
        self._rewards: dict[bytes, float] = {}
        self._answers: dict[bytes, TimedScore] = {}

    @classmethod
    def build(cls, context: SourceContext) -> Self:
        """Of the run's judge."""
        assert context.judge is not None, "the config has checked that there is one"
        return cls(context.judge, context.frames, context.goal)

    def label(self, transitions: Transitions) -> FloatArray:
        """Rewards `[B]`; NaN where the judge gave none.

        Raises:
            JudgeUnavailable: the judge does not answer or cannot be understood.
        """
        first, kind = self._frames.distinct(transitions.snapshots)
        keys = self._frames.keys(transitions.snapshots[first])
        unknown = [place for place, key in enumerate(keys) if key not in self._rewards]
        for start in range(0, len(unknown), _PICTURES_PER_CALL):
            places = unknown[start : start + _PICTURES_PER_CALL]
            scores = self._ask(transitions.snapshots[first[places]])
            for place, score in zip(places, scores, strict=True):
                self._answers[keys[place]] = TimedScore(score, time.time())
                if score.status is not Status.FAILED:
                    self._rewards[keys[place]] = np.nan if score.value is None else to_reward(score.value)
        return np.array([self._rewards.get(key, np.nan) for key in keys], np.float32)[kind]

    def get_state(self) -> dict[str, Any]:
        """The rewards of all images seen so far."""
        return _known_state(self._rewards)

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self._rewards = _read_known(state)

    def drain_answers(self) -> dict[bytes, TimedScore]:
        """What was said since the last call, by the image's name in the frame store; not part of a checkpoint."""
        answers, self._answers = self._answers, {}
        return answers

    def _ask(self, snapshots: FloatArray) -> Sequence[Score]:
        """The judge's scores of the images of `snapshots` `[N, S]`."""
        pictures = self._frames.frames(snapshots)
        scores = self._judge.score([Clip(goal=self._goal, frames=image[None]) for image in pictures])
        assert len(scores) == len(snapshots), f"a judge owes one score per clip, got {len(scores)} of {len(snapshots)}"
        self._health.note(scores)
        self._health.check(scores)
        return scores


class FunctionReward(RewardSource):
    """A plain function of images and a goal: `def reward(images, goal) -> scores`, asked once about each new image.

    Args:
        function: from images [N, H, W, 3] uint8 and the goal to [N] numbers, which are the rewards.
        frames: draws the images.
        goal: see `SourceContext`.
    """

    def __init__(self, function: Callable[..., Any], frames: FrameStore, goal: str) -> None:
        self._function = function
        self._frames = frames
        self._goal = goal
        self._known: dict[bytes, float] = {}

    def label(self, transitions: Transitions) -> FloatArray:
        """Rewards `[B]` for the image after each step.

        Raises:
            UsageError: the function gave something else than one number per image.
        """
        first, kind = self._frames.distinct(transitions.snapshots)
        keys = self._frames.keys(transitions.snapshots[first])
        new = [place for place, key in enumerate(keys) if key not in self._known]
        if new:
            images = self._frames.frames(transitions.snapshots[first[new]])
            scores = np.asarray(self._function(images, self._goal), np.float32)
            if scores.shape != (len(new),):
                name = getattr(self._function, "__name__", "the function")
                raise UsageError(
                    f"{name} gave rewards of shape {scores.shape} for {len(new)} images",
                    "return one number per image, in their order",
                )
            self._known |= {keys[place]: float(score) for place, score in zip(new, scores, strict=True)}
        return np.array([self._known[key] for key in keys], np.float32)[kind]

    def get_state(self) -> dict[str, Any]:
        """The rewards of all images seen so far."""
        return _known_state(self._known)

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self._known = _read_known(state)


def _known_state(rewards: dict[bytes, float]) -> dict[str, Any]:
    """Rewards by image, as two arrays; the names of one env's images are equally long."""
    names = (
        np.frombuffer(b"".join(rewards), np.uint8).reshape(len(rewards), -1) if rewards else np.empty((0, 1), np.uint8)
    )
    return {"images": names, "rewards": np.array(list(rewards.values()), np.float64)}


def _read_known(state: dict[str, Any]) -> dict[bytes, float]:
    """The rewards of which `_known_state` made `state`."""
    return {name.tobytes(): float(reward) for name, reward in zip(state["images"], state["rewards"], strict=True)}
