"""The auxiliary phase after an update: the policy learns to see where things are, and acts as before.

Source: Cobbe et al. 2020, arXiv:2009.04416 (phasic policy gradient), section 2. Departure: it foretells the ways from
the hand to the things of the task, which the simulator knows while it trains, in place of returns. On LIBERO it was not
shown to help (docs/LOG.md).
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlvlm import metrics
from rlvlm.algorithms.grpo.config import WaysConfig
from rlvlm.algorithms.learners import add_up, add_up_gradients, own_share
from rlvlm.algorithms.moments import moments_of, take_moments
from rlvlm.policies.vla.pocket import PocketVLA

_MAX_GRAD_NORM = 1.0
_WEIGHT_DECAY = 1e-4
_SMALL = 0.1
"""Errors above this weigh as they are, not by their squares: a few things that were thrown off the table would else
outweigh all that are within reach."""
Seen = tuple[Tensor, Tensor, Tensor]
"""Images, words and proprioception of some chunks."""


class WaysPhase:
    """Teaches `policy` the ways after each update, with an optimiser of its own.

    Args:
        policy: that tells ways.
        config: steps and their size.
        temperature: at which its distributions are to stay as they are.
        seed: of the order in which chunks are gone through.
    """

    def __init__(self, policy: PocketVLA, config: WaysConfig, temperature: float, seed: int) -> None:
        self._policy = policy
        self._config = config
        self._temperature = temperature
        self._optimizer = torch.optim.AdamW(policy.parameters(), config.lr, weight_decay=_WEIGHT_DECAY)
        self._order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(9,)))
        self._latest: dict[str, float] = {}

    def lessons(self, num_chunks: int) -> list[Tensor]:
        """Rows of each gradient step: all chunks of an update, once in each pass."""
        passes = [torch.from_numpy(self._order.permutation(num_chunks)) for _ in range(self._config.passes)]
        return [rows for one in passes for rows in one.split(self._config.batch_size)]

    def learn(self, lessons: list[Tensor], seen: Callable[[Tensor], Seen], ways: Tensor, share: float) -> None:
        """Goes through the lessons; all learners take each step together.

        Args:
            lessons: of this update.
            seen: gives what the policy was shown at rows of `ways`.
            ways: [B, W] as `ObsProcessor.true_ways` gives them.
            share: of the step size.
        """
        before = copy.deepcopy(self._policy)
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * share
        sums = torch.zeros(2, device=ways.device)
        for rows in lessons:
            self._optimizer.zero_grad()
            own = own_share(rows)
            if len(own):
                logits, told = self._policy.act_and_tell(*seen(own))
                with torch.no_grad():
                    acted = (before(*seen(own)) / self._temperature).log_softmax(dim=-1)
                acts = (logits / self._temperature).log_softmax(dim=-1)
                missed = functional.smooth_l1_loss(told, ways[own], beta=_SMALL, reduction="none")
                missed = missed.mean(dim=1).sum() / len(rows)
                strayed = (acted.exp() * (acted - acts)).sum() / len(rows)
                (missed + strayed).backward()
                sums += torch.stack([missed.detach(), strayed.detach()])
            add_up_gradients(list(self._policy.parameters()))
            nn.utils.clip_grad_norm_(self._policy.parameters(), _MAX_GRAD_NORM)
            self._optimizer.step()
        missed, strayed = (add_up(sums) / len(lessons)).tolist()
        self._latest = {metrics.GRPO_WAYS: missed, metrics.GRPO_STRAYED: strayed}

    def report(self) -> dict[str, float]:
        """Of the newest phase; nothing before the first."""
        return dict(self._latest)

    def save_tree(self) -> dict[str, Any]:
        """Optimiser, chance and report; the policy is its learner's."""
        return {
            "adam": moments_of(self._optimizer, self._policy),
            "order": self._order.bit_generator.state,
            "latest": self._latest,
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        take_moments(self._optimizer, self._policy, tree["adam"])
        self._order.bit_generator.state = tree["order"]
        self._latest = dict(tree["latest"])
