"""Models that write nonsense, asked through the real judge and parsers: no exception, no label from nowhere."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from chaos import garbage
from numpy.typing import NDArray

from rlvlm.core.judging import Clip, Label, Query, Status
from rlvlm.judges.asking import BatchAsker
from rlvlm.judges.chat import ChatJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.vlms.chats import Chat, ChatReply

SEED = 2026
FRAMES = np.zeros((2, 8, 8, 3), np.uint8)
QUERY, CLIP = Query(goal="open it", left=FRAMES[:1], right=FRAMES[1:]), Clip(goal="open it", frames=FRAMES)


class Babbler:
    """An `Engine` that answers with what it is given."""

    revision = "0"
    traits = ""

    def __init__(self, words: Iterator[str]) -> None:
        self._words = words
        self._rng = np.random.default_rng(SEED)
        self.num_answers = 0

    def generate(
        self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float, choices: Sequence[str] = ()
    ) -> list[ChatReply]:
        self.num_answers += len(chats)
        return [ChatReply(text=text) for text in (next(self._words) for _ in chats)]

    def choice_log_p(self, chats: Sequence[Chat], choices: Sequence[str]) -> NDArray[np.float64]:
        self.num_answers += len(chats)
        shape = (len(chats), len(choices))
        odd = self._rng.choice([np.nan, np.inf, -np.inf, 0.0, -1e300, 3.0], shape)
        return np.where(self._rng.random(shape) < 0.3, odd, -self._rng.exponential(5.0, shape))

    def release_memory(self) -> None:
        pass


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_garbage_makes_no_exception_and_no_label_outside_the_set(count):
    model, tally = Babbler(iter(garbage(2 * count, SEED))), dict.fromkeys(Status, 0)
    ways = [JudgeConfig(prompt=prompt) for prompt in ("single_stage", "two_stage", "direct")]
    ways += [JudgeConfig(score=score) for score in ("progress", "rating", "success", "video")]
    while model.num_answers < count:
        for config in ways:
            judge = ChatJudge(config, BatchAsker(model, config))
            is_score = config.score != "progress"
            answers = judge.score([CLIP] * 16) if is_score or config.prompt == "direct" else judge.compare([QUERY] * 16)
            answers += judge.compare([QUERY] * 16)
            for answer in answers:
                tally[answer.status] += 1
                if hasattr(answer, "label"):
                    assert answer.label in (Label.LEFT, Label.RIGHT, Label.TIE, None)
                    shares = answer.probabilities
                    assert shares is None or (abs(sum(shares) - 1) < 1e-6 and min(shares) >= 0), shares
                else:
                    assert (answer.value is not None) == (answer.status is Status.OK)
                    assert answer.value is None or 0 <= answer.value <= 1
    assert tally[Status.FAILED] == 0, "garbage is invalid, not an outage"
    assert tally[Status.INVALID] > tally[Status.OK] > 0
