"""A run's whole configuration: one frozen tree for every algorithm; the command line overrides its fields.

Imports only the packages' config files, never torch or ray: `rlvlm --help` starts at once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import tyro

from rlvlm.algorithms.policy_gradient.config import GRPOConfig, PolicyGradientConfig, PPOConfig
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.core.checks import check_interval, check_least
from rlvlm.core.errors import UsageError
from rlvlm.core.yaml_text import read_yaml
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import check_unused, find_task, is_used
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig, check_learning, published_name
from rlvlm.rewards.config import ChunkRewardConfig, RewardConfig, StepRewardConfig, TurnRewardConfig
from rlvlm.runs.settings import flat, read_like, to_yaml
from rlvlm.serving.config import PlacementConfig, ServedEngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How the policy is evaluated on the true task."""

    every_steps: int = 2_500
    """Env steps between evaluations."""
    episodes: int = 5
    """Episodes per evaluation, with the deterministic policy."""

    def __post_init__(self) -> None:
        check_least(self, "eval", 1, "every_steps", "episodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackConfig:
    """What is kept and shown besides the run's folder."""

    log_every_steps: int = 1_000
    """Env steps between rows of metrics.jsonl, and between lines where there is no live panel."""
    checkpoint_every_steps: int = 5_000
    """Env steps between checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept, besides the best."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; online needs a key."""
    wandb_project: str = "rlvlm"
    """Its project."""
    dashboard: bool = False
    """Whether a Ray started by the run opens its dashboard."""
    dashboard_port: int = 8265
    """Port of that dashboard, on the loopback address."""
    bench: str = ""
    """bench.json of the run's judge (`rlvlm judge-bench`): the run's card shows its figures beside its own. Empty: that
    of a teacher `measured`, if any."""

    def __post_init__(self) -> None:
        check_least(self, "track", 1, "log_every_steps", "checkpoint_every_steps", "keep_checkpoints")
        check_interval(self, "track", "[1, 65535]", "dashboard_port")


ALGORITHMS: dict[str, type] = {"sac": SACConfig, "ppo": PPOConfig, "grpo": GRPOConfig}
"""By the name that stands first in `config.yaml`."""
SECTIONS: dict[str, dict[str, type]] = {
    "sac": {"reward": StepRewardConfig, "feedback": FeedbackConfig, "reward_model": RewardModelConfig},
    "ppo": {"reward": TurnRewardConfig, "policy": PolicyConfig, "engine": ServedEngineConfig, "sft": ReplySFTConfig},
    "grpo": {"reward": ChunkRewardConfig, "policy": VLAConfig, "sft": ChunkSFTConfig},
}
"""Sections that only runs of one algorithm have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """Processes of a run that do the same."""

    name: str
    count: int = 1
    cpus: float = 0.0
    """Of each."""
    gpus: float = 0.0
    """Of each; below 1 it shares a card."""
    setting: str
    """That makes them fewer, or ask for less."""
    is_own: bool = False
    """Whether it is the run's own process, which stays where it is."""
    is_served: bool = False
    """Whether Ray Serve places them, and not RLlib."""
    learns: bool = False
    """Whether they hold the policy that is trained, with its gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run."""

    may_change: ClassVar[tuple[str, ...]] = (
        *("steps", "eval.*", "track.*"),
        # what a judge, an engine and the run itself run on
        *("serve.*", "engine.*", "judge.store", "judge.device", "judge.attention", "judge.batch_size", "judge.api.*"),
        *("judge.engine.python", "judge.engine.tensor_parallel", "judge.engine.memory_share", "judge.engine.cache_gib"),
        *("*.device", "*.threads", "*.env_runners", "*.env_workers", "*.num_learners", "*.gpus_per_*", "*.cache_mib"),
        *("*.shard", "*.compute_dtype", "*.recompute", "*.microbatch_tokens"),
        # what an error advises to change: of a loss that is not finite, and of a judge that fails or is fooled
        *("algo.*lr", "reward_model.lr", "*.kl_weight"),
        *("*.without_answer", "*.fallback_judge", "*.on_alarm", "*.most_unreadable"),
    )
    """Patterns of the settings that a run may be resumed with after they were changed. The others say what it is."""
    task: tyro.conf.Suppress[str]
    """Name of the task in `rlvlm.envs.registry`."""
    goal: str = ""
    """Goal phrase of the prompt; empty: the task's own."""
    steps: int = 20_000
    """Env steps of the run."""
    seed: int = 0
    """Seeds env, networks, sampling and queries."""
    out: Path | None = None
    """The run's folder; by default runs/TASK/<time>."""
    reward: RewardConfig = None  # pyright: ignore[reportAssignmentType] - see below
    """Where the reward comes from."""
    feedback: FeedbackConfig | None = None
    """Queries to the teacher from whose answers a reward is learned."""
    reward_model: RewardModelConfig | None = None
    """The learned reward."""
    policy: PolicyConfig | VLAConfig | None = None
    """The VLM or VLA that acts; SAC's networks are part of `algo`."""
    sft: ReplySFTConfig | ChunkSFTConfig | None = None
    """The supervised start."""
    algo: SACConfig | PPOConfig | GRPOConfig = field(default_factory=SACConfig)
    """sac, ppo or grpo; decides which of the sections above a run has."""
    env: EnvConfig = field(default_factory=EnvConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    serve: PlacementConfig = field(default_factory=PlacementConfig)
    engine: ServedEngineConfig | None = None
    """The engine that samples a VLM's replies."""
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        # the algorithm is chosen by the type of `algo`; sections of others have no place beside it
        own = SECTIONS[self.algorithm]
        for name in {name for sections in SECTIONS.values() for name in sections}:
            section, kind = getattr(self, name), own.get(name, type(None))
            if section is None:
                object.__setattr__(self, name, kind())  # the defaults of the algorithm's own
            elif not isinstance(section, kind):
                raise ValueError(f"{name} is a {type(section).__name__}, which does not go with {self.algorithm}")
        check_least(self, "", 1, "steps")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be 0 to 2^32 - 1, got {self.seed}")
        # every comparison with a bound lets NaN pass, and NaN alone differs from itself
        leaves = {name: value if isinstance(value, list) else [value] for name, value in flat(self).items()}
        if names := [name for name, values in leaves.items() if any(value != value for value in values)]:
            raise ValueError(f"{', '.join(names)} must be a number, got nan")
        check_unused(self.task, self.env)
        # Serve gives a call up after `serve.timeout_s`; by then the API itself must have answered or been given up
        judge, api = self.judge, self.judge.api
        longest_s = math.ceil(judge.batch_size / api.concurrency) * api.deadline_s
        if judge.is_remote and longest_s >= self.serve.timeout_s:
            raise ValueError(
                f"{judge.batch_size} questions, {api.concurrency} at a time, may take {longest_s:g} s, serve.timeout_s "
                f"is {self.serve.timeout_s:g}; raise it, or judge.api.concurrency, or lower judge.api.deadline_s"
            )
        _check_together(self)

    @property
    def algorithm(self) -> str:
        """Key of `ALGORITHMS`."""
        return next(name for name, kind in ALGORITHMS.items() if isinstance(self.algo, kind))

    @property
    def max_queries(self) -> int:
        """Most questions that a run can ask, by its sessions to the last step and its budget; 0 where nobody is."""
        feedback = self.feedback
        if feedback is None or not isinstance(self.reward, StepRewardConfig):
            # one for each turn or episode, and the shortest has one step
            return self.steps if self.reward.asks_judge else 0
        if not self.reward.is_learned or self.steps <= feedback.first_step:
            return 0
        # a session at the very last step would teach nobody
        sessions = (self.steps - 1 - feedback.first_step) // feedback.every_steps + 1
        return min(sessions * feedback.queries, feedback.max_queries)

    @property
    def roles(self) -> list[Role]:
        """The processes that a run starts beside its own. A judge that runs already is not the run's."""
        algo, engine, serve = self.algo, self.engine, self.serve
        gpus = 0.0 if isinstance(algo, SACConfig) else algo.gpus_per_env_runner
        found = [Role(name="env runners", count=algo.env_runners, cpus=1.0, gpus=gpus, setting="--algo.env-runners")]
        if not isinstance(algo, SACConfig):
            # each runner has workers of its own, and so has the run's own process where it plays by itself
            count = algo.env_workers * max(1, algo.env_runners)
            found.append(Role(name="env workers", count=count, cpus=1.0, setting="--algo.env-workers"))
            gpus, setting = float(algo.gpus_per_learner), "--algo.num-learners, --algo.gpus-per-learner"
            # for a learner with a GPU RLlib asks for no core
            cpus = 0.0 if gpus else 1.0
            found.append(
                Role(name="learners", count=algo.num_learners, cpus=cpus, gpus=gpus, setting=setting, learns=True)
            )
        if engine:
            beside = " (on the learners' GPUs, in turns)" if engine.colocated else ""
            found.append(
                Role(
                    name=f"the policy's replicas{beside}", count=engine.num_replicas, is_served=True,
                    cpus=engine.num_cpus, gpus=engine.num_gpus,
                    setting="--engine.num-replicas, --engine.num-gpus",
                )
            )  # fmt: skip
        if self.reward.asks_judge and not serve.app:
            found.append(
                Role(
                    name="the judge", count=serve.num_replicas, is_served=True,
                    cpus=serve.num_cpus, gpus=serve.num_gpus,
                    setting="--serve.num-replicas, --serve.num-gpus, or --serve.app for a judge that runs already",
                )
            )  # fmt: skip
        return [role for role in found if role.count]

    @property
    def worker_places(self) -> tuple[dict[str, float], ...]:
        """What Ray has to set aside for each process beside the run's own, judges left out."""
        places = [
            {name: amount for name, amount in (("CPU", role.cpus), ("GPU", role.gpus)) if amount}
            for role in self.roles
            if not role.is_served
            for _ in range(role.count)
        ]
        replicas = self.engine.num_replicas if self.engine else 0
        # a core for each replica whatever it asks for, and one for Serve's own actors
        return (*places, *({"CPU": 1.0},) * (replicas + bool(replicas)))

    @property
    def wanted_gpus(self) -> dict[str, float]:
        """GPUs that settings set aside, by what they are for; of the judge only where it is the run's own."""
        return {role.name: role.gpus * role.count for role in self.roles if role.gpus}

    def why_unused(self, name: str) -> str | None:
        """The setting that leaves the one of that dotted name without effect; None where it has one. A recipe may have
        such a setting all the same; whoever sets one on the command line gets an error.
        """
        for holds, why, patterns in _without_effect(self):
            if holds and any(fnmatchcase(name, pattern) for pattern in patterns):
                return why
        return None

    @property
    def reward_name(self) -> str:
        """Where the reward comes from, short enough for a legend, e.g. `judge labels, image reward`."""
        judge = self.serve.app or self.judge.backend
        title = self.reward.title(judge, " (random weights)" if self.reward.asks_judge and self.judge.is_random else "")
        return f"{self.algo.advantage.estimator}, {title}" if isinstance(self.algo, PPOConfig) else title

    @property
    def judge_goal(self) -> str:
        """The judge's goal: `goal`, else the task's own phrase, or its sentence for judges that want one."""
        if self.goal:
            return self.goal
        task = find_task(self.task)
        return (task.goal_state if self.judge.reads_states else "") or task.goal

    @property
    def policy_env(self) -> EnvConfig:
        """The env that is played, drawn as the policy wants it: lightly for the pocket VLA, which learns from such
        images, and for any other as the benchmark draws it.
        """
        is_pocket = not isinstance(self.policy, VLAConfig) or not self.policy.model
        return self.env.drawn_for(is_pocket) if is_used(self.task, "look") else self.env

    @property
    def judge_env(self) -> EnvConfig:
        """The same env, drawn as the judge wants it."""
        is_pocket = not self.reward.asks_judge or (self.judge.ships_weights and not self.serve.app)
        return self.env.drawn_for(is_pocket) if is_used(self.task, "look") else self.env

    def labels(self, own: Path) -> Path:
        """Folder of the judge's label store: the shared one of `judge.store`, else the run's `own`."""
        return Path(self.judge.store).expanduser() if self.judge.store else own

    @property
    def title(self) -> str:
        """One line that names the run, e.g. `drawer_open: judge labels, image reward, seed 0`."""
        return f"{self.task}: {self.reward_name}, seed {self.seed}"

    def smoke(self) -> "RunConfig":
        """This run, shortened to minutes: all parts run, nothing is trained to convergence. Long episodes are fewer."""
        # episodes longer than 32 steps are fewer, so that the wall time stays about the same
        share = min(1.0, 32 / self.env.episode_steps)
        if isinstance(self.algo, SACConfig):
            return replace(
                at_most(self, steps=3_000),
                feedback=at_most(self.feedback, first_step=1_000, every_steps=500, queries=20),
                reward_model=at_most(self.reward_model, min_updates=20, max_updates=20),
                algo=at_most(self.algo, seed_steps=500, critic_reset_updates=20),
                eval=at_most(self.eval, every_steps=1_000, episodes=2),
                track=at_most(self.track, checkpoint_every_steps=1_000, log_every_steps=250),
            )
        if isinstance(self.algo, PPOConfig):
            algo = at_most(self.algo, epochs=1, max_reply_tokens=64)
            return replace(
                at_most(self, steps=256),
                sft=at_most(self.sft, turns=64, updates=10),
                algo=replace(algo, num_envs=16, rollout_turns=128),
                eval=at_most(self.eval, every_steps=128, episodes=max(2, int(8 * share))),
                track=at_most(self.track, checkpoint_every_steps=128, log_every_steps=128),
            )
        assert isinstance(self.reward, ChunkRewardConfig), "what GRPO goes with"
        return replace(
            at_most(self, steps=int(30_000 * share)),
            sft=at_most(self.sft, episodes=int(100 * share), scenes=200, updates=300),
            reward=replace(self.reward, monitor=at_most(self.reward.monitor, preflight=8)),
            algo=at_most(self.algo, groups=max(2, int(16 * share)), rounds=1),
            eval=at_most(self.eval, every_steps=int(10_000 * share), episodes=max(4, int(20 * share))),
            track=at_most(
                self.track, checkpoint_every_steps=int(10_000 * share), log_every_steps=max(1, int(5_000 * share))
            ),
        )


def _without_effect(run: RunConfig) -> Iterator[tuple[Any, str, tuple[str, ...]]]:
    """The one table of what leaves what without effect: whether it does so in `run`, the setting that is why, and
    patterns of those that have none then.
    """
    reward, algo, policy, sft = run.reward, run.algo, run.policy, run.sft
    if isinstance(reward, StepRewardConfig):
        who = f"reward.source {reward.source}" + (f", reward.teacher {reward.teacher}" if reward.is_learned else "")
        yield not reward.asks_judge, f"{who}, which serves no judge", ("serve.*",)
        yield reward.source == "environment", "reward.source environment, which asks no judge", ("judge.*",)
    is_pocket = reward.asks_judge and run.judge.ships_weights and not run.serve.app
    yield is_pocket, "the pocket judge, which is small and has no 4-bit weights", ("judge.quantization",)
    if isinstance(reward, TurnRewardConfig) and isinstance(algo, PolicyGradientConfig):
        advantage, unasked = algo.advantage, ("judge.*", "serve.*")
        unscored = (*unasked, "reward.num_frames", "reward.frame_px", "reward.flip_images", "reward.monitor.*")
        is_critic = (advantage.estimator, advantage.values) == ("gae", "state")
        by_other, who = reward.scores and not reward.asks_judge, f"reward.teacher {reward.teacher}"
        yield not reward.scores, f"reward.source {reward.source}", unscored
        yield not reward.scores and is_critic, "a critic, which learns from all groups", ("algo.rounds",)
        yield by_other, who, (*unasked, "reward.monitor.least_auc")
        yield by_other and advantage.scorer_noise != "measured", who, ("reward.monitor.preflight",)
    if isinstance(algo, PolicyGradientConfig):
        yield algo.loss.correction == "none", "algo.loss.correction none", ("algo.loss.correction_cap",)
    if isinstance(policy, VLAConfig) and isinstance(algo, PolicyGradientConfig):
        yield algo.num_learners, f"algo.num_learners {algo.num_learners}", ("algo.device",)
        yield policy.model, "policy.model", ("sft.*", "policy.pocket.*")
    looks = {run.policy_env.look, run.judge_env.look if run.reward.asks_judge else run.policy_env.look}
    is_finest = looks == {"benchmark"} and is_used(run.task, "look")
    yield is_finest, f"env.look {run.env.look}, as the benchmark draws", ("env.mesh_cell",)
    if sft:
        of_expert = ("sft.turns", "sft.p_wrong", "sft.episodes", "sft.noise", "sft.p_perturb")  # who does not play then
        of_updates = ("sft.lr", "sft.batch_size", "sft.weight_decay", "sft.label_width")
        yield sft.demonstrations, "sft.demonstrations", of_expert
        yield not sft.updates, "sft.updates 0", of_updates
        others = tuple(f"sft.{one.name}" for one in fields(sft) if one.name != "start_from")
        yield sft.start_from, "sft.start_from", others


def _check_together(run: RunConfig) -> None:  # noqa: C901 - one rule after the other
    """Raises ValueError where settings of two sections contradict each other, or one leaves another without effect that
    no recipe has; see also `RunConfig.why_unused`.
    """
    policy, algo, reward, sft = run.policy, run.algo, run.reward, run.sft
    if isinstance(reward, StepRewardConfig):
        assert run.feedback and run.reward_model, "the algorithm's sections"
        check_learning(reward, run.feedback, run.reward_model)
        if reward.teacher == "published":
            published_name(run.task)
        is_about_clips = reward.source == "preference" and run.feedback.segment_steps > 1
        if run.reward.asks_judge and not run.serve.app and run.judge.ships_weights and is_about_clips:
            raise ValueError(
                "the pocket judge knows single images only, so feedback.segment_steps must be 1, "
                f"got {run.feedback.segment_steps}; longer segments need judge.backend transformers"
            )
        return
    if run.reward.asks_judge and (run.judge.score == "utility") != (reward.per == "turn"):
        wanted = "utility" if reward.per == "turn" else "progress, success, rating or video"
        raise ValueError(
            f"reward.per {reward.per} is asked with judge.score {wanted}, got {run.judge.score}: the utility is that "
            "of one turn or chunk, the others are about a whole episode"
        )
    device = policy.openvla.device if isinstance(policy, VLAConfig) else policy.device if policy else "auto"
    if device.startswith("cuda:") and ((run.engine and run.engine.num_replicas) or getattr(algo, "num_learners", 0)):
        raise ValueError(
            f"{device} is a GPU as the run's own process counts them; learners and replicas each see the one that Ray "
            "assigns to them: set the policy's device to cuda, and CUDA_VISIBLE_DEVICES for the run's own process"
        )
    assert isinstance(algo, PolicyGradientConfig), "the algorithm's sections"
    # the device is that of the run's own process; all others compute on what Ray gives them, which may be nothing
    without = {
        "--algo.gpus-per-learner 1": algo.num_learners and not algo.gpus_per_learner,
        "--algo.gpus-per-env-runner 1": algo.env_runners and not algo.gpus_per_env_runner,
        "--engine.num-gpus 1": (
            run.engine and run.engine.num_replicas and not (run.engine.num_gpus or run.engine.colocated)
        ),
    }
    if device == "cuda" and (settings := [setting for setting, holds in without.items() if holds]):
        raise ValueError(
            "the policy's device is cuda, and processes that compute with it are given no GPU; set "
            f"{', '.join(settings)}, or leave the device auto"
        )
    plays_elsewhere = algo.env_runners or (run.engine and run.engine.num_replicas)
    if run.engine and run.engine.colocated:
        if algo.staleness:
            raise ValueError(
                f"algo.staleness {algo.staleness} has no effect with engine.colocated, where nobody samples while the "
                "learners learn; set --algo.staleness 0, or leave out --engine.colocated"
            )
        if run.engine.num_replicas > max(1, algo.num_learners):
            raise ValueError(
                f"engine.colocated has at most one replica for each learner, got engine.num_replicas "
                f"{run.engine.num_replicas} and {max(1, algo.num_learners)} learners; set both to the same number"
            )
    if algo.staleness and not (plays_elsewhere or reward.scores):
        raise ValueError(
            f"algo.staleness {algo.staleness} has no effect where the run's own process plays and nobody scores; set "
            "--engine.num-replicas for replies, --algo.env-runners for chunks, or --algo.staleness 0"
        )
    if not isinstance(policy, VLAConfig):
        if algo.shard and policy and policy.quantization != "none":
            raise ValueError(
                f"policy.quantization {policy.quantization} does not go with algo.shard: 4-bit weights are not shared "
                "out; leave it out, for slices of bfloat16 weights beside an adapter take as little from two GPUs on, "
                "or leave out algo.shard, so that each learner holds all 4-bit weights"
            )
        return
    assert isinstance(sft, ChunkSFTConfig) and isinstance(algo, GRPOConfig), "the algorithm's sections"
    idle = {
        "goal has no effect: policy and judge take the env's own instruction; leave it out": run.goal,
        f"sft.scenes {sft.scenes} has no effect on a policy that does not learn to predict offsets; set "
        "--policy.pocket.predicts-offsets, or --sft.scenes 0": (
            sft.scenes and not (policy.model or policy.pocket.predicts_offsets)
        ),
        f"algo.rounds {algo.rounds} has no effect with algo.staleness, which learns from one rollout at a time; set "
        "--algo.rounds 1": algo.staleness and algo.rounds > 1,
    }
    for name, value in (("demonstrations", sft.demonstrations), ("start_from", sft.start_from)):
        idle[f"sft.{name} has no effect on policy.model, which comes trained; leave one out"] = value and policy.model
    for message, holds in idle.items():
        if holds:
            raise ValueError(message)


def config_text(config: RunConfig) -> str:
    """The text of `config.yaml`."""
    sections = {one.name: getattr(config, one.name) for one in fields(config)}
    own = {name: value for name, value in sections.items() if value is not None or name == "out"}
    return f"algorithm: {config.algorithm}\n{to_yaml(own)}"


def read_config_text(text: str, name: str = "the configuration") -> RunConfig:
    """The config that `config_text` wrote.

    Raises:
        UsageError: not YAML, an unknown algorithm or key, a value of the wrong type, or one that the config refuses.
    """
    tree: Any = read_yaml(text, name)
    named = "sac"
    if isinstance(tree, dict):
        named = str(tree.pop("algorithm", named))
    if named not in ALGORITHMS:
        raise UsageError(
            f"{name} is for an algorithm {named!r}; known here: {', '.join(ALGORITHMS)}",
            "use the version of rlvlm that wrote it (environment.json names it)",
        )
    try:
        return read_like(RunConfig(task="", algo=ALGORITHMS[named]()), tree)
    except UsageError as error:
        raise UsageError(f"{name}: {error}", error.fix) from error


Section = TypeVar("Section")


def at_most(section: Section, **bounds: int) -> Section:
    """A config section with each named field cut to its bound where it lies above."""
    return replace(section, **{name: min(getattr(section, name), bound) for name, bound in bounds.items()})  # pyright: ignore[reportArgumentType, reportCallIssue] - sections are dataclasses
