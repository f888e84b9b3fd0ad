"""What all our algorithms ask of RLlib in the same way: its settings, its silence, its learner, its metrics."""

import logging
from typing import Any

import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME

from rlvlm import metrics
from rlvlm.algorithms.tally import Tally
from rlvlm.vlms.devices import pick_device

_NOISY_LOGGERS = ("ray.rllib", "ray.tune.utils.util", "ray._common.deprecation")


def prepare_config(config: AlgorithmConfig, runner: type[EnvRunner]) -> None:
    """Sets what RLlib's defaults have otherwise: our runner and no others, one learner in this process, no pauses."""
    config.env_runner_cls = runner
    config.num_env_runners = config.num_learners = 0
    config.create_local_env_runner = True
    config.min_time_s_per_iteration = None
    config.sample_timeout_s = 600.0  # a turn of a slow world takes a minute; a runner that takes longer is replaced
    config.log_level = "ERROR"
    config._dont_auto_sync_env_runner_states = True


def gpus_of_learner(device: str) -> int:
    """GPUs that RLlib is to give the learner of this process: 1 where `device` (auto, cpu or cuda) means one, else 0.

    With it a Tuner's trial reserves a GPU, and the learner, its replay and its batches lie there.

    Raises:
        ModelUnavailable: `cuda` is wanted and there is none here.
    """
    return int(pick_device(device, "algo").type != "cpu")


def silence_rllib() -> None:
    """RLlib warns of its own ways as it checks and builds; users cannot act on it."""
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def settle_torch(threads: int) -> None:
    """Torch as our learners want it in their process: `threads` CPU threads, and fresh memory left alone."""
    torch.set_num_threads(threads)
    # RLlib asks torch for determinism, which also writes NaN to all fresh memory, a replay's at once.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def only_learner(algorithm: Algorithm, threads: int) -> Any:
    """The one learner that RLlib has built in this process, which will compute with `threads` CPU threads."""
    settle_torch(threads)
    learners: Any = algorithm.learner_group  # RLlib's types want a function of two
    return next(iter(learners.foreach_learner(lambda learner: learner))).get()


def log_round(algorithm: Algorithm, tally: Tally, report: dict[str, float]) -> None:
    """Hands a round's numbers to RLlib; `score` is always there and always finite, as Tune requires."""
    steps = (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME)
    algorithm.metrics.log_value(steps, tally.take_new_steps(), reduce="lifetime_sum", with_throughput=True)
    for name, value in report.items():
        algorithm.metrics.log_value(tuple(name.split("/")), value, window=1)
    algorithm.metrics.log_value("score", report.get(metrics.TRAIN_EPISODE_SUCCESS, 0.0), window=1)
