"""RLlib's `Algorithm`, `AlgorithmConfig` and `EnvRunner` as all our algorithms use them; `learners` has the rest.

An algorithm of ours is trained in rounds, looked at, saved and gone on with by RLlib's public calls. It plays, labels
and learns with its own code, so most of RLlib's settings have no effect: `reject_unused_settings` finds those that
is set all the same.
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
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.from_config import NotProvided
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
)

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

UNCHANGED: Any = NotProvided
"""Value of an argument that leaves its setting unchanged."""
_NOISY_LOGGERS = ("ray.rllib", "ray.tune.utils.util", "ray._common.deprecation")
_QUIET = "ERROR"
_SET_UP_TRIES = 5

_USED_CALLBACKS = {"on_algorithm_init", "on_train_result", "on_evaluate_start", "on_evaluate_end"}
"""RLlib callbacks that we call. The others belong to its episodes and its own restoring, which are not ours."""
_USED_SETTINGS = {
    *("algo_class", "framework_str", "seed", "log_level", "log_sys_usage", "stats_cls_lookup", "callbacks_class"),
    *("evaluation_interval", "evaluation_duration", "in_evaluation"),
    *("min_time_s_per_iteration", "min_train_timesteps_per_iteration", "min_sample_timesteps_per_iteration"),
    # where it runs
    *("placement_strategy", "num_cpus_for_main_process", "custom_resources_for_main_process", "local_gpu_idx"),
    *("extra_python_environs_for_driver", "extra_python_environs_for_worker"),
    *("num_learners", "num_cpus_per_learner", "num_gpus_per_learner", "custom_resources_per_learner"),
    *("max_requests_in_flight_per_learner", "env_runner_cls", "num_env_runners", "create_local_env_runner"),
    *("num_cpus_per_env_runner", "num_gpus_per_env_runner", "custom_resources_per_env_runner"),
    # the treatment of lost env runners
    *("sample_timeout_s", "validate_env_runners_after_construction", "max_requests_in_flight_per_env_runner"),
    *("restart_failed_env_runners", "ignore_env_runner_failures", "max_num_env_runner_restarts"),
    *("delay_between_env_runner_restarts_s", "env_runner_health_probe_timeout_s", "env_runner_restore_timeout_s"),
    "num_consecutive_env_runner_failures_tolerance",
    # RLlib's own bookkeeping, which it changes as it likes
    *("_is_frozen", "_validate_config", "policies", "simple_optimizer", "_prior_exploration_config"),
}
"""RLlib's settings that our algorithms read, or that RLlib's part of them does."""


class Unset(float):
    """RLlib's default of a hyperparameter that is not set; setting the same number counts as set."""


class BaseConfig(AlgorithmConfig):
    """An RLlib config with a task and its envs. Ours hold frozen config sections, which a sweep may replace.

    Args:
        algo_class: the algorithm; None for a config that is only compared with others and never built.
        runner: what plays.
    """

    own_settings: ClassVar[str] = ".learning(...)"
    """How our hyperparameters are set, for messages."""
    taken_settings: ClassVar[tuple[str, ...]] = ()
    """RLlib's own hyperparameters that the algorithm takes over."""

    def __init__(self, algo_class: type[Algorithm] | None, runner: type[EnvRunner]) -> None:
        super().__init__(algo_class)
        self.task = ""
        self.env_settings: Any = StepEnvConfig()
        self.seed = 0
        self.gamma, self.lr = Unset(self.gamma), Unset(self.lr)
        self.env_runner_cls = runner
        self.num_env_runners = self.num_learners = 0
        self.create_local_env_runner = True
        self.merge_env_runner_states = self.broadcast_env_runner_states = False  # there are no connectors
        self.delay_between_env_runner_restarts_s = self.env_runner_health_probe_timeout_s = 1.0
        self.env_runner_restore_timeout_s = 300.0  # longest wait for one when all are lost
        self.min_time_s_per_iteration = None
        self.sample_timeout_s = 600.0  # of a single step, chunk or reset; a runner that takes longer is replaced
        self.log_level = _QUIET
        self._dont_auto_sync_env_runner_states = True

    def envs(self, *, task: str = UNCHANGED, env_settings: EnvConfig = UNCHANGED) -> Self:
        """Chooses what is learned.

        Args:
            task: name in `rlvlm.envs.registry`, of a kind that the algorithm plays.
            env_settings: rules, robot, length of episodes and number of envs; by default the task's own.
        """
        if task not in (UNCHANGED, "") and env_settings is UNCHANGED:
            env_settings = task_env(task)
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
        if not self.in_evaluation:  # RLlib's own copy, which it changes as it likes; no run uses it
            reject_unused_settings(self)

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


