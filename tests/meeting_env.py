"""Envs that step only side by side, in a file of their own: workers that import it need nothing else of the tests."""

import asyncio
from typing import Any

import ray

from rlvlm.core.episodes import ChunkStep
from rlvlm.envs.push_block import PushBlock, PushBlocks
from rlvlm.envs.registry import Task

WORKERS = 3


class MeetingPoint:
    """Lets nobody go on before all workers have arrived."""

    def __init__(self) -> None:
        self._barrier = asyncio.Barrier(WORKERS)

    async def arrive(self) -> None:
        async with asyncio.timeout(60):
            await self._barrier.wait()


class MeetingTables(PushBlocks):
    """Their steps end when those of all workers have begun."""

    def step(self, rows: Any, chunks: Any) -> ChunkStep:
        ray.get(ray.get_actor("meeting point").arrive.remote())
        return super().step(rows, chunks)


class MeetingPushBlock(PushBlock):
    """Of such tables."""

    def many(self) -> PushBlocks:
        return MeetingTables(self.episode_steps, False)


MEETING = Task(name="meeting", goal="push", maker="meeting_env:MeetingPushBlock", kind="chunks")
