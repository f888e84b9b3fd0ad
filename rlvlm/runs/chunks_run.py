"""The runs of envs in chunks."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig, chunk_defaults, with_preset
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core.errors import ModelUnavailable, UsageError
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.pocket.models import VIDEO_FRAME_PX, VIDEO_NUM_FRAMES, known_tasks
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.rewards.config import ChunkRewardConfig
from rlvlm.runs.answers_run import AnswersRun
from rlvlm.runs.config import at_most


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

    def check(self) -> None:
        super().check()
        policy, sft = self.policy, self.sft
        if self.goal:
            raise ValueError("goal has no effect: policy and judge take the env's own instruction; leave it out")
        if sft.scenes and not (policy.model or policy.pocket.predicts_offsets):
            raise ValueError(
                f"sft.scenes {sft.scenes} has no effect on a policy that does not learn to predict offsets; set "
                "--policy.pocket.predicts-offsets, or --sft.scenes 0"
            )
        # flows are fine-tuned on a folder; for OpenVLA-OFT's tokens this was not tried
        told = {"demonstrations": sft.demonstrations and policy.head != "flow", "start_from": sft.start_from}
        if policy.model and (idle := [name for name, value in told.items() if value]):
            raise ValueError(f"sft.{idle[0]} has no effect on policy.model, which comes trained; leave one out")

    def without_effect(self) -> Iterator[tuple[object, str, tuple[str, ...]]]:
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
        loading = self.policy.loading
        return super().folders() | {f"{loading.section}.adapter": (loading.adapter, "adapter_config.json")}

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
