"""`blackjack`: stand or hit against a dealer who draws up to 17. Made by the registry.

Source: Zhai et al. 2024 (RL4VLM), arXiv:2405.10292, app. B, which has the rules of Gymnasium's Blackjack: an infinite
deck, the dealer stands on a soft 17, +1 for a win, 0 for a draw and -1 for a loss. Departures: seeds work; a reply that
cannot be read leaves the hand as it is and costs 0.1, and twenty turns are all (no hand that is played needs more);
the fifth card of a hand, which the reference draws outside the image, begins the second row. `rules="legacy"` gives
back the random action and the place of the fifth card.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import Outcome, TurnEnv
from rlvlm.envs.gym_cards.canvas import RANKS, SIDE_PX, SUIT_LETTERS, card_back, card_face, draw_cards, font, table
from rlvlm.envs.gym_cards.config import CardsConfig
from rlvlm.envs.gym_cards.games import GAMES

_CARD_PX = (70, 98)
_GAP_PX = 4
_MAX_CARDS, _MAX_TURNS = 21, 20
_INVALID = -0.1
_STAND, _HIT = 0, 1
_DECK = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10])
_PROMPT = (
    "You play blackjack. The picture shows one card of the dealer, whose other card lies face down, and your cards. "
    "Choose stand or hit. Answer with one JSON object that has the keys "
    '"thoughts" (your total, what the dealer shows, and why you choose so) and "action", which is "stand" or "hit".'
)


class Blackjack(TurnEnv):
    """Actions `stand` and `hit`. A snapshot [44] is rank and suit of the dealer's open card and of 21 own cards.

    Args:
        config: rules; `episode_steps` above 20 counts as 20.
        seed: of the deals, until `reset` is given another seed.
    """

    goal = GAMES["blackjack"][0]
    snapshot_size = 2 + 2 * _MAX_CARDS
    action_names = ("stand", "hit")
    image_px = (SIDE_PX, SIDE_PX)
    grain = 1  # snapshots hold whole numbers

    def __init__(self, config: CardsConfig, seed: int) -> None:
        self.rules, self.split = config.rules, config.split
        self._max_turns = min(config.episode_steps, _MAX_TURNS)
        self.reset(seed=seed)

    def begin(self) -> None:
        """Deals two cards each."""
        self._dealer, self._player = self._drawn(2), self._drawn(2)
        self._turns = 0
        self._result: float | None = None

    def act(self, action: int | None) -> Outcome:
        """Draws a card, or lets the dealer play."""
        self._turns += 1
        is_late = self._turns >= self._max_turns
        if action is None:
            return _INVALID, False, is_late
        if action == _HIT:
            self._player = np.concatenate([self._player, self._drawn(1)])
            if total(self._player)[0] <= 21:
                return 0.0, False, is_late
            self._result = -1.0
        else:
            while total(self._dealer)[0] < 17:
                self._dealer = np.concatenate([self._dealer, self._drawn(1)])
            dealers, own = total(self._dealer)[0], total(self._player)[0]
            self._result = 1.0 if dealers > 21 else float(np.sign(own - dealers))
        return self._result, True, False

    def reference_info(self) -> dict[str, Any]:
        """Returns the reference's `info`: value, face and suit of each card, including the dealer's hidden one."""
        hands = {"Dealer Card": self._dealer, "Player Card": self._player}
        return {
            name: [(min(int(rank), 10), RANKS[rank - 1], SUIT_LETTERS[suit]) for rank, suit in hand]
            for name, hand in hands.items()
        }

    def prompt(self) -> str:
        """Returns the same prompt in every turn: the cards are in the image."""
        return _PROMPT

    def is_success(self) -> bool:
        """Returns whether the hand is won."""
        return self._result == 1.0

    def progress(self) -> float:
        """Returns 1 for a win, 0 for a loss, 1/2 for a draw and while the hand is open."""
        return 0.5 if self._result is None else (1.0 + self._result) / 2

    def snapshot(self) -> FloatArray:
        """Returns [44]: the dealer's open card, then one's own; 0 where there is none."""
        snapshot = np.zeros((1 + _MAX_CARDS, 2), np.float32)  # 21 aces are the longest hand that is not over
        snapshot[0] = self._dealer[0]
        shown = self._player[:_MAX_CARDS]
        snapshot[1 : 1 + len(shown)] = shown
        return snapshot.ravel()

    def draw(self, snapshots: FloatArray) -> Frames:
        """Returns images [N, 300, 300, 3] of `snapshots` [N, 44]."""
        hands = [
            tuple((int(rank), int(suit)) for rank, suit in key.reshape(-1, 2) if rank)
            for key in self.image_key(snapshots)
        ]
        return np.stack([_paint(hand, 5 if self.rules == "legacy" else 4) for hand in hands])

    def get_state(self) -> dict[str, Any]:
        """Returns both hands, turns, result and generator."""
        result = np.nan if self._result is None else self._result
        cards = {"dealer": self._dealer.copy(), "player": self._player.copy()}
        return cards | {"turns": self._turns, "result": float(result), "generator": self.generator_text()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._dealer, self._player = np.array(state["dealer"]), np.array(state["player"])
        self._turns, result = int(state["turns"]), float(state["result"])
        self._result = None if np.isnan(result) else result
        self.set_generator(str(state["generator"]))

    def expert_action(self) -> int:
        """Returns the basic strategy's action, limited to stand and hit."""
        (own, is_soft), dealers = total(self._player), min(int(self._dealer[0, 0]), 10)
        # one more card cannot bust a soft hand; a dealer who shows 2 to 6 is likely to bust
        if is_soft:
            enough = 19 if dealers in (1, 9, 10) else 18
        elif 2 <= dealers <= 6:
            enough = 13 if dealers <= 3 else 12
        else:
            enough = 17
        return _STAND if own >= enough else _HIT

    def expert_thought(self) -> str:
        """Returns both totals, and the choice."""
        own, is_soft = total(self._player)
        dealers = min(int(self._dealer[0, 0]), 10)
        shown = "an ace" if dealers == 1 else str(dealers)
        reason = f"I have {'a soft ' if is_soft else ''}{own} and the dealer shows {shown}, so I "
        return f'"thoughts": "{reason}{self.action_names[self.expert_action()]}."'

    def _drawn(self, count: int) -> NDArray[np.int64]:
        """Draws [count, 2] cards of an endless deck. A card worth 10 appears as jack, queen or king."""
        values = _DECK[self.np_random.integers(0, len(_DECK), count)]
        # drawn whether needed or not, so that the count of random numbers does not depend on the cards
        faces = self.np_random.integers(11, 14, count)
        return draw_cards(self.np_random, np.where(values == 10, faces, values))


