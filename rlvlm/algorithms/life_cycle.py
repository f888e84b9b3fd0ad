"""RLlib's public life cycle, over checkpoints: what works, and what is refused by name. Shared by all algorithms."""

import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NoReturn

import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN, NUM_EPISODES

from rlvlm.algorithms.evaluation import Evaluation, PlayedEpisode
from rlvlm.algorithms.rllib import Unset
from rlvlm.core.errors import MachineError, UsageError

logger = logging.getLogger(__name__)

_SET_UP_TRIES = 5

_UNUSED = {
    "training": (
        "gamma",
        "lr",
        "grad_clip",
        "train_batch_size",
        "_train_batch_size_per_learner",
        "num_epochs",
        "minibatch_size",
        "shuffle_batch_per_epoch",
        "_learner_connector",
        "_learner_class",
    ),
    "rl_module": ("_model_config", "_rl_module_spec", "algorithm_config_overrides_per_module"),
    "environment": ("env", "env_config", "observation_space", "action_space", "clip_rewards", "render_env"),
    "env_runners": (
        "num_envs_per_env_runner",
        "batch_mode",
        "explore",
        "_env_to_module_connector",
        "_module_to_env_connector",
        "observation_filter",
        "compress_observations",
        "gym_env_vectorize_mode",
    ),
    "multi_agent": ("policies_to_train", "policy_mapping_fn"),
    "evaluation": ("evaluation_config", "offline_evaluation_interval"),
    "reporting": ("metrics_num_episodes_for_smoothing", "keep_per_episode_custom_metrics"),
    "checkpointing": ("export_native_model_files",),
}
"""Settings of RLlib that nothing here reads, by the method that sets them; they must be as RLlib has them."""
_WORLDS = ".envs(task=..., env_settings=EnvConfig(...))"
_EPISODE_CALLBACKS = (
    "on_episode_created",
    "on_episode_start",
    "on_episode_step",
    "on_episode_end",
    "on_sample_end",
    "on_environment_created",
)
"""Called by RLlib's env runners, with RLlib's episodes. Ours have none."""
_EVALUATION = {
    "evaluation_num_env_runners": 0,
    "evaluation_parallel_to_training": False,
    "evaluation_duration_unit": "episodes",
    "custom_evaluation_function": None,
}
"""What may not be changed about evaluations: they are whole episodes of the algorithm's own player."""


def reject_unsupported_settings(config: AlgorithmConfig, section: str, taken: tuple[str, ...] = ()) -> None:
    """Passes where everything that RLlib was told is also done.

    Args:
        config: to be checked.
        section: how our hyperparameters are set, for the message, e.g. `.learning(sac=SACConfig(...))`.
        taken: those of RLlib's own hyperparameters that the algorithm takes over.

    Raises:
        ValueError: names a setting that would be ignored, and the one to use.
    """
    if config.in_evaluation:  # RLlib's own copy, which it changes as it likes; nobody runs by it
        return
    plain = AlgorithmConfig()
    instead = {"training": section, "rl_module": section, "environment": _WORLDS, "env_runners": _WORLDS}
    for method, names in _UNUSED.items():
        for name in names:
            now, default = getattr(config, name), getattr(plain, name)
            is_chosen = not isinstance(now, Unset) if name in ("gamma", "lr") else now != default
            if is_chosen and name not in taken:
                fix = f"set yours by {instead[method]}" if method in instead else "leave it out"
                raise ValueError(f"{name.strip('_')} of RLlib's .{method}() is not used here; {fix}")
    for name in _EPISODE_CALLBACKS:
        classes = config.callbacks_class if isinstance(config.callbacks_class, list) else [config.callbacks_class]
        inherited = [getattr(each, name, None) is getattr(plain.callbacks_class, name) for each in classes]
        if not all(inherited) or getattr(config, f"callbacks_{name}", None):
            raise ValueError(
                f"the callback {name} would never be called: our env runners know no RLlib episodes; use "
                "on_train_result and on_evaluate_end, which have the metrics"
            )
    for name, value in _EVALUATION.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name} must stay {value!r}, got {getattr(config, name)!r}: evaluations are whole episodes in this "
                "process, set by .evaluation(evaluation_interval=..., evaluation_duration=...)"
            )


class CheckpointedAlgorithm(Algorithm):
    """Everything of RLlib's life cycle that stands on `save_checkpoint`, `load_checkpoint` and `evaluate_policy`.

    A state is a whole checkpoint: what `get_state` returns and what `save_to_path` writes are the same files.
    """

    config: Any

    def setup(self, config: AlgorithmConfig) -> None:
        """Builds what RLlib builds; called by RLlib.

        RLlib asks its first env runner for the spaces, once, and raises an IndexError where that call is lost or the
        runner dies as it begins. Then it builds again, with new runners, which begin as those did.

        Raises:
            MachineError: no try got an answer.
        """
        for number in range(_SET_UP_TRIES):
            try:
                return super().setup(config)
            except IndexError:
                group = self.env_runner_group
                if group is None or self.spaces is not None:
                    raise  # somebody else's
                group.stop()
                logger.warning("set-up, try %d of %d: the first env runner was lost", number + 1, _SET_UP_TRIES)
        raise MachineError(
            f"the first env runner was lost in each of {_SET_UP_TRIES} tries to set up the algorithm",
            "look for what ends it (memory? network?), then start again, with fewer of them",
        )

    def evaluate_policy(self, num_episodes: int) -> Evaluation:
        """Episodes of the present policy on the true task."""
        raise NotImplementedError("each algorithm has its own player")

    def rewarded(self, episodes: Sequence[PlayedEpisode]) -> list[PlayedEpisode]:
        """`episodes` to be filmed, as they are: those that have a source to ask were given its rewards in play."""
        return list(episodes)

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """`config.evaluation_duration` episodes of the present policy; training does not notice.

        Returns:
            Under RLlib's names: mean return and number of episodes; beside them `success_rate` and our own metrics.
        """
        self._call_back("on_evaluate_start")
        evaluation = self.evaluate_policy(self.config.evaluation_duration)
        results = {
            ENV_RUNNER_RESULTS: {
                EPISODE_RETURN_MEAN: float(np.mean([one.env_return for one in evaluation.episodes])),
                NUM_EPISODES: len(evaluation.episodes),
            },
            "success_rate": float(np.mean([one.is_success for one in evaluation.episodes])),
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
