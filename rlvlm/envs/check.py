"""What every env promises, checked."""

import warnings
from typing import Any, SupportsFloat

import numpy as np
from gymnasium.utils.env_checker import check_env

from rlvlm.core.chunks import ChunkObs
from rlvlm.core.steps import FloatArray
from rlvlm.core.turns import Turn
from rlvlm.envs.env import ChunkEnv, StepEnv, TurnEnv


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
    steps = [(start[0], 0.0, False, False, start[1]), *_act(env, 60, seed=0)]
    for obs, _, _, _, info in steps:
        assert obs.dtype == np.float32 and env.observation_space.contains(obs), "observations are float32 in the box"
        snapshot = info["snapshot"]
        assert snapshot.shape == (env.snapshot_size,) and snapshot.dtype == np.float32, "snapshots are [S] float32"
        progress = info["progress"]
        assert isinstance(progress, float) and 0.0 <= progress <= 1.0, f"progress is a float in [0, 1], got {progress}"
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


def check_turn_env(env: TurnEnv, twin: TurnEnv) -> None:
    """Passes when `env` keeps every promise of the `TurnEnv` contract.

    Args:
        env: any env in turns; it is reset and talked to.
        twin: another instance of the same config and seed.

    Raises:
        AssertionError: says which promise is broken.
    """
    _check_turns(env)
    _check_reading(env)
    first, again = env.reset(seed=11), twin.reset(seed=11)
    assert np.array_equal(first[0].snapshot, again[0].snapshot), "equal seeds give equal starts"
    _assert_same_talk(_talk(env, 30, seed=1), _talk(twin, 30, seed=1), "equal seeds and replies")
    _check_turn_state(env, twin)
    _check_turn_pictures(env, twin)
    if env.has_expert:
        _check_expert(env)


Talk = list[tuple[Turn, float, bool, bool, dict[str, Any]]]
_NONSENSE = (
    "",
    "{",
    '{"action":',
    '{"action": "no such word"}',
    '{"action": {}}',
    '{"action": null}',
    "[" * 5_000,
    "\ud800",
)


def _talk(env: TurnEnv, num_turns: int, seed: int) -> Talk:
    """What `env` answers to random legal actions and, now and then, to nonsense."""
    rng = np.random.default_rng(seed)
    turns = []
    for _ in range(num_turns):
        action = int(rng.choice(env.legal()))
        turns.append(env.step("nonsense" if rng.random() < 0.1 else env.action_text(action, "a random thought")))
        if turns[-1][2] or turns[-1][3]:
            turn, info = env.reset()
            turns.append((turn, 0.0, False, False, info))
    return turns


def _assert_same_talk(left: Talk, right: Talk, promise: str) -> None:
    for one, other in zip(left, right, strict=True):
        assert np.array_equal(one[0].snapshot, other[0].snapshot), f"{promise}: snapshots differ"
        assert one[0].prompt == other[0].prompt, f"{promise}: prompts differ"
        assert one[1:] == other[1:], f"{promise}: rewards, ends or infos differ"


def _check_turns(env: TurnEnv) -> None:
    assert env.goal and env.action_names, "an env has a goal phrase and names for its actions"
    folded = {name.strip().casefold() for name in env.action_names}
    assert len(folded) == len(env.action_names), "the names of actions differ in more than case and spaces"
    first, start = env.reset(seed=3)
    turn = first
    for turn, reward, terminated, truncated, info in [(first, 0.0, False, False, start), *_talk(env, 20, seed=0)]:
        assert turn.snapshot.shape == (env.snapshot_size,) and turn.snapshot.dtype == np.float32, "[S] float32"
        assert turn.prompt and isinstance(turn.prompt, str), "every turn has a prompt"
        assert type(reward) is float and type(terminated) is bool and type(truncated) is bool, "plain numbers come back"
        assert not (terminated and truncated), "an end for good is no time limit"
        assert isinstance(info["progress"], float) and 0.0 <= info["progress"] <= 1.0, "progress is a float in [0, 1]"
        assert isinstance(info["success"], bool), "success is a bool"
        assert set(info["legal"]) <= set(range(len(env.action_names))) and info["legal"], "legal are some indices"
    assert np.array_equal(env.snapshot(), turn.snapshot), "snapshot() is that of the latest turn"


