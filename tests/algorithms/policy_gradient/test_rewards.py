"""What turns and episodes are worth: by the env, by success, and by a judge; and what a judge is tried on first."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos import wait_until

from rlvlm.algorithms.policy_gradient.config import AdvantageConfig
from rlvlm.algorithms.policy_gradient.rewards import (
    RewardLabeller,
    drop_unlabelled,
    flip_if_configured,
)
from rlvlm.core import metrics
from rlvlm.core.episodes import Observations, SampledReply, TokenEpisode
from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.core.steps import FloatArray, Frames, spread
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.push_block import PushBlock
from rlvlm.envs.registry import make_env, task_env
from rlvlm.envs.slots import EnvSlot
from rlvlm.judge_bench.asking import Reference, ask
from rlvlm.judge_bench.items import CASES, Item, TaskItems
from rlvlm.judge_bench.preflight import known_items, scored_suite
from rlvlm.judges.cache import CachedJudge, without_memory
from rlvlm.labels.store import LabelStore
from rlvlm.rewards.config import ChunkRewardConfig, MixtureConfig, MonitorConfig, TurnRewardConfig
from rlvlm.rewards.scorers import JudgeScorer, SimulatedScorer, progress_scorer, random_scorer
from rlvlm.rewards.scoring_items import ScoringItem
from rlvlm.rewards.temporal import TemporalNovelty
from tests.algorithms.policy_gradient.by_hand import episode

STAMP = Stamp(judge="by_hand", revision="1", prompt="numbers/1", decoding="")
JUDGED = TurnRewardConfig(source="judged")
UNPLAYED = "minigrid/MiniGrid-Playground-v0"
"""A task without a script."""


class Distance:
    """Scores a turn of number_line by its images' numbers alone; `silent` scores nothing of that start."""

    def __init__(self, silent: tuple[int, int] | None = None) -> None:
        self.silent = silent
        self.seen: list[ScoringItem] = []

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        self.seen += items
        return [self._one(item.snapshots) for item in items]

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        assert state == {}

    def _one(self, snapshots: Any) -> Score:
        if self.silent is not None and tuple(snapshots[0].astype(int)) == self.silent:
            return Score(status=Status.INVALID, value=None, stamp=STAMP)
        before, after = (abs(float(row[0] - row[1])) for row in (snapshots[0], snapshots[-1]))
        value = 1.0 if after == 0 else 0.75 if after < before else 0.25 if after == before else 0.0
        return Score(status=Status.OK, value=value, stamp=STAMP)


Rows = tuple[list[list[TokenEpisode]], list[TokenEpisode]]
"""What is shown after each row of turns, and the episodes, or pieces of them, that they make."""


def play(
    starts: Sequence[tuple[int, int]], turns: int, right: bool = True, groups: Sequence[int] = (), unreadable: int = -1
) -> Rows:
    """Each env begins at (current, target) and is played by the expert, or against it; it ends once. The reply of
    turn `unreadable` cannot be read.
    """
    plays, rows = [], []
    for place, (current, target) in enumerate(starts):
        slot = EnvSlot(make_env("number_line", task_env("number_line"), 0), "number_line")
        for seed in range(10_000):
            slot.begin(seed)
            if tuple(slot.turn.snapshot.astype(int)) == (current, target):
                break
        slot.index = place
        slot.begin_piece(groups[place] if groups else place)
        plays.append(slot)
    running = list(plays)
    for number in range(turns):
        ended = []
        for one in running:
            action = one.env.expert_action()
            text = "well" if number == unreadable else one.env.action_text(action if right else 1 - action)
            reply = SampledReply(answer={"ids": np.zeros(1, np.int64)}, log_probs=np.zeros(1, np.float32), text=text)
            if one.play(reply):
                ended.append(one)
        rows.append([one.episode(only_newest=True) for one in running])
        running = [one for one in running if one not in ended]
    return rows, [one.episode() for one in plays]


