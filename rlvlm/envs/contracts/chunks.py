"""What every env in chunks promises, checked: for each such env's tests."""

from typing import Any, SupportsFloat

import numpy as np

from rlvlm.core.chunks import ChunkObs
from rlvlm.core.steps import FloatArray
from rlvlm.envs.chunk_env import ChunkEnv


def check_chunk_env(env: ChunkEnv, twin: ChunkEnv, num_chunks: int = 6) -> None:
    """Passes when `env` keeps every promise of the `ChunkEnv` contract.

    Args:
        env: any env in chunks; it is reset and stepped.
        twin: another instance of the same config.
        num_chunks: random chunks that each check drives; enough to meet an episode's end makes it check more.

    Raises:
        AssertionError: says which promise is broken.
    """
    _check_infos(env, num_chunks)
    _check_starts(env, twin, num_chunks)
    _check_state(env, twin, num_chunks)
    _check_images(env, twin, num_chunks)
    _check_side_by_side(env, num_chunks)


Steps = list[tuple[ChunkObs, SupportsFloat, bool, bool, dict[str, Any]]]


def _chunks(env: ChunkEnv, num_chunks: int, seed: int) -> FloatArray:
    shape = (num_chunks, env.chunk_steps, len(env.action_low))
    return np.random.default_rng(seed).uniform(env.action_low, env.action_high, shape).astype(np.float32)


def _drive(env: ChunkEnv, num_chunks: int, seed: int) -> Steps:
    """What `env` answers to random chunks; a finished episode is followed by the next."""
    steps: Steps = []
    for chunk in _chunks(env, num_chunks, seed):
        steps.append(env.step(chunk))
        if steps[-1][2] or steps[-1][3]:
            obs, info = env.reset()
            steps.append((obs, 0.0, False, False, info))
    return steps


def _assert_same(left: Steps, right: Steps, promise: str) -> None:
    for one, other in zip(left, right, strict=True):
        assert np.array_equal(one[0].snapshots, other[0].snapshots), f"{promise}: snapshots differ"
        assert np.array_equal(one[0].proprio, other[0].proprio), f"{promise}: proprioception differs"
        assert one[0].instructions == other[0].instructions, f"{promise}: instructions differ"
        assert one[1:4] == other[1:4], f"{promise}: rewards or ends differ"
        assert one[4]["progress"] == other[4]["progress"], f"{promise}: progress differs"


def _check_infos(env: ChunkEnv, num_chunks: int) -> None:
    obs, info = env.reset(seed=3)
    for answer in [(obs, 0.0, False, False, info), *_drive(env, num_chunks, seed=0)]:
        obs, reward, _, _, info = answer
        assert len(obs) == 1 and obs.instructions[0], "an env by itself observes one env, with an instruction"
        is_listed = not env.instructions or obs.instructions[0] in env.instructions
        assert is_listed, "the instruction is one of `instructions`, where there are any"
        assert obs.snapshots.shape == (1, env.snapshot_size) and obs.snapshots.dtype == np.float32, "snapshots [1, S]"
        assert obs.proprio.shape == (1, env.proprio_size) and obs.proprio.dtype == np.float32, "proprioception [1, P]"
        assert isinstance(info["progress"], float) and 0.0 <= info["progress"] <= 1.0, "progress is a float in [0, 1]"
        assert isinstance(info["success"], bool), "success is a bool"
        if "steps" in info:
            steps = info["steps"]
            assert 1 <= steps <= env.chunk_steps, "a chunk runs 1 to L env steps"
            assert info["env_rewards"].shape == (steps,), "one reward for each env step"
            assert info["env_rewards"].sum() == reward, "a chunk's reward is the sum of its steps'"
            assert info["snapshots"].shape == (steps, env.snapshot_size), "one snapshot for each env step"
            assert np.array_equal(info["snapshots"][-1], obs.snapshots[0]), "the last snapshot is the one observed"
    assert np.array_equal(env.snapshot(), obs.snapshots[0]), "snapshot() is that of the latest observation"
    scripted = env.scripted_chunk(0.0, np.random.default_rng(0))
    if scripted is not None:
        assert scripted.shape == (env.chunk_steps, len(env.action_low)), "a script's chunk is [L, A]"
        assert ((scripted >= env.action_low) & (scripted <= env.action_high)).all(), "and within the bounds"


def _check_starts(env: ChunkEnv, twin: ChunkEnv, num_chunks: int) -> None:
    first, again = env.reset(seed=11), twin.reset(seed=11)
    _assert_same([(first[0], 0.0, False, False, first[1])], [(again[0], 0.0, False, False, again[1])], "equal seeds")
    _assert_same(_drive(env, num_chunks, 1), _drive(twin, num_chunks, 1), "equal seeds and chunks")
    numbered, _ = env.reset(seed=1, options={"state_id": 17})
    likewise, info = twin.reset(seed=2, options={"state_id": 17})
    other, _ = env.reset(options={"state_id": 18})
    assert info["state_id"] == 17, "info names the initial state"
    assert np.array_equal(numbered.snapshots, likewise.snapshots), "an initial state's number decides it, not the seed"
    assert not np.array_equal(numbered.snapshots, other.snapshots), "another number, another initial state"


