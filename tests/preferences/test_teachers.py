import csv
import dataclasses
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_episodes import BlockJudge, numbered_trajectory, one_step, pair_of, tiny_episodes

from rlvlm.core import metrics
from rlvlm.core.judging import Label, Status, Verdict
from rlvlm.core.steps import Pair, Segment, Trajectory
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.config import (
    BPREF_TEACHERS,
    FeedbackConfig,
    RewardModelConfig,
    SimulatedTeacherConfig,
    published_name,
    simulated_config,
)
from rlvlm.preferences.loop import build_loop
from rlvlm.preferences.queries import draw_pairs
from rlvlm.preferences.teachers import (
    SHARES,
    JudgeTeacher,
    MeasuredTeacher,
    OracleTeacher,
    RandomTeacher,
    SimulatedTeacher,
    Teacher,
    build_teacher,
    read_shares,
)
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.testing import FakeJudge, TinyEnv

FRAMES = FrameStore(TinyEnv(), 24)


def build(kind: str, feedback: FeedbackConfig | None = None) -> Teacher:
    judge = BlockJudge() if kind == "judge" else None  # nobody else needs one
    return build_teacher(kind, judge=judge, frames=FRAMES, goal="push", seed=0, feedback=feedback)


def swapped(pairs: list[Pair]) -> list[Pair]:
    return [Pair(left=pair.right, right=pair.left) for pair in pairs]


def test_the_oracle_prefers_the_larger_return_and_calls_only_equals_a_tie():
    verdicts = OracleTeacher().answer([pair_of(0.1, 0.2), pair_of(0.7, 0.2), pair_of(0.5, 0.5)])
    assert [verdict.label for verdict in verdicts] == [Label.RIGHT, Label.LEFT, Label.TIE]
    assert [verdict.status for verdict in verdicts] == [Status.OK, Status.OK, Status.NO_PREFERENCE]


def test_an_oracle_of_progress_looks_at_the_end_and_not_at_the_return():
    pair = pair_of(0.2, 0.7)
    left, right = (replace(side, env_rewards=-side.env_rewards) for side in (pair.left, pair.right))
    assert labels(build("progress").answer([Pair(left=left, right=right)])) == [Label.RIGHT]
    assert labels(build("oracle").answer([Pair(left=left, right=right)])) == [Label.LEFT]


@pytest.mark.parametrize("kind", ["oracle", "judge"])
def test_swapping_the_sides_swaps_the_label(kind):
    teacher = build(kind)
    pairs = draw_pairs(tiny_episodes(4), 60, 1, np.random.default_rng(0))
    answers = labels(teacher.answer(pairs))
    assert set(answers) == set(Label)
    assert [label.swapped for label in answers] == labels(teacher.answer(swapped(pairs)))


class Watching(FakeJudge):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = []

    def compare(self, queries):
        self.asked += queries
        return super().compare(queries)

    def score(self, clips):
        self.asked += clips
        return super().score(clips)


def test_a_judge_sees_what_it_is_asked_about_drawn_in_order():
    judge, env = Watching(), TinyEnv()
    teacher = JudgeTeacher(judge, FRAMES, "push the block")
    pairs = draw_pairs(tiny_episodes(3), 6, 2, np.random.default_rng(0))
    teacher.answer(pairs)
    for query, pair in zip(judge.asked, pairs, strict=True):
        np.testing.assert_array_equal(query.left, env.draw(pair.left.snapshots, 24))
        np.testing.assert_array_equal(query.right, env.draw(pair.right.snapshots, 24))
    judge.asked.clear()
    segments = [episode.segment(2, 3) for episode in tiny_episodes(4)]
    for segment, score, clip in zip(segments, teacher.answer(segments), judge.asked, strict=True):
        np.testing.assert_array_equal(clip.frames, env.draw(segment.snapshots, 24))
        assert clip.goal == "push the block" and score.value == pytest.approx(clip.frames[-1].mean() / 255)


def test_random_labels_and_scores_are_even():
    said = labels(RandomTeacher(seed=3).answer([pair_of(0.1, 0.9)] * 1_000))
    assert abs(said.count(Label.RIGHT) - 500) < 60
    values = [score.value for score in RandomTeacher(0).answer([one_step(0.5)] * 4_000)]
    assert np.histogram(values, bins=4, range=(0, 1))[0] == pytest.approx([1_000] * 4, abs=120)


