from typing import Any

import numpy as np
import pytest

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.testing import TinyEnv, check_step_env

BLOCKS = np.array([[0.2, 0.5, block] for block in (0.4, 0.5, 0.6, 0.8)], np.float32)


def test_going_right_opens_the_tiny_env_in_five_steps():
    env = TinyEnv()
    env.reset()
    progress = [env.step(np.array([1.0, 0.0], np.float32))[4] for _ in range(5)]
    np.testing.assert_allclose([info["progress"] for info in progress], [0, 0.25, 0.5, 0.75, 1.0], atol=1e-9)
    assert [info["success"] for info in progress] == [False] * 4 + [True]


def test_the_tiny_image_shows_the_block_where_it_is():
    image = TinyEnv().draw(BLOCKS[:1], 10)[0]
    is_red = (image == (200, 0, 0)).all(-1)
    assert np.argwhere(is_red).tolist() == [[4, 3], [4, 4], [5, 3], [5, 4]]  # x 0.3 to 0.5, y 0.4 to 0.6


@pytest.mark.parametrize("start", ["fixed", "random"])
@pytest.mark.parametrize("robot", ["hidden", "visible"])
def test_the_tiny_world_is_an_env(start, robot):
    config = MetaWorldConfig(start=start, robot=robot)
    check_step_env(TinyEnv(config, 0), TinyEnv(config, 0), BLOCKS)


class Forgetful(TinyEnv):
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state | {"steps": 0})


class Windowed(TinyEnv):
    """Keeps the array that it is given and goes on in it."""

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._point = state["point"]

    def step(self, action: FloatArray) -> Any:
        self._point += 0.0
        return super().step(action)


class Disturbed(TinyEnv):
    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        self._block = float(snapshots[-1, 2])
        return super().draw(snapshots, size_px)


class Blind(TinyEnv):
    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        return super().draw(np.zeros_like(snapshots), size_px)


class Coarse(TinyEnv):
    def image_key(self, snapshots: FloatArray) -> np.ndarray[Any, Any]:
        return super().image_key(snapshots) // 1000


class Unseeded(TinyEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=None, options=options)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (Forgetful, "set_state"),
        (Windowed, "read-only"),
        (Disturbed, "disturb"),
        (Blind, "different scenes"),
        (Coarse, "equal keys"),
        (Unseeded, "seed"),
    ],
)
def test_the_check_finds_broken_envs(broken, complaint):
    config = StepEnvConfig(start="random")
    with pytest.raises(AssertionError, match=complaint):
        check_step_env(broken(config, 0), broken(config, 1), BLOCKS)