def _check_state(env: ChunkEnv, twin: ChunkEnv, num_chunks: int) -> None:
    env.reset(seed=5)
    _drive(env, 1, seed=2)
    state = env.get_state()
    for name, value in state.items():
        assert isinstance(value, np.ndarray | np.generic | bool | int | float | str), f"state {name!r} is {type(value)}"
        assert np.asarray(value).dtype != object, f"state {name!r} holds Python objects"
    future = _drive(env, num_chunks, seed=3)
    twin.reset(seed=99)
    for other, promise in ((env, "set_state"), (twin, "set_state on another instance")):
        other.set_state(state)
        _assert_same(_drive(other, num_chunks, seed=3), future, promise)


def _check_images(env: ChunkEnv, twin: ChunkEnv, num_chunks: int) -> None:
    env.reset(seed=6)
    seen = np.concatenate([step[0].snapshots for step in _drive(env, num_chunks, seed=5)])
    state = env.get_state()
    for camera in env.cameras:
        for size_px in (32, 48):
            images = env.draw(seen, size_px, camera)
            assert images.shape == (len(seen), size_px, size_px, 3), f"images are [N, H, W, 3], got {images.shape}"
            assert images.dtype == np.uint8, f"images are uint8, got {images.dtype}"
            assert np.array_equal(images[::-1], twin.draw(seen[::-1], size_px, camera)), "any instance draws the same"
        assert len({image.tobytes() for image in images}) > 1, "different moments look different"
    keys, images = env.image_key(seen), env.draw(seen, 64)
    for i, j in zip(*np.triu_indices(len(seen), 1), strict=True):
        if np.array_equal(keys[i], keys[j]):
            assert np.array_equal(images[i], images[j]), "equal keys look equal"
    places = env.landmarks(seen)
    assert places.ndim == 3 and len(places) == len(seen), f"landmarks are [N, K, D], got {places.shape}"
    ways = env.ways(seen)
    assert ways.shape == (len(seen), env.num_ways), f"ways are [N, {env.num_ways}], got {ways.shape}"
    assert np.array_equal(places[::-1], twin.landmarks(seen[::-1])), "any instance finds the same landmarks"
    future = _drive(env, num_chunks, seed=6)
    env.set_state(state)
    env.draw(seen, 32)
    env.landmarks(seen)
    _assert_same(_drive(env, num_chunks, seed=6), future, "drawing and finding landmarks disturb nothing")


def _check_side_by_side(env: ChunkEnv, num_chunks: int) -> None:
    """Envs side by side do what each does by itself, and leave finished ones alone."""
    state_ids = np.array([17, 18, 17])
    chunks = np.stack([_chunks(env, num_chunks, seed) for seed in (7, 8, 7)])
    many = env.many()
    obs = many.begin(state_ids)
    running = np.ones(len(state_ids), bool)
    came = []
    for index in range(num_chunks):
        rows = np.flatnonzero(running)
        if not len(rows):
            break
        came.append((rows, many.step(rows, chunks[rows, index])))
        running[rows] = ~came[-1][1].ended
    for row, state_id in enumerate(state_ids.tolist()):
        alone, _ = env.reset(options={"state_id": state_id})
        assert np.array_equal(alone.snapshots[0], obs.snapshots[row]), "side by side: starts differ"
        for index, (rows, step) in enumerate(came):
            place = np.flatnonzero(rows == row)
            if not len(place):
                break
            here = int(place[0])
            one, _, terminated, truncated, info = env.step(chunks[row, index])
            assert np.array_equal(one.snapshots[0], step.obs.snapshots[here]), "side by side: snapshots differ"
            assert one.instructions[0] == step.obs.instructions[here], "side by side: instructions differ"
            assert info["steps"] == step.steps[here], "side by side: the number of env steps differs"
            assert np.array_equal(info["env_rewards"], step.env_rewards[here, : info["steps"]]), "rewards differ"
            assert not step.env_rewards[here, info["steps"] :].any(), "steps that were left out have no reward"
            assert np.array_equal(info["snapshots"], step.snapshots[here, : info["steps"]]), "trails differ"
            ends = (bool(step.terminated[here]), bool(step.truncated[here]))
            assert (terminated, truncated) == ends, "side by side: ends differ"
            assert info["success"] == step.success[here], "side by side: success differs"
            at_end = info.get("success_at_end", info["success"])
            assert at_end == step.success_at_end[here], "side by side: success at the end of the chunk differs"
