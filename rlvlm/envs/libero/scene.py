"""A compiled LIBERO task: its model, its arm, its saved starts and the benchmark's own test of success.

Compiling takes seconds and hundreds of megabytes, so each task exists once in a process, and all its envs share it in
turn: their states differ in a single array of some hundred numbers.
"""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import MachineError
from rlvlm.core.steps import FloatArray
from rlvlm.envs.env import FIRST_HELD_OUT_STATE
from rlvlm.envs.libero.perturbed import LiberoTask, draw_starts, read_task
from rlvlm.envs.robosuite.arm import robot_columns
from rlvlm.envs.robosuite.scene import Doubles, RobosuiteScene, load, silence

CAMERAS = ("agentview", "robot0_eye_in_hand")
NO_OP = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
"""Action that stands still with the gripper open."""
# env steps before an episode, as in OpenVLA's evaluation: things in saved starts first fall a little
_SETTLING_STEPS = 10
_NUM_STARTS = 50  # of a task without saved ones, as many as the others have
_SETTLING_AGAIN = 3  # env steps after things were moved
_EVERY_HELD_OUT = 5  # one in this many saved starts is for evaluation alone
_FAR_M = 0.8  # at this distance from its target a thing has no progress
_ALMOST = 0.9  # progress of a goal that is as near as possible but not reached
_TRIES = 20  # attempts to find a free place
_SHIFT_M = 0.03  # largest shift of things along both sides of the table, in augmented scenes

_scenes: "weakref.WeakValueDictionary[tuple[str, int, float, str], LiberoScene]" = weakref.WeakValueDictionary()


def shared_scene(suite: str, number: int, mesh_cell: float, perturbation: str = "none") -> "LiberoScene":
    """Returns the scene of a task, compiled if this process has none; see `LiberoScene`.

    Raises:
        UsageError: LIBERO-PRO does not change this task so.
        MachineError: LIBERO is not installed, or incomplete.
    """
    key = (suite, number, mesh_cell, perturbation)
    found = _scenes.get(key)
    if found is None:
        found = _scenes[key] = LiberoScene(*key)
    return found


