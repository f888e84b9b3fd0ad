"""What a world in turns promises, checked."""

from typing import Any

import numpy as np

from rlvlm.envs.turns import TurnWorld
from rlvlm.types.turns import Turn


def check_turn_world(world: TurnWorld, twin: TurnWorld) -> None:
    """Passes when `world` keeps every promise of the `TurnWorld` contract.

    Args:
        world: any world in turns; it is reset and talked to.
        twin: another instance of the same config and seed.

    Raises:
        AssertionError: says which promise is broken.
    """
    _check_turns(world)
    _check_reading(world)
    first, again = world.reset(seed=11), twin.reset(seed=11)
    assert np.array_equal(first[0].snapshot, again[0].snapshot), "equal seeds give equal starts"
    _assert_same_talk(_talk(world, 30, seed=1), _talk(twin, 30, seed=1), "equal seeds and replies")
    _check_turn_state(world, twin)
    _check_turn_pictures(world, twin)
    if world.has_expert:
        _check_expert(world)


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


def _talk(world: TurnWorld, num_turns: int, seed: int) -> Talk:
    """What `world` answers to random legal actions and, now and then, to nonsense."""
    rng = np.random.default_rng(seed)
    turns = []
    for _ in range(num_turns):
        action = int(rng.choice(world.legal()))
        turns.append(world.step("nonsense" if rng.random() < 0.1 else world.action_text(action, "a random thought")))
        if turns[-1][2] or turns[-1][3]:
            turn, info = world.reset()
            turns.append((turn, 0.0, False, False, info))
    return turns


def _assert_same_talk(left: Talk, right: Talk, promise: str) -> None:
    for one, other in zip(left, right, strict=True):
        assert np.array_equal(one[0].snapshot, other[0].snapshot), f"{promise}: snapshots differ"
        assert one[0].prompt == other[0].prompt, f"{promise}: prompts differ"
        assert one[1:] == other[1:], f"{promise}: rewards, ends or infos differ"


def _check_turns(world: TurnWorld) -> None:
    assert world.goal and world.action_names, "a world has a goal phrase and names for its actions"
    folded = {name.strip().casefold() for name in world.action_names}
    assert len(folded) == len(world.action_names), "the names of actions differ in more than case and spaces"
    first, start = world.reset(seed=3)
    turn = first
    for turn, reward, terminated, truncated, info in [(first, 0.0, False, False, start), *_talk(world, 20, seed=0)]:
        assert turn.snapshot.shape == (world.snapshot_size,) and turn.snapshot.dtype == np.float32, "[S] float32"
        assert turn.prompt and isinstance(turn.prompt, str), "every turn has a prompt"
        assert type(reward) is float and type(terminated) is bool and type(truncated) is bool, "plain numbers come back"
        assert not (terminated and truncated), "an end for good is no time limit"
        assert isinstance(info["progress"], float) and 0.0 <= info["progress"] <= 1.0, "progress is a float in [0, 1]"
        assert isinstance(info["success"], bool), "success is a bool"
        assert set(info["legal"]) <= set(range(len(world.action_names))) and info["legal"], "legal are some indices"
    assert np.array_equal(world.snapshot(), turn.snapshot), "snapshot() is that of the latest turn"


def _check_reading(world: TurnWorld) -> None:
    world.reset(seed=4)
    for action in world.legal():
        text = world.action_text(action, "because")
        reply = world.read(f"Let me see.\n```json\n{text}\n```")
        assert reply.action == action and "because" in reply.thought, f"{text} is read as {reply}"
        assert reply.action_span and reply.text[slice(*reply.action_span)] == world.action_names[action], "the span"
    for text in _NONSENSE:
        before, state = world.snapshot(), world.get_state()
        assert world.read(text).action is None, f"{text[:40]!r} is read as an action"
        _, reward, _, _, info = world.step(text)
        assert info["is_invalid"], "a reply that cannot be read is flagged"
        if world.rules == "mended":
            assert info["action"] is None and np.array_equal(world.snapshot(), before), (
                "a reply that cannot be read does nothing"
            )
            assert reward < 0, "a reply that cannot be read has a price"
        world.set_state(state)


def _check_turn_state(world: TurnWorld, twin: TurnWorld) -> None:
    world.reset(seed=5)
    _talk(world, 7, seed=2)
    state = world.get_state()
    for name, value in state.items():
        assert isinstance(value, np.ndarray | np.generic | bool | int | float | str), f"state {name!r} is {type(value)}"
        assert np.asarray(value).dtype != object, f"state {name!r} holds Python objects"
    here, future = world.snapshot(), _talk(world, 60, seed=3)
    twin.reset(seed=99)
    _talk(twin, 3, seed=4)
    for other, promise in ((world, "set_state"), (twin, "set_state on another instance")):
        other.set_state(state)
        assert np.array_equal(other.snapshot(), here), f"{promise}: another scene"
        _assert_same_talk(_talk(other, 60, seed=3), future, promise)


def _check_turn_pictures(world: TurnWorld, twin: TurnWorld) -> None:
    world.reset(seed=6)
    seen = np.stack([step[0].snapshot for step in _talk(world, 30, seed=5)])
    state, future = world.get_state(), _talk(world, 30, seed=6)
    world.set_state(state)
    frames = world.draw(seen)
    assert frames.shape == (len(seen), *world.picture_px, 3) and frames.dtype == np.uint8, f"frames: {frames.shape}"
    assert np.array_equal(frames, world.draw(seen)), "the same snapshot looks the same twice"
    assert np.array_equal(frames[::-1], twin.draw(seen[::-1])), "any instance draws it, in any order"
    _assert_same_talk(_talk(world, 30, seed=6), future, "drawing disturbs nothing")
    keys = world.picture_key(seen)
    assert keys.dtype == np.int64 and keys.shape[0] == len(seen), "keys are [N, P] int64"
    for i, j in zip(*np.triu_indices(len(seen), 1), strict=True):
        if np.array_equal(keys[i], keys[j]):
            assert np.array_equal(frames[i], frames[j]), "equal keys look equal"
    assert len({frame.tobytes() for frame in frames}) >= 2, "different scenes look different"


def _check_expert(world: TurnWorld) -> None:
    for seed in range(5):
        world.reset(seed=seed)
        is_over = False
        while not is_over:
            action = world.expert_action()
            assert action in world.legal(), f"the expert's {action} is not legal"
            reply = world.read(world.action_text(action, world.expert_thought()))
            assert reply.action == action and "thoughts" in reply.thought, "the expert's reply is read as it is meant"
            _, _, terminated, truncated, _ = world.step(reply.text)
            is_over = terminated or truncated
