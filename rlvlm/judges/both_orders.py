"""Each query asked in both orders: a preference counts only where it does not depend on which side is shown first."""

from collections.abc import Sequence
from dataclasses import replace

from rlvlm.errors import UnsupportedQuestion
from rlvlm.judges.judge import Generator, Judge
from rlvlm.types.judging import Clip, Label, Query, Score, Stamp, Status, Usage, Verdict
from rlvlm.vlms.chats import Chat

SEPARATOR = "\n\n--- the other order ---\n\n"
"""Between the two texts of one verdict."""
_SWAPPED = {Label.LEFT: Label.RIGHT, Label.RIGHT: Label.LEFT, Label.TIE: Label.TIE, None: None}


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
        both = [one for query in queries for one in (query, replace(query, left=query.right, right=query.left))]
        verdicts = self._judge.compare(both)
        stamp = self.stamp
        return [_joined(verdicts[i], _swapped(verdicts[i + 1]), stamp) for i in range(0, len(verdicts), 2)]

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


def _swapped(verdict: Verdict) -> Verdict:
    """The verdict on a swapped query, as one on the query itself."""
    shares = verdict.probabilities
    return replace(
        verdict,
        label=_SWAPPED[verdict.label],
        probabilities=None if shares is None else (shares[1], shares[0], shares[2]),
    )


def _joined(straight: Verdict, swapped: Verdict, stamp: Stamp) -> Verdict:
    """One verdict out of two on the same query."""
    pair = (straight, swapped)
    label = straight.label if straight.label is swapped.label else Label.TIE
    statuses = {verdict.status for verdict in pair}
    lost = next((status for status in (Status.FAILED, Status.INVALID) if status in statuses), None)
    if lost:
        label = None
    status = lost or (Status.NO_PREFERENCE if label is Label.TIE else Status.OK)
    return Verdict(
        status=status,
        label=label,
        stamp=stamp,
        probabilities=_mean(pair),
        text=straight.text + SEPARATOR + swapped.text,
        latency_s=max(verdict.latency_s for verdict in pair),
        usage=_sum(pair),
    )


def _mean(pair: tuple[Verdict, Verdict]) -> tuple[float, float, float] | None:
    one, other = pair[0].probabilities, pair[1].probabilities
    if one is None or other is None:
        return None
    left, right, tie = ((a + b) / 2 for a, b in zip(one, other, strict=True))
    return left, right, tie


def _sum(pair: tuple[Verdict, Verdict]) -> Usage | None:
    spent = [verdict.usage for verdict in pair if verdict.usage is not None]
    if not spent:
        return None
    costs = [usage.cost_usd for usage in spent]
    return Usage(
        tokens_in=sum(usage.tokens_in for usage in spent),
        tokens_out=sum(usage.tokens_out for usage in spent),
        cost_usd=None if None in costs else sum(cost for cost in costs if cost is not None),
    )