def reject_unused_settings(config: BaseConfig) -> None:
    """Raises unless every RLlib setting that the user changed is also used.

    Raises:
        ValueError: a setting differs from a fresh config and would be ignored; says what to set instead.
    """
    # compared with a fresh config of ours and not with RLlib's: we have set some of these ourselves
    make: Any = type(config)
    fresh = make()
    used = {*_USED_SETTINGS, *config.taken_settings, *(f"callbacks_{name}" for name in _USED_CALLBACKS)}
    for name in sorted(vars(AlgorithmConfig()).keys() - used):
        value, default = getattr(config, name), getattr(fresh, name)
        if name.startswith("callbacks_") and value is not None:
            _reject_callback(name.removeprefix("callbacks_"))
        if type(value) is not type(default) or value != default:  # of equal numbers, one may be `Unset`
            raise ValueError(
                f"{name.strip('_')} of RLlib's config is not used here, got {value!r}; leave it out: hyperparameters "
                f"are set by {config.own_settings}, task and envs by .envs(task=..., env_settings=EnvConfig(...)), and "
                "evaluations are whole episodes in this process, by .evaluation(evaluation_interval=..., "
                "evaluation_duration=...)"
            )
    # methods of a callback class: one that is overridden is meant to be called
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
    """Everything of RLlib's life cycle that stands on `save_checkpoint`, `load_checkpoint` and `evaluate_policy`, and
    what a run asks for besides, which is all that the run's loop knows of an algorithm: it is trained in rounds, looked
    at, saved, and gone on with. A continuation is exact: after `load_checkpoint` all but wall-clock time repeats to the
    bit. Evaluations and checkpoints come between rounds, so a round lasts seconds.

    A state is a whole checkpoint: what `get_state` returns and what `save_to_path` writes are the same files.
    """

    config: Any
    _stats: TrainingStats
    _viewer: Any
    """An env that only draws; it is not played."""
    runners: Any = None
    """The group of runners that act, where the algorithm has one."""

    def setup(self, config: AlgorithmConfig) -> None:
        """Builds what RLlib builds; called by RLlib.

        RLlib asks its first env runner for the spaces, once, and raises an IndexError where that call is lost or the
        runner dies as it begins. Then it builds again, with new runners, which begin as those did.

        Raises:
            MachineError: no try got an answer.
        """
        PIXELS.register(self)
        for number in range(_SET_UP_TRIES):
            try:
                return super().setup(config)
            except IndexError:
                group = self.env_runner_group
                if group is None or self.spaces is not None:
                    raise  # not ours
                group.stop()
                logger.warning("set-up, try %d of %d: the first env runner was lost", number + 1, _SET_UP_TRIES)
        raise MachineError(
            f"the first env runner was lost in each of {_SET_UP_TRIES} tries to set up the algorithm",
            "look for what ends it (memory? network?), then start again, with fewer of them",
        )

    @property
    def env_steps(self) -> int:
        """Env steps so far, of all envs together; those of demonstrations do not count."""
        return self._stats.env_steps

    def prepare(self, log: Callable[[str], None]) -> bool:
        """Runs before the first round of a new run: does nothing unless there is a supervised start.

        Args:
            log: takes a line on what is being done now.

        Returns:
            Whether there is something to look at already: the run then evaluates the policy at step 0 and saves it.
        """
        return False

    def flush_pending(self) -> None:
        """Learns from rollouts that are under way, where there are any: called before an evaluation or a checkpoint, so
        that both are of one moment.
        """

    def finish(self) -> None:
        """Waits for answers that are still to come; called once, after the last round."""

    def drain_records(self) -> list[Any]:
        """Questions and answers since the last call; the run's pipeline knows how to write it down."""
        raise NotImplementedError("each algorithm asks others about something else")

    def evaluate_policy(self, num_episodes: int) -> Evaluation:
        """Episodes of the present policy on the true task."""
        raise NotImplementedError("each algorithm has its own player")

    def rewarded(self, episodes: Sequence[PlayedEpisode]) -> list[PlayedEpisode]:
        """The first of the last evaluation's episodes, about to be filmed: with what the reward source makes of each
        moment, where it was not asked when they were played.

        Raises:
            JudgeUnavailable: it does not answer.
        """
        return list(episodes)

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Images [N, H, W, 3] of `snapshots` [N, S]; `size_px` is the side wanted, for envs that have no size."""
        return self._viewer.draw(snapshots)

    @property
    def image_note(self) -> str:
        """Images kept of an env that cannot draw its past again, and their size, in words; else empty."""
        if self._viewer.pixels is None:
            return ""
        self._viewer.reset(seed=self.config.seed)  # measured on an image
        return f"{self.config.task}: {self._viewer.pixels.note}"

    def draw_for_judge(self, snapshots: FloatArray, size_px: int) -> Frames:
        """The same as `draw`, as the judge is shown it."""
        return self.draw(snapshots, size_px)

    def paint_for_judge(self, image: NDArray[np.uint8], path: FloatArray) -> NDArray[np.uint8]:
        """`image` [H, W, 3] of `draw_for_judge` with the hand's path through the moments `path` [P, S]."""
        return self._viewer.draw_path(image, path)

    def report(self) -> dict[str, float]:
        """The newest numbers by their names in `rlvlm.core.metrics`."""
        return self._stats.report()

    def log_round(self) -> None:
        """Hands a round's numbers to RLlib; `score` is always there and always finite, as Tune requires."""
        # under the name by which RLlib and Tune know env steps, e.g. in a stopping rule
        steps, report = (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), self.report()
        self.metrics.log_value(steps, self._stats.take_new_steps(), reduce="lifetime_sum", with_throughput=True)
        for name, value in report.items():
            self.metrics.log_value(tuple(name.split("/")), value, window=1)
        self.metrics.log_value("score", report.get(metrics.TRAIN_EPISODE_SUCCESS, 0.0), window=1)

    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Takes env runners back in that were lost and have been started again; RLlib asks before every round."""
        return [] if self.runners is None else self.runners.revive()

    def cleanup(self) -> None:
        """Closes the envs and lets RLlib stop the rest."""
        super().cleanup()
        self._viewer.close()
        PIXELS.release(self)

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """`config.evaluation_duration` episodes of the present policy; training does not notice.

        Returns:
            Under RLlib's names: mean return and number of episodes; beside them `success_rate` and our own metrics.
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
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, dict[str, bytes]]:
        """The files of a checkpoint, by their names.

        Raises:
            UsageError: only some components were asked for.
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
            CorruptCheckpoint: it is damaged.
        """
        with TemporaryDirectory() as folder:
            for name, content in state["checkpoint"].items():
                file = Path(folder) / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            self.load_checkpoint(folder)

    def save_to_path(self, path: Any = None, **kwargs: Any) -> str:
        """Saves a checkpoint in the folder `path`, by default a new one; returns the folder.

        Raises:
            UsageError: something else than the present state is to be saved, or not on a disk of this machine.
        """
        if kwargs.get("state") is not None or kwargs.get("filesystem") is not None:
            raise UsageError("only the present state is saved, on a disk", "call save_to_path(folder)")
        folder = Path(path or mkdtemp(prefix="rlvlm-"))
        folder.mkdir(parents=True, exist_ok=True)
        self.save_checkpoint(str(folder))
        return str(folder)

    def restore_from_path(self, path: Any, **kwargs: Any) -> None:
        """Goes on from what `save_to_path` or `save_checkpoint` wrote, with the same config.

        Raises:
            CorruptCheckpoint: it is damaged.
            UsageError: only a component is to be restored, or not from a disk of this machine.
        """
        if kwargs.get("component") is not None or kwargs.get("filesystem") is not None:
            raise UsageError("the state is one piece, on a disk", "call restore_from_path(folder)")
        self.load_checkpoint(str(path))

    @classmethod
    def from_checkpoint(cls, path: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a checkpoint holds no config, since nothing is pickled and a config holds functions.

        Raises:
            UsageError: always, with what to do.
        """
        raise UsageError(
            f"a checkpoint of {cls.__name__} holds no config, since nothing is pickled",
            f"build the algorithm from its config and call restore_from_path({str(path)!r}); for the folder of a run, "
            "`rlvlm resume DIR`",
        )

    def get_module(self, module_id: str = DEFAULT_MODULE_ID) -> Any:
        """The networks that are trained, as an `RLModule`; None for another name than the default."""
        learners: Any = self.learner_group  # RLlib's types want a function of two

        def module(learner: Any) -> Any:
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
    """An env runner whose policy, settings and random numbers come with each call of our own.

    Args:
        config: of the algorithm.
        worker_index: 0 in the learner's process, from 1 on elsewhere; RLlib passes it, and more that is not used.
    """

    config: Any
    env: Any

    def __init__(self, *, config: Any, worker_index: int = 0, **unused: Any) -> None:
        super().__init__(config=config, worker_index=worker_index)
        if worker_index > 0:
            start_heartbeat()

    def branch(self, restart: int) -> tuple[int, ...]:
        """Which runner this is, and how often it was replaced: what its random numbers branch off by. The learner's
        process and the first actor are one, and empty: a run with one actor plays what a run without any would play.
        """
        own = max(self.worker_index - 1, 0), restart
        return own if any(own) else ()

    def assert_healthy(self) -> None:
        """Nothing to check: a runner either lives or has raised."""

    def set_state(self, state: dict[str, Any]) -> None:
        """RLlib sends weights and connectors here; ours come with a turn, and there are no connectors."""


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
