import pytest

from rlvlm.rewards.config import RewardConfig


def test_a_teacher_who_only_compares_gives_no_scores() -> None:
    with pytest.raises(ValueError, match="reward.teacher mistake compares and gives no scores"):
        RewardConfig(source="score", teacher="mistake")
    assert [RewardConfig(source="score", teacher=teacher).asks_judge for teacher in ("judge", "oracle", "random")] == [
        True,
        False,
        False,
    ]


def test_who_asks_a_judge_and_who_learns() -> None:
    told = {
        source: (RewardConfig(source=source).asks_judge, RewardConfig(source=source).is_learned)
        for source in ("preference", "score", "judged", "environment", "sparse", "novelty")
    }
    assert told == {
        "preference": (True, True),
        "score": (True, True),
        "judged": (True, False),
        "environment": (False, False),
        "sparse": (False, False),
        "novelty": (False, False),
    }
