"""Scores of episodes: by success, and by a judge that looks at frames of the video."""

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlvlm.algorithms.grpo.config import AdvantageConfig, ScoreConfig
from rlvlm.algorithms.grpo.credit.groups import filter_groups, group_episodes
from rlvlm.algorithms.grpo.reward.scoring import (
    EpisodeScorer,
    SuccessScorer,
    VideoScorer,
    item_of,
    shown_frames,
)
from rlvlm.core import metrics
from rlvlm.core.chunks import ChunkEpisode
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.judge import Remembering
from rlvlm.rewards.config import MonitorConfig
from rlvlm.rewards.scorers import JudgeScorer, RandomScorer
from rlvlm.rewards.scoring_items import ScoringItem

STAMP = Stamp(judge="by_hand", revision="1", prompt="numbers/1", decoding="")


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


def episode(steps: int = 12, success: bool = False, group: int = 0) -> ChunkEpisode:
    return ChunkEpisode(
        task="push_block",
        instruction="push the red block onto the pad",
        state_id=group,
        group=group,
        snapshots=np.arange(steps + 1, dtype=np.float32)[:, None],
        proprio=np.zeros((1, 2), np.float32),
        bins=np.zeros((1, 56), np.int16),
        log_probs=np.zeros((1, 56), np.float32),
        steps=np.array([steps]),
        env_rewards=np.zeros(steps, np.float32),
        success=success,
        success_at_end=success,
        progress=0.0,
        terminated=success,
    )


def judged(answers: list[float | None], **settings: object) -> tuple[VideoScorer, ByHand]:
    judge = ByHand(answers)
    monitor = MonitorConfig(controls=0)
    config = ScoreConfig(**{"source": "judged", "num_frames": 4, "monitor": monitor, **settings})  # pyright: ignore[reportArgumentType]
    return VideoScorer(JudgeScorer(judge, draw, remembers=False), config), judge


def score(scorer: EpisodeScorer, episodes: Sequence[ChunkEpisode], env_step: int = 0) -> FloatArray:
    scorer.begin(episodes)
    return scorer.collect(len(episodes), env_step)


def test_success_is_the_envs_own() -> None:
    assert score(SuccessScorer(), [episode(success=True), episode()], 0).tolist() == [1, 0]


def test_the_judge_sees_the_first_and_the_last_moment_and_the_instruction() -> None:
    scorer, judge = judged([0.2, 0.9])
    assert score(scorer, [episode(12), episode(2)], 7).tolist() == pytest.approx([0.2, 0.9])
    assert judge.seen[0].frames[:, 0, 0, 0].tolist() == [0, 4, 8, 12]
    assert judge.seen[1].frames[:, 0, 0, 0].tolist() == [0, 1, 2]  # a short episode has no more moments
    assert judge.seen[0].goal == "push the red block onto the pad"
    records = scorer.drain_records()
    assert [record.env_step for record in records] == [7, 7] and scorer.drain_records() == []


def test_a_judge_may_see_what_lies_left_on_the_left() -> None:
    frames = np.arange(12, dtype=np.uint8).reshape(1, 1, 4, 3)
    assert shown_frames(frames, ScoreConfig()) is frames
    assert shown_frames(frames, ScoreConfig(flip_images=True))[0, 0, :, 0].tolist() == [9, 6, 3, 0]


def test_a_judge_is_not_blamed_for_what_was_undone() -> None:
    undone = [replace(episode(steps, success=True), success_at_end=False, terminated=False) for steps in (12, 11)]
    scorer, _ = judged([0.1, 0.9, 0.9, 0.2])
    score(scorer, [*undone, episode(10, success=True), episode(9)])
    told = scorer.report()
    assert (told[metrics.JUDGE_FALSE_POSITIVES], told[metrics.JUDGE_FALSE_NEGATIVES]) == (0, 0)
    assert told[metrics.JUDGE_UNDONE] == 0.5


def test_a_threshold_makes_scores_binary() -> None:
    scorer, _ = judged([0.49, 0.5], threshold=0.5)
    assert score(scorer, [episode(12), episode(11)], 0).tolist() == [0, 1]


def test_a_calibrated_threshold_is_where_known_episodes_were_told_apart_best() -> None:
    known = [item_of(episode(steps, success=steps > 10), 4) for steps in (12, 11, 9, 8)]
    scorer, _ = judged([0.3, 0.4, 0.1, 0.2, 0.24, 0.26], threshold="calibrated")
    assert scorer.preflight_on(known).threshold == pytest.approx(0.25)
    assert score(scorer, [episode(12), episode(11, success=True)]).tolist() == [0, 1]
    assert scorer.report()[metrics.JUDGE_FALSE_POSITIVES] == 0, "the monitor goes by it too"
    assert [record.claim for record in scorer.drain_records()] == pytest.approx([0.25, 0.25])
    resumed, _ = judged([0.24, 0.26], threshold="calibrated")
    resumed.load_tree(scorer.save_tree())
    assert score(resumed, [episode(12), episode(11)]).tolist() == [0, 1]


