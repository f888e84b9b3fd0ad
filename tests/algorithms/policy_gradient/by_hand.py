"""Episodes in chunks, made by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvlm.core.episodes import Observations, TokenEpisode


def episode(
    steps: Sequence[int] = (8, 3), *, group: int = 0, success: bool = False, bins: Sequence[int] = (), **more: Any
) -> TokenEpisode:
    """Chunks of so many env steps, whose snapshots count them; each chunk holds one bin alone."""
    total, count = sum(steps), len(steps)
    snapshots = np.arange(total + 1, dtype=np.float32)[:, None]
    won = np.zeros(total, bool)
    won[-1] = success
    seen = np.cumsum([0, *steps])
    obs = Observations(
        images=tuple(row.tobytes() for row in snapshots[seen]),
        texts=("push the red block onto the pad",) * (count + 1),
        proprio=np.zeros((count + 1, 2), np.float32), snapshots=snapshots[seen],
    )  # fmt: skip
    columns: dict[str, Any] = {
        "task": "push_block", "seed": group, "group": group, "slot": -1, "played_at": np.zeros(count, np.int64),
        "obs": obs, "snapshots": snapshots, "steps": np.array(steps),
        "answers": tuple({"bins": np.full(56, one, np.int16)} for one in (bins or (0,) * count)),
        "runs": tuple(np.arange(56) < 7 * step for step in steps),
        "chunks": tuple(np.full((8, 7), one, np.float32) for one in (bins or (0,) * count)),
        "log_probs": (np.full(56, -1.0, np.float32),) * count, "masks": (np.ones(56, bool),) * count,
        "values": np.zeros(count, np.float32), "versions": np.zeros(count, np.int64),
        "env_rewards": np.zeros(total, np.float32), "success": won, "progress": np.zeros(total, np.float32),
        "gains": np.zeros(count, np.float32), "goals": ("push the red block onto the pad",) * count, "is_over": True,
        "terminated": success, "rewards": np.zeros(count, np.float32),
    }  # fmt: skip
    return TokenEpisode(**columns | more)


def scored(score: float, steps: Sequence[int] = (8, 3), **more: Any) -> TokenEpisode:
    """An episode whose last chunk is paid its score."""
    rewards = np.zeros(len(steps), np.float32)
    rewards[-1] = score
    return episode(steps, rewards=rewards, **more)
