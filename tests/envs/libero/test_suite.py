"""A suite as one task: which task an initial state is of, many of them at once, and the contract."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlvlm.envs.check import check_chunk_env
from rlvlm.envs.env import FIRST_HELD_OUT_STATE
from rlvlm.envs.libero import suite as module
from rlvlm.envs.libero.config import LiberoConfig
from rlvlm.envs.libero.env import LiberoEnv
from rlvlm.envs.libero.suite import LiberoSuite
from rlvlm.envs.registry import find_task, make_env, task_goal

pytestmark = pytest.mark.slow


def make(**changes: object) -> LiberoSuite:
    config = LiberoConfig(**{"episode_steps": 12, "start_jitter_m": 0.02, "render_style": "light"} | changes)  # pyright: ignore[reportArgumentType]
    return make_env("libero_object", config, 0)


@pytest.fixture(scope="module")
def suite():
    """Holds the scenes, which all envs of this module share."""
    return make()


def test_consecutive_states_go_through_all_tasks(suite):
    assert find_task("libero_object").kind == "chunks"
    for first in (0, FIRST_HELD_OUT_STATE):
        places = [suite.place_of(first + number) for number in range(25)]
        assert [task for task, _ in places] == [*range(10), *range(10), *range(5)]
        assert [own - first for _, own in places] == [0] * 10 + [1] * 10 + [2] * 5


def test_an_episode_is_that_of_its_task(suite):
    obs, info = suite.reset(options={"state_id": 17})
    alone = suite.member(7)
    assert (info["state_id"], obs.texts[0]) == (17, task_goal("libero_object/7"))
    one, _ = make_env("libero_object/7", suite._config, 0).reset(options={"state_id": 1})
    assert np.array_equal(obs.snapshots[0, 1 : 1 + alone.snapshot_size], one.snapshots[0])
    assert np.array_equal(suite.draw(obs.snapshots, 32), alone.draw(one.snapshots, 32))
    other, _ = suite.reset(options={"state_id": 18})
    landmarks = alone.landmarks(one.snapshots)
    assert landmarks.shape == (1, 3, 3) and np.array_equal(
        suite.landmarks(obs.snapshots), landmarks[:, [0, 1, 2, 2, 2]]
    )
    both = np.concatenate([obs.snapshots, other.snapshots])
    assert np.array_equal(suite.draw(both, 32)[0], alone.draw(one.snapshots, 32)[0])


def test_unplayed_scenes_belong_to_the_tasks_of_their_starts(suite):
    starts = np.concatenate([suite.reset(options={"state_id": number})[0].snapshots for number in (17, 8)])
    scenes = suite.augment_scenes(starts, starts, np.random.default_rng(0))
    assert scenes[:, 0].tolist() == [7, 8]
    assert {tuple(1 + place for place in suite.member(task).robot_columns) for task in (7, 8)} == {suite.robot_columns}
    alone = suite.member(7)
    own = slice(1, 1 + alone.snapshot_size)
    assert np.array_equal(
        scenes[:1, own], alone.augment_scenes(starts[:1, own], starts[:1, own], np.random.default_rng(0))
    )


def test_keeps_the_contract(suite):
    check_chunk_env(make(), make(), num_chunks=2)


def test_an_episode_survives_that_others_need_its_place(suite, monkeypatch):
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


def test_a_thread_that_begins_a_task_leaves_the_one_that_plays_it_alone(suite):
    chunks = np.random.default_rng(0).uniform(-1, 1, (4, suite.chunk_steps, 7)).astype(np.float32)

    def played() -> list[np.ndarray]:
        suite.reset(options={"state_id": 17})
        return [suite.step(chunk)[0].snapshots for chunk in chunks]

    alone = played()
    with ThreadPoolExecutor(1) as pool:  # as a judge's, which draws a task that had made room for others
        others = [pool.submit(LiberoEnv, suite._config, 0, "libero_object", "7") for _ in range(12)]
        together = played()
        assert all(other.result().goal for other in others)
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


def test_no_more_tasks_stay_compiled_than_there_is_room_for(suite, monkeypatch):
    whole = make()
    ids = FIRST_HELD_OUT_STATE + np.array([9, 7, 19, 8, 9])

    def rolled(suite: LiberoSuite) -> list[tuple[str, np.ndarray]]:
        """What each episode is told and all that it shows, a batch at a time."""
        envs, found = suite.many(), {}
        for places in envs.batches(ids):
            obs = envs.begin(ids[places])
            shown, rows = [[row] for row in obs.snapshots], np.arange(len(places))
            while len(rows):
                came = envs.step(rows, np.full((len(rows), 8, 7), 0.5, np.float32))
                for row, moments, steps in zip(rows, came.snapshots, came.steps, strict=True):
                    shown[row] += list(moments[:steps])
                rows = rows[~came.ended]
            texts = zip(places.tolist(), obs.texts, shown, strict=True)
            found |= {place: (text, np.stack(moments)) for place, text, moments in texts}
        return [found[place] for place in range(len(ids))]

    at_once = rolled(whole)
    del whole
    monkeypatch.setattr(module, "_KEPT", 3)  # two of a batch, and that of the suite's own episode
    few = make()
    assert [batch.tolist() for batch in few.many().batches(ids)] == [[1, 3], [0, 2, 4]]
    again = rolled(few)
    for one, other in zip(again, at_once, strict=True):
        assert one[0] == other[0] and np.array_equal(one[1], other[1])
    envs = dict(few._members)
    for camera in few.cameras * 2:
        few.draw(np.stack([again[1][1][0], again[3][1][0]]), 16, camera)
    kept = [few._members[task] is envs[task] for task in (0, 7, 8) if task in envs]
    assert len(few._members) == 3 and kept, "a batch's tasks stay while it is looked at"
    held = list(suite._members)  # by the other tests
    gone = weakref.ref(few.member(next(task for task in range(10) if task not in held)).scene)
    for task in held[:3]:
        few.member(task)
    assert gone() is None
