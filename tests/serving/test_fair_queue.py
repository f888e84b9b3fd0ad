import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rlvlm.serving.fair_queue import FairQueue


class Model:
    """Answers each question with its negative once it is let go, and notes who came and who was cancelled."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.cancelled: list[int] = []
        self.let_go: set[int] = set()
        self.is_open = True

    @property
    def begun(self) -> list[int]:
        return [item for batch in self.batches for item in batch]

    async def ask(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        try:
            while not (self.is_open or set(items) <= self.let_go):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += items
            raise
        if 13 in items:
            raise ValueError("13")
        return [-item for item in items]


async def settle() -> None:
    """Lets everything happen that can, an incomplete batch's wait included."""
    await asyncio.sleep(0.02)


def run(test: Callable[[Model], Awaitable[Any]]) -> None:
    asyncio.run(asyncio.wait_for(test(Model()), 10))  # type: ignore[arg-type]


def in_batches(model: Model, size: int = 4) -> FairQueue:
    return FairQueue(model.ask, batch_size=size, wait_s=0.005)


def one_by_one(model: Model, slots: int = 2) -> FairQueue:
    return FairQueue(model.ask, batch_size=1, concurrency=slots)


def put(queue: FairQueue, *items: int, **who: str) -> "asyncio.Task[list[Any]]":
    return asyncio.create_task(queue.put(items, **who))


def test_the_run_that_got_least_is_next():
    # by hand: a batch holds 4, so the first is A A, already at work when B arrives; then B and A share
    async def test(model: Model) -> None:
        queue = in_batches(model)
        model.is_open = False
        flood = [put(queue, n, n + 1, run="A") for n in (1, 3)]
        await settle()
        flood += [put(queue, n, n + 1, run="A") for n in (5, 7, 9)]
        await asyncio.sleep(0)
        other = put(queue, 100, 101, run="B")
        await settle()
        model.is_open = True
        assert await other == [-100, -101]
        assert [await task for task in flood] == [[-1, -2], [-3, -4], [-5, -6], [-7, -8], [-9, -10]]
        assert [sorted(batch) for batch in model.batches[:2]] == [[1, 2, 3, 4], [5, 6, 100, 101]]

    run(test)


@pytest.mark.parametrize("make", [lambda model: in_batches(model, 2), lambda model: one_by_one(model, 2)])
def test_a_flood_of_ten_to_one_leaves_the_other_half(make):
    async def test(model: Model) -> None:
        queue = make(model)
        model.is_open = False
        tasks = [put(queue, 1, run="flood") for _ in range(100)]
        await asyncio.sleep(0)
        tasks += [put(queue, 2, run="calm") for _ in range(10)]
        await settle()
        model.is_open = True
        await asyncio.gather(*tasks)
        assert model.begun[:24].count(2) == 10, model.begun[:24]

    run(test)


def test_an_idle_caller_saves_up_no_share():
    async def test(model: Model) -> None:
        queue = in_batches(model, 1)
        await asyncio.gather(*(put(queue, 1, run="early") for _ in range(5)))
        model.is_open = False
        tasks = [put(queue, 1, run="early") for _ in range(6)]
        await settle()
        tasks += [put(queue, 2, run="late") for _ in range(6)]
        await settle()
        model.is_open = True
        await asyncio.gather(*tasks)
        last = model.begun[-11:]
        assert abs(last[:8].count(2) - last[:8].count(1)) <= 2, last

    run(test)


def test_requests_are_never_cut_in_batches():
    async def test(model: Model) -> None:
        queue = in_batches(model)
        await asyncio.gather(*(put(queue, n, n, n) for n in range(3)))
        assert model.batches == [[0] * 3, [1] * 3, [2] * 3]
        assert await queue.put(range(20, 30)) == [-n for n in range(20, 30)], "larger than a batch: alone"
        assert await queue.put([]) == []

    run(test)


def test_one_by_one_a_question_enters_as_soon_as_any_other_is_answered():
    # by hand: two slots; 1 and 2 enter, 3 waits; when 2 is answered 3 enters although 1 is still at work
    async def test(model: Model) -> None:
        queue, model.is_open = one_by_one(model), False
        asked = put(queue, 1, 2, 3)
        await settle()
        assert model.begun == [1, 2] and queue.num_waiting == 1
        model.let_go.add(2)
        await settle()
        assert model.begun == [1, 2, 3] and not asked.done()
        model.let_go |= {1, 3}
        assert await asked == [-1, -2, -3]

    run(test)


@pytest.mark.parametrize("make", [in_batches, one_by_one])
def test_a_request_sent_twice_is_computed_once(make):
    async def test(model: Model) -> None:
        queue, model.is_open = make(model), False
        first, again = put(queue, 1, 2, key="k"), put(queue, 1, 2, key="k")
        await settle()
        first.cancel()  # its caller gave up; the other still waits
        await settle()
        model.is_open = True
        assert await again == [-1, -2] and await queue.put([1, 2], key="k") == [-1, -2]
        assert sorted(model.begun) == [1, 2] and model.cancelled == [] and queue.num_joined == 2

    run(test)


def test_a_repeated_question_joins_the_abandoned_batch_in_progress():
    async def test(model: Model) -> None:
        queue, model.is_open = in_batches(model), False
        first = put(queue, 1, 2, key="k")
        await settle()
        first.cancel()
        again = put(queue, 1, 2, key="k")
        await settle()
        model.is_open = True
        assert await again == [-1, -2] and model.batches == [[1, 2]]

    run(test)


def test_abandoned_work_is_dropped_or_cancelled():
    async def test(model: Model) -> None:
        queue, model.is_open = in_batches(model, 1), False
        busy = put(queue, 1)
        await settle()
        left = put(queue, 2, key="k")
        await settle()
        assert queue.num_waiting == 1
        left.cancel()
        await settle()
        model.is_open = True
        assert await busy == [-1] and queue.num_waiting == 0 and model.batches == [[1]]

        slots, model.is_open = one_by_one(model), False
        left = put(slots, 5, 6, 7, key="left")
        await settle()
        stays = put(slots, 8, key="stays")
        left.cancel()
        await settle()
        assert sorted(model.cancelled) == [5, 6] and model.begun == [1, 5, 6, 8], "7 never began"
        model.is_open = True
        assert await stays == [-8] and await slots.put([5], key="left") == [-5], "who comes back is asked anew"

    run(test)


def test_an_error_reaches_its_own_request_alone_and_is_not_remembered():
    async def test(model: Model) -> None:
        queue = in_batches(model, 1)
        with pytest.raises(ValueError, match="13"):
            await queue.put([13], key="k")
        assert await queue.put([1], key="k") == [-1]

        slots, model.is_open = one_by_one(model, 3), False
        bad, good = put(slots, 12, 13), put(slots, 5)
        await settle()
        model.let_go |= {5, 13}
        with pytest.raises(ValueError, match="13"):
            await bad
        assert model.cancelled == [12] and await good == [-5]
        model.is_open = True
        assert await slots.put([1, 2, 3, 4]) == [-1, -2, -3, -4], "all slots are free again"

    run(test)
