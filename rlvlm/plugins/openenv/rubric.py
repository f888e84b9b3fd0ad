"""A judge's score as a rubric of OpenEnv.

class MyEnvironment(Environment):
    def __init__(self):
        super().__init__(rubric=JudgeRubric(judge, show, "open the drawer"))
"""
# pyright: reportMissingImports=false
# only those who use OpenEnv have it

from collections.abc import Callable
from typing import Any

from openenv.core.rubrics import TrajectoryRubric

from rlvlm.judges.client import Judge
from rlvlm.judges.rewarding import Rewards, WithoutAnswer


class JudgeRubric(TrajectoryRubric):
    """A rubric whose score is a judge's, in [0, 1], of an episode's images; 0 before its end.

    Args:
        judge: judge to ask.
        show: `show(action, observation) -> image`, [H, W, 3] of uint8, after a step.
        goal: goal of every episode, in a few plain words.
        num_frames: maximum number of images to judge, >= 1: the last, and those evenly before it.
        without_answer: raise: `JudgeUnavailable`; a number in [0, 1]: that score.
    """

    def __init__(
        self,
        judge: Judge,
        show: Callable[[Any, Any], Any],
        goal: str,
        *,
        num_frames: int = 8,
        without_answer: WithoutAnswer = "raise",
    ) -> None:
        super().__init__(intermediate_reward=0.0)
        self._show, self._num_frames = show, num_frames
        self._rewards = Rewards(judge=judge, goal=goal, without_answer=without_answer)

    def forward(self, action: Any, observation: Any) -> float:
        """Returns the score at the end of an episode, and 0 before."""
        # containers such as WeightedSum do not pass resets on: an episode also begins where another has ended
        if self.trajectory and getattr(self.trajectory[-1][1], "done", False):
            self.reset()
        return super().forward(action, observation)

    def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
        """Returns the judge's score of an episode that is over."""
        every = -(-len(trajectory) // self._num_frames)  # rounded up; counted from the end, so that the last is seen
        (value,), _ = self._rewards.ask([[self._show(*step) for step in trajectory[::-1][::every][::-1]]])
        assert value is not None, "None is not allowed"
        return value

    def compute_step_rewards(self) -> list[float]:
        """Returns the rewards of the steps since the reset: the score at the last one."""
        return [0.0] * (len(self.trajectory) - 1) + [self.last_score or 0.0] if self.trajectory else []
