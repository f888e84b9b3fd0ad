"""The one door where reward enters: a source's numbers go from here into replay and batches, and nowhere else."""

import numpy as np
import torch
from torch import Tensor

from rlvlm.algorithms.sac_pebble.replay import Replay
from rlvlm.errors import NumericsError
from rlvlm.rewards.source import ChangingSource, Labelling, RewardSource
from rlvlm.types.steps import FloatArray, Transitions

_PIECE_ROWS = 16_384


def label_on_arrival(transitions: Transitions, source: RewardSource) -> FloatArray:
    """Rewards `[B]` under which new transitions enter the replay; NaN for those that a judge could not label.

    A source that moves with every step labels at the draw instead; until then the rows hold NaN, so that a reward
    nobody gave could never be trained on unseen.
    """
    if source.labelling is Labelling.ON_DRAW:
        return np.full(len(transitions.env_rewards), np.nan, np.float32)
    return _labels(source, transitions)


def add_labelled(replay: Replay, transitions: Transitions, source: RewardSource) -> FloatArray:
    """Files new transitions under their rewards `[B]`, and returns these; rows that have none (NaN) stay out.

    A source that labels at the draw has none yet, so all of its rows are filed.
    """
    rewards = label_on_arrival(transitions, source)
    is_known = ~np.isnan(rewards) | (source.labelling is Labelling.ON_DRAW)
    replay.add(transitions if is_known.all() else transitions.part(is_known), rewards[is_known])
    return rewards


def label_on_draw(replay: Replay, rows: Tensor, source: RewardSource) -> Tensor | None:
    """Fresh rewards `[B]` for drawn rows when `source` moves with every step; None when the stored ones hold."""
    if source.labelling is not Labelling.ON_DRAW:
        return None
    return torch.as_tensor(_labels(source, replay.transitions(rows)), device=replay.device)


class Relabelling:
    """Brings a replay up to date with a source that has changed, a piece between two turns of acting.

    Pieces are cut by what there is to look at, never by the clock, so a run repeats to the bit. Until the last piece is
    done, draws mix rewards from before and after the change; a replay of fewer rows than one piece never does.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self.next_row: int | None = None
        """First row that waits for its new reward; None when every row has it."""

    def start(self) -> None:
        """Every row waits from now on."""
        self.next_row = 0

    def advance(self, source: ChangingSource) -> None:
        """Labels the next piece, if there is one; the env's rewards beside them stay."""
        if self.next_row is None:
            return
        first, end = self.next_row, min(self.next_row + _PIECE_ROWS, len(self._replay))
        labels = _checked(source, source.label_leading(self._replay.transitions(slice(first, end))))
        last = first + len(labels)
        self._replay.rewards[first:last] = torch.as_tensor(labels, device=self._replay.device)
        self.next_row = None if last == len(self._replay) else last

    def finish(self, source: ChangingSource) -> None:
        """Labels everything that waits."""
        while self.next_row is not None:
            self.advance(source)


def _labels(source: RewardSource, transitions: Transitions) -> FloatArray:
    """The source's rewards `[B]`, checked."""
    rewards = _checked(source, source.label(transitions))
    assert rewards.shape == (len(transitions.env_rewards),), f"a source gives [B] rewards, got {rewards.shape}"
    return rewards


def _checked(source: RewardSource, rewards: FloatArray) -> FloatArray:
    """`rewards` `[B]` of a source as float32, all finite, or NaN where a judge did not answer.

    Raises:
        NumericsError: one of them is not a finite number.
    """
    rewards = np.asarray(rewards, np.float32)
    is_wrong = ~np.isfinite(rewards)
    if source.labelling is Labelling.WHERE_ANSWERED:
        is_wrong &= ~np.isnan(rewards)
    if is_wrong.any():
        raise NumericsError(
            f"{type(source).__name__} gave {np.count_nonzero(is_wrong)} rewards that are not finite, of {len(rewards)}",
            "resume from the last checkpoint with a smaller lr",
        )
    return rewards