def total(cards: NDArray[np.int64]) -> tuple[int, bool]:
    """Returns the best total of `cards` [N, 2], and whether an ace counts as 11 in it."""
    low = int(np.minimum(cards[:, 0], 10).sum())
    is_soft = bool((cards[:, 0] == 1).any()) and low + 10 <= 21
    return low + 10 * is_soft, is_soft


@lru_cache(maxsize=64)
def _paint(hand: tuple[tuple[int, int], ...], per_row: int) -> Frames:
    """Returns one image [300, 300, 3] of the dealer's open card and the player's cards; must not be written to.

    A hand too long for two rows is laid closer, so that every card still shows its rank.
    """
    image, pen = table()
    width, height = _CARD_PX
    pen.text((5, 5), "Dealer", font=font(16), fill="white")
    image.paste(card_face(*hand[0], _CARD_PX), (5, 25))
    image.paste(card_back(_CARD_PX), (78, 25))
    pen.text((5, 130), "Player", font=font(16), fill="white")
    own = hand[1:]
    # at most two rows: cards that do not fit side by side overlap to the right
    in_row = max(per_row, -(-len(own) // 2))
    pitch = width + _GAP_PX if in_row == per_row else (SIDE_PX - 5 - width) // (in_row - 1)
    for index, card in enumerate(own):
        row, column = divmod(index, in_row)
        image.paste(card_face(*card, _CARD_PX), (5 + column * pitch, 150 + row * (height + _GAP_PX)))
    return np.asarray(image)
