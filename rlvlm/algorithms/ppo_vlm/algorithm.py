"""PPO for policies that look, think and act in text, as an RLlib algorithm. Run by runs/ and by Ray Tune.

Sources: Schulman et al. 2017, arXiv:1707.06347 (PPO); Zhai et al. 2024, arXiv:2405.10292 (RL4VLM). Departures from
RL4VLM:

1. Many envs are played side by side and their replies sampled as one batch; every turn's own prompt is stored and
   log-probs are computed anew from exactly those ids.
2. A reply that cannot be read changes nothing and costs the task's penalty; it is never turned into a random action.
3. Values of states that a time limit cut off are bootstrapped.
4. There is no dropout, neither in playing nor in learning, and log-probs are float32.
5. Step sizes fall along half a cosine, once over the run.
6. Evaluations are greedy and sampled, on seeds of their own.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rlvlm.algorithms.base import UNCHANGED, BaseAlgorithm, BaseConfig, Learners, TrainingStats, check_learners
from rlvlm.algorithms.checkpoint import CorruptCheckpoint, PolicyFile, load_policy_file, load_tree, save_tree
from rlvlm.algorithms.env_slots import EnvSlot
from rlvlm.algorithms.evaluation import Evaluation
from rlvlm.algorithms.ppo_vlm.config import HeadConfig, PPOConfig
from rlvlm.algorithms.ppo_vlm.learner import ReplyLearner
from rlvlm.algorithms.ppo_vlm.module import VLMModule
from rlvlm.algorithms.ppo_vlm.monitors import check_readable, watch_replies
from rlvlm.algorithms.ppo_vlm.play import Actor, PolicyOutput
from rlvlm.algorithms.ppo_vlm.player import TurnsPlayer
from rlvlm.algorithms.ppo_vlm.reward.known import known_episodes, known_turns
from rlvlm.algorithms.ppo_vlm.reward.label import TurnLabeller, without_unknown
from rlvlm.algorithms.ppo_vlm.runner import Rollout, TurnRunner
from rlvlm.algorithms.ppo_vlm.update.objectives import build_objective
from rlvlm.algorithms.sft.config import SFTConfig
from rlvlm.algorithms.sft.demonstrations import demonstrate
from rlvlm.algorithms.sft.folders import check_sft_manifest, load_demonstrations, load_trained, sft_manifest_of
from rlvlm.algorithms.sft.in_process import fine_tune
from rlvlm.core import metrics
from rlvlm.core.errors import RunError
from rlvlm.core.sampling import ReplyTokens
from rlvlm.core.steps import Frames
from rlvlm.core.turns import TurnEpisode
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.judges.judge import Judge
from rlvlm.policies.vlm.engine import Engine, PolicyEngine
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.rewards.config import TurnRewardConfig
from rlvlm.rewards.scorers import make_scorer
from rlvlm.rewards.scoring_items import ScoredItem
from rlvlm.rewards.temporal import TemporalNovelty

logger = logging.getLogger(__name__)

POLICY_KIND = "vlm"
"""Of the policy's file in a checkpoint."""
MakeEngine = Callable[[VLMPolicy, ReplyTokens, Frames], Engine]
"""Makes what samples for a policy that is trained here, given a fixed reply and its image [1, H, W, 3] to compare by;
it must pickle."""


