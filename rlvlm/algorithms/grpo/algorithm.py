"""GRPO of a vision-language-action policy, as an RLlib algorithm. Run by runs/ and by Ray Tune.

Sources: Shao et al. 2024, arXiv:2402.03300 (GRPO); Li et al. 2025, arXiv:2509.09674 (SimpleVLA-RL: GRPO for OpenVLA-OFT
from the success of whole episodes). Departures:

1. A group is dropped where its scores do not differ (or not by more than the scorer's own noise), not by fixed bounds
   on their mean; what is dropped counts in no denominator.
2. The step size follows how far an update has moved the policy, so that Adam's first steps cannot wreck it.
3. The executed action is what has a probability: the two tokens of the top bin count as one.
4. Policy and envs share one process, with the learner unless there are several; RLlib's episodes and connectors are
   not on the path.
5. With `GRPOConfig.draws` chunk, tokens of a chunk that share a random number are not independent, and the loss adds up
   their log-probabilities as if they were: what is learned from is no longer the gradient of what was played.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from torch.nn.utils import parameters_to_vector

from rlvlm.algorithms.base import (
    UNCHANGED,
    BaseAlgorithm,
    BaseConfig,
    Learners,
    TrainingStats,
    check_learners,
    gpus_of_learner,
)
from rlvlm.algorithms.checkpoint import load_tree, save_tree
from rlvlm.algorithms.evaluation import FIRST_SEED, Evaluation, PlayedEpisode
from rlvlm.algorithms.grpo.config import GRPOConfig, ScoreConfig, SFTConfig, check_together
from rlvlm.algorithms.grpo.credit.critic import Critic
from rlvlm.algorithms.grpo.credit.groups import Group, make_update
from rlvlm.algorithms.grpo.group_source import GroupSource
from rlvlm.algorithms.grpo.imitation import demonstrate, imitate, read_demonstrations
from rlvlm.algorithms.grpo.learner import GRPOLearner, VLAModule
from rlvlm.algorithms.grpo.player import ChunkPlayer, as_played, policy_file, take_policy
from rlvlm.algorithms.grpo.reward.preflight import preflight_scorer
from rlvlm.algorithms.grpo.reward.scoring import EpisodeScorer, SuccessScorer, VideoScorer, shown_frames
from rlvlm.algorithms.grpo.rollouts import ObsProcessor, explored_dimensions
from rlvlm.algorithms.grpo.runner import IMAGE_BYTES, GroupRunner, join
from rlvlm.algorithms.runner_group import LocalRunnerGroup, RemoteRunnerGroup, check_places
from rlvlm.core import metrics
from rlvlm.core.chunks import ChunkEpisode
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.registry import make_env
from rlvlm.judges.judge import Judge, Remembering
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.policy import take_weights, trained_weights
from rlvlm.policies.vla.tokens import ActionScale
from rlvlm.rewards.scorers import Scorer, make_scorer
from rlvlm.rewards.scoring_items import ScoredItem


class VLAGRPOConfig(BaseConfig):
    """Our frozen configs as attributes of an RLlib config; a sweep may replace any of them."""

    own_settings = ".learning(grpo=GRPOConfig(...))"

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or VLAGRPO, GroupRunner)
        self.policy = VLAConfig()
        self.sft = SFTConfig()
        self.grpo = GRPOConfig()
        self.total_steps = 200_000
        self.scores = ScoreConfig()
        self.make_judge: Callable[[], Judge] | None = None
        self.make_fallback_judge: Callable[[], Judge] | None = None

    def learning(
        self,
        *,
        policy: VLAConfig = UNCHANGED,
        sft: SFTConfig = UNCHANGED,
        grpo: GRPOConfig = UNCHANGED,
        total_steps: int = UNCHANGED,
    ) -> Self:
        """Chooses the policy and how it learns.

        Args:
            policy: its size and its tokens.
            sft: the supervised start.
            grpo: hyperparameters, numbers of processes included.
            total_steps: env steps over which the step size falls.
        """
        if isinstance(grpo, GRPOConfig):
            gpus = grpo.gpus_per_learner if grpo.num_learners else gpus_of_learner(grpo.device)
            self.learners(num_learners=grpo.num_learners, num_gpus_per_learner=gpus)
            self.env_runners(num_env_runners=grpo.env_runners, create_local_env_runner=not grpo.env_runners)
        return self._take(policy=policy, sft=sft, grpo=grpo, total_steps=total_steps)

    def rewards(
        self,
        *,
        scores: ScoreConfig = UNCHANGED,
        make_judge: Callable[[], Judge] | None = UNCHANGED,
        make_fallback_judge: Callable[[], Judge] | None = UNCHANGED,
    ) -> Self:
        """Chooses what an episode is worth.

        Args:
            scores: success, or a judge's word on the video.
            make_judge: makes the judge in the process that asks it; must pickle.
            make_fallback_judge: likewise the judge that is asked where the first has no answer.
        """
        return self._take(scores=scores, make_judge=make_judge, make_fallback_judge=make_fallback_judge)

    def validate(self) -> None:
        """Checks what can be checked before anything starts.

        Raises:
            ValueError: says which setting is wrong and what to do.
        """
        super().validate()
        env_runners = (self.num_env_runners or 0) if self.in_evaluation else self.grpo.env_runners
        check_learners(self, self.grpo.num_learners, self.grpo.gpus_per_learner, env_runners)
        if self.scores.asks_judge != (self.make_judge is not None):
            raise ValueError(
                f"scores.source is {self.scores.source}, teacher {self.scores.teacher}, make_judge {self.make_judge}: "
                "judged scores need one, and no others do"
            )
        check_together(self.scores, self.grpo, self.sft, self.policy)

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """The policy, sized by `policy` and by the task's env."""

        def make_policy() -> torch.nn.Module:
            return build_policy(self.policy, make_env(self.task, self.env_settings, self.seed))

        return RLModuleSpec(module_class=VLAModule, model_config={"make_policy": make_policy})

    def get_default_learner_class(self) -> type[GRPOLearner]:
        """The learner of groups."""
        return GRPOLearner


