"""Grasps of simple shapes, by hand."""

import mujoco
import numpy as np
import pytest

from rlvlm.envs.robosuite.grasping import plan_grasp, surface_points

NOTHING = np.empty((0, 3))
ALONG_X, ALONG_Y = np.array([1.0, 0.0]), np.array([0.0, 1.0])


def box(x: float, y: float, z: float) -> np.ndarray:
    """Corners of a box of that size, standing on the ground at the origin."""
    return np.array(np.meshgrid([-x / 2, x / 2], [-y / 2, y / 2], [0, z])).reshape(3, -1).T


def test_a_narrow_box_is_taken_across_its_narrow_side():
    for fingers in (ALONG_X, ALONG_Y):
        grasp = plan_grasp(box(0.04, 0.10, 0.06), fingers, NOTHING)
        assert abs(grasp.across @ ALONG_X) == pytest.approx(1)
        assert grasp.place == pytest.approx([0, 0, 0.06 - 0.033]) and grasp.top == pytest.approx(0.06)


def test_of_two_equal_ways_the_hand_takes_the_one_that_needs_no_turn():
    for fingers in (ALONG_X, ALONG_Y):
        assert abs(plan_grasp(box(0.05, 0.05, 0.06), fingers, NOTHING).across @ fingers) == pytest.approx(1)


def test_a_finger_comes_down_beside_other_things():
    thing, neighbour = box(0.05, 0.05, 0.06), box(0.02, 0.02, 0.06) + [0.06, 0, 0]

    def nearest(obstacle: np.ndarray) -> float:
        """Distance from an open finger to the obstacle's middle, seen from above."""
        grasp = plan_grasp(thing, ALONG_X, obstacle)
        fingers = grasp.place[:2] + np.array([[0.05], [-0.05]]) * grasp.across
        return float(np.linalg.norm(fingers - [0.06, 0], axis=1).min())

    assert nearest(neighbour) > 0.02
    assert nearest(neighbour * [1, 1, 0.1]) == pytest.approx(0.01)  # 6 mm high: the fingers stay above it


def test_the_palm_comes_down_beside_tall_things():
    thing, beside = box(0.05, 0.05, 0.06), box(0.02, 0.02, 0.12) + [0.09, 0, 0]  # out of the fingers' way
    grasp = plan_grasp(thing, ALONG_X, beside)
    away = np.array([0.09, 0]) - grasp.place[:2]
    assert abs(away @ grasp.across) > 0.09 or abs(np.cross([*grasp.across, 0], [*away, 0])[2]) > 0.03
    short = plan_grasp(thing, ALONG_X, beside * [1, 1, 0.5])
    assert abs(short.across @ ALONG_X) == pytest.approx(1) and short.place[:2] == pytest.approx([0, 0])


def test_a_wide_bowl_is_taken_at_its_rim():
    angles = np.linspace(0, 2 * np.pi, 72, endpoint=False)
    rim = np.stack([0.07 * np.cos(angles), 0.07 * np.sin(angles), np.full(72, 0.05)], axis=1)
    bowl = np.concatenate([rim, rim * [0.4, 0.4, 0.0]])
    grasp = plan_grasp(bowl, ALONG_Y, NOTHING)
    assert np.linalg.norm(grasp.place[:2]) == pytest.approx(0.062, abs=1e-3)
    assert abs(grasp.place[1]) == pytest.approx(0.062, abs=1e-3) and grasp.place[2] == pytest.approx(0.028)


def test_points_lie_on_collision_geometry():
    model = mujoco.MjModel.from_xml_string("""
<mujoco><worldbody><body name="thing" pos="1 2 3">
  <geom type="cylinder" size=".1 .2"/><geom type="box" size="9 9 9" contype="0" conaffinity="0"/>
  <body pos="0 0 1"><geom type="sphere" size=".05"/></body>
</body></worldbody></mujoco>""")
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    points = surface_points(model, data, model.body("thing").id)
    assert points.min(axis=0) == pytest.approx([0.9, 1.9, 2.8]) and points.max(axis=0) == pytest.approx(
        [1.1, 2.1, 4.05]
    )
