"""A critic of episodes in chunks: predicts the score from the simulator's state, so that each chunk gets its own
credit. The algorithm has it fill in the values of every update's episodes.

Source: Pinto et al. 2018, arXiv:1710.06542 (a critic that sees the state, for a policy that sees images); Schulman et
al. 2017, arXiv:1707.06347 (PPO). Departures: scores are in [0, 1], so the critic is a classifier of them
(cross-entropy); it is fitted to whole episodes' scores, those of several updates, and never bootstraps.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlvlm.algorithms.policy_gradient.config import CriticConfig
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray
from rlvlm.envs.env import ChunkEnv

_WIDE = 5.0
"""Maximum of features, in standard deviations; larger ones are clipped."""
_LEAST_STD = 1e-4
"""Minimum standard deviation of a feature, in its own units; one that varies less counts as constant."""
_WEIGHT_DECAY = 1e-3


class Critic(Stateful):
    """Predicts an episode's score before each of its chunks.

    Args:
        config: sizes and step sizes.
        env: env of the task.
        seed: seed of weights and minibatches.

    Raises:
        UsageError: the env's snapshots refer to images, and do not contain its state.
    """

    STATE = {"network": "_network", "adam": "_optimizer", "generator": "_generator", "latest": "_latest"}

    def __init__(self, config: CriticConfig, env: ChunkEnv, seed: int) -> None:
        if env.pixels is not None and not env.landmarks(np.zeros((1, env.snapshot_size), np.float32)).size:
            what = f"a critic of the state needs one, and {type(env).__name__} gives pixels alone"
            raise UsageError(what, "--algo.advantage.values policy --policy.pocket.has-values, or --algo.preset grpo")
        self._config = config
        self._env = env
        self._generator = torch.Generator().manual_seed(seed)
        self._asked = {text: index for index, text in enumerate(env.instructions)}
        size = self._seen(np.zeros((1, env.snapshot_size), np.float32)).shape[1] + env.proprio_size + 1
        size += len(self._asked)
        width = config.hidden
        # forked, so that the policy's random numbers are the same with and without a critic
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._network = nn.Sequential(
                nn.Linear(size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
            )
        self._optimizer = torch.optim.AdamW(
            self._network.parameters(), config.lr, weight_decay=_WEIGHT_DECAY, foreach=False
        )
        self._middle, self._spread = torch.zeros(size), torch.ones(size)
        self._features = np.empty((0, size), np.float32)
        self._scores = np.empty(0, np.float32)
        self._lengths = np.empty(0, np.int64)
        self._latest: dict[str, float] = {}

    def fill(self, episodes: Sequence[TokenEpisode]) -> list[TokenEpisode]:
        """Returns the episodes with the predicted scores before each of their chunks; then trains the critic on them.

        The first time, and without episodes, there are no predictions.
        """
        if not episodes:
            return []
        scores = np.array([episode.rewards.sum() for episode in episodes], np.float32)
        lengths = np.array([len(episode) for episode in episodes])
        features = np.concatenate([self._features_of(episode) for episode in episodes])
        filled: list[TokenEpisode] = []
        if len(self._scores):
            with torch.no_grad():
                values = self._network(self._scaled(features))[:, 0].sigmoid().numpy()
            parts = np.split(values, np.cumsum(lengths)[:-1])
            filled = [replace(episode, values=own) for episode, own in zip(episodes, parts, strict=True)]
            came, self._latest = scores.repeat(lengths), {}
            if came.max() > came.min():  # otherwise there is nothing to explain
                self._latest[metrics.UPDATE_EXPLAINED] = 1.0 - float(np.var(came - values) / np.var(came))
        else:
            # scaled once, by the first rollout: a changing scale would change the meaning of the weights
            self._middle, self._spread = (torch.from_numpy(part(features, axis=0)) for part in (np.mean, np.std))
            # divided by infinity, so that a constant feature is 0 and its noise is not amplified
            self._spread[self._spread < _LEAST_STD] = torch.inf
            first = features.shape[1] - len(self._asked)
            self._middle[first:], self._spread[first:] = 0.0, 1.0  # other instructions come later
        self._remember(scores, lengths, features)
        self._learn()
        return filled

    def _features_of(self, episode: TokenEpisode) -> FloatArray:
        """Returns [C, F] before each chunk: the simulator's state, proprioception, the share of time elapsed, and which
        of the env's instructions it follows.
        """
        # before each chunk: the sum of the steps minus the chunk's own
        gone = (np.cumsum(episode.steps) - episode.steps)[:, None] / self._env.episode_steps
        asked = np.zeros((len(gone), len(self._asked)))
        if episode.obs.texts[0] in self._asked:
            asked[:, self._asked[episode.obs.texts[0]]] = 1.0
        seen = self._seen(episode.obs.snapshots[:-1])
        return np.concatenate([seen, episode.obs.proprio[:-1], gone, asked], axis=1, dtype=np.float32)

    def _seen(self, snapshots: FloatArray) -> FloatArray:
        """Returns [C, F] of the state: offsets and distances between landmarks, or the whole state if there are none.

        A hand that misses by a centimetre is visible in its offset to the thing, but hardly in both positions.
        """
        positions = self._env.landmarks(snapshots)  # [C, K, D]
        first, second = np.triu_indices(positions.shape[1], 1)
        if not len(first):
            return snapshots
        offsets = positions[:, second] - positions[:, first]
        return np.concatenate([offsets.reshape(len(offsets), -1), np.linalg.norm(offsets, axis=2)], axis=1)

    def _scaled(self, features: FloatArray) -> Tensor:
        return ((torch.from_numpy(features) - self._middle) / self._spread).clamp(-_WIDE, _WIDE)

    def _remember(self, scores: FloatArray, lengths: np.ndarray, features: FloatArray) -> None:
        """Adds episodes, and drops the oldest ones."""
        most = self._config.episodes
        # features are stored chunk by chunk: keep as many rows as the kept episodes have chunks
        self._scores = np.concatenate([self._scores, scores])[-most:]
        self._lengths = np.concatenate([self._lengths, lengths])[-most:]
        self._features = np.concatenate([self._features, features])[-int(self._lengths.sum()) :]

    def _learn(self) -> None:
        """Makes some steps of cross-entropy: scores are in [0, 1], and so are predictions."""
        config, wanted = self._config, torch.from_numpy(self._scores.repeat(self._lengths))
        scaled = self._scaled(self._features)
        for _ in range(config.steps):
            rows = torch.randint(len(scaled), (config.batch_size,), generator=self._generator)
            loss = functional.binary_cross_entropy_with_logits(self._network(scaled[rows])[:, 0], wanted[rows])
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()

    def report(self) -> dict[str, float]:
        """Returns the share of the scores' variance predicted in the newest update, none before the first."""
        return self._latest

    def get_state(self) -> dict[str, Any]:
        """Returns everything needed to resume exactly."""
        return super().get_state() | {
            "scale": [self._middle.numpy(), self._spread.numpy()],
            "memory": [self._scores, self._lengths, self._features],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._middle, self._spread = (torch.from_numpy(np.array(value)) for value in state["scale"])
        self._scores, self._lengths, self._features = (np.array(value) for value in state["memory"])
