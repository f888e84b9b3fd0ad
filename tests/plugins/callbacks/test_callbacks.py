"""A watch's figures in other trainers' logs, with their real trainers: an alarm ends the training."""

import pytest
from frameworks import needs, run, tiny_model

WATCH = """
import numpy as np
import rlvlm
from rlvlm.rewards.config import MonitorConfig
from rlvlm.testing import FakeJudge

def light(level):
    return np.full((2, 8, 8, 3), level, np.uint8)

# the judge likes the light, and every episode that it is paid for is a bright failure
watch = rlvlm.Watch(rlvlm.Judge.local(FakeJudge()), "light the lamp", monitor=MonitorConfig(window=60), every=8)
"""
SAID = """
print("alarm" if watch.alarm else "none", "Alarm" in open("watch.html").read())
"""


@needs("trl")
@pytest.mark.slow
def test_trls_trainer_logs_the_figures_and_stops_at_an_alarm(tmp_path):
    tiny_model(tmp_path)
    program = f"""{WATCH}
from datasets import Dataset
from rlvlm.plugins.callbacks.trl import WatchCallback
from trl import GRPOConfig, GRPOTrainer

def paid(completions, **_):
    return watch.score_all([light(250)] * len(completions), [False] * len(completions)).values

config = GRPOConfig("out", max_completion_length=4, max_steps=40, logging_steps=1, use_cpu=True, report_to="none")
trainer = GRPOTrainer(
    "my_model", reward_funcs=paid, args=config, train_dataset=Dataset.from_list([{{"prompt": "lamp"}}] * 64),
    callbacks=[WatchCallback(watch, "watch.html", stops=True)],
)
trainer.train()
scores = [row["judge/score"] for row in trainer.state.log_history if "judge/score" in row]
print(trainer.state.global_step, len(scores), round(scores[-1], 2)){SAID}"""
    said = run("trl", program, tmp_path).splitlines()
    # by hand: 8 episodes a step, of which 32 are enough for an alarm; a log of each step and of the training's end;
    # brightness 250 of 255
    assert said[-2:] == ["4 5 0.98", "alarm True"]


@needs("sb3")
@pytest.mark.slow
def test_sb3_logs_the_figures_and_stops_at_an_alarm(tmp_path):
    program = f"""{WATCH}
import gymnasium as gym
from rlvlm.plugins.callbacks.sb3 import WatchCallback
from stable_baselines3 import PPO
from stable_baselines3.common.logger import configure

class Paid(gym.RewardWrapper):
    def reward(self, reward):
        return watch.score(light(250), truth=False)

learner = PPO("MlpPolicy", Paid(gym.make("CartPole-v1")), n_steps=16, batch_size=16, device="cpu")
learner.set_logger(configure(".", ["csv"]))
learner.learn(2_000, callback=WatchCallback(watch, "watch.html", stops=True))
print(learner.num_timesteps, "judge/score" in open("progress.csv").readline()){SAID}"""
    said = run("sb3", program, tmp_path).splitlines()
    assert said[-2:] == ["32 True", "alarm True"]
