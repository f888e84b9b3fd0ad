from dataclasses import replace

import numpy as np
import pytest
from scripted import ScriptedModel

from rlvlm.core.errors import UnsupportedQuestion
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Usage, Verdict
from rlvlm.judges.asking import BatchAsker
from rlvlm.judges.chat import ChatJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.votes import SEPARATOR, BothOrders, Committee
from rlvlm.testing import FakeJudge

STAMP = Stamp(judge="scripted", revision="1", prompt="direct/1 progress/1", decoding="")
IMAGE = np.zeros((1, 4, 4, 3), np.uint8)


class Sworn(FakeJudge):
    """Gives prepared verdicts in turn."""

    def __init__(self, *verdicts: Verdict) -> None:
        super().__init__()
        self._verdicts = verdicts

    def compare(self, queries):
        return list(self._verdicts)


def say(label: Label | None, probabilities=None, status=None, **more) -> Verdict:
    return Verdict(status=status or Status.of(label), label=label, stamp=STAMP, probabilities=probabilities, **more)


def ask(first: Verdict, second: Verdict) -> Verdict:
    return BothOrders(Sworn(first, second)).compare([Query(goal="open it", left=IMAGE, right=IMAGE)])[0]


def test_agreement_keeps_the_label_and_averages_the_probabilities():
    # by hand: left first 0.5 / 0.3 / 0.2; shown the other way round 0.1 / 0.8 / 0.1, which is 0.8 / 0.1 / 0.1 here
    verdict = ask(say(Label.LEFT, (0.5, 0.3, 0.2), text="0"), say(Label.RIGHT, (0.1, 0.8, 0.1), text="1"))
    assert (verdict.status, verdict.label) == (Status.OK, Label.LEFT)
    assert verdict.probabilities == pytest.approx((0.65, 0.2, 0.15))
    assert verdict.text == f"0{SEPARATOR}1"


def test_a_judge_that_always_says_left_has_no_preference():
    verdict = ask(say(Label.LEFT, (0.9, 0.1, 0.0), text="0"), say(Label.LEFT, (0.7, 0.2, 0.1), text="0"))
    assert (verdict.status, verdict.label) == (Status.NO_PREFERENCE, Label.TIE)
    assert verdict.probabilities == pytest.approx((0.55, 0.4, 0.05))


LOST = say(None, status=Status.FAILED)


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (say(Label.LEFT), say(Label.TIE), Status.NO_PREFERENCE),
        (say(Label.TIE), say(Label.TIE), Status.NO_PREFERENCE),
        (say(Label.LEFT), say(None), Status.INVALID),
        (say(None), say(None), Status.INVALID),
        (LOST, say(Label.LEFT), Status.FAILED),
        (LOST, say(None), Status.FAILED),
        (LOST, LOST, Status.FAILED),
    ],
)
def test_one_answer_that_is_missing_or_unreadable_is_not_made_up_for(first, second, status):
    for verdict in (ask(first, second), ask(second, first)):
        assert verdict.status is status and verdict.probabilities is None


def test_the_costs_of_both_questions_add_up():
    cost = Usage(tokens_in=10, tokens_out=1, cost_usd=0.5)
    assert ask(say(Label.LEFT, usage=cost), say(Label.RIGHT, usage=cost)).usage == Usage(
        tokens_in=20, tokens_out=2, cost_usd=1.0
    )
    assert ask(say(Label.LEFT, usage=cost), say(Label.RIGHT, usage=replace(cost, cost_usd=None))).usage.cost_usd is None
    assert ask(say(Label.LEFT), say(Label.RIGHT)).usage is None


def test_swapping_the_sides_swaps_the_verdict():
    rng = np.random.default_rng(0)
    sides = rng.integers(0, 256, (2, 40, 1, 4, 4, 3), np.uint8)
    queries = [Query(goal="open it", left=left, right=right) for left, right in zip(*sides, strict=True)]
    swapped = [query.swapped for query in queries]

    class ByContent(ScriptedModel):
        def choice_log_p(self, chats, choices):
            seeds = [
                int(chat[0]["content"][1]["image"].astype(int).sum()) * 10_000
                + int(chat[0]["content"][3]["image"].astype(int).sum())
                for chat in chats
            ]
            return np.concatenate([np.log(np.random.default_rng(seed).dirichlet((3.0, 1.5, 1.0), 1)) for seed in seeds])

    judge = BothOrders(ChatJudge(JudgeConfig(), BatchAsker(ByContent(), JudgeConfig())))
    there, back = judge.compare(queries), judge.compare(swapped)
    for one, other in zip(there, back, strict=True):
        assert other.label is one.label.swapped and other.status is one.status
        assert other.probabilities == pytest.approx((one.probabilities[1], one.probabilities[0], one.probabilities[2]))
    assert {verdict.label for verdict in there} == set(Label)


def test_scores_and_writing_pass_through_with_the_stamp_marked():
    judge = BothOrders(FakeJudge())
    assert judge.score([Clip(goal="open it", frames=IMAGE)])[0].stamp == judge.stamp != FakeJudge().stamp
    assert judge.stamp.prompt.endswith("both_orders")
    with pytest.raises(UnsupportedQuestion):
        judge.generate([], max_new_tokens=1, temperature=0.0)
    writer = BothOrders(ChatJudge(JudgeConfig(), BatchAsker(ScriptedModel(["hi"]), JudgeConfig())))
    assert writer.generate([[{"role": "user", "content": "a"}]], max_new_tokens=1, temperature=0.0) == ["hi"]


def vote(*verdicts: Verdict) -> Verdict:
    members = [Sworn(verdict) for verdict in verdicts]
    return Committee(members).compare([Query(goal="open it", left=IMAGE, right=IMAGE)])[0]


def test_a_committee_answers_by_majority():
    left, right, tie = say(Label.LEFT, (0.8, 0.1, 0.1)), say(Label.RIGHT, (0.2, 0.7, 0.1)), say(Label.TIE)
    assert vote(left, left, right).label is Label.LEFT
    assert vote(left, left, right).probabilities == pytest.approx((0.6, 0.3, 0.1))
    assert vote(left, right).status is Status.NO_PREFERENCE and vote(left, right, tie).label is Label.TIE
    assert vote(left, left, LOST).label is Label.LEFT  # one that did not come cannot change what two say
    assert vote(left, right, LOST).status is Status.FAILED and vote(left, say(None)).status is Status.INVALID
    with pytest.raises(ValueError, match="two members or more"):
        Committee([Sworn(left)])


def test_a_committee_scores_by_the_mean_of_those_that_answered():
    class Scores(FakeJudge):
        def __init__(self, value: float | None) -> None:
            super().__init__()
            self._value = value

        def score(self, clips):
            return [Score(status=Status.of(self._value), value=self._value, stamp=STAMP) for _ in clips]

    clip = [Clip(goal="open it", frames=IMAGE)]
    assert Committee([Scores(0.2), Scores(0.6), Scores(None)]).score(clip)[0].value == pytest.approx(0.4)
    assert Committee([Scores(None), Scores(None)]).score(clip)[0].status is Status.INVALID
    assert Committee([Sworn(), BothOrders(FakeJudge())]).stamp.prompt.endswith("both_orders")
