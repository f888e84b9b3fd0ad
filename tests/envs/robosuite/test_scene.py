"""A compiled scene is loaded with its libraries; its meshes and textures keep their shape in less."""

import mujoco
import numpy as np
import pytest

from rlvlm.core.errors import MachineError
from rlvlm.envs.robosuite.scene import load, shrink_textures, thin_meshes

SIDE = 20


def plates() -> mujoco.MjModel:
    """Two plates of 1 m x 1 m x 1 mm, half a metre apart, their sides made of 20 x 20 squares each."""
    grid = [(x / SIDE, y / SIDE) for x in range(SIDE + 1) for y in range(SIDE + 1)]
    vertices = [(x, y, z) for z in (0.0, 0.001, 0.5, 0.501) for x, y in grid]
    faces = []
    for side in range(4):
        for x in range(SIDE):
            for y in range(SIDE):
                a = side * len(grid) + x * (SIDE + 1) + y
                b, c, d = a + 1, a + SIDE + 1, a + SIDE + 2
                faces += [(a, c, d), (a, d, b)] if side % 2 else [(a, d, c), (a, b, d)]
    text = " ".join(f"{number}" for vertex in vertices for number in vertex)
    corners = " ".join(str(corner) for face in faces for corner in face)
    return mujoco.MjModel.from_xml_string(f"""
<mujoco>
  <asset>
    <mesh name="plate" vertex="{text}" face="{corners}" inertia="shell"/>
    <texture name="checks" type="2d" builtin="checker" rgb1="1 0 0" rgb2="0 0 1" width="64" height="32"/>
  </asset>
  <worldbody><geom type="mesh" mesh="plate"/></worldbody>
</mujoco>""")


def area(model: mujoco.MjModel, up: bool) -> float:
    """Of the faces that look up, or down, as they are drawn."""
    corners = model.mesh_vert[model.mesh_face[: model.mesh_facenum[0]]]
    thin = np.ptp(model.mesh_vert, axis=0).argmin()  # MuJoCo turns meshes to their axes of inertia
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])[:, thin] / 2
    return float(np.abs(normals[normals > 0 if up else normals < 0]).sum())


def test_plates_keep_both_sides_in_a_fraction_of_the_faces():
    model = plates()
    vertices, before = model.mesh_vert.copy(), [area(model, up) for up in (True, False)]
    thin_meshes(model, cell_m=0.1)
    assert 300 <= model.mesh_facenum[0] <= 1_000  # of 3,200; squares of two or three twentieths, two faces, four sides
    for up, was in zip((True, False), before, strict=True):
        assert 0.8 * was < area(model, up) <= was + 1e-6
    np.testing.assert_array_equal(model.mesh_vert, vertices)
    whole = plates()
    thin_meshes(whole, cell_m=1e-4)
    assert whole.mesh_facenum[0] == 8 * SIDE * SIDE, "cells smaller than the mesh change nothing"


def test_textures_are_averaged_by_whole_blocks():
    model = plates()
    first = int(model.tex_adr[0])
    model.tex_data[first : first + 64 * 32 * 3] = 0
    model.tex_data[first : first + 3] = 16  # one pixel of the first block of 4 x 4
    shrink_textures(model, side_px=8)
    assert (model.tex_height[0], model.tex_width[0]) == (8, 16)
    small = model.tex_data[first : first + 8 * 16 * 3]
    assert small[:3].tolist() == [1, 1, 1] and not small[3:].any()
    shrink_textures(model, side_px=8)
    assert model.tex_width[0] == 16  # small enough already


@pytest.mark.slow
def test_a_library_that_the_system_lacks_is_named_with_its_package(tmp_path, monkeypatch):
    pytest.importorskip("robosuite")
    pytest.importorskip("libero")
    (tmp_path / "needs_gl.py").write_text(
        "raise ImportError('libGL.so.1: cannot open shared object file: No such file or directory')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MachineError, match=r"libGL\.so\.1") as caught:  # as OpenCV says on a slim machine
        load("needs_gl")
    assert "libgl1" in caught.value.fix
