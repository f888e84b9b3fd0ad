"""Judges of your own for `slide_ball`, in one file: a function of images, and a whole judge. See docs/judges.md."""

import numpy as np

from rlvlm.core.judging import Label, Score, Stamp, Status, Verdict
from rlvlm.judges.config import JudgeConfig


def nearness(images, goal):
    """One score in [0, 1] per image [H, W, 3]: how near the red ball is to the green ring."""
    return [1 - min(np.linalg.norm(_centre(image, 0) - _centre(image, 1)) / len(image), 1) for image in images]


def make_judge(config: JudgeConfig) -> "BallJudge":
    """What `--judge.backend own_judge:make_judge` calls; other settings of the judge are in `config`."""
    return BallJudge()


class BallJudge:
    """Compares and scores; each answer has a status, a label or a value, and the judge's stamp."""

    stamp = Stamp(judge="own_judge:BallJudge", revision="1", prompt="nearness/1", decoding="")

    def compare(self, queries):
        verdicts = []
        for query in queries:
            if not query.goal:
                verdicts.append(Verdict(status=Status.FAILED, label=None, stamp=self.stamp, text="no goal"))
                continue
            left, right = nearness([query.left[-1], query.right[-1]], query.goal)
            label = Label.TIE if left == right else Label.LEFT if left > right else Label.RIGHT
            status = Status.NO_PREFERENCE if label is Label.TIE else Status.OK
            verdicts.append(Verdict(status=status, label=label, stamp=self.stamp, text=f"{left:.3f} or {right:.3f}"))
        return verdicts

    def score(self, clips):
        return [
            Score(status=Status.OK, value=float(nearness([clip.frames[-1]], clip.goal)[0]), stamp=self.stamp)
            for clip in clips
        ]


def _centre(image, channel):
    others = np.delete(image, channel, axis=2).max(axis=2)
    rows, columns = np.nonzero(image[:, :, channel] > others.astype(int) + 60)
    return np.array([rows.mean(), columns.mean()]) if len(rows) else np.zeros(2)
