"""Stock SAC of the installed RLlib: `python run_rllib.py plain|default WORLD`.

plain: the same networks as everybody (two layers of 256, actor and critics). default: its own critics, which are eight
times larger. Replay, connectors and everything else are stock.
"""

import sys

import ray
import torch
from contest import BATCH, WARM_UP_STEPS, answer_orders
from envs import EPISODE_STEPS, make
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.algorithms.sac.torch.default_sac_torch_rl_module import DefaultSACTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.models.base import ENCODER_OUT
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.tune.registry import register_env
from torch import nn


class Encoder(nn.Module):
    """Two hidden layers over the observation, and the action where it is wanted and there."""

    def __init__(self, size: int, takes_action: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.takes_action = takes_action

    def forward(self, batch):
        inputs = [batch[Columns.OBS], *([batch[Columns.ACTIONS]] if self.takes_action else [])]
        return {ENCODER_OUT: self.layers(torch.cat(inputs, -1))}


class PlainModule(DefaultSACTorchRLModule):
    """RLlib's SAC module with ordinary networks."""

    def setup(self) -> None:
        self.twin_q = True
        obs_size, action_size = self.observation_space.shape[0], self.action_space.shape[0]
        self.pi_encoder, self.pi = Encoder(obs_size, False), nn.Linear(256, 2 * action_size)
        if not self.inference_only:
            both = obs_size + action_size
            self.qf_encoder, self.qf_twin_encoder = Encoder(both, True), Encoder(both, True)
            self.qf, self.qf_twin = nn.Linear(256, 1), nn.Linear(256, 1)


networks, env = sys.argv[1:]
model = {"fcnet_hiddens": [256, 256], "fcnet_activation": "relu", "head_fcnet_hiddens": []}
register_env(env, lambda _: make(env))
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
config = (
    SACConfig()
    .environment(env)
    .env_runners(num_env_runners=0)
    .training(
        actor_lr=3e-4,
        critic_lr=3e-4,
        alpha_lr=3e-4,
        train_batch_size_per_learner=BATCH,
        gamma=0.99,
        tau=0.005,
        num_steps_sampled_before_learning_starts=WARM_UP_STEPS,
    )
    .rl_module(model_config=DefaultModelConfig(**model))
    .reporting(min_time_s_per_iteration=None, min_sample_timesteps_per_iteration=EPISODE_STEPS[env])
    .debugging(seed=0, log_level="ERROR")
)
if networks == "plain":
    model |= {"twin_q": True, "head_fcnet_activation": "relu"}
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=PlainModule, model_config=model))
algorithm = config.build_algo()
torch.set_num_threads(1)


def env_steps() -> int:
    return algorithm.metrics.peek(("env_runners", "num_env_steps_sampled_lifetime"), default=0)


def advance(steps: int) -> int:
    before = env_steps()
    while env_steps() < before + steps:
        algorithm.train()
    return env_steps() - before


answer_orders(advance)
ray.shutdown()
