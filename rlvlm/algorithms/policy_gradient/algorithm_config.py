"""RLlib's config of policy gradients: rlvlm's frozen settings, and RLlib's own numbers of processes."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.env_runner import EnvRunner

from rlvlm.algorithms.base import BaseConfig
from rlvlm.algorithms.learners import check_learners, own_learner_gpu, use_assigned_gpu
from rlvlm.algorithms.policy_gradient.advantages import find_estimator
from rlvlm.algorithms.policy_gradient.chunks import ChunkRunner
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.extras import check_extras
from rlvlm.algorithms.policy_gradient.learner import PolicyModule, TokenLearner
from rlvlm.algorithms.policy_gradient.turns import TurnRunner
from rlvlm.core.episodes import IntArray, Observations
from rlvlm.core.steps import Frames
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import Env
from rlvlm.envs.registry import find_task, make_env
from rlvlm.judges.judge import Judge
from rlvlm.policies.vla.build import build_policy as build_vla
from rlvlm.policies.vlm.engine import Engine
from rlvlm.policies.vlm.loading import build_policy
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.rewards.config import TurnRewardConfig

MakeEngine = Callable[[VLMPolicy, Observations, IntArray, Frames], Engine]
"""Makes the engine that samples for a chat VLM in training here (a policy of the user's own is refused one), given a
fixed turn, the token ids of a reply to it and its image [1, H, W, 3], by which both are compared; must pickle."""


class Replies:
    """What a config says of policies that reply, to envs in turns."""

    runner: ClassVar[type[EnvRunner]] = TurnRunner
    build: ClassVar[Callable[[Any, Any], Any]] = staticmethod(build_policy)

    @staticmethod
    def own_gpu(algo: PolicyGradientConfig) -> dict[str, Any]:  # noqa: ARG004 - the policy's own config says where it is
        """Returns RLlib's numbers for a learner in the algorithm's own process."""
        return {"num_gpus_per_learner": 0}

    @staticmethod
    def check(config: "TokenConfig", is_compared: bool) -> None:
        """Raises unless the settings are for such policies; `is_compared`: the estimator compares groups."""
        algo = config.algo
        if is_compared and algo.num_envs % algo.group_size:
            raise ValueError(f"algo.group_size must divide algo.num_envs, got {algo.group_size}, {algo.num_envs}")
        if algo.env_runners:
            raise ValueError("algo.env_runners play envs in chunks; replies are sampled by engine.num_replicas")
        if algo.rollout == "asynchronous" and not config.make_engine:
            raise _not_asynchronous("engine.num_replicas")
        check_extras(algo.loss.policy, has_chunks=False, is_piece=bool(algo.rollout_turns))


class Chunks:
    """What a config says of policies that act in chunks."""

    runner: ClassVar[type[EnvRunner]] = ChunkRunner
    build: ClassVar[Callable[[Any, Any], Any]] = staticmethod(build_vla)

    @staticmethod
    def own_gpu(algo: PolicyGradientConfig) -> dict[str, Any]:
        """Returns RLlib's numbers for a learner in the algorithm's own process, where RLlib places it."""
        return own_learner_gpu(algo.device)

    @staticmethod
    def check(config: "TokenConfig", is_compared: bool) -> None:  # noqa: ARG004 - groups are played one by one
        """See `Replies`."""
        algo = config.algo
        if algo.rollout == "asynchronous" and not algo.env_workers:
            raise _not_asynchronous("algo.env_workers")
        check_extras(algo.loss.policy, has_chunks=True, is_piece=False)


def _not_asynchronous(setting: str) -> ValueError:
    return ValueError(
        f"algo.rollout asynchronous needs {setting}, got 0: nothing is done elsewhere that could go on meanwhile; set "
        "it, or leave out algo.rollout"
    )


ANSWERS: Mapping[str, type[Replies | Chunks]] = {"turns": Replies, "chunks": Chunks}
"""What is particular to a kind of answers, by the kind of a task's env."""


class TokenConfig(BaseConfig):
    """Holds rlvlm's frozen configs as attributes of an RLlib config; a sweep may replace any of them.

    Args:
        algo_class: the algorithm.
    """

    algo: PolicyGradientConfig = PolicyGradientConfig()
    """Estimator, loss, rollouts and updates, numbers of processes included."""
    sft: Any = None
    """Supervised start, of the policy's own kind; None: there is none."""
    total_steps: int = 15_000
    """Env steps over which Adam's step sizes fall."""
    policy: Any = None
    """Config of a VLA, a VLM or the user's own network."""
    make_engine: MakeEngine | None = None
    """Makes an engine that samples replies in other processes; None: the algorithm's process does."""
    eval_envs: int = 0
    """Envs that evaluations in turns play at once; 0: as many as rollouts."""
    reward: TurnRewardConfig = TurnRewardConfig()
    """Sources of the rewards of turns, chunks and episodes, and their weights."""
    goal: str = ""
    """Goal that a judge is asked about; empty: the env's own, or the episode's instruction."""
    make_judge: Callable[[], Judge] | None = None
    """Makes the judge in the process that asks it; must pickle. None: no judge is asked."""
    make_fallback_judge: Callable[[], Judge] | None = None
    """Makes the judge that is asked if the first gives no answer, likewise."""
    judge_env: EnvConfig | None = None
    """Settings of the env that draws for the judge; None: `env_settings`."""
    refuses_faulty: bool = True
    """Whether a judge with a fault that the preflight finds is refused (`JudgeConfig.faulty`)."""
    example = "algo=PolicyGradientConfig(...)"

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class, TurnRunner)

    @property
    def kind(self) -> str:
        """Kind of the task's env: turns or chunks."""
        return find_task(self.task).kind if self.task else "turns"

    def settings(self, **chosen: Any) -> Self:
        """Sets settings of ours, see `BaseConfig`, and RLlib's numbers of processes with them; the task's kind decides
        which runner plays it.
        """
        super().settings(**chosen)
        algo, kind = self.algo, ANSWERS[self.kind]
        actors: dict[str, Any] = {"num_gpus_per_learner": algo.gpus_per_learner}
        self.learners(num_learners=algo.num_learners, **(actors if algo.num_learners else kind.own_gpu(algo)))
        self.env_runners(
            env_runner_cls=kind.runner, num_env_runners=algo.env_runners,
            num_gpus_per_env_runner=algo.gpus_per_env_runner, create_local_env_runner=not algo.env_runners,
        )  # fmt: skip
        return self

    @property
    def history(self) -> int:
        """Number of images in a prompt, of a policy that replies."""
        return getattr(self.policy, "history", 1)

    def policy_for(self, env: Env) -> Any:
        """Returns the policy, untrained or as loaded, for an env of the task."""
        return ANSWERS[self.kind].build(self.policy, env)

    def validate(self) -> None:
        """Checks what can be checked before anything starts.

        Raises:
            ValueError: says which setting is wrong and what to do.
        """
        super().validate()
        if self.policy is None:
            raise ValueError("there is no policy; call .settings(policy=VLAConfig()), or with a PolicyConfig in turns")
        algo, reward, estimator = self.algo, self.reward, find_estimator(self.algo.advantage.estimator)
        needs = estimator.needs
        env_runners = (self.num_env_runners or 0) if self.in_evaluation else algo.env_runners
        algo.check_with(self.policy, reward, is_served=self.make_engine is not None)
        if self.sft is not None:
            self.sft.check_policy(self.policy)
        check_learners(self, algo.num_learners, algo.gpus_per_learner, env_runners)
        if self.reward.asks_judge != (self.make_judge is not None):
            raise ValueError(
                f"the reward is {self.reward.title('judge')}, make_judge {self.make_judge}: a judge's score needs one, "
                "and no other reward does"
            )
        if estimator.is_per_episode and reward.scores and reward.clip == "growing":
            # sum over t of (s_t - s_t-1) = s_T: the judge would be asked at every turn for what its last score says
            raise ValueError(
                "reward.clip growing pays each turn by how much the score rose, and algo.advantage.estimator "
                f"{algo.advantage.estimator} adds these up to the episode's last score: the advantages of reward.per "
                "episode, for many times the questions; set --algo.advantage.estimator grpo_turns or rloo_turns, which "
                "compare what is still to come at each turn, or --reward.per episode --reward.clip turn"
            )
        if reward.shaping == "value" and (estimator.compares_sums or algo.advantage.values == "state"):
            # sum over t of gamma V(s_t+1) - V(s_t): without a discount it is the same for all episodes of a group
            raise ValueError(
                "reward.shaping value pays each turn for the change of a value, which algo.advantage.estimator "
                f"{algo.advantage.estimator} adds up over the episode, or algo.advantage.values state has in its "
                "critic already; set --algo.advantage.estimator grpo_turns or rloo_turns, or --algo.preset ppo with "
                "--algo.advantage.values policy"
            )
        if "groups" in needs and algo.group_size < 2:
            raise ValueError(f"{algo.advantage.estimator} needs algo.group_size >= 2, got {algo.group_size}")
        ANSWERS[self.kind].check(self, "groups" in needs)
        if algo.staleness and algo.rounds > 1 and "groups" in needs:
            raise ValueError(
                f"algo.rounds {algo.rounds} has no effect with algo.staleness, which learns from one rollout at a "
                "time; set --algo.rounds 1"
            )

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Returns the policy's spec, for the task's env."""

        def make() -> Any:
            use_assigned_gpu()
            return self.policy_for(make_env(self.task, self.env_settings, self.seed))

        settings = {"make_policy": make, "is_sharded": self.algo.shard}
        return RLModuleSpec(module_class=PolicyModule, model_config=settings)

    def get_default_learner_class(self) -> type[TokenLearner]:
        """Returns the learner, one for all estimators and losses."""
        return TokenLearner
