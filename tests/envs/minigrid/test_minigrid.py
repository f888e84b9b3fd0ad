import re
from collections import deque
from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
from minigrid.core.grid import Grid
from minigrid.core.world_object import Ball, Door, Key

from rlvlm.core.errors import UsageError
from rlvlm.envs.minigrid.config import MiniGridConfig
from rlvlm.envs.minigrid.env import MiniGridTurnEnv
from rlvlm.envs.minigrid.ids import IDS, SHORT_NAMES
from rlvlm.envs.minigrid.missions import read_mission
from rlvlm.envs.registry import find_task, make_env, task_env, task_goal
from rlvlm.testing import check_turn_env

LEFT, RIGHT, FORWARD, PICK_UP, DROP, TOGGLE, DONE = range(7)


def made(task: str, seed: int = 0, **fields) -> MiniGridTurnEnv:
    return make_env(task, MiniGridConfig(**({"episode_steps": task_env(task).episode_steps} | fields)), seed)


def test_an_empty_room_worked_by_hand():
    """Six by six cells: the agent starts at 1,1 facing right, the goal is at 4,4: three steps, a turn, three steps."""
    env = made("minigrid/MiniGrid-Empty-6x6-v0")
    assert env.snapshot()[-3:].tolist() == [1, 1, 0] and env.image_px == (192, 192)
    played = []
    while not env.is_success():
        played.append(env.expert_action())
        _, reward, terminated, _, info = env.step(env.action_text(played[-1], env.expert_thought()))
    assert played == [FORWARD] * 3 + [RIGHT] + [FORWARD] * 3
    assert terminated and info["progress"] == 1.0 and reward == pytest.approx(1 - 0.9 * 7 / 144)
    env.reset()
    astray = [env.step(env.action_text(action))[4]["progress"] for action in (FORWARD, FORWARD, LEFT, RIGHT, LEFT)]
    assert astray == pytest.approx([1 / 7, 2 / 7, 1 / 7, 2 / 7, 1 / 7])


def test_the_action_follows_from_the_thought_alone():
    """It turns until it faces the next cell, and acts on the target once that is the next cell."""
    env, sides = made("doorkey_6x6"), ["right", "down", "left", "up"]
    for seed in range(20):
        env.reset(seed=seed)
        while not env.is_success():
            words = re.search(
                r"I stand at (.*) and face (.*)\. Next is the (.*) at (.*)\. I go (.*) to (.*)\.", env.expert_thought()
            )
            assert words is not None
            cell, facing, thing, target, side, next_cell = words.groups()
            assert cell == f"{env.inner.agent_pos[0]},{env.inner.agent_pos[1]}"
            turns = (sides.index(side) - sides.index(facing)) % 4
            acts = {"key": PICK_UP, "door": TOGGLE, "goal": FORWARD}[thing] if next_cell == target else FORWARD
            assert env.expert_action() in {0: (acts,), 1: (RIGHT,), 2: (LEFT, RIGHT), 3: (LEFT,)}[turns]
            env.act(env.expert_action())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "rules"),
    [
        *((task, "strict") for task in (*SHORT_NAMES, "minigrid/BabyAI-GoToLocal-v0")),
        ("minigrid/MiniGrid-Dynamic-Obstacles-6x6-v0", "strict"),
        ("minigrid/MiniGrid-Dynamic-Obstacles-6x6-v0", "legacy"),
    ],
)
def test_they_keep_the_contract(task, rules):
    assert find_task(task).kind == "turns"
    check_turn_env(made(task, rules=rules), made(task, rules=rules))


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    ["doorkey_6x6", "four_rooms", "multi_room", "minigrid/MiniGrid-ObstructedMaze-1Dlhb-v0", "unlock", "lava_gap"],
)
def test_images_are_minigrids_own_in_true_colours(task):
    env, rng = made(task), np.random.default_rng(0)
    snapshots, frames = [], []
    for _ in range(40):
        turn, _, terminated, truncated, _ = env.step(env.action_text(int(rng.integers(7))))
        snapshots.append(turn.snapshot)
        frames.append(env.inner.get_frame(highlight=True, tile_size=32))
        if terminated or truncated:
            env.reset()
    np.testing.assert_array_equal(env.draw(np.stack(snapshots)), frames)


