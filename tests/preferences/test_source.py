import numpy as np
from tiny_episodes import tiny_episode, tiny_episodes, truth

from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Comparisons, Steps
from rlvlm.preferences.networks import StateInput
from rlvlm.preferences.queries import draw_pairs
from rlvlm.preferences.reward_model import RewardModel
from rlvlm.preferences.source import PreferenceReward
from rlvlm.rewards.source import Labelling
from rlvlm.types import Transitions


def test_rewards_are_the_members_mean_scaled_over_what_was_compared() -> None:
    model = RewardModel(StateInput(4, 2), RewardModelConfig(max_epochs=2), seed=0)
    source = PreferenceReward(model)
    episode, flat = tiny_episode(0), np.zeros(20, np.float32)
    batch = Transitions(obs=episode.obs, actions=episode.actions, next_obs=episode.next_obs, terminated=flat,
                        env_rewards=episode.env_rewards, success=flat, snapshots=episode.snapshots)
    assert (source.labelling, source.version) == (Labelling.ON_CHANGE, 0)
    pairs = draw_pairs(tiny_episodes(4), 12, 1, np.random.default_rng(0))
    comparisons = Comparisons("equal")
    comparisons.add(pairs, truth(pairs))
    model.fit(comparisons)
    one, two, three = model.predict(comparisons.steps())
    mean, spread = ((one + two + three) / 3).mean(), ((one + two + three) / 3).std()
    one, two, three = model.predict(Steps.of(batch))
    rewards = source.label(batch)
    np.testing.assert_allclose(rewards, ((one + two + three) / 3 - mean) / spread, rtol=1e-4, atol=1e-5)
    assert rewards.shape == (20,) and rewards.dtype == np.float32
    assert source.version == 1


def test_a_flat_fit_still_gives_a_reward_that_can_be_seen() -> None:
    """One tiny step is enough for the right order, and the reward then spans units, not thousandths."""
    model = RewardModel(StateInput(4, 2), RewardModelConfig(max_epochs=1, lr=1e-5), seed=0)
    pairs = draw_pairs(tiny_episodes(4), 12, 1, np.random.default_rng(0))
    comparisons = Comparisons("equal")
    comparisons.add(pairs, truth(pairs))
    model.fit(comparisons)
    assert model.predict(comparisons.steps()).mean(axis=0).std() < 0.3
    rewards = model.rewards(comparisons.steps())
    assert abs(rewards.mean()) < 1e-3 and abs(rewards.std() - 1) < 1e-3