def test_the_oracle_gives_the_true_progress_at_the_end():
    (episode,) = tiny_episodes(1)
    scores = OracleTeacher().answer([one_step(0.25), episode.segment(3, 5)])
    assert [score.value for score in scores] == [0.25, pytest.approx(float(episode.progress[7]))]
    assert all(score.status is Status.OK for score in scores)


def segment(*rewards: float) -> Segment:
    column = np.array(rewards, np.float32)
    wide = np.repeat(column[:, None], 2, axis=1)
    return Segment(obs=wide, actions=wide, next_obs=wide, snapshots=wide, env_rewards=column, progress=column)


def simulated(seed: int = 0, **weaknesses: float) -> SimulatedTeacher:
    return SimulatedTeacher(SimulatedTeacherConfig(**weaknesses), seed)


def labels(verdicts: list[Verdict]) -> list[Label | None]:
    return [verdict.label for verdict in verdicts]


def flat_episode(reward: float, num_steps: int = 20) -> Trajectory:
    rewards = np.full(num_steps, reward, np.float32)
    return dataclasses.replace(numbered_trajectory(num_steps), env_rewards=rewards)


def test_a_myopic_teacher_weighs_the_end_most():
    # By hand: 0.5^2 * 4 + 0.5 * 2 + 1 = 3 and 0.25 * 0 + 0.5 * 0 + 4 = 4, though the plain sums are 7 and 4.
    pair = Pair(left=segment(4, 2, 1), right=segment(0, 0, 4))
    assert labels(simulated(gamma=0.5).answer([pair])) == [Label.RIGHT]
    assert labels(simulated().answer([pair])) == [Label.LEFT]


def test_a_judge_of_places_names_the_left_side_of_anything():
    pairs = [Pair(left=segment(0), right=segment(1)), Pair(left=segment(1), right=segment(1))]
    assert labels(simulated(left=1.0).answer(pairs)) == [Label.LEFT] * 2, "ties too"
    assert labels(simulated(left=1.0).answer(swapped(pairs))) == [Label.LEFT] * 2
    said = Counter(labels(simulated(left=0.3, mistake=0.2).answer([pairs[0]] * 4_000)))
    assert said[Label.LEFT] / 4_000 == pytest.approx(0.5, abs=0.03), "a fifth by mistake, three tenths by place"
    assert labels(simulated().answer([pairs[0]] * 4_000)) == [Label.RIGHT] * 4_000


def test_without_a_weakness_it_is_the_oracle():
    pairs = draw_pairs(tiny_episodes(4), 200, 3, np.random.default_rng(0))
    answers = labels(simulated().answer(pairs))
    assert answers == labels(OracleTeacher().answer(pairs)) and len(set(answers)) == 3
    assert simulated().answer([]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("p_mistake", "num_wrong"), [(0.0, 0), (0.1, 1_000), (0.5, 5_000), (1.0, 10_000)])
def test_mistakes_come_as_often_as_they_are_meant_to(p_mistake, num_wrong):
    pairs = [pair_of(0.1, 0.9), pair_of(0.9, 0.1)] * 5_000
    answers = simulated(seed=1, mistake=p_mistake).answer(pairs)
    truth = OracleTeacher().answer(pairs)
    wrong = sum(one.label is not other.label for one, other in zip(answers, truth, strict=True))
    assert abs(wrong - num_wrong) <= 4 * math.sqrt(10_000 * p_mistake * (1 - p_mistake))


def test_a_stochastic_teacher_prefers_by_how_much_better():
    answers = simulated(seed=2, beta=2.0).answer([pair_of(0.0, 0.5)] * 10_000)
    num_right = Counter(labels(answers))[Label.RIGHT]
    assert abs(num_right - 7_311) <= 4 * math.sqrt(10_000 * 0.7311 * 0.2689)


