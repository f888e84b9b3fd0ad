"""Objects made from a run's configuration: its algorithm, its players, and its drawing. What differs by kind of env is
in the `Kind`s.
"""

import importlib
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.tune.trainable import trainable

from rlvlm.algorithms.base import BaseAlgorithm, BaseConfig
from rlvlm.algorithms.evaluation import Draw, Players
from rlvlm.algorithms.policy_gradient.algorithm_config import MakeEngine
from rlvlm.core.steps import Frames
from rlvlm.envs.registry import make_env
from rlvlm.envs.slots import make_slot
from rlvlm.judges.build import open_person
from rlvlm.judges.goal_image import read_goal_image
from rlvlm.judges.judge import MakeJudge
from rlvlm.runs.files.folder import RunFolder, label_store
from rlvlm.runs.settings.config import JUDGE_ROLE, RunConfig
from rlvlm.runs.settings.kinds import TurnsRun
from rlvlm.runs.start.placement import HeldPlaces


@contextmanager
def imported_meanwhile(config: RunConfig) -> Iterator[None]:
    """Imports packages for a run's networks in a thread, while this one waits for Ray's processes in the context.

    None of Ray's is among them: two threads that import the same package may see parts of it.
    """

    def load() -> None:
        # an import that fails here fails again, with its error, where it is needed
        with suppress(Exception):
            importlib.import_module("torch._dynamo")  # of torch's optimisers
            # chat VLMs, the pocket one too, and checkpoints of VLAs
            if config.large_policy is not None or (isinstance(config, TurnsRun) and not config.policy.is_own):
                importlib.import_module("transformers.modeling_utils")
                importlib.import_module("rlvlm.policies.vlm.loading")

    thread = threading.Thread(target=load, name="imports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def open_algorithm(config: RunConfig, make_judge: MakeJudge | None, places: HeldPlaces) -> Iterator[BaseAlgorithm]:
    """Yields the algorithm of a run, ready to train or to be restored; stops it, and the Serve app that samples for it,
    when the context closes. All its processes start in `places`.
    """
    torch.set_num_threads(config.algo.threads)
    with ExitStack() as stack:
        make_engine = None
        if config.num_engine_replicas:
            make_engine = stack.enter_context(_running_engine(config, places))
        settings = algorithm_settings(config, make_judge, make_engine)
        settings.learner_places = places.of_learners
        # RLlib starts env runners wherever there is room
        places.release(role.name for role in config.roles if not role.learns)
        with places.bounded_start():
            algorithm = stack.enter_context(built(settings))
        yield algorithm


@contextmanager
def _running_engine(config: Any, places: HeldPlaces) -> Iterator[MakeEngine]:
    """Yields a maker of clients for the replicas that sample for a text policy; they stop when the context closes."""
    from rlvlm.serving.apps import running_policy  # Serve is slow to import, and many runs do not need it
    from rlvlm.serving.engine import ServedEngine

    engine = config.engine
    slot = make_slot(config.task, config.env)
    num_actions = len(slot.env.action_names)
    slot.env.close()
    (role,) = (role.name for role in config.roles if role.is_served and role.name != JUDGE_ROLE)
    places.release([role])
    with running_policy(
        config.policy,
        num_actions,
        engine.placement,
        config.task,
        # all envs ask at once, and each replica answers its share in one forward pass
        batch_size=-(-max(config.algo.num_envs, config.eval.num_envs) // engine.num_replicas),
        vllm=engine.vllm if engine.backend == "vllm" else None,
        shares_gpus=engine.colocated,
        placing=places.placing(role),
    ) as app:
        yield partial(ServedEngine, app, config=engine)


@contextmanager
def built(settings: AlgorithmConfig) -> Iterator[Any]:
    """Yields the algorithm that RLlib builds from `settings`; stops it when the context closes."""
    # RLlib makes an empty folder per algorithm, by default in the user's home, which may not be writable; this constant
    # is the only way, because RLlib passes no other path on
    trainable.DEFAULT_STORAGE_PATH = ray.get_runtime_context().get_temp_dir()  # pyright: ignore[reportPrivateImportUsage]
    algorithm: Algorithm = settings.build_algo()
    try:
        yield algorithm
    finally:
        algorithm.stop()
        shutil.rmtree(str(algorithm.logdir), ignore_errors=True)


def algorithm_settings(
    config: RunConfig, make_judge: MakeJudge | None, make_engine: MakeEngine | None = None
) -> BaseConfig:
    """Returns RLlib's settings of a run's algorithm; `validate()` of them does not need Ray.

    Args:
        config: config of the run.
        make_judge: makes the judge's client in the asking process; None if no judge is used.
        make_engine: makes the client of a policy's sampling engine; None samples in the run's own process.
    """
    image = goal_image(config)
    settings = config.kind.algorithm(config, make_judge, make_engine, image)
    if config.kind.asks_person(config):
        assert config.out is not None, "a run that is open has a folder"
        store = label_store(RunFolder(config.out, config.track.keep_checkpoints), config).folder
        settings.settings(make_person=partial(open_person, config.judge, store), goal_picture=image)
    return settings.debugging(seed=config.seed)


def goal_image(config: RunConfig) -> Frames | None:
    """Returns [1, H, W, 3], the image shown to the run's judge with every question; None if there is none.

    Raises:
        UsageError: it cannot be read.
    """
    return read_goal_image(config.goal_file, config.judge.image_px) if config.goal_file else None


def open_players(config: RunConfig, checkpoint: Path) -> Players:
    """Opens the policy in a checkpoint's folder, and the players it is compared with."""
    torch.set_num_threads(config.algo.threads)
    return config.kind.players(config, checkpoint)


@contextmanager
def film_draw(config: RunConfig, draw: Draw) -> Iterator[Draw]:
    """Yields a version of `draw` for people: with the robot, if the policy and judge do not see it."""
    if (shown := config.env.for_people()) == config.env:
        yield draw
        return
    env = make_env(config.task, shown, config.seed)
    try:
        yield env.draw
    finally:
        env.close()
