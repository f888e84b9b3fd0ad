"""The tiny env in chunks: its physics, its script, its images, and the contract."""

import numpy as np
import pytest

from rlvlm.envs import push_block as table
from rlvlm.envs.check import check_chunk_env
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.env import SyncChunkEnvs
from rlvlm.envs.push_block import PushBlock


def make(episode_steps: int = 32, continue_after_success: bool = False) -> PushBlock:
    return PushBlock(ChunkEnvConfig(episode_steps=episode_steps, continue_after_success=continue_after_success), seed=0)


def test_a_push_by_hand():
    # The hand's middle is 0.30 left of the block's, contact is at 0.08 + 0.14 = 0.22: of a move of 0.16, the first half
    # is through air and the second takes the block along, sideways part included.
    state = np.array([[-0.5, 0.0, -0.2, 0.0, 0.0, 0.5, 0.6, 0.0, 0, 2]], np.float32)
    after = table.moved(state, np.array([[0.16, 0.04]], np.float32))[0]
    assert after[table.HAND] == pytest.approx([-0.34, 0.04])
    assert after[table.ASKED] == pytest.approx([-0.12, 0.02], abs=1e-6)
    assert after[table.OTHER] == pytest.approx([0.0, 0.5])
    assert table.moved(after[None], np.array([[-0.05, 0.0]], np.float32))[0][table.ASKED] == pytest.approx(
        after[table.ASKED]
    ), "pulling away moves nothing"


def test_keeps_the_contract():
    check_chunk_env(make(), make())
    check_chunk_env(make(episode_steps=12), make(episode_steps=12))  # ends in the middle of a chunk
    check_chunk_env(make(continue_after_success=True), make(continue_after_success=True))


def test_side_by_side_one_by_one_and_at_once_are_the_same():
    rng = np.random.default_rng(0)
    at_once, one_by_one = make().many(), SyncChunkEnvs(make)
    ids = np.array([4, 4, 9, 1_000_000, 2])
    assert np.array_equal(at_once.begin(ids).snapshots, one_by_one.begin(ids).snapshots)
    for rows in (np.arange(5), np.array([0, 3]), np.array([2, 4])):
        chunks = rng.uniform(-1, 1, (len(rows), 8, 7)).astype(np.float32)
        left, right = at_once.step(rows, chunks), one_by_one.step(rows, chunks)
        for name in ("snapshots", "steps", "env_rewards", "success", "progress", "terminated", "truncated"):
            assert np.array_equal(getattr(left, name), getattr(right, name)), name
    assert len(one_by_one.begin(np.arange(7)).snapshots) == 7, "as many as are wanted now"


def test_the_script_solves_held_out_states_and_reads_the_instruction():
    rng = np.random.default_rng(0)
    one = make()
    instructions = set()
    for state_id in range(1_000_000, 1_000_050):
        obs, info = one.reset(options={"state_id": state_id})
        instructions.add(obs.texts[0])
        ended = False
        while not ended:
            obs, _, terminated, truncated, info = one.step(one.scripted_chunk(0.02, rng))
            ended = terminated or truncated
        assert info["success"] and info["progress"] == 1.0, state_id
    assert instructions == {f"push the {colour} block onto the pad" for colour in table.COLOUR_NAMES}


def before_the_pad(continue_after_success: bool) -> PushBlock:
    """0.18 away from it, of which 0.1 is near enough and a step takes 0.09: on the pad after one step."""
    one = make(episode_steps=20, continue_after_success=continue_after_success)
    one.reset(options={"state_id": 3})
    state = one.get_state()
    state["state"] = np.array([0.2, 0.0, 0.42, 0.0, 0.0, 0.5, 0.6, 0.0, 0, 2], np.float32)
    one.set_state(state)
    return one


def test_an_episode_stops_at_success_in_the_middle_of_a_chunk_or_plays_on_and_is_rewarded_once():
    chunk = np.zeros((8, 7), np.float32)
    chunk[:, 0] = 1.0  # onto the pad, and where it plays on over it and away
    _, reward, terminated, _, info = before_the_pad(continue_after_success=False).step(chunk)
    assert (info["steps"], reward, terminated, info["success"]) == (1, 1.0, True, True)
    one = before_the_pad(continue_after_success=True)
    _, reward, terminated, truncated, info = one.step(chunk)
    assert (info["steps"], reward, terminated, truncated) == (8, 1.0, False, False)
    assert info["success"] and info["env_rewards"].tolist() == [1.0] + [0.0] * 7 and info["progress"] < 1
    assert not info["success_at_end"], "undone"
    half = one.get_state()
    _, reward, terminated, truncated, info = one.step(-chunk)
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, False, False)
    _, reward, terminated, truncated, info = one.step(chunk)
    assert (info["steps"], reward, terminated, truncated) == (4, 0.0, False, True)
    other = make(episode_steps=20, continue_after_success=True)
    other.set_state(half)
    assert other.step(chunk)[1] == 0.0, "it remembers that it was rewarded"
    assert not ChunkEnvConfig(continue_after_success=True).for_evaluation().continue_after_success


def test_only_the_colours_tell_which_block_is_asked_for():
    one = make()
    state = one.snapshot()[None]
    swapped = state.copy()
    swapped[:, table.ASKED], swapped[:, table.OTHER] = state[:, table.OTHER], state[:, table.ASKED]
    swapped[:, table.COLOURS : table.COLOURS + 2] = state[:, [table.COLOURS + 1, table.COLOURS]]
    assert np.array_equal(one.draw(state, 64), one.draw(swapped, 64))
