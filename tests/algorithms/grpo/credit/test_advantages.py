"""Advantages within groups, and which groups are worth learning from."""

import numpy as np
import pytest
from oracles import grpo as oracle

from rlvlm.algorithms.grpo.config import AdvantageConfig, CriticConfig
from rlvlm.algorithms.grpo.credit.advantages import chunk_advantages, group_advantages, group_scores, informative_groups


def mean_std(scores: list[float]) -> list[float]:
    return group_advantages(np.array([scores], np.float32), baseline="mean", divide_by_std=True)[0].tolist()


@pytest.mark.parametrize(
    ("wins", "success", "failure"), [(1, 2.475, -0.354), (2, 1.620, -0.540), (4, 0.935, -0.935), (7, 0.354, -2.475)]
)
def test_by_hand_eight_episodes(wins: int, success: float, failure: float) -> None:
    # One of eight: mean 1/8, unbiased variance (49/64 + 7/64) / 7 = 1/8; (1 - 1/8) / sqrt(1/8) = 2.475.
    found = mean_std([1.0] * wins + [0.0] * (8 - wins))
    assert found == pytest.approx([success] * wins + [failure] * (8 - wins), abs=1e-3)


def test_by_hand_leave_one_out() -> None:
    found = group_advantages(np.array([[1, 0, 0, 0]], np.float32), baseline="leave_one_out", divide_by_std=False)
    assert found[0].tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_by_hand_two_chunks_against_what_was_expected() -> None:
    # 0.5 was expected, then 0.8, then the episode succeeded: changes of 0.3 and 0.2.
    values = np.array([0.5, 0.8], np.float32)
    assert chunk_advantages(values, 1.0, 0.5).tolist() == pytest.approx([0.3 + 0.5 * 0.2, 0.2])
    assert chunk_advantages(values, 1.0, 0.0).tolist() == pytest.approx([0.3, 0.2])
    assert chunk_advantages(values, 0.0, 1.0).tolist() == pytest.approx([-0.5, -0.8])


@pytest.mark.parametrize("score", [0.0, 1.0, 0.3])
@pytest.mark.parametrize(("baseline", "divide_by_std"), [("mean", True), ("mean", False), ("leave_one_out", False)])
def test_equal_scores_teach_nothing(score: float, baseline: str, divide_by_std: bool) -> None:
    scores = np.full((3, 8), score, np.float32)
    found = group_advantages(scores, baseline=baseline, divide_by_std=divide_by_std)  # pyright: ignore[reportArgumentType]
    assert np.abs(found).max() < 1e-6
    assert not informative_groups(scores, AdvantageConfig(), 0.0).any()


def test_the_units_of_the_score_do_not_matter_where_it_is_divided_by_its_deviation() -> None:
    scores = np.random.default_rng(0).uniform(size=(4, 8)).astype(np.float32)
    plain = group_advantages(scores, baseline="mean", divide_by_std=True)
    assert group_advantages(5 * scores, baseline="mean", divide_by_std=True) == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize(("baseline", "divide_by_std"), [("mean", True), ("mean", False), ("leave_one_out", False)])
def test_equals_the_oracle(baseline: str, divide_by_std: bool) -> None:
    scores = np.random.default_rng(1).uniform(size=(6, 5)).astype(np.float32)
    found = group_advantages(scores, baseline=baseline, divide_by_std=divide_by_std)  # pyright: ignore[reportArgumentType]
    expected = [oracle.advantages(group, baseline, divide_by_std) for group in scores.astype(np.float64).tolist()]
    assert found == pytest.approx(np.array(expected), abs=1e-6)


def test_groups_are_found_by_their_number_not_by_position() -> None:
    table, places = group_scores(np.array([1, 2, 3, 4], np.float32), np.array([7, 3, 7, 3]))
    assert table.tolist() == [[2, 4], [1, 3]] and places.tolist() == [[1, 3], [0, 2]]
    with pytest.raises(ValueError, match=r"sizes \[1, 3\]"):
        group_scores(np.zeros(4, np.float32), np.array([1, 1, 1, 2]))


def test_one_episode_is_no_group_and_scores_must_be_numbers() -> None:
    with pytest.raises(ValueError, match="nobody to beat"):
        mean_std([1.0])
    with pytest.raises(ValueError, match="finite"):
        mean_std([1.0, float("nan")])


def test_a_group_of_failures_that_a_noisy_scorer_calls_different_is_dropped() -> None:
    scores = np.array([[0.08, 0.10, 0.10, 0.12], [0.1, 0.1, 0.1, 0.9]], np.float32)
    assert informative_groups(scores, AdvantageConfig(), 0.0).tolist() == [True, True]
    assert informative_groups(scores, AdvantageConfig(), 0.02).tolist() == [False, True]


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1, 0.2])
def test_the_gate_stops_nearly_all_groups_of_pure_noise(noise: float) -> None:
    scores = (0.1 + noise * np.random.default_rng(2).normal(size=(2_000, 8))).astype(np.float32)
    assert informative_groups(scores, AdvantageConfig(), 0.0).mean() > 0.99
    assert informative_groups(scores, AdvantageConfig(), noise).mean() < 0.01


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="no effect without scorer_noise"):
        AdvantageConfig(noise_factor=3.0)
    with pytest.raises(ValueError, match="need scorer_noise >= 0, or measured"):
        AdvantageConfig(scorer_noise=-0.1)
    AdvantageConfig(scorer_noise="measured", noise_factor=3.0)
    with pytest.raises(ValueError, match="add --algo.advantage.no-divide-by-std"):
        AdvantageConfig(baseline="leave_one_out")
    with pytest.raises(ValueError, match="no effect unless baseline is critic"):
        AdvantageConfig(critic=CriticConfig(trace=0.9))
    with pytest.raises(ValueError, match="no effect with a critic"):
        AdvantageConfig(baseline="critic", scorer_noise=0.1)
    with pytest.raises(ValueError, match="chunk_share has no effect with a critic"):
        AdvantageConfig(baseline="critic", chunk_share=0.2)
    with pytest.raises(ValueError, match=r"chunk_share must be in \(0, 1\]"):
        AdvantageConfig(chunk_share=0.0)
    with pytest.raises(ValueError, match="min_spread must be > 0"):
        AdvantageConfig(min_spread=0.0)