def _check_reading(env: TurnEnv) -> None:
    env.reset(seed=4)
    for action in env.legal():
        text = env.action_text(action, "because")
        reply = env.read(f"Let me see.\n```json\n{text}\n```")
        assert reply.action == action and "because" in reply.thought, f"{text} is read as {reply}"
        assert reply.action_span and reply.text[slice(*reply.action_span)] == env.action_names[action], "the span"
    for text in _NONSENSE:
        before, state = env.snapshot(), env.get_state()
        assert env.read(text).action is None, f"{text[:40]!r} is read as an action"
        _, reward, _, _, info = env.step(text)
        assert info["is_invalid"], "a reply that cannot be read is flagged"
        if env.rules == "mended":
            assert info["action"] is None and np.array_equal(env.snapshot(), before), (
                "a reply that cannot be read does nothing"
            )
            assert reward < 0, "a reply that cannot be read has a price"
        env.set_state(state)


def _check_turn_state(env: TurnEnv, twin: TurnEnv) -> None:
    env.reset(seed=5)
    _talk(env, 7, seed=2)
    state = env.get_state()
    for name, value in state.items():
        assert isinstance(value, np.ndarray | np.generic | bool | int | float | str), f"state {name!r} is {type(value)}"
        assert np.asarray(value).dtype != object, f"state {name!r} holds Python objects"
    here, future = env.snapshot(), _talk(env, 60, seed=3)
    twin.reset(seed=99)
    _talk(twin, 3, seed=4)
    for other, promise in ((env, "set_state"), (twin, "set_state on another instance")):
        other.set_state(state)
        assert np.array_equal(other.snapshot(), here), f"{promise}: another scene"
        _assert_same_talk(_talk(other, 60, seed=3), future, promise)


def _check_turn_pictures(env: TurnEnv, twin: TurnEnv) -> None:
    env.reset(seed=6)
    seen = np.stack([step[0].snapshot for step in _talk(env, 30, seed=5)])
    state, future = env.get_state(), _talk(env, 30, seed=6)
    env.set_state(state)
    frames = env.draw(seen)
    assert frames.shape == (len(seen), *env.picture_px, 3) and frames.dtype == np.uint8, f"frames: {frames.shape}"
    assert np.array_equal(frames, env.draw(seen)), "the same snapshot looks the same twice"
    assert np.array_equal(frames[::-1], twin.draw(seen[::-1])), "any instance draws it, in any order"
    _assert_same_talk(_talk(env, 30, seed=6), future, "drawing disturbs nothing")
    keys = env.image_key(seen)
    assert keys.dtype == np.int64 and keys.shape[0] == len(seen), "keys are [N, P] int64"
    for i, j in zip(*np.triu_indices(len(seen), 1), strict=True):
        if np.array_equal(keys[i], keys[j]):
            assert np.array_equal(frames[i], frames[j]), "equal keys look equal"
    assert len({frame.tobytes() for frame in frames}) >= 2, "different scenes look different"


def _check_expert(env: TurnEnv) -> None:
    for seed in range(5):
        env.reset(seed=seed)
        is_over = False
        while not is_over:
            action = env.expert_action()
            assert action in env.legal(), f"the expert's {action} is not legal"
            reply = env.read(env.action_text(action, env.expert_thought()))
            assert reply.action == action and "thoughts" in reply.thought, "the expert's reply is read as it is meant"
            _, _, terminated, truncated, _ = env.step(reply.text)
            is_over = terminated or truncated