class LiberoScene(RobosuiteScene):
    """One LIBERO task.

    Args:
        suite: a key of `SUITES`.
        number: number of the task, from 0.
        mesh_cell: size of the cells in which mesh points are merged, metres; 0 draws as the benchmark does.
        perturbation: LIBERO-PRO's change of the task, or none; see `read_task`.

    Raises:
        UsageError: LIBERO-PRO does not change this task so.
        MachineError: LIBERO is not installed, or incomplete.
    """

    def __init__(self, suite: str, number: int, mesh_cell: float, perturbation: str) -> None:
        task = read_task(suite, number, perturbation)
        self.instruction = task.instruction
        super().__init__(_compiled(task), CAMERAS, mesh_cell)
        self.goals: Sequence[Sequence[str]] = self.env.parsed_problem["goal_state"]
        self.named = tuple(dict.fromkeys(name for goal in self.goals for name in goal[1:]))
        self._saved: Doubles = draw_starts(self.env, _NUM_STARTS) if task.starts is None else task.starts
        self._is_held_out = np.arange(len(self._saved)) % _EVERY_HELD_OUT == _EVERY_HELD_OUT - 1
        self.num_held_out = int(self._is_held_out.sum())
        """Number of saved starts reserved for evaluation."""
        self._settled: dict[int, Doubles] = {}
        self._things = np.flatnonzero(self.model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)
        self.robot_columns = robot_columns(self.model)
        self._fixtures = [self.env.obj_body_id[name] for name in self.env.fixtures_dict]
        self.env.check_contact = _contact_check(self.model, self.data)
        self._aside = mujoco.MjData(self.model)  # a second state for queries, so that the loaded one is not changed
        self.turn = threading.RLock()
        """Lock held while the physics is stepped: a judge's thread may make an env of the scene while another is
        played."""

    def start(self, state_id: int, moved_m: float) -> Doubles:
        """Returns the settled start of episode `state_id`: one of the benchmark's saved starts, with things moved.

        Numbers from `FIRST_HELD_OUT_STATE` on use the held-out saved starts.

        Args:
            state_id: decides the whole start.
            moved_m: largest shift of each thing along both sides of the table. Things on or in another thing move with
                    it; things on or in a fixture (stove, cabinet, ...) stay.
        """
        own = np.flatnonzero(self._is_held_out == (state_id >= FIRST_HELD_OUT_STATE))
        index = int(own[state_id % len(own)])
        if index not in self._settled:  # takes ten env steps, and always the same ones
            saved, model, data = self._saved[index], self.model, self.data
            mujoco.mj_resetData(model, data)
            data.time, data.qpos[:], data.qvel[:] = saved[0], saved[1 : 1 + model.nq], saved[1 + model.nq :]
            self.arm.let_go()
            for step in range(_SETTLING_STEPS):
                # the first step pulls towards the pose of rest: robosuite has not yet noticed that the arm was moved
                # from there
                self.arm.step(NO_OP, keeps_goal=step == 0)
            self._settled[index] = self.save()
        self.load(self._settled[index])
        if moved_m > 0:
            self._move_things(np.random.default_rng((state_id, 0x6D6F76)), moved_m)
            for _ in range(_SETTLING_AGAIN):
                self.arm.step(NO_OP)
        state = self.save()  # before the next line, which changes the solver's warm start and with it the future
        mujoco.mj_fwdPosition(self.model, self.data)
        return state

    def is_solved(self) -> bool:
        """Returns the benchmark's own test, on positions and contacts at the latest substep's beginning, as there."""
        return bool(self.env._check_success())

    def is_reached(self, goal: Sequence[str]) -> bool:
        """Returns the same test for a single goal."""
        return bool(self.env._eval_predicate(goal))

    def is_shut(self, name: str) -> bool:
        """Returns whether the region `name` is in a drawer, or behind a door, that is not open."""
        region = self.env.object_sites_dict.get(name)
        return bool(region is not None and region.joints and not self.env.object_states_dict[name].is_open())

    def progress(self) -> float:
        """Returns the mean over the goals: 1 for one that is reached, else its nearness, up to 0.9."""
        return float(np.mean([self._nearness(goal) for goal in self.goals]))

    def place_of(self, name: str) -> Doubles:
        """Returns [3], the position of a thing, a fixture or a region at the latest kinematics."""
        if name in self.env.object_sites_dict:
            return self.data.site(name).xpos
        return self.data.xpos[self.env.obj_body_id[name]]

    def landmarks(self, positions: FloatArray) -> FloatArray:
        """Returns [N, 1 + things, 3], the hand and the things that the goals name, for joint positions [N, nq]; metres.

        A knob or door does not move when it turns: its landmark is raised by as many metres as it has turned radians.
        """
        data, env = self._aside, self.env
        names = self.named
        sites = {name: self.model.site(name).id for name in names if name in env.object_sites_dict}
        turning = {
            1 + names.index(name): self.model.joint(env.get_object(name).joints[0]).qposadr[0]
            for name in (goal[1] for goal in self.goals if len(goal) == 2)
            if name not in sites
        }
        landmarks = np.empty((len(positions), 1 + len(names), 3), np.float32)
        for own, row in zip(landmarks, positions, strict=True):
            data.qpos[:] = row
            mujoco.mj_kinematics(self.model, data)
            own[0] = data.site_xpos[self.arm.site]
            own[1:] = [
                data.site_xpos[sites[name]] if name in sites else data.xpos[env.obj_body_id[name]] for name in names
            ]
            # shows a critic whether it has been turned
            for index, address in turning.items():
                own[index, 2] += row[address]
        return landmarks

    def augment_scenes(self, positions: FloatArray, starts: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Returns [N, nq], the robot of `positions` [N, nq] among the things of `starts` [N, nq], moved by up to 3 cm.

        Nothing is simulated: things may overlap each other and the robot.
        """
        scenes = starts.copy()
        for address in self.model.jnt_qposadr[self._things].tolist():
            shifts = rng.uniform(-_SHIFT_M, _SHIFT_M, (len(scenes), 2))
            scenes[:, address : address + 2] += shifts.astype(np.float32)
        scenes[:, self.robot_columns] = positions[:, self.robot_columns]
        return scenes

    def _move_things(self, rng: np.random.Generator, moved_m: float) -> None:
        """Shifts each stack of things to a place where it touches nothing new."""
        model, data = self.model, self.data
        mujoco.mj_fwdPosition(model, data)
        # things that touch at the start may keep touching: one stands on the other, or lies in it
        touching = self._touching()
        for stack in self._stacks(touching):
            addresses = np.concatenate([model.jnt_qposadr[joint] + np.arange(2) for joint in stack])
            was = data.qpos[addresses].copy()
            bodies = {int(model.jnt_bodyid[joint]) for joint in stack}
            for shift in rng.uniform(-moved_m, moved_m, (_TRIES, 2)):
                data.qpos[addresses] = was + np.tile(shift, len(stack))
                mujoco.mj_fwdPosition(model, data)
                if not any(pair & bodies for pair in self._touching() - touching):
                    break
            else:  # no free place: it stays
                data.qpos[addresses] = was
                mujoco.mj_fwdPosition(model, data)

    def _stacks(self, touching: set[frozenset[int]]) -> list[list[int]]:
        """Returns the joints of things grouped by contact, direct or not, without groups that touch a fixture."""
        stack_of = {int(self.model.jnt_bodyid[joint]): index for index, joint in enumerate(self._things)}
        # one round per thing: each round spreads a stack's number by at least one thing
        for _ in stack_of:
            for body, other_body in (tuple(pair) for pair in touching if pair <= stack_of.keys()):
                stack_of[body] = stack_of[other_body] = min(stack_of[body], stack_of[other_body])
        held = {stack_of[body] for pair in touching if pair & set(self._fixtures) for body in pair & stack_of.keys()}
        stacks: dict[int, list[int]] = {}
        for joint in self._things.tolist():
            stacks.setdefault(stack_of[int(self.model.jnt_bodyid[joint])], []).append(joint)
        return [joints for index, joints in stacks.items() if index not in held]

    def _touching(self) -> set[frozenset[int]]:
        """Returns pairs of the outermost bodies of things, fixtures, robot and ground that touch."""
        roots = self.model.body_rootid[self.model.geom_bodyid[self.data.contact.geom]]
        return {frozenset(pair) for pair in roots.tolist() if pair[0] != pair[1]}

    def _nearness(self, goal: Sequence[str]) -> float:
        """Returns how near a goal is, in [0, 1]: by the remaining distance, or the missing share of a joint's range."""
        if self.is_reached(goal):
            return 1.0
        if len(goal) == 3:  # a thing has to be put on or into something
            distance = float(np.linalg.norm(self.place_of(goal[1]) - self.place_of(goal[2])))
            return _ALMOST * (1.0 - min(distance / _FAR_M, 1.0))
        verb, name = goal  # a knob, a drawer or a door has to be moved
        holder = self.env.object_states_dict[name]
        parent = self.env.get_object(getattr(holder, "parent_name", name))
        wanted = parent.object_properties["articulation"][f"default_{verb}_ranges"]
        shares = []
        for joint in self.env.get_object(name).joints:
            low, high = self.model.joint(joint).range
            missing = float(self.data.joint(joint).qpos[0]) - np.clip(self.data.joint(joint).qpos[0], *sorted(wanted))
            shares.append(1.0 - min(abs(missing) / (high - low), 1.0))
        return _ALMOST * max(shares, default=0.0)


def _contact_check(model: mujoco.MjModel, data: mujoco.MjData) -> Callable[[Any, Any], bool]:
    """Returns a test whether two things touch; robosuite's own asks for the names of every contact's shapes.

    Success is tested at every step: robosuite's test took a fifteenth of a rollout's time.
    """
    is_of: dict[str, NDArray[np.bool_]] = {}

    def shapes(thing: Any) -> NDArray[np.bool_]:
        if thing.name not in is_of:
            is_of[thing.name] = np.zeros(model.ngeom, bool)
            is_of[thing.name][[model.geom(name).id for name in thing.contact_geoms]] = True
        return is_of[thing.name]

    def is_touching(left: Any, right: Any) -> bool:
        is_left, is_right = (shapes(thing)[data.contact.geom] for thing in (left, right))  # [contacts, 2]
        return bool((is_left & is_right[:, ::-1]).any())

    return is_touching


def _compiled(task: LiberoTask) -> Any:
    """Returns the benchmark's env, without cameras. Fixtures stand where its seed 0 puts them."""
    load("libero.libero.envs")
    controller = load("robosuite").load_controller_config(default_controller="OSC_POSE")
    try:
        with silence(), task.file() as file:
            problem = load("libero.libero.envs.bddl_utils").get_problem_info(file)["problem_name"]
            maker = load("libero.libero.envs.bddl_base_domain").TASK_MAPPING[problem]
            np.random.seed(0)  # the benchmark draws fixtures' places from the global generator as it compiles
            return maker(
                file,
                robots=["Panda"],
                controller_configs=controller,
                initialization_noise=None,
                use_camera_obs=False,
                has_offscreen_renderer=False,
                hard_reset=False,
            )
    except (OSError, ImportError) as error:
        raise MachineError(
            f"LIBERO's files are not whole: {error}", "pip install --force-reinstall '.[libero]'"
        ) from error
