import numpy as np
from tiny_episodes import tiny_episode, tiny_episodes, truth

from rlvlm.core.steps import Transitions
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Examples, Steps, decided
from rlvlm.preferences.model.networks import StateInput
from rlvlm.preferences.model.reward_model import RewardModel
from rlvlm.preferences.questions.queries import draw_pairs
from rlvlm.preferences.source import LearnedReward
from rlvlm.rewards.source import Labelling


def test_the_reward_is_the_mean_of_the_members_and_its_version_counts_fits() -> None:
    model = RewardModel(StateInput(4, 2), RewardModelConfig(max_epochs=2, hold_out_every=0), seed=0)
    source = LearnedReward(model)
    episode, flat = tiny_episode(0), np.zeros(20, np.float32)
    batch = Transitions(
        obs=episode.obs,
        actions=episode.actions,
        next_obs=episode.next_obs,
        terminated=flat,
        env_rewards=episode.env_rewards,
        success=flat,
        snapshots=episode.snapshots,
    )
    assert not source.is_trusted, "nothing has been fitted"
    assert (source.labelling, source.version) == (Labelling.ON_CHANGE, 0)
    pairs = draw_pairs(tiny_episodes(4), 12, 1, np.random.default_rng(0))
    comparisons = Examples(num_sides=2)
    comparisons.add(decided(pairs, truth(pairs), "equal"))
    model.fit(comparisons)
    one, two, three = model.ensemble.predict(Steps.of(batch))
    rewards = source.label(batch)
    np.testing.assert_allclose(rewards, (one + two + three) / 3, rtol=1e-6)
    assert rewards.shape == (20,) and rewards.dtype == np.float32 and rewards.any()
    assert source.version == 1 and source.is_trusted


def test_what_can_be_afforded_is_counted_in_what_looks_different() -> None:
    inputs = StateInput(4, 2)
    inputs.affordable_kinds = 7
    source, episode = LearnedReward(RewardModel(inputs, RewardModelConfig(), seed=0)), tiny_episode(0)
    batch = Transitions(
        obs=episode.obs,
        actions=episode.actions,
        next_obs=episode.next_obs,
        terminated=np.zeros(20, np.float32),
        env_rewards=episode.env_rewards,
        success=np.zeros(20, np.float32),
        snapshots=episode.snapshots,
    )
    assert len(source.label_leading(batch)) == 7
    inputs.affordable_kinds = 20
    assert len(source.label_leading(batch)) == 20