def labelled(labeller: RewardLabeller, played: Rows) -> list[list[float]]:
    """Rewards of the episodes that are known, turn by turn."""
    rows, episodes = played
    for row in rows:
        labeller.show(row)
    return [one.rewards.tolist() for one in drop_unlabelled(labeller.label(episodes, 7))]


def test_the_envs_reward_is_left_as_it_is_and_success_comes_at_the_end() -> None:
    played = play([(3, 5), (4, 5)], 2)
    assert labelled(RewardLabeller(TurnRewardConfig(), None), played) == [[0, 1], [1]]
    wrong = play([(3, 5)], 2, right=False)
    assert labelled(RewardLabeller(TurnRewardConfig(), None), wrong) == [[-1, -1]]
    assert labelled(RewardLabeller(TurnRewardConfig(source="success"), None), played) == [[0, 1], [1]]
    assert labelled(RewardLabeller(TurnRewardConfig(source="success"), None), wrong) == [[0, 0]]
    chunks = [episode(success=True), episode()]
    rewards = [one.rewards.tolist() for one in RewardLabeller(ChunkRewardConfig(), None).label(chunks, 0)]
    assert rewards == [[0, 1], [0, 0]]


def test_judged_rewards_by_hand() -> None:
    scorer = Distance()
    labeller = RewardLabeller(JUDGED, scorer)
    assert labelled(labeller, play([(3, 5), (4, 5)], 2)) == [[0.5, 1.0], [1.0]]  # 2 s - 1 of .75, 1 and 1
    assert [(item.action, item.goal) for item in scorer.seen[:1]] == [
        ("+", "bring the current number to the target number")
    ]
    figures = labeller.report()
    assert figures[metrics.REWARD_JUDGED] == pytest.approx(2.5 / 3)
    assert figures[metrics.REWARD_ENVIRONMENT] == pytest.approx(2 / 3), "logged raw and apart"
    records = labeller.drain_records()
    assert [record.env_step for record in records] == [7] * 3 and labeller.drain_records() == []
    assert [record.truth for record in records] == [record.score.value for record in records] == [0.75, 1.0, 1.0]
    wrong = labelled(RewardLabeller(JUDGED, Distance()), play([(3, 5)], 2, right=False))
    assert wrong == [[-1, -1]], "paid by the judge and never by the truth"


@pytest.mark.parametrize(("is_centred", "scale", "first"), [(False, 1.0, 0.0), (True, 2.0, -1.0)])
def test_a_turn_is_worth_by_how_much_the_score_of_the_clip_so_far_rises(
    is_centred: bool, scale: float, first: float
) -> None:
    config = TurnRewardConfig(
        source="judged", teacher="progress", per="turn", clip="growing", is_centred=is_centred, unreadable=-0.5
    )
    rows, [one] = play([(1, 5)], 4, unreadable=1)

    def rewards(labeller: RewardLabeller, episodes: Sequence[TokenEpisode]) -> list[float]:
        labeller.show(episodes)
        return labeller.label(episodes, 7)[0].rewards.tolist()

    scorer = progress_scorer(0.0, 0)
    labeller = RewardLabeller(config, scorer)
    whole = rewards(labeller, [one])
    steps = scale * np.diff(one.progress, prepend=0.0)
    steps[0] += first
    wanted = [steps[0], -0.5, steps[1] + steps[2], steps[3]]
    assert whole == pytest.approx(wanted), "an episode's add up to its last score; what cannot be read costs its price"
    assert [len(record.item.snapshots) for record in labeller.drain_records()] == [2, 4, 5]
    assert sum(whole) + 0.5 == pytest.approx(scale * one.progress[-1] + first)
    # in pieces, with a checkpoint between them, it is the same
    pieces = [
        replace(
            one, steps=one.steps[part], played_at=one.played_at[part], gains=one.gains[part], goals=one.goals[part],
            action_names=one.action_names[part], is_over=is_over, obs=one.obs.at(range(part.start, part.stop + 1)),
            **{name: getattr(one, name)[:part.stop] for name in ("env_rewards", "success", "progress", "replies")},
            snapshots=one.snapshots[: part.stop + 1],
        )
        for part, is_over in ((slice(0, 2), False), (slice(2, 4), one.is_over))
    ]  # fmt: skip
    before, after = RewardLabeller(config, scorer), RewardLabeller(config, scorer)
    found = rewards(before, pieces[:1])
    after.set_state(before.get_state())
    assert found + rewards(after, pieces[1:]) == pytest.approx(wanted)