class PPOVLMConfig(BaseConfig):
    """Our frozen configs as attributes of an RLlib config; a sweep may replace any of them."""

    own_settings = ".learning(ppo=PPOConfig(...))"

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or PPOVLM, TurnRunner)
        self.ppo = PPOConfig()
        self.sft = SFTConfig()
        self.make_policy: Callable[[int], VLMPolicy] | None = None
        self.make_engine: MakeEngine | None = None
        self.reward = TurnRewardConfig()
        self.goal = ""
        self.make_judge: Callable[[], Judge] | None = None
        self.make_fallback_judge: Callable[[], Judge] | None = None
        self.total_steps = 15_000

    def acting(self, *, make_policy: Callable[[int], VLMPolicy], make_engine: MakeEngine | None = UNCHANGED) -> Self:
        """Chooses the policy.

        Args:
            make_policy: makes it, for a number of actions, in the process that trains it; must pickle.
            make_engine: makes what samples its replies elsewhere; None samples in the algorithm's process.
        """
        return self._take(make_policy=make_policy, make_engine=make_engine)

    def learning(self, *, ppo: PPOConfig = UNCHANGED, sft: SFTConfig = UNCHANGED, total_steps: int = UNCHANGED) -> Self:
        """Chooses how it learns.

        Args:
            ppo: hyperparameters, objective, number of envs and of learners.
            sft: the supervised start.
            total_steps: env steps over which the step sizes fall.
        """
        if isinstance(ppo, PPOConfig):
            self.learners(num_learners=ppo.num_learners, num_gpus_per_learner=ppo.gpus_per_learner)
        return self._take(ppo=ppo, sft=sft, total_steps=total_steps)

    def rewards(
        self,
        *,
        reward: TurnRewardConfig = UNCHANGED,
        goal: str = UNCHANGED,
        make_judge: Callable[[], Judge] | None = UNCHANGED,
        make_fallback_judge: Callable[[], Judge] | None = UNCHANGED,
    ) -> Self:
        """Chooses what turns are worth.

        Args:
            reward: sources and their weights.
            goal: what a judge is told; empty takes the env's own goal.
            make_judge: makes the judge in the process that asks it; must pickle. None where nobody is asked.
            make_fallback_judge: likewise the judge that is asked where the first has no answer.
        """
        return self._take(reward=reward, goal=goal, make_judge=make_judge, make_fallback_judge=make_fallback_judge)

    def validate(self) -> None:
        """Checks what can be checked before anything starts.

        Raises:
            ValueError: says which setting is wrong and what to do.
        """
        super().validate()
        if self.make_policy is None:
            raise ValueError("there is no policy; call .acting(make_policy=...)")
        check_learners(self, self.ppo.num_learners, self.ppo.gpus_per_learner)
        if self.reward.asks_judge != (self.make_judge is not None):
            raise ValueError(
                f"the reward is {self.reward.name}, make_judge {self.make_judge}: a judge's score needs one, and "
                "no other reward does"
            )

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """The policy, with what makes it."""
        return RLModuleSpec(module_class=VLMModule, model_config={"make_policy": self.make_policy})

    def get_default_learner_class(self) -> type[ReplyLearner]:
        """The learner of all objectives."""
        return ReplyLearner


