import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from tiny_episodes import numbered_trajectory, pair_of, tiny_episodes

from rlvlm.core import metrics
from rlvlm.core.judging import Label, Status, Verdict
from rlvlm.core.steps import Pair, Segment, Trajectory
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.answers import simulated
from rlvlm.preferences.answers.simulated import SKIPPED, SimulatedTeacher
from rlvlm.preferences.answers.teachers import OracleTeacher, build_teacher
from rlvlm.preferences.build import build_loop
from rlvlm.preferences.config import (
    BPREF_TEACHERS,
    FeedbackConfig,
    RewardModelConfig,
    SimulatedTeacherConfig,
    simulated_config,
)
from rlvlm.preferences.questions.queries import draw_pairs
from rlvlm.rewards.config import RewardConfig
from rlvlm.runs.config import RunConfig
from rlvlm.testing import TinyEnv


def segment(*rewards: float) -> Segment:
    column = np.array(rewards, np.float32)
    wide = np.repeat(column[:, None], 2, axis=1)
    return Segment(obs=wide, actions=wide, next_obs=wide, snapshots=wide, env_rewards=column, progress=column)


def teacher(seed: int = 0, **weaknesses: float) -> SimulatedTeacher:
    return SimulatedTeacher(SimulatedTeacherConfig(**weaknesses), seed)


def labels(verdicts: list[Verdict]) -> list[Label | None]:
    return [verdict.label for verdict in verdicts]


def flat_episode(reward: float, num_steps: int = 20) -> Trajectory:
    rewards = np.full(num_steps, reward, np.float32)
    return dataclasses.replace(numbered_trajectory(num_steps), env_rewards=rewards)


def test_somebody_myopic_weighs_the_end_most() -> None:
    # By hand: 0.5^2 * 4 + 0.5 * 2 + 1 = 3 and 0.25 * 0 + 0.5 * 0 + 4 = 4, though the plain sums are 7 and 4.
    rewards = np.array([[4, 2, 1], [0, 0, 4]], np.float32)
    np.testing.assert_allclose(simulated.myopic_returns(rewards, 0.5), [3, 4])
    np.testing.assert_allclose(simulated.myopic_returns(rewards, 1.0), [7, 4])
    pair = Pair(left=segment(4, 2, 1), right=segment(0, 0, 4))
    assert labels(teacher(gamma=0.5).answer([pair])) == [Label.RIGHT]
    assert labels(teacher().answer([pair])) == [Label.LEFT]


def test_a_choice_follows_the_logistic_curve() -> None:
    # By hand: sigmoid(2 * 0.5) = 1 / (1 + e^-1) = 0.7311; sides swapped give the rest to one.
    left, right = np.array([0.0, 0.5, 3.0, 0.0]), np.array([0.5, 0.0, 3.0, 1e6])
    np.testing.assert_allclose(simulated.p_right_of(left, right, 2.0), [0.731059, 0.268941, 0.5, 1.0], atol=1e-6)
    np.testing.assert_array_equal(simulated.p_right_of(left, right, math.inf), [1.0, 0.0, 0.5, 1.0])


def test_thresholds_are_compared_with_plain_returns() -> None:
    left, right = np.array([0.0, 1.0, -2.0]), np.array([1.0, 1.25, -3.0])
    assert simulated.is_skipped(left, right, 1.0).tolist() == [True, False, True]
    assert simulated.is_skipped(left, right, 0.0).tolist() == [False, False, False]
    assert simulated.is_equal(left, right, 1.0).tolist() == [False, True, False]
    assert simulated.is_equal(left, left, 0.0).tolist() == [False, False, False]


def test_a_mistake_turns_an_answer_round() -> None:
    sides = np.array([1, -1, 1, -1], np.int8)
    assert simulated.mistake(sides, np.array([0.05, 0.05, 0.1, 0.9]), 0.1).tolist() == [-1, 1, 1, -1]