def test_an_unreadable_reply_is_not_shown_to_the_judge() -> None:
    scorer = Distance()
    labeller = RewardLabeller(TurnRewardConfig(source="judged", unreadable=-0.8), scorer)
    assert labelled(labeller, play([(3, 5)], 2, unreadable=0)) == [[pytest.approx(-0.8), 0.5]]
    assert {item.action for item in scorer.seen} == {"+"}


def test_without_an_answer_the_episode_is_left_out_or_neutral_or_the_run_ends() -> None:
    starts, silent = [(3, 5), (2, 5)], (4, 5)  # the first episode comes by there in its second turn, the other later
    assert labelled(RewardLabeller(JUDGED, Distance(silent)), play(starts, 2)) == [[0.5, 0.5]]
    neutral = TurnRewardConfig(source="judged", without_answer="neutral", neutral=0.25)
    assert labelled(RewardLabeller(neutral, Distance(silent)), play(starts, 2)) == [[0.5, -0.5], [0.5, 0.5]]
    stop = RewardLabeller(TurnRewardConfig(source="judged", without_answer="stop"), Distance(silent))
    with pytest.raises(JudgeUnavailable, match="gave no score"):
        labelled(stop, play(starts, 2))
    compared = play([(4, 5), (3, 5), (1, 0), (2, 0)], 2, groups=[0, 0, 1, 1])
    assert labelled(RewardLabeller(JUDGED, Distance((4, 5))), compared) == [[1.0], [0.5, 1.0]], "the group is left out"


def test_a_mixture_is_weighed_and_each_part_logged_raw() -> None:
    env = make_env("number_line", task_env("number_line"), 0)
    mixture = MixtureConfig(environment=0.5, judged=2.0, novelty=0.1)
    labeller = RewardLabeller(
        TurnRewardConfig(source="mixture", mixture=mixture), Distance(), TemporalNovelty(2, env.draw, seed=0)
    )  # fmt: skip
    found = sum(labelled(labeller, play([(3, 5), (4, 5)], 2)), [])
    extra = np.array(found) - [0.5 * 0 + 2 * 0.5, 0.5 * 1 + 2 * 1.0, 0.5 * 1 + 2 * 1.0]
    assert extra.min() == pytest.approx(0, abs=1e-6) and extra.max() == pytest.approx(0.1)
    assert labeller.report()[metrics.REWARD_TOTAL] == pytest.approx(np.mean(found))


def test_the_monitor_hears_of_episodes_that_end_and_of_controls() -> None:
    labeller = RewardLabeller(replace(JUDGED, monitor=MonitorConfig(controls=1)), Distance())
    labelled(labeller, play([(4, 5), (3, 5)], 2))
    figures = labeller.report()
    assert figures[metrics.JUDGE_TRUE_SUCCESS] == 1 and figures[metrics.JUDGE_SCORE] == 1
    assert figures[metrics.JUDGE_CONTROL_SCORE] == 1 and figures[metrics.JUDGE_BACKWARDS_SCORE] == 0


class ByHand:
    """Answers with the numbers it was given, None being a failure, and remembers what it was shown."""

    def __init__(self, answers: list[float | None]) -> None:
        self.answers = answers
        self.seen: list[Clip] = []

    @property
    def stamp(self) -> Stamp:
        return STAMP

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        raise NotImplementedError

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        self.seen += clips
        return [
            Score(status=Status.FAILED if value is None else Status.OK, value=value, stamp=STAMP)
            for value in [self.answers.pop(0) for _ in clips]
        ]


def draw(snapshots: FloatArray) -> Frames:
    """Images whose every pixel is the snapshot's number."""
    return np.broadcast_to(snapshots[:, :1, None, None], (len(snapshots), 2, 2, 3)).astype(np.uint8)


