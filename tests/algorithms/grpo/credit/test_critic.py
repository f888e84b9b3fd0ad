"""A critic predicts scores from the simulator's state, and credits the chunk that decides."""

from dataclasses import replace

import numpy as np
from algorithms.grpo.credit.test_groups import episode

from rlvlm.algorithms.grpo.config import AdvantageConfig, CriticConfig
from rlvlm.algorithms.grpo.credit.critic import Critic
from rlvlm.algorithms.grpo.credit.groups import Group, group_episodes
from rlvlm.core import metrics
from rlvlm.core.chunks import ChunkEpisode
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.push_block.env import PushBlock

SMALL = CriticConfig(trace=0.9, hidden=16, steps=60, batch_size=64, episodes=128)


def critic(config: CriticConfig = SMALL) -> Critic:
    world = PushBlock(EnvConfig(episode_steps=32), 0)
    world.snapshot_size = 1
    world.landmarks = lambda snapshots: np.empty((len(snapshots), 0, 2), np.float32)
    return Critic(AdvantageConfig(baseline="critic", divide_by_std=False, critic=config), world, seed=0)


def decided_by_the_first_chunk(rng: np.random.Generator) -> ChunkEpisode:
    """Both kinds begin alike; after the first chunk the state is 1 or -1, and so the episode will end."""
    success = bool(rng.integers(2))
    snapshots = np.zeros((12, 1), np.float32)
    snapshots[8:] = 1.0 if success else -1.0
    return replace(episode(int(rng.integers(1_000_000_000)), 3, success), snapshots=snapshots)


def groups(seed: int, count: int = 40) -> list[Group]:
    rng = np.random.default_rng(seed)
    episodes = [decided_by_the_first_chunk(rng) for _ in range(count)]
    return group_episodes(episodes, np.array([one.success for one in episodes], np.float32))


def test_the_chunk_that_decides_is_credited_and_the_rest_is_not() -> None:
    taught = critic()
    assert taught.weigh(groups(0)) is None and taught.weigh([]) is None  # nothing can be expected yet
    for seed in range(1, 6):
        taught.weigh(groups(seed))
    update = taught.weigh(groups(6))
    assert update is not None
    successes = np.array([one.success for one in update.episodes])
    first, second = update.advantages.reshape(-1, 2).T
    assert (first[successes] > 0.3).all() and (first[~successes] < -0.3).all()
    assert np.abs(second).max() < 0.1
    assert taught.report()[metrics.GRPO_EXPLAINED] > 0.4  # nearly all before second chunks, nothing before first ones


def test_the_instruction_decides_where_nothing_else_differs() -> None:
    """One of the tasks of a suite is solved and the other is not; the first update has met only one of them."""
    taught = critic()
    texts = list(taught._asked)[:2]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        solved = [bool(rng.integers(2)) or seed == 0 for _ in range(40)]
        played = [
            replace(episode(number, 3, one), snapshots=np.zeros((12, 1), np.float32), instruction=texts[one])
            for number, one in enumerate(solved)
        ]
        taught.weigh(group_episodes(played, np.array(solved, np.float32)))
    assert taught.report()[metrics.GRPO_EXPLAINED] > 0.5


def test_a_continuation_repeats_to_the_bit() -> None:
    one, other = critic(), critic()
    for seed in range(3):
        one.weigh(groups(seed))
    other.load_tree(one.save_tree())
    for seed in range(3, 6):  # 240 episodes: the oldest are forgotten
        left, right = one.weigh(groups(seed)), other.weigh(groups(seed))
        assert left is not None and right is not None
        np.testing.assert_array_equal(left.advantages, right.advantages)


def test_landmarks_show_what_places_hide() -> None:
    """Whether the hand is above or below the block decides, and both may be anywhere."""

    def rolled(seed: int) -> list[Group]:
        rng, played = np.random.default_rng(seed), []
        for _ in range(60):
            block, miss = rng.uniform(-1, 1, 2), rng.uniform(-0.05, 0.05)
            state = np.array([block[0], block[1] + miss, *block, 0, 0, 0, 0, 0, 0], np.float32)
            one = episode(int(rng.integers(1_000_000_000)), 3, miss > 0)
            played.append(replace(one, snapshots=np.tile(state, (12, 1))))
        return group_episodes(played, np.array([one.success for one in played], np.float32))

    explained = []
    for is_blind in (False, True):
        world = PushBlock(EnvConfig(episode_steps=32), 0)
        if is_blind:
            world.landmarks = lambda snapshots: np.empty((len(snapshots), 0, 2), np.float32)
        taught = Critic(AdvantageConfig(baseline="critic", critic=replace(SMALL, episodes=300)), world, seed=0)
        for seed in range(6):
            taught.weigh(rolled(seed))
        explained.append(taught.report()[metrics.GRPO_EXPLAINED])
    assert explained[0] > 0.6 > explained[1] + 0.2
