"""Novelty of actions: how badly a small network predicts an episode's actions from its first image."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray, Frames

_SIDE, _WIDTH = 12, 48
"""Side length in pixels of the network's input image, and the network's width."""
_KEPT, _EPOCHS, _BATCH = 160, 4, 4
"""Episodes kept, passes over them after each rollout, and episodes per step, as in the reference."""


class TemporalNovelty(Stateful):
    """Surprise at each action, in [0, 1] over the episodes of a rollout; 0 for unreadable replies.

    Source: the temporal predictor of the VLM_PPO repository. Departures: a small GRU instead of a second LoRA adapter;
    the whole sequence is predicted step by step, each action from the first image and the actions before it; and
    success plays no part, while the reference gives successful episodes no novelty: that would use the truth.

    Args:
        num_actions: number of the env's actions.
        draw: draws images [N, H, W, 3] of snapshots [N, S].
        seed: seed of the network and of its training order.
    """

    STATE = ("_network", "adam=_optimizer", "_order")

    def __init__(self, num_actions: int, draw: Callable[[FloatArray], Frames], seed: int) -> None:
        self._draw = draw
        self._num_actions = num_actions
        state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self._network = _Predictor(num_actions)
        torch.random.set_rng_state(state)  # no other random draw depends on whether novelty is used
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=3e-3)
        self._order = torch.Generator().manual_seed(seed)
        self._kept: deque[tuple[Tensor, Tensor]] = deque(maxlen=_KEPT)

    @torch.no_grad()
    def label(self, episodes: Sequence[TokenEpisode]) -> list[FloatArray]:
        """Returns [T] novelties of each episode's actions; the least surprising of all is 0, the most surprising 1."""
        if not episodes:
            return []
        # -log p(action) at each turn, before anything is learned from these episodes
        surprises = [self._network(*self._seen(episode)).numpy() for episode in episodes]
        readable = [np.array([reply.action is not None for reply in episode.replies]) for episode in episodes]
        known = np.concatenate([each[can] for each, can in zip(surprises, readable, strict=True)])
        # normalised over the rollout, as in the reference: novelty is relative to the other actions
        low, high = (known.min(), known.max()) if len(known) else (0.0, 0.0)
        return [
            np.where(can, (each - low) / max(high - low, 1e-6), 0.0).astype(np.float32)
            for each, can in zip(surprises, readable, strict=True)
        ]

    def learn(self, episodes: Sequence[TokenEpisode]) -> None:
        """Trains the network on `episodes` and on earlier ones that are kept."""
        # older episodes too: trained on the newest alone, the network would find the older ones novel again
        self._kept.extend(self._seen(episode) for episode in episodes)
        for _ in range(_EPOCHS if self._kept else 0):
            for rows in torch.randperm(len(self._kept), generator=self._order).split(_BATCH):
                self._optimizer.zero_grad()
                torch.cat([self._network(*self._kept[row]) for row in rows.tolist()]).mean().backward()
                self._optimizer.step()

    def get_state(self) -> dict[str, Any]:
        kept = [{"image": image.numpy(), "actions": actions.numpy()} for image, actions in self._kept]
        return super().get_state() | {"kept": kept}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._kept.clear()
        self._kept.extend((torch.as_tensor(kept["image"]), torch.as_tensor(kept["actions"])) for kept in state["kept"])

    def _seen(self, episode: TokenEpisode) -> tuple[Tensor, Tensor]:
        """Returns the first image [3 * side * side], small, and the actions [T]; `num_actions` if unreadable."""
        image = torch.from_numpy(self._draw(episode.snapshots[:1])).permute(0, 3, 1, 2).float() / 255
        # an unreadable action has its own token: the next actions depend on it
        actions = [self._num_actions if reply.action is None else reply.action for reply in episode.replies]
        # 12 pixels a side suffice to tell starts apart, and keep 160 episodes of them small
        return functional.adaptive_avg_pool2d(image, _SIDE).flatten(), torch.tensor(actions)


class _Predictor(nn.Module):
    """Predicts each action from the first image and the actions before it; returns negative log-probabilities."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self._look = nn.Linear(3 * _SIDE * _SIDE, _WIDTH)
        self._words = nn.Embedding(num_actions + 2, _WIDTH)
        self._gru = nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        self._log = nn.Linear(_WIDTH, num_actions + 1)
        self._first = num_actions + 1  # the start token; `num_actions` itself is an unreadable reply

    def forward(self, image: Tensor, actions: Tensor) -> Tensor:
        """Returns [T] negative log-probabilities, in nats."""
        before = torch.cat((actions.new_tensor([self._first]), actions[:-1]))
        # step t sees the actions before t: the first input is a start token
        hidden, _ = self._gru(self._words(before)[None], torch.tanh(self._look(image))[None, None])
        return functional.cross_entropy(self._log(hidden[0]), actions, reduction="none")
