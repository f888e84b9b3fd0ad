"""The single entry of reward: a source's numbers get into replay and batches here, and nowhere else."""

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
    """Returns rewards `[B]` with which new transitions enter the replay; NaN if a judge could not label them.

    A source that changes with every step labels when drawing; until then the rows contain NaN, so that training on a
    missing reward could not go unnoticed.
    """
    if source.labelling is Labelling.ON_DRAW:
        return np.full(len(transitions.env_rewards), np.nan, np.float32)
    return _labels(source, transitions)


def add_labelled(
    replay: Replay, transitions: Transitions, source: RewardSource, bonus: RewardSource | None = None
) -> FloatArray:
    """Stores new transitions with their rewards `[B]`, and returns these; rows without one (NaN) are left out.

    A source that labels when drawing has none yet, so all of its rows are stored. Exploration rewards of `bonus` are
    stored beside the rewards, not added to them.
    """
    rewards = label_on_arrival(transitions, source)
    is_known = ~np.isnan(rewards) | (source.labelling is Labelling.ON_DRAW)
    # no copy if nothing is left out, which is nearly always
    filed = transitions if is_known.all() else transitions.part(is_known)
    replay.add(filed, rewards[is_known], None if bonus is None else _labels(bonus, filed))
    return rewards


def label_on_draw(replay: Replay, rows: Tensor, source: RewardSource, bonus_weight: float = 0.0) -> Tensor | None:
    """Returns fresh rewards `[B]` for drawn rows if `source` changes with every step, or if there are bonuses; None if
    the stored ones are valid. The weight falls with every step, so bonuses are stored without it.
    """
    if source.labelling is Labelling.ON_DRAW:
        return torch.as_tensor(_labels(source, replay.transitions(rows)), device=replay.device)
    return replay.rewards[rows] + bonus_weight * replay.bonuses[rows] if bonus_weight else None


class Relabelling(Stateful):
    """Relabels a replay after its source has changed, piece by piece between two turns of acting.

    Pieces depend on the amount of data, never on the clock, so a run repeats to the bit. Until the last piece is done,
    draws mix rewards from before and after the change; a replay of fewer rows than one piece never does. If the source
    changes again before that, the rows that waited longest come first: the cursor continues from its position.
    """

    STATE = ("_next_row", "_end", "num_waiting")

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._next_row = 0
        self._end = 0
        """Number of rows when the source changed; later ones have its new rewards."""
        self.num_waiting = 0
        """Number of rows with rewards from before the change."""

    def start(self) -> None:
        """Marks every row as waiting."""
        # if the last change is not finished, the rows from the cursor on have waited longest and come first
        self._next_row = self._next_row if self.num_waiting else 0
        self._end = self.num_waiting = len(self._replay)

    def advance(self, source: RewardSource, num_turns: int | None = None, bonus: RewardSource | None = None) -> None:
        """Labels the next piece, if there is one; the env's rewards stay.

        Args:
            source: reward source.
            bonus: exploration reward, stored beside the rewards.
            num_turns: turns within which everything must be done, >= 1, which decides how many pieces are labelled now.
                None: no limit.
        """
        # waiting rows divided by turns, rounded up; at least a single piece, whatever its number of rows
        rows_due = 1 if num_turns is None else -(-self.num_waiting // num_turns)
        while self.num_waiting and rows_due > 0:
            first = self._next_row % self._end  # once around, until no row waits
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
    """Returns the source's rewards `[B]`, checked."""
    rewards = _checked(source, source.label(transitions))
    assert rewards.shape == (len(transitions.env_rewards),), f"a source gives [B] rewards, got {rewards.shape}"
    return rewards


def _checked(source: RewardSource, rewards: FloatArray) -> FloatArray:
    """Returns a source's `rewards` `[B]` as float32, all finite, or NaN where a judge did not answer.

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
