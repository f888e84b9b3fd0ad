"""A whole run of the third pipeline: a policy that looks, reads an instruction, and acts in chunks.

Imports only the rooms' config files, never torch or ray: `rlvlm --help` starts at once.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Self

from rlvlm.algorithms.grpo.config import GRPOConfig, ScoreConfig, SFTConfig, check_together
from rlvlm.pocket import video
from rlvlm.pocket.judge.config import trained_tasks
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.runs.config import NamedFolder, Network, RunConfig, at_most


@dataclass(frozen=True, kw_only=True, slots=True)
class VLARunConfig(RunConfig):
    """A whole run."""

    pipeline: ClassVar[str] = "vla"
    policy: VLAConfig = field(default_factory=VLAConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    reward: ScoreConfig = field(default_factory=ScoreConfig)
    algo: GRPOConfig = field(default_factory=GRPOConfig)

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        if self.asks_judge and self.judge.score == "utility":
            raise ValueError(
                "judge.score utility is that of one turn; an episode's video is asked about with judge.score success, "
                "progress, rating or video"
            )
        if self.goal:
            raise ValueError("goal has no effect: policy and judge are told the env's own instruction; leave it out")
        check_together(self.reward, self.algo, self.sft, self.policy)
        for name, value in (("data", self.sft.data), ("start_from", self.sft.start_from)):
            if value and self.policy.model:
                raise ValueError(f"sft.{name} has no effect on policy.model, which comes trained; leave one out")

    @property
    def asks_judge(self) -> bool:
        """Whether a VLM looks at the episodes."""
        return self.reward.asks_judge

    @property
    def judge_knows(self) -> list[str]:
        """The tasks whose episodes a pocket judge can score; of the one that compares images, those that it knows."""
        known = {"": trained_tasks(), "scorer": ["push_block"], "video": list(video.KNOWS)}
        return known.get(self.judge.model, []) if self.judge.ships_weights else []

    @property
    def notes(self) -> tuple[str, ...]:
        """That a judge of one's own is shown what the recipe draws for the pocket video judge."""
        is_other = self.asks_judge and (bool(self.serve.app) or not self.judge.ships_weights)
        reward = self.reward
        shown = (reward.num_frames, reward.frame_px, reward.flip_images)
        if not is_other or self.task not in video.KNOWS or shown != (video.NUM_FRAMES, video.FRAME_PX, False):
            return ()
        return (
            f"the judge is shown {video.NUM_FRAMES} mirrored frames of {video.FRAME_PX} pixels, which the pocket video "
            "judge was taught on; for another: --reward.num-frames 8 --reward.frame-px 224 --reward.flip-images",
        )

    @property
    def unused_settings(self) -> dict[str, str]:
        """What concerns a judge where nobody is asked, the script where others demonstrated, and demonstrations where
        the policy has learned already.
        """
        found = {}
        if self.reward.source == "success":
            frames = ("reward.num_frames", "reward.frame_px", "reward.flip_images")
            found |= dict.fromkeys(("judge.*", "serve.*", "reward.monitor.*", *frames), "reward.source success")
            if self.algo.advantage.baseline == "critic":
                found["algo.rounds"] = "a critic, to whom all groups teach something"
        elif not self.asks_judge:
            why = f"reward.teacher {self.reward.teacher}"
            found |= dict.fromkeys(("judge.*", "serve.*", "reward.monitor.least_auc"), why)
            if self.algo.advantage.scorer_noise != "measured":
                found["reward.monitor.preflight"] = why
        if self.sft.data:
            found |= dict.fromkeys(("sft.demonstrations", "sft.noise", "sft.p_perturb"), "sft.data")
        if self.sft.start_from:
            names = (one.name for one in fields(self.sft) if one.name != "start_from")
            found |= dict.fromkeys((f"sft.{name}" for name in names), "sft.start_from")
        if not self.sft.steps:
            found |= dict.fromkeys(("sft.lr", "sft.batch_size", "sft.weight_decay", "sft.label_width"), "sft.steps 0")
        if self.algo.num_learners:
            found["algo.device"] = f"algo.num_learners {self.algo.num_learners}"
        if self.policy.model:
            found |= dict.fromkeys(("sft.*", "policy.pocket.*"), "policy.model")
        return found

    @property
    def max_queries(self) -> int:
        """One for each episode, and the shortest has one step; 0 where nobody is asked."""
        return self.steps if self.asks_judge else 0

    @property
    def models(self) -> dict[str, str]:
        """The judge's and the policy's."""
        return super(VLARunConfig, self).models | {"policy.model": self.policy.model}

    @property
    def folders(self) -> dict[str, NamedFolder]:
        """Demonstrations, or the checkpoint of a policy."""
        return {
            "sft.data": NamedFolder(self.sft.data, holds="demonstrations.json"),
            "sft.start_from": NamedFolder(self.sft.start_from, holds="algorithm/policy.safetensors"),
        }

    def check_files(self) -> None:
        """Passes where demonstrations are of this task; raises UsageError where they are not."""
        if self.sft.data:
            from rlvlm.demonstrations.folder import open_folder  # numpy is not for those who only ask for help

            open_folder(Path(self.sft.data).expanduser()).check_task(self.task)

    @property
    def networks(self) -> dict[str, Network]:
        """The learner, unless others learn, and a checkpoint, which plays in the run's own process all the same."""
        policy, here = self.policy, {}
        if not self.algo.num_learners:
            here["algo"] = Network(self.algo.device)
        if policy.model:
            here["policy.openvla"] = Network(policy.openvla.device)
            here["policy"] = Network("auto", policy.model, policy.revision)
        return here

    @property
    def num_workers(self) -> int:
        """Env runners, and learners in processes of their own."""
        return self.algo.env_runners + self.algo.num_learners

    @property
    def reward_name(self) -> str:
        """Where the reward comes from, short enough for a legend."""
        if self.reward.source == "success":
            return "env success"
        who = self.judge_name if self.asks_judge else self.reward.teacher
        marked = " (random weights)" if self.asks_judge and self.judge.is_random else ""
        bound = self.reward.threshold
        kind = "score" if bound is None else f"score >= {bound if isinstance(bound, str) else format(bound, 'g')}"
        added = f" + {self.reward.success_weight:g} env success" if self.reward.success_weight else ""
        return f"{who} {kind} of the video{added}{marked}"

    def smoke(self) -> Self:
        """This run cut to minutes: every part of it happens, nothing is learnt to the end. Long episodes are fewer."""
        share = min(1.0, 32 / self.env.episode_steps)
        return replace(
            at_most(self, steps=int(30_000 * share)),
            sft=at_most(self.sft, demonstrations=int(100 * share), scenes=200, steps=300),
            reward=replace(self.reward, monitor=at_most(self.reward.monitor, preflight=8)),
            algo=at_most(self.algo, groups=max(2, int(16 * share)), rounds=1),
            eval=at_most(self.eval, every_steps=int(10_000 * share), episodes=max(4, int(20 * share))),
            track=at_most(
                self.track, checkpoint_every_steps=int(10_000 * share), log_every_steps=max(1, int(5_000 * share))
            ),
        )
