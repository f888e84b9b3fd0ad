"""Policy gradients for policies that answer in tokens, as an RLlib algorithm. Run by runs/ and by Ray Tune.

A VLM's reply and a VLA's chunk are both tokens given an observation: they are sampled with a log-probability, credited
by an estimator of advantages, and learned from by a clipped loss. PPO, GRPO, RLOO and GiGPO are its presets.

Sources: Schulman et al. 2017, arXiv:1707.06347 (PPO); Zhai et al. 2024, arXiv:2405.10292 (RL4VLM); Shao et al. 2024,
arXiv:2402.03300 (GRPO); Li et al. 2025, arXiv:2509.09674 (SimpleVLA-RL). Departures:

1. Many envs are played side by side and their answers sampled as one batch; log-probs are computed anew from exactly
   what was stored.
2. A reply that cannot be read changes nothing and costs the task's penalty; it is never turned into a random action.
3. Values of states that a time limit cut off are bootstrapped.
4. There is no dropout, neither in playing nor in learning, and log-probs are float32.
5. Step sizes fall along half a cosine, once over the run; where there is a `kl_target` they also follow how far an
   update has moved the policy, so that Adam's first steps cannot wreck it.
6. A group is dropped where its scores do not differ (or not by more than the scorer's own noise), not by fixed bounds
   on their mean; what is dropped counts in no denominator.
7. The executed action is what has a probability: the two tokens of the top bin of a chunk count as one.
8. With `draws` chunk, tokens of a chunk that share a random number are not independent, and the loss adds up their
   log-probabilities as if they were: what is learned from is no longer the gradient of what was played.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from torch.nn.utils import parameters_to_vector

from rlvlm.algorithms.base import BaseAlgorithm
from rlvlm.algorithms.checkpoint import load_tree, save_tree
from rlvlm.algorithms.evaluation import Evaluation, PlayedEpisode
from rlvlm.algorithms.learners import Learners
from rlvlm.algorithms.policy_gradient.advantages import find_estimator
from rlvlm.algorithms.policy_gradient.algorithm_config import TokenConfig
from rlvlm.algorithms.policy_gradient.chunks import ChunkSampler, make_chunk_rollout
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.critic import Critic
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.policy_gradient.monitors import ReadableMonitor, watch_replies
from rlvlm.algorithms.policy_gradient.player import TokenPlayer, chunk_player, policy_file, turn_player
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller, preflight, shown_frames
from rlvlm.algorithms.policy_gradient.slots import make_slot
from rlvlm.algorithms.policy_gradient.source import EpisodeSource, join
from rlvlm.algorithms.policy_gradient.supervised_start import start_chunks, start_replies
from rlvlm.algorithms.policy_gradient.turns import Actor, TurnRunner, make_turn_rollout
from rlvlm.algorithms.runner_group import LocalRunnerGroup, RemoteRunnerGroup, check_places
from rlvlm.algorithms.sharding import fetch_bucket, put_buckets
from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.core import metrics
from rlvlm.core.episodes import Observations, TokenEpisode
from rlvlm.core.errors import RunError, UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.registry import make_env
from rlvlm.judges.cache import without_memory
from rlvlm.judges.judge import Judge
from rlvlm.policies.buckets import Bucket, fill_from_buckets
from rlvlm.policies.vla.tokens import ActionScale
from rlvlm.policies.vlm.config import BUCKET_MIB
from rlvlm.policies.vlm.engine import Engine, PolicyEngine
from rlvlm.rewards.scorers import Scorer, make_scorer
from rlvlm.rewards.scoring_items import ScoredItem
from rlvlm.rewards.temporal import TemporalNovelty

logger = logging.getLogger(__name__)

_MOST_OFF = 0.05
"""Mean of |trainer / engine - 1| over sampled tokens before any step; above it the two are taken for two policies."""


class PolicyGradient(BaseAlgorithm):
    """One `train()` is one rollout and its update; evaluations and checkpoints come between."""

    config: TokenConfig  # pyright: ignore[reportIncompatibleVariableOverride] - RLlib's is any or none

    @classmethod
    def get_default_config(cls) -> TokenConfig:
        """A config that still needs its task and its policy."""
        return TokenConfig(cls)

    def setup(self, config: AlgorithmConfig) -> None:
        """Builds envs, policy and learner; called by RLlib."""
        if config.num_env_runners:
            check_places(config.num_env_runners, config.num_cpus_per_env_runner or 0)
        super().setup(config)
        torch.use_deterministic_algorithms(False)  # RLlib asks for it, and it forbids sampling on a GPU
        assert self.learner_group is not None and self.env_runner_group is not None, "RLlib has set both up"
        algo, make_policy = self.config.algo, self.config.make_policy
        assert make_policy is not None, "checked by `validate`"
        self._learners: Learners[TokenLearner] = Learners(self, algo.threads)
        self._learner = self._learners.local
        self._held_out = self.config.env_settings.for_evaluation()  # starts that no rollout has
        is_turns = self.config.policy is None
        self._viewer: Any = make_env(
            self.config.task, self.config.env_settings if is_turns else self._held_out, self.config.seed
        )
        # a judge may look at other images than the policy, e.g. larger ones or from elsewhere
        self._judge_viewer = self._viewer
        drawn = self.config.judge_env
        if not is_turns and drawn is not None and drawn.for_evaluation() != self._held_out:
            self._judge_viewer = make_env(self.config.task, drawn.for_evaluation(), self.config.seed)
        # what plays in this process: the learner's own policy, or a copy that takes over the learners' weights
        self._policy: Any = make_policy(self._viewer) if self._learner is None else self._learner.policy
        if self._learner is None:
            self._learners.call_all("watch")
        else:
            self._learner.watch(self._viewer)
        self._stats = TrainingStats()
        self._readable = ReadableMonitor(algo.most_unreadable)
        self._scale: ActionScale | None = None
        self._version, self._is_prepared, self._is_warned, self._update_s = 0, False, False, 0.0
        self._packed: tuple[int, Any] | None = None
        self._buckets: list[Bucket] = []
        self._labeller = self._make_labeller()
        estimator = find_estimator(algo.advantage.estimator)
        self._is_compared = "groups" in estimator.needs
        if estimator.has_critic and algo.advantage.values == "policy" and not self._policy.has_values:
            raise UsageError(
                f"the estimator {algo.advantage.estimator} needs a critic, and the policy has no value head",
                "--policy.pocket.has-values, or --algo.advantage.values state",
            )
        runner: Any = self.env_runner_group.local_env_runner
        self._player: TokenPlayer | None = None  # of envs in chunks one is made when there is a scale of actions
        self._engine: Engine | None = None
        if is_turns:
            assert isinstance(runner, TurnRunner), "what the config names"
            group: Any = LocalRunnerGroup  # turns have one runner, which is sampled here and saved as a group is
            self._runner_group: Any = group(runner)
            self._engine = self._make_engine()
            runner.actor = Actor(self._engine, algo.max_reply_tokens, algo.temperature)
            if algo.loss.entropy_weight or algo.loss.ratio == "weighted":  # else no token differs from the others
                for slot in runner.slots:
                    slot.action_tokens = self._policy.action_tokens
            self._player = turn_player(
                runner.actor, partial(make_slot, self.config.task, self._held_out), algo.num_envs,
                milestones=self._viewer.milestones,
            )  # fmt: skip
            play = make_turn_rollout(runner, self._engine, self._labeller, algo, self._is_compared)
        else:
            if runner is None:
                timeout_s, revival_s = self.config.sample_timeout_s, self.config.env_runner_restore_timeout_s
                self._runner_group = RemoteRunnerGroup(self.env_runner_group, self._weights, join, timeout_s, revival_s)
            else:
                runner.policy = self._policy
                self._runner_group = LocalRunnerGroup(runner)
            play = make_chunk_rollout(self._runner_group, self._labeller, algo, self.config.reward, self._needed_scale)
        self._bucket_bytes = BUCKET_MIB << 20 if self._engine is None else self._engine.bucket_bytes
        self._critic: Critic | None = None
        if estimator.has_critic and algo.advantage.values == "state":
            self._critic = Critic(algo.advantage.critic, self._viewer, self.config.seed)
        plays_elsewhere = bool(algo.env_runners or self.config.make_engine)
        self._source = EpisodeSource(
            algo, play, self._pack, self._show, self._labeller, self._is_compared, self._stats, plays_elsewhere
        )
        self.last_played: list[TokenEpisode] = []
        """The greedy episodes of the last evaluation."""

    def _make_engine(self) -> Engine:
        """What samples replies: the policy of this process, or what the config's `make_engine` makes for it."""
        if self.config.make_engine is None:
            return PolicyEngine(self._policy, self.config.algo.num_envs)
        # a fixed turn and reply, by which replicas are compared with this policy whenever they take its weights over
        slot = make_slot(self.config.task, self.config.env_settings)
        slot.begin(self.config.seed)
        frame = slot.env.draw(slot.turn.snapshot[None])
        self._policy.show([slot.image], frame)
        obs = Observations(texts=(slot.turn.prompt,), images=(slot.image,))
        engine = self.config.make_engine(self._policy, obs, self._policy.write(slot.env.action_text(0)), frame)
        if engine.shares_cards:
            engine.wake(self._cards())
        engine.use(engine.pack(0))
        return engine

    def _make_labeller(self) -> RewardLabeller:
        """Gives turns their reward: from the sources that the config weighs."""
        reward, scorer, novelty = self.config.reward, None, None
        if reward.scores:
            scorer = self._make_scorer(self.config.make_judge, remembers=self.config.policy is None)
        if reward.weights["novelty"]:
            novelty = TemporalNovelty(len(self._viewer.action_names), self._viewer.draw, self.config.seed)
        return RewardLabeller(reward, scorer, novelty, self.config.goal)

    def _make_scorer(self, make_judge: Callable[[], Judge] | None, remembers: bool) -> Scorer:
        """Who says what a turn or an episode is worth; a judge is made by `make_judge`."""
        reward = self.config.reward
        return make_scorer(
            reward, self.config.task, self.config.seed,
            lambda snapshots: self.draw_for_judge(snapshots, reward.frame_px),
            make_judge=make_judge, make_fallback_judge=self.config.make_fallback_judge, remembers=remembers,
        )  # fmt: skip

    def training_step(self) -> None:
        """A rollout, each turn's credit, some passes of updates."""
        self.prepare()
        done = self.env_steps  # step sizes fall by what was done before this rollout
        episodes = self._source.next()  # rolled out, labelled, without the groups that teach nothing
        self._learn_from(episodes, done)
        if self.config.policy is None and self._source.newest:
            watched = watch_replies(self._source.newest, self.config.algo.max_reply_tokens)
            self._readable.check(watched)
            self._stats.note(watched)
        self.log_round()

    def prepare(self, log: Callable[[str], None] = logger.info) -> bool:
        """Tries the judge on what is known, and gives the policy its supervised start, once; the loss's reference is
        the policy after it.

        Args:
            log: takes a line on what is being done now.

        Returns:
            Whether there is a policy that can act already.
        """
        sft = self.config.sft
        is_turns = self.config.policy is None
        can_act = not is_turns or (sft is not None and bool(sft.turns or sft.demonstrations or sft.start_from))
        if self._is_prepared:
            return can_act
        found = preflight(
            self._labeller, self.config.task, self.config.env_settings, self.config.reward,
            self.config.algo.advantage, self.config.seed, self.config.goal,
            lambda: self._make_scorer(partial(_without_memory, self.config.make_judge), remembers=False), log,
        )  # fmt: skip
        self._stats.note(found)
        self._source.scorer_noise = found.get(metrics.JUDGE_PREFLIGHT_NOISE, self._source.scorer_noise)
        # the supervised start takes the learners' memory, as an update does
        with self._engine_asleep():
            if not is_turns:
                self._scale, measured = start_chunks(self.config, self._policy, self._viewer, log)
                self._stats.note(measured)
                if still := np.flatnonzero(~self._sampler().explored).tolist():
                    named = ", ".join(map(str, still))
                    log(f"dimensions {named} of the actions are not explored: demonstrations hardly use their range")
            elif can_act:
                self._stats.note(start_replies(self.config, self._policy, log))
        if self._learner is None:  # all learners begin as the policy that plays here, fresh adapters too
            self._learners.call_all("take_weights", put_buckets(self._policy.trained_state(), self._bucket_bytes))
        self._learners.call_all("begin")
        self._version += 1  # other weights than those that the engine was given when it was made
        self._is_prepared = True
        return can_act

    def _learn_from(self, episodes: Sequence[TokenEpisode], done: int) -> None:
        """Credits `episodes` and updates the policy by them, `done` env steps into the run; nothing of none."""
        began = time.monotonic()
        if self._engine is not None:
            check_versions(episodes, self._version, self.config.algo.staleness)
        # a critic of the state knows nothing in the first round: it learns from it, and the policy waits
        learned = list(episodes) if self._critic is None else self._critic.fill(episodes)
        if learned:
            ages = [self._version - float(one.versions.mean()) for one in learned if len(one)]
            self._stats.note({metrics.STALENESS: float(np.mean(ages))})
            with self._engine_asleep():
                self._learners.call_all("learn", learned, done / self.config.total_steps)
            self._warn_of_mismatch()
            self._sync_weights()
            self._version += 1
            self._update_s = time.monotonic() - began

    def _cards(self) -> list[tuple[str, str]]:
        """The learners' GPUs."""
        return [(node, card) for node, card in self._learners.call_all("card") if card]

    @contextmanager
    def _engine_asleep(self) -> Iterator[None]:
        """While the context is open the learners have their GPUs for themselves."""
        engine = self._engine
        if engine is None or not engine.shares_cards:
            yield
            return
        engine.sleep()
        try:
            yield
        finally:
            # first the learners give back what they hold unused: the engine needs that memory
            self._learners.call_all("free_card")
            engine.wake(self._cards())

    def _warn_of_mismatch(self) -> None:
        """Says once that the engine is not quite the policy that is trained."""
        if self._engine is None or self.config.algo.staleness or self._is_warned:  # what is stale differs anyway
            return
        off = self._learners.call("report").get(metrics.UPDATE_FIRST_RATIO, 0.0)
        if off > _MOST_OFF:
            self._is_warned = True
            logger.warning(
                "the engine's probabilities are %.0f %% off the trainer's, so clipping leaves out what it should not: "
                "--algo.loss.correction token, or an engine of the trainer's precision", 100 * off
            )  # fmt: skip

    def _weights(self) -> FloatArray:
        """[P] those of the policy that learn, as `ChunkRunner.act` takes them."""
        return parameters_to_vector(self._policy.trained_state().values()).cpu().numpy()

    def _sync_weights(self) -> None:
        """Has the policy that plays in this process be the learners', bucket by bucket; engines read the same ones."""
        if self._learner is None:
            buckets = self._learners.call("put_weights", self._bucket_bytes)
            fill_from_buckets(self._policy.trained_state(), buckets, fetch_bucket)
            self._policy.forget_stale_images()
            self._buckets = [] if self._engine is None else buckets

    def _pack(self) -> Any:
        """The policy's weights as they are now, for a rollout: in the engine's way, or for env runners of chunks."""
        if self._engine is None:
            values = ray.put(self._weights()) if self.config.algo.env_runners else None
            return self._version, values
        # once for each version: with `rounds` a policy plays several rollouts
        if self._packed is None or self._packed[0] != self._version:
            self._packed = self._version, self._engine.pack(self._version, self._buckets)
            self._buckets = []  # whoever was given them keeps them, until the next ones come
        return self._packed[1]

    def _show(self, images: dict[bytes, Frames]) -> None:
        """Shows the policy that is trained what one elsewhere has looked at."""
        if images:
            self._policy.show(list(images), np.array(list(images.values())))

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """None: a rollout takes env runners back in that were lost, since no other thread may talk to them."""
        return []

    def flush_pending(self) -> None:
        """Learns from what is under way, so that what is evaluated and saved next is of one moment."""
        for episodes in self._source.rest():
            self._learn_from(episodes, self.env_steps)
        if self._engine is not None:
            self._engine.use(self._pack())

    def report(self) -> dict[str, float]:
        """The newest numbers by their names in `rlvlm.core.metrics`."""
        engine = {} if self._engine is None else self._engine.report()
        critic = {} if self._critic is None else self._critic.report()
        seconds = {
            metrics.ROLLOUT_S: self._source.rollout_s,
            metrics.ROLLOUT_WAIT_S: self._source.wait_s,
            metrics.UPDATE_S: self._update_s,
        }
        measured = {name: value for name, value in seconds.items() if value}
        learned = self._learners.call("report")
        return self._stats.report() | learned | critic | engine | self._labeller.report() | measured

    def finish(self) -> None:
        """Learns from what is still under way."""
        self.flush_pending()

    def drain_records(self) -> list[ScoredItem]:
        """What was scored since the last call, with the truth beside it."""
        return self._labeller.drain_records()

    def _needed_scale(self) -> ActionScale:
        assert self._scale is not None, "there is a policy once it has been prepared"
        return self._scale

    def _sampler(self) -> ChunkSampler:
        return ChunkSampler(
            policy=self._policy, env=self._viewer, scale=self._needed_scale(),
            temperature=self.config.algo.temperature, least_range=self.config.algo.least_range,
        )  # fmt: skip

    def evaluate_policy(self, num_episodes: int) -> Evaluation:
        """Episodes of the present policy, greedy and sampled, in envs of their own."""
        self.flush_pending()
        player = self._player
        if player is None:  # made anew each time: its sampler holds the scale of actions
            here: Any = self.env_runner_group.local_env_runner if self.env_runner_group else None
            make_envs = None
            if here is not None and self.config.algo.env_workers:
                make_envs = partial(here.worker_envs, self._held_out, self._viewer, 1)
            player = chunk_player(self._sampler(), make_envs=make_envs)
        evaluation, self.last_played = player.evaluate(num_episodes)
        return replace(evaluation, has_success=self._viewer.has_success)

    def rewarded(self, episodes: Sequence[PlayedEpisode]) -> list[PlayedEpisode]:
        """`episodes` with what the judge says of each as it goes; as they are where no judge is asked.

        Raises:
            JudgeUnavailable: it does not answer.
        """
        if not self.config.reward.asks_judge or self.config.reward.per == "turn":
            return list(episodes)
        return [
            replace(
                one,
                learned_rewards=self._labeller.follow(episode),
                reward_name="judge's score so far",
                reward_range=(0, 1),
            )
            for one, episode in zip(episodes, self.last_played, strict=False)
        ]

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Images [N, H, W, 3] of `snapshots` [N, D]: in the task's own size, or by the first camera in `size_px`."""
        return self._viewer.draw(snapshots, *(() if self.config.policy is None else (size_px,)))

    def draw_for_judge(self, snapshots: FloatArray, size_px: int) -> Frames:
        """The same as `draw`, as the judge is shown it."""
        frames = self._judge_viewer.draw(snapshots, *(() if self.config.policy is None else (size_px,)))
        return shown_frames(frames, self.config.reward)

    def draw_all(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Images [N, cameras * H, W, 3] of `snapshots` [N, D]: what a VLA sees, the first camera on top."""
        cameras = self._viewer.cameras
        return np.concatenate([self._viewer.draw(snapshots, size_px, camera) for camera in cameras], axis=1)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes everything that an exact continuation needs; complete or not at all.

        What was made of images is forgotten: a continuation begins without it, and encoding images in other batches
        would change their last bits.

        Raises:
            MachineError: the disk is full or cannot be written.
        """
        self.flush_pending()  # what is under way has no state of its own
        tree = {
            "runner": self._runner_group.get_state(),
            "learner": self._learners.call("save_tree"),
            "scale": None if self._scale is None else self._scale.write("task"),
            "tally": self._stats.get_state(),
            "labeller": self._labeller.get_state(),
            "scorer_noise": self._source.scorer_noise,
            "critic": None if self._critic is None else self._critic.get_state(),
            "is_prepared": self._is_prepared,
            "version": self._version,
            "iteration": self._iteration,
        }
        save_tree(Path(checkpoint_dir), tree, policy_file(self._policy, self.config.policy, self._scale))
        self._forget_images()

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Goes on from a checkpoint of the same config, bit for bit as if there had been no stop.

        With `algo.staleness` a checkpoint waits for what is under way, which changes the run's course: runs are equal
        where their checkpoints were made at the same steps.

        Raises:
            CorruptCheckpoint: a file is missing or differs from what was written.
        """
        tree = load_tree(Path(checkpoint_dir))
        self._runner_group.set_state(tree["runner"])
        self._learners.call_all("load_tree", tree["learner"])
        self._sync_weights()
        self._scale = None if tree["scale"] is None else ActionScale.read(tree["scale"], "task")
        self._stats.set_state(tree["tally"])
        self._source.forget()
        self._labeller.set_state(tree["labeller"])
        if self.config.algo.advantage.scorer_noise == "measured":
            self._source.scorer_noise = float(tree["scorer_noise"])
        if self._critic is not None:
            self._critic.set_state(tree["critic"])
        self._is_prepared, self._version, self._packed = tree["is_prepared"], tree["version"], None
        self._iteration = tree["iteration"]
        self._forget_images()

    def _forget_images(self) -> None:
        self._policy.images.clear()
        self._learners.call_all("forget_images")

    def cleanup(self) -> None:
        """Closes the engine, too."""
        self._source.close()
        super().cleanup()
        if self._engine is not None:
            self._engine.close()


class PolicyGradientAlgorithmConfig(TokenConfig):
    """RLlib's config of `PolicyGradient`."""

    def __init__(self, algo_class: type | None = None, algo: PolicyGradientConfig | None = None) -> None:
        super().__init__(algo_class or PolicyGradient, algo)


def check_versions(episodes: Sequence[TokenEpisode], version: int, staleness: int) -> None:
    """Passes where every turn of `episodes` was sampled with weights that are `staleness` updates older than `version`
    at most; no other is learned from.

    Raises:
        RunError: something else was sampled.
    """
    odd = {int(one) for episode in episodes for one in episode.versions} - set(range(version - staleness, version + 1))
    if odd:
        raise RunError(
            f"an update of version {version} of the weights was given replies of version {sorted(odd)}",
            "go on from the last checkpoint: rlvlm resume",
        )


def _without_memory(make_judge: Callable[[], Judge] | None) -> Judge:
    """A judge that answers the same question anew each time."""
    assert make_judge is not None, "the config has checked that there is one where one is asked"
    return without_memory(make_judge())