def test_shares_are_taken_of_an_average_segment_and_only_once():
    # Episodes of reward 2 per step: a segment of 3 steps is worth 6, a tenth of it is 0.6; twice the tenth is 0.06.
    worse, better = segment(0.1, 0.2, 0.2), segment(0.2, 0.3, 0.2)  # worth 0.5 and 0.7
    for config, pair, expected in [
        ({"skip": 0.1}, Pair(left=worse, right=worse), Label.TIE),
        ({"skip": 0.1}, Pair(left=worse, right=better), Label.RIGHT),
        ({"equal": 0.1}, Pair(left=worse, right=better), Label.TIE),
        ({"equal": 0.01}, Pair(left=better, right=worse), Label.LEFT),
    ]:
        one = simulated(**config)
        for _ in range(5):  # the share stays the same from session to session
            one.inform([flat_episode(2.0)] * 12)
            (verdict,) = one.answer([pair])
            assert verdict.label is expected, config
            assert verdict.text == (SimulatedTeacher.SKIPPED if "skip" in config and expected is Label.TIE else "")


def test_only_the_newest_ten_episodes_count():
    pair = Pair(left=segment(0.0), right=segment(0.15))
    one = simulated(equal=0.1)
    assert labels(one.answer([pair])) == [Label.RIGHT]  # nothing is known yet, so nothing is alike
    one.inform([flat_episode(100.0)] * 3 + [flat_episode(1.0)] * 10)
    assert labels(one.answer([pair])) == [Label.RIGHT]  # 0.15 > 0.1 * 1
    one.inform([flat_episode(1.0)] * 3 + [flat_episode(2.0)] * 10)
    assert labels(one.answer([pair])) == [Label.TIE]  # 0.15 < 0.1 * 2


def test_ties_come_before_mistakes_and_skips_before_both():
    one = simulated(mistake=1.0, equal=0.1, skip=0.5)
    one.inform([flat_episode(1.0)])
    pairs = [pair_of(0.9, 0.95), pair_of(0.1, 0.9), pair_of(0.4, 0.1)]
    verdicts = one.answer(pairs)
    assert labels(verdicts) == [Label.TIE, Label.LEFT, Label.TIE]
    assert [verdict.text for verdict in verdicts] == ["", "", SimulatedTeacher.SKIPPED]
    assert [verdict.status for verdict in verdicts] == [Status.NO_PREFERENCE, Status.OK, Status.NO_PREFERENCE]


def test_teachers_of_one_seed_differ_by_their_weakness_alone():
    pairs = draw_pairs(tiny_episodes(4), 300, 1, np.random.default_rng(0))
    often, rarely = (simulated(5, mistake=p).answer(pairs) for p in (0.4, 0.1))
    truth = labels(OracleTeacher().answer(pairs))
    wrong = [{at for at, label in enumerate(labels(answers)) if label is not truth[at]} for answers in (often, rarely)]
    assert wrong[1] < wrong[0]


@pytest.mark.parametrize("name", [*BPREF_TEACHERS, "simulated"])
def test_a_session_of_the_loop_learns_from_it(name):
    weak = SimulatedTeacherConfig(mistake=0.2, beta=20.0, gamma=0.9, skip=0.05, equal=0.05)
    feedback = FeedbackConfig(first_step=10, every_steps=5, queries=40, segment_steps=2, simulated=weak)
    fit = RewardModelConfig(image_px=16, max_epochs=3, min_updates=0, hold_out_every=0)
    reward = StepRewardConfig(model="state")
    loop = build_loop(TinyEnv(), build(name, feedback), feedback=feedback, reward_model=fit, reward=reward, seed=0)
    for episode in tiny_episodes(6):
        loop.add(episode)
    assert loop.run_session(10)[metrics.COMPARISONS] > 10
    records = loop.drain_records()
    assert len(records) == 40 and {record.verdict.stamp.judge for record in records} == {"simulated"}
    config = simulated_config(name, feedback)
    weak_in = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != f.default]
    assert len(weak_in) == (5 if name == "simulated" else 1)
    assert all(f"{one}={getattr(config, one):g}" in records[0].verdict.stamp.decoding for one in weak_in)
    wrong = [record for record in records if record.verdict.status is Status.OK and record.correct is False]
    assert bool(wrong) == (name in ("mistake", "stochastic", "simulated"))


