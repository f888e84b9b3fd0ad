"""SAC with a reward source that may change (PEBBLE), as an RLlib algorithm. Run by runs/ and by Ray Tune.

Sources: Haarnoja et al. 2018, arXiv:1812.05905 (SAC); Lee et al. 2021, arXiv:2106.05091 (PEBBLE); Wang et al. 2024,
arXiv:2402.03681 (RL-VLM-F). Departures:

1. Acting and learning alternate every `SACConfig.turn_steps` steps, so that new transitions are labelled in batches.
2. The target critics move with every update (every second one in PEBBLE's code).
3. Exploration by novelty lasts until the reward model predicts labels better than chance; with
   `StepRewardConfig.exploration` a share of it, or of the ensemble's disagreement, stays beside the learned reward.
4. With `SACConfig.is_calibrated` networks see scaled states, and restarted critics begin at the replay's mean.
5. Replay, networks and, unless there are env runners, envs share one process; RLlib's episodes and connectors are not
   used. Env runners act with the policy of the turn before, except in the first turn of an episode.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rlvlm.algorithms.base import BaseAlgorithm, BaseConfig, Unset
from rlvlm.algorithms.checkpoint import PolicyFile, load_tree, save_tree
from rlvlm.algorithms.evaluation import Evaluation, evaluate
from rlvlm.algorithms.learners import Learners, own_learner_gpu
from rlvlm.algorithms.runner_group import LocalRunnerGroup, RemoteRunnerGroup, check_places
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sac_pebble.label import Relabelling, add_labelled
from rlvlm.algorithms.sac_pebble.learner import SACLearner
from rlvlm.algorithms.sac_pebble.module import SACModule
from rlvlm.algorithms.sac_pebble.player import KIND, StepsPlayer
from rlvlm.algorithms.sac_pebble.reward_switch import RewardSetup, build_switch, preflight_on_pairs
from rlvlm.algorithms.sac_pebble.runner import Sample, StepEnvRunner, join
from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.core import metrics
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.images import FrameStore
from rlvlm.envs.registry import make_env
from rlvlm.preferences.records import Record
from rlvlm.rewards.source import Labelling


class SACPebbleConfig(BaseConfig):
    """Our frozen configs as attributes of an RLlib config; a sweep may replace any of them."""

    sac: SACConfig = SACConfig()
    reward_setup: RewardSetup = RewardSetup()
    """Where the reward comes from; `settings` takes its fields."""
    example = "sac=SACConfig(...)"
    taken_settings = ("gamma", "lr")

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or SACPebble, StepEnvRunner)

    def settings(self, **chosen: Any) -> Self:
        """Sets settings of ours, see `BaseConfig`, and with `sac` where its envs are stepped."""
        about_reward = {field.name: chosen.pop(field.name) for field in fields(RewardSetup) if field.name in chosen}
        super().settings(reward_setup=replace(self.reward_setup, **about_reward), **chosen)
        if "sac" in chosen:
            self.env_runners(num_env_runners=self.sac.env_runners, create_local_env_runner=not self.sac.env_runners)
            self.learners(**own_learner_gpu(self.sac.placed_on))
        return self

    def validate(self) -> None:
        """Checks everything that can be checked before anything starts.

        Raises:
            ValueError: a setting is wrong; the message says which and what to do.
        """
        super().validate()
        # RLlib's own discount and step size, if set (by a Tuner, PBT), apply to all three optimisers
        if not isinstance(self.gamma, Unset):
            self.sac = replace(self.sac, gamma=self.gamma)
        if not isinstance(self.lr, Unset):
            self.sac = replace(self.sac, actor_lr=self.lr, critic_lr=self.lr, alpha_lr=self.lr)
        if not self.in_evaluation and (self.num_env_runners, self.num_learners) != (self.sac.env_runners, 0):
            raise ValueError(
                f"num_env_runners is {self.num_env_runners}, that of SACConfig {self.sac.env_runners}: "
                f"set both by .settings(sac=...); num_learners must be 0, got {self.num_learners}"
            )
        self.reward_setup.check()

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Returns the networks of SAC, sized by `sac`."""
        model = {"hidden": list(self.sac.hidden), "initial_alpha": self.sac.initial_alpha}
        return RLModuleSpec(module_class=SACModule, model_config=model)

    def get_default_learner_class(self) -> type[SACLearner]:
        """Returns the class of the learner with the replay."""
        return SACLearner