def test_a_judge_of_places_names_the_left_side_of_anything() -> None:
    assert simulated.names_left(np.array([0.0, 0.69, 0.7, 0.99]), 0.3).tolist() == [False, False, True, True]
    pairs = [Pair(left=segment(0), right=segment(1)), Pair(left=segment(1), right=segment(1))]
    assert labels(teacher(left=1.0).answer(pairs)) == [Label.LEFT] * 2, "ties too"
    swapped = [Pair(left=pair.right, right=pair.left) for pair in pairs]
    assert labels(teacher(left=1.0).answer(swapped)) == [Label.LEFT] * 2
    told = Counter(labels(teacher(left=0.3, mistake=0.2).answer([pairs[0]] * 4_000)))
    assert told[Label.LEFT] / 4_000 == pytest.approx(0.5, abs=0.03), "a fifth by mistake, three tenths by place"
    assert labels(teacher().answer([pairs[0]] * 4_000)) == [Label.RIGHT] * 4_000


def test_without_a_weakness_it_is_the_oracle() -> None:
    pairs = draw_pairs(tiny_episodes(4), 200, 3, np.random.default_rng(0))
    answers = labels(teacher().answer(pairs))
    assert answers == labels(OracleTeacher().answer(pairs)) and len(set(answers)) == 3
    assert teacher().answer([]) == []


@pytest.mark.parametrize(("p_mistake", "num_wrong"), [(0.0, 0), (0.1, 1_000), (0.5, 5_000), (1.0, 10_000)])
def test_mistakes_come_as_often_as_they_are_meant_to(p_mistake: float, num_wrong: int) -> None:
    pairs = [pair_of(0.1, 0.9), pair_of(0.9, 0.1)] * 5_000
    answers = teacher(seed=1, mistake=p_mistake).answer(pairs)
    truth = OracleTeacher().answer(pairs)
    wrong = sum(one.label is not other.label for one, other in zip(answers, truth, strict=True))
    assert abs(wrong - num_wrong) <= 4 * math.sqrt(10_000 * p_mistake * (1 - p_mistake))


def test_a_stochastic_teacher_prefers_by_how_much_better() -> None:
    answers = teacher(seed=2, beta=2.0).answer([pair_of(0.0, 0.5)] * 10_000)
    num_right = Counter(labels(answers))[Label.RIGHT]
    assert abs(num_right - 7_311) <= 4 * math.sqrt(10_000 * 0.7311 * 0.2689)


def test_shares_are_taken_of_an_average_segment_and_only_once() -> None:
    # Episodes of reward 2 per step: a segment of 3 steps is worth 6, a tenth of it is 0.6; twice the tenth is 0.06.
    worse, better = segment(0.1, 0.2, 0.2), segment(0.2, 0.3, 0.2)  # worth 0.5 and 0.7
    for config, pair, expected in [
        ({"skip": 0.1}, Pair(left=worse, right=worse), Label.TIE),
        ({"skip": 0.1}, Pair(left=worse, right=better), Label.RIGHT),
        ({"equal": 0.1}, Pair(left=worse, right=better), Label.TIE),
        ({"equal": 0.01}, Pair(left=better, right=worse), Label.LEFT),
    ]:
        one = teacher(**config)
        for _ in range(5):  # the share stays the same from session to session
            one.inform([flat_episode(2.0)] * 12)
            (verdict,) = one.answer([pair])
            assert verdict.label is expected, config
            assert verdict.text == (SKIPPED if "skip" in config and expected is Label.TIE else "")


def test_only_the_newest_ten_episodes_count() -> None:
    pair = Pair(left=segment(0.0), right=segment(0.15))
    one = teacher(equal=0.1)
    assert labels(one.answer([pair])) == [Label.RIGHT]  # nothing is known yet, so nothing is alike
    one.inform([flat_episode(100.0)] * 3 + [flat_episode(1.0)] * 10)
    assert labels(one.answer([pair])) == [Label.RIGHT]  # 0.15 > 0.1 * 1
    one.inform([flat_episode(1.0)] * 3 + [flat_episode(2.0)] * 10)
    assert labels(one.answer([pair])) == [Label.TIE]  # 0.15 < 0.1 * 2


def test_what_is_too_close_to_call_outweighs_a_mistake_and_what_is_too_bad_outweighs_both() -> None:
    one = teacher(mistake=1.0, equal=0.1, skip=0.5)
    one.inform([flat_episode(1.0)])
    pairs = [pair_of(0.9, 0.95), pair_of(0.1, 0.9), pair_of(0.4, 0.1)]
    verdicts = one.answer(pairs)
    assert labels(verdicts) == [Label.TIE, Label.LEFT, Label.TIE]
    assert [verdict.text for verdict in verdicts] == ["", "", SKIPPED]
    assert [verdict.status for verdict in verdicts] == [Status.NO_PREFERENCE, Status.OK, Status.NO_PREFERENCE]


