import asyncio

import pytest

from rlvlm.serving.replicas.batches import FairBatches


class Book:
    """Answers each question with its negative and notes the batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        await self.gate.wait()
        if 13 in items:
            raise ValueError("13")
        return [-item for item in items]


def make(batch_size: int = 4) -> tuple[Book, FairBatches]:
    book = Book()
    return book, FairBatches(book.ask, batch_size=batch_size, wait_s=0.005)


def test_the_run_that_got_least_is_next():
    # by hand: A has three requests of 2 before B comes with one of 2; a batch holds 4, so the first batch is A A,
    # already at work when B arrives; then B (0 served) and A's last share the second
    async def run():
        book, batches = make()
        book.gate.clear()
        flood = [asyncio.create_task(batches.put([n, n + 1], run="A")) for n in (1, 3)]
        await asyncio.sleep(0.02)
        flood += [asyncio.create_task(batches.put([n, n + 1], run="A")) for n in (5, 7, 9)]
        await asyncio.sleep(0)
        other = asyncio.create_task(batches.put([100, 101], run="B"))
        await asyncio.sleep(0.02)
        book.gate.set()
        assert await other == [-100, -101]
        assert [await task for task in flood] == [[-1, -2], [-3, -4], [-5, -6], [-7, -8], [-9, -10]]
        assert book.batches[:2] == [[1, 2, 3, 4], [100, 101, 5, 6]] or book.batches[1] == [5, 6, 100, 101]

    asyncio.run(run())


def test_a_flood_of_ten_to_one_leaves_the_other_half():
    async def run():
        book, batches = make(batch_size=2)
        book.gate.clear()
        tasks = [asyncio.create_task(batches.put([1], run="flood")) for _ in range(100)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(batches.put([2], run="calm")) for _ in range(10)]
        await asyncio.sleep(0.02)
        book.gate.set()
        await asyncio.gather(*tasks)
        served = [item for batch in book.batches for item in batch]
        assert served[:24].count(2) == 10, served[:24]

    asyncio.run(run())


def test_who_was_away_has_saved_up_nothing():
    async def run():
        book, batches = make(batch_size=1)
        await asyncio.gather(*(batches.put([1], run="early") for _ in range(5)))
        book.gate.clear()
        tasks = [asyncio.create_task(batches.put([1], run="early")) for _ in range(6)]
        await asyncio.sleep(0.02)
        tasks += [asyncio.create_task(batches.put([2], run="late")) for _ in range(6)]
        await asyncio.sleep(0.02)
        book.gate.set()
        await asyncio.gather(*tasks)
        last = [batch[0] for batch in book.batches][-11:]
        assert abs(last[:8].count(2) - last[:8].count(1)) <= 2, last

    asyncio.run(run())


def test_requests_are_never_cut():
    async def run():
        book, batches = make()
        await asyncio.gather(*(batches.put([n] * 3) for n in range(3)))
        assert book.batches == [[0] * 3, [1] * 3, [2] * 3]
        assert await batches.put(list(range(20, 30))) == [-n for n in range(20, 30)], "larger than a batch: alone"

    asyncio.run(run())


def test_a_request_sent_twice_is_judged_once():
    async def run():
        book, batches = make()
        book.gate.clear()
        first = asyncio.create_task(batches.put([1, 2], key="k"))
        while not book.batches:
            await asyncio.sleep(0.001)
        first.cancel()  # its caller gave up while the batch was at work
        again = asyncio.create_task(batches.put([1, 2], key="k"))
        await asyncio.sleep(0.02)
        book.gate.set()
        assert await again == [-1, -2] and await batches.put([1, 2], key="k") == [-1, -2]
        assert book.batches == [[1, 2]] and batches.deduplicator.num_joined == 2

    asyncio.run(run())


def test_a_request_that_everybody_left_is_dropped():
    async def run():
        book, batches = make(batch_size=1)
        book.gate.clear()
        busy = asyncio.create_task(batches.put([1]))
        await asyncio.sleep(0.02)
        left = asyncio.create_task(batches.put([2], key="k"))
        await asyncio.sleep(0.02)
        assert batches.num_waiting == 1
        left.cancel()
        await asyncio.sleep(0.02)
        book.gate.set()
        assert await busy == [-1] and batches.num_waiting == 0 and book.batches == [[1]]

    asyncio.run(run())


def test_an_error_reaches_its_batch_alone_and_is_not_remembered():
    async def run():
        _, batches = make(batch_size=1)
        with pytest.raises(ValueError, match="13"):
            await batches.put([13], key="k")
        assert await batches.put([1], key="k") == [-1]

    asyncio.run(run())
