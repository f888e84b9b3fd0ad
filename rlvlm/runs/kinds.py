"""The three kinds of run, after those of envs: everything that differs between steps, turns and chunks.

Each kind is a `RunConfig` with its sections, and implements its checks, shortening, placement and display; `RunConfig`
documents the methods. `build` turns a kind's config into torch and RLlib objects. This module imports neither, so that
`rlvlm --help` starts at once.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig, chunk_defaults, with_preset
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.core.errors import ModelUnavailable, UsageError
from rlvlm.core.plugins import is_reference
from rlvlm.envs.config import ChunkEnvConfig, StepEnvConfig, TurnEnvConfig
from rlvlm.envs.registry import few_starts, make_env
from rlvlm.pocket.models import TURN_TASKS, VIDEO_FRAME_PX, VIDEO_NUM_FRAMES, known_tasks
from rlvlm.policies.own import find_own
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import OWN_SETTINGS, PolicyConfig
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig, check_learning, published_name
from rlvlm.rewards.config import ChunkRewardConfig, StepRewardConfig, TurnRewardConfig
from rlvlm.runs.config import Role, RunConfig, at_most
from rlvlm.serving.config import ServedEngineConfig


@dataclass(frozen=True, kw_only=True)
class StepsRun(RunConfig):
    """A small policy that acts in every step, trained by SAC; its reward may be learned from a teacher's answers
    (PEBBLE).
    """

    kind: ClassVar[str] = "steps"
    algorithm: ClassVar[str] = "sac"
    reward: StepRewardConfig = field(default_factory=StepRewardConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    """Queries to the teacher, from whose answers a reward is learned."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """Settings of the learned reward."""
    algo: SACConfig = field(default_factory=SACConfig)
    """Settings of SAC, including its networks."""
    env: StepEnvConfig = None  # pyright: ignore[reportAssignmentType]
    """Settings of the task's env; by default the task's own."""

    def check(self) -> None:
        check_learning(self.reward, self.feedback, self.reward_model)
        if self.reward.first_teacher == "published":
            published_name(self.task)
        is_about_clips = self.reward.source == "preference" and self.feedback.segment_steps > 1
        if self.asks_pocket_judge and is_about_clips:
            raise ValueError(
                "the pocket judge knows single images only, so feedback.segment_steps must be 1, "
                f"got {self.feedback.segment_steps}; longer segments need judge.backend transformers"
            )
        if self.env.draw_path and self.reward.source == "judged":
            raise ValueError(
                "env.draw_path has no effect with reward.source judged, which scores each image once, however it was "
                "come to; use reward.source preference or score"
            )

    def without_effect(self) -> Iterator[tuple[Any, str, tuple[str, ...]]]:
        reward = self.reward
        who = f"reward.source {reward.source}" + (f", reward.teacher {reward.teacher}" if reward.is_learned else "")
        yield not reward.asks_judge, f"{who}, which serves no judge", ("serve.*", "goal_image")
        yield reward.teacher != "mixed", who, ("reward.mixed_judge", "feedback.mixed.*")
        yield reward.source == "environment", "reward.source environment, which asks no judge", ("judge.*",)
        yield not (reward.asks_judge or reward.may_ask_person), f"{who}, which looks at no image", ("env.draw_path",)
        yield True, "an env in steps, of which evaluations play one", ("eval.num_envs",)

    def smoke(self) -> Self:
        return replace(
            at_most(self, steps=3_000),
            feedback=at_most(self.feedback, first_step=1_000, every_steps=500, queries=20),
            reward_model=at_most(self.reward_model, min_updates=20, max_updates=20),
            algo=at_most(self.algo, seed_steps=500, critic_reset_updates=20),
            eval=at_most(self.eval, every_steps=1_000, episodes=2),
            track=at_most(self.track, checkpoint_every_steps=1_000, log_every_steps=250),
        )

    def own_roles(self) -> list[Role]:
        return [Role(name="env runners", count=self.algo.env_runners, cpus=1.0, setting="--algo.env-runners")]

    def networks(self) -> dict[str, tuple[str, str, str]]:
        found = {"algo": (self.algo.placed_on, "", "")}
        return found | {"reward-model": (self.reward_model.device, "", "")} if self.learns_reward else found

    def folders(self) -> dict[str, tuple[str, str]]:
        return {}

    def notes(self) -> list[str]:
        if self.asks_person and self.steps > self.feedback.first_step:
            return [f"answer the queries of this run with: rlvlm labels ask {self.out or 'RUN'}; it does not wait"]
        if not self.learns_reward or self.steps > self.feedback.first_step:
            return []
        return [
            f"nothing would be asked: the first feedback is due at step {self.feedback.first_step:,} "
            f"(--feedback.first-step), and the run ends at step {self.steps:,} (--steps)"
        ]

    def check_objects(self) -> None:
        from rlvlm.preferences.queries import find_strategy  # torch, as every run needs it
        from rlvlm.preferences.teachers import load_teacher, read_shares
        from rlvlm.rewards.build import load_source

        named = {self.reward.source: load_source, self.reward.teacher: load_teacher}
        for reference, load in (named | {self.feedback.sampling: find_strategy}).items():
            if is_reference(reference):
                load(reference)
        if self.measured:
            try:
                read_shares(Path(self.measured), self.task)
            except ValueError as error:
                raise UsageError(str(error), "rlvlm judge-bench writes one") from error

    def judge_knows(self) -> list[str]:
        return list(known_tasks()) if self.judge.knows_few_tasks else []

    @property
    def max_queries(self) -> int:
        feedback = self.feedback
        if not self.reward.is_learned or self.steps <= feedback.first_step:
            return 0
        # a session at the very last step would teach nothing
        sessions = (self.steps - 1 - feedback.first_step) // feedback.every_steps + 1
        return min(sessions * feedback.queries, feedback.max_queries)

    @property
    def learns_reward(self) -> bool:
        return self.reward.is_learned

    @property
    def asks_person(self) -> bool:
        reward = self.reward
        return reward.may_ask_person and (reward.teacher == "human" or self.feedback.mixed.person == "human")

    @property
    def compares(self) -> bool:
        return self.reward.source == "preference"

    @property
    def measured(self) -> str:
        return self.feedback.measured

    @property
    def segment_steps(self) -> int:
        return self.feedback.segment_steps


@dataclass(frozen=True, kw_only=True)
class AnswersRun(RunConfig):
    """Settings common to `TurnsRun` and `ChunksRun`: a large policy whose sampled answers, replies or chunks of
    actions, are trained by a policy gradient.
    """

    algorithm: ClassVar[str] = "policy_gradient"
    reward: TurnRewardConfig = field(default_factory=TurnRewardConfig)
    policy: Any = None
    """Settings of the network that acts."""
    sft: Any = None
    """Settings of the supervised start."""
    algo: PolicyGradientConfig = field(default_factory=PolicyGradientConfig)
    """Settings of estimator, loss, rollouts and updates; `algo.preset` selects a combination."""

    @abstractmethod
    def policy_device(self) -> str:
        """Returns device of the policy in the run's own process: auto, cpu, cuda or one GPU."""

    def check(self) -> None:
        algo, reward, device = self.algo, self.reward, self.policy_device()
        if reward.asks_judge and (self.judge.score == "utility") != reward.rates_turns:
            wanted = "utility" if reward.rates_turns else "progress, success, rating or video"
            raise ValueError(
                f"reward.per {reward.per} is asked with judge.score {wanted}, got {self.judge.score}: the utility is "
                "that of one turn or chunk, the others are about an episode; with reward.clip growing a turn has the "
                "gain of these"
            )
        if device.startswith("cuda:") and (self.num_engine_replicas or algo.num_learners):
            raise ValueError(
                f"{device} is a GPU as the run's own process counts them; learners and replicas each see the one that "
                "Ray assigns to them: set the policy's device to cuda, and CUDA_VISIBLE_DEVICES for the run's own "
                "process"
            )
        is_taught = self.sft.weighting == "condition"
        if is_taught != self.policy.conditioned and not (self.policy.conditioned and self.sft.start_from):
            raise ValueError(
                "policy.conditioned asks for what sft.weighting condition teaches, and one has no effect without the "
                f"other, got {self.policy.conditioned} and {self.sft.weighting}; set both or neither"
            )
        # the device is for the run's own process; all others use the GPU that Ray assigns, if any
        starved = [role.gpu_setting for role in self.roles if role.gpu_setting and not role.gpus]
        if device == "cuda" and starved:
            raise ValueError(
                "the policy's device is cuda, and processes that compute with it are given no GPU; set "
                f"{', '.join(starved)}, or leave the device auto"
            )
        if algo.staleness and not (algo.env_runners or self.num_engine_replicas or reward.scores):
            raise ValueError(
                f"algo.staleness {algo.staleness} has no effect where the run's own process plays and nobody scores; "
                "set --engine.num-replicas for replies, --algo.env-runners for chunks, or --algo.staleness 0"
            )

    def without_effect(self) -> Iterator[tuple[Any, str, tuple[str, ...]]]:
        reward, algo, sft = self.reward, self.algo, self.sft
        advantage, unasked = algo.advantage, ("judge.*", "serve.*", "goal_image", "env.draw_path")
        unscored = (*unasked, "reward.num_frames", "reward.frame_px", "reward.flip_images", "reward.monitor.*")
        is_critic = (advantage.estimator, advantage.values) == ("gae", "state")
        by_other, who = reward.scores and not reward.asks_judge, f"reward.teacher {reward.teacher}"
        yield not reward.scores, f"reward.source {reward.source}", unscored
        yield not reward.scores and is_critic, "a critic, which learns from all groups", ("algo.rounds",)
        yield by_other, who, (*unasked, "reward.monitor.min_auc")
        yield by_other and advantage.scorer_noise != "measured", who, ("reward.monitor.preflight",)
        uncorrected = ("algo.loss.correction_cap", "algo.loss.beyond_cap")
        yield self.correction == "none", f"algo.loss.correction {algo.loss.correction}", uncorrected
        of_expert = ("sft.turns", "sft.p_wrong", "sft.episodes", "sft.noise", "sft.p_perturb")  # who does not play then
        of_updates = ("sft.lr", "sft.batch_size", "sft.weight_decay", "sft.label_width")
        yield sft.demonstrations, "sft.demonstrations", of_expert
        yield not sft.updates, "sft.updates 0", of_updates
        others = tuple(f"sft.{setting.name}" for setting in fields(sft) if setting.name != "start_from")
        yield sft.start_from, "sft.start_from", others

    @property
    def correction(self) -> str:
        """`algo.loss.correction`, with `auto` resolved for this run's engine."""
        return "none" if self.algo.loss.correction == "auto" else self.algo.loss.correction

    def own_roles(self) -> list[Role]:
        algo, gpus = self.algo, float(self.algo.gpus_per_learner)
        return [
            Role(
                name="env runners", count=algo.env_runners, cpus=1.0, gpus=algo.gpus_per_env_runner,
                setting="--algo.env-runners", gpu_setting="--algo.gpus-per-env-runner 1",
            ),
            # each runner has workers of its own, as does the run's own process if it plays itself
            Role(
                name="env workers", count=algo.env_workers * max(1, algo.env_runners), cpus=1.0,
                setting="--algo.env-workers",
            ),
            Role(
                name="learners", count=algo.num_learners, cpus=0.0 if gpus else 1.0,  # RLlib asks for a core or a GPU
                gpus=gpus, setting="--algo.num-learners, --algo.gpus-per-learner", learns=True,
                gpu_setting="--algo.gpus-per-learner 1",
            ),
        ]  # fmt: skip

    def models(self) -> dict[str, str]:
        return super().models() | {"policy.model": self.policy.model}

    def folders(self) -> dict[str, tuple[str, str]]:
        return {"sft.demonstrations": (self.sft.demonstrations, "demonstrations.json")}

    def check_objects(self) -> None:
        from rlvlm.algorithms.policy_gradient.advantages import find_estimator  # torch, as every run needs it
        from rlvlm.algorithms.policy_gradient.losses import find_policy_loss
        from rlvlm.rewards.scorers import read_scores

        find_estimator(self.algo.advantage.estimator)
        find_policy_loss(self.algo.loss.policy)
        if self.policy.is_own:
            find_own(self.policy)
        if self.measured:
            read_scores(Path(self.measured), self.task)

    def bench_options(self) -> list[str]:
        return ["--frames", str(self.reward.num_frames)]

    @property
    def preset(self) -> str:
        return self.algo.preset

    @property
    def large_policy(self) -> Any:
        return self.policy if self.policy.model else None

    @property
    def reward_name(self) -> str:
        """Name of the reward after that of the estimator."""
        return f"{self.algo.advantage.estimator}, {super().reward_name}"

    @property
    def measured(self) -> str:
        return self.reward.measured

    @property
    def num_learners(self) -> int:
        return self.algo.num_learners


