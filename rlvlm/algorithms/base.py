"""RLlib's `Algorithm`, `AlgorithmConfig` and `EnvRunner` adapted for all our algorithms; `learners` has the rest.

RLlib's public calls train our algorithms in rounds, evaluate, save and resume them. Rollouts, labels and updates use
our own code, so most of RLlib's settings have no effect: `reject_unused_settings` finds those that are set anyway.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
from numpy.typing import NDArray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
)
from ray.util.placement_group import PlacementGroup

from rlvlm.algorithms.checkpoint import Saving
from rlvlm.algorithms.evaluation import Evaluation, PlayedEpisode
from rlvlm.algorithms.heartbeat import start_heartbeat
from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.core import metrics
from rlvlm.core.errors import MachineError, UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import EnvConfig, StepEnvConfig
from rlvlm.envs.pixels import PIXELS
from rlvlm.envs.registry import task_env

logger = logging.getLogger(__name__)

_NOISY_LOGGERS = ("ray.rllib", "ray.tune.utils.util", "ray._common.deprecation")
_QUIET = "ERROR"
_SET_UP_TRIES = 5

_USED_CALLBACKS = {"on_algorithm_init", "on_train_result", "on_evaluate_start", "on_evaluate_end"}
"""RLlib callbacks that we call. The others concern its episodes and its own restoring, which we do not use."""
_USED_SETTINGS = {
    *("algo_class", "framework_str", "seed", "log_level", "log_sys_usage", "stats_cls_lookup", "callbacks_class"),
    *("evaluation_interval", "evaluation_duration", "in_evaluation"),
    *("min_time_s_per_iteration", "min_train_timesteps_per_iteration", "min_sample_timesteps_per_iteration"),
    # resources
    *("placement_strategy", "num_cpus_for_main_process", "custom_resources_for_main_process", "local_gpu_idx"),
    *("extra_python_environs_for_driver", "extra_python_environs_for_worker"),
    *("num_learners", "num_cpus_per_learner", "num_gpus_per_learner", "custom_resources_per_learner"),
    *("max_requests_in_flight_per_learner", "env_runner_cls", "num_env_runners", "create_local_env_runner"),
    *("num_cpus_per_env_runner", "num_gpus_per_env_runner", "custom_resources_per_env_runner"),
    # replacement of lost env runners
    *("sample_timeout_s", "validate_env_runners_after_construction", "max_requests_in_flight_per_env_runner"),
    *("restart_failed_env_runners", "ignore_env_runner_failures", "max_num_env_runner_restarts"),
    *("delay_between_env_runner_restarts_s", "env_runner_health_probe_timeout_s", "env_runner_restore_timeout_s"),
    "num_consecutive_env_runner_failures_tolerance",
    # RLlib's own bookkeeping, which it changes itself
    *("_is_frozen", "_validate_config", "policies", "simple_optimizer", "_prior_exploration_config"),
}
"""RLlib settings used by our algorithms, or by the parts of RLlib that they use."""


class Unset(float):
    """RLlib's default of a hyperparameter that was not set; setting the same number counts as set."""


