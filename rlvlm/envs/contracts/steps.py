"""What an env of steps promises, checked."""

import warnings
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import check_env

from rlvlm.core.steps import FloatArray
from rlvlm.envs.step_env import StepEnv


def check_step_env(env: StepEnv, twin: StepEnv, different: FloatArray) -> None:
    """Passes when `env` keeps every promise of the `StepEnv` contract.

    Args:
        env: any env; it is reset and stepped.
        twin: another instance of the same config and seed; episodes of at most 40 steps make the check meet their end.
        different: [N, S] snapshots, N >= 2, that must all look different from one another.

    Raises:
        AssertionError: says which promise is broken.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about bounds that some stock envs leave infinite
        check_env(env, skip_render_check=True)
    _check_infos(env)
    _check_seeds(env, twin)
    _check_state(env, twin)
    _check_pictures(env, twin, different)


Steps = list[tuple[FloatArray, float, bool, bool, dict[str, Any]]]


def _act(env: StepEnv, num_steps: int, seed: int) -> Steps:
    """What `env` answers to random actions; a finished episode is followed by the next."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(num_steps):
        action = rng.uniform(-1.0, 1.0, env.action_space.shape).astype(np.float32)
        steps.append(env.step(action))
        if steps[-1][2] or steps[-1][3]:
            obs, info = env.reset()
            steps.append((obs, 0.0, False, False, info))
    return steps


def _assert_same(left: Steps, right: Steps, promise: str) -> None:
    for one, other in zip(left, right, strict=True):
        assert np.array_equal(one[0], other[0]), f"{promise}: observations differ"
        assert one[1:4] == other[1:4], f"{promise}: rewards or ends differ"
        assert np.array_equal(one[4]["snapshot"], other[4]["snapshot"]), f"{promise}: snapshots differ"
        assert one[4]["progress"] == other[4]["progress"], f"{promise}: progress differs"


def _check_infos(env: StepEnv) -> None:
    start = env.reset(seed=3)
    steps = [(start[0], 0.0, False, False, start[1]), *_act(env, 5, seed=0)]
    for obs, _, _, _, info in steps:
        assert obs.dtype == np.float32 and env.observation_space.contains(obs), "observations are float32 in the box"
        snapshot = info["snapshot"]
        assert snapshot.shape == (env.snapshot_size,) and snapshot.dtype == np.float32, "snapshots are [S] float32"
        assert isinstance(info["progress"], float) and 0.0 <= info["progress"] <= 1.0, "progress is a float in [0, 1]"
        assert isinstance(info["success"], bool), "success is a bool"
    assert np.array_equal(env.snapshot(), steps[-1][4]["snapshot"]), "snapshot() is that of the latest info"
    assert isinstance(env.goal, str), "an env has a goal phrase, or an empty one where only the user can say it"
    scripted = env.scripted_action(steps[-1][0])
    if scripted is not None:
        assert scripted.shape == env.action_space.shape and np.isfinite(scripted).all(), "a script's action is [A]"


def _check_seeds(env: StepEnv, twin: StepEnv) -> None:
    first, again = env.reset(seed=11), twin.reset(seed=11)
    assert np.array_equal(first[0], again[0]), "equal seeds give equal starts"
    _assert_same(_act(env, 30, seed=1), _act(twin, 30, seed=1), "equal seeds and actions")


def _check_state(env: StepEnv, twin: StepEnv) -> None:
    env.reset(seed=5)
    _act(env, 7, seed=2)
    state = env.get_state()
    for name, value in state.items():
        assert isinstance(value, np.ndarray | np.generic | bool | int | float | str), f"state {name!r} is {type(value)}"
        assert np.asarray(value).dtype != object, f"state {name!r} holds Python objects"
    kept = {name: np.array(value) for name, value in state.items()}
    future = _act(env, 60, seed=3)
    for name, value in state.items():
        message = f"get_state() gives {name!r} as it is now, not the array that the env goes on changing: copy it"
        assert np.array_equal(kept[name], np.asarray(value), equal_nan=kept[name].dtype.kind == "f"), message
    twin.reset(seed=99)
    _act(twin, 3, seed=4)
    for other, promise in ((env, "set_state"), (twin, "set_state on another instance")):
        other.set_state(state)
        _assert_same(_act(other, 60, seed=3), future, promise)


def _check_pictures(env: StepEnv, twin: StepEnv, different: FloatArray) -> None:
    env.reset(seed=6)
    seen = np.stack([step[4]["snapshot"] for step in _act(env, 12, seed=5)])
    state = env.get_state()
    for size_px in (48, 64, 48):
        frames = env.draw(seen, size_px)
        assert frames.shape == (len(seen), size_px, size_px, 3), f"frames are [N, H, W, 3], got {frames.shape}"
        assert frames.dtype == np.uint8, f"frames are uint8, got {frames.dtype}"
        assert np.array_equal(frames, env.draw(seen, size_px)), "the same snapshot looks the same twice"
        assert np.array_equal(frames[::-1], twin.draw(seen[::-1], size_px)), "any instance draws it, in any order"
    future = _act(env, 30, seed=6)
    env.set_state(state)
    env.draw(different, 48)
    _assert_same(_act(env, 30, seed=6), future, "drawing disturbs nothing")
    both = np.concatenate([seen, different])
    keys, frames = env.image_key(both), env.draw(both, 64)
    assert keys.dtype == np.int64 and keys.shape[0] == len(both), "keys are [N, P] int64"
    for i, j in zip(*np.triu_indices(len(both), 1), strict=True):
        if np.array_equal(keys[i], keys[j]):
            assert np.array_equal(frames[i], frames[j]), "equal keys look equal"
    looks = {frame.tobytes() for frame in env.draw(different, 64)}
    assert len(different) >= 2 and len(looks) == len(different), "different scenes look different"
