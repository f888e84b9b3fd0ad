"""What every Judge promises, checked: each judge's tests call this. Envs are checked by `rlvlm.envs.contracts`."""

import numpy as np

from rlvlm.core.judging import Clip, Query, Status
from rlvlm.judges.judge import Judge


def check_judge(judge: Judge, size_px: int = 32) -> None:
    """Passes when `judge` keeps every promise of the `Judge` protocol, whatever it believes.

    Args:
        judge: any judge; it is asked about twenty questions with random images.
        size_px: side of those images.

    Raises:
        AssertionError: says which promise is broken.
    """
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