def check_chunk_env(env: ChunkEnv, twin: ChunkEnv, num_chunks: int = 6) -> None:
    """Passes when `env` keeps every promise of the `ChunkEnv` contract.

    Args:
        env: any env in chunks; it is reset and stepped.
        twin: another instance of the same config.
        num_chunks: random chunks that each check drives; enough to meet an episode's end makes it check more.

    Raises:
        AssertionError: says which promise is broken.
    """
    _check_chunk_infos(env, num_chunks)
    _check_chunk_starts(env, twin, num_chunks)
    _check_chunk_state(env, twin, num_chunks)
    _check_chunk_images(env, twin, num_chunks)
    _check_side_by_side(env, num_chunks)


ChunkSteps = list[tuple[ChunkObs, SupportsFloat, bool, bool, dict[str, Any]]]


def _chunks(env: ChunkEnv, num_chunks: int, seed: int) -> FloatArray:
    shape = (num_chunks, env.chunk_steps, len(env.action_low))
    return np.random.default_rng(seed).uniform(env.action_low, env.action_high, shape).astype(np.float32)


def _drive(env: ChunkEnv, num_chunks: int, seed: int) -> ChunkSteps:
    """What `env` answers to random chunks; a finished episode is followed by the next."""
    steps: ChunkSteps = []
    for chunk in _chunks(env, num_chunks, seed):
        steps.append(env.step(chunk))
        if steps[-1][2] or steps[-1][3]:
            obs, info = env.reset()
            steps.append((obs, 0.0, False, False, info))
    return steps


def _assert_same_chunks(left: ChunkSteps, right: ChunkSteps, promise: str) -> None:
    for one, other in zip(left, right, strict=True):
        assert np.array_equal(one[0].snapshots, other[0].snapshots), f"{promise}: snapshots differ"
        assert np.array_equal(one[0].proprio, other[0].proprio), f"{promise}: proprioception differs"
        assert one[0].instructions == other[0].instructions, f"{promise}: instructions differ"
        assert one[1:4] == other[1:4], f"{promise}: rewards or ends differ"
        assert one[4]["progress"] == other[4]["progress"], f"{promise}: progress differs"


def _check_chunk_infos(env: ChunkEnv, num_chunks: int) -> None:
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


def _check_chunk_starts(env: ChunkEnv, twin: ChunkEnv, num_chunks: int) -> None:
    first, again = env.reset(seed=11), twin.reset(seed=11)
    _assert_same_chunks(
        [(first[0], 0.0, False, False, first[1])], [(again[0], 0.0, False, False, again[1])], "equal seeds"
    )
    _assert_same_chunks(_drive(env, num_chunks, 1), _drive(twin, num_chunks, 1), "equal seeds and chunks")
    numbered, _ = env.reset(seed=1, options={"state_id": 17})
    likewise, info = twin.reset(seed=2, options={"state_id": 17})
    other, _ = env.reset(options={"state_id": 18})
    assert info["state_id"] == 17, "info names the initial state"
    assert np.array_equal(numbered.snapshots, likewise.snapshots), "an initial state's number decides it, not the seed"
    assert not np.array_equal(numbered.snapshots, other.snapshots), "another number, another initial state"


def _check_chunk_state(env: ChunkEnv, twin: ChunkEnv, num_chunks: int) -> None:
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
        _assert_same_chunks(_drive(other, num_chunks, seed=3), future, promise)


def _check_chunk_images(env: ChunkEnv, twin: ChunkEnv, num_chunks: int) -> None:
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
    offsets = env.offsets(seen)
    assert offsets.shape == (len(seen), env.num_offsets), f"offsets are [N, {env.num_offsets}], got {offsets.shape}"
    assert np.array_equal(places[::-1], twin.landmarks(seen[::-1])), "any instance finds the same landmarks"
    future = _drive(env, num_chunks, seed=6)
    env.set_state(state)
    env.draw(seen, 32)
    env.landmarks(seen)
    _assert_same_chunks(_drive(env, num_chunks, seed=6), future, "drawing and finding landmarks disturb nothing")


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
