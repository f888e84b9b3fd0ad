"""Judges that need no model and whose right answers are known."""

from collections.abc import Sequence

from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict


class FakeJudge:
    """A judge whose truth is brightness: the side whose last image is brighter is nearer to the goal.

    Args:
        margin: differences of mean brightness up to this, in grey levels, are ties.
        failing: number of first questions that fail, as in an outage that ends.
    """

    def __init__(self, margin: float = 0.0, failing: int = 0) -> None:
        self._margin = margin
        self._failing = failing
        self.num_asked = 0
        """Questions seen so far."""

    @property
    def stamp(self) -> Stamp:
        """Always the same."""
        return Stamp(judge="fake", revision="1", prompt="brightness/1", decoding=f"margin={self._margin:g}")

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order."""
        return [self._compare(query) for query in queries]

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """The brightness of each clip's last image, 1 for white."""
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
