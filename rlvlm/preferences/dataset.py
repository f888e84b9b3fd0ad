"""The labelled comparisons of a run, as arrays. Filled by the loop, read by the reward model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlvlm.rewards.growing import GrowingArray
from rlvlm.types import FloatArray, Label, Pair, Transitions, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What a reward model may look at in each of N steps. True rewards are left out on purpose."""

    actions: FloatArray
    """[N, A]."""
    next_obs: FloatArray
    """[N, D] after the action."""
    snapshots: FloatArray
    """[N, S] after the action."""

    @classmethod
    def of(cls, transitions: Transitions) -> "Steps":
        """The steps of a batch of transitions."""
        return cls(actions=transitions.actions, next_obs=transitions.next_obs, snapshots=transitions.snapshots)

    def __len__(self) -> int:
        return len(self.actions)


class Comparisons:
    """Pairs with labels that train. Ties are dropped or train as one half; unread and missing answers never train.

    Args:
        ties: what becomes of answers without preference.
    """

    def __init__(self, ties: Literal["drop", "equal"]) -> None:
        self._ties = ties
        self._sides: dict[str, GrowingArray] = {}
        self._p_right = GrowingArray(())

    def __len__(self) -> int:
        return len(self._p_right)

    @property
    def p_right(self) -> FloatArray:
        """[N] 0, 1, or 0.5 for a tie."""
        return self._p_right.rows

    @property
    def segment_steps(self) -> int:
        """L; the set must not be empty."""
        return self._sides["actions"].rows.shape[2]

    def add(self, pairs: Sequence[Pair], verdicts: Sequence[Verdict]) -> int:
        """Takes what trains and returns how many that are."""
        labels: dict[Label | None, float] = {Label.LEFT: 0.0, Label.RIGHT: 1.0}
        if self._ties == "equal":
            labels[Label.TIE] = 0.5
        answered = zip(pairs, verdicts, strict=True)
        kept = [(pair, labels[verdict.label]) for pair, verdict in answered if verdict.label in labels]
        if kept:
            for name in ("actions", "next_obs", "snapshots"):
                sides = [(getattr(pair.left, name), getattr(pair.right, name)) for pair, _ in kept]
                self._append(name, np.array(sides))
            self._p_right.append(np.array([p_right for _, p_right in kept], np.float32))
        return len(kept)

    def steps(self) -> Steps:
        """All steps of all sides, `[N * 2 * L]`: comparison by comparison, left before right, in time's order."""
        flat = {name: sides.rows.reshape(-1, sides.rows.shape[-1]) for name, sides in self._sides.items()}
        return Steps(actions=flat["actions"], next_obs=flat["next_obs"], snapshots=flat["snapshots"])

    def get_state(self) -> dict[str, Any]:
        """Copies of the arrays."""
        state: dict[str, Any] = {name: sides.rows.copy() for name, sides in self._sides.items()}
        return {"sides": state, "p_right": self.p_right.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self._sides, self._p_right = {}, GrowingArray(())
        for name, sides in state["sides"].items():
            self._append(name, sides)
        self._p_right.append(state["p_right"])

    def _append(self, name: str, sides: NDArray[np.float32]) -> None:
        """Adds `[M, 2, L, ...]`; the first call fixes the shape."""
        if name not in self._sides:
            self._sides[name] = GrowingArray(sides.shape[1:])
        self._sides[name].append(sides)
