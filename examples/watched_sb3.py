"""Stable-Baselines3's PPO on the table of push_block, paid by a judge at the end of each episode, and watched.

    python examples/watched_sb3.py my_file:NAME 60000      # a judge of your own, see docs/judges.md; SB3 beside rlvlm

The true success, which the env knows, is held against the judge's scores and never reaches the policy.
"""

import sys

import gymnasium as gym
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

import rlvlm
from rlvlm.envs import push_block as table

STEPS, PX, NUM_FRAMES = 40, 96, 8


class Pushing(gym.Env):
    """A hand that moves in two directions; the episode ends after `STEPS` steps, and only then there is a reward."""

    observation_space = gym.spaces.Box(-8.0, 8.0, (table.STATE_SIZE,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, watch: rlvlm.Watch | None = None) -> None:
        self._watch = watch

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.states = [table.random_table(self.np_random)]
        return self.states[-1], {}

    def step(self, action):
        move = table.MAX_STEP * np.clip(action, -1, 1).astype(np.float32)
        self.states.append(table.moved(self.states[-1][None], move[None])[0])
        if len(self.states) <= STEPS:
            return self.states[-1], 0.0, False, False, {}
        score = self._watch.score(self.film(), truth=self.is_success, goal=self.goal) if self._watch else 0.0
        return self.states[-1], score or 0.0, False, True, {"is_success": self.is_success}

    @property
    def goal(self) -> str:
        return table.instruction_of(self.states[-1])

    @property
    def is_success(self) -> bool:
        return bool(table.is_solved(self.states[-1][None])[0])

    def film(self) -> np.ndarray:
        """Images [8, H, W, 3], evenly over the episode."""
        shown = np.linspace(0, len(self.states) - 1, NUM_FRAMES).astype(int)
        return table.draw_tables(np.stack(self.states)[shown], PX)


def known_episodes(count: int = 48) -> list[tuple[np.ndarray, bool, str]]:
    """Plays episodes, half of them by the script, to try the judge on before anything is trained.

    A success ends when it succeeds: the judge is tried on shorter pieces of it too, which are no success yet.
    """
    env, rng, found = Pushing(), np.random.default_rng(0), []
    for number in range(count):
        env.reset(seed=number)
        drift = rng.uniform(-1, 1, 2)
        while len(env.states) <= STEPS and not env.is_success:
            scripted = table.scripted_moves(env.states[-1][None])[0]
            env.step(scripted if number % 2 else np.clip(drift + rng.normal(0, 0.5, 2), -1, 1))
        found.append((env.film(), env.is_success, env.goal))
    return found


def main(judge: str, steps: int) -> None:
    asked = rlvlm.Judge.local(judge)
    with rlvlm.Watch(asked, suite=known_episodes(), faulty="ok") as watch:
        print("before:", *(watch.findings or ["no fault"]), sep="\n  ")
        envs = DummyVecEnv([lambda: Pushing(watch) for _ in range(8)])
        learner = PPO(
            "MlpPolicy", envs, n_steps=5 * STEPS, batch_size=200, learning_rate=1e-3, gamma=1.0, seed=0, device="cpu"
        )
        for _ in range(max(1, steps // 6000)):
            learner.learn(6000, reset_num_timesteps=False)
            said = {name: round(value, 2) for name, value in watch.figures().items()}
            print(
                learner.num_timesteps, {name: said.get(f"judge/{name}") for name in ("score", "true_success", "alarm")}
            )
    watch.report("watch.html")
    print("alarm:", watch.alarm or "none")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
