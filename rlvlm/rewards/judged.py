"""Rewards by a judge's score or by a plain function, computed once for every new image."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status
from rlvlm.core.steps import FloatArray, Transitions
from rlvlm.envs.images import FrameStore
from rlvlm.judges.judge import Judge
from rlvlm.rewards.scorers import ScoreMemory
from rlvlm.rewards.source import Labelling, RewardSource, SourceContext


def to_reward(score: Any) -> Any:
    """Returns a score in [0, 1] as a reward in [-1, 1]: 2 * score - 1, the cosine itself for judges by similarity.

    Works for numbers, arrays and tensors.
    """
    return 2 * score - 1


class _ScoredImages(RewardSource):
    """Scores images, each once; the scores are part of a checkpoint."""

    def __init__(self, judge: Judge, frames: FrameStore, goal: str) -> None:
        self._frames = frames
        self._goal = goal
        self._memory = ScoreMemory(judge)

    def _scores(self, transitions: Transitions) -> NDArray[np.float64]:
        """Returns scores [B] of the images after each step, asking about new ones; NaN for missing scores."""
        # by drawn image and not by state: two states that look alike get one answer
        first, kind = self._frames.distinct(transitions.snapshots)  # the first row of each look, and each row's look
        looks = transitions.snapshots[first]
        scores = self._memory.score(
            self._frames.keys(looks),
            lambda chosen: [Clip(goal=self._goal, frames=image[None]) for image in self._frames.frames(looks[chosen])],
        )
        # back from looks to steps
        return np.array([np.nan if score.value is None else score.value for score in scores])[kind]

    def get_state(self) -> dict[str, Any]:
        return self._memory.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._memory.set_state(state)


class JudgedReward(_ScoredImages):
    """Reward by a judge's score of the image after each step, in [-1, 1]; equal images are judged once.

    An image with an unreadable answer has no reward, and transitions to it are not trained on. A failed question is
    asked again when the image recurs. Known scores are part of a checkpoint.

    Source: the CLIP and BLIP-2 baselines of Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681, and Rocamonde et al. 2023
    (VLM-RM), arXiv:2310.12921. Departure from the former: the cosine c itself and not 2c - 1, an affine change.

    Args:
        judge: a local or served judge.
        frames: draws images at the judge's size.
        goal: goal in the questions.
    """

    labelling = Labelling.WHERE_ANSWERED

    def __init__(self, judge: Judge, frames: FrameStore, goal: str) -> None:
        super().__init__(judge, frames, goal)
        self._answers: dict[bytes, tuple[Score, float]] = {}

    @classmethod
    def build(cls, context: SourceContext) -> Self:
        assert context.judge is not None, "the config has checked that there is one"
        return cls(context.judge, context.frames, context.goal)

    def label(self, transitions: Transitions) -> FloatArray:
        """Returns rewards [B]; NaN for missing scores.

        Raises:
            JudgeUnavailable: the judge does not answer or cannot be understood.
        """
        rewards = to_reward(self._scores(transitions))
        # kept until an episode shows the image: only then is its true progress known for the log
        self._answers |= {key: (score, time.time()) for key, score in self._memory.fresh.items()}
        return rewards.astype(np.float32)

    def drain_answers(self) -> dict[bytes, tuple[Score, float]]:
        """Returns the scores since the last call, by the image's key in the frame store.

        Each has its time (Unix time, seconds). They are not part of a checkpoint.
        """
        answers, self._answers = self._answers, {}
        return answers


class FunctionReward(_ScoredImages):
    """Reward by a plain function: `def reward(images, goal) -> scores`, called once for each new image.

    Args:
        function: maps images [N, H, W, 3] uint8 and the goal to rewards [N].
        frames: draws the images.
        goal: see `SourceContext`.
    """

    def __init__(self, function: Callable[..., Any], frames: FrameStore, goal: str) -> None:
        super().__init__(_FunctionJudge(function), frames, goal)

    def label(self, transitions: Transitions) -> FloatArray:
        """Returns rewards [B] for the image after each step.

        Raises:
            UsageError: the function did not return one number per image.
            NumericsError: a number is not finite.
        """
        return self._scores(transitions).astype(np.float32)


class _FunctionJudge:
    """Adapts a user's function to `Judge`; its numbers have their own scale."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._name = getattr(function, "__name__", "the function")
        self.stamp = Stamp(judge=self._name, revision="", prompt="", decoding="")

    def compare(self, queries: Sequence[Query]) -> NoReturn:
        raise AssertionError("a function of images and a goal is never asked to compare")

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        # one call for all new images: a user's network batches them
        numbers = np.asarray(self._function(np.concatenate([clip.frames for clip in clips]), clips[0].goal), np.float32)
        if numbers.shape != (len(clips),):
            raise UsageError(
                f"{self._name} gave rewards of shape {numbers.shape} for {len(clips)} images",
                "return one number per image, in their order",
            )
        return [Score(status=Status.OK, value=number, stamp=self.stamp) for number in numbers.tolist()]
