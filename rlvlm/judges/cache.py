"""A judge that remembers: the same pictures, goal and stamp are asked once. Wraps any judge, local or served."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from rlvlm.judges.judge import Judge
from rlvlm.labels.records import Pictures, Question, answer_key, describe
from rlvlm.labels.store import LabelStore
from rlvlm.types.judging import Clip, Query, Score, Stamp, Status, Verdict

Item = TypeVar("Item", Query, Clip)
Answer = TypeVar("Answer", Verdict, Score)


class CachedJudge:
    """Answers from memory what was asked before, and asks the rest.

    Failed answers are never remembered, so they are asked again. With a store, answers outlive the process and are
    shared with every other run that uses it: they are on the disk before they are handed out, with their pictures.

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
        """The judge's answers, kept before they are handed out; pictures are written while it thinks."""
        questions = [question for question, _ in described]
        if self._store is None:
            answers = _named(ask(items), questions)
            for question, answer in zip(questions, answers, strict=True):
                if answer.status is not Status.FAILED:
                    self._known[answer_key(question.id, answer.stamp)] = answer
            return answers
        with ThreadPoolExecutor(1, thread_name_prefix="label-pictures") as pool:
            pictures = [picture for _, shown in described for picture in shown]
            kept = pool.submit(self._store.keep_pictures, pictures)
            answers = _named(ask(items), questions)
            kept.result()
        self._store.add_answers(list(zip(questions, answers, strict=True)))
        return answers


def _named(answers: Sequence[Answer], questions: Sequence[Question]) -> list[Answer]:
    """The answers, each with the content address of its question."""
    return [replace(answer, question=question.id) for answer, question in zip(answers, questions, strict=True)]
