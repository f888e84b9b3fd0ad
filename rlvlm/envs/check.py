"""Checks that an env keeps its contract."""

import warnings
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import check_env

from rlvlm.core.checks import check_asserts
from rlvlm.core.episodes import Observations, Turn
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import ChunkEnv, StepEnv, TurnEnv

AnyEnv = StepEnv | TurnEnv | ChunkEnv
Answer = tuple[Any, Any, bool, bool, dict[str, Any]]
"""Return value of `step`; for a reset the same with no reward."""
# keys of `info` by contract; anything else in it need not come back
_PROMISED = ("snapshot", "snapshots", "progress", "success", "steps", "env_rewards", "legal", "is_invalid", "action")
_OBSERVED = {StepEnv: np.ndarray, TurnEnv: Turn, ChunkEnv: Observations}
_TOLD_ALWAYS = {
    StepEnv: ("success", "progress", "snapshot"),
    TurnEnv: ("success", "progress", "legal"),
    ChunkEnv: ("success", "progress", "state_id"),
}
_TOLD_AFTER_STEPS = {
    StepEnv: (), TurnEnv: ("reply", "is_invalid", "action"), ChunkEnv: ("steps", "env_rewards", "snapshots"),
}  # fmt: skip
# replies: empty, unfinished, not a JSON object, an unknown action, nested too deep to parse, half a surrogate pair
_NONSENSE = (
    *("", "{", '{"action":', '{"action": "no such word"}', '{"action": {}}', '{"action": null}'),
    *("[" * 5_000, "\ud800"),
)


def check_form(env: Any) -> None:
    """Raises if a reset or a step of `env` lacks something that every env of its kind must return.

    Raises:
        AssertionError: says what is missing.
    """
    check_asserts()
    kind = next(kind for kind in _OBSERVED if isinstance(env, kind))
    if isinstance(env, ChunkEnv):
        shapes = (np.shape(env.action_low), np.shape(env.action_high), np.shape(env.scaled_actions))
        assert len(set(shapes)) == 1 and len(shapes[0]) == 1, (
            f"action_low, action_high and scaled_actions have A entries each, got shapes {shapes}"
        )
        assert env.cameras, "an env has at least one camera; one without a name is called ''"
    first = env.reset(seed=0)
    assert len(first) == 2, f"reset() returns an observation and the info, got {len(first)} values"
    after = env.step(_random_action(env, np.random.default_rng(0)))
    assert len(after) == 5, f"step() returns observation, reward, terminated, truncated and info, got {len(after)}"
    for name, (obs, *_, info), more in (("reset", first, ()), ("step", after, _TOLD_AFTER_STEPS[kind])):
        wanted = _OBSERVED[kind]
        assert isinstance(obs, wanted), f"{name}() observes {wanted.__module__}.{wanted.__name__}, got {type(obs)}"
        missing = ", ".join(key for key in (*_TOLD_ALWAYS[kind], *more) if key not in info)
        assert not missing, f"the info of {name}() has no {missing}"


def check_step_env(env: StepEnv, twin: StepEnv, different: FloatArray) -> None:
    """Raises unless `env` keeps every promise of the `StepEnv` contract.

    Args:
        env: any env; it is reset and stepped.
        twin: another instance of the same config and seed; episodes of at most 40 steps make the check meet their end.
        different: [N, S] snapshots, N >= 2, that must all look different from one another.

    Raises:
        AssertionError: says which promise is broken.
    """
    check_asserts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about bounds that some stock envs leave infinite
        try:
            check_env(env, skip_render_check=True)
        except AssertionError as error:
            if "eterministic" not in str(error):
                raise
            rule = "chances come from self.np_random alone, and reset() leaves nothing of the episode before"
            raise AssertionError(f"{rule}; Gymnasium's checker: {error}") from error
    assert isinstance(env.goal, str), "an env has a goal phrase, or an empty one where only the user can say it"
    answers = _play(env, 60, seed=0, start=3)
    for obs, *_, info in answers:
        assert obs.dtype == np.float32 and env.observation_space.contains(obs), "observations are float32 in the box"
        assert "snapshot" in info, "infos hold a snapshot"
    _check_answers(env, answers)
    scripted = env.scripted_action(answers[-1][0])
    if scripted is not None:
        assert scripted.shape == env.action_space.shape and np.isfinite(scripted).all(), "a script's action is [A]"
    _check_repeats(env, twin, 60)
    _check_images(env, twin, 12, different)


