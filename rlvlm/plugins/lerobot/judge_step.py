"""A judge's score as a processor step of LeRobot, in place of its reward classifier.

env_processor.steps.insert(-2, JudgeStep(url="http://127.0.0.1:8123", goal="pick up the cube"))
"""
# pyright: reportMissingImports=false
# only those who use LeRobot have it

from dataclasses import dataclass
from typing import Any

import numpy as np
from lerobot.lerobot_types import TransitionKey
from lerobot.processor import ProcessorStep, ProcessorStepRegistry

from rlvlm.core.errors import UsageError
from rlvlm.judges.client import Judge
from rlvlm.judges.rewarding import Rewards, WithoutAnswer


@ProcessorStepRegistry.register("rlvlm_judge")
@dataclass
class JudgeStep(ProcessorStep):
    """Asks a judge about the camera's image and sets the reward and the end of an episode, as the classifier does.

    The env's own reward stays in the transition's `info["env_reward"]`, the judge's score in `info["judge_score"]`,
    None where there is no answer: then nothing of the transition changes.
    """

    url: str
    """Address of a server of `rlvlm serve`; its token is looked up in `~/.rlvlm/token`."""
    goal: str
    """What the robot should do, in a few plain words."""
    camera: str = ""
    """Key of the image in the observation; empty if there is one alone."""
    every: int = 1
    """Steps from one question to the next, >= 1: a judge is slower than a control loop. The end of an episode is always
    asked about."""
    success_threshold: float = 0.5
    """Score from which a step is a success, in (0, 1]."""
    success_reward: float = 1.0
    """Reward of a success; others have the env's."""
    terminate_on_success: bool = True
    """Whether a success ends the episode."""
    without_answer: WithoutAnswer = "raise"
    """raise: `JudgeUnavailable`; None: the transition stays as it was; a number in [0, 1]: that score."""

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 < self.success_threshold <= 1:
            what = f"got {self.every} and {self.success_threshold}"
            raise ValueError(f"every must be >= 1 and success_threshold in (0, 1], {what}")
        judge, policy = Judge(self.url), self.without_answer
        self._rewards = Rewards(judge=judge, goal=self.goal, without_answer=policy, takes_none=True)
        self._t = 0

    def __call__(self, transition: dict[Any, Any]) -> dict[Any, Any]:
        new = {**transition, TransitionKey.INFO: dict(transition.get(TransitionKey.INFO) or {})}
        self._t += 1
        is_over = bool(new.get(TransitionKey.DONE)) or bool(new.get(TransitionKey.TRUNCATED))
        if self._t % self.every and not is_over:
            return new
        (score,), _ = self._rewards.ask([self._image(new.get(TransitionKey.OBSERVATION) or {})])
        new[TransitionKey.INFO] |= {"env_reward": new.get(TransitionKey.REWARD, 0.0), "judge_score": score}
        if score is not None and score >= self.success_threshold:
            new[TransitionKey.REWARD] = self.success_reward
            new[TransitionKey.DONE] = new.get(TransitionKey.DONE, False) or self.terminate_on_success
        return new

    def reset(self) -> None:
        """Begins an episode."""
        self._t = 0

    def get_config(self) -> dict[str, Any]:
        """Returns the settings with which a saved pipeline makes this step again."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def transform_features(self, features: dict[Any, Any]) -> dict[Any, Any]:
        """Returns the features as they are: observations and actions stay."""
        return features

    def _image(self, observation: dict[str, Any]) -> np.ndarray:
        """Returns the camera's image [H, W, 3] uint8 from a tensor [3, H, W] in [0, 1], or a batch of one."""
        cameras = [key for key in observation if "image" in key]
        if (self.camera or len(cameras) == 1) and (key := self.camera or cameras[0]) in observation:
            image = np.asarray(
                observation[key].detach().cpu() if hasattr(observation[key], "detach") else observation[key]
            )
            image = image[0] if image.ndim == 4 else image
            return (255 * image.transpose(1, 2, 0)).round().clip(0, 255).astype(np.uint8)
        raise UsageError(
            f"the judge needs one camera, got {self.camera or 'no name'}; there are {', '.join(cameras) or 'none'}",
            'JudgeStep(..., camera="observation.images.front")',
        )
