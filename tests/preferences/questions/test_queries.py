import numpy as np
import pytest
from tiny_episodes import numbered_trajectory, pair_of, tiny_episodes

from rlvlm.envs.images import FrameStore
from rlvlm.preferences.questions.queries import cut, draw_pairs, draw_segments, look_alike
from rlvlm.testing import TinyEnv


def test_every_segment_is_drawn_equally_often_the_last_frame_included() -> None:
    # Segments of 2 steps: three in an episode of 4, none in one of 1, one in one of 2.
    drawn = draw_segments([4, 1, 2], 8000, 2, np.random.default_rng(0))
    segments, counts = np.unique(drawn, axis=0, return_counts=True)
    assert segments.tolist() == [[0, 0], [0, 1], [0, 2], [2, 0]]
    np.testing.assert_allclose(counts / 8000, 0.25, atol=0.02)


def test_a_segment_is_a_copy_of_consecutive_steps() -> None:
    trajectory = numbered_trajectory(5)
    segment = cut(trajectory, 2, 3)
    for name in ("obs", "actions", "next_obs", "env_rewards", "snapshots", "progress"):
        np.testing.assert_array_equal(getattr(segment, name), getattr(trajectory, name)[2:5])
        assert not np.shares_memory(getattr(segment, name), getattr(trajectory, name)), name


def test_both_sides_are_drawn_independently_from_all_trajectories() -> None:
    trajectories = [numbered_trajectory(3), numbered_trajectory(3, first=10)]
    pairs = draw_pairs(trajectories, 3600, 1, np.random.default_rng(1))
    sides = np.array([(pair.left.progress[0], pair.right.progress[0]) for pair in pairs])
    cells, counts = np.unique(sides, axis=0, return_counts=True)
    assert len(cells) == 36, "every combination of six frames"
    np.testing.assert_allclose(counts / 3600, 1 / 36, atol=0.012)


def test_the_generator_passed_in_decides() -> None:
    trajectories = [numbered_trajectory(50)]

    def starts(seed: int) -> list[float]:
        return [float(pair.left.progress[0]) for pair in draw_pairs(trajectories, 5, 4, np.random.default_rng(seed))]

    assert starts(0) == starts(0) != starts(1)


def test_episodes_too_short_for_a_segment_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"at least 5 steps to draw a segment from, got \[4, 1\]"):
        draw_segments([4, 1], 1, 5, np.random.default_rng(0))


def test_pairs_look_alike_when_their_images_do_whatever_else_differs() -> None:
    frames = FrameStore(TinyEnv(), 16)
    pairs = [pair_of(0.0, 0.5), pair_of(0.5, 0.5), pair_of(0.3, 0.3)]
    assert look_alike(pairs, frames).tolist() == [False, True, True]
    assert look_alike([], frames).tolist() == []
    pairs = draw_pairs(tiny_episodes(4), 200, 3, np.random.default_rng(0))
    blocks = np.array([(pair.left.snapshots[:, 2], pair.right.snapshots[:, 2]) for pair in pairs])
    same = (np.rint(blocks[:, 0] / 1e-3) == np.rint(blocks[:, 1] / 1e-3)).all(axis=1)
    assert 0 < same.sum() < 200
    np.testing.assert_array_equal(look_alike(pairs, frames), same)