class SACPebble(BaseAlgorithm):
    """One `train()` is one round of episodes; evaluations and checkpoints happen in between."""

    config: SACPebbleConfig  # pyright: ignore[reportIncompatibleVariableOverride] - RLlib's is any or none

    @classmethod
    def get_default_config(cls) -> SACPebbleConfig:
        """Returns a config that still lacks its task."""
        return SACPebbleConfig()

    def setup(self, config: AlgorithmConfig) -> None:
        """Builds envs, networks and reward; called by RLlib."""
        assert isinstance(config, SACPebbleConfig), "what its default config is"
        if config.num_env_runners:
            check_places(config.num_env_runners, config.num_cpus_per_env_runner or 0)
            make_env(config.task, config.env_settings, config.seed).close()  # errors appear once, not from every runner
        super().setup(config)
        assert self.learner_group is not None and self.env_runner_group is not None, "RLlib has set both up"
        learners: Learners[SACLearner] = Learners(self.learner_group, self.config.sac.threads)
        assert learners.local is not None, "`validate` wants it in this process"
        self.learner = learners.local
        # with env runners there is no local one: actors get the policy's weights with every turn
        local: Any = self.env_runner_group.local_env_runner
        if local is None:
            self.runners = RemoteRunnerGroup(
                self.env_runner_group,
                lambda: self.learner.policy_values.cpu().numpy(),
                join,
                self.config.sample_timeout_s,
                self.config.env_runner_restore_timeout_s,
            )
        else:
            local.policy = self.learner.networks.policy
            self.runners = LocalRunnerGroup(local)
        self._viewer = make_env(self.config.task, self.config.env_settings, self.config.seed)
        neighbour, setup = self.config.sac.novelty_neighbour, self.config.reward_setup
        self.reward_switch = build_switch(setup, self.config.task, self._viewer, neighbour, self.config.seed)
        self._relabelling = Relabelling(self.learner.replay)
        self._stats = TrainingStats()

    def prepare(self, log: Callable[[str], None], unfinished: Path | None = None) -> bool:  # noqa: ARG002 - no start
        """Tests the judge on known pairs if configured; nothing is trained."""
        config = self.config
        known = preflight_on_pairs(config.reward_setup, config.task, config.env_settings, config.seed, log)
        self.reward_switch.expect(known)
        return False

    def training_step(self) -> None:
        """Runs one round of episodes: PEBBLE's algorithm 2, or plain SAC if the source never changes."""
        rewards, num_ended = [], 0
        switch, learner = self.reward_switch, self.learner
        for sample in self._samples():
            switch.record(sample)
            rewards.append(add_labelled(learner.replay, sample.transitions, switch.source, switch.bonus))
            num_ended += len(sample.episodes)
            if switch.is_feedback_due(self.env_steps):
                self._learn_reward()  # query, ask, store, fit
            if switch.learned is not None:
                # all rows must have the present reward before the next session changes it again
                steps_left = switch.steps_to_session(self.env_steps)
                turns_left = None if steps_left is None else max(steps_left // len(rewards[-1]), 1)
                self._relabelling.advance(switch.learned, turns_left, switch.bonus)
            num_updates = self.config.sac.updates_due(self.env_steps, len(rewards[-1]))
            learner.learn(num_updates, switch.source, switch.bonus_weight(self.env_steps))
        learner.check_weights()
        leaves_out = switch.source.labelling is Labelling.WHERE_ANSWERED
        self._stats.note_rewards(np.concatenate(rewards), num_ended, leaves_out)
        self.log_round()

    def _samples(self) -> Iterator[Sample]:
        """Yields the turns of an episode of every env; env runners act all but the first while the caller learns."""

        def start(num_steps: int) -> None:
            is_seeding = self.env_steps < self.config.sac.seed_steps
            self.runners.start({"num_steps": num_steps, "random_actions": is_seeding})

        # Actors act the next turn, with the present policy, while the caller learns from this one. The first turn of an
        # episode cannot be started early: rounds end with episodes, and there may be a checkpoint in between.
        turns = self.config.sac.turns(self.config.env_settings.episode_steps)
        start(turns[0])
        for following in (*turns[1:], None):
            sample = self.runners.collect()
            episodes = ((float(episode.env_rewards.sum()), bool(episode.success.any())) for episode in sample.episodes)
            self._stats.record(len(sample.transitions.env_rewards), episodes)
            if following:
                start(following)
            yield sample

    def _learn_reward(self) -> None:
        """Asks, fits and has everything relabelled; the first learned reward restarts the critics."""
        switch, learner = self.reward_switch, self.learner
        was_learned, version = switch.learned is not None, switch.source.version
        self._stats.note(switch.hold_session(self.env_steps))
        # no learned reward yet, or a session that changed nothing: all rows are up to date
        if switch.learned is None or (was_learned and switch.learned.version == version):
            return
        self._relabelling.start()
        if not was_learned:
            # new critics fit the rewards in the replay, so none of them may be novelty's any more
            self._relabelling.advance(switch.learned, 1, switch.bonus)
            bonus_weight = switch.bonus_weight(self.env_steps)
            learner.restart_critics(bonus_weight)
            learner.learn(self.config.sac.critic_reset_updates, switch.learned, bonus_weight)

    def report(self) -> dict[str, float]:
        """Returns the newest metrics by names in `rlvlm.core.metrics`; returns and success are means of 10 episodes."""
        numbers, replay = self._stats.report() | self.learner.report(), self.learner.replay
        if self.reward_switch.learned is not None:
            numbers[metrics.REPLAY_STALE] = self._relabelling.num_waiting / max(len(replay), 1)
        if self.reward_switch.bonus is not None:
            bonus_weight = self.reward_switch.bonus_weight(self.env_steps)
            numbers[metrics.REPLAY_BONUS] = bonus_weight * float(replay.bonuses.mean())
        return numbers

    def finish(self) -> None:
        """Waits for outstanding answers; call it after the last step, before the last `drain_records`."""
        self._stats.note(self.reward_switch.finish_feedback(self.env_steps))

    def drain_records(self) -> list[Record]:
        """Returns the queries asked since the last call; write them before saving a checkpoint."""
        return self.reward_switch.drain_records(self.env_steps)

    def evaluate_policy(self, num_episodes: int) -> Evaluation:
        """Plays whole episodes of the deterministic policy, in an env of its own, without effect on training."""
        source = self.reward_switch.source
        asked = None if source.labelling is Labelling.ON_DRAW else source  # asking novelty would change its scale
        player = StepsPlayer(self.learner.networks.policy, self._viewer, asked)
        before = source.get_state()
        episodes = evaluate(player, num_episodes)
        source.set_state(before)  # otherwise training would remember a judge's answers here and ask less
        self.reward_switch.note_evaluation(episodes)
        return Evaluation(episodes=episodes, has_success=self._viewer.has_success)

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns images of the task's snapshots, `size_px` wide and high."""
        return FrameStore(self._viewer, size_px, capacity=1).frames(snapshots)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes everything needed to resume exactly, atomically.

        Raises:
            MachineError: the disk is full or cannot be written.
        """
        tree = {
            "runner": self.runners.get_state(),
            "learner": self.learner.save_tree(),
            "schedule": self.reward_switch.get_state(),
            "relabelling": self._relabelling.get_state(),
            "iteration": self._iteration,
            **self._stats.get_state(),
        }
        weights = self.learner.networks.policy.state_dict()
        save_tree(Path(checkpoint_dir), tree, PolicyFile(kind=KIND, weights=weights), self)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Resumes from a checkpoint of the same config, bit-identical to an uninterrupted run.

        Raises:
            CorruptCheckpoint: a file is missing or has changed since it was written.
            UsageError: its snapshots are not those of this env.
        """
        tree = load_tree(Path(checkpoint_dir))
        saved = tree["learner"]["replay"]["columns"]
        if saved and saved["snapshots"].shape[1] != self._viewer.snapshot_size:
            sizes = f"{saved['snapshots'].shape[1]} numbers, and the env's have {self._viewer.snapshot_size}"
            raise UsageError(
                f"the snapshots in {checkpoint_dir} have {sizes}: the env has changed, or rlvlm 0.2 kept small images "
                "in them",
                "start anew; `rlvlm eval` still plays its policy",
            )
        self.runners.set_state(tree["runner"])
        self.learner.load_tree(tree["learner"])
        self.reward_switch.set_state(tree["schedule"])
        self._relabelling.set_state(tree["relabelling"])
        self._stats.set_state(tree)
        self._iteration = tree["iteration"]
