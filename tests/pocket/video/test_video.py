"""The pocket video judge: what is read in a frame, which answer is right, and that a trained one tells clips apart."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlvlm.core.errors import UnsupportedQuestion
from rlvlm.core.judging import Clip, Score
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.pocket.scorer.dataset import Question, chat_of
from rlvlm.pocket.video.dataset import MOMENTS, Clips, draw_question, question_of, readable, readable_sizes
from rlvlm.pocket.video.evaluate import measure
from rlvlm.pocket.video.play import PlayConfig, play
from rlvlm.pocket.video.train import TrainConfig, Trainer
from rlvlm.testing import FakeJudge
from rlvlm.vlms.shipped import weights_folder

MAX_BYTES = 6_000_000

SOUP, MILK = "pick up the soup and place it in the basket", "pick up the milk and place it in the basket"


def clips(num: int = 4) -> Clips:
    rng = np.random.default_rng(0)
    return Clips(
        frames=rng.integers(0, 256, (num, MOMENTS, 144, 144, 3), np.uint8),
        places=rng.normal(0, 0.2, (num, MOMENTS, 2, 3)).astype(np.float32),
        things=("milk_1", "soup_1"),
        targets=("soup_1",),
        tasks=("libero_object/7", "libero_goal/0") * (num // 2),
        instructions=(SOUP, MILK) * (num // 2),
        success=np.arange(num) < num // 2,
    )


def test_places_are_read_in_bins_with_the_target_that_a_thing_is_at() -> None:
    # by hand: 0 lies in the middle of 15 bins, the eighth; 0.3 m is (0.3 + 0.45) / 0.06 = 12.5, the thirteenth
    places = [[0.0, 0.0, 0.1], [0.3, -9.0, 0.0], [np.nan] * 3, [0.06, -0.06, 0.0], [np.nan] * 3, [0.3, -8.95, 0.4]]
    shown = replace(
        clips(2),
        places=np.broadcast_to(np.array(places, np.float32), (2, MOMENTS, 6, 3)),
        things=("soup", "milk", "mug", "basket", "stove", "tray"),
        targets=("tray", "basket", "stove"),
    )
    told = readable(shown)
    assert told.shape == (2, MOMENTS, 18)
    soup, milk, basket, tray = [8, 8, 3], [13, 1, 2], [9, 7, 1], [13, 1, 1]  # at the basket, at the tray, at none
    assert told[1, 3].tolist() == [*soup, *milk, 0, 0, 0, *basket, 0, 0, 0, *tray]
    assert (told.reshape(-1, 18).max(axis=0) < readable_sizes(shown)).all()


def test_every_other_instruction_of_two_is_one_of_the_same_suite() -> None:
    """Where the scene is the same, only the words tell what is wanted."""
    near, far = "put the mug on the plate", "open the drawer"
    shown = replace(
        clips(),
        tasks=("libero_object/0", "libero_object/7", "libero_goal/8", "libero_goal/0"),
        instructions=(SOUP, MILK, near, far),
        success=np.array([True, True, False, False]),
    )
    rng = np.random.default_rng(0)
    asked = [draw_question(shown, 2, rng) for _ in range(2000)]
    others = [
        one.goal
        for one in asked
        if one.images[0] < 2 * MOMENTS and one.goal != shown.instructions[one.images[0] // MOMENTS]
    ]
    in_suite = sum(goal in {SOUP, MILK} for goal in others) / len(others)
    assert 0.8 < in_suite < 0.94  # four fifths, and a third of the rest


def test_only_the_end_of_a_success_is_one_and_only_of_its_own_task() -> None:
    shown = clips()
    whole = np.arange(MOMENTS)
    assert question_of(shown, 0, whole, SOUP).answer == "yes"
    for row, moments, goal in ((0, whole[::-1], SOUP), (0, whole[:5], SOUP), (0, whole, MILK), (2, whole, SOUP)):
        assert question_of(shown, row, moments, goal).answer == "no"
    assert question_of(shown, 1, whole[[0, -1]], MILK).images == (MOMENTS, 2 * MOMENTS - 1)
    rng = np.random.default_rng(0)
    answers = [draw_question(shown, 4, rng).answer for _ in range(400)]
    assert 0.15 < answers.count("yes") / 400 < 0.35  # half of .8 x .85 x .7


def test_clips_are_kept_whole(tmp_path: Path) -> None:
    shown = clips()
    shown.save(tmp_path / "clips.npz")
    again = Clips.load(tmp_path / "clips.npz")
    for name in ("things", "targets", "tasks", "instructions"):
        assert getattr(again, name) == getattr(shown, name)
    assert again.of_suite("libero_goal").instructions == (MILK, MILK)
    np.testing.assert_array_equal(again.of_suite("libero_goal").frames, shown.frames[1::2])
    for name in ("frames", "places", "success"):
        np.testing.assert_array_equal(getattr(again, name), getattr(shown, name))


def test_a_judge_is_measured_on_wholes_halves_turned_round_and_another_task() -> None:
    judge = FakeJudge()
    figures = measure(judge, clips(), 8)
    assert figures["successes"] == figures["failures"] == 2 and figures["unanswered"] == 0
    assert 0 <= figures["success above both"] <= 1


class Reticent(FakeJudge):
    """Has no answer about one clip in four."""

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        asked = super().score(clips)
        return [replace(one, value=None) if index % 4 == 1 else one for index, one in enumerate(asked)]


def test_clips_without_an_answer_are_counted_and_in_no_figure() -> None:
    shown = clips()
    figures, whole = (
        measure(Reticent(), shown, 8),
        FakeJudge().score([Clip(goal=SOUP, frames=frames) for frames in shown.frames]),
    )
    told = [index for index in range(len(whole)) if index % 4 != 1 and shown.success[index]]
    assert figures["mean of successes"] == pytest.approx(np.mean([whole[index].value for index in told]), abs=1e-6)
    assert 0 < figures["unanswered"] < 1 and all(np.isfinite(value) for value in figures.values())

    class Silent(FakeJudge):
        def score(self, clips: Sequence[Clip]) -> list[Score]:
            return [replace(one, value=None) for one in super().score(clips)]

    with pytest.raises(ValueError, match="scored 0 successes and 0 failures"):
        measure(Silent(), shown, 8)


@pytest.mark.slow
def test_training_leaves_a_judge_of_clips(tmp_path: Path) -> None:
    clips().save(tmp_path / "clips.npz")
    config = TrainConfig(clips=tmp_path / "clips.npz", out=tmp_path / "judge", seeing_steps=2, talking_steps=2, batch=4)
    trainer = Trainer(config)
    trainer.train()
    assert {"read", "loss"} <= trainer.facts["seeing"].keys() and {"right", "loss"} <= trainer.facts["talking"].keys()
    judge = build_judge(JudgeConfig(model=str(tmp_path / "judge"), score="success"))
    assert measure(judge, clips(), 2)["unanswered"] == 0
    with pytest.raises(UnsupportedQuestion, match="it knows success"):
        build_judge(JudgeConfig(model=str(tmp_path / "judge")))


def test_the_shipped_weights_are_small_and_know_the_question() -> None:
    """The question's sentence is one token; another wording would fall apart into many."""
    folder = weights_folder("video")
    assert sum(file.stat().st_size for file in folder.iterdir()) < MAX_BYTES
    words = {each["content"] for each in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
    question = Question(mode="success", goal=SOUP, images=(0, 1), answer="")
    assert chat_of(question, 2)[0]["content"][-1]["text"] in words, "the question was reworded: train it again"


@pytest.mark.slow
def test_it_tells_success_as_its_card_says() -> None:
    suite = "libero_object"
    recorded = json.loads((weights_folder("video").parent / "evaluation.json").read_text())["2 frames"][suite]
    shown = play(PlayConfig(out=Path(), tasks=(f"{suite}/1",), episodes=6, held_out=True))
    figures = measure(build_judge(JudgeConfig(model="video", score="success")), shown, 2)
    assert figures["success above both"] > recorded["success above both"] - 0.15
    assert figures["successes turned round"] < figures["mean of successes"] - 0.3
