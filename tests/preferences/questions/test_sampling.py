import itertools
import math
from functools import partial

import numpy as np
import pytest
from tiny_episodes import pair_of, tiny_episodes, truth

from rlvlm.core.steps import Segment
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Examples, Steps, decided
from rlvlm.preferences.model.networks import ImageInput, ImageNetwork, StateInput
from rlvlm.preferences.model.reward_model import RewardModel
from rlvlm.preferences.questions.queries import draw_pairs
from rlvlm.preferences.questions.sampling import choose, disagreement, entropy, farthest_first, largest, p_right_of
from rlvlm.testing import TinyEnv

LN3 = math.log(3)


def test_disagreement_and_entropy_by_hand() -> None:
    # Two members, three pairs: both torn, both sure to three quarters, opposed at three quarters.
    returns = np.array([[[0, 0], [0, LN3], [0, LN3]], [[5, 5], [0, LN3], [LN3, 0]]], np.float32)
    np.testing.assert_allclose(p_right_of(returns), [[0.5, 0.75, 0.75], [0.5, 0.75, 0.25]], atol=1e-6)
    np.testing.assert_allclose(disagreement(returns), [0, 0, 0.25], atol=1e-6)
    quarter = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    np.testing.assert_allclose(entropy(returns), [math.log(2), quarter, quarter], atol=1e-6)
    np.testing.assert_allclose(entropy(np.array([[[0, 1e4]]], np.float32)), [0], atol=1e-6)


def test_disagreement_about_single_frames_is_the_spread_of_rewards() -> None:
    np.testing.assert_allclose(disagreement(np.array([[[1], [2]], [[3], [2]]], np.float32)), [1, 0])


def test_swapping_the_sides_changes_neither() -> None:
    returns = np.random.default_rng(0).normal(size=(3, 20, 2)).astype(np.float32)
    np.testing.assert_allclose(disagreement(returns), disagreement(returns[..., ::-1]), atol=1e-12)
    np.testing.assert_allclose(entropy(returns), entropy(returns[..., ::-1]), atol=1e-12)


def test_the_largest_come_in_order_and_the_earlier_of_equals() -> None:
    assert largest(np.array([1.0, 5.0, 1.0, 7.0, 1.0]), 3).tolist() == [0, 1, 3]


def test_farthest_first_by_hand() -> None:
    line = np.array([[0.0], [1.0], [5.0], [6.0], [10.0]], np.float32)
    assert farthest_first(line, np.array([[0.0]], np.float32), 1).tolist() == [4]
    assert farthest_first(line, np.array([[0.0]], np.float32), 2).tolist() == [2, 4]  # 5 away from both ends
    assert farthest_first(line, np.zeros((0, 1), np.float32), 2).tolist() == [0, 4]
    assert farthest_first(np.zeros((3, 1), np.float32), np.zeros((1, 1), np.float32), 3).tolist() == [0, 1, 2]


def test_farthest_first_covers_within_twice_of_the_best_choice_there_is() -> None:
    rng = np.random.default_rng(0)

    def radius(points: np.ndarray, chosen: tuple[int, ...] | list[int]) -> float:
        return float(np.linalg.norm(points[:, None] - points[list(chosen)], axis=-1).min(axis=1).max())

    for _ in range(20):
        points = rng.normal(size=(9, 2)).astype(np.float32)
        best = min(radius(points, chosen) for chosen in itertools.combinations(range(9), 3))
        greedy = farthest_first(points, np.zeros((0, 2), np.float32), 3)
        assert radius(points, greedy.tolist()) <= 2 * best + 1e-6


def fitted(sees: str) -> tuple[RewardModel, Examples]:
    """A model after a hasty fit, and the twenty pairs of two steps that it was fitted to."""
    pictures = ImageInput(FrameStore(TinyEnv(), 16), partial(ImageNetwork, 16))
    inputs = pictures if sees == "image" else StateInput(4, 2)
    model = RewardModel(inputs, RewardModelConfig(picture_px=16, max_epochs=2, min_updates=0), seed=0)
    known = Examples(num_sides=2)
    pairs = draw_pairs(tiny_episodes(4), 20, 2, np.random.default_rng(0))
    known.add(decided(pairs, truth(pairs), "equal"))
    model.fit(known)
    return model, known


def candidates(num: int) -> list[tuple[Segment, ...]]:
    pairs = draw_pairs(tiny_episodes(4), num, 2, np.random.default_rng(1))
    return [(pair.left, pair.right) for pair in pairs]


@pytest.mark.parametrize("sees", ["image", "state"])
@pytest.mark.parametrize("sampling", ["disagreement", "entropy"])
def test_candidates_are_chosen_by_what_the_members_make_of_them(sees: str, sampling: str) -> None:
    model, known = fitted(sees)
    sides = candidates(60)
    chosen = choose(sides, 15, sampling=sampling, ensemble=model.ensemble, known=known)
    assert len(set(chosen.tolist())) == 15 and (np.diff(chosen) > 0).all()
    returns = np.array(
        [[model.ensemble.predict(Steps.of_segments([side])).sum(axis=1) for side in pair] for pair in sides]
    )
    p = 1 / (1 + np.exp(returns[:, 0] - returns[:, 1]))  # [N, K]
    values = p.std(axis=1) if sampling == "disagreement" else -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean(axis=1)
    assert values[chosen].min() >= np.delete(values, chosen).max() - 1e-6


@pytest.mark.parametrize("sees", ["image", "state"])
def test_the_first_centre_is_the_candidate_farthest_from_all_that_is_known(sees: str) -> None:
    model, known = fitted(sees)
    sides = candidates(40)
    points = np.array(
        [
            np.concatenate([model.ensemble.features(Steps.of_segments([side])).mean(axis=0) for side in pair])
            for pair in sides
        ]
    )
    centres = model.ensemble.features(known.steps()).reshape(len(known), 2, 2, -1).mean(axis=2).reshape(len(known), -1)
    distances = np.linalg.norm(points[:, None] - centres, axis=-1).min(axis=1)
    assert choose(sides, 1, sampling="k_center", ensemble=model.ensemble, known=known).tolist() == [distances.argmax()]


def test_the_farthest_candidate_is_one_that_looks_like_nothing_seen() -> None:
    model = RewardModel(StateInput(4, 2), RewardModelConfig(max_epochs=1, min_updates=0, hold_out_every=0), seed=0)
    known = Examples(num_sides=2)
    known.add(decided([pair_of(0.0, 0.1)] * 4, truth([pair_of(0.0, 0.1)] * 4), "drop"))
    model.fit(known)
    pairs = [pair_of(0.0, 0.1), pair_of(0.0, 0.15), pair_of(0.9, 1.0), pair_of(0.05, 0.1)]
    chosen = choose(
        [(pair.left, pair.right) for pair in pairs], 1, sampling="k_center", ensemble=model.ensemble, known=known
    )
    assert chosen.tolist() == [2]