def check_turn_env(env: TurnEnv, twin: TurnEnv) -> None:
    """Raises unless `env` keeps every promise of the `TurnEnv` contract.

    Args:
        env: any env in turns; it is reset and talked to.
        twin: another instance of the same config and seed.

    Raises:
        AssertionError: says which promise is broken.
    """
    check_asserts()
    assert env.goal and env.action_names, "an env has a goal phrase and names for its actions"
    folded = {name.strip().casefold() for name in env.action_names}
    assert len(folded) == len(env.action_names), "the names of actions differ in more than case and spaces"
    answers = _play(env, 20, seed=0, start=3)
    for turn, reward, terminated, truncated, info in answers:
        assert turn.prompt and isinstance(turn.prompt, str), "every turn has a prompt"
        assert type(reward) is float and type(terminated) is bool and type(truncated) is bool, "plain numbers come back"
        assert not (terminated and truncated), "an end for good is no time limit"
        assert set(info["legal"]) <= set(range(len(env.action_names))) and info["legal"], "legal are some indices"
    _check_answers(env, answers)
    _check_reading(env)
    _check_repeats(env, twin, 60)
    _check_images(env, twin, 30)
    # demonstrations are the expert's replies, so each has to be read as the action that it stands for
    for seed in range(5) if env.has_expert else ():
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
    """Raises unless `env` keeps every promise of the `ChunkEnv` contract.

    Args:
        env: any env in chunks; it is reset and stepped.
        twin: another instance of the same config.
        num_chunks: random chunks that each check drives; enough to meet an episode's end makes it check more.

    Raises:
        AssertionError: says which promise is broken.
    """
    check_asserts()
    answers = _play(env, num_chunks, seed=0, start=3)
    for answer in answers:
        _check_chunk(env, answer)
    _check_answers(env, answers)
    scripted = env.scripted_chunk(0.0, np.random.default_rng(0))
    if scripted is not None:
        assert scripted.shape == (env.chunk_steps, len(env.action_low)), "a script's chunk is [L, A]"
        is_within = ((scripted >= env.action_low) & (scripted <= env.action_high)).all()
        assert is_within, "a script's actions lie between action_low and action_high: clip them"
    numbered, _ = env.reset(seed=1, options={"state_id": 17})
    again, info = twin.reset(seed=2, options={"state_id": 17})
    other, _ = env.reset(options={"state_id": 18})
    assert info["state_id"] == 17, "info names the initial state"
    assert np.array_equal(numbered.snapshots, again.snapshots), "an initial state's number decides it, not the seed"
    assert not np.array_equal(numbered.snapshots, other.snapshots), "another number, another initial state"
    _check_repeats(env, twin, num_chunks, num_before=1)
    seen = _check_images(env, twin, num_chunks)
    landmarks, offsets = env.landmarks(seen), env.offsets(seen)
    assert landmarks.ndim == 3 and len(landmarks) == len(seen), f"landmarks are [N, K, D], got {landmarks.shape}"
    assert offsets.shape == (len(seen), env.num_offsets), f"offsets are [N, {env.num_offsets}], got {offsets.shape}"
    assert np.array_equal(landmarks[::-1], twin.landmarks(seen[::-1])), "any instance finds the same landmarks"
    _check_side_by_side(env, num_chunks)