class BaseConfig(AlgorithmConfig):
    """An RLlib config with a task and its envs. Subclasses hold frozen config sections, which a sweep may replace.

    Args:
        algo_class: class of the algorithm; None for a config that is only used for comparison and never built.
        runner: class of the env runners.
    """

    task: str = ""
    """Name in `rlvlm.envs.registry`, of a kind that the algorithm supports."""
    env_settings: EnvConfig = StepEnvConfig()
    """Settings such as rules, robot, episode length and number of envs; chosen with a task, the task's own."""
    example: ClassVar[str] = "..."
    """How hyperparameters are set, for messages."""
    taken_settings: ClassVar[tuple[str, ...]] = ()
    """RLlib's own hyperparameters that the algorithm uses."""

    def __init__(self, algo_class: type[Algorithm] | None, runner: type[EnvRunner]) -> None:
        super().__init__(algo_class)
        self.seed = 0
        self.gamma, self.lr = Unset(self.gamma), Unset(self.lr)
        self.env_runner_cls = runner
        self.num_env_runners = self.num_learners = 0
        self.create_local_env_runner = True
        self.merge_env_runner_states = self.broadcast_env_runner_states = False  # we use no connectors
        self.delay_between_env_runner_restarts_s = self.env_runner_health_probe_timeout_s = 1.0
        self.env_runner_restore_timeout_s = 300.0  # maximum wait for an env runner when all are lost
        self.min_time_s_per_iteration = None
        self.sample_timeout_s = 600.0  # for a single step, chunk or reset; a runner that takes longer is replaced
        self.log_level = _QUIET
        self._dont_auto_sync_env_runner_states = True
        self.learner_places: PlacementGroup | None = None
        """Placement group in which the learners start; None: wherever Ray finds room."""

    def build_learner_group(self, *, placement_group: PlacementGroup | None = None, **settings: Any) -> LearnerGroup:
        """Builds the learners in `learner_places`; called by RLlib."""
        return super().build_learner_group(placement_group=placement_group or self.learner_places, **settings)

    def settings(self, **chosen: Any) -> Self:
        """Sets settings of ours, the attributes that the class describes, by name; the others stay as they are.

        Raises:
            ValueError: there is no such setting.
        """
        known = {name for each in type(self).__mro__ if issubclass(each, BaseConfig) for name in each.__annotations__}
        if unknown := chosen.keys() - known:
            raise ValueError(f"there is no setting {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
        if chosen.get("task"):
            chosen = {"env_settings": task_env(chosen["task"])} | chosen
        for name, value in chosen.items():
            setattr(self, name, value)
        return self

    def validate(self) -> None:
        """Checks everything that can be checked before anything starts.

        Raises:
            ValueError: a setting is wrong; the message says which and what to do.
        """
        with quiet_rllib():
            super().validate()
        if not self.task:
            raise ValueError("no task was chosen; call .settings(task=...), `rlvlm check-task --list` has their names")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be 0 to 2^32 - 1, got {self.seed!r}; runs repeat, so there is no random one")
        if not self.in_evaluation:  # RLlib's own copy, which it changes itself and no run uses
            reject_unused_settings(self)

    def build_algo(self, *arguments: Any, **settings: Any) -> Algorithm:
        """Builds the algorithm through RLlib; its later logging follows `log_level`, if that was set."""
        with quiet_rllib():
            algorithm = super().build_algo(*arguments, **settings)
        if self.log_level != _QUIET:
            logging.getLogger("ray.rllib").setLevel(self.log_level)
        return algorithm


def reject_unused_settings(config: BaseConfig) -> None:
    """Raises unless every RLlib setting that the user changed has an effect.

    Raises:
        ValueError: a setting differs from a fresh config and would be ignored; the message says what to set instead.
    """
    # compared with a fresh config of ours rather than RLlib's, because we changed some defaults
    make: Any = type(config)
    fresh = make()
    used = {*_USED_SETTINGS, *config.taken_settings, *(f"callbacks_{name}" for name in _USED_CALLBACKS)}
    for name in sorted(vars(AlgorithmConfig()).keys() - used):
        value, default = getattr(config, name), getattr(fresh, name)
        if name.startswith("callbacks_") and value is not None:
            _reject_callback(name.removeprefix("callbacks_"))
        if type(value) is not type(default) or value != default:  # of equal numbers, one may be `Unset`
            raise ValueError(
                f"{name.strip('_')} of RLlib's config is not used here, got {value!r}; leave it out: task, envs and "
                f"hyperparameters are set by .settings(task=..., env_settings=EnvConfig(...), {config.example}), and "
                "evaluations are whole episodes in this process, by .evaluation(evaluation_interval=..., "
                "evaluation_duration=...)"
            )
    # methods of a callback class: an overridden one is meant to be called
    classes = config.callbacks_class if isinstance(config.callbacks_class, list) else [config.callbacks_class]
    for name in sorted(name for name in dir(RLlibCallback) if name.startswith("on_") and name not in _USED_CALLBACKS):
        if any(getattr(each, name, None) is not getattr(RLlibCallback, name) for each in classes):
            _reject_callback(name)


def _reject_callback(name: str) -> NoReturn:
    raise ValueError(
        f"the callback {name} would never be called: our env runners know no RLlib episodes; use on_train_result and "
        "on_evaluate_end, which have the metrics"
    )


class BaseAlgorithm(Algorithm):
    """RLlib's life cycle on top of `save_checkpoint`, `load_checkpoint` and `evaluate_policy`, and the methods of the
    run loop, which needs nothing else of an algorithm: it is trained in rounds, evaluated, saved and resumed. Resuming
    is exact: after `load_checkpoint` everything but wall-clock time repeats to the bit. Evaluations and checkpoints
    happen between rounds, so a round lasts seconds.

    A state is a whole checkpoint: `get_state` returns the same files that `save_to_path` writes.
    """

    config: Any
    _stats: TrainingStats
    _viewer: Any
    """An env that only draws; it is never stepped."""
    runners: Any = None
    """Group of env runners, if the algorithm has one."""

    def setup(self, config: AlgorithmConfig) -> None:
        """Builds the parts that RLlib builds; called by RLlib.

        RLlib asks its first env runner for the spaces, once, and raises an IndexError if that call is lost or the
        runner dies as it starts. In that case the build is repeated with new runners, which start like the first ones.

        Raises:
            MachineError: no attempt got an answer.
        """
        PIXELS.register(self)
        for number in range(_SET_UP_TRIES):
            try:
                return super().setup(config)
            except IndexError:
                group = self.env_runner_group
                if group is None or self.spaces is not None:
                    raise  # not the error handled here
                group.stop()
                logger.warning("set-up, try %d of %d: the first env runner was lost", number + 1, _SET_UP_TRIES)
        raise MachineError(
            f"the first env runner was lost in each of {_SET_UP_TRIES} tries to set up the algorithm",
            "look for what ends it (memory? network?), then start again, with fewer of them",
        )

    @property
    def env_steps(self) -> int:
        """Env steps so far, of all envs together, without those of demonstrations."""
        return self._stats.env_steps

    def prepare(self, log: Callable[[str], None], unfinished: Path | None = None) -> bool:
        """Runs before the first round of a new run: does nothing unless there is a supervised start.

        Args:
            log: receives progress messages.
            unfinished: folder for a supervised start that `log` stops with a `StoppedEarly`, or stopped before, which
                then continues exactly; None: it is lost.

        Returns:
            Whether the policy was trained already: the run then evaluates it at step 0 and saves it.
        """
        return False

    def flush_pending(self) -> None:
        """Learns from running rollouts, if there are any: called before an evaluation or a checkpoint, so that both are
        of the same moment.
        """

    def begin_checkpoint(self, folder: Path, previous: Path) -> Saving:
        """Begins a checkpoint of the present state, which is written while training goes on; the base method writes all
        of it at once.

        Args:
            folder: folder of the checkpoint.
            previous: folder of an earlier one, if it exists, whose files may be linked where they are the same.

        Raises:
            MachineError: the disk is full or cannot be written.
        """
        self.save_checkpoint(str(folder))
        return Saving()

    def finish(self) -> None:
        """Waits for outstanding answers; called once, after the last round."""

    def drain_records(self) -> list[Any]:
        """Returns questions and answers since the last call, which the run's pipeline writes to its logs."""
        raise NotImplementedError("each algorithm asks others about something else")

    def evaluate_policy(self, num_episodes: int) -> Evaluation:
        """Evaluates the present policy on the true task."""
        raise NotImplementedError("each algorithm has its own player")

    def rewarded(self, episodes: Sequence[PlayedEpisode]) -> list[PlayedEpisode]:
        """Returns the first of the last evaluation's episodes, for videos, with the reward source's rewards for each
        moment, if it was not asked when they were played.

        Raises:
            JudgeUnavailable: the judge does not answer.
        """
        return list(episodes)

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns images [N, H, W, 3] of `snapshots` [N, S]; `size_px` is the wanted side, for envs without a size."""
        return self._viewer.draw(snapshots)

    @property
    def image_note(self) -> str:
        """Returns number and size of stored images of an env that cannot draw its past again, as text; else empty."""
        if self._viewer.pixels is None:
            return ""
        self._viewer.reset(seed=self.config.seed)  # measured on an image
        return f"{self.config.task}: {self._viewer.pixels.note}"

    def draw_for_judge(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Draws like `draw`, but as the judge sees it."""
        return self.draw(snapshots, size_px)

    def paint_for_judge(self, image: NDArray[np.uint8], path: FloatArray) -> NDArray[np.uint8]:
        """Draws on `image` [H, W, 3] of `draw_for_judge` the hand's path through the moments `path` [P, S]."""
        return self._viewer.draw_path(image, path)

    def report(self) -> dict[str, float]:
        """Returns the newest metrics by their names in `rlvlm.core.metrics`."""
        return self._stats.report()

    def log_round(self) -> None:
        """Passes a round's metrics to RLlib; `score` is always there and always finite, as Tune requires."""
        # under RLlib's and Tune's name for env steps, e.g. for a stopping rule
        steps, report = (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), self.report()
        self.metrics.log_value(steps, self._stats.take_new_steps(), reduce="lifetime_sum", with_throughput=True)
        for name, value in report.items():
            self.metrics.log_value(tuple(name.split("/")), value, window=1)
        self.metrics.log_value("score", report.get(metrics.TRAIN_EPISODE_SUCCESS, 0.0), window=1)

    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Takes back env runners that were lost and restarted; RLlib calls it before every round."""
        return [] if self.runners is None else self.runners.revive()

    def cleanup(self) -> None:
        """Closes the envs and lets RLlib stop the rest."""
        super().cleanup()
        self._viewer.close()
        PIXELS.release(self)

    def evaluate(self, parallel_train_future: object = None) -> dict[str, Any]:
        """Runs `config.evaluation_duration` episodes of the present policy, without any effect on training.

        Returns:
            Under RLlib's names: mean return and number of episodes; besides them `success_rate` and our own metrics.
        """
        self._call_back("on_evaluate_start")
        evaluation = self.evaluate_policy(self.config.evaluation_duration)
        results = {
            ENV_RUNNER_RESULTS: {
                EPISODE_RETURN_MEAN: float(np.mean([episode.env_return for episode in evaluation.episodes])),
                NUM_EPISODES: len(evaluation.episodes),
            },
            "success_rate": float(np.mean([episode.is_success for episode in evaluation.episodes])),
            **evaluation.metrics,
        }
        self._call_back("on_evaluate_end", evaluation_metrics=results)
        return results

    def get_state(
        self, components: object = None, *, not_components: object = None, **kwargs: Any
    ) -> dict[str, dict[str, bytes]]:
        """Returns the files of a checkpoint, by name.

        Raises:
            UsageError: only some components were requested.
        """
        if components is not None or not_components is not None:
            raise UsageError("the state is one piece and has no components", "call get_state() without any")
        with TemporaryDirectory() as folder:
            self.save_checkpoint(folder)
            files = [file for file in Path(folder).rglob("*") if file.is_file()]
            return {"checkpoint": {str(file.relative_to(folder)): file.read_bytes() for file in files}}

    def set_state(self, state: dict[str, dict[str, bytes]]) -> None:
        """Restores what `get_state` returned.

        Raises:
            CorruptCheckpoint: the state is corrupt.
        """
        with TemporaryDirectory() as folder:
            for name, content in state["checkpoint"].items():
                file = Path(folder) / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            self.load_checkpoint(folder)

    def save_to_path(self, path: str | Path | None = None, **kwargs: Any) -> str:
        """Saves a checkpoint in the folder `path`, by default a new one; returns the folder.

        Raises:
            UsageError: something other than the present state is to be saved, or not on a local disk.
        """
        if kwargs.get("state") is not None or kwargs.get("filesystem") is not None:
            raise UsageError("only the present state is saved, on a disk", "call save_to_path(folder)")
        folder = Path(path or mkdtemp(prefix="rlvlm-"))
        folder.mkdir(parents=True, exist_ok=True)
        self.save_checkpoint(str(folder))
        return str(folder)

    def restore_from_path(self, path: str | Path | None, **kwargs: Any) -> None:
        """Resumes from a folder of `save_to_path` or `save_checkpoint`, with the same config.

        Raises:
            CorruptCheckpoint: the checkpoint is corrupt.
            UsageError: only a component is to be restored, or not from a local disk.
        """
        if kwargs.get("component") is not None or kwargs.get("filesystem") is not None:
            raise UsageError("the state is one piece, on a disk", "call restore_from_path(folder)")
        self.load_checkpoint(str(path))

    @classmethod
    def from_checkpoint(cls, path: object, *args: object, **kwargs: Any) -> NoReturn:
        """Always refuses: a checkpoint has no config, because nothing is pickled and a config contains functions.

        Raises:
            UsageError: always, with the fix.
        """
        raise UsageError(
            f"a checkpoint of {cls.__name__} holds no config, since nothing is pickled",
            f"build the algorithm from its config and call restore_from_path({str(path)!r}); for the folder of a run, "
            "`rlvlm resume DIR`",
        )

    def get_module(self, module_id: str = DEFAULT_MODULE_ID) -> RLModule | None:
        """Returns the trained networks as an `RLModule`; None for another name than the default."""
        learners: Any = self.learner_group  # RLlib's types want a function of two

        def module(learner: TorchLearner) -> RLModule | None:
            return learner.module[module_id] if module_id in learner.module else None

        return next(iter(learners.foreach_learner(module))).get()

    @classmethod
    def _should_create_evaluation_env_runners(cls, eval_config: AlgorithmConfig) -> bool:
        return False

    def _call_back(self, name: str, **more: Any) -> None:
        make_callback(
            name,
            callbacks_objects=self.callbacks,  # pyright: ignore[reportArgumentType] - a list, or one of them
            callbacks_functions=getattr(self.config, f"callbacks_{name}"),
            kwargs={"algorithm": self, "metrics_logger": self.metrics, **more},
        )


class BaseRunner(EnvRunner):
    """An env runner that receives policy, settings and random numbers with each of our calls.

    A runner group calls `sample(**turn)`, in the learner's process, or `act(values=..., **turn)` with the weights of
    the policy, in actors; `begin(restart)` for new episodes; and `save_tree` and `load_tree`, because RLlib passes
    weights to `set_state`.

    Args:
        config: config of the algorithm.
        worker_index: 0 in the learner's process, from 1 on elsewhere; RLlib passes it, and more that is unused.
    """

    config: Any
    env: Any

    def __init__(self, *, config: Any, worker_index: int = 0, **unused: object) -> None:
        super().__init__(config=config, worker_index=worker_index)
        if worker_index > 0:
            start_heartbeat()

    def branch(self, restart: int) -> tuple[int, ...]:
        """Returns the runner's identity and restart count, from which its random numbers branch off. It is empty for
        both the learner's process and the first actor: a run with one actor plays the same as a run without any.
        """
        own = max(self.worker_index - 1, 0), restart
        return own if any(own) else ()

    def assert_healthy(self) -> None:
        """Checks nothing: a runner either lives or has raised."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing: RLlib sends weights and connectors here; our weights come with each call."""


@contextmanager
def quiet_rllib() -> Iterator[None]:
    """Silences RLlib's warnings about its own design while it checks and builds; users cannot act on them."""
    levels = {name: logging.getLogger(name).level for name in _NOISY_LOGGERS}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(_QUIET)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
