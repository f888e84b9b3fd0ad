"""A watch's figures in other trainers' logs, with their real classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlvlm
from rlvlm.rewards.config import MonitorConfig
from rlvlm.testing import FakeJudge

GOAL = "light the lamp"


def light(level: int, num: int = 2) -> np.ndarray:
    return np.full((num, 8, 8, 3), level, np.uint8)


def fooled_watch() -> rlvlm.Watch:
    """Its alarm comes with the first failures: the judge likes the light, and they are all bright."""
    return rlvlm.Watch(rlvlm.Judge.local(FakeJudge()), GOAL, monitor=MonitorConfig(window=60), every=8)


@pytest.mark.slow  # transformers takes seconds to import
def test_trls_trainers_log_the_figures_and_stop_at_an_alarm(tmp_path: Path) -> None:
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    from rlvlm.plugins.callbacks.trl import WatchCallback

    watch = fooled_watch()
    callback = WatchCallback(watch, tmp_path / "watch.html", stops=True)
    # what a Trainer calls its callbacks through; a whole one takes half a minute to import and make
    handler: Any = CallbackHandler([callback], None, None, None, None)
    state, control, logs = TrainerState(log_history=[{"loss": 1.0}]), TrainerControl(), {"loss": 1.0}
    num_steps = 0
    while not control.should_training_stop and num_steps < 10:
        for _ in range(8):  # in place of a reward function
            watch.score(light(250), truth=False)
        handler.on_log(None, state, control, logs)
        control = handler.on_step_end(None, state, control)
        num_steps += 1
    handler.on_train_end(None, state, control)
    assert watch.alarm and 4 <= num_steps < 10
    assert logs["judge/score"] == state.log_history[-1]["judge/score"] == pytest.approx(250 / 255)
    assert "Alarm" in (tmp_path / "watch.html").read_text()


def test_sb3_logs_the_figures_and_stops_at_an_alarm(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: environments/frameworks.sh sb3")
    import gymnasium as gym
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import configure

    from rlvlm.plugins.callbacks.sb3 import WatchCallback

    watch = fooled_watch()

    class Paid(gym.RewardWrapper):
        def reward(self, reward: float) -> float:
            return watch.score(light(250), truth=False) or 0.0

    learner = PPO("MlpPolicy", Paid(gym.make("CartPole-v1")), n_steps=16, batch_size=16, device="cpu")
    learner.set_logger(configure(str(tmp_path), ["csv"]))
    learner.learn(2_000, callback=WatchCallback(watch, tmp_path / "watch.html", stops=True))
    assert watch.alarm and 30 <= learner.num_timesteps < 200
    assert "judge/score" in (tmp_path / "progress.csv").read_text().splitlines()[0]
    assert "Alarm" in (tmp_path / "watch.html").read_text()
