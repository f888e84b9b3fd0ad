import asyncio

import pytest

from rlvlm.serving.replicas.slots import FairSlots


class Book:
    """Answers each question with its negative once it is let go, and notes who came and who was cancelled."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.is_open = False

    def let_go(self, *items: int) -> None:
        for item in items:
            self.gates.setdefault(item, asyncio.Event()).set()

    async def ask(self, item: int) -> int:
        self.begun.append(item)
        try:
            if not self.is_open:
                await self.gates.setdefault(item, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(item)
            raise
        if item == 13:
            raise ValueError("13")
        return -item


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_question_enters_as_soon_as_any_other_is_answered():
    # by hand: two slots; 1 and 2 enter, 3 waits; when 2 is answered 3 enters although 1 is still at work
    async def run():
        book = Book()
        slots = FairSlots(book.ask, slots=2)
        asked = asyncio.create_task(slots.put([1, 2, 3]))
        await turn()
        assert book.begun == [1, 2] and slots.num_waiting == 1
        book.let_go(2)
        await turn()
        assert book.begun == [1, 2, 3] and not asked.done()
        book.let_go(1, 3)
        assert await asked == [-1, -2, -3]

    asyncio.run(run())


def test_the_run_that_got_least_is_next():
    async def run():
        book = Book()
        slots = FairSlots(book.ask, slots=1)
        flood = [asyncio.create_task(slots.put([n], run="flood")) for n in range(1, 6)]
        await turn()
        calm = [asyncio.create_task(slots.put([n], run="calm")) for n in (101, 102)]
        await turn()
        book.let_go(*range(1, 6), 101, 102)
        await asyncio.gather(*flood, *calm)
        assert sorted(book.begun[1:5]) == [2, 3, 101, 102], "each in turn, although the flood came first"

    asyncio.run(run())


def test_what_nobody_waits_for_is_cancelled_and_makes_room():
    async def run():
        book = Book()
        slots = FairSlots(book.ask, slots=2)
        left = asyncio.create_task(slots.put([1, 2, 3], key="left"))
        await turn()
        stays = asyncio.create_task(slots.put([4], key="stays"))
        await turn()
        left.cancel()
        await turn()
        assert sorted(book.cancelled) == [1, 2] and book.begun == [1, 2, 4], "3 never began"
        book.let_go(4)
        assert await stays == [-4]
        again = asyncio.create_task(slots.put([1], key="left"))
        book.let_go(1)
        assert await again == [-1], "who comes back is asked anew"

    asyncio.run(run())


def test_a_second_try_joins_the_first_and_is_answered_from_memory_later():
    async def run():
        book = Book()
        slots = FairSlots(book.ask, slots=2)
        first = asyncio.create_task(slots.put([1], key="a"))
        second = asyncio.create_task(slots.put([1], key="a"))
        await turn()
        first.cancel()
        await turn()
        assert book.cancelled == [], "the second still waits"
        book.let_go(1)
        assert await second == [-1] and await slots.put([1], key="a") == [-1]
        assert book.begun == [1] and slots.deduplicator.num_joined == 2

    asyncio.run(run())


def test_an_error_belongs_to_its_request_alone():
    async def run():
        book = Book()
        slots = FairSlots(book.ask, slots=3)
        bad, good = asyncio.create_task(slots.put([12, 13])), asyncio.create_task(slots.put([5]))
        await turn()
        book.let_go(5, 13)
        with pytest.raises(ValueError, match="13"):
            await bad
        assert book.cancelled == [12] and await good == [-5]
        book.is_open = True
        assert await slots.put([1, 2, 3, 4]) == [-1, -2, -3, -4], "all slots are free again"

    asyncio.run(run())
