"""Votes: one judge asked in both orders, or several judges, models or prompts."""

import asyncio
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np

from rlvlm.core.errors import UnsupportedQuestion
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Usage, Verdict
from rlvlm.judges.judge import (
    ChatTask,
    ContinuousJudge,
    Generator,
    Judge,
    Tell,
    TellingJudge,
    questions_at_once,
)
from rlvlm.vlms.chats import Chat

SEPARATOR = "\n\n--- the other answer ---\n\n"
"""Separator between the texts of one verdict."""


class BothOrders:
    """Asks another judge in both orders, at twice the price and without bias to a side: swapping a query swaps its
    verdict.

    Probabilities are averaged over both orders; the label is the one that the two answers agree on. If they disagree,
    or one of them sees no difference, there is no preference. One answer that cannot be read makes the verdict invalid,
    a missing one makes it failed. Scores have no order and pass through.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        # asked one by one only if the inner judge's config `batches_itself`
        self._continuous = cast(ContinuousJudge, judge)

    @property
    def stamp(self) -> Stamp:
        inner = self._judge.stamp
        return replace(inner, prompt=f"{inner.prompt} both_orders")

    @property
    def at_once(self) -> int:
        """See `judge.questions_at_once`."""
        return questions_at_once(self._judge)

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        return self.tell_each(queries, lambda *_: None)

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        return self.tell_each(clips, lambda *_: None)

    def tell_each(self, items: Sequence[Query] | Sequence[Clip], tell: Tell) -> list[Any]:
        """Returns the answers of `compare` or `score`, in order; see `TellingJudge`. A verdict is told once both orders
        are answered.
        """
        stamp, inner = self.stamp, self._judge
        # side by side, so that both orders of a query share a batch and fail together
        asked: list[Any] = [
            order for item in items for order in ((item, item.swapped) if isinstance(item, Query) else (item,))
        ]
        per_item = len(asked) // max(1, len(items))
        given: dict[int, Verdict | Score] = {}

        def joined(answers: Sequence[Any]) -> Verdict | Score:
            if isinstance(answers[0], Score):
                return replace(answers[0], stamp=stamp)
            return _voted((answers[0], _unswapped(answers[1])), stamp)

        def tell_joined(place: int, answer: Verdict | Score) -> None:
            given[place] = answer
            own = range(place - place % per_item, place - place % per_item + per_item)
            if all(other in given for other in own):
                tell(own[0] // per_item, joined([given[other] for other in own]))

        if isinstance(inner, TellingJudge):
            answers = inner.tell_each(asked, tell_joined)
        else:
            answers = inner.compare(asked) if per_item == 2 else inner.score(asked)
        return [joined(answers[place : place + per_item]) for place in range(0, len(answers), max(1, per_item))]

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[str]:
        """Returns the inner judge's reply to each chat.

        Raises:
            UnsupportedQuestion: the inner judge cannot write.
        """
        if not isinstance(self._judge, Generator):
            raise UnsupportedQuestion(f"{self._judge.stamp.judge} cannot write text", "choose a chat model")
        return self._judge.generate(chats, max_new_tokens=max_new_tokens, temperature=temperature)

    async def answer(self, item: Query | Clip | ChatTask) -> Any:
        """Returns the answer to one item if the inner judge is a `ContinuousJudge`: both orders are asked at once."""
        inner = self._continuous
        if isinstance(item, Query):
            straight, swapped = await asyncio.gather(inner.answer(item), inner.answer(item.swapped))
            return _voted((straight, _unswapped(swapped)), self.stamp)
        answer = await inner.answer(item)
        return replace(answer, stamp=self.stamp) if isinstance(answer, Score) else answer


class Committee:
    """Several judges as one, for `--judge.backend my_file:FUNCTION`: other models, or one model under several prompts.

    A comparison's label is the one that more than half of the members give: two must agree, of three one may err.
    Without such a label there is no preference, unless members failed or could not be read. A score is the mean over
    the members that gave one. The price is the sum over the members.

    Args:
        members: judges, asked one after the other, >= 2.
    """

    def __init__(self, members: Sequence[Judge]) -> None:
        if len(members) < 2:
            raise ValueError(f"a committee has two members or more, got {len(members)}")
        self._members = tuple(members)

    @property
    def stamp(self) -> Stamp:
        stamps = [member.stamp for member in self._members]
        return Stamp(
            **{
                # a value that all share is written once
                field.name: " + ".join(dict.fromkeys(str(getattr(stamp, field.name)) for stamp in stamps))
                for field in fields(Stamp)
            }
        )

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        stamp = self.stamp
        return [
            _voted(verdicts, stamp)
            for verdicts in zip(*(member.compare(queries) for member in self._members), strict=True)
        ]

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        stamp = self.stamp
        scores = []
        for answers in zip(*(member.score(clips) for member in self._members), strict=True):
            # a missing answer does not count as a score of 0
            values = [answer.value for answer in answers if answer.value is not None]
            scores.append(
                Score(
                    status=Status.OK if values else _lost(answers),
                    value=sum(values) / len(values) if values else None,
                    stamp=stamp,
                    text=SEPARATOR.join(answer.text for answer in answers),
                    latency_s=sum(answer.latency_s for answer in answers),
                    usage=_spent(answers),
                )
            )
        return scores


def _voted(verdicts: Sequence[Verdict], stamp: Stamp) -> Verdict:
    """Combines several verdicts on a query into one."""
    labels = [verdict.label for verdict in verdicts]
    label = next((candidate for candidate in Label if 2 * labels.count(candidate) > len(labels)), None)
    if label is None and all(labels):  # all were read, and they do not agree
        label = Label.TIE
    # a mean over some votes would not describe the label that all of them gave
    shares = [verdict.probabilities for verdict in verdicts if verdict.probabilities is not None]
    return Verdict(
        status=Status.of(label) if label else _lost(verdicts),
        label=label,
        stamp=stamp,
        probabilities=tuple(np.mean(shares, axis=0).tolist()) if len(shares) == len(verdicts) else None,
        text=SEPARATOR.join(verdict.text for verdict in verdicts),
        latency_s=max(verdict.latency_s for verdict in verdicts),
        usage=_spent(verdicts),
        votes=tuple(str(label or "") for label in labels),
    )


def _lost(answers: Sequence[Verdict | Score]) -> Status:
    """Returns why there is no answer: a missing answer outweighs an unreadable one."""
    return Status.FAILED if any(answer.status is Status.FAILED for answer in answers) else Status.INVALID


def _spent(answers: Sequence[Verdict | Score]) -> Usage | None:
    spent = [answer.usage for answer in answers if answer.usage is not None]
    return sum(spent[1:], start=spent[0]) if spent else None


def _unswapped(verdict: Verdict) -> Verdict:
    """Returns a verdict on a swapped query as one on the query itself."""
    shares = verdict.probabilities
    return replace(
        verdict,
        label=verdict.label and verdict.label.swapped,
        probabilities=shares and (shares[1], shares[0], shares[2]),
    )