def whole(steps: int = 12, success: bool = False, group: int = 0, **more: Any) -> TokenEpisode:
    return episode([steps], success=success, group=group, **more)


def judged(answers: list[float | None], **settings: Any) -> tuple[RewardLabeller, ByHand]:
    judge = ByHand(answers)
    config = ChunkRewardConfig(**{"source": "judged", "num_frames": 4, "monitor": MonitorConfig(controls=0)} | settings)
    return RewardLabeller(config, JudgeScorer(judge, draw, remembers=False)), judge


def score(labeller: RewardLabeller, episodes: Sequence[TokenEpisode], env_step: int = 0) -> FloatArray:
    own = [replace(one, slot=number) for number, one in enumerate(episodes)]
    labeller.show(own)
    return np.array([one.rewards.sum() for one in labeller.label(own, env_step)])


def item_of(one: TokenEpisode) -> ScoringItem:
    return ScoringItem(
        goal=one.goals[0], snapshots=spread(one.snapshots, 4), is_success=one.is_success, progress=0.0
    )  # fmt: skip


def test_the_judge_sees_the_first_and_the_last_moment_and_the_instruction() -> None:
    labeller, judge = judged([0.2, 0.9])
    assert score(labeller, [whole(12), whole(2)], 7).tolist() == pytest.approx([0.2, 0.9])
    assert judge.seen[0].frames[:, 0, 0, 0].tolist() == [0, 4, 8, 12]
    assert judge.seen[1].frames[:, 0, 0, 0].tolist() == [0, 1, 2]  # a short episode has no more moments
    assert judge.seen[0].goal == "push the red block onto the pad"
    frames = np.arange(12, dtype=np.uint8).reshape(1, 1, 4, 3)
    assert flip_if_configured(frames, ChunkRewardConfig()) is frames
    assert flip_if_configured(frames, ChunkRewardConfig(flip_images=True))[0, 0, :, 0].tolist() == [9, 6, 3, 0]


def test_undone_successes_are_no_errors_of_the_judge() -> None:
    undone = [whole(steps, success=True, success_lost=True) for steps in (12, 11)]
    labeller, _ = judged([0.1, 0.9, 0.9, 0.2])
    score(labeller, [*undone, whole(10, success=True), whole(9)])
    figures = labeller.report()
    assert (figures[metrics.JUDGE_FALSE_POSITIVES], figures[metrics.JUDGE_FALSE_NEGATIVES]) == (0, 0)
    assert figures[metrics.JUDGE_UNDONE] == 0.5


def test_a_threshold_makes_scores_binary_and_may_be_calibrated() -> None:
    assert score(judged([0.49, 0.5], threshold=0.5)[0], [whole(12), whole(11)]).tolist() == [0, 1]
    known = tuple(
        Item(kind="video", case="success" if steps > 10 else "failure", goal="push", success=steps > 10,
             sides=(whole(steps).snapshots,), truth=(float(steps > 10),))
        for steps in (12, 11, 9, 8)
    )  # fmt: skip
    made = TaskItems(task="push_block", items=known, draw=lambda rows, _: rows, digest="", looks=())  # pyright: ignore[reportArgumentType] - nobody draws
    order = [one.item for block in ask(Reference("random"), made, 2, 0) for one in block]
    labeller, _ = judged([*np.array([0.3, 0.4, 0.1, 0.2])[order], 0.24, 0.26], threshold="calibrated")
    found = labeller.preflight_on(made, 0, lambda line: None)
    assert found == pytest.approx({metrics.JUDGE_PREFLIGHT_AUC: 1.0, metrics.JUDGE_PREFLIGHT_THRESHOLD: 0.25})
    assert score(labeller, [whole(12), whole(11, success=True)]).tolist() == [0, 1]
    assert labeller.report()[metrics.JUDGE_FALSE_POSITIVES] == 0, "the monitor goes by it too"
    assert [record.success_threshold for record in labeller.drain_records()] == pytest.approx([0.25, 0.25])
    resumed, _ = judged([0.24, 0.26], threshold="calibrated")
    resumed.set_state(labeller.get_state())
    assert score(resumed, [whole(12), whole(11)]).tolist() == [0, 1]
    for settings, success_threshold in (
        ({}, 0.25), ({"threshold": 0.4}, 0.4), ({"monitor": MonitorConfig(controls=0, success_threshold=0.1)}, 0.1),
        ({"monitor": MonitorConfig(controls=0, success_threshold=0.1), "threshold": "calibrated"}, 0.1),
    ):  # fmt: skip
        plain, _ = judged([*np.array([0.3, 0.4, 0.1, 0.2])[order], 0.24, 0.26], **settings)
        plain.preflight_on(made, 0, lambda line: None)
        assert plain.judged.monitor.success_threshold == pytest.approx(success_threshold), (
            "a run that has no threshold is watched by the preflight's"
        )
        again, _ = judged([], **settings)
        again.set_state(plain.get_state())
        assert again.judged.monitor.success_threshold == plain.judged.monitor.success_threshold


