"""Judges that answer from a label store: one that asks each question once, and one that asks nobody at all."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.judges.judge import Judge
from rlvlm.labels.records import Pictures, Question, answer_key, describe
from rlvlm.labels.store import LabelStore

Item = TypeVar("Item", Query, Clip)
Answer = TypeVar("Answer", Verdict, Score)

_REASON = "the store has no answer under key "


class CachedJudge:
    """Answers from memory what was asked before, and asks the rest.

    Failed answers are never remembered, so they are asked again. With a store, answers outlive the process and are
    shared with every other run that uses it: they are on the disk before they are handed out, with their images.

    Args:
        judge: is asked what is not known yet.
        store: where answers are kept. None remembers within this process alone.
    """

    def __init__(self, judge: Judge, store: LabelStore | None = None) -> None:
        self._judge = judge
        self._store = store
        self._known: dict[str, Verdict | Score] = {}
        self.hits = 0
        """Questions answered from memory or the store."""
        self.misses = 0
        """Questions put to the judge."""

    @property
    def stamp(self) -> Stamp:
        """The stamp of the judge inside."""
        return self._judge.stamp

    @property
    def asked_anew(self) -> Judge:
        """The judge inside."""
        return self._judge

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order; a remembered one is as it was given."""
        return self._answer(queries, self._judge.compare)

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order; a remembered one is as it was given."""
        return self._answer(clips, self._judge.score)

    def _answer(self, items: Sequence[Item], ask: Callable[[Sequence[Item]], list[Answer]]) -> list[Answer]:
        if not items:
            return []
        stamp = self.stamp
        described = [describe(item) for item in items]
        keys = [answer_key(question.id, stamp) for question, _ in described]
        found = self._remember(keys)
        unknown = {key: place for place, key in enumerate(keys) if key not in found}
        if unknown:
            asked = [items[place] for place in unknown.values()]
            fresh = self._ask(asked, [described[place] for place in unknown.values()], ask)
            found |= dict(zip(unknown, fresh, strict=True))
        self.misses += len(unknown)
        self.hits += len(keys) - len(unknown)
        return [found[key] for key in keys]

    def _remember(self, keys: Sequence[str]) -> dict[str, Any]:
        """What is known of `keys`: verdicts or scores, as the keys say."""
        if self._store is None:
            return {key: self._known[key] for key in keys if key in self._known}
        self._store.refresh()
        answers = {key: self._store.find(key) for key in dict.fromkeys(keys)}
        return {key: answer for key, answer in answers.items() if answer is not None}

    def _ask(
        self,
        items: Sequence[Item],
        described: Sequence[tuple[Question, Pictures]],
        ask: Callable[[Sequence[Item]], list[Answer]],
    ) -> list[Answer]:
        """The judge's answers, kept before they are handed out; images are written while it thinks."""
        questions = [question for question, _ in described]
        if self._store is None:
            answers = _named(ask(items), questions)
            for question, answer in zip(questions, answers, strict=True):
                if answer.status is not Status.FAILED:
                    self._known[answer_key(question.id, answer.stamp)] = answer
            return answers
        with ThreadPoolExecutor(1, thread_name_prefix="label-pictures") as pool:
            images = [image for _, shown in described for image in shown]
            kept = pool.submit(self._store.keep_pictures, images)
            answers = _named(ask(items), questions)
            kept.result()
        self._store.add_answers(list(zip(questions, answers, strict=True)))
        return answers


def _named(answers: Sequence[Answer], questions: Sequence[Question]) -> list[Answer]:
    """The answers, each with the content address of its question."""
    return [replace(answer, question=question.id) for answer, question in zip(answers, questions, strict=True)]


class StoredJudge:
    """What one judge once answered, under that judge's own stamp.

    A question that it was never asked is a failed answer that names the question's key, never a guess.

    Args:
        store: with the answers.
        stamp: whose answers; `pick_stamp` finds it.
    """

    def __init__(self, store: LabelStore, stamp: Stamp) -> None:
        self._store = store
        self._stamp = stamp

    @property
    def stamp(self) -> Stamp:
        """Of the judge whose answers these are."""
        return self._stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order.

        Raises:
            JudgeUnavailable: the store knows not one of them.
        """
        verdicts = []
        for query in queries:
            key, answer = self._find(query)
            known = answer if isinstance(answer, Verdict) else None
            verdicts.append(known or Verdict(status=Status.FAILED, label=None, stamp=self._stamp, text=_REASON + key))
        self._check(verdicts)
        return verdicts

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order.

        Raises:
            JudgeUnavailable: the store knows not one of them.
        """
        scores = []
        for clip in clips:
            key, answer = self._find(clip)
            known = answer if isinstance(answer, Score) else None
            scores.append(known or Score(status=Status.FAILED, value=None, stamp=self._stamp, text=_REASON + key))
        self._check(scores)
        return scores

    def _find(self, item: Query | Clip) -> tuple[str, Verdict | Score | None]:
        """A question's key, and its answer where there is one."""
        key = answer_key(describe(item)[0].id, self._stamp)
        return key, self._store.find(key)

    def _check(self, answers: Sequence[Verdict | Score]) -> None:
        if answers and all(answer.status is Status.FAILED for answer in answers):
            raise JudgeUnavailable(
                f"{self._store.folder} has none of {len(answers)} answers that are wanted: {answers[0].text}",
                "stored answers fit only the same images, to the pixel, and the same goal: use the task, "
                "judge.picture_px and seed of the run that filled the store",
            )


def pick_stamp(store: LabelStore, judge: str = "", prompt: str = "") -> Stamp:
    """The stamp of the one judge in the store whose name and prompt hold these words.

    Raises:
        UsageError: there is none, or several to choose from.
    """
    stamps = store.stamps()
    fitting = [stamp for stamp in stamps if judge in stamp.judge and prompt in stamp.prompt]
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(
        f"{stamp.judge} {stamp.prompt} ({stamp.decoding}): {count:,} answers" for stamp, count in stamps.most_common(8)
    )
    what = "no judge" if not fitting else f"{len(fitting)} judges"
    raise UsageError(
        f"{store.folder} has {what} like {judge!r} {prompt!r}; it has {there or 'no answers at all'}",
        "name one: --judge.cached.judge NAME --judge.cached.prompt NAME; a part of the name will do",
    )