def _random_action(env: AnyEnv, rng: np.random.Generator) -> Any:
    """Returns a random action; for an env in turns a legal one, or now and then nonsense."""
    if isinstance(env, TurnEnv):
        action = int(rng.choice(env.legal()))
        return "nonsense" if rng.random() < 0.1 else env.action_text(action, "a random thought")
    if isinstance(env, ChunkEnv):
        shape = (env.chunk_steps, len(env.action_low))
        return rng.uniform(env.action_low, env.action_high, shape).astype(np.float32)
    return rng.uniform(-1.0, 1.0, env.action_space.shape).astype(np.float32)


def _play(env: Any, num: int, seed: int, start: int | None = None) -> list[Answer]:
    """Plays `num` random actions and returns the answers of `env`; a finished episode is followed by the next.

    With `start`, a new episode of that seed comes first.
    """
    rng = np.random.default_rng(seed)
    answers: list[Answer] = []
    if start is not None:
        obs, info = env.reset(seed=start)
        answers.append((obs, 0.0, False, False, info))
    for _ in range(num):
        answers.append(env.step(_random_action(env, rng)))
        if answers[-1][2] or answers[-1][3]:
            obs, info = env.reset()
            answers.append((obs, 0.0, False, False, info))
    return answers


def _snapshot(answer: Answer) -> FloatArray:
    """Returns the snapshot [S] of the state just reached; each kind of env keeps it in another place."""
    obs, *_, info = answer
    if "snapshot" in info:
        return info["snapshot"]
    return obs.snapshot if hasattr(obs, "snapshot") else obs.snapshots[0]


def _assert_same(left: list[Answer], right: list[Answer], promise: str) -> None:
    for (obs, *outcome, info), (its_obs, *its_outcome, its_info) in zip(left, right, strict=True):
        if isinstance(obs, np.ndarray):
            assert np.array_equal(obs, its_obs), f"{promise}: observations differ"
        else:  # a Turn or Observations
            for name in obs.__slots__:
                assert np.array_equal(getattr(obs, name), getattr(its_obs, name)), f"{promise}: {name} differ"
        assert outcome == its_outcome, f"{promise}: rewards or ends differ"
        for name in {*_PROMISED} & {*info, *its_info}:
            assert np.array_equal(info[name], its_info[name]), f"{promise}: {name} differs"


def _check_answers(env: AnyEnv, answers: list[Answer]) -> None:
    """Checks the values that all three kinds return for every state; the last of `answers` is the present state."""
    for answer in answers:
        snapshot, info = _snapshot(answer), answer[4]
        assert snapshot.shape == (env.snapshot_size,) and snapshot.dtype == np.float32, "snapshots are [S] float32"
        progress = info["progress"]
        assert isinstance(progress, float) and 0.0 <= progress <= 1.0, f"progress is a float in [0, 1], got {progress}"
        assert isinstance(info["success"], bool), "success is a bool"
    assert np.array_equal(env.snapshot(), _snapshot(answers[-1])), "snapshot() is that of the latest answer"


