import subprocess
import sys

import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.registry import Task, find_task, make_env, make_vector, register, task_goal

TINY = "rlvlm.testing:TINY"


def test_a_task_has_a_goal_to_tell_and_one_to_see_and_needs_no_registration_when_given_by_reference():
    assert task_goal("drawer_open") == "open the drawer"
    assert find_task("drawer_open").goal_state == "the drawer is open"
    env = make_env(TINY, StepEnvConfig(), 0)
    assert env.goal == task_goal(TINY) == "push the red block to the green line"


def test_a_file_is_distinguished_from_a_misspelt_task():
    with pytest.raises(UsageError, match="is a file") as caught:
        task_goal("./tasks/push_crate.py")
    assert caught.value.fix.startswith("tasks.push_crate:NAME")


@pytest.mark.parametrize("name", ["metaworld/dor-open-v3", "metaworld/door-open-v2", "door-open-v3"])
def test_a_misspelt_member_of_a_family_names_its_neighbour_and_not_all_fifty(name):
    with pytest.raises(UsageError, match=r"metaworld(/NAME \(50\)| has 50)") as caught:
        task_goal(name)
    assert caught.value.fix == "did you mean metaworld/door-open-v3?"
    assert "coffee-pull-v3" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("drawer_opne", "did you mean drawer_open?"),
        ("metaworld/window-clos-v3", "did you mean metaworld/window-close-v3?"),
        ("libero_objekt/0", "did you mean libero_object/0?"),
        ("minigrid/Foo", "rlvlm check-task minigrid --list  shows those that there are"),
        ("libero_goal/10", "rlvlm check-task libero_goal --list  shows those that there are"),
        ("minigrid", "rlvlm check-task minigrid --list  shows those that there are"),
        ("chess", "rlvlm check-task --list  shows those that there are"),
        ("12", "rlvlm check-task --list  shows those that there are"),
    ],
)
def test_only_a_near_name_of_the_same_family_is_proposed(name, fix):
    with pytest.raises(UsageError) as caught:
        task_goal(name)
    assert caught.value.fix == fix


@pytest.mark.parametrize("reference", ["no.such.module:X", "rlvlm.testing:NO", "rlvlm.testing:TinyEnv", ":", "a:"])
def test_a_wrong_reference_is_a_usage_error(reference):
    with pytest.raises(UsageError):
        task_goal(reference)


def test_registering_twice_is_allowed_but_not_with_another_meaning():
    task = Task(name="test_registry_push", goal="push", maker="rlvlm.testing:TinyEnv")
    register(task)
    register(task)
    assert make_env("test_registry_push", StepEnvConfig(), 0).snapshot_size == 3
    with pytest.raises(ValueError, match="already registered"):
        register(Task(name="test_registry_push", goal="pull", maker="rlvlm.testing:TinyEnv"))
    with pytest.raises(ValueError, match="two rising returns"):
        register(Task(name="test_registry_range", goal="", maker="rlvlm.testing:TinyEnv", return_range=(1.0, 0.0)))
    with pytest.raises(ValueError, match="package.module:function"):
        register(Task(name="test_registry_other", goal="push", maker="rlvlm.testing"))


def test_the_registry_loads_no_simulator():
    code = "import sys, rlvlm.envs.registry; print({'mujoco', 'metaworld', 'gymnasium', 'numpy'} & set(sys.modules))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "set()"


def test_envs_side_by_side_start_differently_and_reproducibly():
    config = StepEnvConfig(start="random", num_envs=3)
    starts = [make_vector(TINY, config, seed).reset()[0] for seed in (4, 4, 5)]
    assert len(np.unique(starts[0], axis=0)) == 3
    np.testing.assert_array_equal(starts[0], starts[1])
    assert not np.array_equal(starts[0], starts[2])


def test_a_finished_env_is_reset_within_the_same_step():
    vector = make_vector(TINY, StepEnvConfig(num_envs=2, episode_steps=3), 0)
    first, _ = vector.reset()
    right = np.array([[1.0, 0.0]] * 2, np.float32)
    for _ in range(2):
        vector.step(right)
    obs, rewards, terminated, truncated, infos = vector.step(right)
    np.testing.assert_array_equal(obs, first)
    assert truncated.all() and not terminated.any()
    # three steps of 0.1 from x = 0.2: the first only touches the block, the others push it from 0.4 to 0.6
    np.testing.assert_allclose(rewards, 0.5, atol=1e-6)
    np.testing.assert_allclose(infos["final_info"]["snapshot"], [[0.5, 0.5, 0.6]] * 2, atol=1e-6)
    np.testing.assert_allclose(infos["final_obs"][0], [0.5, 0.5, 0.6, 0.2], atol=1e-6)


def test_a_missing_module_says_where_to_stand_and_a_gymnasium_class_how_it_is_named():
    cases = {
        "gym:nowhere_at_all:X-v0": "nowhere_at_all.py must lie in this folder",
        "nowhere_at_all:TASK": "PYTHONPATH=THAT_FOLDER",
        "own_envs:Reach": "gym:own_envs:Reach-v0",
        "own_envs:TASK": "own_envs:NAME",
    }
    for name, fix in cases.items():
        with pytest.raises(UsageError) as raised:
            find_task(name)
        assert fix in raised.value.fix, name
