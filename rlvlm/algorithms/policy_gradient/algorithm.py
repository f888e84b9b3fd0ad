"""Policy gradients for policies whose answers are sampled, as an RLlib algorithm. Run by runs/ and by Ray Tune.

A VLM's reply and a VLA's chunk are both answers to an observation: they are sampled with a log-probability, credited by
an estimator of advantages, and trained with a clipped loss. PPO, GRPO, RLOO and GiGPO are presets of it.

Sources: Schulman et al. 2017, arXiv:1707.06347 (PPO); Zhai et al. 2024, arXiv:2405.10292 (RL4VLM); Shao et al. 2024,
arXiv:2402.03300 (GRPO); Li et al. 2025, arXiv:2509.09674 (SimpleVLA-RL). Departures:

1. Many envs are played side by side and their answers sampled as one batch; log-probs are recomputed from exactly the
   stored tokens.
2. An unreadable reply changes nothing and costs the task's penalty; it never becomes a random action.
3. Values of states cut off by a time limit are bootstrapped.
4. There is no dropout, neither in rollouts nor in updates, and log-probs are float32.
5. Step sizes decay along half a cosine, once over the run; with a `kl_target` they are also adapted to how far an
   update has moved the policy, so that Adam's first steps cannot ruin it.
6. A group is dropped if its scores do not differ (or not by more than the scorer's own noise), rather than by fixed
   bounds on their mean; dropped groups count in no denominator.
7. Probabilities belong to executed actions: the two tokens of the top bin of a chunk count as one.
8. With `draws` chunk, tokens of a chunk that share a random number are not independent, but the loss adds up their
   log-probabilities as if they were: the gradient then differs from that of the sampled distribution.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rlvlm.algorithms.base import BaseAlgorithm
from rlvlm.algorithms.checkpoint import START, Saving, TreeWriter, load_tree, read_manifest, write_parts
from rlvlm.algorithms.evaluation import Evaluation, PlayedEpisode
from rlvlm.algorithms.learners import Learners
from rlvlm.algorithms.policy_gradient.advantages import find_estimator
from rlvlm.algorithms.policy_gradient.algorithm_config import TokenConfig
from rlvlm.algorithms.policy_gradient.critic import Critic
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.policy_gradient.monitors import ReadableMonitor
from rlvlm.algorithms.policy_gradient.player import kind_of
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller, flip_if_configured
from rlvlm.algorithms.policy_gradient.rollouts import ROLLOUTS
from rlvlm.algorithms.policy_gradient.source import EpisodeSource, Weights
from rlvlm.algorithms.policy_gradient.supervised_start import Imitation, Lessons
from rlvlm.algorithms.runner_group import check_places
from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.core import metrics
from rlvlm.core.console.signals import StoppedEarly
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import RunError, UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.registry import make_env
from rlvlm.judges.cache import without_memory
from rlvlm.judges.judge import Judge
from rlvlm.policies.buckets import Bucket
from rlvlm.rewards.scorers import Scorer, make_scorer
from rlvlm.rewards.scoring_items import ScoredItem
from rlvlm.rewards.temporal import TemporalNovelty

logger = logging.getLogger(__name__)

_MOST_OFF = 0.05
"""Mean of |trainer / engine - 1| over sampled tokens before any step above which the two count as different
policies."""


class PolicyGradient(BaseAlgorithm):
    """One `train()` is one rollout and its update; evaluations and checkpoints happen in between."""

    config: TokenConfig  # pyright: ignore[reportIncompatibleVariableOverride] - RLlib's is any or none

    @classmethod
    def get_default_config(cls) -> TokenConfig:
        """Returns a config that still lacks its task and its policy."""
        return TokenConfig(cls)

    def setup(self, config: AlgorithmConfig) -> None:
        """Builds envs, policy and learner; called by RLlib."""
        if config.num_env_runners:
            check_places(config.num_env_runners, config.num_cpus_per_env_runner or 0)
        super().setup(config)
        torch.use_deterministic_algorithms(False)  # RLlib requests it, and it forbids sampling on a GPU
        assert self.learner_group is not None and self.env_runner_group is not None, "RLlib has set both up"
        algo = self.config.algo
        self.learners: Learners[TokenLearner] = Learners(self.learner_group, algo.threads)
        self.learner = self.learners.local
        kind = ROLLOUTS[self.config.kind]
        self._viewer = make_env(self.config.task, kind.viewer_settings(self.config), self.config.seed)
        # a judge may see other images than the policy, e.g. larger ones or from another camera
        self._judge_viewer, drawn = self._viewer, self.config.judge_env
        if drawn is not None and drawn.for_evaluation() != self.config.env_settings.for_evaluation():
            self._judge_viewer = make_env(self.config.task, drawn.for_evaluation(), self.config.seed)
        # the sampling policy in this process: the learner's own, or a copy that takes over the learners' weights
        self.policy: Any = self.config.policy_for(self._viewer) if self.learner is None else self.learner.policy
        if self.learner is None:
            self.learners.call_all("watch")
        else:
            self.learner.watch(self._viewer)
        self._stats = TrainingStats()
        self._readable = ReadableMonitor(algo.max_invalid_share)
        self._version, self._is_prepared, self._is_warned, self._update_s = 0, False, False, 0.0
        self._buckets: list[Bucket] = []
        self._start_files: dict[str, str] = {}
        """SHA-256 by file of the weights of the start, once a checkpoint has them."""
        estimator = find_estimator(algo.advantage.estimator)
        self._is_compared = "groups" in estimator.needs
        if estimator.has_critic and algo.advantage.values == "policy" and not self.policy.has_values:
            raise UsageError(
                f"the estimator {algo.advantage.estimator} needs a critic, and the policy has no value head",
                "--policy.pocket.has-values, or --algo.advantage.values state",
            )
        self.rollouts = kind(self.config, self._viewer, self.policy, self.env_runner_group)
        self._labeller = self._make_labeller()
        self.rollouts.show_to(self._labeller)
        engine = self.rollouts.engine
        if engine is not None and self.config.make_engine is not None:
            if engine.shares_gpus:
                engine.wake(self._gpus())
            engine.use(engine.pack(0))
        self._critic: Critic | None = None
        if estimator.has_critic and algo.advantage.values == "state":
            self._critic = Critic(algo.advantage.critic, self._viewer, self.config.seed)
        play = partial(self.rollouts.play, is_compared=self._is_compared)
        plays_elsewhere = bool(algo.env_runners or self.config.make_engine)
        self.source = EpisodeSource(
            algo, play, self._pack, self._labeller, self._is_compared, self._stats, plays_elsewhere
        )
        self.last_played: list[TokenEpisode] = []
        """Greedy episodes of the last evaluation."""

    def _make_labeller(self) -> RewardLabeller:
        """Makes the labeller that rewards turns from the configured sources."""
        reward, scorer, novelty = self.config.reward, None, None
        if reward.scores:
            scorer = self._make_scorer(self.config.make_judge, remembers=self.rollouts.remembers)
        if reward.weights["novelty"]:
            novelty = TemporalNovelty(len(self._viewer.action_names), self._viewer.draw, self.config.seed)
        critic: Critic | None = None
        if reward.shaping == "value":
            steps = self.config.env_settings.episode_steps
            critic = Critic(reward.value, self._viewer, self.config.seed, episode_steps=steps, sees_images=True)
        labeller = RewardLabeller(
            reward, scorer, novelty, self.config.goal,
            view=self._judge_viewer, refuses_faulty=self.config.refuses_faulty, critic=critic,
        )  # fmt: skip
        if labeller.asks and reward.asks_judge:
            labeller.judged.make_forgetful = self._make_forgetful
        return labeller

    def _make_forgetful(self) -> Scorer:
        """Makes the scorer with its judge's memory left out, which answers the same question anew each time."""
        return self._make_scorer(partial(_without_memory, self.config.make_judge), remembers=False)

    def _make_scorer(self, make_judge: Callable[[], Judge] | None, remembers: bool) -> Scorer:
        """Makes the scorer of turns or episodes; `make_judge` makes its judge."""
        reward = self.config.reward
        return make_scorer(
            reward, self.config.task, self.config.seed,
            lambda snapshots: self.draw_for_judge(snapshots, reward.frame_px), paint=self.paint_for_judge,
            make_judge=make_judge, make_fallback_judge=self.config.make_fallback_judge, remembers=remembers,
        )  # fmt: skip

    def training_step(self) -> None:
        """Runs a rollout, credits each turn, and makes some passes of updates."""
        self.prepare()
        done = self.env_steps  # step sizes decay by the steps done before this rollout
        episodes = self.source.next()  # rolled out, labelled, without useless groups
        self._learn_from(episodes, done)
        if watched := self.rollouts.watch(self.source.newest):
            self._readable.check(watched)
            self._stats.note(watched)
        self.log_round()

    def prepare(self, log: Callable[[str], None] = logger.info, unfinished: Path | None = None) -> bool:
        """Tests the judge on known episodes, and gives the policy its supervised start, once; the loss's reference is
        the policy after it.

        Args:
            log: receives progress messages.
            unfinished: see the base method.

        Returns:
            Whether the policy can already act.
        """
        if self._is_prepared:
            return self.rollouts.can_act
        found = self._labeller.preflight(
            self.config.task, self.config.env_settings, self.config.algo.advantage, self.config.seed,
            self._make_forgetful, log,
        )  # fmt: skip
        self._stats.note(found)
        self.source.scorer_noise = found.get(metrics.JUDGE_PREFLIGHT_NOISE, self.source.scorer_noise)
        # the supervised start needs the learners' memory, as an update does
        with self._engine_asleep():
            measured = self.rollouts.start(self._viewer, partial(self._imitate, folder=unfinished, log=log), log)
            if not measured:
                self.learners.begin_as(self.policy, self.rollouts.bucket_bytes)
            self.learners.call_all("begin")
        self._start_files = {}
        self._version += 1  # its weights differ from those that the engine was created with
        self._stats.note({**measured, **self.rollouts.validate(measured, self._version, self.learners, log)})
        self._is_prepared = True
        return self.rollouts.can_act

    def _imitate(self, lessons: Lessons, folder: Path | None, log: Callable[[str], None]) -> dict[str, float]:
        """Has the learners imitate demonstrations, see `Learn`; `folder` is the base method's `unfinished`."""
        if self.learner is not None:
            self.learner.log = log  # learners elsewhere write to the run's log
        imitation = Imitation(
            learners=self.learners, policy=self.policy, lessons=lessons, sft=self.config.sft,
            bucket_bytes=self.rollouts.bucket_bytes, folder=folder, log=log,
        )  # fmt: skip
        try:
            imitation.train(self.config.sft.updates)
        except StoppedEarly:
            if folder is not None:
                imitation.save()
            raise
        self._sync_weights()
        return imitation.measured

    def _learn_from(self, episodes: Sequence[TokenEpisode], done: int) -> None:
        """Credits `episodes` and updates the policy with them, `done` env steps into the run; does nothing if empty."""
        began = time.monotonic()
        if self.rollouts.engine is not None:
            check_versions(episodes, self._version, self.config.algo.staleness)
        episodes = self._labeller.shape(episodes, self.config.algo.advantage.gamma)
        # a critic of the state knows nothing in the first round: it is trained on it, while the policy waits
        learned = list(episodes) if self._critic is None else self._critic.fill(episodes)
        if learned:
            ages = [self._version - float(episode.versions.mean()) for episode in learned if len(episode)]
            self._stats.note({metrics.STALENESS: float(np.mean(ages))})
            with self._engine_asleep():
                self.learners.call_all("learn", learned, done / self.config.total_steps, self.source.images)
            self._warn_of_mismatch()
            self._sync_weights()
            self._version += 1
            self._update_s = time.monotonic() - began

    def _gpus(self) -> list[tuple[str, str]]:
        """Returns the learners' GPUs."""
        return [(node, gpu) for node, gpu in self.learners.call_all("gpu") if gpu]

    @contextmanager
    def _engine_asleep(self) -> Iterator[None]:
        """Gives the learners their GPUs exclusively while the context is open."""
        engine = self.rollouts.engine
        if engine is None or not engine.shares_gpus:
            yield
            return
        engine.sleep()
        try:
            yield
        finally:
            # first the learners release unused memory, which the engine needs
            self.learners.call_all("free_gpu")
            engine.wake(self._gpus())

    def _warn_of_mismatch(self) -> None:
        """Warns once that the engine differs from the policy in training."""
        if self.rollouts.engine is None or self.config.algo.staleness or self._is_warned:
            return  # stale samples differ anyway
        off = self.learners.call("report").get(metrics.UPDATE_FIRST_RATIO, 0.0)
        if off > _MOST_OFF:
            self._is_warned = True
            logger.warning(
                "the engine's probabilities are %.0f %% off the trainer's, so clipping leaves out what it should not: "
                "--algo.loss.correction token, or an engine of the trainer's precision", 100 * off
            )  # fmt: skip

    def _sync_weights(self) -> None:
        """Loads the learners' weights into this process's policy, bucket by bucket; engines read the same ones."""
        buckets = self.learners.sync_to(self.policy, self.rollouts.bucket_bytes)
        self._buckets = [] if self.rollouts.engine is None else buckets

    def _pack(self) -> Weights:
        """Packs the policy's present weights for a rollout."""
        packed = self.rollouts.pack(self._version, self._buckets)
        self._buckets = []  # the packed weights keep them until the next ones come
        return packed

    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Returns none: a rollout takes back lost env runners itself, since no other thread may call them."""
        return []

    def flush_pending(self) -> None:
        """Learns from running rollouts, so that evaluation and checkpoint are of the same moment."""
        for episodes in self.source.rest():
            self._learn_from(episodes, self.env_steps)
        if self.rollouts.engine is not None:
            self.rollouts.engine.use(self._pack())

    def report(self) -> dict[str, float]:
        """Returns the newest metrics by their names in `rlvlm.core.metrics`."""
        engine = {} if self.rollouts.engine is None else self.rollouts.engine.report()
        critic = {} if self._critic is None else self._critic.report()
        seconds = {
            metrics.ROLLOUT_S: self.source.rollout_s,
            metrics.ROLLOUT_WAIT_S: self.source.wait_s,
            metrics.UPDATE_S: self._update_s,
        }
        measured = {name: value for name, value in seconds.items() if value}
        learned = self.learners.call("report")
        return self._stats.report() | learned | critic | engine | self._labeller.report() | measured

    def finish(self) -> None:
        """Learns from the rollouts still running."""
        self.flush_pending()

    def drain_records(self) -> list[ScoredItem]:
        """Returns scores since the last call, with the truth."""
        return self._labeller.drain_records()

    def evaluate_policy(self, num_episodes: int) -> Evaluation:
        """Evaluates the present policy, greedy and sampled, in envs of its own."""
        self.flush_pending()
        evaluation, self.last_played = self.rollouts.player().evaluate(num_episodes)
        return replace(evaluation, has_success=self._viewer.has_success)

    def rewarded(self, episodes: Sequence[PlayedEpisode]) -> list[PlayedEpisode]:
        """Returns `episodes` with the judge's running scores of each; unchanged if no judge is used.

        Raises:
            JudgeUnavailable: the judge does not answer.
        """
        if not self.config.reward.asks_judge or self.config.reward.rates_turns:
            return list(episodes)
        return [
            replace(
                episode,
                learned_rewards=self._labeller.follow(played),
                reward_name="judge's score so far",
                reward_range=(0, 1),
            )
            for episode, played in zip(episodes, self.last_played, strict=False)
        ]

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns images [N, H, W, 3] of `snapshots` [N, D]: in the task's own size, or by the first camera."""
        return self.rollouts.draw(self._viewer, snapshots, size_px)

    def draw_for_judge(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Draws like `draw`, but as the judge sees it."""
        frames = self.rollouts.draw(self._judge_viewer, snapshots, size_px)
        return flip_if_configured(frames, self.config.reward)

    def paint_for_judge(self, image: NDArray[np.uint8], path: FloatArray) -> NDArray[np.uint8]:
        """Paints like the base method, on an image that may be flipped."""
        (drawn,) = flip_if_configured(image[None], self.config.reward)
        (painted,) = flip_if_configured(self._judge_viewer.draw_path(drawn, path)[None], self.config.reward)
        return painted

    def draw_all(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns images [N, cameras * H, W, 3] of `snapshots` [N, D]: a VLA's view, the first camera on top."""
        cameras = self._viewer.cameras
        return np.concatenate([self._viewer.draw(snapshots, size_px, camera) for camera in cameras], axis=1)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes everything needed to resume exactly, atomically.

        Raises:
            MachineError: the disk is full or cannot be written.
        """
        self.begin_checkpoint(Path(checkpoint_dir), Path()).has_ended(waits=True)

    def begin_checkpoint(self, folder: Path, previous: Path) -> Saving:
        """Copies weights and Adam's averages into main memory, from where each learner writes its part while training
        goes on; the rest is written at once. See the base method.

        The weights of the start are written once: later checkpoints link the files of the one before.

        Encoded images are forgotten: a resumed run starts without them, and encoding images in other batches would
        change their last bits.
        """
        self.flush_pending()  # running rollouts cannot be saved
        writer = TreeWriter(folder)
        has_start = writer.link(previous, self._start_files)
        tree = {
            "runner": self.rollouts.group.get_state(),
            "learner": self.learners.call("begin_writing", str(writer.partial), has_start),
            "scale": self.policy.meta().get("statistics") or None,
            "tally": self._stats.get_state(),
            "labeller": self._labeller.get_state(),
            "scorer_noise": self.source.scorer_noise,
            "critic": None if self._critic is None else self._critic.get_state(),
            "is_prepared": self._is_prepared,
            "version": self._version,
            "iteration": self._iteration,
        }
        meta = self.policy.meta()
        writer.write(tree, kind_of(meta), meta, self)
        self._forget_images()
        digests: dict[str, str] = {}
        unwritten: dict[str, Any] = {}

        def collect(waits: bool) -> bool:
            with writer.guarded():
                parts = self.learners.call_all("written", str(writer.partial), waits)
                if any(part is None for part in parts):
                    return False
                for part in parts:
                    if part.error:
                        raise OSError(part.errno, part.error)
                    digests.update(part.digests)
                    unwritten.update(part.unwritten)
            return True

        def close() -> None:
            with writer.guarded():  # parts of learners that do not see this disk
                digests.update(write_parts(writer.partial, unwritten))
            writer.close(digests)
            if not has_start:
                self._start_files = _start_files(digests)

        return Saving(collect, close)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Resumes from a checkpoint of the same config, bit-identical to an uninterrupted run.

        With `algo.staleness` a checkpoint waits for running rollouts, which changes the run's course: runs are equal if
        their checkpoints were made at the same steps.

        Raises:
            CorruptCheckpoint: a file is missing or has changed since it was written.
        """
        tree = load_tree(Path(checkpoint_dir))
        self._start_files = _start_files(read_manifest(Path(checkpoint_dir), ()))
        self.rollouts.group.set_state(tree["runner"])
        self.learners.call_all("load_tree", tree["learner"])
        self._sync_weights()
        if tree["scale"] is not None:
            self.policy.load_statistics(tree["scale"])
            self.learners.call_all("load_statistics", tree["scale"])
        self._stats.set_state(tree["tally"])
        self.source.forget()
        self._labeller.set_state(tree["labeller"])
        if self.config.algo.advantage.scorer_noise == "measured":
            self.source.scorer_noise = float(tree["scorer_noise"])
        if self._critic is not None:
            self._critic.set_state(tree["critic"])
        self._is_prepared, self._version = tree["is_prepared"], tree["version"]
        self.rollouts.forget_packed()
        self._iteration = tree["iteration"]
        self._forget_images()

    def _forget_images(self) -> None:
        self.policy.images.clear()
        self.learners.call_all("forget_images")

    def cleanup(self) -> None:
        """Closes the engine too."""
        self.source.close()
        super().cleanup()
        if self.rollouts.engine is not None:
            self.rollouts.engine.close()


class PolicyGradientAlgorithmConfig(TokenConfig):
    """Config of `PolicyGradient` for RLlib."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or PolicyGradient)


def _start_files(digests: Mapping[str, str]) -> dict[str, str]:
    """Returns what a manifest has of the weights of the start."""
    return {name: digest for name, digest in digests.items() if name.startswith(START)}


def check_versions(episodes: Sequence[TokenEpisode], version: int, staleness: int) -> None:
    """Raises unless every turn of `episodes` was sampled with weights at most `staleness` updates older than `version`.

    Raises:
        RunError: a turn was sampled with other weights.
    """
    odd = {int(sampled) for episode in episodes for sampled in episode.versions} - set(
        range(version - staleness, version + 1)
    )
    if odd:
        raise RunError(
            f"an update of version {version} of the weights was given replies of version {sorted(odd)}",
            "go on from the last checkpoint: rlvlm resume",
        )


def _without_memory(make_judge: Callable[[], Judge] | None) -> Judge:
    """Makes a judge that answers repeated questions anew each time."""
    assert make_judge is not None, "the config has checked that there is one where one is asked"
    return without_memory(make_judge())
