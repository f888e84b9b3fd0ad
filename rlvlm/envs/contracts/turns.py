"""What an env in turns promises, checked."""

from typing import Any

import numpy as np

from rlvlm.core.turns import Turn
from rlvlm.envs.turn_env import TurnEnv


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
