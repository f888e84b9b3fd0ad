import csv
from pathlib import Path

import numpy as np
import pytest
from tiny_episodes import pair_of

from rlvlm.core.judging import Label, Status
from rlvlm.core.steps import Pair
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.answers.measured import SHARES, MeasuredTeacher, read_shares
from rlvlm.preferences.answers.teachers import build_teacher
from rlvlm.preferences.config import FeedbackConfig, published_name
from rlvlm.testing import TinyEnv


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


def test_it_is_as_often_right_as_the_paper_s_vlm_at_each_gap() -> None:
    teacher = MeasuredTeacher(SHARES[published_name("drawer_open")], seed=0, name="drawer_open")
    for gap, place in ((0.05, 0), (0.55, 5), (0.97, 9)):
        expected = SHARES["Drawer"][place] / SHARES["Drawer"][place].sum()
        np.testing.assert_allclose(shares_of(teacher, pair_of(0.0, gap)), expected, atol=0.03)
    decided = shares_of(teacher, pair_of(0.4, 0.4))
    assert decided[0] == pytest.approx(decided[1], abs=0.05), "nobody is right where nothing differs"


def test_it_goes_on_where_it_was_saved_and_says_ties_apart() -> None:
    pairs = [pair_of(0.1, 0.4)] * 50
    one, other = (MeasuredTeacher(SHARES["Sweep"], seed, "x") for seed in (1, 2))
    other.set_state(one.get_state())
    assert one.answer(pairs) == other.answer(pairs)
    assert {(verdict.status, verdict.label is Label.TIE) for verdict in one.answer(pairs)} == {
        (Status.OK, False),
        (Status.NO_PREFERENCE, True),
    }


def test_a_judge_that_was_measured_is_played_from_its_report(tmp_path: Path) -> None:
    rows = [row(place, correct=3, incorrect=1, invalid=2, failed=2, no_preference=2) for place in range(1, 10)]
    path = write_table(tmp_path / "judge_report.csv", [*rows, row(10)])
    teacher = build_teacher(
        "measured",
        judge=None,
        frames=FrameStore(TinyEnv(), 8),
        goal="",
        seed=0,
        feedback=FeedbackConfig(measured=str(path)),
    )
    assert isinstance(teacher, MeasuredTeacher)
    np.testing.assert_allclose(shares_of(teacher, pair_of(0.0, 0.3)), [0.3, 0.1, 0.6], atol=0.03)
    np.testing.assert_allclose(shares_of(teacher, pair_of(0.0, 1.0)), [0.3, 0.1, 0.6], atol=0.03)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(place, correct=1) for place in range(1, 10)], "KeyError: 10"),
        ([row(place) | {"source": str(place)} for place in range(1, 11)], "several judges"),
        ([{"bin": 1, "correct": 2}], "incorrect"),
        ([row(place) for place in range(1, 11)], "one that is not"),
        ([row(place, correct=-1) for place in range(1, 11)], "counts >= 0"),
    ],
)
def test_a_table_that_says_nothing_is_refused_with_what_it_needs(tmp_path: Path, rows: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_shares(write_table(tmp_path / "table.csv", rows))


def test_a_file_or_a_task_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="FileNotFoundError"):
        read_shares(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="published knows cartpole, drawer_open"):
        published_name("metaworld/window-close-v3")
