"""The runs of envs in turns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvlm.algorithms.policy_gradient.config import with_preset
from rlvlm.algorithms.sft_config import ReplySFTConfig
from rlvlm.envs.config import TurnEnvConfig
from rlvlm.envs.registry import few_starts, make_env
from rlvlm.pocket.models import TURN_TASKS
from rlvlm.policies.vlm.config import OWN_SETTINGS, PolicyConfig, check_family
from rlvlm.runs.settings.answers_run import AnswersKind, AnswersRun
from rlvlm.runs.settings.config import TASKS_OWN, Role, at_most
from rlvlm.runs.settings.panels import TURNS_PANEL
from rlvlm.serving.config import ServedEngineConfig

if TYPE_CHECKING:
    from rlvlm.algorithms.evaluation import Players


@dataclass(frozen=True, kw_only=True)
class TurnsRun(AnswersRun):
    """A VLM that acts in text or by a head, or a network of the user's own, turn by turn."""

    env: TurnEnvConfig = TASKS_OWN
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Settings of the VLM, or another network, that acts."""
    engine: ServedEngineConfig = field(default_factory=ServedEngineConfig)
    """Settings of the engine that samples replies."""
    sft: ReplySFTConfig = field(default_factory=ReplySFTConfig)
    """Settings of the supervised start."""

    @property
    def correction(self) -> str:
        engine, chosen = self.engine, self.algo.loss.correction
        # another program, or weights that learners gather in 16 bits and the engine holds in 32
        differs = engine.num_replicas and (engine.backend == "vllm" or self.algo.compute_dtype == "bfloat16")
        return "token" if chosen == "auto" and differs else super().correction


class TurnsKind(AnswersKind[TurnsRun]):
    """See `TurnsRun`."""

    name = "turns"
    panel = TURNS_PANEL

    def with_preset(self, run: TurnsRun, preset: str) -> TurnsRun:
        """Applies a preset: ppo learns from pieces of episodes, the others compare whole ones."""
        algo = run.algo
        if preset == algo.preset:
            return run
        if preset == "ppo":
            rollouts = {"rollout_turns": algo.rollout_turns or 16 * algo.num_envs}
        else:
            # as many groups as parallel envs, and each rollout is learned from
            size = min(algo.group_size, algo.num_envs)
            rollouts = {"rollout_turns": 0, "rounds": 1, "group_size": size, "groups": max(1, algo.num_envs // size)}
        return replace(run, algo=with_preset(algo, preset, **rollouts))

    def check(self, run: TurnsRun) -> None:
        super().check(run)
        algo, engine = run.algo, run.engine
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

    def without_effect(self, run: TurnsRun) -> Iterator[tuple[object, str, tuple[str, ...]]]:
        yield from super().without_effect(run)
        of_vlm = {setting.name for setting in fields(PolicyConfig)} - OWN_SETTINGS
        idle = (*(f"policy.{name}" for name in sorted(of_vlm)), "sft.reply_weight")
        yield run.policy.is_own, f"policy.head {run.policy.head}, which is no chat VLM", idle

    def smoke(self, run: TurnsRun) -> TurnsRun:
        share = min(1.0, 32 / run.env.episode_steps)  # keeps the wall time about the same
        bounds = {"epochs": 1, "max_reply_tokens": 64, "rollout_turns": 128, "group_size": 8, "groups": 2}
        small = {name: min(getattr(run.algo, name), bound) for name, bound in bounds.items()}
        num_envs = 16 // small["group_size"] * small["group_size"]
        return replace(
            at_most(run, steps=256),
            sft=at_most(run.sft, turns=64, updates=10),
            algo=replace(run.algo, num_envs=num_envs, **small),  # at once: each must go with all others
            eval=at_most(run.eval, every_steps=128, episodes=max(2, int(8 * share))),
            track=at_most(run.track, checkpoint_every_steps=128, log_every_steps=128),
        )

    def own_roles(self, run: TurnsRun) -> list[Role]:
        engine = run.engine
        beside = " (on the learners' GPUs, in turns)" if engine.colocated else ""
        replicas = Role(
            name=f"the policy's replicas{beside}", count=engine.num_replicas, is_served=True,
            cpus=engine.num_cpus, gpus=engine.num_gpus, gpu_type=engine.gpu_type,
            setting="--engine.num-replicas, --engine.num-gpus",
            gpu_setting="" if engine.colocated else "--engine.num-gpus 1",
        )  # fmt: skip
        return [*super().own_roles(run), replicas]

    def networks(self, run: TurnsRun) -> dict[str, tuple[str, str, str]]:
        # it samples in the run's own process even if others learn
        return {"policy": (run.policy.device, run.policy.model, run.policy.revision)}

    def notes(self, run: TurnsRun) -> list[str]:
        is_scorer = run.asks_pocket_judge and run.judge.model in ("", "scorer")
        notes = []
        if is_scorer and run.task not in TURN_TASKS:
            notes.append(
                f"the pocket scorer has learned from turns of {', '.join(TURN_TASKS)}; its scores of those "
                f"of {run.task} say nothing: use a general model with --judge.backend transformers --judge.model MODEL"
            )
        if run.env.split == "all" and (few := few_starts(run.task)) is not None:
            met = "evaluations play seeds that training never uses, and meet the same"
            notes.append(
                f"{run.task} has {few} different starts: {met} starts all the same; --env.split training holds a "
                "fifth of them out"
                if few > 1
                else f"{run.task} has one start: {met} one, so they say nothing about other starts"
            )
        return notes

    def check_policy(self, run: TurnsRun) -> None:
        if (folder := Path(run.policy.model).expanduser()).is_dir():
            check_family(folder)

    def check_objects(self, run: TurnsRun, *, has_started: bool) -> None:
        super().check_objects(run, has_started=has_started)
        for side in ("training", "held_out") if run.env.split != "all" else ():
            env = make_env(run.task, replace(run.env, split=side), run.seed)
            env.reset(seed=run.seed)  # raises if no start is on that side
            env.close()
        if has_started or not run.sft.start_from:
            return
        from rlvlm.algorithms.sft_folders import check_sft_manifest, sft_manifest_of

        env = make_env(run.task, run.env, run.seed)
        wanted = sft_manifest_of(run.task, run.env, run.policy, env.action_names)
        env.close()
        # other data that it has learned from are logged when the run loads it
        check_sft_manifest(Path(run.sft.start_from).expanduser(), wanted, log=lambda difference: None)

    def acting(self, run: TurnsRun) -> dict[str, Any]:
        return {"env_settings": run.env, "policy": run.policy.in_run(run.seed), "eval_envs": run.eval.num_envs}

    def players(self, run: TurnsRun, checkpoint: Path) -> "Players":
        """Returns the policy and its initial state, greedy and sampled; the env's expert, if it has one; random
        actions. If starts were held out from training, the policy is also played on the others.
        """
        from rlvlm.algorithms.evaluation import Player, Players
        from rlvlm.algorithms.policy_gradient.player import load_start, load_vlm, script_player, turn_player
        from rlvlm.algorithms.policy_gradient.turns import Actor
        from rlvlm.demonstrations.collect import RandomPlayer, ScriptedExpert
        from rlvlm.envs.slots import EnvSlot, make_slot
        from rlvlm.policies.reply_policy import ReplyPolicy, ReplySampling
        from rlvlm.policies.vlm.engine import PolicyEngine
        from rlvlm.policies.vlm.loading import build_policy

        algo, num_envs = run.algo, run.eval.num_envs or run.algo.num_envs
        # starts that training never used, if the env's split holds some out
        held_out = run.env.for_evaluation()
        slots = partial(make_slot, run.task, held_out, run.policy.history)
        env = slots().env
        policy, start = (build_policy(run.policy, env) for _ in range(2))
        load_vlm(policy, checkpoint)

        def plays(who: ReplyPolicy, slots: Callable[[], EnvSlot] = slots) -> dict[str, Player]:
            sampling = ReplySampling(max_new_tokens=algo.max_reply_tokens, temperature=algo.temperature)
            actor = Actor(PolicyEngine(who, num_envs), sampling)
            return {how: turn_player(actor, slots, num_envs, how == "greedy") for how in ("greedy", "sampled")}

        who = {"policy": plays(policy)}
        if run.env.split != held_out.split:
            seen = replace(held_out, split=run.env.split)
            who["seen starts"] = plays(policy, partial(make_slot, run.task, seen, run.policy.history))
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


TURNS = TurnsKind(TurnsRun)
