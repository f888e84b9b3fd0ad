"""`ez_points` and `points24`: write a formula of the cards' numbers, one symbol a turn, that has the wanted value.

Source: Zhai et al. 2024 (RL4VLM), arXiv:2405.10292, app. B. Deals, symbols, rewards, turns and the image's layout are
the paper's; card faces and words are ours. Departures, each given back by `rules="legacy"`: formulas are read token by
token over exact fractions, so that digits do not join, `**` is no power, `//` no floor division, signs join two numbers
and 8 / (3 - 8 / 3) is 24; a reply that cannot be read appends nothing; a long formula is continued on a second line
instead of leaving the image. Seeds work under both.
"""

import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import Outcome, TurnEnv
from rlvlm.envs.gym_cards.arithmetic import Tokens, completion, legacy_value, prepare, value
from rlvlm.envs.gym_cards.canvas import RANKS, SIDE_PX, SUIT_LETTERS, card_face, draw_cards, font, table
from rlvlm.envs.gym_cards.config import CardsConfig
from rlvlm.envs.gym_cards.games import GAMES
from rlvlm.envs.gym_cards.search import search

_BLANK = " "  # stands in a formula for a number that is not on the table or was already used
_WON, _LOST = 10.0, -1.0
_NUMBERS = tuple(str(number) for number in range(1, 11))


