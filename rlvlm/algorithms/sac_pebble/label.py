"""The one door where reward enters: a source's numbers go from here into replay and batches, and nowhere else."""

import numpy as np
import torch
from torch import Tensor

from rlvlm.algorithms.sac_pebble.replay import Replay
from rlvlm.core.errors import NumericsError
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray, Transitions
from rlvlm.rewards.source import Labelling, RewardSource

_PIECE_ROWS = 16_384


def label_on_arrival(transitions: Transitions, source: RewardSource) -> FloatArray:
    """Rewards `[B]` under which new transitions enter the replay; NaN for those that a judge could not label.

    A source that moves with every step labels at the draw instead; until then the rows hold NaN, so that a missing
    reward could never be trained on unnoticed.
    """
    if source.labelling is Labelling.ON_DRAW:
        return np.full(len(transitions.env_rewards), np.nan, np.float32)
    return _labels(source, transitions)


def add_labelled(
    replay: Replay, transitions: Transitions, source: RewardSource, bonus: RewardSource | None = None
) -> FloatArray:
    """Files new transitions under their rewards `[B]`, and returns these; rows that have none (NaN) stay out.

    A source that labels at the draw has none yet, so all of its rows are filed. What `bonus` gives for exploring is
    filed beside the rewards and is no part of them.
    """
    rewards = label_on_arrival(transitions, source)
    is_known = ~np.isnan(rewards) | (source.labelling is Labelling.ON_DRAW)
    # no copy where nothing is left out, which is nearly always
    filed = transitions if is_known.all() else transitions.part(is_known)
    replay.add(filed, rewards[is_known], None if bonus is None else _labels(bonus, filed))
    return rewards


def label_on_draw(replay: Replay, rows: Tensor, source: RewardSource, bonus_weight: float = 0.0) -> Tensor | None:
    """Fresh rewards `[B]` for drawn rows when `source` moves with every step, or when bonuses count; None when the
    stored ones hold. The weight falls with every step, so what is stored are bonuses without it.
    """
    if source.labelling is Labelling.ON_DRAW:
        return torch.as_tensor(_labels(source, replay.transitions(rows)), device=replay.device)
    return replay.rewards[rows] + bonus_weight * replay.bonuses[rows] if bonus_weight else None


class Relabelling(Stateful):
    """Brings a replay up to date with a source that has changed, piece by piece between two turns of acting.

    Pieces are cut by what there is to look at, never by the clock, so a run repeats to the bit. Until the last piece is
    done, draws mix rewards from before and after the change; a replay of fewer rows than one piece never does. Should
    the source change again before that, the rows that waited longest come first: the cursor goes on where it stood.
    """

    STATE = {"next_row": "_next_row", "end": "_end", "num_waiting": "num_waiting"}

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._next_row = 0
        self._end = 0
        """Rows there were when the source changed; those that came later carry its new rewards."""
        self.num_waiting = 0
        """Rows whose reward is from before the change."""

    def start(self) -> None:
        """Every row waits from now on."""
        # where the last change is not done yet, the rows from the cursor on have waited longest and come first
        self._next_row = self._next_row if self.num_waiting else 0
        self._end = self.num_waiting = len(self._replay)

    def advance(self, source: RewardSource, num_turns: int | None = None, bonus: RewardSource | None = None) -> None:
        """Labels the next piece, if there is one; the env's rewards beside them stay.

        Args:
            source: gives the rewards.
            bonus: reward for exploring, filed beside them.
            num_turns: turns in which all of it is to be done, >= 1: as many pieces are labelled now as that takes. None
                for no hurry.
        """
        # waiting rows over turns, rounded up; 1 asks for a single piece, however many rows that has
        rows_due = 1 if num_turns is None else -(-self.num_waiting // num_turns)
        while self.num_waiting and rows_due > 0:
            first = self._next_row % self._end  # round once, until no row waits
            end = min(first + min(_PIECE_ROWS, self.num_waiting), self._end)
            labels = _checked(source, source.label_leading(self._replay.transitions(slice(first, end))))
            piece = slice(first, first + len(labels))
            self._replay.rewards[piece] = torch.as_tensor(labels, device=self._replay.device)
            if bonus is not None:
                bonuses = _labels(bonus, self._replay.transitions(piece))
                self._replay.bonuses[piece] = torch.as_tensor(bonuses, device=self._replay.device)
            self._next_row = piece.stop
            self.num_waiting -= len(labels)
            rows_due -= len(labels)


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
            "lower what it is learned with in the run's config.yaml, such as reward_model.lr, then `rlvlm resume`",
            {"rewards": rewards},
        )
    return rewards
