import math
from functools import partial

import numpy as np
import pytest
from tiny_episodes import numbered_trajectory, pair_of, tiny_episodes, truth

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import Pair, Segment
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Examples, Steps, decided
from rlvlm.preferences.networks import ImageInput, ImageNetwork, StateInput
from rlvlm.preferences.queries import (
    STRATEGIES,
    choose,
    disagreement,
    draw_pairs,
    draw_segments,
    entropy,
    farthest_first,
    look_alike,
)
from rlvlm.preferences.reward_model import RewardModel
from rlvlm.testing import TinyEnv


def test_every_segment_is_drawn_equally_often_the_last_frame_included():
    # Segments of 2 steps: three in an episode of 4, none in one of 1, one in one of 2.
    drawn = draw_segments([4, 1, 2], 8000, 2, np.random.default_rng(0))
    segments, counts = np.unique(drawn, axis=0, return_counts=True)
    assert segments.tolist() == [[0, 0], [0, 1], [0, 2], [2, 0]]
    np.testing.assert_allclose(counts / 8000, 0.25, atol=0.02)


def test_a_segment_is_a_copy_of_consecutive_steps():
    trajectory = numbered_trajectory(5)
    segment = trajectory.segment(2, 3)
    for name in ("obs", "actions", "next_obs", "env_rewards", "snapshots", "progress"):
        np.testing.assert_array_equal(getattr(segment, name), getattr(trajectory, name)[2:5])
        assert not np.shares_memory(getattr(segment, name), getattr(trajectory, name)), name


def test_both_sides_are_drawn_independently_from_all_trajectories():
    trajectories = [numbered_trajectory(3), numbered_trajectory(3, first=10)]
    pairs = draw_pairs(trajectories, 1800, 1, np.random.default_rng(1))
    sides = np.array([(pair.left.progress[0], pair.right.progress[0]) for pair in pairs])
    cells, counts = np.unique(sides, axis=0, return_counts=True)
    assert len(cells) == 36, "every combination of six frames"
    np.testing.assert_allclose(counts / 1800, 1 / 36, atol=0.016)


def test_episodes_too_short_for_a_segment_are_an_error():
    with pytest.raises(ValueError, match=r"at least 5 steps to draw a segment from, got \[4, 1\]"):
        draw_segments([4, 1], 1, 5, np.random.default_rng(0))


def test_pairs_look_alike_when_their_images_do_whatever_else_differs():
    frames = FrameStore(TinyEnv(), 16)
    pairs = [pair_of(0.0, 0.5), pair_of(0.5, 0.5), pair_of(0.3, 0.3)]
    assert look_alike(pairs, frames).tolist() == [False, True, True]
    assert look_alike([], frames).tolist() == []
    pairs = draw_pairs(tiny_episodes(4), 200, 3, np.random.default_rng(0))
    blocks = np.array([(pair.left.snapshots[:, 2], pair.right.snapshots[:, 2]) for pair in pairs])
    same = (np.rint(blocks[:, 0] / 1e-3) == np.rint(blocks[:, 1] / 1e-3)).all(axis=1)
    assert 0 < same.sum() < 200
    np.testing.assert_array_equal(look_alike(pairs, frames), same)


LN3 = math.log(3)


def test_disagreement_and_entropy_by_hand():
    # Two members, three pairs: both torn, both sure to three quarters, opposed at three quarters.
    returns = np.array([[[0, 0], [0, LN3], [0, LN3]], [[5, 5], [0, LN3], [LN3, 0]]], np.float32)
    np.testing.assert_allclose(disagreement(returns), [0, 0, 0.25], atol=1e-6)
    quarter = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    np.testing.assert_allclose(entropy(returns), [math.log(2), quarter, quarter], atol=1e-6)
    np.testing.assert_allclose(entropy(np.array([[[0, 1e4]]], np.float32)), [0], atol=1e-6)


def test_disagreement_about_single_frames_is_the_spread_of_rewards():
    np.testing.assert_allclose(disagreement(np.array([[[1], [2]], [[3], [2]]], np.float32)), [1, 0])


def test_swapping_the_sides_changes_neither():
    returns = np.random.default_rng(0).normal(size=(3, 20, 2)).astype(np.float32)
    np.testing.assert_allclose(disagreement(returns), disagreement(returns[..., ::-1]), atol=1e-12)
    np.testing.assert_allclose(entropy(returns), entropy(returns[..., ::-1]), atol=1e-12)


