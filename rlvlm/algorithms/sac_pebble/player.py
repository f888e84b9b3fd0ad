"""Episodes in envs with numeric steps: extracted from several envs stepped side by side, or played whole with a
policy's mode for evaluations and `rlvlm eval`.

One step of N envs is a dict of float32 columns [N, ...]: obs, actions, next_obs (before a reset), terminated,
env_rewards, success, snapshots and progress (after the actions).
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlvlm.algorithms.checkpoint import corrupt_if_unreadable, load_policy_file
from rlvlm.algorithms.evaluation import PlayedEpisode
from rlvlm.core.steps import FloatArray, Trajectory, Transitions
from rlvlm.envs.env import StepEnv
from rlvlm.envs.playing import Slot, play
from rlvlm.policies.squashed_gaussian import SquashedGaussian
from rlvlm.rewards.source import EnvironmentReward, RewardSource

KIND = "squashed_gaussian"
"""Kind of the policy's file in a checkpoint."""
Step = Mapping[str, FloatArray]
"""All data kept of one step of N envs."""


def to_transitions(steps: Sequence[Step]) -> Transitions:
    """Returns K steps of N envs as K * N transitions, in chronological order."""
    return Transitions(
        **{column.name: np.concatenate([step[column.name] for step in steps]) for column in fields(Transitions)}
    )


def to_trajectory(steps: Sequence[Step], place: int) -> Trajectory:
    """Returns the episode of the env at index `place`, of N, in `steps`."""
    columns = {
        column.name: np.stack([step[column.name][place] for step in steps])
        for column in fields(Trajectory)
        if column.name not in ("success", "terminated")
    }
    success = np.stack([step["success"][place] for step in steps]) > 0
    return Trajectory(**columns, success=success, terminated=bool(steps[-1]["terminated"][place]))


class EpisodeBuffer:
    """Keeps the steps of N envs since the start of the oldest running episode, and extracts episodes that end.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._steps: list[Step] = []
        self._starts = np.zeros(num_envs, np.int64)  # index in `_steps` of each running episode's first step

    def record(self, step: Step, ended: NDArray[np.bool_]) -> list[Trajectory]:
        """Stores one step; returns the episodes that it ended (`ended` `[N]`)."""
        self._steps.append(step)
        finished = [to_trajectory(self._steps[self._starts[env] :], env) for env in np.flatnonzero(ended).tolist()]
        self._starts[ended] = len(self._steps)
        oldest = int(self._starts.min())
        if oldest == len(self._steps) or oldest > 1000:  # seldom, so that dropping costs nothing per step
            del self._steps[:oldest]
            self._starts -= oldest
        return finished

    def get_state(self) -> dict[str, Any]:
        """Returns the kept steps stacked to `[K, N, ...]`, and where each env's episode began in them."""
        names = self._steps[0] if self._steps else ()
        columns = {name: np.stack([step[name] for step in self._steps]) for name in names}
        return {"starts": self._starts.copy(), "columns": columns}

    def set_state(self, state: dict[str, Any]) -> None:
        columns = state["columns"]
        count = len(columns["progress"]) if columns else 0
        self._steps = [{name: values[k] for name, values in columns.items()} for k in range(count)]
        self._starts = np.array(state["starts"], np.int64)


class StepsPlayer:
    """Plays a policy's mode in an env with numeric steps.

    Args:
        policy: policy on any device.
        env: env of its own, not one used in training.
        source: labels the episodes; asking must not change it. None: their learned rewards are NaN.
    """

    def __init__(self, policy: SquashedGaussian, env: StepEnv, source: RewardSource | None = None) -> None:
        self._policy = policy
        self._env = env
        self._source = source

    def play(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        """Plays an episode from each seed."""
        return [self._played(slot) for slot in play([Slot(self._env)], seeds, self._act)]

    def _act(self, slots: Sequence[Slot]) -> list[FloatArray]:
        """Returns the policy's mode, [A] for each slot."""
        device = next(self._policy.parameters()).device
        obs = np.stack([slot.seen[-1] for slot in slots])
        return list(self._policy.act(torch.from_numpy(obs).to(device)).cpu().numpy())

    def _played(self, slot: Slot) -> PlayedEpisode:
        """Returns the episode of a slot, with the source's rewards of its steps."""
        obs, (_, *infos) = np.stack(slot.seen), slot.infos
        terminated = np.zeros(len(infos), np.float32)
        terminated[-1] = slot.is_terminated
        success = np.array([info["success"] for info in infos], bool)
        steps = Transitions(
            obs=obs[:-1],
            actions=np.stack(slot.answers),
            next_obs=obs[1:],
            terminated=terminated,
            env_rewards=np.concatenate(slot.env_rewards),
            success=success.astype(np.float32),
            snapshots=np.concatenate(slot.snapshots[1:]),
        )
        # all steps at once: a judge or a reward model processes them as one batch
        learned = np.full(len(infos), np.nan, np.float32)
        if self._source is not None:
            learned = np.asarray(self._source.label(steps), np.float32)
        return PlayedEpisode(
            snapshots=steps.snapshots,
            env_rewards=steps.env_rewards,
            learned_rewards=learned,
            reward_name="true reward" if isinstance(self._source, EnvironmentReward) else "learned reward",
            success=success,
            progress=np.array([info["progress"] for info in infos], np.float32),
        )


def load_policy(folder: Path) -> SquashedGaussian:
    """Loads the policy of the checkpoint in `folder`.

    Raises:
        CorruptCheckpoint: a file is missing, has changed since it was written, or contains another kind of policy.
    """
    file = load_policy_file(folder, KIND)
    with corrupt_if_unreadable(folder, "policy that can be played"):
        # sizes follow from the weights; the last layer gives a mean and a deviation for each action
        shapes = [file.weights[f"layers.{depth}.weight"].shape for depth in range(len(file.weights) // 2)]
        policy = SquashedGaussian(shapes[0][1], shapes[-1][0] // 2, [shape[0] for shape in shapes[:-1]])
        policy.load_state_dict(file.weights)
    return policy