@pytest.mark.slow
@pytest.mark.parametrize("task", SHORT_NAMES)
def test_the_expert_always_succeeds_and_progress_never_falls(task):
    env = made(task)
    for seed in range(30):
        env.reset(seed=seed)
        before, is_over = 0.0, False
        while not is_over:
            _, _, terminated, truncated, info = env.step(env.action_text(env.expert_action()))
            assert info["progress"] > before
            before, is_over = info["progress"], terminated or truncated
        assert info["success"]


def shortest(env) -> int:
    """By trying all seven actions on copies of the env itself: independent of the planner."""
    queue, seen = deque([(env, 0)]), set()
    while queue:
        here, length = queue.popleft()
        for action in range(7):
            after = deepcopy(here)
            _, reward, terminated, _, _ = after.step(action)
            if reward > 0:
                return length + 1
            key = (after.grid.encode().tobytes(), tuple(after.agent_pos), int(after.agent_dir), after.carrying is None)
            if not terminated and key not in seen:
                seen.add(key)
                queue.append((after, length + 1))
    raise AssertionError("no way")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["doorkey_5x5", "lava_gap"])
def test_the_way_is_a_shortest_one(task):
    env = made(task)
    for seed in (2, 3):
        env.reset(seed=seed)
        length, inner = 0, deepcopy(env.inner)
        while not env.is_success():
            env.act(env.expert_action())
            length += 1
        assert length == shortest(inner)


def test_a_key_is_put_down_before_the_ball_is_picked_up():
    """Worked by hand: a corridor with a locked door, the key behind the agent, the ball behind the door."""
    env = made("minigrid/MiniGrid-UnlockPickup-v0")
    inner = env.inner
    inner.grid = Grid(7, 3)
    inner.grid.wall_rect(0, 0, 7, 3)
    inner.obj, inner.agent_pos, inner.agent_dir = Ball("red"), (2, 1), 0
    inner.grid.set(1, 1, Key("blue"))
    inner.grid.set(3, 1, Door("blue", is_locked=True))
    inner.grid.set(5, 1, inner.obj)
    plan = env._new_plan()
    assert plan is not None
    actions = [LEFT if action == RIGHT else action for action in plan.actions]  # half a turn goes either way
    key = [LEFT, LEFT, PICK_UP]
    door = [LEFT, LEFT, TOGGLE, FORWARD, FORWARD]
    behind = [LEFT, LEFT, FORWARD, FORWARD, DROP]  # the only place for the key that is not before the door
    ball = [LEFT, LEFT, FORWARD, FORWARD, PICK_UP]
    assert actions == key + door + behind + ball
    targets = [("key", (1, 1))] * 3 + [("door", (3, 1))] * 3 + [("empty cell", (1, 1))] * 7 + [("ball", (5, 1))] * 5
    assert list(plan.targets) == targets


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("MiniGrid-Fetch-8x8-N3-v0", "MiniGrid-GoToDoor-8x8-v0", "MiniGrid-GoToObject-8x8-N2-v0"),
        *("MiniGrid-PutNear-8x8-N3-v0", "MiniGrid-UnlockPickup-v0", "MiniGrid-BlockedUnlockPickup-v0"),
        *("MiniGrid-KeyCorridorS4R3-v0", "MiniGrid-LockedRoom-v0", "MiniGrid-MemoryS9-v0"),
        *("MiniGrid-RedBlueDoors-6x6-v0", "MiniGrid-ObstructedMaze-2Dlhb-v1", "MiniGrid-Dynamic-Obstacles-8x8-v0"),
        *("BabyAI-GoToSeqS5R2-v0", "BabyAI-PutNextS5N2Carrying-v0", "BabyAI-OpenDoorsOrderN4-v0"),
        *("BabyAI-UnblockPickup-v0", "BabyAI-BossLevel-v0"),
    ],
)
def test_missions_of_several_steps_are_played_to_their_end(name):
    env = made(f"minigrid/{name}")
    for seed in range(8):
        env.reset(seed=seed)
        is_over = False
        while not is_over:
            _, _, terminated, truncated, info = env.step(env.action_text(env.expert_action()))
            is_over = terminated or truncated
        assert info["success"], (seed, env.inner.mission)


def test_the_script_goes_on_from_any_state_of_a_mission():
    env = made("minigrid/MiniGrid-BlockedUnlockPickup-v0", seed=1)
    rng = np.random.default_rng(0)
    for _ in range(60):  # but nobody opens the box that is wanted, which ends it
        if rng.random() < 0.4:
            env.step(env.action_text(int(rng.integers(TOGGLE))))
        elif not env.is_success():
            env.step(env.action_text(env.expert_action()))
    twin = made("minigrid/MiniGrid-BlockedUnlockPickup-v0")
    twin.set_state(env.get_state())
    assert twin._plan == env._plan
    while not env.is_success():
        *_, truncated, _ = env.step(env.action_text(env.expert_action()))
        assert not truncated


