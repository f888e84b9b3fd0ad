from dataclasses import replace

import numpy as np
import pytest
from tiny_episodes import BlockJudge, pair_of, tiny_episodes

from rlvlm.core.judging import Label, Status
from rlvlm.core.steps import Pair
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.answers.teachers import JudgeTeacher, OracleTeacher, RandomTeacher, build_teacher, true_returns
from rlvlm.preferences.questions.queries import draw_pairs
from rlvlm.testing import FakeJudge, TinyEnv


def frames() -> FrameStore:
    return FrameStore(TinyEnv(), 24)


def swapped(pairs: list[Pair]) -> list[Pair]:
    return [Pair(left=pair.right, right=pair.left) for pair in pairs]


def test_the_oracle_prefers_the_larger_return_and_calls_only_equals_a_tie() -> None:
    verdicts = OracleTeacher().answer([pair_of(0.1, 0.2), pair_of(0.7, 0.2), pair_of(0.5, 0.5)])
    assert [verdict.label for verdict in verdicts] == [Label.RIGHT, Label.LEFT, Label.TIE]
    assert [verdict.status for verdict in verdicts] == [Status.OK, Status.OK, Status.NO_PREFERENCE]


def test_an_oracle_of_progress_looks_at_the_end_and_not_at_the_return() -> None:
    pair = pair_of(0.2, 0.7)
    left, right = (replace(side, env_rewards=-side.env_rewards) for side in (pair.left, pair.right))
    by_return, by_progress = (
        build_teacher(kind, judge=None, frames=frames(), goal="", seed=0) for kind in ("oracle", "progress")
    )
    assert by_progress.answer([Pair(left=left, right=right)])[0].label is Label.RIGHT
    assert by_return.answer([Pair(left=left, right=right)])[0].label is Label.LEFT


def test_returns_are_summed_over_the_segment() -> None:
    pairs = draw_pairs(tiny_episodes(2), 5, 4, np.random.default_rng(0))
    left, right = true_returns(pairs)
    np.testing.assert_allclose(left, [sum(pair.left.env_rewards) for pair in pairs], rtol=1e-6)
    np.testing.assert_allclose(right, [sum(pair.right.env_rewards) for pair in pairs], rtol=1e-6)


@pytest.mark.parametrize("kind", ["oracle", "judge"])
def test_swapping_the_sides_swaps_the_label(kind: str) -> None:
    teacher = build_teacher(kind, judge=BlockJudge(), frames=frames(), goal="push", seed=0)
    pairs = draw_pairs(tiny_episodes(4), 60, 1, np.random.default_rng(0))
    mirror = {Label.LEFT: Label.RIGHT, Label.RIGHT: Label.LEFT, Label.TIE: Label.TIE}
    answers = teacher.answer(pairs)
    assert {verdict.label for verdict in answers} == set(mirror)
    assert [mirror[verdict.label] for verdict in answers] == [v.label for v in teacher.answer(swapped(pairs))]


def test_a_judge_sees_both_sides_drawn_in_order() -> None:
    seen = []

    class Watching(FakeJudge):
        def compare(self, queries):
            seen.extend(queries)
            return super().compare(queries)

    pairs = draw_pairs(tiny_episodes(3), 6, 2, np.random.default_rng(0))
    JudgeTeacher(Watching(), frames(), "push the block").answer(pairs)
    env = TinyEnv()
    for query, pair in zip(seen, pairs, strict=True):
        np.testing.assert_array_equal(query.left, env.draw(pair.left.snapshots, 24))
        np.testing.assert_array_equal(query.right, env.draw(pair.right.snapshots, 24))
        assert query.goal == "push the block"


def test_a_coin_is_fair_and_a_restored_one_goes_on() -> None:
    pairs = [pair_of(0.1, 0.9)] * 1000
    one, other = RandomTeacher(seed=3), RandomTeacher(seed=4)
    labels = [verdict.label for verdict in one.answer(pairs)]
    assert abs(labels.count(Label.RIGHT) - 500) < 60
    other.set_state(one.get_state())
    assert [v.label for v in one.answer(pairs)] == [v.label for v in other.answer(pairs)] != labels


def test_a_judge_teacher_needs_a_judge() -> None:
    with pytest.raises(ValueError, match="needs a judge"):
        build_teacher("judge", judge=None, frames=frames(), goal="push", seed=0)
