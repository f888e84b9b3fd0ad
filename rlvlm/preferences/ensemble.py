"""K networks that read the same steps, each image only once and in passes of fixed size.

Fitted by the reward model; read by the reward sources and the query strategies.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlvlm.core.steps import FloatArray
from rlvlm.core.torch_state import load_network, network_state
from rlvlm.preferences.dataset import Examples, Steps
from rlvlm.preferences.networks import RewardInput


@torch.no_grad()
def read_in_passes(
    read: Callable[[Tensor], Tensor], rows_of: Callable[[slice], Tensor], num: int, per_pass: int
) -> Tensor:
    """Returns a network's output for rows, in passes of a fixed size: the last one is padded.

    Matrix products choose their kernel by the number of rows, and kernels round differently. With a fixed size, a row's
    output does not depend on the other rows.

    Args:
        read: network, a function of [per_pass, ...].
        rows_of: returns the rows in a slice of 0 to `num`.
        num: number of rows, >= 1.
        per_pass: rows per pass.

    Returns:
        Outputs [num, ...].
    """
    made = []
    for first in range(0, num, per_pass):
        rows = rows_of(slice(first, min(first + per_pass, num)))
        # copies of the last row: zeros could be an image that takes another path through a normalisation
        filling = rows[-1:].expand(per_pass - len(rows), *rows.shape[1:])
        made.append(read(torch.cat([rows, filling]))[: len(rows)])
    return torch.cat(made)


MAX_KNOWN = 65_536
"""Maximum number of cached outputs; with its key one takes about 250 bytes, Python's overhead included."""


class Ensemble:
    """K networks with different initial weights; equal steps are read once.

    Code that changes the weights must call `forget`, after which images are read anew.

    Args:
        inputs: inputs of the networks.
        num_members: number K of networks.
        rng: source of the initial weights, on the CPU.
        device: device of the members; inputs and outputs are on the CPU.
    """

    def __init__(
        self, inputs: RewardInput, num_members: int, rng: torch.Generator, device: torch.device | str = "cpu"
    ) -> None:
        self.inputs = inputs
        self.device = torch.device(device)
        # initial weights come from one generator in the members' order, so a seed gives the same ensemble on any device
        self.members = [inputs.build_network(rng).to(self.device) for _ in range(num_members)]
        self._known: dict[bytes, FloatArray] = {}
        self.train(False)

    def train(self, is_training: bool) -> None:
        """Switches all members between training and evaluation mode."""
        for member in self.members:
            member.train(is_training)

    def parameters(self) -> list[nn.Parameter]:
        """Returns the weights of all members."""
        return [weight for member in self.members for weight in member.parameters()]

    def forget(self) -> None:
        """Clears the cached outputs, since the weights change."""
        self._known.clear()

    def rewards(self, steps: Steps) -> FloatArray:
        """Returns the members' mean rewards [N]."""
        first, kind = self.inputs.distinct(steps)
        return self._look_up(steps, first).mean(axis=1)[kind]

    def leading_rewards(self, steps: Steps) -> FloatArray:
        """Returns `rewards` [M] of as many leading steps as are read within about half a second, M >= 1."""
        first, kind = self.inputs.distinct(steps)
        num_kinds = self.inputs.affordable_kinds
        # all steps up to the first that shows another kind: they need no further image
        num_steps = len(steps) if len(first) <= num_kinds else int(first[num_kinds])
        return self._look_up(steps, first[:num_kinds]).mean(axis=1)[kind[:num_steps]]

    def predict(self, steps: Steps) -> FloatArray:
        """Returns each member's reward of each step, [K, N]."""
        first, kind = self.inputs.distinct(steps)
        return self._look_up(steps, first)[kind].T

    def features(self, steps: Steps) -> FloatArray:
        """Returns [N, E] features of the first member: its last layer's input, or its scaled state."""
        first, kind = self.inputs.distinct(steps)
        return self._read(lambda rows: self.members[0].features(rows.to(self.device)), steps, first)[kind]

    def rows(self, examples: Examples) -> tuple[Tensor, Tensor]:
        """Returns the networks' inputs for all examples.

        These are rows [U, ...], and the row of each step, [N, S, L]; both on the members' device.
        """
        steps = examples.steps()
        first, kind = self.inputs.distinct(steps)
        indices = torch.from_numpy(kind).view(len(examples), examples.num_sides, examples.segment_steps)
        return self.inputs.rows(steps, first).to(self.device), indices.to(self.device)

    def mean_returns(self, rows: Tensor, indices: Tensor) -> Tensor:
        """Returns the members' mean return [N, S] of sides: the sum of `rows` at `indices` [N, S, L]."""
        # each image once, in however many sides it is shown
        shown, index = indices.unique(return_inverse=True)
        rewards = read_in_passes(
            self._every_member, lambda part: rows[shown[part]], len(shown), self.inputs.rows_per_pass
        )
        return rewards.mean(dim=1)[index].sum(-1)

    def get_state(self) -> list[dict[str, Any]]:
        """Returns copies of the members' weights, as arrays."""
        return [network_state(member) for member in self.members]

    def set_state(self, state: list[dict[str, Any]]) -> None:
        for member, weights in zip(self.members, state, strict=True):
            load_network(member, weights)
        self.forget()

    def _look_up(self, steps: Steps, chosen: NDArray[np.int64]) -> FloatArray:
        """Returns each member's reward [U, K] of chosen steps [U]; new images are read.

        An output depends on its image alone. So the cache only saves work: it is no part of a run's state, and reading
        in between changes nothing.
        """
        names = self.inputs.names(steps, chosen)
        if names is None:
            return self._read(self._every_member, steps, chosen)
        readings = [self._known.get(name) for name in names]
        unknown = [index for index, reading in enumerate(readings) if reading is None]
        if unknown:
            # all at once: it is unknown which outputs recur, and a fit clears them all anyway
            if len(self._known) + len(unknown) > MAX_KNOWN:
                self._known.clear()
            made = self._read(self._every_member, steps, chosen[np.array(unknown, np.int64)])
            for index, reading in zip(unknown, made, strict=True):
                readings[index] = self._known[names[index]] = reading
        return np.array(readings, np.float32)

    def _read(self, read: Callable[[Tensor], Tensor], steps: Steps, chosen: NDArray[np.int64]) -> FloatArray:
        """Returns the outputs [M, ...] of `read` for the chosen steps [M]."""
        made = read_in_passes(
            read, lambda part: self.inputs.rows(steps, chosen[part]), len(chosen), self.inputs.rows_per_pass
        )
        return made.cpu().numpy()

    def _every_member(self, rows: Tensor) -> Tensor:
        """Returns each member's output [M, K] for `rows` [M, ...]."""
        rows = rows.to(self.device)
        return torch.stack([member(rows) for member in self.members], dim=1)
