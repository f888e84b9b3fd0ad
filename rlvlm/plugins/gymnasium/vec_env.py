"""A judge's score as the reward of Stable-Baselines3's vectorized envs: one question for all envs.

envs = make_vec_env("CartPole-v1", 8, wrapper_class=Filmed, env_kwargs={"render_mode": "rgb_array"})
model = PPO("MlpPolicy", JudgeVecReward(envs, judge, "balance the pole"))
"""
# pyright: reportMissingImports=false
# only those who use SB3 have it

from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

from rlvlm.core.errors import UsageError
from rlvlm.judges.client import Judge
from rlvlm.judges.rewarding import Rewards, WithoutAnswer
from rlvlm.plugins.gymnasium.reward import Filmed, judged


class JudgeVecReward(VecEnvWrapper):
    """Vectorized envs, each wrapped in `Filmed`, whose rewards are a judge's, as `JudgeReward` has them.

    Args:
        venv: the envs; what is due in any of them is asked in one request.
        judge: judge to ask.
        goal: goal of every episode, in a few plain words.
        without_answer: raise: `JudgeUnavailable`; a number in [0, 1]: that reward.

    Raises:
        UsageError: an env is not filmed.
    """

    def __init__(self, venv: VecEnv, judge: Judge, goal: str, *, without_answer: WithoutAnswer = "raise") -> None:
        super().__init__(venv)
        if not all(venv.env_is_wrapped(Filmed)):
            raise UsageError("an env is not filmed, and so is never judged", "make_vec_env(..., wrapper_class=Filmed)")
        self._rewards = Rewards(judge=judge, goal=goal, without_answer=without_answer)

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        observations, env_rewards, dones, infos = self.venv.step_wait()
        answers = judged(infos, env_rewards.tolist(), self._rewards)
        rewards = np.array([reward for reward, _ in answers], np.float32)
        return observations, rewards, dones, [info for _, info in answers]
