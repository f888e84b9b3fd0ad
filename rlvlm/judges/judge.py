"""Protocol that all judges share, local or served: lists in, lists out, same order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rlvlm.core.judging import Clip, Query, Score, Stamp, Verdict
from rlvlm.labels.records import Question
from rlvlm.vlms.chats import Chat


@runtime_checkable
class Judge(Protocol):
    """A frozen model that answers questions about images.

    Implementations: `chat.ChatJudge` (any chat VLM), `numeric.NumericJudge`, `votes.BothOrders`, `cache.CachedJudge`
    (remembers), `serving.client.ServedJudge` (by name on Ray Serve), `testing.FakeJudge`. A single answer that cannot
    be read is a verdict with status invalid, a missing one has failed; `JudgeUnavailable` is raised only if every
    question fails.
    """

    @property
    def stamp(self) -> Stamp:
        """Stamp of the answers; part of every cache key."""
        ...

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """Returns one verdict per query, in order."""
        ...

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """Returns one score per clip, in order."""
        ...


MakeJudge = Callable[[], Judge]
"""Makes a judge, or its client, in the process that asks it; pickles."""


@runtime_checkable
class Generator(Protocol):
    """A judge that can also write text: the second, optional protocol, for chat models."""

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[str]:
        """Returns the model's reply to each chat, in order.

        Args:
            chats: chats in the Qwen message format of `prompts`, images as `[H, W, 3]` uint8 arrays.
            max_new_tokens: longest reply, in tokens, >= 1.
            temperature: sampling temperature; 0 is greedy.

        Raises:
            UnsupportedQuestion: the judge cannot write, or a chat is not in that format; says which rule it breaks.
            JudgeUnavailable: the model failed on every chat.
        """
        ...


def questions_at_once(judge: object) -> int:
    """Returns the number of questions that keep a judge busy, as its optional attribute `at_once` says: several threads
    may then ask it. 0: it is asked from one thread, one call after the other.
    """
    return getattr(judge, "at_once", 0)


Tell = Callable[[int, Verdict | Score], None]
"""Takes the index of an item and its answer, in any thread."""


@runtime_checkable
class TellingJudge(Protocol):
    """A judge that tells each answer as soon as it has it, for callers that keep what was paid for: an optional
    protocol.
    """

    def tell_each(self, items: Sequence[Query] | Sequence[Clip], tell: Tell) -> list[Any]:
        """Returns what `compare` does of queries and `score` of clips, and calls `tell` for each answer before.

        Raises:
            JudgeUnavailable: as they do; answers that were told stand.
        """
        ...


class PatientJudge(Judge, Protocol):
    """People as a judge: questions may wait for hours, and answers are found later."""

    def ask(self, items: Sequence[Query | Clip]) -> None:
        """Posts questions and returns at once.

        Raises:
            OSError: the disk cannot be written.
        """
        ...

    def find(self, questions: Sequence[Question]) -> list[Verdict | None]:
        """Returns the verdicts on earlier comparisons, in order; None for those that are not answered yet."""
        ...

    def said(self, clips: Sequence[Clip]) -> list[Score | None]:
        """Returns the scores of earlier clips, in order, also if they may change; None without an answer."""
        ...


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A chat to which a `ContinuousJudge` writes a reply; see `Generator.generate`."""

    chat: Chat
    max_new_tokens: int
    temperature: float


class ContinuousJudge(Judge, Protocol):
    """A judge whose engine takes items as they come (`JudgeConfig.batches_itself`): the third, optional protocol."""

    async def answer(self, item: Query | Clip | ChatTask) -> Any:
        """Returns the verdict on a query, the score of a clip, or the reply to a chat, as the other two protocols do.

        Many of these coroutines run at once, on any event loop; cancelling one stops its computation.

        Raises:
            JudgeUnavailable: the engine is dead.
        """
        ...
