"""The runs of envs in chunks."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig, chunk_defaults, with_preset
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core.errors import ModelUnavailable, UsageError
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.pocket.models import VIDEO_FRAME_PX, VIDEO_NUM_FRAMES, known_tasks
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.rewards.config import ChunkRewardConfig
from rlvlm.runs.settings.answers_run import AnswersKind, AnswersRun
from rlvlm.runs.settings.config import TASKS_OWN, at_most
from rlvlm.runs.settings.panels import CHUNKS_PANEL

if TYPE_CHECKING:
    from rlvlm.algorithms.evaluation import Players


@dataclass(frozen=True, kw_only=True)
class ChunksRun(AnswersRun):
    """A VLA that acts in chunks of actions."""

    env: ChunkEnvConfig = TASKS_OWN
    reward: ChunkRewardConfig = field(default_factory=ChunkRewardConfig)
    policy: VLAConfig = field(default_factory=VLAConfig)
    """Settings of the VLA that acts."""
    sft: ChunkSFTConfig = field(default_factory=ChunkSFTConfig)
    """Settings of the supervised start."""
    algo: PolicyGradientConfig = field(default_factory=chunk_defaults)
    """Settings of estimator, loss, rollouts and updates; `algo.preset` selects a combination."""


class ChunksKind(AnswersKind[ChunksRun]):
    """See `ChunksRun`."""

    name = "chunks"
    panel = CHUNKS_PANEL

    def with_preset(self, run: ChunksRun, preset: str) -> ChunksRun:
        """Applies a preset: chunks are always played in whole episodes; for ppo the small VLA gets a value head."""
        if preset == run.algo.preset:
            return run
        algo, policy = with_preset(run.algo, preset), run.policy
        if preset == "ppo" and not (policy.model or policy.is_own) and algo.advantage.values == "policy":
            policy = replace(policy, pocket=replace(policy.pocket, has_values=True))
        return replace(run, algo=algo, policy=policy)

    def check(self, run: ChunksRun) -> None:
        super().check(run)
        if run.goal:
            raise ValueError("goal has no effect: policy and judge take the env's own instruction; leave it out")

    def without_effect(self, run: ChunksRun) -> Iterator[tuple[object, str, tuple[str, ...]]]:
        yield from super().without_effect(run)
        yield run.algo.num_learners, f"algo.num_learners {run.algo.num_learners}", ("algo.device",)
        of_model = ("policy.pocket.*",) if run.sft.demonstrations else ("sft.*", "policy.pocket.*")
        yield run.policy.model, "policy.model", of_model
        yield run.policy.is_own, f"policy.head {run.policy.head}", ("policy.pocket.*",)
        yield run.policy.head == "flow", "policy.head flow, which has no bins", ("sft.label_width",)
        yield True, "an env in chunks, of which evaluations play all episodes at once", ("eval.num_envs",)

    def smoke(self, run: ChunksRun) -> ChunksRun:
        share = min(1.0, 32 / run.env.episode_steps)  # keeps the wall time about the same
        return replace(
            at_most(run, steps=int(30_000 * share)),
            sft=at_most(run.sft, episodes=int(100 * share), scenes=200, updates=300),
            reward=replace(run.reward, monitor=at_most(run.reward.monitor, preflight=8)),
            algo=at_most(run.algo, groups=max(2, int(16 * share)), rounds=1),
            eval=at_most(run.eval, every_steps=int(10_000 * share), episodes=max(4, int(20 * share))),
            track=at_most(
                run.track, checkpoint_every_steps=int(10_000 * share), log_every_steps=max(1, int(5_000 * share))
            ),
        )

    def networks(self, run: ChunksRun) -> dict[str, tuple[str, str, str]]:
        policy = run.policy
        found = {} if run.algo.num_learners else {"algo": (run.algo.device, "", "")}
        if policy.model:  # it samples in the run's own process even if others learn
            found[policy.loading.section] = (policy.loading.device, "", "")
            found["policy"] = ("auto", policy.model, policy.revision)
        return found

    def check_objects(self, run: ChunksRun, *, has_started: bool) -> None:
        super().check_objects(run, has_started=has_started)
        if run.sft.demonstrations and not has_started:
            from rlvlm.demonstrations.folder import open_folder

            open_folder(Path(run.sft.demonstrations).expanduser()).check_task(run.task)

    def check_policy(self, run: ChunksRun) -> None:
        if not run.policy.model or not Path(run.policy.model).expanduser().is_dir():
            return  # a hub checkpoint is checked once it is downloaded
        from rlvlm.policies.vla.build import check_checkpoint  # torch and transformers are slow to import

        env = make_env(run.task, run.env, run.seed)
        try:
            check_checkpoint(run.policy, env)
        except ModelUnavailable as error:
            raise UsageError(str(error), error.fix) from error
        finally:
            env.close()

    def notes(self, run: ChunksRun) -> list[str]:
        reward = run.reward
        shown = (reward.num_frames, reward.frame_px, reward.flip_images)
        is_shown_as_pocket = shown == (VIDEO_NUM_FRAMES, VIDEO_FRAME_PX, False)
        if not (reward.asks_judge and run.task in known_tasks("video") and is_shown_as_pocket):
            return []
        if run.asks_pocket_judge:
            return []
        return [
            f"the judge is shown {VIDEO_NUM_FRAMES} mirrored frames of {VIDEO_FRAME_PX} pixels, as the pocket "
            "video judge was trained on; for another: --reward.num-frames 8 --reward.frame-px 224 "
            "--reward.flip-images"
        ]

    def judge_knows(self, run: ChunksRun) -> list[str]:
        if not run.judge.ships_weights:
            return []
        if not run.judge.model:  # the default judge of pairs cannot score episodes, the others can
            return [*known_tasks("scorer"), *known_tasks("video")]
        return list(known_tasks(run.judge.model))

    def acting(self, run: ChunksRun) -> dict[str, Any]:
        return {"env_settings": run.policy_env, "policy": run.policy, "judge_env": run.judge_env}

    def players(self, run: ChunksRun, checkpoint: Path) -> "Players":
        """Returns the policy, greedy and sampled as in training, in envs of its own; a published flow also as others
        play it, from noise.
        """
        from rlvlm.algorithms.evaluation import Players
        from rlvlm.algorithms.policy_gradient.chunks import ChunkSampler
        from rlvlm.algorithms.policy_gradient.player import chunk_player, load_vla

        env = make_env(run.task, run.policy_env.for_evaluation(), run.seed)
        sampler = ChunkSampler(policy=load_vla(checkpoint, env, run.policy), env=env, algo=run.algo)
        others = {"policy, sampled": chunk_player(sampler, greedy=False)}
        if sampler.policy.starts_from_noise:
            others["policy, from noise"] = chunk_player(replace(sampler, from_noise=True))
        return Players(
            own=chunk_player(sampler), name="policy, greedy", draw=env.draw, others=others, has_success=env.has_success
        )


CHUNKS = ChunksKind(ChunksRun)
