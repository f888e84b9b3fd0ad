"""The protocol every judge shares, local or served: lists in, lists out, same order."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rlvlm.core.judging import Clip, Query, Score, Stamp, Verdict
from rlvlm.vlms.chats import Chat


@runtime_checkable
class Judge(Protocol):
    """A frozen model that looks at images and answers.

    Members: `chat.ChatJudge` (any chat VLM), the judges of `backends`, `votes.BothOrders`, `cache.CachedJudge`
    (remembers), `serving.client.ServedJudge` (by name on Ray Serve), `testing.FakeJudge`. One answer that cannot be
    read is a verdict with status invalid, one that did not come is failed; only a judge that answers nothing at all
    raises `JudgeUnavailable`.
    """

    @property
    def stamp(self) -> Stamp:
        """Where the answers come from; part of every cache key."""
        ...

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order."""
        ...

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order."""
        ...


@runtime_checkable
class Generator(Protocol):
    """A judge that can also just write: the second, optional protocol of chat models."""

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[str]:
        """The model's reply to each chat, in order.

        Args:
            chats: in the Qwen message format of `prompts`, images as `[H, W, 3]` uint8 arrays.
            max_new_tokens: longest reply, in tokens, >= 1.
            temperature: 0 is greedy, above it the reply is sampled.

        Raises:
            UnsupportedQuestion: the judge cannot write, or a chat is not in that format; says which rule it breaks.
            JudgeUnavailable: the model broke on every one of them.
        """
        ...


class ContinuousJudge(Judge, Protocol):
    """A judge whose engine takes questions as they come (`JudgeConfig.batches_itself`): the third, optional protocol.

    Many of these coroutines are under way at once, on any event loop; one that is cancelled is computed no further.
    Each raises JudgeUnavailable where the engine is dead.
    """

    async def compare_one(self, query: Query) -> Verdict:
        """The verdict on one query."""
        ...

    async def score_one(self, clip: Clip) -> Score:
        """The score of one clip."""
        ...

    async def generate_one(self, chat: Chat, *, max_new_tokens: int, temperature: float) -> str:
        """The reply to one chat; raises as `Generator.generate` does."""
        ...