class VLAGRPO(BaseAlgorithm):
    """One `train()` is one update of the policy; evaluations and checkpoints come between."""

    config: VLAGRPOConfig  # pyright: ignore[reportIncompatibleVariableOverride] - RLlib's is any or none

    @classmethod
    def get_default_config(cls) -> VLAGRPOConfig:
        """A config that still needs its task."""
        return VLAGRPOConfig()

    def setup(self, config: AlgorithmConfig) -> None:
        """Builds envs and policy; called by RLlib."""
        if config.num_env_runners:
            check_places(config.num_env_runners, config.num_cpus_per_env_runner or 0)
        super().setup(config)
        assert self.learner_group is not None and self.env_runner_group is not None, "RLlib has set both up"
        self._learners: Learners[GRPOLearner] = Learners(self, self.config.grpo.threads)
        self._learner = self._learners.local
        self._viewer = make_env(self.config.task, self.config.env_settings.for_evaluation(), self.config.seed)
        self._policy: Any
        if self._learner is None:
            self._policy = build_policy(self.config.policy, self._viewer)
            self._learners.call_all("watch_alone")
        else:
            self._policy = self._learner.policy
        self._obs_processor = ObsProcessor(self._policy, self._viewer, IMAGE_BYTES if self._learner is not None else 0)
        if self._learner is not None:
            self._learner.watch(self._obs_processor, self._viewer)
        runner: Any = self.env_runner_group.local_env_runner
        if runner is None:
            timeout_s, revival_s = self.config.sample_timeout_s, self.config.env_runner_restore_timeout_s
            self._runner_group = RemoteRunnerGroup(self.env_runner_group, self._weights, join, timeout_s, revival_s)
        else:
            runner.policy, runner.obs_processor = self._policy, self._obs_processor
            self._runner_group = LocalRunnerGroup(runner)
        self._scale: ActionScale | None = None
        self.last_played: list[ChunkEpisode] = []
        self._stats = TrainingStats()
        self._update_s = 0.0
        self._critic: Critic | None = None
        if self.config.grpo.advantage.baseline == "critic":
            self._critic = Critic(self.config.grpo.advantage, self._viewer, self.config.seed)
        self._scorer: EpisodeScorer = SuccessScorer()
        if self.config.scores.source == "judged":
            self._scorer = VideoScorer(self._make_scorer(self.config.make_judge), self.config.scores)
        self._groups = GroupSource(
            self.config.grpo, self.config.scores, self._runner_group, self._obs_processor, self._scorer, self._stats
        )

    def _make_scorer(self, make_judge: Callable[[], Judge] | None) -> Scorer:
        """Who says what an episode is worth; a judge is made by `make_judge`."""
        scores = self.config.scores
        return make_scorer(
            scores.teacher, make_judge,
            lambda snapshots: shown_frames(self.draw(snapshots, scores.frame_px), scores),
            self.config.seed, remembers=False, flaw=scores.flaw, make_fallback_judge=self.config.make_fallback_judge,
        )  # fmt: skip

    def prepare(self, log: Callable[[str], None]) -> bool:
        """The supervised start: the policy imitates demonstrations; not one that comes trained, or is another run's."""
        self._preflight(log)
        if self.config.sft.start_from:
            start = Path(self.config.sft.start_from).expanduser()
            log(f"starting from the policy of {start}")
            self._scale = take_policy(start / "algorithm", self._policy, self.config.policy)
        elif self._policy.scale is None:
            self._imitate(log)
        else:
            self._scale = self._policy.scale
        assert self._scale is not None, "just set"
        is_explored = explored_dimensions(self._scale, self._viewer, self.config.grpo.least_range)
        if not is_explored.all():
            still = ", ".join(map(str, np.flatnonzero(~is_explored)))
            log(f"dimensions {still} of the actions are not explored: demonstrations hardly use their range")
        if self._learner is None:  # all learners begin as the policy that plays here, fresh adapters too
            weights = {name: value.cpu() for name, value in trained_weights(self._policy).items()}
            self._learners.call_all("take_weights", weights)
        self._learners.call_all("begin")
        return True

    def _imitate(self, log: Callable[[str], None]) -> None:
        """Has the env's script demonstrate, or reads what it or others have, and the policy learn from it."""
        rng = np.random.default_rng(np.random.SeedSequence(self.config.seed, spawn_key=(6,)))
        sft = self.config.sft
        if sft.data:
            data, task, env = Path(sft.data).expanduser(), self.config.task, self.config.env_settings
            shown = read_demonstrations(data, task, env, self._viewer, self._policy.image_px, log)
        else:
            log(f"{sft.demonstrations} demonstrations by the task's script")
            shown = demonstrate(self._viewer, sft, self.config.seed, log)
        actions = shown.actions.reshape(-1, shown.actions.shape[-1])
        self._scale = ActionScale.of_actions(actions, self._viewer.scaled_actions)
        assert self._scale is not None, "just set"
        loss = imitate(self._policy, self._obs_processor, shown, self._scale, sft, rng, log)
        self._stats.note({metrics.SFT_LOSS: loss, metrics.SFT_DEMONSTRATIONS: float(shown.num_episodes)})

    def _preflight(self, log: Callable[[str], None]) -> None:
        """Tries who scores on known episodes, where anybody is asked or noise is to be measured."""
        if not isinstance(self._scorer, VideoScorer):
            return
        found = preflight_scorer(
            self._scorer,
            self._viewer,
            self.config.scores,
            self.config.grpo.advantage,
            self.config.seed,
            lambda: self._make_scorer(partial(_without_memory, self.config.make_judge)),
            log,
        )
        self._stats.note(found)
        self._groups.scorer_noise = found.get(metrics.JUDGE_PREFLIGHT_NOISE, self._groups.scorer_noise)

    def training_step(self) -> None:
        """One update: roll out groups, score their episodes, learn from those groups that teach something."""
        if self._scale is None:
            self.prepare(logging.getLogger(__name__).info)
        assert self._scale is not None, "just set"
        self._learn_from(self._groups.next(self._scale))
        self.log_round()

    def _learn_from(self, groups: list[Group]) -> None:
        began = time.monotonic()
        if self._critic is not None:
            update = self._critic.weigh(groups)
        else:
            update = make_update(groups, self.config.grpo.advantage) if groups else None
        if update is not None:
            self._learners.call_all("learn", update, self.env_steps / self.config.total_steps)
            self._sync_weights()
            self._update_s = time.monotonic() - began

    def _weights(self) -> FloatArray:
        """[P] those of the policy that learn, as `GroupRunner.act` takes them."""
        return parameters_to_vector(trained_weights(self._policy).values()).cpu().numpy()

    def _sync_weights(self) -> None:
        """Has the policy that plays in this process be the learners'."""
        if self._learner is None:
            take_weights(self._policy, self._learners.call("weights"))

    def _flush_pending(self) -> None:
        """Learns from what was played and is still being looked at, so that nothing is on its way."""
        self._learn_from(self._groups.rest())

    def report(self) -> dict[str, float]:
        """The newest numbers by their names in `rlvlm.core.metrics`; success is the newest update's."""
        critic = {} if self._critic is None else self._critic.report()
        seconds = {metrics.GRPO_ROLLOUT_S: self._groups.rollout_s, metrics.GRPO_UPDATE_S: self._update_s}
        measured = {name: value for name, value in seconds.items() if value}
        return self._stats.report() | self._learners.call("report") | critic | self._scorer.report() | measured

    def evaluate_policy(self, num_episodes: int) -> Evaluation:
        """Greedy episodes from held-out initial states, and the success rate of sampled ones from the same states."""
        self._flush_pending()
        seeds = range(FIRST_SEED, FIRST_SEED + num_episodes)
        self.last_played = self._player(temperature=None).roll(seeds)
        sampled = self._player(temperature=self.config.grpo.temperature).roll(seeds)
        rate = float(np.mean([episode.success for episode in sampled])) if sampled else 0.0
        return Evaluation(episodes=list(map(as_played, self.last_played)), metrics={metrics.EVAL_SAMPLED_SUCCESS: rate})

    def _player(self, temperature: float | None) -> ChunkPlayer:
        assert self._scale is not None, "there is a policy to evaluate once it has been prepared"
        return ChunkPlayer(self._policy, self._viewer, self._scale, temperature, self.config.grpo.least_range)

    def finish(self) -> None:
        """Learns from the last rollout, where scores are waited for one update later."""
        self._flush_pending()

    def rewarded(self, episodes: Sequence[PlayedEpisode]) -> list[PlayedEpisode]:
        """`episodes` with what the judge says of each as it goes; as they are where no judge is asked.

        Raises:
            JudgeUnavailable: it does not answer.
        """
        if not self.config.scores.asks_judge:
            return list(episodes)
        assert isinstance(self._scorer, VideoScorer), "whoever asks a judge is one"
        return [
            replace(
                one,
                learned_rewards=self._scorer.follow(episode),
                reward_name="judge's score so far",
                reward_range=(0, 1),
            )
            for one, episode in zip(episodes, self.last_played, strict=False)
        ]

    def drain_records(self) -> list[ScoredItem]:
        """The judge's answers since the last call; none where nobody is asked."""
        return self._scorer.drain_records()

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Images [N, H, W, 3] of `snapshots` [N, S] by the first camera."""
        return self._viewer.draw(snapshots, size_px)

    def draw_all(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Images [N, cameras * H, W, 3] of `snapshots` [N, S]: what a policy sees, the first camera on top."""
        cameras = self._viewer.cameras
        return np.concatenate([self._viewer.draw(snapshots, size_px, camera) for camera in cameras], axis=1)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes everything that an exact continuation needs; complete or not at all.

        Raises:
            MachineError: the disk is full or cannot be written.
        """
        assert self._scale is not None, "there is something to save once the policy has been prepared"
        self._flush_pending()
        tree = {
            "runner": self._runner_group.save_tree(),
            "learner": self._learners.call("save_tree"),
            "scale": self._scale.write("task"),
            "iteration": self._iteration,
            "tally": self._stats.get_state(),
            "scorer": self._scorer.save_tree(),
            "scorer_noise": self._groups.scorer_noise,
            "critic": None if self._critic is None else self._critic.save_tree(),
        }
        save_tree(Path(checkpoint_dir), tree, policy_file(self._policy, self.config.policy, self._scale))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Goes on from a checkpoint of the same config, bit for bit as if there had been no stop.

        With `ScoreConfig.ahead` a checkpoint waits for what is being looked at, which changes the run's course: runs
        are equal where their checkpoints were made at the same steps.

        Raises:
            CorruptCheckpoint: a file is missing or differs from what was written.
        """
        tree = load_tree(Path(checkpoint_dir))
        self._runner_group.load_tree(tree["runner"])
        self._learners.call_all("load_tree", tree["learner"])
        self._sync_weights()
        self._scale = ActionScale.read(tree["scale"], "task")
        self._iteration = tree["iteration"]
        self._stats.set_state(tree["tally"])
        self._groups.forget()
        self._scorer.load_tree(tree["scorer"])
        if self.config.grpo.advantage.scorer_noise == "measured":
            self._groups.scorer_noise = float(tree["scorer_noise"])
        if self._critic is not None:
            self._critic.load_tree(tree["critic"])


def _without_memory(make_judge: Callable[[], Judge] | None) -> Judge:
    """A judge that answers the same question anew each time."""
    assert make_judge is not None, "the config has checked that there is one where one is asked"
    judge = make_judge()
    return judge.asked_anew if isinstance(judge, Remembering) else judge
