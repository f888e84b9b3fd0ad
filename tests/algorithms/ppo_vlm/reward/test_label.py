import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlvlm.algorithms.env_slots import EnvSlot
from rlvlm.algorithms.ppo_vlm.play import PlayedTurn, PolicyOutput
from rlvlm.algorithms.ppo_vlm.reward.known import known_episodes, known_turns
from rlvlm.algorithms.ppo_vlm.reward.label import TurnLabeller, without_unknown
from rlvlm.algorithms.ppo_vlm.runner import Rollout
from rlvlm.core import metrics
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Score, Stamp, Status
from rlvlm.core.sampling import ReplyTokens
from rlvlm.envs.registry import make_env, task_env
from rlvlm.rewards.config import MixtureConfig, MonitorConfig, TurnRewardConfig
from rlvlm.rewards.scoring_items import ScoringItem
from rlvlm.rewards.temporal import TemporalNovelty

STAMP = Stamp(judge="by_hand", revision="1", prompt="numbers/1", decoding="")
NO_TOKENS = ReplyTokens(prompt_ids=np.zeros(1, np.int64), image=b"", reply_ids=np.zeros(1, np.int64))


class Distance:
    """Scores a turn of number_line by its images' numbers alone; `silent` scores nothing of that start."""

    num_asked = 0

    def __init__(self, silent: tuple[int, int] | None = None) -> None:
        self.silent = silent
        self.seen: list[ScoringItem] = []

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        self.seen += items
        return [self._one(item.snapshots) for item in items]

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        assert not state

    def _one(self, snapshots: Any) -> Score:
        if self.silent is not None and tuple(snapshots[0].astype(int)) == self.silent:
            return Score(status=Status.INVALID, value=None, stamp=STAMP)
        before, after = (abs(float(row[0] - row[1])) for row in (snapshots[0], snapshots[-1]))
        value = 1.0 if after == 0 else 0.75 if after < before else 0.25 if after == before else 0.0
        return Score(status=Status.OK, value=value, stamp=STAMP)


def play(
    starts: Sequence[tuple[int, int]], turns: int, right: bool = True, groups: Sequence[int] = (), mumbles: int = -1
) -> Rollout:
    """Each env begins at (current, target) and is played by the expert, or against it; it ends once. The reply of
    turn `mumbles` cannot be read.
    """
    slots, rows = [], []
    for current, target in starts:
        slot = EnvSlot(make_env("number_line", task_env("number_line"), 0), "number_line")
        for seed in range(10_000):
            slot.begin(seed)
            if tuple(slot.turn.snapshot.astype(int)) == (current, target):
                break
        slots.append(slot)
    over = [False] * len(slots)
    for number in range(turns):
        row: list[PlayedTurn | None] = []
        for place, slot in enumerate(slots):
            if over[place]:
                row.append(None)
                continue
            action = slot.env.expert_action()
            text = "well" if number == mumbles else slot.env.action_text(action if right else 1 - action)
            output = PolicyOutput(
                text=text, tokens=NO_TOKENS, log_probs=np.zeros(1, np.float32), value=0, action=None, version=0
            )
            outcome = slot.play(text)
            over[place] = outcome.is_end
            row.append(PlayedTurn(output=output, outcome=outcome))
        rows.append(row)
    episodes = [one.outcome.episode for row in rows for one in row if one is not None and one.outcome.episode]
    return Rollout(turns=rows, episodes=episodes, groups=groups or range(len(slots)), snapshots={})


def labelled(labeller: TurnLabeller, rollout: Rollout) -> Rollout:
    for row in rollout.turns:
        labeller.watch(row)
    return without_unknown(labeller.label(rollout, 7))


def rewards(rollout: Rollout) -> list[list[float | None]]:
    return [[None if one is None else one.reward for one in row] for row in rollout.turns]


def test_the_envs_reward_is_left_as_it_is() -> None:
    assert rewards(labelled(TurnLabeller(TurnRewardConfig(), None), play([(3, 5), (4, 5)], 2))) == [[0, 1], [1, None]]


def test_judged_rewards_by_hand() -> None:
    scorer = Distance()
    labeller = TurnLabeller(TurnRewardConfig(source="judged"), scorer)
    rollout = play([(3, 5), (4, 5)], 2)
    assert rewards(labelled(labeller, rollout)) == [[0.5, 1.0], [1.0, None]]  # 2 s - 1 of .75, 1 and 1
    assert [(item.action, item.goal) for item in scorer.seen[:1]] == [
        ("+", "bring the current number to the target number")
    ]
    figures = labeller.report()
    assert figures[metrics.REWARD_JUDGED] == pytest.approx(2.5 / 3)
    assert figures[metrics.REWARD_ENVIRONMENT] == pytest.approx(2 / 3), "logged raw and apart"
    records = labeller.drain_records()
    assert [record.env_step for record in records] == [7] * 3 and labeller.drain_records() == []
    assert [record.item.is_success for record in records] == [False, True, True]
    assert [record.truth for record in records] == [record.score.value for record in records] == [0.75, 1.0, 1.0]


def test_wrong_turns_are_paid_by_the_judge_and_never_by_the_truth() -> None:
    rollout = play([(3, 5)], 2, right=False)
    assert [one.outcome.env_reward for row in rollout.turns for one in row if one] == [-1, -1]
    assert rewards(labelled(TurnLabeller(TurnRewardConfig(source="judged"), Distance()), rollout)) == [[-1], [-1]]


