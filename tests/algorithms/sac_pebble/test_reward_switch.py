from typing import Any

import numpy as np
import pytest
from tiny_episodes import tiny_episodes
from tiny_loops import SMALL

from rlvlm.algorithms.sac_pebble.reward_switch import RewardSetup, RewardSwitch, build_switch, preflight_on_pairs
from rlvlm.algorithms.sac_pebble.runner import Sample
from rlvlm.core import metrics
from rlvlm.core.steps import Trajectory, Transitions
from rlvlm.envs.config import StepEnvConfig
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.store import LabelStore
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig
from rlvlm.rewards.config import ExplorationConfig, StepRewardConfig
from rlvlm.rewards.novelty import NoveltyReward
from rlvlm.testing import FakeJudge, TinyEnv

TESTED = RewardModelConfig(image_px=16)
OFTEN = FeedbackConfig(first_step=10, every_steps=10, queries=120)


def switch_of(
    teacher: str, model: RewardModelConfig = TESTED, margin: float = 0.0, bonus: Any = "none", **more: Any
) -> RewardSwitch:
    settings: dict[str, Any] = {"feedback": OFTEN} | more
    rewarding = RewardSetup(
        reward=StepRewardConfig(teacher=teacher, exploration=ExplorationConfig(bonus=bonus)),
        reward_model=model,
        make_judge=lambda: FakeJudge(margin=margin),
        **settings,
    )
    switch = build_switch(rewarding, "tiny", TinyEnv(), novelty_neighbour=3, seed=0)
    episodes = tiny_episodes(12)
    switch.record(Sample(transitions=transitions_of(episodes[0]), episodes=episodes))
    return switch


def transitions_of(seen: Trajectory) -> Transitions:
    return Transitions(
        obs=seen.obs,
        actions=seen.actions,
        next_obs=seen.next_obs,
        env_rewards=seen.env_rewards,
        snapshots=seen.snapshots,
        terminated=seen.success.astype("f4"),
        success=seen.success.astype("f4"),
    )


@pytest.mark.slow
def test_novelty_lasts_until_labels_are_predicted_and_a_coin_is_never_trusted():
    honest, coin = switch_of("progress"), switch_of("random")
    found = honest.hold_session(10)
    assert found[metrics.REWARD_IS_TRUSTED] == 1 and honest.learned is honest.source
    for step in (10, 20, 30):
        found = coin.hold_session(step)
        assert found[metrics.REWARD_IS_TRUSTED] == 0
        assert isinstance(coin.source, NoveltyReward) and coin.learned is None
    again = switch_of("random")
    again.set_state(coin.get_state())
    assert isinstance(again.source, NoveltyReward) and again.steps_to_session(35) == 5


@pytest.mark.slow
def test_a_restored_switch_is_as_it_was():
    for bonus in ("none", "novelty"):
        switch, fresh = (switch_of("progress", SMALL, bonus=bonus) for _ in range(2))
        before = switch.get_state()
        switch.hold_session(10)
        assert switch.learned is not None
        for one in (switch, fresh):
            one.set_state(before)
        assert switch.learned is None and isinstance(switch.source, NoveltyReward)
        assert not switch.drain_records(10), "what was asked meanwhile was never asked"
        for one in (switch, fresh):
            one.record(Sample(transitions=transitions_of(tiny_episodes(1)[0]), episodes=[]))
        given = [one.source.label(transitions_of(tiny_episodes(1)[0])) for one in (switch, fresh)]
        np.testing.assert_array_equal(*given)
        assert switch.hold_session(10).keys() == fresh.hold_session(10).keys()


def test_a_session_without_labels_changes_nothing():
    switch = switch_of("judge", SMALL, margin=255)  # every pair is a tie, and ties do not train
    found = switch.hold_session(10)
    assert found[metrics.QUERIES_NO_PREFERENCE] == 120 and metrics.REWARD_LOSS not in found
    assert switch.learned is None and isinstance(switch.source, NoveltyReward)


def test_no_questions_are_asked_at_the_end_of_the_run():
    switch = switch_of("oracle", SMALL, total_steps=20)
    assert switch.is_feedback_due(10) and switch.steps_to_session(7) == 3
    switch.hold_session(10)
    assert not switch.is_feedback_due(20) and switch.steps_to_session(12) is None
    endless = switch_of("oracle", SMALL)
    endless.hold_session(10)
    assert endless.is_feedback_due(20) and endless.steps_to_session(12) == 8


def test_questions_asked_ahead_by_the_last_session_still_train():
    ahead = FeedbackConfig(first_step=10, every_steps=10, queries=20, ahead=True)
    switch = switch_of("oracle", SMALL, feedback=ahead, total_steps=30)
    assert metrics.REWARD_LOSS not in switch.hold_session(10) and switch.learned is None
    found = switch.hold_session(20)
    assert found[metrics.COMPARISONS] > 20, "the first session's, and the last one's"
    switch.finish_feedback(30)
    assert len(switch.drain_records(30)) == 40


def test_a_run_that_is_started_again_takes_its_preflight_from_the_label_store(tmp_path):
    fake = FakeJudge()
    setup = RewardSetup(
        reward=StepRewardConfig(teacher="judge"),
        judge=JudgeConfig(image_px=32, faulty="ok"),
        make_judge=lambda: CachedJudge(fake, LabelStore(tmp_path)),
    )
    asked = []
    for _ in range(2):
        preflight_on_pairs(setup, "rlvlm.testing:TINY", StepEnvConfig(episode_steps=20), 0, lambda _: None)
        asked.append(fake.num_asked)
    assert asked[0] == asked[1] > 40
