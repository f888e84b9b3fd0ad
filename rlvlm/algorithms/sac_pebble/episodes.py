"""Gathers the steps of envs that run side by side into transitions and whole episodes. Used by the env runners."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Trajectory, Transitions


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorStep:
    """One step of N envs: everything about it that is kept, one row per env, float32."""

    obs: FloatArray
    """[N, D] before the actions."""
    actions: FloatArray
    """[N, A]."""
    next_obs: FloatArray
    """[N, D] after the actions, and before a reset."""
    terminated: FloatArray
    """[N] 1 where the episode ended for good."""
    env_rewards: FloatArray
    """[N]."""
    success: FloatArray
    """[N] 1 where the env's own test held."""
    snapshots: FloatArray
    """[N, S] after the actions."""
    progress: FloatArray
    """[N]."""


def to_transitions(steps: Sequence[VectorStep]) -> Transitions:
    """K steps of N envs as K * N transitions, in the order they happened."""
    return Transitions(
        **{field.name: np.concatenate([getattr(step, field.name) for step in steps]) for field in fields(Transitions)}
    )


def to_trajectory(steps: Sequence[VectorStep], env: int) -> Trajectory:
    """The episode that one of the N envs lived through in `steps`."""

    def column(name: str) -> FloatArray:
        return np.stack([getattr(step, name)[env] for step in steps])

    return Trajectory(
        obs=column("obs"),
        actions=column("actions"),
        next_obs=column("next_obs"),
        env_rewards=column("env_rewards"),
        snapshots=column("snapshots"),
        progress=column("progress"),
        success=column("success") > 0,
        terminated=bool(steps[-1].terminated[env]),
    )


class EpisodeBuffer:
    """Keeps the steps of N envs from the start of the oldest running episode on, and cuts out episodes that end.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._steps: list[VectorStep] = []
        self._starts = np.zeros(num_envs, np.int64)

    def record(self, step: VectorStep, ended: NDArray[np.bool_]) -> list[Trajectory]:
        """Takes in one step; returns the episodes that it ended (`ended` `[N]`)."""
        self._steps.append(step)
        finished = [to_trajectory(self._steps[self._starts[env] :], env) for env in np.flatnonzero(ended).tolist()]
        self._starts[ended] = len(self._steps)
        oldest = int(self._starts.min())
        if oldest == len(self._steps) or oldest > 1000:  # seldom, so that dropping costs nothing per step
            del self._steps[:oldest]
            self._starts -= oldest
        return finished

    def get_state(self) -> dict[str, Any]:
        """The kept steps stacked to `[K, N, ...]`, and where each env's episode began in them."""
        columns = {}
        if self._steps:
            columns = {name: np.stack([getattr(step, name) for step in self._steps]) for name in asdict(self._steps[0])}
        return {"starts": self._starts.copy(), "columns": columns}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        columns = state["columns"]
        count = len(columns["progress"]) if columns else 0
        self._steps = [VectorStep(**{name: values[k] for name, values in columns.items()}) for k in range(count)]
        self._starts = np.array(state["starts"], np.int64)
