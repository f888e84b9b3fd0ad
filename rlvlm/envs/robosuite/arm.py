"""A Panda arm under operational space control (robosuite's OSC_POSE), without what makes robosuite's own step slow.

robosuite 1.4 runs the dynamics three times for each substep of the simulation and reads every sensor. Here they run
once, between reading positions and applying torques; the equations are the same. Trajectories differ by some 1e-7 in
100 steps, which comes from where the solver starts.

Source: Khatib 1987, IEEE J. Robotics and Automation 3(1), and robosuite 1.4's `controllers/osc.py` for the form used:
position and orientation uncoupled, joints drawn to their initial angles in the null space.
"""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dgesv

from rlvlm.core.steps import FloatArray

Doubles = NDArray[np.float64]

EXACT_STEP_S = 0.002
"""Simulation step of robosuite, seconds."""
FAST_STEP_S = 0.005
"""Longer simulation step, seconds: twice the speed, slightly different movements."""
_NULLSPACE_KP = 10.0
# range of the gripper's command per second: each substep changes it a little
_GRIPPER_SPEED = 0.01 / EXACT_STEP_S


def robot_columns(model: mujoco.MjModel) -> tuple[int, ...]:
    """Returns the places of the robot's joints, arm and fingers, in a robosuite model's positions [nq]."""
    joints = [model.joint(number) for number in range(model.njnt)]
    return tuple(int(joint.qposadr[0]) for joint in joints if joint.name.startswith(("robot0_", "gripper0_")))


