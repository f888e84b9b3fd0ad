"""Many questions to one judge: drawn block by block, and asked side by side where several threads may ask it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlvlm.judges.judge import questions_at_once

ASKED_AT_ONCE = 64
"""Questions that are drawn and held at once: about 150 MB of clips of eight images."""
MAX_BYTES_UNDER_WAY = 2**30
"""Bytes of drawn images above which no further block is drawn before one is answered."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """Questions that are drawn and not asked yet."""

    ask: Callable[[], T]
    num_bytes: int = 0
    """Bytes of their images."""


def callers_at_once(judge: object) -> int:
    """Returns the number of threads that each ask about a block of `ASKED_AT_ONCE` questions at a time: one more than
    the judge can hold, so that it has the next block while the last questions of one are answered; 1 if one alone may.
    """
    return 1 + -(-questions_at_once(judge) // ASKED_AT_ONCE)


def side_by_side(judge: object, work: Iterable[Work[T]]) -> Iterator[T]:
    """Yields the answers to all of `work`, in order. Of a judge that may be asked from several threads as much is under
    way as keeps it busy, within `MAX_BYTES_UNDER_WAY`; another one is asked here, when the next answer is wanted.

    A caller that closes this generator waits for what is under way: it was paid for.
    """
    width = callers_at_once(judge)
    if width == 1:
        yield from (each.ask() for each in work)
        return
    under_way: deque[tuple[Future[T], int]] = deque()
    with ThreadPoolExecutor(width, thread_name_prefix="asking") as pool:
        for each in work:
            under_way.append((pool.submit(each.ask), each.num_bytes))
            del each  # its images are not needed once they are answered
            while under_way:
                busy = [future for future, _ in under_way if not future.done()]
                if under_way[0][0].done() or sum(size for _, size in under_way) > MAX_BYTES_UNDER_WAY:
                    yield under_way.popleft()[0].result()
                elif len(busy) >= width:
                    wait(busy, return_when=FIRST_COMPLETED)  # of any: one slow answer does not hold up the others
                else:
                    break
        while under_way:
            yield under_way.popleft()[0].result()