class PPOVLM(BaseAlgorithm):
    """One `train()` is one rollout and its update; evaluations and checkpoints come between."""

    config: PPOVLMConfig  # pyright: ignore[reportIncompatibleVariableOverride] - RLlib's is any or none

    @classmethod
    def get_default_config(cls) -> PPOVLMConfig:
        """A config that still needs its task and its policy."""
        return PPOVLMConfig()

    def setup(self, config: AlgorithmConfig) -> None:
        """Builds envs, policy and learner; called by RLlib."""
        super().setup(config)
        torch.use_deterministic_algorithms(False)  # RLlib asks for it, and it forbids sampling on a GPU
        assert self.learner_group is not None and self.env_runner_group is not None, "RLlib has set both up"
        self._learners: Learners[ReplyLearner] = Learners(self, self.config.ppo.threads)
        runner = self.env_runner_group.local_env_runner
        assert isinstance(runner, TurnRunner), "what the config names"
        self._runner = runner
        ppo, make_policy = self.config.ppo, self.config.make_policy
        assert make_policy is not None, "checked by `validate`"
        self._learner = self._learners.local
        world = runner.slots[0].env
        policy = make_policy(len(world.action_names)) if self._learner is None else self._learner.policy
        self._policy = policy
        self._group_size = build_objective(ppo.objective).group_size
        if isinstance(ppo.objective, HeadConfig) != (policy.config.acts == "head"):
            raise ValueError(
                f"the policy acts by {policy.config.acts}, the objective is {type(ppo.objective).__name__}: "
                "set policy.acts head together with the objective head, or neither"
            )
        self._engine = self._make_engine()
        self._actor = runner.actor = Actor(self._engine, ppo.max_reply_tokens, ppo.temperature)
        self._player = TurnsPlayer(
            self._actor,
            partial(make_slot, self.config.task, self.config.env_settings.for_evaluation()),
            ppo.num_envs,
            milestones=world.milestones,
        )
        self._viewer = make_env(self.config.task, self.config.env_settings, self.config.seed)
        self.last_played: list[tuple[TurnEpisode, list[PolicyOutput]]] = []
        """The greedy episodes of the last evaluation, with the moves that made them."""
        self._labeller = self._make_labeller()
        runner.watch = self._labeller.watch
        self._stats = TrainingStats()
        self._is_prepared = False

    def _make_engine(self) -> Engine:
        """What samples: the policy of this process, or what the config's `make_engine` makes for it."""
        if self.config.make_engine is None:
            return PolicyEngine(self._policy, self.config.ppo.num_envs)
        slot = make_slot(self.config.task, self.config.env_settings)
        slot.begin(self.config.seed)
        frame = slot.env.draw(slot.turn.snapshot[None])
        self._policy.show([slot.obs.image], frame)
        probe = self._policy.write(slot.obs.prompt, slot.obs.image, slot.env.action_text(0))
        engine = self.config.make_engine(self._policy, probe, frame)
        engine.take(0)
        return engine

    def prepare(self, log: Callable[[str], None] = logger.info) -> bool:
        """Demonstrations and the supervised start, once; PPO's reference is the policy after it.

        Args:
            log: takes a line on what is being done now.

        Returns:
            Whether there was such a start, or one was taken over.
        """
        sft = self.config.sft
        is_taught = bool(sft.turns or sft.demonstrations or sft.start_from)
        if self._is_prepared:
            return is_taught
        self._preflight(log)
        slot = make_slot(self.config.task, replace(self.config.env_settings, physics="exact"))
        if sft.start_from:
            start = Path(sft.start_from)
            log(f"starting from {start}")
            names = slot.env.action_names
            check_sft_manifest(
                start, sft_manifest_of(self.config.task, self.config.env_settings, self._policy.config, names), log
            )
            load_trained(self._policy, start)
        elif is_taught:
            episodes = self._demonstrations(slot, log)
            measured = fine_tune(
                self._policy, slot, episodes, sft, self.config.seed, self.config.ppo.max_reply_tokens, log
            )
            self._stats.note(measured)
            exact = measured.get(metrics.SFT_EXACT_ACTION)
            log(
                f"supervised start: {sft.updates} updates in {measured[metrics.SFT_WALL_S]:.0f} s, held-out turns: "
                + ("none" if exact is None else f"{exact:.0%} with the demonstrated action")
            )
        self._engine.take(self._engine.version + 1)
        if self._learner is None:
            weights = {name: value.cpu() for name, value in self._policy.trained_state().items()}
            self._learners.call_all("take_weights", weights)
        self._learners.call_all("begin")
        self._is_prepared = True
        return is_taught

    def _demonstrations(self, slot: EnvSlot, log: Callable[[str], None]) -> list[TurnEpisode]:
        """Those of the folder that was named, or turns of the scripted expert."""
        sft = self.config.sft
        if sft.demonstrations:
            log(f"reading the demonstrations in {sft.demonstrations}")
            return load_demonstrations(Path(sft.demonstrations), slot.env, self.config.env_settings)
        log(f"collecting {sft.turns:,} turns of the scripted expert")
        return demonstrate(slot, sft, self.config.seed)

    def _make_labeller(self) -> TurnLabeller:
        """Gives turns their reward: from the sources that the config weighs."""
        reward, seed = self.config.reward, self.config.seed
        scorer = novelty = None
        if reward.scores:
            scorer = make_scorer(
                reward.teacher, self.config.make_judge, self._viewer.draw, seed, remembers=True,
                flaw=reward.flaw, make_fallback_judge=self.config.make_fallback_judge,
            )  # fmt: skip
        if reward.weights.novelty:
            novelty = TemporalNovelty(len(self._viewer.action_names), self._viewer.draw, seed)
        return TurnLabeller(reward, scorer, novelty, self.config.goal)

    def _preflight(self, log: Callable[[str], None]) -> None:
        """Has a judge tell turns or episodes apart whose worth is known, before anything is learned from it.

        Raises:
            JudgeUnavailable: it cannot.
        """
        reward, monitor = self.config.reward, self.config.reward.monitor
        if not (reward.asks_judge and monitor.preflight):
            return
        world = make_slot(self.config.task, self.config.env_settings).env
        if not world.has_expert:
            log("the judge is not tried on known turns: nobody has written an expert for this task")
            return
        log(f"trying the judge on {2 * monitor.preflight} {reward.per}s whose worth is known")
        if reward.per == "turn":
            known = known_turns(world, monitor.preflight, self.config.seed, self.config.goal)
        else:
            known = known_episodes(world, monitor.preflight, reward.num_frames, self.config.seed, self.config.goal)
        preflight = self._labeller.preflight_on(known)
        self._stats.note(
            {metrics.JUDGE_PREFLIGHT_AUC: preflight.area, metrics.JUDGE_PREFLIGHT_THRESHOLD: preflight.threshold}
        )
        log(f"the judge tells better from worse {reward.per}s: {preflight}")

    def training_step(self) -> None:
        """A rollout, each turn's credit, some epochs of updates."""
        self.prepare()
        began = time.monotonic()
        rollout = self._play()
        check_versions(rollout, self._engine.version)
        between = time.monotonic()
        learned = without_unknown(rollout)
        if len(learned):
            self._learners.call_all("learn", learned, self.env_steps / self.config.total_steps)
            self._sync_weights()
            self._engine.take(self._engine.version + 1)
        self._log_round(rollout, between - began, time.monotonic() - between)

    def _sync_weights(self) -> None:
        """Has the policy that plays in this process be the learners'."""
        if self._learner is None:
            self._policy.load_trained_state(self._learners.call("weights"))

    def _play(self) -> Rollout:
        """What every env does before the next update, with what each turn was worth."""
        if self._group_size > 1:
            rollout = self._runner.sample_groups(group_size=self._group_size)
        else:
            rollout = self._runner.sample(num_turns=self.config.ppo.turns_per_env)
        return self._labeller.label(rollout, self.env_steps + len(rollout))

    def _log_round(self, rollout: Rollout, rollout_s: float, update_s: float) -> None:
        """Counts what was played, and looks at the replies."""
        ended = [(float(one.env_rewards.sum()), bool(one.success.any())) for one in rollout.episodes]
        self._stats.record(len(rollout), ended)
        turns = [played for row in rollout.turns for played in row if played is not None]
        watched = watch_replies(turns, self.config.ppo.max_reply_tokens)
        check_readable(watched, self.config.ppo.most_unreadable)
        self._stats.note(watched)
        self._stats.note({metrics.PPO_ROLLOUT_S: rollout_s, metrics.PPO_UPDATE_S: update_s})
        self.log_round()

    def report(self) -> dict[str, float]:
        """The newest numbers by their names in `rlvlm.core.metrics`."""
        return self._stats.report() | self._learners.call("report") | self._engine.report() | self._labeller.report()

    def drain_records(self) -> list[ScoredItem]:
        """What was scored since the last call, with the truth beside it."""
        return self._labeller.drain_records()

    def evaluate_policy(self, num_episodes: int) -> Evaluation:
        """Episodes of the present policy, greedy and sampled, in envs of their own."""
        evaluation, self.last_played = self._player.evaluate(num_episodes)
        return evaluation

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes everything that an exact continuation needs; complete or not at all.

        Features of images are forgotten: a continuation begins without them, and encoding them in other batches would
        change their last bits.

        Raises:
            MachineError: the disk is full or cannot be written.
        """
        tree = {
            "runner": self._runner.save_tree(),
            "learner": self._learners.call("save_tree"),
            "tally": self._stats.get_state(),
            "labeller": self._labeller.save_tree(),
            "is_prepared": self._is_prepared,
            "version": self._engine.version,
            "iteration": self._iteration,
        }
        trained = {name: value.contiguous() for name, value in self._policy.trained_state().items()}
        save_tree(Path(checkpoint_dir), tree, PolicyFile(kind=POLICY_KIND, weights=trained))
        self._forget_images()

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Goes on from a checkpoint of the same config, bit for bit as if there had been no stop.

        Raises:
            CorruptCheckpoint: a file is missing or differs from what was written.
        """
        tree = load_tree(Path(checkpoint_dir))
        self._runner.load_tree(tree["runner"])
        self._learners.call_all("load_tree", tree["learner"])
        self._sync_weights()
        self._stats.set_state(tree["tally"])
        self._labeller.load_tree(tree["labeller"])
        self._is_prepared = tree["is_prepared"]
        self._engine.take(tree["version"])
        self._iteration = tree["iteration"]
        self._forget_images()

    def _forget_images(self) -> None:
        self._policy.images.clear()
        self._learners.call_all("forget_images")

    def cleanup(self) -> None:
        """Closes the engine, too."""
        super().cleanup()
        self._engine.close()


