import importlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import mujoco
import numpy as np
import pytest

from rlvlm.core.errors import MachineError
from rlvlm.envs.mujoco.renderer import Camera, Renderer

SCENE = """
<mujoco>
  <visual><headlight ambient="1 1 1" diffuse="0 0 0" specular="0 0 0"/></visual>
  <worldbody>
    <camera name="any"/>
    <site name="marker" pos=".5 .5 .2" size=".2" rgba="0 1 0 1"/>
    <body name="slider">
      <joint type="slide" axis="1 0 0"/>
      <geom name="red" type="box" size=".1 .1 .1" rgba="1 0 0 1"/>
    </body>
    <body name="stand" pos="0 .6 0"><geom name="blue" type="box" size=".1 .1 .1" rgba="0 0 1 1"/></body>
  </worldbody>
</mujoco>
"""
ABOVE = Camera(position=(0.0, 0.0, 10.1), right=(1.0, 0.0, 0.0), up=(0.0, 2.0, 0.0), fovy_deg=11.4212)
"""Ten metres above the boxes' upper sides, which it sees from -1 to 1 both ways."""


def paint(snapshots: list[list[float]], size_px: int, hidden: str = "") -> np.ndarray:
    model = mujoco.MjModel.from_xml_string(SCENE)
    renderer = Renderer(model, ABOVE, np.array([model.geom(i).name == hidden for i in range(model.ngeom)]), ("stand",))
    return renderer.draw(np.array(snapshots, np.float32), size_px)


def test_two_boxes_by_hand():
    # one joint (the slider's x), then the stand's position
    image = paint([[0.4, -0.5, 0.6, 0.0]], 20)[0]
    red = np.argwhere((image[..., 0] > 200) & (image[..., 2] < 50))
    blue = np.argwhere((image[..., 2] > 200) & (image[..., 0] < 50))
    # 20 pixels over 2 m: x = 0.3 to 0.5 are columns 13 and 14, y = 0.1 to -0.1 rows 9 and 10, rows counted from above
    assert red.tolist() == [[9, 13], [9, 14], [10, 13], [10, 14]]
    assert blue.tolist() == [[3, 4], [3, 5], [4, 4], [4, 5]]
    assert image[..., 1].max() < 50  # the marker is left out
    image = paint([[0.4, -0.5, 0.6, 0.0]], 20, hidden="red")[0]
    assert not ((image[..., 0] > 200) & (image[..., 2] < 50)).any()
    assert ((image[..., 2] > 200) & (image[..., 0] < 50)).any()


def test_a_size_looks_the_same_whatever_was_drawn_before():
    model = mujoco.MjModel.from_xml_string(SCENE)
    snapshots = np.array([[0.4, -0.5, 0.6, 0.0], [0.0, 0.5, 0.0, 0.0]], np.float32)
    renderers = [Renderer(model, ABOVE, np.zeros(model.ngeom, bool), ("stand",)) for _ in range(3)]
    images = {size_px: renderers[0].draw(snapshots, size_px) for size_px in (32, 100, 7)}
    for renderer, order in zip(renderers[1:], ((7, 32, 100), (100, 7, 32)), strict=True):
        for size_px in order:
            np.testing.assert_array_equal(renderer.draw(snapshots, size_px), images[size_px])


def test_threads_take_turns_with_one_painter():
    model = mujoco.MjModel.from_xml_string(SCENE)
    renderer = Renderer(model, ABOVE, np.zeros(model.ngeom, bool), ("stand",))
    snapshots = [np.array([[place, 0.0, 0.6, 0.0]], np.float32) for place in np.linspace(-0.8, 0.8, 24)]
    alone = [renderer.draw(snapshot, 32) for snapshot in snapshots]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda one: renderer.draw(one, 32), snapshots))
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))
    assert np.array_equal(renderer.draw(snapshots[0], 32), alone[0])
    with ThreadPoolExecutor(2) as pool:
        drawing = [pool.submit(renderer.draw, snapshot, 32) for snapshot in snapshots]
        closing = [pool.submit(renderer.close) for _ in snapshots]
        assert all(np.array_equal(one.result(), other) for one, other in zip(drawing, alone, strict=True))
        assert all(one.result() is None for one in closing)
    renderer.close()
    assert np.array_equal(renderer.draw(snapshots[0], 32), alone[0]), "it draws again after being closed"


def test_a_driver_that_fails_is_a_machine_error(monkeypatch):
    def fail(name: str) -> None:
        raise ImportError(f"libEGL is missing for {name}")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(MachineError, match="libEGL is missing") as caught:
        paint([[0.0, 0.0, 0.0, 0.0]], 8)
    assert caught.value.fix.startswith("apt-get install")


def test_a_process_that_has_drawn_ends_silently():
    code = f"""
import mujoco, numpy as np
from rlvlm.envs.mujoco.renderer import Camera, Renderer
model = mujoco.MjModel.from_xml_string('''{SCENE}''')
painters = [Renderer(model, {ABOVE!r}, np.zeros(model.ngeom, bool), ("stand",)) for _ in range(2)]
for painter in painters:
    painter.draw(np.zeros((1, 4), np.float32), 16)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stderr == ""


ROOM = """
<mujoco>
  <worldbody>
    <camera name="any"/>
    <light pos="0 0 5"/>
    <geom name="floor" type="box" size="1 1 .05" rgba=".5 .5 .2 1"/>
    <geom name="bar" type="box" pos="0 0 .8" size=".1 1 .05" rgba=".2 .8 .2 {bar}"/>
    <body name="ball" pos="0 0 .4">
      <joint type="slide" axis="1 0 0"/>
      <geom type="sphere" size=".2" rgba="1 0 0 1"/>
    </body>
    <body name="stand" pos="0 .6 .3"><geom type="box" size=".1 .1 .1" rgba="0 0 1 {stand}"/></body>
  </worldbody>