@pytest.mark.parametrize(
    ("lift", "settings", "is_said"), [(0.004, {}, True), (0.004, {"threshold": "calibrated"}, False), (0.1, {}, False)]
)
def test_scores_that_lie_close_together_are_reported(lift: float, settings: dict[str, Any], is_said: bool) -> None:
    known = tuple(
        Item(kind="video", case="success" if success else "failure", goal="push", success=success,
             sides=(whole(12 - place).snapshots,), truth=(float(success),))
        for place, success in enumerate((True, True, False, False))
    )  # fmt: skip
    made = TaskItems(task="push_block", items=known, draw=lambda rows, _: rows, digest="", looks=())  # pyright: ignore[reportArgumentType] - nobody draws
    order = [one.item for block in ask(Reference("random"), made, 2, 0) for one in block]
    lines: list[str] = []
    labeller, _ = judged([*np.array([0.4 + lift, 0.4 + lift, 0.4, 0.4])[order]], **settings)
    labeller.preflight_on(made, 0, lines.append)
    assert any("--reward.threshold calibrated" in line for line in lines) == is_said


def test_noise_is_how_far_scores_of_one_episode_lie_apart(tmp_path: Path) -> None:
    known = [item_of(whole(steps)) for steps in (12, 11, 10)]
    answers: list[float | None] = [0.2, 0.9, None, 0.4, 0.7, 0.5]

    def noise(**settings: Any) -> float:
        labeller, _ = judged([*answers], **settings)
        return labeller.judged.measure_noise(known, labeller.judged.scorer)

    assert noise() == pytest.approx(math.sqrt(0.04 / 2))
    assert noise(success_weight=1.0) == pytest.approx(math.sqrt(0.04 / 2) / 2)
    assert noise(threshold=0.8) == pytest.approx(math.sqrt((0 + 1) / 2 / 2))
    random = RewardLabeller(ChunkRewardConfig(source="judged", teacher="random"), random_scorer(seed=0))
    assert random.judged.measure_noise(known * 300, random_scorer(seed=0)) == pytest.approx(1 / math.sqrt(12), abs=0.02)
    judge = ByHand([0.2, 0.4])
    assert without_memory(CachedJudge(judge, LabelStore(tmp_path))) is without_memory(judge) is judge, (
        "its noise is that of new answers"
    )


def test_an_episode_without_an_answer_never_gets_the_truth() -> None:
    wins = [whole(12, success=True), whole(11, success=True)]
    assert score(judged([None, None], without_answer="neutral")[0], wins).tolist() == [0.5, 0.5]
    with pytest.raises(JudgeUnavailable, match="gave no score"):
        score(judged([0.1, None], without_answer="stop")[0], wins)
    scores = score(judged([None, 0.9])[0], wins)
    assert np.isnan(scores[0]) and scores[1] == pytest.approx(0.9)
    with_success = score(judged([0.4, 0.7], success_weight=1.0)[0], [whole(3, success=True), whole(4)])
    assert with_success.tolist() == pytest.approx([0.7, 0.35]), "which may be added to a judge of progress"


