"""A whole run of the second pipeline: a vision-language model that looks, thinks and acts.

Imports only the rooms' config files, never torch or ray: `rlvlm --help` starts at once.
"""

from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Self

from rlvlm.algorithms.ppo_vlm.config import PPOConfig
from rlvlm.algorithms.sft.config import SFTConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.rewards.config import TurnRewardConfig
from rlvlm.runs.config import NamedFolder, Network, RunConfig, at_most
from rlvlm.serving.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRunConfig(RunConfig):
    """A whole run."""

    pipeline: ClassVar[str] = "policy"
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    reward: TurnRewardConfig = field(default_factory=TurnRewardConfig)
    algo: PPOConfig = field(default_factory=PPOConfig)

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        if (self.policy.acts == "head") != (self.algo.objective.choice == "head"):
            raise ValueError(
                f"policy.acts is {self.policy.acts} and algo.objective is {self.algo.objective.choice}: an action head "
                "goes with the objective head, and text with any other"
            )

        is_about_turns = self.reward.per == "turn"
        if self.asks_judge and is_about_turns != (self.judge.score == "utility"):
            wanted = "utility" if is_about_turns else "progress, success, rating or video"
            raise ValueError(
                f"reward.per {self.reward.per} is asked with judge.score {wanted}, got {self.judge.score}: the utility "
                "is that of one turn"
            )

    @property
    def asks_judge(self) -> bool:
        """Whether a VLM scores turns or episodes."""
        return self.reward.asks_judge

    @property
    def unused_settings(self) -> dict[str, str]:
        """What concerns a judge where nobody is asked, the expert where its turns lie in a folder, and lessons where
        the policy was taught before.
        """
        found = {}
        if not self.asks_judge:
            found |= dict.fromkeys(("judge.*", "serve.*"), f"the reward {self.reward.name}, which asks no judge")
        if self.sft.demonstrations:
            found |= dict.fromkeys(("sft.turns", "sft.p_wrong", "sft.p_perturb"), "sft.demonstrations")
        if self.sft.start_from:
            names = (one.name for one in fields(self.sft) if one.name != "start_from")
            found |= dict.fromkeys((f"sft.{name}" for name in names), "sft.start_from")
        return found

    @property
    def max_queries(self) -> int:
        """One for each turn, and the shortest episode has one; 0 where nobody is asked."""
        return self.steps if self.asks_judge else 0

    @property
    def models(self) -> dict[str, str]:
        """The judge's and the policy's."""
        return super(PolicyRunConfig, self).models | {"policy.model": self.policy.model}

    @property
    def folders(self) -> dict[str, NamedFolder]:
        """An adapter, demonstrations, or a policy that was taught already."""
        return {
            "policy.adapter": NamedFolder(self.policy.adapter, holds="adapter_config.json"),
            "sft.demonstrations": NamedFolder(self.sft.demonstrations, holds="demonstrations.json"),
            "sft.start_from": NamedFolder(self.sft.start_from, holds="body.safetensors"),
        }

    @property
    def networks(self) -> dict[str, Network]:
        """The policy, which plays in the run's own process even where others learn."""
        return {"policy": Network(self.policy.device, self.policy.model, self.policy.revision)}

    @property
    def num_workers(self) -> int:
        """Learners and copies of the policy in processes of their own, and Serve's for the latter."""
        return self.algo.num_learners + self.engine.num_replicas + bool(self.engine.num_replicas)

    @property
    def reward_name(self) -> str:
        """What learns, and from which reward."""
        marked = " (random weights)" if self.asks_judge and self.judge.is_random else ""
        return f"{self.algo.objective.choice}, {self.reward.name}{marked}"

    def smoke(self) -> Self:
        """This run cut to minutes: every part of it happens, nothing is learnt to the end. Long episodes are fewer."""
        share = min(1.0, 32 / self.env.episode_steps)
        algo = at_most(self.algo, epochs=1, max_reply_tokens=64)
        algo = replace(algo, num_envs=16, rollout_turns=128, objective=self.algo.objective)
        return replace(
            at_most(self, steps=256),
            sft=at_most(self.sft, turns=64, updates=10),
            algo=algo,
            eval=at_most(self.eval, every_steps=128, episodes=max(2, int(8 * share))),
            track=at_most(self.track, checkpoint_every_steps=128, log_every_steps=128),
        )