@dataclass(frozen=True, kw_only=True)
class TurnsRun(AnswersRun):
    """A VLM that acts in text or by a head, or a network of the user's own, turn by turn."""

    kind: ClassVar[str] = "turns"
    env: TurnEnvConfig = None  # pyright: ignore[reportAssignmentType]
    """Settings of the task's env; by default the task's own."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Settings of the VLM, or another network, that acts."""
    engine: ServedEngineConfig = field(default_factory=ServedEngineConfig)
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

    def policy_device(self) -> str:
        return self.policy.device

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

    def without_effect(self) -> Iterator[tuple[Any, str, tuple[str, ...]]]:
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
            cpus=engine.num_cpus, gpus=engine.num_gpus,
            setting="--engine.num-replicas, --engine.num-gpus",
            gpu_setting="" if engine.colocated else "--engine.num-gpus 1",
        )  # fmt: skip
        return [*super().own_roles(), replicas]

    def networks(self) -> dict[str, tuple[str, str, str]]:
        # it samples in the run's own process even if others learn
        return {"policy": (self.policy.device, self.policy.model, self.policy.revision)}

    def folders(self) -> dict[str, tuple[str, str]]:
        own = {
            "policy.adapter": (self.policy.adapter, "adapter_config.json"),
            "sft.start_from": (self.sft.start_from, "body.safetensors"),
        }
        return super().folders() | own

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

    def check_objects(self) -> None:
        super().check_objects()
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

    def judge_knows(self) -> list[str]:
        return []

    @property
    def plays_expert(self) -> bool:
        return self.sft.plays_expert

    @property
    def num_engine_replicas(self) -> int:
        return self.engine.num_replicas

    @property
    def correction(self) -> str:
        engine, chosen = self.engine, self.algo.loss.correction
        # another program, or weights that learners gather in 16 bits and the engine holds in 32
        differs = engine.num_replicas and (engine.backend == "vllm" or self.algo.compute_dtype == "bfloat16")
        return "token" if chosen == "auto" and differs else super().correction


