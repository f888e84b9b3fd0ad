"""The one door where reward enters: a source's numbers go from here into replay and batches, and nowhere else."""

import numpy as np
import torch
from torch import Tensor

from rlvlm.algorithms.replay import Replay
from rlvlm.errors import NumericsError
from rlvlm.rewards.source import Labelling, RewardSource
from rlvlm.types import FloatArray, Transitions

_RELABEL_ROWS = 4096


def label_on_arrival(transitions: Transitions, source: RewardSource) -> FloatArray:
    """Rewards `[B]` under which new transitions enter the replay.

    A source that moves with every step labels at the draw instead; until then the rows hold NaN, so that a reward
    nobody gave could never be trained on unseen.
    """
    if source.labelling is Labelling.ON_DRAW:
        return np.full(len(transitions.env_rewards), np.nan, np.float32)
    return _checked(source, transitions)


def label_on_draw(replay: Replay, rows: Tensor, source: RewardSource) -> Tensor | None:
    """Fresh rewards `[B]` for drawn rows when `source` moves with every step; None when the stored ones hold."""
    if source.labelling is not Labelling.ON_DRAW:
        return None
    return torch.as_tensor(_checked(source, replay.transitions(rows)), device=replay.device)


def relabel(replay: Replay, source: RewardSource) -> None:
    """Gives every row of the replay its reward by `source`, in place; the env's rewards beside them stay."""
    for start in range(0, len(replay), _RELABEL_ROWS):
        rows = slice(start, min(start + _RELABEL_ROWS, len(replay)))
        replay.rewards[rows] = torch.as_tensor(label_on_arrival(replay.transitions(rows), source), device=replay.device)


def _checked(source: RewardSource, transitions: Transitions) -> FloatArray:
    """The source's rewards as float32 `[B]`, all finite.

    Raises:
        NumericsError: the source gave a reward that is not a finite number.
    """
    rewards = np.asarray(source.label(transitions), np.float32)
    assert rewards.shape == (len(transitions.env_rewards),), f"a source gives [B] rewards, got {rewards.shape}"
    if not np.isfinite(rewards).all():
        raise NumericsError(f"{type(source).__name__} gave {np.count_nonzero(~np.isfinite(rewards))} rewards that are "
                            f"not finite, of {len(rewards)}", "resume from the last checkpoint with a smaller lr")
    return rewards