def test_one_rollout_may_be_labelled_while_the_next_is_looked_at() -> None:
    labeller, _ = judged([0.1, 0.2, 0.3])
    first, second = [whole(3, group=0)], [whole(4, group=1), whole(5, group=2)]
    for part in (first, second[:1], second[1:]):
        labeller.show(part)
    assert labeller.label(first, 0)[0].rewards.tolist() == pytest.approx([0.1])
    assert [one.rewards[0] for one in labeller.label(second, 0)] == pytest.approx([0.2, 0.3])


def test_turns_that_come_one_by_one_are_asked_about_together_in_their_order() -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    class Slow(ByHand):
        num_calls = 0

        def score(self, clips: Sequence[Clip]) -> list[Score]:
            self.num_calls += 1
            begun.set()
            assert may_go_on.wait(60)
            return super().score(clips)

    values = [number / 100 for number in range(100)]
    config = ChunkRewardConfig(source="judged", num_frames=4, monitor=MonitorConfig(controls=0))
    labeller = RewardLabeller(config, JudgeScorer(judge := Slow([*values]), draw, remembers=False))
    episodes = [whole(3 + number, group=number) for number in range(100)]  # equal ones would be asked about once
    for one in episodes:
        labeller.show([one], gathers=True)
        assert begun.wait(60)  # the others come while the judge thinks about the first
    may_go_on.set()
    assert [one.rewards[0] for one in labeller.label(episodes, 0)] == pytest.approx(values)
    assert judge.num_calls == 3  # the first alone, then 64 and the rest


def test_rows_are_asked_about_side_by_side_where_the_judge_answers_many() -> None:
    both = threading.Barrier(2, timeout=60)

    class Replicas(ByHand):
        at_once = 64

        def score(self, clips: Sequence[Clip]) -> list[Score]:
            both.wait()  # breaks unless another call comes meanwhile
            return [Score(status=Status.OK, value=float(clip.frames.shape[0]) / 10, stamp=STAMP) for clip in clips]

    config = ChunkRewardConfig(source="judged", num_frames=9, monitor=MonitorConfig(controls=0))
    for gathers in (False, True):
        labeller = RewardLabeller(config, JudgeScorer(Replicas([]), draw, remembers=False))
        rows = [[whole(3, group=0)], [whole(6, group=1)]]
        labeller.show(rows[0], gathers=gathers)
        if gathers:  # so that they are not gathered into one
            wait_until(lambda: both.n_waiting == 1, "the first row is asked about", 60)
        labeller.show(rows[1], gathers=gathers)
        assert [one.rewards[0] for row in rows for one in labeller.label(row, 0)] == pytest.approx([0.4, 0.7])


def test_one_thread_asks_and_controls_delay_no_labels() -> None:
    """A control's chance hangs on the order of questions, so that no second thread may come in between."""
    threads, may_go_on = set[int](), threading.Event()

    class Slow(SimulatedScorer):
        def score(self, items: Sequence[ScoringItem]) -> list[Score]:
            threads.add(threading.get_ident())
            if items[0].snapshots[0] > items[0].snapshots[-1]:  # backwards
                assert may_go_on.wait(60)
            return super().score(items)

    config = ChunkRewardConfig(source="judged", monitor=MonitorConfig(controls=1))
    labeller = RewardLabeller(config, Slow(lambda item, rng: 0.5, 0, "slow"))
    first, second = [whole(3, group=0), whole(4, group=1)], [whole(5, group=2)]
    labeller.show(first)
    labeller.show(second)
    assert len(labeller.label(first, 0)) == 2  # while the control waits
    assert metrics.JUDGE_CONTROL_SCORE not in labeller.report()
    may_go_on.set()
    assert len(labeller.label(second, 0)) == 1 and metrics.JUDGE_CONTROL_SCORE in labeller.report()
    labeller.get_state()  # waits for the newest
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_an_episode_is_followed_at_some_of_its_moments_and_scores_are_held_between() -> None:
    labeller, judge = judged([0.1 * place for place in range(12)], num_frames=2)
    said = labeller.follow(whole(steps=23))
    assert len(judge.seen) == 12 and said.shape == (23,)
    assert [int(clip.frames[-1, 0, 0, 0]) for clip in judge.seen] == list(range(1, 24, 2)), "the moment is shown last"
    assert all(clip.frames[0].max() == 0 for clip in judge.seen), "and the start first"
    assert said[[0, 1, 2, 21, 22]] == pytest.approx([0, 0, 0.1, 1.0, 1.1])
    known = RewardLabeller(ChunkRewardConfig(source="judged"), progress_scorer(0.0, 0))
    climb = np.linspace(0.1, 1.0, 10, dtype=np.float32)
    said = known.follow(replace(whole(steps=10), progress=climb))
    assert said == pytest.approx(climb), "each moment has the progress that was made by then"