class Arm:
    """Controls the arm of a robosuite env by changes of the hand's pose.

    Its own state between steps is in `memory`; everything else is in the env's `data`.

    Args:
        env: a robosuite env with one Panda under OSC_POSE. Its model and data are used directly, not copied.
    """

    def __init__(self, env: Any) -> None:
        robot = env.robots[0]
        controller = robot.controller
        self.model: mujoco.MjModel = env.sim.model._model
        self.data: mujoco.MjData = env.sim.data._data
        self.control_step_s: float = env.control_timestep
        self.site: int = env.sim.model.site_name2id(controller.eef_name)
        # these two are views of the simulator's memory
        self.place: Doubles = self.data.site_xpos[self.site]
        """[3] position of the point between the finger tips, metres, at the latest kinematics."""
        self.turn: Doubles = self.data.site_xmat[self.site].reshape(3, 3)
        """[3, 3] orientation of the hand; columns are its axes."""
        self._hand: int = env.sim.model.body_name2id(robot.robot_model.eef_name)
        self._joints, self._dofs = np.asarray(controller.qpos_index), np.asarray(controller.qvel_index)
        self.gripper_joints = np.asarray(robot._ref_gripper_joint_pos_indexes)
        self._block = np.ix_(self._dofs, self._dofs)
        self._motors = np.asarray(robot._ref_joint_actuator_indexes)
        self._gripper = np.asarray(robot._ref_joint_gripper_actuator_indexes)
        self._low, self._high = robot.torque_limits
        self._kp, self._kd = controller.kp, controller.kd
        self._reach = np.asarray(controller.output_max)
        self._rest = np.asarray(controller.initial_joint)
        self._rest_place, self._rest_turn = np.array(controller.initial_ee_pos), np.array(controller.initial_ee_ori_mat)
        ranges = self.model.actuator_ctrlrange[self._gripper]
        self._gripper_middle, self._gripper_half = ranges.mean(axis=1), (ranges[:, 1] - ranges[:, 0]) / 2
        self._mass = np.zeros((self.model.nv, self.model.nv))
        self._jacobian = np.zeros((6, self.model.nv))
        self.memory = np.zeros(14)
        """[14] target position and orientation, and the gripper's command: part of a state, as the physics is."""
        # views of it, written to in place
        self._goal_place, self._goal_turn = self.memory[:3], self.memory[3:12].reshape(3, 3)
        self._grip = self.memory[12:]

    def proprio(self) -> FloatArray:
        """Returns [8]: hand position, rotation as axis times angle, both finger joints, as in LIBERO's datasets."""
        w, *axis = self.data.xquat[self._hand]
        w = min(max(w, -1.0), 1.0)
        sine = np.sqrt(1.0 - w * w)
        # a quaternion is (cos a/2, sin a/2 axis); for a tiny angle the axis is undefined
        turn = np.zeros(3) if sine < 1e-8 else np.array(axis) * 2.0 * np.arccos(w) / sine
        return np.concatenate([self.place, turn, self.data.qpos[self.gripper_joints]]).astype(np.float32)

    def let_go(self) -> None:
        """Resets the controller as for a new episode: the target is the pose of rest, the gripper has no command."""
        self._goal_place[:], self._goal_turn[:], self._grip[:] = self._rest_place, self._rest_turn, 0.0

    def step(self, action: FloatArray, step_s: float = EXACT_STEP_S, *, keeps_goal: bool = False) -> None:
        """Makes one env step.

        Args:
            action: [7] change of position and rotation, each in [-1, 1] of 5 cm and 0.5 rad, and the gripper: 1 closes,
                -1 opens.
            step_s: simulation step, seconds; divides the env step.
            keeps_goal: whether only the gripper's part of `action` counts.
        """
        model, data = self.model, self.data
        model.opt.timestep = step_s
        change = np.clip(np.asarray(action[:6], np.float64), -1.0, 1.0) * self._reach
        grip = np.array([-1.0, 1.0]) * np.sign(action[6]) * _GRIPPER_SPEED * step_s
        for index in range(round(self.control_step_s / step_s)):
            mujoco.mj_step1(model, data)
            if index == 0 and not keeps_goal:  # where the hand is now is known once positions are up to date
                self._set_goal(change)
            data.ctrl[self._motors] = self._torques()
            np.clip(self._grip + grip, -1.0, 1.0, out=self._grip)
            data.ctrl[self._gripper] = self._gripper_middle + self._gripper_half * self._grip
            mujoco.mj_step2(model, data)

    def _set_goal(self, change: Doubles) -> None:
        """Sets the target to the present pose, changed; an orientation that is not changed keeps its target."""
        self._goal_place[:] = self.place + change[:3]
        angle = np.linalg.norm(change[3:])
        if angle > 0:
            quaternion, turn = np.empty(4), np.empty(9)
            mujoco.mju_axisAngle2Quat(quaternion, change[3:] / angle, angle)
            mujoco.mju_quat2Mat(turn, quaternion)
            self._goal_turn[:] = turn.reshape(3, 3) @ self.turn

    def _torques(self) -> Doubles:
        """Returns [7] joint torques, clipped to their limits."""
        data, dofs = self.data, self._dofs
        mujoco.mj_jacSite(self.model, data, self._jacobian[:3], self._jacobian[3:], self.site)
        speed = self._jacobian @ data.qvel
        mujoco.mj_fullM(self.model, self._mass, data.qM)
        mass, jacobian = self._mass[self._block], self._jacobian[:, dofs]
        joint_speed = data.qvel[dofs]
        turn, goal = self.turn, self._goal_turn
        error = np.empty(6)
        error[:3] = self._goal_place - self.place
        # half the sum of cross products of the present axes with the target ones
        relative = goal @ turn.T
        error[3:] = relative[2, 1] - relative[1, 2], relative[0, 2] - relative[2, 0], relative[1, 0] - relative[0, 1]
        error[3:] *= 0.5
        # target acceleration of the hand: kp e - kd v
        wanted = error * self._kp - speed * self._kd
        # the hand's inertia is L = (J M^-1 J^T)^-1; position and rotation are decoupled, so two 3 x 3 blocks are enough
        mobility = _solved(mass, jacobian.T)  # M^-1 J^T
        inverse_inertia = jacobian @ mobility
        wrench = np.concatenate(
            [_solved(inverse_inertia[:3, :3], wanted[:3]), _solved(inverse_inertia[3:, 3:], wanted[3:])]
        )
        # M (kp (q_rest - q) - 2 sqrt(kp) dq): a critically damped pull to the pose of rest
        towards_rest = mass @ (
            _NULLSPACE_KP * (self._rest - data.qpos[self._joints]) - 2 * np.sqrt(_NULLSPACE_KP) * joint_speed
        )
        # N^T tau = tau - J^T Lambda (M^-1 J^T)^T tau
        towards_rest -= jacobian.T @ _solved(inverse_inertia, mobility.T @ towards_rest)
        # tau = J^T F + gravity and rotation terms + the pull to rest in the null space of the hand
        torques = jacobian.T @ wrench + data.qfrc_bias[dofs] + towards_rest
        return np.minimum(np.maximum(torques, self._low), self._high)


def _solved(matrix: Doubles, right: Doubles) -> Doubles:
    """Solves like `numpy.linalg.solve`, in a third of its time for matrices as small as these."""
    _, _, solution, info = dgesv(matrix, right)
    if info:
        raise np.linalg.LinAlgError(f"singular matrix ({info})")
    return solution
