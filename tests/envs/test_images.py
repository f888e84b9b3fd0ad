import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray
from rlvlm.envs.cartpole import CartPole
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.env import Env
from rlvlm.envs.images import FrameStore
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.testing import TinyEnv


def blocks(*positions: float) -> FloatArray:
    """Snapshots [N, 3] of a TinyEnv with the (hidden) point anywhere and the block at `positions`."""
    points = np.random.default_rng(0).uniform(size=(len(positions), 2))
    return np.column_stack([points, positions]).astype(np.float32)


def test_distinct_by_hand():
    first, inverse = FrameStore(TinyEnv(), 8).distinct(blocks(0.7, 0.4, 0.7, 0.5, 0.4))
    assert first.tolist() == [0, 1, 3]
    assert inverse.tolist() == [0, 1, 0, 2, 1]
    first, inverse = FrameStore(TinyEnv(), 8).distinct(blocks())
    assert first.shape == inverse.shape == (0,)


def test_a_key_counts_in_grains_and_an_env_without_grain_or_key_is_refused():
    keys = CartPole(StepEnvConfig(), 0).image_key(np.array([[0.00024], [0.00026], [-0.0005]], np.float32))
    assert keys.tolist() == [[1], [1], [-2]]  # a grain is a quarter of a milliradian

    class Grainless(TinyEnv):
        image_key = Env.image_key

    with pytest.raises(UsageError, match="lacks grain or image_key"):
        Grainless()


def test_distinct_agrees_with_a_dictionary():
    rng = np.random.default_rng(1)
    env = TinyEnv(MetaWorldConfig(robot="visible"))
    snapshots = rng.choice(np.array([0.1, 0.2, 0.3], np.float32), size=(500, 3))
    first, inverse = FrameStore(env, 8).distinct(snapshots)
    seen: dict[bytes, int] = {}
    ranks = [seen.setdefault(key.tobytes(), len(seen)) for key in env.image_key(snapshots)]
    assert inverse.tolist() == ranks
    assert first.tolist() == [ranks.index(rank) for rank in range(len(seen))]


def test_frames_are_the_envs_own_images_row_for_row():
    env = TinyEnv()
    store = FrameStore(env, 16)
    for snapshots in (blocks(0.4, 0.8, 0.4), blocks(0.8, 0.6, 0.4, 0.6), blocks(0.5)):
        np.testing.assert_array_equal(store.frames(snapshots), env.draw(snapshots, 16))
    assert store.num_drawn == 4  # 0.4, 0.8, 0.6, 0.5


def test_the_image_not_used_for_longest_makes_room():
    env = TinyEnv()
    store = FrameStore(env, 8, capacity=2)
    kept = store.frames(blocks(0.4))
    before = kept.copy()
    store.frames(blocks(0.5))
    store.frames(blocks(0.4))  # 0.5 is now the oldest
    store.frames(blocks(0.6))
    assert store.num_drawn == 3
    store.frames(blocks(0.4))
    assert store.num_drawn == 3
    store.frames(blocks(0.5))
    assert store.num_drawn == 4
    more = blocks(0.4, 0.5, 0.6, 0.7, 0.4)  # at once than are kept
    np.testing.assert_array_equal(store.frames(more), env.draw(more, 8))
    assert store.nbytes == 2 * 8 * 8 * 3
    np.testing.assert_array_equal(kept, before)  # what was handed out does not change when the store moves on
    for size_px, capacity in ((0, 1), (8, 0)):
        with pytest.raises(ValueError, match=">= 1"):
            FrameStore(env, size_px, capacity)
