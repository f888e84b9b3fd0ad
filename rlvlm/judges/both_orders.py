"""Each query asked in both orders: a preference counts only where it does not depend on which side is shown first."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from rlvlm.core.errors import UnsupportedQuestion
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.judges.judge import ContinuousJudge, Generator, Judge
from rlvlm.vlms.chats import Chat

SEPARATOR = "\n\n--- the other order ---\n\n"
"""Between the two texts of one verdict."""


class BothOrders:
    """A judge around another one; twice the price, and no bias towards a side: swapping a query swaps its verdict.

    Probabilities are those of both orders, averaged; the label is what the two answers agree on. Where they disagree,
    or one of them sees no difference, there is no preference. One answer that cannot be read makes the verdict
    invalid, one that did not come makes it failed. Scores have no order and pass through.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    @property
    def stamp(self) -> Stamp:
        """The inner stamp, marked."""
        inner = self._judge.stamp
        return replace(inner, prompt=f"{inner.prompt} both_orders")

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order."""
        both = [one for query in queries for one in (query, query.swapped)]
        verdicts = self._judge.compare(both)
        stamp = self.stamp
        return [_joined(verdicts[i], verdicts[i + 1], stamp) for i in range(0, len(verdicts), 2)]

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order."""
        stamp = self.stamp
        return [replace(score, stamp=stamp) for score in self._judge.score(clips)]

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[str]:
        """The inner judge's reply to each chat.

        Raises:
            UnsupportedQuestion: it cannot write.
        """
        if not isinstance(self._judge, Generator):
            raise UnsupportedQuestion(f"{self._judge.stamp.judge} cannot write text", "choose a chat model")
        return self._judge.generate(chats, max_new_tokens=max_new_tokens, temperature=temperature)

    async def compare_one(self, query: Query) -> Verdict:
        """The verdict on one query, where the inner judge is a `ContinuousJudge`: both orders are asked at once."""
        inner = cast(ContinuousJudge, self._judge)
        straight, swapped = await asyncio.gather(inner.compare_one(query), inner.compare_one(query.swapped))
        return _joined(straight, swapped, self.stamp)

    async def score_one(self, clip: Clip) -> Score:
        """The score of one clip, likewise."""
        return replace(await cast(ContinuousJudge, self._judge).score_one(clip), stamp=self.stamp)

    async def generate_one(self, chat: Chat, *, max_new_tokens: int, temperature: float) -> str:
        """The inner judge's reply to one chat, likewise."""
        inner = cast(ContinuousJudge, self._judge)
        return await inner.generate_one(chat, max_new_tokens=max_new_tokens, temperature=temperature)


def _joined(straight: Verdict, swapped: Verdict, stamp: Stamp) -> Verdict:
    """One verdict on a query, out of one on it and one on the same with its sides exchanged."""
    pair = (straight, swapped)
    statuses = {verdict.status for verdict in pair}
    lost = next((status for status in (Status.FAILED, Status.INVALID) if status in statuses), None)
    label = None
    if straight.label and swapped.label:
        # two answers that name the same place, not the same image, show a bias towards it: no preference
        label = straight.label if straight.label is swapped.label.swapped else Label.TIE
    shares = None
    if straight.probabilities and swapped.probabilities:
        (left, right, tie), (swapped_left, swapped_right, swapped_tie) = straight.probabilities, swapped.probabilities
        # the swapped query's right side is this query's left one
        shares = ((left + swapped_right) / 2, (right + swapped_left) / 2, (tie + swapped_tie) / 2)
    spent = [verdict.usage for verdict in pair if verdict.usage is not None]
    return Verdict(
        status=lost or Status.of(label),
        label=label,
        stamp=stamp,
        probabilities=shares,
        text=straight.text + SEPARATOR + swapped.text,
        latency_s=max(verdict.latency_s for verdict in pair),
        usage=sum(spent[1:], start=spent[0]) if spent else None,
    )