def test_farthest_first_by_hand():
    line = np.array([[0.0], [1.0], [5.0], [6.0], [10.0]], np.float32)
    assert farthest_first(line, np.array([[0.0]], np.float32), 1).tolist() == [4]
    assert farthest_first(line, np.array([[0.0]], np.float32), 2).tolist() == [2, 4]  # 5 away from both ends
    assert farthest_first(line, np.zeros((0, 1), np.float32), 2).tolist() == [0, 4]
    assert farthest_first(np.zeros((3, 1), np.float32), np.zeros((1, 1), np.float32), 3).tolist() == [0, 1, 2]


def fitted(sees: str) -> tuple[RewardModel, Examples]:
    """A model after a hasty fit, and the twenty pairs of two steps that it was fitted to."""
    pictures = ImageInput(FrameStore(TinyEnv(), 16), partial(ImageNetwork, 16))
    inputs = pictures if sees == "image" else StateInput(4, 2)
    model = RewardModel(inputs, RewardModelConfig(image_px=16, max_epochs=2, min_updates=0), seed=0)
    known = Examples(num_sides=2)
    pairs = draw_pairs(tiny_episodes(4), 20, 2, np.random.default_rng(0))
    known.add(decided(pairs, truth(pairs), "equal"))
    model.fit(known)
    return model, known


def places(chosen: list[Pair], candidates: list[Pair]) -> list[int]:
    return [next(at for at, one in enumerate(candidates) if one is pair) for pair in chosen]


@pytest.mark.parametrize("sees", ["image", "state"])
@pytest.mark.parametrize("sampling", ["disagreement", "entropy"])
def test_candidates_are_chosen_by_the_members_predictions(sees, sampling):
    model, known = fitted(sees)
    pairs = draw_pairs(tiny_episodes(4), 60, 2, np.random.default_rng(1))
    chosen = places(choose(pairs, 15, sampling=sampling, ensemble=model.ensemble, known=known), pairs)
    assert len(set(chosen)) == 15 and (np.diff(chosen) > 0).all()
    sides = [(pair.left, pair.right) for pair in pairs]
    returns = np.array(
        [[model.ensemble.predict(Steps.of_segments([side])).sum(axis=1) for side in pair] for pair in sides]
    )
    p = 1 / (1 + np.exp(returns[:, 0] - returns[:, 1]))  # [N, K]
    values = p.std(axis=1) if sampling == "disagreement" else -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean(axis=1)
    assert values[chosen].min() >= np.delete(values, chosen).max() - 1e-6


@pytest.mark.parametrize(
    ("chosen", "said"), [([0, 1, 2], "array of shape \\[3\\], not 2"), ([0, 0], "1 different"), ([0, 9], "not 2 of 4")]
)
def test_a_users_own_strategy_that_chooses_badly_is_refused(chosen, said, monkeypatch):
    monkeypatch.setitem(STRATEGIES, "own", lambda candidates, num: np.array(chosen))  # noqa: ARG005 - as it is called
    model, known = fitted("state")
    pairs = draw_pairs(tiny_episodes(4), 4, 2, np.random.default_rng(1))
    with pytest.raises(UsageError, match=said):
        choose(pairs, 2, sampling="own", ensemble=model.ensemble, known=known)


@pytest.mark.parametrize("sees", ["image", "state"])
def test_the_first_centre_is_the_candidate_farthest_from_all_that_is_known(sees):
    model, known = fitted(sees)
    pairs = draw_pairs(tiny_episodes(4), 40, 2, np.random.default_rng(1))

    def features(side: Segment) -> np.ndarray:
        return model.ensemble.features(Steps.of_segments([side])).mean(axis=0)

    points = np.array([np.concatenate([features(pair.left), features(pair.right)]) for pair in pairs])
    centres = model.ensemble.features(known.steps()).reshape(len(known), 2, 2, -1).mean(axis=2).reshape(len(known), -1)
    distances = np.linalg.norm(points[:, None] - centres, axis=-1).min(axis=1)
    chosen = choose(pairs, 1, sampling="k_center", ensemble=model.ensemble, known=known)
    assert places(chosen, pairs) == [distances.argmax()]
