"""A MuJoCo task of your own in one file: a two-link arm has to touch the green ball. See docs/mujoco_tasks.md."""

import numpy as np

from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.mujoco.env import MujocoScene, SceneEnv, SceneState
from rlvlm.envs.registry import Task

TASK = Task(
    name="reach_arm",
    goal="touch the green ball with the red tip of the arm",
    maker="reach_arm:make",
    env=StepEnvConfig(start="random", episode_steps=50),
)
XML = """
<mujoco>
  <option timestep=".01"/>
  <default>
    <joint type="hinge" axis="0 0 1" damping="1" armature=".1"/>
    <geom type="capsule" size=".04" density="200" contype="0" conaffinity="0" rgba=".3 .4 .6 1"/>
  </default>
  <worldbody>
    <camera pos="0 0 3" fovy="50"/>
    <light directional="true" dir=".2 -.3 -1"/>
    <geom type="plane" size="3 3 .1" rgba=".9 .9 .85 1" pos="0 0 -.1"/>
    <body name="ball" mocap="true"><geom type="sphere" size=".1" rgba="0 .6 0 1"/></body>
    <body>
      <joint name="shoulder"/> <geom fromto="0 0 0 .5 0 0"/>
      <body pos=".5 0 0">
        <joint name="elbow"/> <geom fromto="0 0 0 .5 0 0"/>
        <geom type="sphere" pos=".5 0 0" size=".07" rgba=".8 .1 .1 1"/> <site name="tip" pos=".5 0 0"/>
      </body>
    </body>
  </worldbody>
  <actuator> <motor joint="shoulder" ctrlrange="-2 2"/> <motor joint="elbow" ctrlrange="-1 1"/> </actuator>
</mujoco>"""


class Arm(MujocoScene):
    """The start and the judging; everything else is the base's."""

    goal = TASK.goal

    def __init__(self, start):
        super().__init__(XML)
        self.start = start

    def place(self, data, rng):
        angle = rng.uniform(-np.pi, np.pi) if self.start == "random" else 2.0
        data.mocap_pos[0] = 0.7 * np.cos(angle), 0.7 * np.sin(angle), 0

    def judge(self, data):
        left = float(np.linalg.norm(data.site("tip").xpos - data.mocap_pos[0]))
        return SceneState(reward=-left, progress=1 - left / 1.7, success=left < 0.1)


def make(config, seed):
    """An env of this task."""
    return SceneEnv(Arm(config.start), config, seed)
