"""Objects made from a run's configuration: RLlib's settings of its algorithm, its players, and its drawing.

Everything that differs by policy or algorithm is here; the rest of a run is the same for all.
"""

import importlib
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.tune.trainable import trainable

from rlvlm.algorithms.base import BaseAlgorithm
from rlvlm.algorithms.evaluation import Player
from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.algorithm_config import MakeEngine
from rlvlm.algorithms.policy_gradient.chunks import ChunkSampler
from rlvlm.algorithms.policy_gradient.player import (
    chunk_player,
    load_start,
    load_vla,
    load_vlm,
    script_player,
    turn_player,
)
from rlvlm.algorithms.policy_gradient.slots import EnvSlot, make_slot
from rlvlm.algorithms.policy_gradient.turns import Actor
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.collect import RandomPlayer, ScriptedExpert
from rlvlm.envs.images import FrameStore
from rlvlm.envs.registry import make_env
from rlvlm.judges.build import open_person
from rlvlm.judges.goal_image import read_goal_image, with_goal_image
from rlvlm.judges.judge import Judge
from rlvlm.policies.reply_policy import ReplyPolicy, ReplySampling
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import build_policy
from rlvlm.runs.files.folder import RunFolder, label_store
from rlvlm.runs.files.records import Draw
from rlvlm.runs.settings.answers_run import AnswersRun
from rlvlm.runs.settings.config import JUDGE_ROLE, RunConfig
from rlvlm.runs.settings.kinds import ChunksRun, StepsRun, TurnsRun
from rlvlm.runs.start.placement import HeldPlaces

MakeJudge = Callable[[], Judge]


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
        settings: Any = algorithm_settings(config, make_judge, make_engine)
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
) -> AlgorithmConfig:
    """Returns RLlib's settings of a run's algorithm; `validate()` of them does not need Ray.

    Args:
        config: config of the run.
        make_judge: makes the judge's client in the asking process; None if no judge is used.
        make_engine: makes the client of a policy's sampling engine; None samples in the run's own process.
    """
    settings = _SETTINGS[config.kind.name](config, make_judge, make_engine)
    return settings.debugging(seed=config.seed)


def step_settings(config: StepsRun, make_judge: MakeJudge | None, make_engine: MakeEngine | None) -> AlgorithmConfig:
    """See `algorithm_settings`."""
    from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig  # with SciPy, which other kinds do not need

    algorithm = SACPebbleConfig().settings(
        task=config.task, env_settings=config.env, sac=config.algo, reward=config.reward, feedback=config.feedback,
        reward_model=config.reward_model, judge=config.judge, goal=config.judge_goal, make_judge=make_judge,
        total_steps=config.steps,
    )  # fmt: skip
    if config.kind.asks_person(config):
        assert config.out is not None, "a run that is open has a folder"
        store = label_store(RunFolder(config.out, config.track.keep_checkpoints), config).folder
        algorithm.settings(make_person=partial(open_person, config.judge, store), goal_picture=goal_image(config))
    return algorithm


def turn_settings(config: TurnsRun, make_judge: MakeJudge | None, make_engine: MakeEngine | None) -> AlgorithmConfig:
    """See `algorithm_settings`."""
    policy, eval_envs = config.policy.in_run(config.seed), config.eval.num_envs
    own = {"env_settings": config.env, "policy": policy, "eval_envs": eval_envs, "make_engine": make_engine}
    return _answer_settings(config, make_judge, own)


def chunk_settings(config: ChunksRun, make_judge: MakeJudge | None, make_engine: MakeEngine | None) -> AlgorithmConfig:
    """See `algorithm_settings`."""
    own = {"env_settings": config.policy_env, "policy": config.policy, "judge_env": config.judge_env}
    return _answer_settings(config, make_judge, own)


def _answer_settings(config: AnswersRun, make_judge: MakeJudge | None, own: Mapping[str, Any]) -> AlgorithmConfig:
    reward, loss = config.reward, replace(config.algo.loss, correction=config.correction)
    fallback = reward.fallback_judge
    return PolicyGradientAlgorithmConfig().settings(
        task=config.task, algo=replace(config.algo, loss=loss), sft=config.sft, total_steps=config.steps,
        reward=reward, goal=config.goal, make_judge=make_judge,
        make_fallback_judge=partial(answering_judge, fallback, goal_image(config)) if fallback else None,
        refuses_faulty=config.judge.refuses_faulty, **own,
    )  # fmt: skip


def goal_image(config: RunConfig) -> Frames | None:
    """Returns [1, H, W, 3], the image shown to the run's judge with every question; None if there is none.

    Raises:
        UsageError: it cannot be read.
    """
    return read_goal_image(config.goal_file, config.judge.image_px) if config.goal_file else None


def answering_judge(app: str, image: Frames | None) -> Judge:
    """Returns the client of a Serve app that has answered once, as a fallback if the run's own judge is gone.

    Args:
        app: name of the app.
        image: goal image, shown with every question; None: none.

    Raises:
        JudgeUnavailable: there is no such app, or it does not answer.
    """
    from rlvlm.serving.client import ServedJudge  # slow to import, and rarely used

    judge = ServedJudge(app)
    try:
        _ = judge.stamp
    except JudgeUnavailable as error:
        fix = "start it with `rlvlm serve`, or leave out --reward.fallback-judge"
        raise JudgeUnavailable(f"reward.fallback_judge: {error}", fix) from error
    return with_goal_image(judge, image)