class PointsGame(TurnEnv):
    """Common base of both games: symbols are appended until `=` ends the episode, +10 for the right value and -1
    otherwise.

    A number that is not on the table, or is used too often, costs 1 and leaves a blank. A snapshot holds rank and suit
    of each card and then the formula: 0 for no entry, 1 for a blank, 2 + index of the symbol.

    Args:
        config: rules and deals; `episode_steps` may end an episode before the game does.
        seed: of the deals, until `reset` is given another seed.
    """

    image_px = (SIDE_PX, SIDE_PX)
    grain = 1  # snapshots hold whole numbers
    num_cards: ClassVar[int]
    target: ClassVar[int]
    max_entries: ClassVar[int]
    """Once the formula has more entries than this, the next turn is the last."""

    def __init__(self, config: CardsConfig, seed: int) -> None:
        self.rules, self.split = config.rules, config.split
        self._max_turns = config.episode_steps
        self._must_be_solvable = config.deals == "solvable"
        self._symbols = "".join(name for name in self.action_names if name in "+-*/(")
        self.snapshot_size = 2 * self.num_cards + self.max_entries + 1
        self.reset(seed=seed)

    def deal(self) -> NDArray[np.int64]:
        """Returns [num_cards] ranks of a new hand, 1 to 13."""
        raise NotImplementedError

    def begin(self) -> None:
        """Deals a hand, a solvable one if the settings ask for it."""
        ranks = self.deal()
        # unsolvable deals are redrawn whole, so that solvable hands keep their relative frequencies
        while self._must_be_solvable and not self._completion((), ranks):
            ranks = self.deal()
        self._cards = draw_cards(self.np_random, ranks)
        prepare(tuple(sorted(self._numbers())), self._symbols)  # here rather than in the middle of an episode
        self._entries: list[str] = []
        self._turns = 0
        self._is_won = False

    def start_key(self, first: FloatArray) -> bytes:
        """Returns the numbers of the hand, sorted: order and suits do not change how hard it is."""
        return bytes(sorted(min(int(rank), 10) for rank in first[: 2 * self.num_cards : 2]))

    def act(self, action: int | None) -> Outcome:
        """Appends a symbol, or ends the episode."""
        length = len(self._entries) if self.rules == "legacy" else self._turns  # the same, but for unreadable replies
        self._turns += 1
        if length > self.max_entries:
            return _LOST, False, True
        is_late = self._turns >= self._max_turns
        if action is None:
            return _LOST, False, is_late
        symbol = self.action_names[action]
        if symbol == "=":
            # a formula of some of the numbers may have the value, too; blanks are no numbers
            is_complete = sum(entry in _NUMBERS for entry in self._entries) == self.num_cards
            read = legacy_value("".join(self._entries)) if self.rules == "legacy" else value(self._tokens())
            self._is_won = is_complete and read == self.target
            return (_WON if self._is_won else _LOST), True, False
        is_missing = symbol in _NUMBERS and not self._left(self._entries, self._cards[:, 0])[int(symbol)]
        self._entries.append(_BLANK if is_missing else symbol)
        return (_LOST if is_missing else 0.0), False, is_late

    def reference_info(self) -> dict[str, Any]:
        """Returns the reference's `info`: names of the cards, their numbers, and the formula's entries."""
        names = [SUIT_LETTERS[suit] + RANKS[rank - 1].replace("10", "T") for rank, suit in self._cards]
        formula = [int(entry) if entry in _NUMBERS else entry for entry in self._entries]
        return {"Cards": names, "Numbers": self._numbers(), "Formula": formula}

    def prompt(self) -> str:
        """Returns the task, with the formula so far."""
        cards = {2: "two", 4: "four"}[self.num_cards]
        return (
            f"You are an expert at card games. The picture shows {cards} cards and the formula so far. Write a formula "
            f"that makes {self.target} and uses the number of each card exactly once; J, Q and K count as 10. "
            f"The formula so far: {self.formula_text() or 'empty'}. Choose the one symbol to append to it, out of "
            f'{", ".join(self.action_names)}; "=" ends the formula. Answer with one JSON object that has the keys '
            f'"cards" (the {cards} numbers), "current formula", "thoughts" (is it complete? if so "=", else what comes '
            'next) and "action".'
        )

    def prompt_fields(self) -> dict[str, str]:
        """Returns these fields and `formula`, the formula so far."""
        return super().prompt_fields() | {"formula": self.formula_text()}

    def is_success(self) -> bool:
        """Returns whether the formula was ended and has the wanted value."""
        return self._is_won

    def progress(self) -> float:
        """Returns 1 if won; else the share of a shortest right formula already written, 0 if there is none."""
        if self._is_won:
            return 1.0
        rest = self._completion(self._tokens(), self._cards[:, 0])
        return 0.0 if rest is None else len(self._tokens()) / (len(self._tokens()) + len(rest) + 1)

    def snapshot(self) -> FloatArray:
        """Returns [S]: ranks and suits, then the formula."""
        codes = np.zeros(self.max_entries + 1, np.float32)
        for index, entry in enumerate(self._entries):
            codes[index] = 1 if entry == _BLANK else 2 + self.action_names.index(entry)
        return np.concatenate([self._cards.ravel().astype(np.float32), codes])

    def draw(self, snapshots: FloatArray) -> Frames:
        """Returns images [N, 300, 300, 3] of `snapshots` [N, S]."""
        images = []
        for key in self.image_key(snapshots):
            cards, codes = key[: 2 * self.num_cards].reshape(-1, 2), key[2 * self.num_cards :]
            hand = tuple((int(rank), int(suit)) for rank, suit in cards)
            entries = [_BLANK if code == 1 else self.action_names[code - 2] for code in codes if code]
            image = _laid_out(hand).copy()  # the cards stay the same while the formula grows
            self.write(image, entries)
            images.append(np.asarray(image))
        return np.stack(images)

    def write(self, image: Image.Image, entries: list[str]) -> None:
        """Writes the formula into an image."""
        raise NotImplementedError

    def get_state(self) -> dict[str, Any]:
        """Cards, formula, turns and generator."""
        counts = np.array([self._turns, self._is_won])
        text = json.dumps(self._entries)
        return {"cards": self._cards.copy(), "formula": text, "counts": counts, "generator": self.generator_text()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._cards = np.array(state["cards"])
        prepare(tuple(sorted(self._numbers())), self._symbols)
        self._entries = json.loads(str(state["formula"]))
        self._turns, self._is_won = int(state["counts"][0]), bool(state["counts"][1])
        self.set_generator(str(state["generator"]))

    def expert_action(self) -> int:
        """Returns the next symbol of the expert's formula; `=`, which costs least, if no formula is possible."""
        rest = self.plan()[1]
        return self.action_names.index(rest[0] if rest else "=")

    def plan(self) -> tuple[str, Tokens | None]:
        """Returns the expert's reasoning, and the symbols still to be appended; None if no formula is possible."""
        return "", self._completion(self._tokens(), self._cards[:, 0])

    def expert_thought(self) -> str:
        """Returns the numbers, the formula so far, the reasoning, and the whole formula intended."""
        formula, symbol = self.formula_text(), self.action_names[self.expert_action()]
        working, rest = self.plan()
        whole = " ".join((*self._tokens(), *(rest or ())))
        if rest is None:
            reason = f"No formula that makes {self.target} can follow, so I end it."
        elif rest:
            reason = f"{whole} makes {self.target}, so I append {symbol} next."
        else:
            reason = f"{whole} makes {self.target} and every card is used, so the formula is complete."
        reason = working + reason
        numbers = json.dumps(self._numbers())
        return f'"cards": {numbers}, "current formula": {json.dumps(formula)}, "thoughts": {json.dumps(reason)}'

    def formula_text(self) -> str:
        """Returns the formula as the image shows it."""
        return " ".join(self._entries)

    def _tokens(self) -> Tokens:
        return tuple(entry for entry in self._entries if entry != _BLANK)

    def _numbers(self) -> list[int]:
        """Returns numbers of the cards, from left to right."""
        return [min(int(rank), 10) for rank in self._cards[:, 0]]

    def _left(self, entries: Sequence[str], ranks: NDArray[np.int64]) -> Counter[int]:
        """Returns how often each number of a hand may still be used after `entries`."""
        return Counter(min(int(rank), 10) for rank in ranks) - Counter(
            int(entry) for entry in entries if entry in _NUMBERS
        )

    def _completion(self, tokens: Tokens, ranks: NDArray[np.int64]) -> Tokens | None:
        left = tuple(sorted(self._left(tokens, ranks).elements()))
        return completion(tokens, left, self.target, self._symbols)


class EZPoints(PointsGame):
    """Make 12 from two cards with `+` or `*`; every deal can be solved. Jack, queen and king count as 10."""

    goal = GAMES["ez_points"][0]
    num_cards, target, max_entries = 2, 12, 5
    num_starts = 7
    """2 6, 2 10, 3 4, 3 9, 4 8, 5 7 and 6 6."""
    action_names = (*_NUMBERS, "+", "*", "=")

    def deal(self) -> NDArray[np.int64]:
        """Draws a first rank from 2 to king and the number that makes 12 with it: by `*` in half of such cases."""
        rank = int(self.np_random.integers(2, 14))
        number = min(rank, 10)
        is_product = number in (2, 3, 4, 6) and self.np_random.random() < 0.5
        ranks = np.array([rank, 12 // number if is_product else 12 - number])
        return ranks[::-1] if self.np_random.random() < 0.5 else ranks

    def write(self, image: Image.Image, entries: list[str]) -> None:
        """Writes one line below the cards."""
        ImageDraw.Draw(image).text((10, 258), "Formula: " + " ".join(entries), font=font(20), fill="white")


class Points24(PointsGame):
    """Make 24 from four cards with `+ - * /` and brackets. About 73 % of deals can be solved, see `CardsConfig`."""

    goal = GAMES["points24"][0]
    num_cards, target, max_entries = 4, 24, 20
    num_starts = 715
    """Number of sets of four numbers out of ten, with repetition."""
    action_names = (*_NUMBERS, "+", "-", "*", "/", "(", ")", "=")

    def deal(self) -> NDArray[np.int64]:
        """Draws four ranks, each of the thirteen equally likely."""
        return self.np_random.integers(1, 14, self.num_cards)

    def plan(self) -> tuple[str, Tokens | None]:
        """Returns the search from the empty formula as long as the entries agree with it; else a completion of them."""
        numbers, stands = self._numbers(), self._tokens()
        found = search(tuple(numbers))
        # after a blank, or a beginning other than the search's, only a completion of the entries can help
        if len(stands) < len(self._entries) or stands != (found.formula or ())[: len(stands)]:
            return super().plan()
        working = "; ".join(found.steps) + ". "
        if found.draft is None or found.formula is None:
            return working, None
        return f"{working}{' '.join(found.draft)}. ", found.formula[len(stands) :]

    def write(self, image: Image.Image, entries: list[str]) -> None:
        """Writes the word and, below it, the formula, on two lines if it is long."""
        pen, lines = ImageDraw.Draw(image), [" ".join(entries)]
        pen.text((10, 210), "Formula:", font=font(16), fill="white")
        if self.rules == "strict" and pen.textlength(lines[0], font=font(16)) > SIDE_PX - 20:
            half = len(entries) // 2 + 1  # broken between entries, never within a number
            lines = [" ".join(entries[:half]), " ".join(entries[half:])]
        for row, line in enumerate(lines):
            pen.text((10, 240 + 26 * row), line, font=font(16), fill="white")


@lru_cache(maxsize=64)
def _laid_out(hand: tuple[tuple[int, int], ...]) -> Image.Image:
    """Returns the table with the cards of a hand (rank and suit each) side by side; must not be written to."""
    image, _ = table()
    width = int(SIDE_PX / len(hand) * 0.9)
    height = width * 7 // 5
    for index, (rank, suit) in enumerate(hand):
        image.paste(card_face(rank, suit, (width, height)), (5 + int(index * width * 1.1), (SIDE_PX - height) // 2))
    return image
