"""Figures of the four models: worked by hand, and measured small as the cards say them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_clips import SOUP, make_clips, make_scenes

from pocket_models.evaluate import (
    compare_figures,
    draw_balanced_pairs,
    push_figures,
    reply_figures,
    success_figures,
    turn_figures,
    verdict_figures,
    video_figures,
)
from pocket_models.policy import POLICY_TASKS
from pocket_models.scorer import TURN_TASKS, collect_pushes
from pocket_models.video import PlayConfig, play
from rlvlm.core.judging import Clip, Label, Score, Stamp, Status, Verdict
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.pocket.models import weights_folder
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.testing import FakeJudge

STATUS = {Label.LEFT: Status.OK, Label.RIGHT: Status.OK, Label.TIE: Status.NO_PREFERENCE, None: Status.INVALID}


def recorded(model: str):
    return json.loads((weights_folder(model).parent / "evaluation.json").read_text())


def verdicts(*labels: Label | None) -> list[Verdict]:
    stamp = Stamp(judge="test", revision="", prompt="direct/1", decoding="")
    return [Verdict(status=STATUS[label], label=label, stamp=stamp) for label in labels]


def test_shares_worked_by_hand():
    figures = verdict_figures(
        np.array([0.95, -0.95, 0.05, 0.05], np.float32),
        verdicts(Label.RIGHT, Label.RIGHT, Label.TIE, None),
        verdicts(Label.LEFT, Label.RIGHT, Label.TIE, None),
    )
    assert figures["right"] == 0.5 and figures["undecided"] == figures["unread"] == 0.25
    assert figures["swapped"] == 0.75
    assert figures["pairs_by_bin"] == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert figures["right_by_bin"][9] == 0.5 and figures["right_by_bin"][0] is None
    assert figures["undecided_by_bin"][0] == 0.5


def test_balanced_pairs_fill_all_bins_and_a_perfect_judge_gets_full_marks():
    scenes = make_scenes(256)
    pairs = draw_balanced_pairs(scenes, 200, np.random.default_rng(0))
    gaps = np.abs(scenes.progress[pairs[:, 0]] - scenes.progress[pairs[:, 1]])
    assert np.histogram(gaps, 10, (0, 1))[0] == pytest.approx([20] * 10, abs=6)
    figures = compare_figures(FakeJudge(), scenes, pairs)
    assert figures["right"] == figures["swapped"] == 1.0 and figures["unread"] == 0.0


def test_successes_worked_by_hand():
    whole, success = np.array([0.9, 0.4, 0.6, 0.1, np.nan]), np.array([True, True, False, False, False])
    figures = success_figures(whole, success, np.array([0.2, np.nan]))
    assert figures["success above failure"] == 0.75 and figures["success above its first half"] == 1.0
    assert figures["false positives"] == pytest.approx(1 / 3) and figures["false negatives"] == 0.5
    assert figures["unanswered"] == pytest.approx(2 / 7)
    assert "success above both" not in success_figures(whole, success, np.empty(0))


class Reticent(FakeJudge):
    """Has no answer about one clip in four, or about any."""

    def __init__(self, every: int = 4) -> None:
        super().__init__()
        self._every = every

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        asked = super().score(clips)
        silent = 1 % self._every
        return [replace(one, value=None) if i % self._every == silent else one for i, one in enumerate(asked)]


def test_clips_without_an_answer_are_counted_and_in_no_figure():
    shown = make_clips()
    assert video_figures(FakeJudge(), shown, 8)["unanswered"] == 0
    figures = video_figures(Reticent(), shown, 8)
    whole = FakeJudge().score([Clip(goal=SOUP, frames=frames) for frames in shown.frames])
    kept = [index for index in range(len(whole)) if index % 4 != 1 and shown.success[index]]
    assert figures["mean of successes"] == pytest.approx(np.mean([whole[index].value for index in kept]), abs=1e-6)
    assert 0 < figures["unanswered"] < 1 and all(np.isfinite(value) for value in figures.values())
    with pytest.raises(ValueError, match="scored 0 successes and 0 failures"):
        video_figures(Reticent(every=1), shown, 8)


@pytest.mark.slow
@pytest.mark.parametrize("task", TURN_TASKS, ids=lambda task: task.name)
def test_the_scorer_rates_turns_as_its_card_says(task):
    judge = build_judge(JudgeConfig(model="scorer", score="utility"))
    figures, said = turn_figures(judge, task, 80, seed=0), recorded("scorer")[task.name]
    assert figures["right"] > said["right"] - 0.1
    assert figures["better above worse"] > said["better above worse"] - 0.08
    assert figures["another goal"] < 0.35 and figures["unanswered"] == 0


@pytest.mark.slow
def test_the_scorer_tells_success_of_clips_as_its_card_says():
    judge = build_judge(JudgeConfig(model="scorer", score="success"))
    figures = push_figures(judge, collect_pushes(80, "held_out", 0), 2)
    said = recorded("scorer")["push_block, 2 images"]
    assert figures.keys() >= said.keys()
    assert figures["success above failure"] > said["success above failure"] - 0.05
    assert figures["successes turned round"] < 0.1 and figures["successes, another thing asked for"] < 0.2


@pytest.mark.slow
def test_the_video_judge_tells_success_as_its_card_says():
    suite = "libero_object"
    said = recorded("video")["2 frames"][suite]
    shown = play(PlayConfig(out=Path(), tasks=(f"{suite}/1",), episodes=6, held_out=True))
    figures = video_figures(build_judge(JudgeConfig(model="video", score="success")), shown, 2)
    assert figures["success above both"] > said["success above both"] - 0.15
    assert figures["successes turned round"] < figures["mean of successes"] - 0.3


@pytest.fixture(scope="module")
def engine():
    return PolicyEngine(load_policy(PolicyConfig(device="cpu")))


@pytest.mark.slow
@pytest.mark.parametrize("task", POLICY_TASKS, ids=lambda task: task.name)
def test_the_policy_reads_as_its_card_says_and_cannot_play(engine, task):
    figures = reply_figures(engine, task, 150, seed=2_000_000, max_new_tokens=80)
    assert figures["valid"] > 0.95
    assert figures["reads greedy"] > recorded("policy")[task.name]["reads greedy"] - 0.1
    assert figures["plays"] < figures["chance"] + 0.15
    assert figures["most chosen"] < figures["chance"] + 0.15
