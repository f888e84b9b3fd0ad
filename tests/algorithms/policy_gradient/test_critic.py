"""A critic predicts scores from the simulator's state, and credits the chunk that decides."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rlvlm.algorithms.policy_gradient.critic import Critic
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.push_block import PushBlock
from rlvlm.rewards.config import ValueConfig
from tests.algorithms.policy_gradient.by_hand import scored

SMALL = ValueConfig(hidden=16, steps=60, batch_size=64, episodes=128)


def critic(config: ValueConfig = SMALL) -> Critic:
    env = PushBlock(ChunkEnvConfig(episode_steps=32), 0)
    env.snapshot_size = 1
    env.landmarks = lambda snapshots: np.empty((len(snapshots), 0, 2), np.float32)
    return Critic(config, env, seed=0)


def where(success: bool, states: Sequence[Sequence[float]], text: str = "") -> TokenEpisode:
    """An episode of two chunks with these states before, between and after them."""
    one = scored(float(success), success=success)
    texts = (text,) * 3 if text else one.obs.texts
    return replace(one, obs=replace(one.obs, snapshots=np.array(states, np.float32), texts=texts))


def rolled(seed: int, count: int = 40) -> list[TokenEpisode]:
    """Both kinds begin alike; after the first chunk the state is 1 or -1, and so the episode will end."""
    wins = np.random.default_rng(seed).integers(2, size=count).astype(bool).tolist()
    return [where(win, [[0], [1 if win else -1], [1 if win else -1]]) for win in wins]


@pytest.mark.slow
def test_the_expected_return_changes_with_the_decisive_chunk():
    trained = critic()
    assert trained.fill(rolled(0)) == [] == trained.fill([])  # nothing can be expected yet
    for seed in range(1, 6):
        trained.fill(rolled(seed))
    filled = trained.fill(rolled(6))
    wins = np.array([one.is_success for one in filled])
    first, second = np.stack([one.values for one in filled]).T
    assert (second[wins] - first[wins] > 0.3).all() and (second[~wins] - first[~wins] < -0.3).all()
    assert np.abs(second - wins).max() < 0.1
    assert trained.report()[metrics.UPDATE_EXPLAINED] > 0.4  # nearly all before second chunks, nothing before first


@pytest.mark.slow
def test_the_instruction_decides_where_nothing_else_differs():
    """One of the tasks of a suite is solved and the other is not; the first update has met only one of them."""
    trained = critic()
    texts = list(trained._asked)[:2]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        solved = [bool(rng.integers(2)) or seed == 0 for _ in range(40)]
        trained.fill([where(one, [[0]] * 3, texts[one]) for one in solved])
    assert trained.report()[metrics.UPDATE_EXPLAINED] > 0.5


@pytest.mark.slow
def test_landmarks_show_what_places_hide():
    """Whether the hand is above or below the block decides, and both may be anywhere."""

    def near(seed: int) -> list[TokenEpisode]:
        rng, played = np.random.default_rng(seed), []
        for _ in range(60):
            block, miss = rng.uniform(-1, 1, 2), rng.uniform(-0.05, 0.05)
            played.append(where(miss > 0, [[block[0], block[1] + miss, *block, 0, 0, 0, 0, 0, 0]] * 3))
        return played

    explained = []
    for is_blind in (False, True):
        env = PushBlock(ChunkEnvConfig(episode_steps=32), 0)
        if is_blind:
            env.landmarks = lambda snapshots: np.empty((len(snapshots), 0, 2), np.float32)
        trained = Critic(replace(SMALL, episodes=300), env, seed=0)
        for seed in range(6):
            trained.fill(near(seed))
        explained.append(trained.report()[metrics.UPDATE_EXPLAINED])
    assert explained[0] > 0.6 > explained[1] + 0.2
