"""Demonstrated chunks as a policy with a longer horizon than the env's learns them."""

from typing import Any

import numpy as np
import pytest

from rlvlm.algorithms.sft_chunks import _gathered
from rlvlm.demonstrations.records import EpisodeRecord


def episode(steps: list[int], length: int = 2, **arrays: Any) -> EpisodeRecord:
    """Chunks of an episode whose actions are 1, 2, 3 ... in order; 0 fills up the last one."""
    starts, num = np.cumsum([0, *steps[:-1]]), sum(steps)
    track = np.concatenate([np.arange(1, num + 1), np.zeros(length)]).astype(np.float32)
    chunks = np.stack([track[start : start + length] for start in starts])[..., None]
    own = {"proprio": np.zeros((len(steps), 1)), "snapshots": np.zeros((len(steps) + 1, 1)), "actions": chunks}
    about: dict[str, Any] = {"id": "a", "task": "t", "kind": "chunks", "seed": 0, "player": "script", "goal": "g"}
    ended: dict[str, Any] = {"env_return": 1.0, "success": True, "terminated": True}
    return EpisodeRecord(**about, **ended, arrays={**own, "steps": np.array(steps), **arrays})


@pytest.mark.parametrize(
    ("steps", "arrays", "actions", "known"),
    [
        # side by side, the last chunk of one step and one that fills it up
        ([2, 2, 1], {}, [[1, 2, 3, 4, 5], [3, 4, 5, 5, 5], [5, 0, 0, 0, 0]], [5, 3, 2]),
        # overlapping, as data are imported with a stride of 1
        ([1, 1, 1, 1], {}, [[1, 2, 3, 4, 4], [2, 3, 4, 4, 4], [3, 4, 4, 4, 4], [4, 0, 0, 0, 0]], [4, 3, 2, 2]),
        # with steps between chunks that no chunk has
        ([3, 2], {}, [[1, 2, 2, 2, 2], [4, 5, 5, 5, 5]], [2, 2]),
        # the second chunk is a disturbance, and is left out
        ([2, 2, 2], {"perturbed": np.array([False, True, False])}, [[1, 2, 2, 2, 2], [5, 6, 6, 6, 6]], [2, 2]),
    ],
)
def test_chunks_are_continued_by_the_episodes_next_actions(steps, arrays, actions, known):
    shown = _gathered([episode(steps, **arrays)] * 2, 0, 5)
    assert shown.known is not None and shown.known.sum(axis=1).tolist() == known * 2
    assert shown.actions[..., 0].tolist() == actions * 2
    alone = _gathered([episode(steps, **arrays)], 0)
    assert alone.known is None and alone.actions[..., 0].tolist() == [row[:2] for row in actions]
