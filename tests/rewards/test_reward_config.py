import pytest

from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig, check_learning
from rlvlm.rewards.config import ExplorationConfig, StepRewardConfig


def test_scores_of_a_judge_alone_ask_it():
    asked = [StepRewardConfig(source="score", teacher=name).asks_judge for name in ("judge", "oracle", "random")]
    assert asked == [True, False, False]


@pytest.mark.parametrize(
    ("source", "asks_judge", "is_learned"),
    [
        ("preference", True, True), ("score", True, True), ("judged", True, False),
        ("environment", False, False), ("success", False, False), ("novelty", False, False),
    ],
)  # fmt: skip
def test_which_sources_ask_a_judge_and_which_learn(source, asks_judge, is_learned):
    config = StepRewardConfig(source=source)
    assert (config.asks_judge, config.is_learned) == (asks_judge, is_learned)


def test_the_weight_of_exploring_falls_by_its_share_each_step():
    halving = ExplorationConfig(bonus="disagreement", weight=0.8, decay=0.5)
    assert [halving.weight_after(steps) for steps in (0, 1, 3)] == [0.8, 0.4, 0.1]
    assert ExplorationConfig(weight=0.8).weight_after(0) == 0, "no bonus, no weight"
    assert ExplorationConfig(bonus="novelty", weight=0.8, decay=0).weight_after(10**6) == 0.8


def test_exploring_that_cannot_be_is_refused():
    disagreement = ExplorationConfig(bonus="disagreement")
    with pytest.raises(ValueError, match="reward.source success learns none"):
        StepRewardConfig(source="success", exploration=disagreement)
    with pytest.raises(ValueError, match="got reward_model.ensemble 1"):
        check_learning(StepRewardConfig(exploration=disagreement), FeedbackConfig(), RewardModelConfig(ensemble=1))
    check_learning(StepRewardConfig(exploration=disagreement), FeedbackConfig(), RewardModelConfig(ensemble=2))
