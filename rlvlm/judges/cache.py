"""Judges that answer from a label store: `CachedJudge` asks each question once, `StoredJudge` never asks."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar

from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.judges.goal_image import GoalImageJudge
from rlvlm.judges.judge import Judge, TellingJudge, questions_at_once
from rlvlm.labels.records import Images, Question, answer_key, describe
from rlvlm.labels.store import LabelStore

Item = TypeVar("Item", Query, Clip)
Answer = TypeVar("Answer", Verdict, Score)


class CachedJudge:
    """Answers repeated questions from a label store, and asks the judge the rest.

    Failed answers are asked again. All others outlive the process and are shared with every run that uses the store:
    they are written to disk, with their images, before they are returned; those of a `TellingJudge` one by one as they
    come, so that a killed process has lost none that was paid for. Several threads may ask, if the judge allows it:
    while one of them waits for an answer, the others wait with it and do not ask again.

    Args:
        judge: answers what is not in the store yet.
        store: keeps the answers.
        show: called after every call with `hits` and `misses`.
    """

    def __init__(self, judge: Judge, store: LabelStore, show: Callable[[int, int], None] | None = None) -> None:
        self._judge = judge
        self.store = store
        self._show = show
        self._lock = Lock()
        self._asked: dict[str, Future[Verdict | Score]] = {}
        """Answers that some thread waits for, by key."""
        self.hits = 0
        """Questions answered from the store."""
        self.misses = 0
        """Questions put to the judge."""

    @property
    def stamp(self) -> Stamp:
        return self._judge.stamp

    @property
    def at_once(self) -> int:
        """See `judge.questions_at_once`."""
        return questions_at_once(self._judge)

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        return self._answer(queries, self._judge.compare)

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        return self._answer(clips, self._judge.score)

    def _answer(self, items: Sequence[Item], ask: Callable[[Sequence[Item]], list[Answer]]) -> list[Answer]:
        if not items:
            return []
        stamp, store = self.stamp, self.store
        # the key is a hash of goal and pixels: the same on every run and machine
        described = [describe(item) for item in items]
        keys = [answer_key(question.id, stamp) for question, _ in described]
        with self._lock:
            store.refresh()  # other runs add to the same store meanwhile
            known: dict[str, Any] = {key: store.find(key) for key in dict.fromkeys(keys)}
            # a question that comes twice in one call, or that another thread has just asked, is asked once
            unknown = {key: place for place, key in enumerate(keys) if known[key] is None and key not in self._asked}
            others = {key: self._asked[key] for key, answer in known.items() if answer is None and key not in unknown}
            self._asked |= {key: Future() for key in unknown}
            self.misses += len(unknown)
            self.hits += len(keys) - len(unknown)
            hits, misses = self.hits, self.misses
        if unknown:
            known |= self._ask_new({key: (items[place], described[place]) for key, place in unknown.items()}, ask)
        known |= {key: answer.result() for key, answer in others.items()}
        if self._show is not None:
            self._show(hits, misses)
        return [known[key] for key in keys]

    def _ask_new(
        self, new: Mapping[str, tuple[Any, tuple[Question, Images]]], ask: Callable[[Sequence[Any]], list[Any]]
    ) -> dict[str, Any]:
        """Asks the judge and returns its answers by key, once they are on disk. Threads that wait for them get the
        same, or the same error.
        """
        asked, judge = [item for item, _ in new.values()], self._judge
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="label-store") as pool:  # writes while the judge thinks
                keeper = _Keeper(self.store, pool, [described for _, described in new.values()])
                given = judge.tell_each(asked, keeper.keep) if isinstance(judge, TellingJudge) else ask(asked)
                fresh = dict(zip(new, keeper.finish(given), strict=True))
        except BaseException as error:
            with self._lock:
                for key in new:
                    self._asked.pop(key).set_exception(error)
            raise
        with self._lock:
            for key, answer in fresh.items():
                self._asked.pop(key).set_result(answer)
        return fresh


class _Keeper:
    """Writes the answers of one call in a thread of its own, behind the images of their questions.

    Args:
        store: takes both.
        pool: has one thread, so that all is written in order.
        described: questions of the call, each with its images.
    """

    def __init__(self, store: LabelStore, pool: Executor, described: Sequence[tuple[Question, Images]]) -> None:
        self._store = store
        self._pool = pool
        self._questions = [question for question, _ in described]
        # an answer whose images are missing could not be inspected later
        self._images = pool.submit(store.keep_images, [image for _, images in described for image in images])
        self._kept: dict[int, Verdict | Score] = {}
        self._waiting: SimpleQueue[int] = SimpleQueue()
        self._writes: list[Future[None]] = []

    def keep(self, index: int, answer: Verdict | Score) -> None:
        """Writes the answer to the question with this index, soon; from any thread."""
        self._kept[index] = replace(answer, question=self._questions[index].id)
        self._waiting.put(index)
        self._writes.append(self._pool.submit(self._write))

    def finish(self, answers: Sequence[Verdict | Score]) -> list[Verdict | Score]:
        """Returns the answers [N] as they were kept, once all are on disk, those that nobody told as well.

        Raises:
            OSError: the disk cannot be written.
        """
        for index, answer in enumerate(answers):
            if index not in self._kept:
                self.keep(index, answer)
        # on disk before they are returned: a crash must not lose answers that were already learned from
        for write in self._writes:
            write.result()
        return [self._kept[index] for index in range(len(answers))]

    def _write(self) -> None:
        self._images.result()
        # all that came during the last write, in one go: each is waited for until it is on disk
        indices = [self._waiting.get() for _ in range(self._waiting.qsize())]
        self._store.add_answers([(self._questions[index], self._kept[index]) for index in indices])


def without_memory(judge: Judge) -> Judge:
    """Returns a judge that answers repeated questions anew: the one inside a `CachedJudge`, or `judge` itself."""
    if isinstance(judge, GoalImageJudge):
        return replace(judge, judge=without_memory(judge.judge))
    return judge._judge if isinstance(judge, CachedJudge) else judge


class StoredJudge:
    """Replays one judge's stored answers under that judge's own stamp, which `pick_stamp` finds.

    A question without a stored answer fails, and its text names the question's key.
    """

    def __init__(self, store: LabelStore, stamp: Stamp) -> None:
        self._store = store
        self._stamp = stamp

    @property
    def stamp(self) -> Stamp:
        return self._stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """Returns one verdict per query, in order.

        Raises:
            JudgeUnavailable: the store has an answer to none of them.
        """
        return self._find(queries, lambda text: Verdict(status=Status.FAILED, label=None, stamp=self._stamp, text=text))

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        return self._find(clips, lambda text: Score(status=Status.FAILED, value=None, stamp=self._stamp, text=text))

    def _find(self, items: Sequence[Query | Clip], failed: Callable[[str], Answer]) -> list[Answer]:
        """Returns the stored answers, with `failed(reason)` in place of those that are missing or of another kind."""
        answers: list[Answer] = []
        for item in items:
            key = answer_key(describe(item)[0].id, self._stamp)
            missing, known = failed(f"the store has no answer under key {key}"), self._store.find(key)
            answers.append(known if isinstance(known, type(missing)) else missing)
        if answers and all(answer.status is Status.FAILED for answer in answers):
            raise JudgeUnavailable(
                f"{self._store.folder} has none of {len(answers)} answers that are wanted: {answers[0].text}",
                "stored answers fit only the same images, to the pixel, and the same goal: use the task, "
                "judge.image_px and seed of the run that filled the store",
            )
        return answers


def pick_stamp(store: LabelStore, judge: str = "", prompt: str = "") -> Stamp:
    """Returns the stamp of the only judge in the store whose name contains `judge` and whose prompt contains `prompt`.

    Raises:
        UsageError: no judge fits, or several do.
    """
    stamps = store.stamps()
    # parts of names suffice, since full stamps are long and hold digests
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