def test_a_restored_teacher_gives_the_same_answers() -> None:
    pairs = draw_pairs(tiny_episodes(4), 50, 2, np.random.default_rng(0))
    one, other = teacher(3, mistake=0.3, beta=1.0, equal=0.1), teacher(4, mistake=0.3, beta=1.0, equal=0.1)
    one.inform(tiny_episodes(3))
    one.answer(pairs)
    other.set_state(one.get_state())
    assert labels(one.answer(pairs)) == labels(other.answer(pairs))
    assert labels(one.prepare(pairs)()) == labels(other.prepare(pairs)())


def test_teachers_of_one_seed_differ_by_their_weakness_alone() -> None:
    pairs = draw_pairs(tiny_episodes(4), 300, 1, np.random.default_rng(0))
    often, rarely = (teacher(5, mistake=p).answer(pairs) for p in (0.4, 0.1))
    truth = labels(OracleTeacher().answer(pairs))
    wrong = [{at for at, label in enumerate(labels(answers)) if label is not truth[at]} for answers in (often, rarely)]
    assert wrong[1] < wrong[0]


@pytest.mark.parametrize("name", BPREF_TEACHERS)
def test_each_of_b_prefs_teachers_is_built_by_its_name(name: str) -> None:
    config = simulated_config(name, FeedbackConfig())
    built = build_teacher(name, judge=None, frames=FrameStore(TinyEnv(), 8), goal="push", seed=0)
    assert isinstance(built, SimulatedTeacher)
    weak = [f.name for f in dataclasses.fields(SimulatedTeacherConfig) if getattr(config, f.name) != f.default]
    assert len(weak) == 1
    (verdict,) = built.answer([pair_of(0.1, 0.9)])
    assert f"{weak[0]}={getattr(config, weak[0]):g}" in verdict.stamp.decoding


@pytest.mark.parametrize("name", [*BPREF_TEACHERS, "simulated"])
def test_a_session_of_the_loop_learns_from_it(name: str) -> None:
    weak = SimulatedTeacherConfig(mistake=0.2, beta=20.0, gamma=0.9, skip=0.05, equal=0.05)
    feedback = FeedbackConfig(first_step=10, every_steps=5, queries=40, segment_steps=2, simulated=weak)
    frames = FrameStore(TinyEnv(), 16)
    built = build_teacher(name, judge=None, frames=frames, goal="push", seed=0, feedback=feedback)
    fit = RewardModelConfig(picture_px=16, max_epochs=3, min_updates=0, hold_out_every=0)
    loop = build_loop(TinyEnv(), built, feedback=feedback, reward_model=fit, reward=RewardConfig(model="state"), seed=0)
    for episode in tiny_episodes(6):
        loop.add(episode)
    told = loop.run_session(10)
    assert told[metrics.COMPARISONS] > 10
    records = loop.drain_records()
    assert len(records) == 40 and {record.verdict.stamp.judge for record in records} == {"simulated"}
    wrong = [record for record in records if record.verdict.status is Status.OK and record.correct is False]
    assert bool(wrong) == (name in ("mistake", "stochastic", "simulated"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mistake", 1.1),
        ("mistake", -0.1),
        ("left", 1.1),
        ("left", -0.1),
        ("left", math.nan),
        ("beta", 0.0),
        ("beta", -1.0),
        ("beta", math.nan),
        ("gamma", 0.0),
        ("gamma", 1.5),
        ("skip", -0.1),
        ("equal", math.inf),
        ("equal", math.nan),
    ],
)
def test_an_impossible_weakness_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"feedback.simulated.{field}"):
        SimulatedTeacherConfig(**{field: value})


def test_skipping_and_training_ties_do_not_go_together() -> None:
    ties = FeedbackConfig(ties="equal")
    for name in ("equal", "mistake", "oracle", "judge"):
        RunConfig(task="tiny", reward=RewardConfig(teacher=name), feedback=ties)
    with pytest.raises(ValueError, match="needs feedback.ties drop"):
        RunConfig(task="tiny", reward=RewardConfig(teacher="skip"), feedback=ties)
