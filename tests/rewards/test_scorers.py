import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.judging import Clip, Score, Stamp, Status
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.rewards.scorers import (
    FallbackScorer,
    JudgeScorer,
    biased_scorer,
    measured_scorer,
    progress_scorer,
    random_scorer,
    read_scores,
)
from rlvlm.rewards.scoring_items import ScoringItem

STAMP = Stamp(judge="by_hand", revision="1", prompt="numbers/1", decoding="")


def draw(snapshots: FloatArray) -> Frames:
    """Images of one pixel, which is the snapshot's number."""
    return np.broadcast_to(snapshots[:, :1, None, None], (len(snapshots), 1, 1, 3)).astype(np.uint8)


def shown(*moments: float, success: bool = False, action: str = "") -> ScoringItem:
    snapshots = np.array(moments, np.float32)[:, None]
    return ScoringItem(goal="go", snapshots=snapshots, action=action, is_success=success, progress=0.0)


class Pixels:
    """Scores the last pixel over 100; the questions named in `missing` fail once."""

    stamp = STAMP

    def __init__(self, missing: Sequence[int] = ()) -> None:
        self.asked: list[Clip] = []
        self.missing = list(missing)

    def compare(self, queries: object) -> list[object]:
        raise NotImplementedError

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        self.asked += clips
        return [self._one(int(clip.frames[-1, 0, 0, 0])) for clip in clips]

    def _one(self, pixel: int) -> Score:
        if pixel in self.missing:
            self.missing.remove(pixel)
            return Score(status=Status.FAILED, value=None, stamp=STAMP)
        return Score(status=Status.OK, value=pixel / 100, stamp=STAMP)


def test_the_judge_is_asked_once_about_equal_clips():
    judge = Pixels()
    scorer = JudgeScorer(judge, draw, remembers=True)  # pyright: ignore[reportArgumentType]
    turns = [shown(1, 20, action="+"), shown(1, 20, action="+"), shown(1, 20, action="-"), shown(1, 30, action="+")]
    assert [score.value for score in scorer.score(turns)] == [0.2, 0.2, 0.2, 0.3]
    assert [(clip.action, clip.frames[:, 0, 0, 0].tolist()) for clip in judge.asked] == [
        ("+", [1, 20]), ("-", [1, 20]), ("+", [1, 30]),
    ]  # fmt: skip
    scorer.score(turns)
    assert len(judge.asked) == 3


def test_equal_clips_of_two_calls_at_once_are_asked_about_once():
    begun, again = threading.Event(), threading.Event()

    class Slow(Pixels):
        def score(self, clips):
            (again if begun.is_set() else begun).set()
            assert again.wait(60)  # the first call, until the second has asked about what is new in it
            return super().score(clips)

    scorer = JudgeScorer(judge := Slow(), draw, remembers=False)  # pyright: ignore[reportArgumentType]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(scorer.score, [shown(20)])
        assert begun.wait(60)
        assert [score.value for score in scorer.score([shown(20), shown(30)])] == [0.2, 0.3]
        assert first.result()[0].value == 0.2
    assert len(judge.asked) == 2


def test_a_judge_that_answers_nothing_ends_the_run():
    scorer = JudgeScorer(Pixels(missing=range(20)), draw, remembers=True)  # pyright: ignore[reportArgumentType]
    assert [score.value for score in scorer.score([shown(0)])] == [None]
    with pytest.raises(JudgeUnavailable, match="none of 20 queries"):
        scorer.score([shown(number) for number in range(1, 20)])


def test_the_die_falls_anew_each_time_and_goes_on_where_it_was():
    whole, first, rest = random_scorer(3), random_scorer(3), random_scorer(3)
    same = [shown(1)] * 400
    values = [score.value or 0.0 for score in whole.score(same)]
    assert len(set(values)) == 400 and np.mean(values) == pytest.approx(0.5, abs=0.05)
    before = [score.value for score in first.score(same[:100])]
    rest.num_asked = first.num_asked
    assert before + [score.value for score in rest.score(same[100:])] == values


@pytest.mark.slow
def test_the_biased_judge_takes_its_share_of_failures_for_successes():
    failures = [shown(number) for number in range(2_000)]
    values = [score.value or 0.0 for score in biased_scorer(0.2, 0).score(failures)]
    assert np.mean(values) == pytest.approx(0.2, abs=0.03)
    assert values == [score.value for score in biased_scorer(0.2, 0).score(failures)]
    assert {score.value for score in biased_scorer(0.2, 0).score([shown(1, success=True)] * 9)} == {1.0}
    successes = [replace(item, is_success=True) for item in failures]
    found = [score.value or 0.0 for score in biased_scorer(0.0, 0, 0.3).score(successes)]
    assert np.mean(found) == pytest.approx(0.7, abs=0.05), "and, if wanted, its share of successes for failures"


def test_a_simulated_judge_of_progress_has_the_error_that_was_set():
    half = [replace(shown(1), progress=0.5)] * 2_000
    values = [score.value or 0.0 for score in progress_scorer(0.1, 0).score(half)]
    assert np.mean(values) == pytest.approx(0.5, abs=0.01) and np.std(values) == pytest.approx(0.1, abs=0.01)
    assert {score.value for score in progress_scorer(0.0, 0).score(half)} == {0.5}
    assert all(0 <= (score.value or 0.0) <= 1 for score in progress_scorer(2.0, 0).score(half))


def test_a_measured_judge_repeats_scores_of_similar_progress(tmp_path):
    rows = [[] for _ in range(11)]
    rows[0], rows[7], rows[10] = [0.1], [0.4, 0.6], [0.9]
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"teacher": {"all": {"scores": rows}, "b": {"pairs": []}}}))
    scorer = measured_scorer(read_scores(file, "b"), 0, "x")  # of b there are none, so those of all
    half = [replace(shown(1), progress=0.75)] * 400
    values = [score.value for score in scorer.score(half)]
    assert set(values) == {0.4, 0.6} and 150 < values.count(0.4) < 250
    some = [replace(shown(1), progress=progress) for progress in (0.0, 0.3, 1.0)]
    # of 0.3 none was measured: the nearest is at 0; of 1 short of success: 0.9 to 1 is as near to success as to 0.7
    assert [score.value for score in scorer.score(some)[:2]] == [0.1, 0.1]
    assert scorer.score([shown(1, success=True)])[0].value == 0.9
    with pytest.raises(UsageError, match="has no scores"):
        read_scores(tmp_path / "none.json", "b")
    rows[3] = [1.5]
    file.write_text(json.dumps({"teacher": {"all": {"scores": rows}}}))
    with pytest.raises(UsageError, match="has no scores of episodes"):
        read_scores(file, "b")


def test_the_last_resort_is_asked_where_the_first_has_no_answer():
    first, last = Pixels(missing=[30]), Pixels()
    both = FallbackScorer(*(JudgeScorer(one, draw, remembers=False) for one in (first, last)))  # pyright: ignore
    assert [score.value for score in both.score([shown(20), shown(30)])] == [0.2, 0.3]
    assert len(first.asked) == 2 and len(last.asked) == 1
    silent = JudgeScorer(Pixels(missing=range(20)), draw, remembers=False)  # pyright: ignore[reportArgumentType]
    gone = FallbackScorer(silent, JudgeScorer(Pixels(), draw, remembers=False))  # pyright: ignore[reportArgumentType]
    assert [score.value for score in gone.score([shown(number) for number in range(20)])] == [
        n / 100 for n in range(20)
    ]
