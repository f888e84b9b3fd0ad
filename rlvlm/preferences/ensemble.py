"""K networks that read the same steps, each image only once and in passes of one size.

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
    """Output of a network for rows, in passes of one size whatever their number: the last one is filled up.

    Matrix products choose their kernel by the number of rows, and kernels round differently. With one size, a row comes
    out the same in whatever company it is read.

    Args:
        read: what the network makes of `[per_pass, ...]`.
        rows_of: the rows in a part of 0 to `num`.
        num: of rows, >= 1.
        per_pass: rows read at once.

    Returns:
        [num, ...].
    """
    made = []
    for first in range(0, num, per_pass):
        rows = rows_of(slice(first, min(first + per_pass, num)))
        # copies of the last row: zeros could be an image that takes another path through a normalisation
        filling = rows[-1:].expand(per_pass - len(rows), *rows.shape[1:])
        made.append(read(torch.cat([rows, filling]))[: len(rows)])
    return torch.cat(made)


MAX_KNOWN = 65_536
"""Readings that an ensemble remembers; with its name one takes some 250 bytes, Python's own included."""


class Ensemble:
    """K networks that differ in their first weights; steps that look the same are read once.

    Code that changes the weights calls `forget`, after which images are read anew.

    Args:
        inputs: what the networks look at.
        num_members: K.
        rng: of the first weights, on the CPU.
        device: where the members compute; what they are given and what they say lies on the CPU.
    """

    def __init__(
        self, inputs: RewardInput, num_members: int, rng: torch.Generator, device: torch.device | str = "cpu"
    ) -> None:
        self.inputs = inputs
        self.device = torch.device(device)
        # first weights come from one generator in the members' order, so a seed gives the same ensemble on
        # any device
        self.members = [inputs.build_network(rng).to(self.device) for _ in range(num_members)]
        self._known: dict[bytes, FloatArray] = {}
        self.train(False)

    def train(self, is_training: bool) -> None:
        """Switches all members between training and reading."""
        for member in self.members:
            member.train(is_training)

    def parameters(self) -> list[nn.Parameter]:
        """The weights of all members."""
        return [weight for member in self.members for weight in member.parameters()]

    def forget(self) -> None:
        """Forgets what was read, since the weights change."""
        self._known.clear()

    def rewards(self, steps: Steps) -> FloatArray:
        """The members' mean `[N]`."""
        first, kind = self.inputs.distinct(steps)
        return self._look_up(steps, first).mean(axis=1)[kind]

    def leading_rewards(self, steps: Steps) -> FloatArray:
        """`rewards` `[M]` of the leading steps, as many as are read within a good half second, M >= 1."""
        first, kind = self.inputs.distinct(steps)
        num_kinds = self.inputs.affordable_kinds
        # all steps up to the first that shows a kind beyond those: they need no further image
        num_steps = len(steps) if len(first) <= num_kinds else int(first[num_kinds])
        return self._look_up(steps, first[:num_kinds]).mean(axis=1)[kind[:num_steps]]

    def predict(self, steps: Steps) -> FloatArray:
        """Each member's reward of each step, `[K, N]`."""
        first, kind = self.inputs.distinct(steps)
        return self._look_up(steps, first)[kind].T

    def features(self, steps: Steps) -> FloatArray:
        """`[N, E]` what the first member sees in each step: its last layer's input, or its scaled state."""
        first, kind = self.inputs.distinct(steps)
        return self._read(lambda rows: self.members[0].features(rows.to(self.device)), steps, first)[kind]

    def rows(self, examples: Examples) -> tuple[Tensor, Tensor]:
        """Inputs of the networks for all examples: rows `[U, ...]`, and `[N, S, L]` which one each step shows; both on
        the members' device.
        """
        steps = examples.steps()
        first, kind = self.inputs.distinct(steps)
        indices = torch.from_numpy(kind).view(len(examples), examples.num_sides, examples.segment_steps)
        return self.inputs.rows(steps, first).to(self.device), indices.to(self.device)

    def mean_returns(self, rows: Tensor, indices: Tensor) -> Tensor:
        """The members' mean return `[N, S]` of sides, `rows` at `indices` `[N, S, L]`."""
        # each image once, in however many sides it is shown
        shown, index = indices.unique(return_inverse=True)
        rewards = read_in_passes(
            self._every_member, lambda part: rows[shown[part]], len(shown), self.inputs.rows_per_pass
        )
        return rewards.mean(dim=1)[index].sum(-1)

    def get_state(self) -> list[dict[str, Any]]:
        """Copies of the members' weights, as arrays."""
        return [network_state(member) for member in self.members]

    def set_state(self, state: list[dict[str, Any]]) -> None:
        for member, weights in zip(self.members, state, strict=True):
            load_network(member, weights)
        self.forget()

    def _look_up(self, steps: Steps, chosen: NDArray[np.int64]) -> FloatArray:
        """Each member's reward `[U, K]` of chosen steps `[U]`; images are read when first met after a fit.

        A reading depends on its image alone, not on when or in what company it was read. So remembering only saves
        work: it is no part of a run's state, and a reading in between changes nothing.
        """
        names = self.inputs.names(steps, chosen)
        if names is None:
            return self._read(self._every_member, steps, chosen)
        readings = [self._known.get(name) for name in names]
        unknown = [index for index, reading in enumerate(readings) if reading is None]
        if unknown:
            # all at once: which readings come again cannot be known, and a fit forgets them all anyway
            if len(self._known) + len(unknown) > MAX_KNOWN:
                self._known.clear()
            made = self._read(self._every_member, steps, chosen[np.array(unknown, np.int64)])
            for index, reading in zip(unknown, made, strict=True):
                readings[index] = self._known[names[index]] = reading
        return np.array(readings, np.float32)

    def _read(self, read: Callable[[Tensor], Tensor], steps: Steps, chosen: NDArray[np.int64]) -> FloatArray:
        """`[M, ...]` what `read` makes of the chosen steps `[M]`."""
        made = read_in_passes(
            read, lambda part: self.inputs.rows(steps, chosen[part]), len(chosen), self.inputs.rows_per_pass
        )
        return made.cpu().numpy()

    def _every_member(self, rows: Tensor) -> Tensor:
        """`[M, K]` what each member makes of `rows` `[M, ...]`."""
        rows = rows.to(self.device)
        return torch.stack([member(rows) for member in self.members], dim=1)
