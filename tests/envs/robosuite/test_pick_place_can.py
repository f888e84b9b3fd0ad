"""robosuite's can in turns: the contract, the expert, what turns pay, and which way is up."""

import mujoco
import numpy as np
import pytest

from rlvlm.envs.check import check_turn_env
from rlvlm.envs.robosuite.config import PickPlaceConfig
from rlvlm.envs.robosuite.pick_place_can import PickPlaceCan

pytestmark = pytest.mark.slow


def make(**changes: object) -> PickPlaceCan:
    return PickPlaceCan(PickPlaceConfig(**({"episode_steps": 120} | changes)), 0)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def env():
    """Holds the scene, which all envs of this module share."""
    return make()


def test_moves_along_the_longer_side(env):
    ways = [np.array(way) for way in [(0.2, 0.1), (-0.2, 0.1), (0.1, 0.2), (0.1, -0.2)]]
    assert [env._towards(way) for way in ways] == ["forward", "backward", "left", "right"]
    assert [make(rules="legacy")._towards(way) for way in ways] == ["forward", "backward", "right", "left"]


def test_keeps_the_contract(env):
    check_turn_env(make(episode_steps=9), make(episode_steps=9))


def test_the_expert_puts_the_can_away_and_turns_pay_for_what_they_gain(env):
    for seed in (0, 1):
        env.reset(seed=seed)
        first, total, turns, is_over = env.progress(), 0.0, 0, False
        while not is_over:
            text = env.action_text(env.expert_action(), env.expert_thought())
            _, reward, terminated, truncated, info = env.step(text)
            total, turns, is_over = total + reward, turns + 1, terminated or truncated
        assert info["success"] and info["progress"] == 1.0 and turns < 100
        assert total == pytest.approx(1.0 - first)


def test_the_references_rules_pay_for_every_turn_and_never_end_early(env):
    reference = make(rules="legacy", move_ticks=1)
    reference.reset(seed=0)
    start = reference._hand.copy()
    for _ in range(8):
        _, reward, terminated, truncated, _ = reference.step('{"action": "down"}')
        assert reward == reference.progress() > 0 and not terminated and not truncated
    assert 0.03 < start[2] - reference._hand[2] < 0.06  # eight ticks of some 6 mm


def test_the_image_is_the_right_way_up(env):
    """The camera looks ahead of the fingers: what lies further forward appears higher, further left to the left."""
    env.reset(seed=0)
    scene = env.scene
    scene.load(env._state)
    mujoco.mj_kinematics(scene.model, scene.data)
    address = scene._address
    shown = np.repeat(env.snapshot()[None], 4, axis=0)
    shown[:, address : address + 2] = env._hand[:2] + [0.05, 0.0]
    shown[1, address] += 0.06
    shown[2, address + 1] += 0.06  # to the left, as the action says
    shown[3, address] = 9.0

    images = env.draw(shown).astype(int)
    rows, columns = [], []
    for image in images[:3]:
        row, column = np.nonzero(np.abs(image - images[3]).sum(axis=2) > 60)
        rows, columns = [*rows, row.mean()], [*columns, column.mean()]
    assert rows[1] < rows[0] - 10 and abs(columns[1] - columns[0]) < 10
    assert columns[2] < columns[0] - 10 and abs(rows[2] - rows[0]) < 10


def test_text_tells_where_the_hand_is(env):
    texted = make(shows_text=True)
    texted.reset(seed=0)
    assert "The hand is at -4, -10, 101 cm, the gripper is open." in texted.turn().prompt
    texted.step('{"action": "close gripper"}')
    assert "the gripper is closed." in texted.turn().prompt and "The hand" not in env.turn().prompt


def test_a_second_view_shows_the_can_that_the_wrist_does_not_see(env):
    both = make(second_view=True, view_px=64)
    both.reset(seed=1)
    for seed in range(50, 60):
        both.reset(seed=seed)
        image = both.draw(both.snapshot()[None])[0].astype(int)
        assert image.shape == (64, 128, 3)
        is_red = (image[..., 0] > 120) & (image[..., 1:].max(axis=2) < 60)
        if not is_red[:, :64].any():
            assert is_red[:, 64:].any()
            return
    raise AssertionError("the wrist saw every can")


def test_things_that_fall_far_away_make_no_new_image(env):
    env.reset(seed=0)
    before, snapshot = env.image_key(env.snapshot()[None]), env.snapshot()
    env.act(0)
    unseen = np.setdiff1d(np.arange(env.snapshot_size), env.scene.seen)
    snapshot[unseen] = env.snapshot()[unseen]
    assert len(unseen) == 21 and (env.image_key(snapshot[None]) == before).all()
    assert (env.draw(np.stack([snapshot])) == env.draw(snapshot[None])).all()


def test_fast_physics_is_for_training_alone(env):
    fast = PickPlaceConfig(episode_steps=9, physics="fast")
    assert fast.for_evaluation().physics == "exact"
    ends = []
    for config in (fast, fast.for_evaluation()):
        played = PickPlaceCan(config, 0)
        played.reset(seed=0)
        played.act(1)
        ends.append(played._hand)
    assert 0 < np.abs(ends[0] - ends[1]).max() < 2e-3


def test_milestones_are_passed_on_the_way(env):
    """Held but not lifted, then lifted: as the hand and the can really are."""
    env.reset(seed=0)
    first: dict[str, int] = {}
    for turn in range(100):
        for name, least in env.milestones.items():
            if env.progress() >= least:
                first.setdefault(name, turn)
        if "lifted" in first:
            break
        env.act(env.expert_action())
        height = env._can[2]
        assert env._held == (env.progress() >= env.milestones["grasped"])
        assert (env._held and height > 0.96) == (env.progress() >= env.milestones["lifted"])
    assert first["grasped"] < first["lifted"]


def test_the_robot_is_told_apart_from_the_can(env):
    moved, seen = make(), env.snapshot()
    moved.reset(seed=7)
    mixed = seen.copy()
    mixed[list(env.robot_columns)] = moved.snapshot()[list(env.robot_columns)]
    assert len(env.robot_columns) == 9, "seven joints and two fingers"
    can = env.scene.model.jnt_qposadr[env.scene.model.jnt_type == 0]
    assert not {int(place) + number for place in can for number in range(7)} & set(env.robot_columns)
    np.testing.assert_allclose(env.hand_path(mixed[None]), moved.hand_path(moved.snapshot()[None]), atol=1e-6)