def _check_repeats(env: AnyEnv, twin: AnyEnv, num: int, num_before: int = 7) -> None:
    """Checks that equal seeds and actions give equal answers, as do equal states, on any instance."""
    promise = "equal seeds and actions"
    _assert_same(_play(env, num // 2, seed=1, start=11), _play(twin, num // 2, seed=1, start=11), promise)
    _play(env, num_before, seed=2, start=5)
    state, here = env.get_state(), env.snapshot()
    for name, value in state.items():
        assert isinstance(value, np.ndarray | np.generic | bool | int | float | str), f"state {name!r} is {type(value)}"
        assert np.asarray(value).dtype != object, f"state {name!r} holds Python objects"
    kept = {name: np.array(value) for name, value in state.items()}  # copies: a state may be a window into the env
    future = _play(env, num, seed=3)
    for name, value in state.items():
        message = f"get_state() gives {name!r} as it is now, not the array that the env goes on changing: copy it"
        assert np.array_equal(kept[name], np.asarray(value), equal_nan=kept[name].dtype.kind == "f"), message
    _play(twin, num_before // 2, seed=4, start=99)  # the result must not depend on what an instance did before
    for other, promise in ((env, "set_state"), (twin, "set_state on another instance")):
        _restore(other, state)
        assert np.array_equal(other.snapshot(), here), f"{promise}: another scene"
        _assert_same(_play(other, num, seed=3), future, promise)


def _restore(env: AnyEnv, state: dict[str, Any]) -> None:
    """Restores `state` as an env runner gets it: Ray hands out arrays that cannot be written to."""
    frozen = {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in state.items()}
    for value in frozen.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    try:
        env.set_state(frozen)
        _play(env, 1, seed=3)
        env.set_state(frozen)
    except (ValueError, TypeError) as error:
        rule = "set_state() copies the arrays it is given, which may be read-only: np.array(state[...])"
        raise AssertionError(f"{rule}; it raised: {error}") from error


def _drawn(env: AnyEnv, snapshots: FloatArray) -> list[Frames]:
    """Returns images of `snapshots`, at each of several sizes and by each camera."""
    if isinstance(env, TurnEnv):
        wanted, images = [env.image_px], [env.draw(snapshots)]
    elif isinstance(env, ChunkEnv):
        views = [(size_px, camera) for camera in env.cameras for size_px in (32, 64)]
        wanted, images = [(px, px) for px, _ in views], [env.draw(snapshots, *view) for view in views]
    else:
        wanted, images = [(48, 48), (64, 64)], [env.draw(snapshots, size_px) for size_px in (48, 64)]
    for shape, each in zip(wanted, images, strict=True):
        assert each.shape == (len(snapshots), *shape, 3), f"frames are [N, H, W, 3], got {each.shape}"
        assert each.dtype == np.uint8, f"frames are uint8, got {each.dtype}"
    return images


def _check_images(env: AnyEnv, twin: AnyEnv, num: int, different: FloatArray | None = None) -> FloatArray:
    """Checks that images follow from snapshots alone and drawing disturbs nothing; returns the snapshots drawn [N, S].

    Args:
        env: is played for `num` random actions.
        twin: another instance of the same config.
        num: number of actions.
        different: [M, S] snapshots that must all look different; None: some of the snapshots met must.
    """
    env.reset(seed=6)
    seen = np.stack([_snapshot(answer) for answer in _play(env, num, seed=5)])
    # play the future once, then draw everything: after that the same future must come about again
    state, future = env.get_state(), _play(env, num, seed=6)
    _restore(env, state)
    images = _drawn(env, seen)
    for drawn, redrawn, others in zip(images, _drawn(env, seen), _drawn(twin, seen[::-1]), strict=True):
        assert np.array_equal(drawn, redrawn), "the same snapshot looks the same twice"
        assert np.array_equal(drawn[::-1], others), "any instance draws it, in any order"
    if different is None:
        assert all(len({frame.tobytes() for frame in drawn}) >= 2 for drawn in images), (
            "different scenes look different"
        )
    else:
        looks = {frame.tobytes() for frame in _drawn(env, different)[-1]}
        assert len(different) >= 2 and len(looks) == len(different), "different scenes look different"
        seen = np.concatenate([seen, different])
        images = _drawn(env, seen)
    if isinstance(env, ChunkEnv):  # these draw from inside the simulator too
        env.landmarks(seen)
    _assert_same(_play(env, num, seed=6), future, "drawing and finding landmarks disturb nothing")
    keys = env.image_key(seen)
    assert keys.dtype == np.int64 and keys.shape[0] == len(seen), "keys are [N, P] int64"
    for i, j in zip(*np.triu_indices(len(seen), 1), strict=True):
        if np.array_equal(keys[i], keys[j]):
            assert all(np.array_equal(drawn[i], drawn[j]) for drawn in images), "equal keys look equal"
    return seen


def _check_reading(env: TurnEnv) -> None:
    env.reset(seed=4)
    for action in env.legal():
        text = env.action_text(action, "because")
        reply = env.read(f"Let me see.\n```json\n{text}\n```")
        assert reply.action == action and "because" in reply.thought, f"{text} is read as {reply}"
        assert reply.action_span and reply.text[slice(*reply.action_span)] == env.action_names[action], "the span"
    for text in _NONSENSE:
        before, state = env.snapshot(), env.get_state()  # restored below: each unreadable reply meets the same turn
        assert env.read(text).action is None, f"{text[:40]!r} is read as an action"
        _, reward, _, _, info = env.step(text)
        assert info["is_invalid"], "a reply that cannot be read is flagged"
        if env.rules == "strict":
            assert info["action"] is None and np.array_equal(env.snapshot(), before), (
                "a reply that cannot be read does nothing"
            )
            assert reward < 0, "a reply that cannot be read has a price"
        _restore(env, state)


def _check_chunk(env: ChunkEnv, answer: Answer) -> None:
    """Checks the observations of an env in chunks, and what it reports about the steps of a chunk."""
    obs, reward, _, _, info = answer
    assert len(obs) == 1 and obs.texts[0], "an env by itself observes one env, with an instruction"
    is_listed = not env.instructions or obs.texts[0] in env.instructions
    assert is_listed, "the instruction is one of `instructions`, where there are any"
    assert obs.proprio.shape == (1, env.proprio_size) and obs.proprio.dtype == np.float32, "proprioception [1, P]"
    if "steps" in info:
        steps = info["steps"]
        assert 1 <= steps <= env.chunk_steps, "a chunk runs 1 to L env steps"
        assert info["env_rewards"].shape == (steps,), "one reward for each env step"
        assert info["env_rewards"].sum() == reward, "a chunk's reward is the sum of its steps'"
        assert info["snapshots"].shape == (steps, env.snapshot_size), "one snapshot for each env step"
        assert np.array_equal(info["snapshots"][-1], obs.snapshots[0]), "the last snapshot is the one observed"


def _check_side_by_side(env: ChunkEnv, num_chunks: int) -> None:
    """Checks that envs driven side by side behave as they do alone, and that finished ones are left alone."""
    # the first and the third row play the same episode: equal states under equal chunks must stay equal
    state_ids, seeds = np.array([17, 18, 17]), (7, 8, 7)
    generators = [np.random.default_rng(seed) for seed in seeds]
    chunks = np.stack([[_random_action(env, rng) for _ in range(num_chunks)] for rng in generators])
    envs = env.many()
    obs = envs.begin(state_ids)
    running = np.ones(len(state_ids), bool)
    came = []
    for index in range(num_chunks):
        rows = np.flatnonzero(running)
        if not len(rows):
            break
        came.append((rows, envs.step(rows, chunks[rows, index])))
        running[rows] = ~came[-1][1].ended
    for row, state_id in enumerate(state_ids.tolist()):
        alone, _ = env.reset(options={"state_id": state_id})
        assert np.array_equal(alone.snapshots[0], obs.snapshots[row]), "side by side: starts differ"
        for index, (rows, step) in enumerate(came):
            indices = np.flatnonzero(rows == row)
            if not len(indices):
                break
            here = int(indices[0])
            after, _, terminated, truncated, info = env.step(chunks[row, index])
            assert np.array_equal(after.snapshots[0], step.obs.snapshots[here]), "side by side: snapshots differ"
            assert after.texts[0] == step.obs.texts[here], "side by side: instructions differ"
            assert info["steps"] == step.steps[here], "side by side: the number of env steps differs"
            assert np.array_equal(info["env_rewards"], step.env_rewards[here, : info["steps"]]), "rewards differ"
            assert not step.env_rewards[here, info["steps"] :].any(), "steps that were left out have no reward"
            assert np.array_equal(info["snapshots"], step.snapshots[here, : info["steps"]]), "trails differ"
            ends = (bool(step.terminated[here]), bool(step.truncated[here]))
            assert (terminated, truncated) == ends, "side by side: ends differ"
            assert info["success"] == step.success[here], "side by side: success differs"
            at_end = info.get("success_at_end", info["success"])
            assert at_end == step.success_at_end[here], "side by side: success at the end of the chunk differs"
