"""Learning to see: a policy tells the ways from its hand to the things of the task, which the simulator knows.

An auxiliary task of the supervised start, see `imitation`; the policy acts on images alone. Demonstrations show the
hand where it should be, so from them alone a policy predicts the ways from where its hand is, and is lost where the
hand is elsewhere. Scenes that nobody has played teach it to look.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rlvlm.core.chunks import ChunkObs
from rlvlm.policies.vla.observe import ObsProcessor
from rlvlm.policies.vla.pocket import PocketVLA

_SCENES_PER_CHUNK = 2
"""Scenes that nobody has played in a gradient step, for each of its demonstrated chunks."""


class WaysLessons:
    """True ways at demonstrated moments, and in scenes that nobody has played.

    Args:
        policy: tells ways.
        obs_processor: draws what it sees.
        shown: [N] demonstrated moments.
        begins: [E] which of them are the first of an episode.
        num_scenes: that nobody has played; 0 leaves them out.
        rng: of the scenes.
        log: takes a line.

    Raises:
        UsageError: the env cannot rearrange its scenes.
    """

    def __init__(
        self,
        policy: PocketVLA,
        obs_processor: ObsProcessor,
        shown: ChunkObs,
        begins: NDArray[np.intp],
        num_scenes: int,
        rng: np.random.Generator,
        log: Callable[[str], None],
    ) -> None:
        self.policy = policy
        self._ways = obs_processor.true_ways(shown)
        self._num_scenes = num_scenes
        if num_scenes:
            log(f"drawing {num_scenes:,} scenes that nobody has played, to learn to see from")
            scenes = augment_scenes(shown, begins, num_scenes, obs_processor, rng)
            self._scenes = (*obs_processor.look(scenes), obs_processor.true_ways(scenes))

    def loss(self, told: Tensor, rows: Tensor, rng: np.random.Generator) -> Tensor:
        """Mean squared error, in multiples of the world's `way_unit`: of `told` [B, W] at the moments `rows` [B], and
        of what the policy tells of scenes drawn anew.
        """
        loss = functional.mse_loss(told, self._ways[rows])
        if self._num_scenes:
            drawn = torch.from_numpy(rng.integers(self._num_scenes, size=_SCENES_PER_CHUNK * len(rows)))
            *seen, ways = (part[drawn] for part in self._scenes)
            loss = loss + functional.mse_loss(self.policy.predict_offsets(*seen), ways)
        return loss


def augment_scenes(
    shown: ChunkObs, begins: NDArray[np.intp], num: int, obs_processor: ObsProcessor, rng: np.random.Generator
) -> ChunkObs:
    """`num` scenes that nobody has played: the robot of a demonstrated moment among the things of an episode's start,
    each moved a little; both of one instruction, as it may decide which things there are.

    Raises:
        UsageError: the env cannot rearrange its scenes.
    """
    moments, starts = rng.integers(len(shown), size=num), np.empty(num, np.intp)
    told = np.array(shown.instructions)
    for instruction in np.unique(told):
        rows = np.flatnonzero(told[moments] == instruction)
        starts[rows] = rng.choice(begins[told[begins] == instruction], len(rows))
    return obs_processor.augment_scenes(shown.at(moments), shown.at(starts), rng)