def test_a_reply_that_nobody_can_read_is_not_shown_to_the_judge() -> None:
    scorer = Distance()
    config = TurnRewardConfig(source="judged", unreadable=-0.8)
    rollout = labelled(TurnLabeller(config, scorer), play([(3, 5)], 2, mumbles=0))
    assert rewards(rollout) == [[pytest.approx(-0.8)], [0.5]]
    assert {item.action for item in scorer.seen} == {"+"}


def test_without_an_answer_the_episode_is_left_out_or_neutral_or_the_run_ends() -> None:
    starts, silent = [(3, 5), (2, 5)], (4, 5)  # the first episode comes by there in its second turn, the other later
    dropped = labelled(TurnLabeller(TurnRewardConfig(source="judged"), Distance(silent)), play(starts, 2))
    assert rewards(dropped) == [[None, 0.5], [None, 0.5]] and len(dropped) == 2
    neutral = TurnRewardConfig(source="judged", without_answer="neutral", neutral=0.25)
    assert rewards(labelled(TurnLabeller(neutral, Distance(silent)), play(starts, 2))) == [[0.5, 0.5], [-0.5, 0.5]]
    stop = TurnLabeller(TurnRewardConfig(source="judged", without_answer="stop"), Distance(silent))
    with pytest.raises(JudgeUnavailable, match="gave no score"):
        labelled(stop, play(starts, 2))


def test_where_episodes_are_compared_the_whole_group_is_left_out() -> None:
    rollout = play([(4, 5), (3, 5), (1, 0), (2, 0)], 2, groups=[0, 0, 1, 1])
    kept = labelled(TurnLabeller(TurnRewardConfig(source="judged"), Distance(silent=(4, 5))), rollout)
    assert rewards(kept) == [[None, None, 1.0, 0.5], [None, None, None, 1.0]]


def test_a_mixture_is_weighed_and_each_part_logged_raw() -> None:
    world = make_env("number_line", task_env("number_line"), 0)
    mixture = MixtureConfig(environment=0.5, judged=2.0, novelty=0.1)
    novelty = TemporalNovelty(2, world.draw, seed=0)
    labeller = TurnLabeller(TurnRewardConfig(source="mixture", mixture=mixture), Distance(), novelty)
    labelled_turns = rewards(labelled(labeller, play([(3, 5), (4, 5)], 2)))
    plain = np.array([[0.5 * 0 + 2 * 0.5, 0.5 * 1 + 2 * 1.0], [0.5 * 1 + 2 * 1.0, np.nan]])
    extra = np.array(labelled_turns, float) - plain
    assert np.nanmin(extra) == pytest.approx(0) and np.nanmax(extra) == pytest.approx(0.1)
    assert labeller.report()[metrics.REWARD_TOTAL] == pytest.approx(float(np.nanmean(plain + extra)))


def test_an_episode_is_scored_once_at_its_end() -> None:
    scorer = Distance()
    labeller = TurnLabeller(TurnRewardConfig(source="judged", per="episode", num_frames=2), scorer)
    assert rewards(labelled(labeller, play([(2, 5), (4, 5)], 3))) == [[0, 1.0], [0, None], [1.0, None]]
    assert [item.snapshots[:, 0].tolist() for item in scorer.seen[:2]] == [[4, 5], [2, 5]]
    assert scorer.seen[0].action == ""


def test_the_monitor_hears_of_episodes_that_end_and_of_controls() -> None:
    labeller = TurnLabeller(TurnRewardConfig(source="judged", monitor=MonitorConfig(controls=1)), Distance())
    labelled(labeller, play([(4, 5), (3, 5)], 2))
    figures = labeller.report()
    assert figures[metrics.JUDGE_TRUE_SUCCESS] == 1 and figures[metrics.JUDGE_SCORE] == 1
    assert figures[metrics.JUDGE_CONTROL_SCORE] == 1 and figures[metrics.JUDGE_BACKWARDS_SCORE] == 0
    again = TurnLabeller(TurnRewardConfig(source="judged"), Distance())
    again.load_tree(labeller.save_tree())
    assert again.report() == figures


def test_known_turns_are_of_both_kinds() -> None:
    world = make_env("empty_random_6x6", task_env("empty_random_6x6"), 0)
    known = known_turns(world, 10, seed=3)
    assert [item.is_success for item in known] == [True] * 10 + [False] * 10
    assert all(item.action in world.action_names and item.snapshots.shape[0] == 2 for item in known)
    episodes = known_episodes(make_env("number_line", task_env("number_line"), 0), 4, 3, seed=0)
    assert {item.is_success for item in episodes} == {True, False}
    assert max(len(item.snapshots) for item in episodes) == 3


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="needs one at least"):
        TurnRewardConfig(source="mixture")
    with pytest.raises(ValueError, match="weights go with the source mixture"):
        TurnRewardConfig(source="judged", mixture=MixtureConfig(judged=1.0))
    with pytest.raises(ValueError, match="biased teacher is about whole episodes"):
        TurnRewardConfig(source="judged", teacher="biased")
    assert math.isnan(PlayedTurn.__dataclass_fields__["reward"].default), "nobody trains on a turn without a reward"
