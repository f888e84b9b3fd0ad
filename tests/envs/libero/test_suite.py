"""A suite as one task: which task an initial state is of, many of them at once, and the contract."""

import numpy as np
import pytest

from rlvlm.envs.chunks import FIRST_HELD_OUT_STATE
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.contracts.chunks import check_chunk_world
from rlvlm.envs.libero import suite as module
from rlvlm.envs.libero.suite import LiberoSuite
from rlvlm.envs.registry import make_world, task_goal, task_kind

pytestmark = pytest.mark.slow


def make(**changes: object) -> LiberoSuite:
    config = EnvConfig(**{"episode_steps": 12, "moved": 0.02} | changes)  # pyright: ignore[reportArgumentType]
    return make_world("libero_object", config, 0)


@pytest.fixture(scope="module")
def suite() -> LiberoSuite:
    """Holds the scenes, which all worlds of this module share."""
    return make()


def test_consecutive_states_go_through_all_tasks(suite: LiberoSuite) -> None:
    assert task_kind("libero_object") == "chunks"
    for first in (0, FIRST_HELD_OUT_STATE):
        places = [suite.place_of(first + number) for number in range(25)]
        assert [task for task, _ in places] == [*range(10), *range(10), *range(5)]
        assert [own - first for _, own in places] == [0] * 10 + [1] * 10 + [2] * 5


def test_an_episode_is_that_of_its_task(suite: LiberoSuite) -> None:
    obs, info = suite.reset(options={"state_id": 17})
    alone = suite.member(7)
    assert (info["state_id"], obs.instructions[0]) == (17, task_goal("libero_object/7"))
    one, _ = make_world("libero_object/7", EnvConfig(episode_steps=12, moved=0.02), 0).reset(options={"state_id": 1})
    assert np.array_equal(obs.snapshots[0, 1 : 1 + alone.snapshot_size], one.snapshots[0])
    assert np.array_equal(suite.draw(obs.snapshots, 32), alone.draw(one.snapshots, 32))
    other, _ = suite.reset(options={"state_id": 18})
    both = np.concatenate([obs.snapshots, other.snapshots])
    assert np.array_equal(suite.draw(both, 32)[0], alone.draw(one.snapshots, 32)[0])


def test_keeps_the_contract(suite: LiberoSuite) -> None:
    check_chunk_world(make(), make(), num_chunks=2)


def test_an_episode_survives_that_others_need_its_place(suite: LiberoSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 2)
    few = make()
    few.reset(options={"state_id": 17})
    chunk = np.zeros((few.chunk_steps, 7), np.float32)
    few.step(chunk)
    before = few.snapshot()
    for task in (8, 9, 8, 9):
        few.member(task)
    assert len(few._members) == 2 and np.array_equal(few.snapshot(), before)
    suite.reset(options={"state_id": 17})
    suite.step(chunk)
    assert np.array_equal(few.step(chunk)[0].snapshots, suite.step(chunk)[0].snapshots)
