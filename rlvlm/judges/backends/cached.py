"""Backend cached: answers that a store holds, and no others. Nothing is loaded and nobody is asked."""

from collections.abc import Sequence
from pathlib import Path

from rlvlm.errors import JudgeUnavailable, UsageError
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.records import answer_key, describe
from rlvlm.labels.store import LabelStore, open_store
from rlvlm.types.judging import Clip, Query, Score, Stamp, Status, Verdict

_REASON = "the store has no answer under key "


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
                "stored answers fit only the same pictures, to the pixel, and the same goal: use the task, "
                "judge.picture_px and seed of the run that filled the store",
            )


def build(config: JudgeConfig) -> StoredJudge:
    """The judge that `config.cached` describes.

    Raises:
        JudgeUnavailable: the store is none, or does not hold exactly one such judge.
    """
    try:
        store = open_store(Path(config.cached.store).expanduser())
        return StoredJudge(store, pick_stamp(store, config.cached.judge, config.cached.prompt))
    except UsageError as error:
        raise JudgeUnavailable(str(error), error.fix) from error


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
