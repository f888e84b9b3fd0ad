"""rlvlm's SAC as users run it: inside its RLlib algorithm, on the env's reward: `python run_rlvlm.py WORLD`."""

import logging
import sys

import ray
from contest import BATCH, WARM_UP_STEPS, answer_orders
from envs import EPISODE_STEPS, TASKS

from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.envs.config import StepEnvConfig
from rlvlm.rewards.config import StepRewardConfig

env = sys.argv[1]
logging.disable(logging.WARNING)
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
algorithm = (
    SACPebbleConfig()
    .settings(task=TASKS[env], env_settings=StepEnvConfig(episode_steps=EPISODE_STEPS[env]))
    .settings(sac=SACConfig(hidden=(256, 256), batch_size=BATCH, seed_steps=WARM_UP_STEPS, updates_per_step=1.0))
    .settings(reward=StepRewardConfig(source="environment"))
    .build_algo()
)


def advance(steps: int) -> int:
    before = algorithm.env_steps
    while algorithm.env_steps < before + steps:
        algorithm.train()
    return algorithm.env_steps - before


answer_orders(advance)
ray.shutdown()