def test_noise_is_how_far_scores_of_one_episode_lie_apart() -> None:
    known = [item_of(episode(steps), 4) for steps in (12, 11, 10)]
    answers: list[float | None] = [0.2, 0.9, None, 0.4, 0.7, 0.5]

    def noise(**settings: Any) -> float:
        scorer, _ = judged([*answers], **settings)
        return scorer.measure_noise(known, scorer._scorer)

    assert noise() == pytest.approx(math.sqrt(0.04 / 2))
    assert noise(success_weight=1.0) == pytest.approx(math.sqrt(0.04 / 2) / 2)
    assert noise(threshold=0.8) == pytest.approx(math.sqrt((0 + 1) / 2 / 2))
    die = VideoScorer(RandomScorer(seed=0), ScoreConfig(source="judged", teacher="random"))
    assert die.measure_noise(known * 300, RandomScorer(seed=0)) == pytest.approx(1 / math.sqrt(12), abs=0.02)


def test_an_episode_without_an_answer_never_gets_the_truth() -> None:
    successes = [episode(12, success=True), episode(11, success=True)]
    assert score(judged([None, None], without_answer="neutral")[0], successes, 0).tolist() == [0.5, 0.5]
    with pytest.raises(JudgeUnavailable, match="no score for an episode"):
        score(judged([0.1, None], without_answer="stop")[0], successes, 0)
    scores = score(judged([None, 0.9])[0], successes, 0)
    assert np.isnan(scores[0]) and scores[1] == pytest.approx(0.9)


def test_only_the_group_of_an_unscored_episode_is_left_out() -> None:
    episodes = [episode(12, group=0), episode(11, group=0), episode(10, group=1), episode(9, group=1)]
    scores = score(judged([None, 0.9, 0.1, 0.8])[0], episodes, 0)
    kept = filter_groups(group_episodes(episodes, scores), AdvantageConfig(), 0.0)
    assert [group.episodes[0].group for group in kept] == [1]


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="no effect unless source is judged"):
        ScoreConfig(threshold=0.5)
    with pytest.raises(ValueError, match="ahead has no effect unless source is judged"):
        ScoreConfig(ahead=True)
    with pytest.raises(ValueError, match="goes with the teacher progress"):
        ScoreConfig(source="judged", noise=0.1)
    with pytest.raises(ValueError, match="no effect unless without_answer is neutral"):
        ScoreConfig(source="judged", neutral=0.1)
    for rest in ({"teacher": "progress"}, {"monitor": MonitorConfig(preflight=0)}):
        with pytest.raises(ValueError, match="a calibrated threshold needs a judge"):
            ScoreConfig(source="judged", threshold="calibrated", **rest)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="threshold must be in"):
        ScoreConfig(source="judged", threshold=0.0)


def test_parts_of_a_rollout_are_scored_in_their_order() -> None:
    scorer, judge = judged([0.1, 0.2, 0.3])
    scorer.begin([episode(3)])
    scorer.begin([episode(4), episode(5)])
    assert scorer.collect(3, 0).tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert [len(clip.frames) for clip in judge.seen] == [4, 4, 4]


def test_success_may_be_added_to_a_judge_of_progress() -> None:
    scorer, _ = judged([0.4, 0.7], success_weight=1.0)
    assert score(scorer, [episode(3, success=True), episode(4)]).tolist() == pytest.approx([0.7, 0.35])


def test_one_rollout_may_be_collected_while_the_next_is_looked_at() -> None:
    scorer, _ = judged([0.1, 0.2, 0.3])
    scorer.begin([episode(3)])
    scorer.begin([episode(4), episode(5)])
    assert scorer.collect(1, 0).tolist() == pytest.approx([0.1])
    assert scorer.collect(2, 0).tolist() == pytest.approx([0.2, 0.3])
    assert [told.item.goal for told in scorer.drain_records()] == [episode(3).instruction] * 3


def test_one_thread_asks_and_nobody_waits_for_controls() -> None:
    """A control's chance hangs on the order of questions, so that no second thread may come in between."""
    threads, may_go_on = set[int](), threading.Event()

    class Slow(RandomScorer):
        def score(self, items: Sequence[ScoringItem]) -> list[Score]:
            threads.add(threading.get_ident())
            if items[0].snapshots[0] > items[0].snapshots[-1]:  # backwards
                assert may_go_on.wait(60)
            return super().score(items)

    scorer = VideoScorer(Slow(0), ScoreConfig(source="judged", monitor=MonitorConfig(controls=1)))
    scorer.begin([episode(3), episode(4)])
    scorer.begin([episode(5)])
    assert len(scorer.collect(2, 0)) == 2  # while the control waits
    assert metrics.JUDGE_CONTROL_SCORE not in scorer.report()
    may_go_on.set()
    assert len(scorer.collect(1, 0)) == 1 and metrics.JUDGE_CONTROL_SCORE in scorer.report()
    scorer.save_tree()  # waits for the newest
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_a_judge_that_remembers_is_asked_anew_where_its_noise_is_measured() -> None:
    judge = ByHand([0.2, 0.4])
    remembering = CachedJudge(judge)
    assert isinstance(remembering, Remembering) and not isinstance(judge, Remembering)
    assert remembering.asked_anew is judge


def test_an_episode_is_followed_at_some_of_its_moments_and_scores_are_held_between() -> None:
    scorer, judge = judged([0.1 * place for place in range(12)], num_frames=2)
    said = scorer.follow(episode(steps=23))
    assert len(judge.seen) == 12 and said.shape == (23,)
    assert [int(clip.frames[-1, 0, 0, 0]) for clip in judge.seen] == list(range(1, 24, 2)), "the moment is shown last"
    assert all(clip.frames[0].max() == 0 for clip in judge.seen), "and the start first"
    assert said[[0, 1, 2, 21, 22]] == pytest.approx([0, 0, 0.1, 1.0, 1.1])