def test_a_level_without_a_script_says_so():
    env = made("minigrid/MiniGrid-Playground-v0")
    assert not env.has_expert and read_mission(env.inner) is None
    with pytest.raises(UsageError, match="has_expert"):
        env.expert_action()


def test_a_key_that_was_put_down_is_fetched_again_and_the_wrong_end_of_lava_is_no_success():
    env = made("doorkey_6x6")
    while env.inner.carrying is None:
        env.act(env.expert_action())
    for action in (LEFT, DROP, LEFT):
        env.act(action)
    while not env.is_success():
        _, terminated, truncated = env.act(env.expert_action())
        assert not truncated
    lava = made("lava_gap")
    deaths = 0
    for seed in range(20):
        lava.reset(seed=seed)
        rng, is_over = np.random.default_rng(seed), False
        while not is_over:
            _, reward, terminated, truncated, info = lava.step(lava.action_text(int(rng.choice(lava.legal()))))
            is_over = terminated or truncated
        assert info["success"] == (reward > 0)
        deaths += terminated and not info["success"]
        assert info["success"] or info["progress"] == 0.0 or not terminated
    assert deaths


def test_only_useful_actions_are_legal_and_the_prompt_has_text_where_wanted():
    env = made("empty_random_6x6")
    assert env.legal() == (LEFT, RIGHT, FORWARD)
    assert env.read('{"action": "pick up"}').action is None
    assert "carries" not in env.prompt()
    texted = made("doorkey_6x6", shows_text=True)
    while texted.inner.carrying is None:
        assert "carries nothing" in texted.prompt()
        texted.act(texted.expert_action())
    assert "carries the" in texted.prompt() and "use the key to open the door" in texted.prompt()
    baby = made("minigrid/BabyAI-GoToLocal-v0")
    assert baby.goal in baby.prompt() and baby.goal.startswith("go to")
    assert task_goal("minigrid/BabyAI-GoToLocal-v0") == "do what the mission says"


def test_the_prompt_has_the_last_action_and_whether_it_failed_where_wanted():
    env, silent = made("doorkey_6x6", prompt_last_action=True), made("doorkey_6x6")
    prompts = {}
    for reply in ("no idea", '{"action": "toggle"}', '{"action": "turn left"}'):
        turn, *_ = env.step(reply)
        prompts[reply] = turn.prompt
        assert silent.step(reply)[0].prompt == silent.reset(seed=0)[0].prompt == env.reset(seed=0)[0].prompt
    said = [re.findall(r"Your last action (.*)\. Choose", prompt) for prompt in prompts.values()]
    assert said == [["could not be read"], ["was toggle and changed nothing"], ["was turn left"]]
    env.step('{"action": "turn left"}')
    state, prompt = env.get_state(), env.prompt()
    env.step('{"action": "turn right"}')
    env.set_state(state)
    assert env.prompt() == prompt


def test_the_turns_of_an_episode_are_minigrids_or_fewer():
    for given, expected in ((1_000, 144), (20, 20)):
        env = made("minigrid/MiniGrid-Empty-6x6-v0", episode_steps=given)
        turns = 1
        while not env.step("no idea" if turns % 2 else '{"action": "turn left"}')[3]:
            turns += 1
        assert turns == expected


@pytest.mark.filterwarnings("ignore:.*out of date")
def test_ids_and_their_limits_are_those_of_the_installed_package():
    import minigrid  # noqa: F401

    installed = {name for name in gym.registry if name.startswith(("MiniGrid-", "BabyAI-"))}
    assert {name for name in installed if not name.startswith("MiniGrid-WFC-")} == set(IDS)
    for name, limit in IDS.items():
        env = gym.make(name, disable_env_checker=True).unwrapped
        is_fixed = getattr(env, "fixed_max_steps", True)  # BabyAI's levels may set theirs by the mission
        assert (env.max_steps if is_fixed else None) == limit, name  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.full
@pytest.mark.parametrize("name", IDS)
def test_every_id_keeps_the_contract(name):
    check_turn_env(made(f"minigrid/{name}"), made(f"minigrid/{name}"))
