"""Differences between policies with replies and with chunks, from the algorithm's point of view: rollouts, evaluations,
the supervised start, and drawing. `PolicyGradient` only knows the kind of its env through one object of either class.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from torch.nn.utils import parameters_to_vector

from rlvlm.algorithms.learners import Learners
from rlvlm.algorithms.policy_gradient.algorithm_config import TokenConfig
from rlvlm.algorithms.policy_gradient.chunks import ChunkSampler
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.policy_gradient.monitors import watch_replies
from rlvlm.algorithms.policy_gradient.player import TokenPlayer, chunk_player, turn_player
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller
from rlvlm.algorithms.policy_gradient.source import Rollout, Weights, join
from rlvlm.algorithms.policy_gradient.supervised_start import (
    Learn,
    gather_chunks,
    gather_turns,
    held_out_words,
    start,
    take_chunks,
    take_turns,
)
from rlvlm.algorithms.policy_gradient.turns import Actor, TurnRunner
from rlvlm.algorithms.runner_group import LocalRunnerGroup, RemoteRunnerGroup
from rlvlm.algorithms.sft_replies import validate
from rlvlm.core import metrics
from rlvlm.core.episodes import Observations, TokenEpisode
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import ChunkEnv, TurnEnv
from rlvlm.envs.images import draw_history
from rlvlm.envs.slots import make_slot
from rlvlm.policies.buckets import Bucket
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vla.policy import VLAPolicy
from rlvlm.policies.vlm.config import BUCKET_MIB
from rlvlm.policies.vlm.engine import Engine, PolicyEngine


class TurnRollouts:
    """Envs in turns, played in the algorithm's process; an engine samples the replies.

    Args:
        config: config of the algorithm.
        viewer: an env of the task, which only draws.
        policy: samples here, unless an engine elsewhere has its weights.
        runner_group: RLlib's, with one runner here.
    """

    remembers = True
    """Whether a scorer remembers its score of a turn: the same turns recur."""
    gather, take = staticmethod(gather_turns), staticmethod(take_turns)
    has_manifest = True
    """Whether a file beside trained weights says what they belong to; the checkpoint of a VLA itself does."""

    def __init__(self, config: TokenConfig, viewer: TurnEnv, policy: Any, runner_group: EnvRunnerGroup) -> None:
        self.config, self.policy = config, policy
        algo, runner = config.algo, runner_group.local_env_runner
        assert isinstance(runner, TurnRunner), "what the config names"
        self._runner = runner
        self.group: LocalRunnerGroup[Rollout] = LocalRunnerGroup(runner)  # sampled here, saved as a group
        self.engine: Engine | None = self._make_engine()
        self.bucket_bytes = self.engine.bucket_bytes
        sampling = ReplySampling(max_new_tokens=algo.max_reply_tokens, temperature=algo.temperature)
        runner.actor = Actor(self.engine, sampling)
        if algo.loss.entropy_weight or algo.loss.ratio == "weighted":  # otherwise all elements are treated alike
            for slot in runner.slots:
                slot.action_elements = policy.action_elements
        held_out = config.env_settings.for_evaluation()
        self._player = turn_player(
            runner.actor,
            partial(make_slot, config.task, held_out, config.history),
            config.eval_envs or algo.num_envs,
            milestones=viewer.milestones,
        )
        self._packed: tuple[int, Weights] | None = None
        runner.use_newest = self._use_newest
        self._unseen: Sequence[TokenEpisode] = ()

    @staticmethod
    def viewer_settings(config: TokenConfig) -> EnvConfig:
        """Returns the settings of the env that draws."""
        return config.env_settings

    def _make_engine(self) -> Engine:
        """Makes the engine that samples replies: this process's policy, or the result of the config's `make_engine`."""
        config = self.config
        if config.make_engine is None:
            return PolicyEngine(self.policy, max(config.algo.num_envs, config.eval_envs))
        # a fixed turn and reply, with which replicas are compared with this policy whenever they load its weights
        slot = make_slot(config.task, config.env_settings, config.history)
        slot.begin(config.seed)
        frame = draw_history(slot.env, slot.obs.snapshots)
        self.policy.show(slot.obs.images, frame)
        obs = Observations(texts=slot.obs.texts, images=slot.obs.images)
        return config.make_engine(self.policy, obs, self.policy.write(slot.env.action_text(0)), frame)

    def show_to(self, labeller: RewardLabeller) -> None:
        """Shows each row of turns to `labeller` from now on, as soon as it was played."""
        # an asynchronous rollout shows turns one by one, as they come
        gathers = self.config.algo.rollout == "asynchronous"
        self._runner.show = partial(labeller.show, gathers=gathers) if labeller.asks else None

    def play(self, weights: Weights, is_compared: bool) -> Rollout:
        """Returns pieces of the envs' episodes, or whole ones in groups if they are compared."""
        assert self.engine is not None, "made with it"
        self.engine.use(weights)
        algo = self.config.algo
        if algo.rollout_turns and not is_compared:
            return self._runner.sample(num_turns=algo.rollout_turns // algo.num_envs), []
        return self._runner.sample_groups(group_size=algo.group_size if is_compared else 1), []

    def pack(self, version: int, buckets: list[Bucket]) -> Weights:
        """Packs the policy's present weights in the engine's form; for `buckets` see `Engine.pack`."""
        assert self.engine is not None, "made with it"
        # once for each version: with `rounds` a policy plays several rollouts
        if self._packed is None or self._packed[0] != version:
            self._packed = version, self.engine.pack(version, buckets)
        return self._packed[1]

    def _use_newest(self) -> None:
        """Samples further replies with the newest packed weights, if the learner has finished an update since this
        rollout began; called by the thread that plays it.
        """
        assert self.engine is not None, "made with it"
        if self._packed is not None and self._packed[0] > self.engine.version:
            self.engine.use(self._packed[1])

    def forget_packed(self) -> None:
        """Drops packed weights that changed without a new version, when a checkpoint is loaded."""
        self._packed = None

    @property
    def can_act(self) -> bool:
        """Returns whether there is a supervised start, or the loaded policy can play a little."""
        sft = self.config.sft
        return sft is not None and bool(sft.turns or sft.demonstrations or sft.start_from)

    def start(self, viewer: TurnEnv, learn: Learn, log: Callable[[str], None]) -> dict[str, float]:
        """Runs the supervised start; returns metrics by their names in `metrics`."""
        if not self.can_act:
            return {}
        measured, self._unseen = start(self, self.config, self.policy, viewer, learn, log)
        return measured

    def validate(
        self, measured: Mapping[str, float], version: int, learners: Learners[TokenLearner], log: Callable[[str], None]
    ) -> dict[str, float]:
        """Returns how well the policy does on data held out of the supervised start; logs it in a line.

        Args:
            measured: metrics of the start.
            version: version of the engine's weights.
            learners: learners that compute the loss.
            log: receives the line.
        """
        config, sft = self.config, self.config.sft
        if not measured:
            return {}
        found: dict[str, float] = {}
        if self._unseen:
            env = make_slot(config.task, config.env_settings.for_demonstrations()).env
            engine = self.engine
            if engine is None or config.make_engine is None:
                engine = PolicyEngine(self.policy, sft.batch_size)
            else:
                engine.use(self.pack(version, []))
            found = validate(engine, env, self._unseen, sft, config.algo.max_reply_tokens)
            found[metrics.SFT_HELD_OUT_LOSS] = learners.call("held_out_loss", self._unseen, sft)
        log(held_out_words({**measured, **found}, sft.updates))
        return found

    def player(self) -> TokenPlayer:
        """Makes the player of evaluations."""
        return self._player

    def watch(self, newest: Sequence[TokenEpisode]) -> dict[str, float]:
        """Returns metrics of the newest replies, by names in `metrics`."""
        return watch_replies(newest, self.config.algo.max_reply_tokens) if newest else {}

    def draw(self, env: TurnEnv, snapshots: FloatArray, size_px: int) -> Frames:  # noqa: ARG002 - images have their own size
        """Returns [N, H, W, 3], images of `snapshots` [N, D] in the task's own size."""
        return env.draw(snapshots)


class ChunkRollouts:
    """Envs in chunks, played in groups by this process's policy, or by env runners with a copy of it.

    Args:
        config: config of the algorithm.
        viewer: an env of held-out starts, which only draws.
        policy: policy of this process.
        runner_group: RLlib's, with one runner here or several elsewhere.
    """

    remembers = False
    gather, take, has_manifest = staticmethod(gather_chunks), staticmethod(take_chunks), False
    engine: Engine | None = None
    bucket_bytes = BUCKET_MIB << 20

    def __init__(self, config: TokenConfig, viewer: ChunkEnv, policy: VLAPolicy, runner_group: Any) -> None:
        self.config, self.policy, self._viewer = config, policy, viewer
        self._runner = runner_group.local_env_runner
        if self._runner is None:
            timeout_s, revival_s = config.sample_timeout_s, config.env_runner_restore_timeout_s
            self.group: RemoteRunnerGroup[Rollout] | LocalRunnerGroup[Rollout] = RemoteRunnerGroup(
                runner_group, self._weights, join, timeout_s, revival_s
            )
        else:
            self._runner.policy, self._runner.held_out_env = policy, viewer
            self.group = LocalRunnerGroup(self._runner)
        self._show: Callable[[Sequence[TokenEpisode]], None] = lambda episodes: None
        reward, algo = config.reward, config.algo
        # a single part if no judge scores meanwhile, otherwise some for each env runner
        num_parts = min(reward.parts, max(1, algo.groups // max(1, algo.env_runners))) if reward.scores else 1
        self._parts = [len(part) for part in np.array_split(np.arange(algo.groups), num_parts)]

    @staticmethod
    def viewer_settings(config: TokenConfig) -> EnvConfig:
        """Returns the settings of the env that draws."""
        return config.env_settings.for_evaluation()

    def show_to(self, labeller: RewardLabeller) -> None:
        """Shows each part of a rollout to `labeller` from now on, as soon as it was played."""
        self._show = labeller.show

    def play(self, weights: Weights, is_compared: bool) -> Rollout:  # noqa: ARG002 - they always play in groups
        """Plays groups of whole episodes, part by part; groups of a lost runner are played by the others."""
        version, values = weights
        rollouts: list[Rollout] = []
        for num_missing in self._parts:
            # a lost env runner returns less: missing episodes are requested again from the others
            while num_missing > 0:
                self.group.revive()  # here, because only one thread may call them
                turn = {"num_groups": num_missing, "version": version, "players": self.group.alive()}
                if self._runner is None:
                    turn["statistics"] = self.policy.statistics
                self.group.start(turn, values)
                episodes, images = self.group.collect()
                self._show(episodes)
                rollouts.append((episodes, images))
                num_missing -= len(episodes) // self.config.algo.group_size
        return join(rollouts)

    def pack(self, version: int, buckets: list[Bucket]) -> Weights:  # noqa: ARG002 - its runners take one vector
        """Returns the version of the weights and, for env runners, the weights."""
        return version, ray.put(self._weights()) if self._runner is None else None

    def _weights(self) -> FloatArray:
        """Returns [P], the policy's trained weights in the form of `ChunkRunner.act`."""
        return parameters_to_vector(self.policy.trained_state().values()).cpu().numpy()

    def forget_packed(self) -> None:
        """Does nothing, because nothing is kept."""

    can_act = True

    def start(self, viewer: ChunkEnv, learn: Learn, log: Callable[[str], None]) -> dict[str, float]:
        """Runs the supervised start; returns metrics by their names in `metrics`. A pretrained policy only learns from
        a folder.
        """
        sft, measured = self.config.sft, {}
        if sft.demonstrations or sft.start_from or not self.policy.comes_trained:
            measured, _ = start(self, self.config, self.policy, viewer, learn, log)
        explored = self.policy.explored(viewer, self.config.algo.min_range)
        if still := np.flatnonzero(~explored).tolist():
            named = ", ".join(map(str, still))
            log(f"dimensions {named} of the actions are not explored: demonstrations hardly use their range")
        return measured

    def validate(self, *start: object) -> dict[str, float]:  # noqa: ARG002 - evaluations say what the policy can do
        """Does nothing: evaluations show what the policy can do."""
        return {}

    def player(self) -> TokenPlayer:
        """Makes a player of evaluations that plays where rollouts do: here, by env workers, or by env runners."""
        sampler = ChunkSampler(policy=self.policy, env=self._viewer, algo=self.config.algo)
        return chunk_player(sampler, play=self._play_held_out)

    def _play_held_out(self, state_ids: NDArray[np.int64], greedy: bool) -> list[TokenEpisode]:
        states = {"state_ids": state_ids, "greedy": greedy}
        if self._runner is not None:
            return self._runner.evaluate(**states)[0]
        self.group.revive()
        self.group.start(states | {"statistics": self.policy.statistics, "players": self.group.alive()})
        return self.group.collect()[0]

    def watch(self, newest: Sequence[TokenEpisode]) -> dict[str, float]:  # noqa: ARG002 - chunks are always readable
        """Does nothing: chunks are always readable."""
        return {}

    def draw(self, env: ChunkEnv, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns [N, size_px, size_px, 3], images of `snapshots` [N, D] by the first camera."""
        return env.draw(snapshots, size_px)


ROLLOUTS: dict[str, type[TurnRollouts] | type[ChunkRollouts]] = {"turns": TurnRollouts, "chunks": ChunkRollouts}
"""Classes by the kind of a task's env."""