@dataclass(frozen=True, kw_only=True)
class ChunksRun(AnswersRun):
    """A VLA that acts in chunks of actions."""

    kind: ClassVar[str] = "chunks"
    env: ChunkEnvConfig = None  # pyright: ignore[reportAssignmentType]
    """Settings of the task's env; by default the task's own."""
    reward: ChunkRewardConfig = field(default_factory=ChunkRewardConfig)
    policy: VLAConfig = field(default_factory=VLAConfig)
    """Settings of the VLA that acts."""
    sft: ChunkSFTConfig = field(default_factory=ChunkSFTConfig)
    """Settings of the supervised start."""
    algo: PolicyGradientConfig = field(default_factory=chunk_defaults)
    """Settings of estimator, loss, rollouts and updates; `algo.preset` selects a combination."""

    def with_preset(self, preset: str) -> Self:
        """Applies a preset: chunks are always played in whole episodes; for ppo the small VLA gets a value head."""
        if preset == self.algo.preset:
            return self
        algo, policy = with_preset(self.algo, preset), self.policy
        if preset == "ppo" and not (policy.model or policy.is_own) and algo.advantage.values == "policy":
            policy = replace(policy, pocket=replace(policy.pocket, has_values=True))
        return replace(self, algo=algo, policy=policy)

    def policy_device(self) -> str:
        return self.policy.loading.device

    def check(self) -> None:
        super().check()
        policy, algo, sft = self.policy, self.algo, self.sft
        idle = {
            "goal has no effect: policy and judge take the env's own instruction; leave it out": self.goal,
            f"sft.scenes {sft.scenes} has no effect on a policy that does not learn to predict offsets; set "
            "--policy.pocket.predicts-offsets, or --sft.scenes 0": (
                sft.scenes and not (policy.model or policy.pocket.predicts_offsets)
            ),
            f"algo.rounds {algo.rounds} has no effect with algo.staleness, which learns from one rollout at a time; "
            "set --algo.rounds 1": algo.staleness and algo.rounds > 1,
        }
        # flows are fine-tuned on a folder; for OpenVLA-OFT's tokens this was not tried
        told = (("demonstrations", sft.demonstrations and policy.head != "flow"), ("start_from", sft.start_from))
        for name, value in told:
            idle[f"sft.{name} has no effect on policy.model, which comes trained; leave one out"] = (
                value and policy.model
            )
        for message, holds in idle.items():
            if holds:
                raise ValueError(message)

    def without_effect(self) -> Iterator[tuple[Any, str, tuple[str, ...]]]:
        yield from super().without_effect()
        yield self.algo.num_learners, f"algo.num_learners {self.algo.num_learners}", ("algo.device",)
        of_model = ("policy.pocket.*",) if self.sft.demonstrations else ("sft.*", "policy.pocket.*")
        yield self.policy.model, "policy.model", of_model
        yield self.policy.is_own, f"policy.head {self.policy.head}", ("policy.pocket.*",)
        yield self.policy.head == "flow", "policy.head flow, which has no bins", ("sft.label_width",)
        yield True, "an env in chunks, of which evaluations play all episodes at once", ("eval.num_envs",)

    def smoke(self) -> Self:
        share = min(1.0, 32 / self.env.episode_steps)  # keeps the wall time about the same
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

    def networks(self) -> dict[str, tuple[str, str, str]]:
        policy = self.policy
        found = {} if self.algo.num_learners else {"algo": (self.algo.device, "", "")}
        if policy.model:  # it samples in the run's own process even if others learn
            found[policy.loading.section] = (policy.loading.device, "", "")
            found["policy"] = ("auto", policy.model, policy.revision)
        return found

    def folders(self) -> dict[str, tuple[str, str]]:
        own = {
            "policy.openvla.adapter": (self.policy.openvla.adapter, "adapter_config.json"),
            "policy.lerobot.adapter": (self.policy.lerobot.adapter, "adapter_config.json"),
            "sft.start_from": (self.sft.start_from, "algorithm/policy.safetensors"),
        }
        return super().folders() | own

    def check_start(self) -> None:
        if self.sft.demonstrations:
            from rlvlm.demonstrations.folder import open_folder

            open_folder(Path(self.sft.demonstrations).expanduser()).check_task(self.task)

    def check_policy(self) -> None:
        if not self.policy.model or not Path(self.policy.model).expanduser().is_dir():
            return  # a hub checkpoint is checked once it is downloaded
        from rlvlm.policies.vla.build import check_checkpoint  # torch and transformers are slow to import

        env: Any = make_env(self.task, self.env, self.seed)
        try:
            check_checkpoint(self.policy, env)
        except ModelUnavailable as error:
            raise UsageError(str(error), error.fix) from error
        finally:
            env.close()

    def script_options(self) -> dict[str, Any]:
        return {"episodes": self.sft.episodes, "noise": self.sft.noise, "p_perturb": self.sft.p_perturb}

    def notes(self) -> list[str]:
        reward = self.reward
        shown = (reward.num_frames, reward.frame_px, reward.flip_images)
        is_shown_as_pocket = shown == (VIDEO_NUM_FRAMES, VIDEO_FRAME_PX, False)
        if not (reward.asks_judge and self.task in known_tasks("video") and is_shown_as_pocket):
            return []
        if self.asks_pocket_judge:
            return []
        return [
            f"the judge is shown {VIDEO_NUM_FRAMES} mirrored frames of {VIDEO_FRAME_PX} pixels, as the pocket "
            "video judge was trained on; for another: --reward.num-frames 8 --reward.frame-px 224 "
            "--reward.flip-images"
        ]

    def judge_knows(self) -> list[str]:
        if not self.judge.ships_weights:
            return []
        if not self.judge.model:  # the default judge of pairs cannot score episodes, the others can
            return [*known_tasks("scorer"), *known_tasks("video")]
        return list(known_tasks(self.judge.model))


KINDS: dict[str, type[RunConfig]] = {made.kind: made for made in (StepsRun, TurnsRun, ChunksRun)}
"""Classes by `Task.kind`, which comes first in `config.yaml`."""
