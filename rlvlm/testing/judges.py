"""Judges with known answers, and a check of every judge's contract."""

from collections.abc import Sequence

import numpy as np

from rlvlm.core.checks import check_asserts
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.judges.judge import Judge


class FakeJudge:
    """A judge whose truth is brightness: the side with the brighter last image is nearer to the goal.

    Args:
        margin: largest difference of mean brightness that is a tie, in grey levels.
        failing: number of first questions that fail, as in an outage that ends.
    """

    def __init__(self, margin: float = 0.0, failing: int = 0) -> None:
        self._margin = margin
        self._failing = failing
        self.num_asked = 0
        """Number of questions so far."""

    @property
    def stamp(self) -> Stamp:
        """Constant stamp."""
        return Stamp(judge="fake", revision="1", prompt="brightness/1", decoding=f"margin={self._margin:g}")

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """Returns one verdict per query, in order."""
        return [self._compare(query) for query in queries]

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """Returns the brightness of each clip's last image, 1 for white."""
        return [Score(status=Status.OK, value=float(clip.frames[-1].mean() / 255), stamp=self.stamp) for clip in clips]

    def _compare(self, query: Query) -> Verdict:
        self.num_asked += 1
        if self.num_asked <= self._failing:
            return Verdict(status=Status.FAILED, label=None, stamp=self.stamp, text="outage")
        gain = float(query.right[-1].mean() - query.left[-1].mean())
        if abs(gain) <= self._margin:
            return Verdict(status=Status.NO_PREFERENCE, label=Label.TIE, stamp=self.stamp, text="-1")
        label = Label.RIGHT if gain > 0 else Label.LEFT
        return Verdict(status=Status.OK, label=label, stamp=self.stamp, text=str(int(gain > 0)))


def check_judge(judge: Judge, size_px: int = 32) -> None:
    """Checks that `judge` keeps every promise of the `Judge` protocol, whatever its answers.

    Args:
        judge: any judge; it is asked about twenty questions with random images.
        size_px: side length of those images.

    Raises:
        AssertionError: says which promise is broken.
    """
    check_asserts()
    rng = np.random.default_rng(0)
    clips = [rng.integers(0, 256, (length, size_px, size_px, 3), np.uint8) for length in (1, 1, 1, 1, 1, 2, 3)]
    queries = [Query(goal="open the drawer", left=clips[i], right=clips[i - 1]) for i in range(len(clips))]
    assert isinstance(judge, Judge), "a judge has stamp, compare and score"
    assert judge.compare([]) == [] and judge.score([]) == [], "no questions, no answers"
    verdicts = judge.compare(queries)
    assert [v.stamp for v in verdicts] == [judge.stamp] * len(queries), "every verdict carries the judge's stamp"
    again = judge.compare(queries[::-1])[::-1]
    assert [v.label for v in again] == [v.label for v in verdicts], "answers follow the order of the questions"
    for verdict in verdicts:
        shares = verdict.probabilities
        assert shares is None or (abs(sum(shares) - 1) < 1e-4 and min(shares) >= 0), "probabilities are a distribution"
    bad = Query(goal="", left=clips[0], right=clips[1])
    mixed = judge.compare([queries[0], bad, queries[1]])
    assert [v.label for v in (mixed[0], mixed[2])] == [v.label for v in verdicts[:2]], "one bad item spoils no other"
    scores = judge.score([Clip(goal="open the drawer", frames=clip) for clip in clips])
    assert len(scores) == len(clips), "one score per clip"
    for score in scores:
        assert (score.status is Status.OK) == (score.value is not None), "a value goes with status ok"
        assert score.value is None or 0 <= score.value <= 1, "scores lie in [0, 1]"