def test_skipping_and_training_ties_do_not_go_together():
    ties = FeedbackConfig(ties="equal")
    for name in ("equal", "mistake", "oracle", "judge"):
        StepsRun(task="tiny", reward=StepRewardConfig(teacher=name), feedback=ties)
    with pytest.raises(ValueError, match="needs feedback.ties drop"):
        StepsRun(task="tiny", reward=StepRewardConfig(teacher="skip"), feedback=ties)


def shares_of(teacher: MeasuredTeacher, pair: Pair, count: int = 4_000) -> list[float]:
    """Right, wrong, undecided; the right side of `pair` is the better one."""
    labels = [verdict.label for verdict in teacher.answer([pair] * count)]
    return [labels.count(label) / count for label in (Label.RIGHT, Label.LEFT, Label.TIE)]


def write_table(path: Path, rows: list[dict[str, object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def row(place: int, **counts: int) -> dict[str, object]:
    none = dict.fromkeys(("correct", "incorrect", "no_preference", "invalid", "failed"), 0)
    return {"source": "one", "bin": place} | none | counts


def test_it_is_as_often_right_as_the_paper_s_vlm_at_each_gap():
    teacher = MeasuredTeacher(SHARES[published_name("drawer_open")], seed=0, name="drawer_open")
    for gap, place in ((0.05, 0), (0.55, 5), (0.97, 9)):
        expected = SHARES["Drawer"][place] / SHARES["Drawer"][place].sum()
        np.testing.assert_allclose(shares_of(teacher, pair_of(0.0, gap)), expected, atol=0.03)
    decided = shares_of(teacher, pair_of(0.4, 0.4))
    assert decided[0] == pytest.approx(decided[1], abs=0.05), "nobody is right where nothing differs"


def test_a_judge_that_was_measured_is_played_from_its_report(tmp_path):
    rows = [row(place, correct=3, incorrect=1, invalid=2, failed=2, no_preference=2) for place in range(1, 10)]
    path = write_table(tmp_path / "judge_report.csv", [*rows, row(10)])
    teacher = build("measured", FeedbackConfig(measured=str(path)))
    assert isinstance(teacher, MeasuredTeacher)
    np.testing.assert_allclose(shares_of(teacher, pair_of(0.0, 0.3)), [0.3, 0.1, 0.6], atol=0.03)
    np.testing.assert_allclose(shares_of(teacher, pair_of(0.0, 1.0)), [0.3, 0.1, 0.6], atol=0.03)


def test_the_table_of_a_bench_keeps_a_preference_for_a_side(tmp_path):
    # says left in nine of ten answers, whatever is shown: right where the left is nearer, wrong where the right is
    bins = [[[9, 1, 0], [1, 9, 0]]] * 10
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"teacher": {"all": {"pairs": bins}, "other": {"scores": []}}}))
    teacher = MeasuredTeacher(read_shares(file, "drawer_open"), seed=0, name="x")
    np.testing.assert_allclose(shares_of(teacher, pair_of(0.7, 0.2)), [0.1, 0.9, 0.0], atol=0.03)
    np.testing.assert_allclose(shares_of(teacher, pair_of(0.2, 0.7)), [0.1, 0.9, 0.0], atol=0.03)
    tied = [verdict.label for verdict in teacher.answer([pair_of(0.5, 0.5)] * 4_000)]
    assert tied.count(Label.LEFT) / 4_000 == pytest.approx(0.9, abs=0.03)
    with pytest.raises(ValueError, match="rlvlm judge-bench"):
        read_shares(file, "other")


def test_an_unusable_table_or_task_is_refused_with_a_fix(tmp_path):
    for rows, message in (
        ([row(place, correct=1) for place in range(1, 10)], "KeyError: 10"),
        ([row(place) | {"source": str(place)} for place in range(1, 11)], "several judges"),
        ([{"bin": 1, "correct": 2}], "incorrect"),
        ([row(place) for place in range(1, 11)], "one that is not"),
        ([row(place, correct=-1) for place in range(1, 11)], "counts >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            read_shares(write_table(tmp_path / "table.csv", rows))
    with pytest.raises(ValueError, match="FileNotFoundError"):
        read_shares(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="published knows cartpole, drawer_open"):
        published_name("metaworld/window-close-v3")
