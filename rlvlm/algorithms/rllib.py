"""What all our algorithms ask of RLlib in the same way: its settings, its silence, its learner, its metrics."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils.from_config import NotProvided
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from torch import Tensor

from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.core import metrics
from rlvlm.envs.config import EnvConfig
from rlvlm.vlms.devices import pick_device

UNCHANGED: Any = NotProvided
"""Of a setting that keeps its value."""
_NOISY_LOGGERS = ("ray.rllib", "ray.tune.utils.util", "ray._common.deprecation")
_QUIET = "ERROR"


class Unset(float):
    """RLlib's default of a hyperparameter that nobody has chosen: who chooses the same number chooses."""


class TaskConfig(AlgorithmConfig):
    """An RLlib config with a task and its envs. Ours hold frozen config sections, which a sweep may replace.

    Args:
        algo_class: the algorithm.
        runner: what plays.
    """

    def __init__(self, algo_class: type[Algorithm], runner: type[EnvRunner]) -> None:
        super().__init__(algo_class)
        self.task = ""
        self.env_settings = EnvConfig()
        self.seed = 0
        self.gamma, self.lr = Unset(self.gamma), Unset(self.lr)
        self.env_runner_cls = runner
        self.num_env_runners = self.num_learners = 0
        self.create_local_env_runner = True
        self.merge_env_runner_states = self.broadcast_env_runner_states = False  # there are no connectors
        self.delay_between_env_runner_restarts_s = self.env_runner_health_probe_timeout_s = 1.0
        self.env_runner_restore_timeout_s = 300.0  # longest wait for one when all are lost
        self.min_time_s_per_iteration = None
        self.sample_timeout_s = 600.0  # a turn of a slow env takes a minute; a runner that takes longer is replaced
        self.log_level = _QUIET
        self._dont_auto_sync_env_runner_states = True

    def envs(self, *, task: str = UNCHANGED, env_settings: EnvConfig = UNCHANGED) -> Self:
        """Chooses what is learned.

        Args:
            task: name in `rlvlm.envs.registry`, of a kind that the algorithm plays.
            env_settings: rules, robot, length of episodes and number of envs.
        """
        return self._take(task=task, env_settings=env_settings)

    def validate(self) -> None:
        """Checks what can be checked before anything starts.

        Raises:
            ValueError: says which setting is wrong and what to do.
        """
        with quiet_rllib():
            super().validate()
        if not self.task:
            raise ValueError("no task was chosen; call .envs(task=...), `rlvlm check-task --list` has their names")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be 0 to 2^32 - 1, got {self.seed!r}; runs repeat, so there is no random one")

    def build_algo(self, *arguments: Any, **settings: Any) -> Algorithm:
        """The algorithm, as RLlib builds it; what RLlib logs from then on is up to `log_level`, if that was chosen."""
        with quiet_rllib():
            algorithm = super().build_algo(*arguments, **settings)
        if self.log_level != _QUIET:
            logging.getLogger("ray.rllib").setLevel(self.log_level)
        return algorithm

    def _take(self, **chosen: Any) -> Self:
        for name, value in chosen.items():
            if value is not UNCHANGED:
                setattr(self, name, value)
        return self


class ManualLearner(TorchLearner):
    """A learner that is handed what it learns from by the algorithm, and takes its own steps."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Nothing to register: the learner's own optimiser takes the steps."""

    def _make_modules_ddp_if_necessary(self) -> None:
        """Gradients are summed by `algorithms.learners`, so that shares may be uneven; RLlib's wrapper averages."""

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Tensor:
        """RLlib's own path from episodes to a loss, which our learners do not take.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{type(self).__name__} is handed what it learns from; call `learn`")


def gpus_of_learner(device: str) -> int:
    """GPUs that RLlib is to give the learner of this process: 1 where `device` (auto, cpu or cuda) means one, else 0.

    With it a Tuner's trial reserves a GPU, and the learner, its replay and its batches lie there.

    Raises:
        ModelUnavailable: `cuda` is wanted and there is none here.
    """
    return int(pick_device(device, "algo").type != "cpu")


@contextmanager
def quiet_rllib() -> Iterator[None]:
    """While RLlib checks and builds it warns of its own ways; users cannot act on that. Afterwards all is as before."""
    levels = {name: logging.getLogger(name).level for name in _NOISY_LOGGERS}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(_QUIET)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def configure_torch(threads: int) -> None:
    """Torch as our learners want it in their process: `threads` CPU threads, and fresh memory left alone."""
    torch.set_num_threads(threads)
    # RLlib asks torch for determinism, which also writes NaN to all fresh memory, a replay's at once.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def only_learner(algorithm: Algorithm, threads: int) -> Any:
    """The one learner that RLlib has built in this process, which will compute with `threads` CPU threads."""
    configure_torch(threads)
    learners: Any = algorithm.learner_group  # RLlib's types want a function of two
    return next(iter(learners.foreach_learner(lambda learner: learner))).get()


def log_round(algorithm: Algorithm, stats: TrainingStats, report: dict[str, float]) -> None:
    """Hands a round's numbers to RLlib; `score` is always there and always finite, as Tune requires."""
    steps = (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME)
    algorithm.metrics.log_value(steps, stats.take_new_steps(), reduce="lifetime_sum", with_throughput=True)
    for name, value in report.items():
        algorithm.metrics.log_value(tuple(name.split("/")), value, window=1)
    algorithm.metrics.log_value("score", report.get(metrics.TRAIN_EPISODE_SUCCESS, 0.0), window=1)
