"""The offsets from the hand to the things of the task, which a policy may learn to predict besides its actions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rlvlm.core.episodes import Observations
from rlvlm.envs.env import ChunkEnv

_SCENES_PER_CHUNK = 2
"""Number of rearranged scenes in a gradient step, for each of its demonstrated chunks."""


class OffsetLoss:
    """Auxiliary loss of the supervised start: the error of a policy's predicted offsets.

    The simulator knows the offsets from the hand to the things of the task; the policy predicts them and acts on images
    alone. Demonstrations only show the hand where it should be: from them a policy learns to infer offsets from the
    hand's position, and fails when the hand is elsewhere. Rearranged scenes teach it to look.

    Args:
        policy: a `VLAPolicy` with `predict_offsets`, which returns [B, W] for such inputs as `shown_inputs` gives.
        env: draws its images.
        shown: [N] demonstrated moments.
        begins: [E] indices of each episode's first moment.
        num_scenes: number of rearranged scenes; 0: none.
        rng: generator for the scenes.
        log: receives progress messages.

    Raises:
        UsageError: the env cannot rearrange its scenes.
    """

    def __init__(
        self,
        policy: Any,
        env: ChunkEnv,
        shown: Observations,
        begins: NDArray[np.intp],
        num_scenes: int,
        rng: np.random.Generator,
        log: Callable[[str], None],
    ) -> None:
        self.policy = policy
        # drawn and measured once: gradient steps pick rows
        self._true = _true(policy, env, shown)
        self._num_scenes = num_scenes
        if num_scenes:
            log(f"drawing {num_scenes:,} scenes that were never played, to learn to see from")
            scenes = augment_scenes(shown, begins, num_scenes, env, rng)
            self._scenes = (*policy.shown_inputs(env, scenes), _true(policy, env, scenes))

    def loss(self, predicted: Tensor, rows: Tensor, rng: np.random.Generator) -> Tensor:
        """Returns the mean squared error, in multiples of the env's `offset_unit`: of `predicted` [B, W] at the moments
        `rows` [B], and of the policy's predictions in newly drawn scenes.
        """
        loss = functional.mse_loss(predicted, self._true[rows])
        if self._num_scenes:
            drawn = torch.from_numpy(rng.integers(self._num_scenes, size=_SCENES_PER_CHUNK * len(rows)))
            *seen, offsets = (part[drawn] for part in self._scenes)
            loss = loss + functional.mse_loss(self.policy.predict_offsets(*seen), offsets)
        return loss


def augment_scenes(
    shown: Observations, begins: NDArray[np.intp], num: int, env: ChunkEnv, rng: np.random.Generator
) -> Observations:
    """Returns `num` scenes that were never played: the robot of a demonstrated moment among the things of an episode's
    start, each moved a little; both with the same instruction, which may decide which things there are.

    Raises:
        UsageError: the env cannot rearrange its scenes.
    """
    # combines a moment's robot with another episode's start: so the hand is where no script would have it
    moments, starts = rng.integers(len(shown), size=num), np.empty(num, np.intp)
    instructions = np.array(shown.texts)
    for instruction in np.unique(instructions):
        rows = np.flatnonzero(instructions[moments] == instruction)
        starts[rows] = rng.choice(begins[instructions[begins] == instruction], len(rows))
    scenes = env.augment_scenes(shown.at(moments).snapshots, shown.at(starts).snapshots, rng)
    return replace(shown.at(moments), snapshots=scenes, images=())


def _true(policy: Any, env: ChunkEnv, obs: Observations) -> Tensor:
    """Returns [N, W], `ChunkEnv.offsets` at the N moments of `obs`, on the policy's device."""
    return torch.from_numpy(env.offsets(obs.snapshots)).to(policy.device)
