"""A judge's score as the reward of any Gymnasium env that renders images.

env = JudgeReward(gymnasium.make("CartPole-v1", render_mode="rgb_array"), judge, "balance the pole", per="episode")
"""

from typing import Any, Literal

import gymnasium as gym
import numpy as np

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import Frames
from rlvlm.judges.client import Judge, as_frames
from rlvlm.judges.rewarding import Rewards, WithoutAnswer

CLIP = "judge_clip"
"""Key of `info` under which `Filmed` hands on the clip to judge."""


class Filmed(gym.Wrapper):
    """Films an env and hands on, in `info["judge_clip"]`, what a judge should see; the rewards stay the env's.

    Args:
        env: env with `render_mode="rgb_array"`.
        per: how often there is something to judge. step: the image after every step; a number: after so many steps, and
            at the end of an episode, the images since the last time; episode: at its end, images of the whole episode.
        num_frames: maximum number of images of a clip, >= 2: its first, its last and those evenly between.
    """

    def __init__(self, env: gym.Env, per: Literal["step", "episode"] | int = "step", num_frames: int = 8) -> None:
        super().__init__(env)
        if not (per in ("step", "episode") or isinstance(per, int) and per >= 1):
            raise ValueError(f"per must be step, episode or a number of steps >= 1, got {per!r}")
        if num_frames < 2:
            raise ValueError(f"num_frames must be >= 2, got {num_frames}")
        if env.render_mode != "rgb_array":
            what = f"a judge looks at images, which need render_mode rgb_array, got {env.render_mode!r}"
            raise UsageError(what, 'gymnasium.make(..., render_mode="rgb_array")')
        self._per, self._num_frames = per, num_frames
        self._images: list[Frames] = []

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        self._images = [self._image()]
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._images.append(self._image())
        is_over = terminated or truncated
        if self._per == "step":
            self._images = self._images[-1:]
        if is_over or self._per == "step" or len(self._images) - 1 == self._per:
            index = np.linspace(0, len(self._images) - 1, min(self._num_frames, len(self._images))).round().astype(int)
            info = {**info, CLIP: np.concatenate([self._images[number] for number in index])}
            self._images = self._images[-1:]  # the next clip begins where this one ends
        return observation, reward, terminated, truncated, info

    def _image(self) -> Frames:
        return as_frames(np.array(self.env.render()))  # a copy: some envs draw into one array again and again


class JudgeReward(gym.Wrapper):
    """An env whose reward is a judge's score in [0, 1] of what was filmed, and 0 where there is nothing to judge yet.

    The env's own reward stays in `info["env_reward"]`, and `info["judge_status"]` says how a question was answered.

    Args:
        env: env with `render_mode="rgb_array"`.
        judge: judge to ask.
        goal: goal of every episode, in a few plain words.
        per: see `Filmed`.
        num_frames: see `Filmed`.
        without_answer: raise: `JudgeUnavailable`; a number in [0, 1]: that reward.
    """

    def __init__(
        self,
        env: gym.Env,
        judge: Judge,
        goal: str,
        per: Literal["step", "episode"] | int = "step",
        *,
        num_frames: int = 8,
        without_answer: WithoutAnswer = "raise",
    ) -> None:
        super().__init__(Filmed(env, per, num_frames))
        self._rewards = Rewards(judge=judge, goal=goal, without_answer=without_answer)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        ((value, told),) = judged([info], [float(reward)], self._rewards)
        return observation, value, terminated, truncated, told


def judged(infos: list[dict[str, Any]], env_rewards: list[float], rewards: Rewards) -> list[tuple[float, dict]]:
    """Returns the reward and the `info` of each env, with all that `Filmed` has handed on asked about at once.

    Args:
        infos: `info` of each env's step.
        env_rewards: the envs' own rewards.
        rewards: whom to ask.
    """
    due = [index for index, info in enumerate(infos) if CLIP in info]
    scores = rewards.ask([infos[index][CLIP] for index in due])
    answers: dict[int, Any] = dict(zip(due, zip(*scores, strict=True), strict=True))
    told = [{key: value for key, value in info.items() if key != CLIP} for info in infos]
    for index, (_, status) in answers.items():
        told[index]["judge_status"] = status
    for info, env_reward in zip(told, env_rewards, strict=True):
        info["env_reward"] = env_reward
    return [(answers[index][0] if index in answers else 0.0, info) for index, info in enumerate(told)]
