"""Stable-Baselines3's PPO on the ball of slide_ball.py, paid by a judge after every step, and watched.

    python examples/watched_sb3.py near 24000      # or column, or my_file:NAME of your own; SB3 beside rlvlm

The true success, which the env knows, is held against the judge's scores and never reaches the policy.
"""

import sys

import numpy as np
from slide_ball import RING, TASK, SlideBall
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper

import rlvlm
from rlvlm.envs.config import StepEnvConfig

STEPS, PX = 25, 96


def ball_in(images: np.ndarray) -> np.ndarray:
    """Returns where the red ball is, [N, 2] in the unit square, as far as pixels show it."""
    red = (images[..., 0] > 150) & (images[..., 1] < 100)
    ball = np.array([np.argwhere(image).mean(0) if image.any() else (-PX, -PX) for image in red])
    return (ball[:, ::-1] + 0.5) / images.shape[1]


def near(images: np.ndarray, goal: str) -> np.ndarray:
    """A judge that is right: how near the ball is to the middle of the ring."""
    return np.clip(1 - np.linalg.norm(ball_in(images) - RING, axis=1), 0, 1)


def column(images: np.ndarray, goal: str) -> np.ndarray:
    """A judge that can be fooled: how near the ball is to the ring's column, at any height."""
    return np.clip(1 - np.abs(ball_in(images)[:, 0] - RING[0]), 0, 1)


class Paid(VecEnvWrapper):
    """The balls, with the judge's scores of what can be seen after the step as rewards."""

    def __init__(self, venv: DummyVecEnv, watch: rlvlm.Watch) -> None:
        super().__init__(venv)
        self._watch, self._draw = watch, new_env().draw

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, _, dones, infos = self.venv.step_wait()
        images = self._draw(np.stack([info["snapshot"] for info in infos]), PX)
        scores, _ = self._watch.score_all(list(images), [info["success"] for info in infos])
        return observations, np.array(scores, np.float32), dones, infos


def new_env() -> SlideBall:
    return SlideBall(StepEnvConfig(episode_steps=STEPS), seed=0)


def known_episodes(count: int = 48) -> list[tuple[np.ndarray, bool]]:
    """Plays episodes, half of them straight into the ring, to try the judge on before anything is trained.

    A success ends when it succeeds: the judge is tried on shorter pieces of it too, which are no success yet.
    """
    env, rng, found = new_env(), np.random.default_rng(0), []
    for number in range(count):
        seen, info = [env.reset(seed=number)[0]], env.info()
        drift = rng.uniform(-1, 1, 2)
        while len(seen) <= STEPS and not info["success"]:
            action = (RING - seen[-1]) / 0.05 if number % 2 else drift + rng.normal(0, 0.5, 2)
            observation, _, _, _, info = env.step(action)
            seen.append(observation)
        found.append((env.draw(np.stack(seen), PX), bool(info["success"])))
    return found


def main(judge: str, steps: int) -> None:
    asked = rlvlm.Judge.local(judge if ":" in judge else f"{__file__}:{judge}")
    with rlvlm.Watch(asked, TASK.goal, known_episodes(), faulty="ok", every=512) as watch:
        print("before:", *(watch.findings or ["no fault"]), sep="\n  ")
        envs = Paid(DummyVecEnv([new_env for _ in range(8)]), watch)
        learner = PPO("MlpPolicy", envs, n_steps=5 * STEPS, batch_size=200, learning_rate=1e-3, gamma=0.9, seed=0)
        for _ in range(max(1, steps // 4000)):
            learner.learn(4000, reset_num_timesteps=False)
            said = {name: round(value, 2) for name, value in watch.figures().items()}
            shown = {name: said.get(f"judge/{name}") for name in ("score", "true_success", "alarm")}
            print(learner.num_timesteps, shown, flush=True)
    watch.report("watch.html")
    print("alarm:", watch.alarm or "none")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
