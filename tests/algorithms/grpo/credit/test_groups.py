"""Groups are homogeneous, found by their number, and sifted by their scores."""

from dataclasses import replace

import numpy as np
import pytest

from rlvlm.algorithms.grpo.config import AdvantageConfig
from rlvlm.algorithms.grpo.credit.groups import Group, differences, filter_groups, group_episodes, make_update
from rlvlm.core.chunks import ChunkEpisode


def episode(group: int, state_id: int, success: bool = False) -> ChunkEpisode:
    """Two chunks, of 8 steps and of 3."""
    return ChunkEpisode(
        task="push_block",
        instruction="push the red block onto the pad",
        state_id=state_id,
        group=group,
        snapshots=np.arange(12, dtype=np.float32)[:, None],
        proprio=np.zeros((2, 2), np.float32),
        bins=np.zeros((2, 56), np.int16),
        log_probs=np.zeros((2, 56), np.float32),
        steps=np.array([8, 3]),
        env_rewards=np.zeros(11, np.float32),
        success=success,
        success_at_end=success,
        progress=0.0,
        terminated=success,
    )


def test_by_hand() -> None:
    # In the order they came: groups 5, 4, 5, 4; group 4 succeeds once, group 5 never.
    episodes = [episode(5, 50), episode(4, 40, success=True), episode(5, 50), episode(4, 40)]
    scores = np.array([e.success for e in episodes], np.float32)
    groups = group_episodes(episodes, scores)
    assert [group.scores.tolist() for group in groups] == [[1, 0], [0, 0]]
    kept = filter_groups(groups, AdvantageConfig(), 0.0)
    assert [group.episodes[0].state_id for group in kept] == [40]
    update = make_update(kept, AdvantageConfig(divide_by_std=False))
    assert update.episodes == [episodes[1], episodes[3]]
    assert update.advantages.tolist() == [0.5, 0.5, -0.5, -0.5]  # of each chunk


def acting(numbers: list[int], group: int = 0) -> ChunkEpisode:
    """An episode whose chunks, of 4 steps each, hold one bin each."""
    whole = episode(group, group)
    steps = 4 * len(numbers)
    return replace(
        whole,
        snapshots=np.zeros((steps + 1, 1), np.float32),
        proprio=np.zeros((len(numbers), 2), np.float32),
        bins=np.repeat(np.array(numbers, np.int16)[:, None], 56, axis=1),
        log_probs=np.zeros((len(numbers), 56), np.float32),
        steps=np.full(len(numbers), 4),
        env_rewards=np.zeros(steps, np.float32),
    )


def test_chunks_are_chosen_that_differ_from_the_other_kind_by_hand() -> None:
    # At the second chunk the better act at 100 and 120, the worse at 60 and 80, a deviation of 22.4: 40 and 20 from the
    # mean of the others for those that are far and near. At the first all act alike; the third has but one kind.
    episodes = [acting([10, 100]), acting([10, 120]), acting([10, 60]), acting([10, 80, 200])]
    apart = differences(episodes, np.array([1, 1, -1, -1], np.float32))
    unit = 500**0.5 + 1
    np.testing.assert_allclose(apart, [0, 30 / unit, 0, 50 / unit, 0, 50 / unit, 0, 30 / unit, 0], atol=1e-6)
    other = [acting([50, 50], 1), acting([55, 52], 1), acting([40, 51], 1), acting([45, 51], 1)]
    groups = [
        Group(episodes=tuple(episodes), scores=np.array([1, 1, 0, 0], np.float32)),
        Group(episodes=tuple(other), scores=np.array([1, 1, 0, 0], np.float32)),
    ]
    update = make_update(groups, AdvantageConfig(chunk_share=0.44))  # four of nine chunks, and four of eight
    assert update.rows.tolist() == [1, 3, 5, 7, 9, 11, 13, 15]
    assert len(update.advantages) == 17 and make_update(groups, AdvantageConfig()).rows.tolist() == list(range(17))


def test_a_group_of_two_initial_states_is_refused() -> None:
    with pytest.raises(AssertionError, match="one task, instruction and initial state"):
        Group(episodes=(episode(1, 10), episode(1, 11)), scores=np.zeros(2, np.float32))


def test_what_the_policy_saw_is_the_state_before_each_chunk() -> None:
    assert episode(0, 0).chunk_snapshots[:, 0].tolist() == [0, 8]
    assert len(episode(0, 0)) == 11


def test_an_episode_whose_parts_do_not_fit_is_refused() -> None:
    good = episode(0, 0)
    columns = {name: getattr(good, name) for name in ChunkEpisode.__dataclass_fields__}
    with pytest.raises(ValueError, match="one entry per chunk"):
        ChunkEpisode(**{**columns, "proprio": good.proprio[:1]})
    with pytest.raises(ValueError, match="11 env steps need as many rewards and one snapshot more"):
        ChunkEpisode(**{**columns, "snapshots": good.snapshots[:-1]})


def test_nothing_in_nothing_out() -> None:
    assert filter_groups([], AdvantageConfig(), 0.0) == []