@dataclass(frozen=True, kw_only=True, slots=True)
class Players:
    """The players of `rlvlm eval`; none of them needs Ray or the judge."""

    own: Player
    """Player of a checkpoint's policy."""
    name: str = "policy"
    """Name of `own` among the others."""
    draw: Draw
    """Draws the snapshots of its episodes."""
    others: Mapping[str, Player] = field(default_factory=dict)
    """Players it is compared with, by display name: another decoding, the policy before its training, baselines."""
    has_success: bool = True
    """Whether the env can tell success."""
    milestones: Mapping[str, float] = field(default_factory=dict)
    """Milestones on the way to success, by name, and the progress at which it is reached."""


def open_players(config: RunConfig, checkpoint: Path) -> Players:
    """Opens the policy in a checkpoint's folder, and the players it is compared with."""
    return _PLAYERS[config.kind.name](config, checkpoint)


def step_players(config: StepsRun, checkpoint: Path) -> Players:
    """Returns the deterministic policy in an env of its own; if that has a single start, also from the random starts of
    its task, which training has not seen.
    """
    from rlvlm.algorithms.sac_pebble.player import StepsPlayer, load_policy  # as in `step_settings`

    policy = load_policy(checkpoint)
    env = make_env(config.task, config.env, config.seed)
    others: dict[str, Player] = {}
    # generalisation: training used one start, evaluation may use all
    if config.env.start != "random":
        elsewhere = replace(config.env, start="random")
        others["policy, random starts"] = StepsPlayer(policy, make_env(config.task, elsewhere, config.seed))

    return Players(
        own=StepsPlayer(policy, env),
        draw=lambda snapshots, size_px: FrameStore(env, size_px).frames(snapshots),
        others=others,
        has_success=env.has_success,
    )


def turn_players(config: TurnsRun, checkpoint: Path) -> Players:
    """Returns the policy and its initial state, greedy and sampled; the env's expert, if it has one; random actions.

    If starts were held out from training, the policy is also played on the others.
    """
    algo, num_envs = config.algo, config.eval.num_envs or config.algo.num_envs
    torch.set_num_threads(algo.threads)
    # starts that training never used, if the env's split holds some out
    held_out = config.env.for_evaluation()
    slots = partial(make_slot, config.task, held_out, config.policy.history)
    env = slots().env
    policy, start = (build_policy(config.policy, env) for _ in range(2))
    load_vlm(policy, checkpoint)

    def plays(who: ReplyPolicy, slots: Callable[[], EnvSlot] = slots) -> dict[str, Player]:
        sampling = ReplySampling(max_new_tokens=algo.max_reply_tokens, temperature=algo.temperature)
        actor = Actor(PolicyEngine(who, num_envs), sampling)
        return {how: turn_player(actor, slots, num_envs, how == "greedy") for how in ("greedy", "sampled")}

    who = {"policy": plays(policy)}
    if config.env.split != held_out.split:
        seen = replace(held_out, split=config.env.split)
        who["seen starts"] = plays(policy, partial(make_slot, config.task, seen, config.policy.history))
    if load_start(start, checkpoint):
        who["before training"] = plays(start)
    others = {f"{name}, {how}": player for name, both in who.items() for how, player in both.items()}
    if env.has_expert:
        others["scripted expert"] = script_player(ScriptedExpert(), slots())
    # the level of chance: in envs in turns it reaches many a goal eventually
    others["random actions"] = script_player(RandomPlayer(), slots())

    name = "policy, greedy"
    return Players(
        own=others.pop(name),
        name=name,
        draw=lambda snapshots, size_px: env.draw(snapshots),  # its images have a size of their own
        others=others,
        has_success=env.has_success,
        milestones=env.milestones,
    )


def chunk_players(config: ChunksRun, checkpoint: Path) -> Players:
    """Returns the policy, greedy and sampled as in training, in envs of its own; a published flow also as others play
    it, from noise.
    """
    algo = config.algo
    torch.set_num_threads(algo.threads)
    env = make_env(config.task, config.policy_env.for_evaluation(), config.seed)
    sampler = ChunkSampler(policy=load_vla(checkpoint, env, config.policy), env=env, algo=algo)
    others = {"policy, sampled": chunk_player(sampler, greedy=False)}
    if sampler.policy.starts_from_noise:
        others["policy, from noise"] = chunk_player(replace(sampler, from_noise=True))
    return Players(
        own=chunk_player(sampler), name="policy, greedy", draw=env.draw, others=others, has_success=env.has_success
    )


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


_SETTINGS: Mapping[str, Callable[[Any, MakeJudge | None, MakeEngine | None], AlgorithmConfig]] = {
    "steps": step_settings,
    "turns": turn_settings,
    "chunks": chunk_settings,
}
_PLAYERS: Mapping[str, Callable[[Any, Path], Players]] = {
    "steps": step_players,
    "turns": turn_players,
    "chunks": chunk_players,
}