def check_versions(rollout: Rollout, version: int) -> None:
    """Passes where every turn of `rollout` was sampled with the weights of `version`; no other is learned from.

    Raises:
        RunError: something else was sampled.
    """
    odd = {one.output.version for row in rollout.turns for one in row if one is not None} - {version}
    if odd:
        raise RunError(
            f"a rollout of version {version} of the weights has replies of version {sorted(odd)}",
            "go on from the last checkpoint: rlvlm resume",
        )


def make_slot(task: str, world: EnvConfig) -> EnvSlot:
    """A new env of `task` for demonstrations or evaluations; every episode in it begins with a seed of its own."""
    return EnvSlot(make_env(task, world, 0), task)


def load_trained_policy(policy: VLMPolicy, folder: Path) -> None:
    """Gives `policy` what was trained by the time of the checkpoint in `folder`; what was not, it brings itself.

    Raises:
        CorruptCheckpoint: a file is missing, differs from what was written, or holds another kind of policy.
    """
    file = load_policy_file(folder)
    try:
        if file.kind != POLICY_KIND:
            raise ValueError(f"its policy is a {file.kind}, not a {POLICY_KIND}")
        policy.load_trained_state(file.weights)
    except ValueError as error:
        raise CorruptCheckpoint(
            f"{folder} holds no policy that can be played: {error}", "use a checkpoint of this run, with its own config"
        ) from error


def load_start(policy: VLMPolicy, folder: Path) -> bool:
    """Gives `policy` the weights that PPO started from, as the checkpoint in `folder` keeps them; False without any.

    Raises:
        CorruptCheckpoint: a file is missing or differs from what was written.
    """
    start = load_tree(folder)["learner"]["start"]
    if start:
        own = policy.trained_state()
        policy.load_trained_state({name: torch.as_tensor(value).to(own[name].dtype) for name, value in start.items()})
    return bool(start)