class NoScript(PushBlock):
    """Has nobody who could push blocks of these colours."""

    unscripted: tuple[str, ...] = ("red",)

    def reset(self, **options: Any) -> tuple[Observations, dict[str, Any]]:
        obs, info = super().reset(**options)
        self._is_scripted = not any(colour in obs.texts[0] for colour in self.unscripted)
        return obs, info

    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray | None:
        return super().scripted_chunk(noise, rng) if self._is_scripted else None


def test_known_turns_chunks_and_episodes_are_the_benchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(task: str, count: int, per_turn: bool) -> list[Item]:
        suite = scored_suite(task, count)
        return list(known_items(suite, task_env(task), 48, 3, per_turn).items)

    turns = known("empty_random_6x6", 10, True)
    played = [item.case for item in turns if item.source < 0]
    assert played == ["nearer"] * 10 + ["farther"] * 10 and {item.case for item in turns} > {"reversed", "still"}
    assert all(item.action and len(item.sides[0]) == 2 for item in turns)
    episodes = known("number_line", 4, False)
    assert {item.success for item in episodes} == {True, False}
    driven = Counter(item.case for item in known("push_block", 16, False))
    controls = {case: driven.pop(case) for case in ("reversed", "still", "other goal", "hacked")}
    assert set(controls.values()) == {8}, "a few successes are shown again, and what fooled judges"
    assert set(driven) == set(CASES) and driven["success"] == 8 and driven.total() <= 32
    assert {item.kind for item in known("push_block", 6, True)} == {"turn"}

    def unscripted(*colours: str) -> Callable[..., PushBlock]:
        def make(task: str, config: ChunkEnvConfig, seed: int) -> PushBlock:
            env = NoScript(config, seed)
            env.unscripted = colours
            return env

        return make

    monkeypatch.setattr("rlvlm.judge_bench.task_items.make_env", unscripted("red"))
    others = known("push_block", 16, False)
    red = [item for item in others if "red" in item.goal]
    assert len(red) < len(others) and not any(item.success for item in red), "there nobody but chance has played"
    monkeypatch.setattr("rlvlm.judge_bench.task_items.make_env", unscripted(""))
    assert known("push_block", 16, False) == []


@pytest.mark.slow
def test_noise_is_measured_and_without_known_episodes_nothing_is() -> None:
    lines: list[str] = []

    def found(task: str, **settings: Any) -> dict[str, float]:
        reward = ChunkRewardConfig(source="judged", monitor=MonitorConfig(preflight=8), **settings)
        noise = AdvantageConfig(scorer_noise="measured" if reward.teacher == "random" else 0.0)
        labeller = RewardLabeller(reward, random_scorer(0))
        return labeller.preflight(task, task_env(task), noise, 0, lambda: random_scorer(0), lines.append)

    measured = found("push_block", teacher="random")
    assert set(measured) == {metrics.JUDGE_PREFLIGHT_NOISE} and measured[metrics.JUDGE_PREFLIGHT_NOISE] > 0.1
    assert "teach nothing" in lines[-1]
    assert found(UNPLAYED) == {} and "not tried" in lines[-1]
    with pytest.raises(UsageError, match="calibrates"):
        found(UNPLAYED, threshold="calibrated")
    with pytest.raises(UsageError, match="noise"):
        found(UNPLAYED, teacher="random")
