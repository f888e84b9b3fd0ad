"""The runs of envs in turns."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Self

from rlvlm.algorithms.policy_gradient.config import with_preset
from rlvlm.algorithms.sft_config import ReplySFTConfig
from rlvlm.envs.config import TurnEnvConfig
from rlvlm.envs.registry import few_starts, make_env
from rlvlm.pocket.models import TURN_TASKS
from rlvlm.policies.vlm.config import OWN_SETTINGS, PolicyConfig, check_family
from rlvlm.runs.answers_run import AnswersRun
from rlvlm.runs.config import Role, at_most
from rlvlm.serving.config import ServedEngineConfig


@dataclass(frozen=True, kw_only=True)
class TurnsRun(AnswersRun):
    """A VLM that acts in text or by a head, or a network of the user's own, turn by turn."""

    kind: ClassVar[str] = "turns"
    env: TurnEnvConfig = None  # pyright: ignore[reportAssignmentType]
    """Settings of the task's env; by default the task's own."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Settings of the VLM, or another network, that acts."""
    engine: ServedEngineConfig = field(  # pyright: ignore[reportIncompatibleVariableOverride] - here every run has one
        default_factory=ServedEngineConfig
    )
    """Settings of the engine that samples replies."""
    sft: ReplySFTConfig = field(default_factory=ReplySFTConfig)
    """Settings of the supervised start."""

    def with_preset(self, preset: str) -> Self:
        """Applies a preset: ppo learns from pieces of episodes, the others compare whole ones."""
        algo = self.algo
        if preset == algo.preset:
            return self
        if preset == "ppo":
            rollouts = {"rollout_turns": algo.rollout_turns or 16 * algo.num_envs}
        else:
            # as many groups as parallel envs, and each rollout is learned from
            size = min(algo.group_size, algo.num_envs)
            rollouts = {"rollout_turns": 0, "rounds": 1, "group_size": size, "groups": max(1, algo.num_envs // size)}
        return replace(self, algo=with_preset(algo, preset, **rollouts))

    def check(self) -> None:
        super().check()
        algo, engine = self.algo, self.engine
        if engine.colocated and algo.staleness:
            raise ValueError(
                f"algo.staleness {algo.staleness} has no effect with engine.colocated, where nobody samples while the "
                "learners learn; set --algo.staleness 0, or leave out --engine.colocated"
            )
        if engine.colocated and engine.num_replicas > max(1, algo.num_learners):
            raise ValueError(
                f"engine.colocated has at most one replica for each learner, got engine.num_replicas "
                f"{engine.num_replicas} and {max(1, algo.num_learners)} learners; set both to the same number"
            )
        if self.policy.is_own and engine.num_replicas:
            raise ValueError(
                f"policy.head {self.policy.head} samples in the run's own process, and engine.num_replicas is "
                f"{engine.num_replicas}; leave it out"
            )
        if algo.shard and self.policy.quantization != "none":
            raise ValueError(
                f"policy.quantization {self.policy.quantization} does not go with algo.shard: 4-bit weights are not "
                "shared out; leave it out, for slices of bfloat16 weights beside an adapter take as little from two "
                "GPUs on, or leave out algo.shard, so that each learner holds all 4-bit weights"
            )

    def without_effect(self) -> Iterator[tuple[object, str, tuple[str, ...]]]:
        yield from super().without_effect()
        of_vlm = {setting.name for setting in fields(PolicyConfig)} - OWN_SETTINGS
        idle = (*(f"policy.{name}" for name in sorted(of_vlm)), "sft.reply_weight")
        yield self.policy.is_own, f"policy.head {self.policy.head}, which is no chat VLM", idle

    def smoke(self) -> Self:
        share = min(1.0, 32 / self.env.episode_steps)  # keeps the wall time about the same
        bounds = {"epochs": 1, "max_reply_tokens": 64, "rollout_turns": 128, "group_size": 8, "groups": 2}
        small = {name: min(getattr(self.algo, name), bound) for name, bound in bounds.items()}
        num_envs = 16 // small["group_size"] * small["group_size"]
        return replace(
            at_most(self, steps=256),
            sft=at_most(self.sft, turns=64, updates=10),
            algo=replace(self.algo, num_envs=num_envs, **small),  # at once: each must go with all others
            eval=at_most(self.eval, every_steps=128, episodes=max(2, int(8 * share))),
            track=at_most(self.track, checkpoint_every_steps=128, log_every_steps=128),
        )

    def own_roles(self) -> list[Role]:
        engine = self.engine
        beside = " (on the learners' GPUs, in turns)" if engine.colocated else ""
        replicas = Role(
            name=f"the policy's replicas{beside}", count=engine.num_replicas, is_served=True,
            cpus=engine.num_cpus, gpus=engine.num_gpus, gpu_type=engine.gpu_type,
            setting="--engine.num-replicas, --engine.num-gpus",
            gpu_setting="" if engine.colocated else "--engine.num-gpus 1",
        )  # fmt: skip
        return [*super().own_roles(), replicas]

    def networks(self) -> dict[str, tuple[str, str, str]]:
        # it samples in the run's own process even if others learn
        return {"policy": (self.policy.device, self.policy.model, self.policy.revision)}

    def folders(self) -> dict[str, tuple[str, str]]:
        return super().folders() | {"policy.adapter": (self.policy.adapter, "adapter_config.json")}

    def notes(self) -> list[str]:
        is_scorer = self.asks_pocket_judge and self.judge.model in ("", "scorer")
        notes = []
        if is_scorer and self.task not in TURN_TASKS:
            notes.append(
                f"the pocket scorer has learned from turns of {', '.join(TURN_TASKS)}; its scores of those "
                f"of {self.task} say nothing: use a general model with --judge.backend transformers --judge.model MODEL"
            )
        if self.env.split == "all" and (few := few_starts(self.task)) is not None:
            met = "evaluations play seeds that training never uses, and meet the same"
            notes.append(
                f"{self.task} has {few} different starts: {met} starts all the same; --env.split training holds a "
                "fifth of them out"
                if few > 1
                else f"{self.task} has one start: {met} one, so they say nothing about other starts"
            )
        return notes

    def check_policy(self) -> None:
        if (folder := Path(self.policy.model).expanduser()).is_dir():
            check_family(folder)

    def check_objects(self, *, has_started: bool) -> None:
        super().check_objects(has_started=has_started)
        for side in ("training", "held_out") if self.env.split != "all" else ():
            env = make_env(self.task, replace(self.env, split=side), self.seed)
            env.reset(seed=self.seed)  # raises if no start is on that side
            env.close()

    def check_start(self) -> None:
        if not self.sft.start_from:
            return
        from rlvlm.algorithms.sft_folders import check_sft_manifest, sft_manifest_of

        env = make_env(self.task, self.env, self.seed)
        wanted = sft_manifest_of(self.task, self.env, self.policy, env.action_names)
        env.close()
        # other data that it has learned from are logged when the run loads it
        check_sft_manifest(Path(self.sft.start_from).expanduser(), wanted, log=lambda difference: None)

    @property
    def correction(self) -> str:
        engine, chosen = self.engine, self.algo.loss.correction
        # another program, or weights that learners gather in 16 bits and the engine holds in 32
        differs = engine.num_replicas and (engine.backend == "vllm" or self.algo.compute_dtype == "bfloat16")
        return "token" if chosen == "auto" and differs else super().correction