</mujoco>
"""
PASSING = np.array([[x, 0.1 * x, 0.6, 0.3] for x in np.linspace(-0.7, 0.7, 9)], np.float32)
"""The ball passes under the bar, the stand moves from episode to episode."""


def room_renderer(bar: float = 1.0, stand: float = 1.0) -> Renderer:
    """The room; how opaque the bar and the stand are."""
    model = mujoco.MjModel.from_xml_string(ROOM.format(bar=bar, stand=stand))
    return Renderer(model, ABOVE, np.zeros(model.ngeom, bool), ("stand",))


@pytest.mark.parametrize("bar", [1.0, 0.5])
def test_drawing_the_still_parts_once_gives_the_same_images(bar):
    in_layers, whole = room_renderer(bar), room_renderer(bar)
    assert in_layers._has_still_layer
    whole._has_still_layer = False
    for size_px in (40, 111):
        images = in_layers.draw(PASSING, size_px)
        assert (images == whole.draw(PASSING, size_px)).all()
        red = (images[..., 0] > 100) & (images[..., 1] < 50)  # [N, H, W]
        assert red[4].sum() < red[0].sum()  # the bar hides part of the ball, or colours it


def test_glass_that_moves_is_drawn_with_everything():
    assert not room_renderer(stand=0.5)._has_still_layer


CORD = """
<mujoco>
  <visual><headlight ambient="1 1 1" diffuse="0 0 0" specular="0 0 0"/></visual>
  <worldbody>
    <camera name="any"/>
    <body name="one"><inertial pos="0 0 0" mass="1" diaginertia="1 1 1"/><joint type="slide" axis="0 1 0"/></body>
    <body name="other" pos="1 0 0"><inertial pos="0 0 0" mass="1" diaginertia="1 1 1"/><freejoint/></body>
  </worldbody>
  <deformable><flex dim="1" body="one other" element="0 1" radius=".1" rgba="1 0 0 1"/></deformable>
</mujoco>
"""


def test_deformable_bodies_are_drawn_where_the_snapshot_says():
    model = mujoco.MjModel.from_xml_string(CORD)
    snapshots = np.array([[y, 1, y, 0, 1, 0, 0, 0] for y in (0.0, 0.5)], np.float32)
    for y, image in zip((0.0, 0.5), Renderer(model, ABOVE, np.zeros(0, bool), ()).draw(snapshots, 20), strict=True):
        red = np.argwhere((image[..., 0] > 200) & (image[..., 2] < 50))
        # 20 pixels over 2 m: the cord from x = 0 to 1 fills columns 10 to 19, at y = 0.5 rows 4 and 5 from above
        assert red[:, 1].min() == 10 and red[:, 1].max() == 19
        np.testing.assert_allclose(red[:, 0].mean(), 9.5 - 10 * y, atol=0.6)


RIDING = """
<mujoco>
  <worldbody>
    <camera name="fixed" pos="0 0 3"/>
    <geom type="plane" size="5 5 1" rgba=".5 .5 .5 1"/>
    <geom name="mark" type="box" pos="2 0 .1" size=".2 .2 .1" rgba="1 0 0 1"/>
    <body name="cart" pos="0 0 2"><joint type="slide" axis="1 0 0"/>
      <camera name="rider"/><geom type="sphere" size=".05" pos="0 0 .2"/>
    </body>
  </worldbody>
</mujoco>
"""


@pytest.mark.parametrize("copies", [True, False])
def test_a_camera_that_rides_along_sees_what_it_passes(copies):
    model = mujoco.MjModel.from_xml_string(RIDING)
    renderer = Renderer(model, ("fixed", "rider"), np.zeros(model.ngeom, bool), (), copies=copies)
    snapshots = np.array([[0.0], [2.0]], np.float32)

    def red_columns(camera: str) -> list[float]:
        images = renderer.draw(snapshots, 32, camera).astype(int)
        return [float((image[..., 0] - image[..., 1] > 60).any(axis=0).mean()) for image in images]

    assert red_columns("rider") == [0.0, pytest.approx(0.3, abs=0.15)]  # straight above the mark, and before that not
    np.testing.assert_array_equal(renderer.draw(snapshots, 32), renderer.draw(snapshots, 32, "fixed"))
    fixed = renderer.draw(snapshots, 32)
    renderer.draw(snapshots, 32, "rider")
    np.testing.assert_array_equal(renderer.draw(snapshots, 32), fixed)


def test_geometry_outside_the_view_is_skipped_without_a_trace(monkeypatch):
    model = mujoco.MjModel.from_xml_string(RIDING)
    renderer = Renderer(model, ("fixed", "rider"), np.zeros(model.ngeom, bool), ())
    snapshots = np.linspace(-3, 3, 61, dtype=np.float32)[:, None]
    images, shares = renderer.draw(snapshots, 32, "rider"), []
    for snapshot in snapshots:
        renderer._pose(snapshot)
        shares.append(renderer._is_in_view(model.camera("rider").id)[model.geom("mark").id])
    assert 0.2 < np.mean(shares) < 0.8, "the cart comes by the mark"
    monkeypatch.setattr(renderer, "_is_in_view", lambda _: np.ones(model.ngeom, bool))
    np.testing.assert_array_equal(renderer.draw(snapshots, 32, "rider"), images)
