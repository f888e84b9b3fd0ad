"""The pocket scorer as it ships, its dataset, and a training cut to seconds."""

import json
from pathlib import Path

import numpy as np
import pytest

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.envs.push_block import table
from rlvlm.judges.build import ABILITIES_FILE, build_judge
from rlvlm.judges.config import JudgeConfig, ScoreMode
from rlvlm.judges.judge import Judge
from rlvlm.pocket.scenes.clips import collect_pushes, readable
from rlvlm.pocket.scenes.turns import AWAY, NEARER, REACHED, SAME, collect_turns, rating_of
from rlvlm.pocket.scorer.config import TrainConfig
from rlvlm.pocket.scorer.dataset import TURN_TASKS, Question, QuestionDataset, chat_of
from rlvlm.pocket.scorer.evaluate import EvaluateConfig, measure_clips, measure_turns
from rlvlm.pocket.scorer.train import Trainer, make_tokenizer
from rlvlm.vlms.shipped import weights_folder

RECORDED = json.loads((weights_folder("scorer").parent / "evaluation.json").read_text())
MAX_BYTES = 6_000_000


@pytest.fixture(scope="module")
def judge() -> Judge:
    return build_judge(JudgeConfig(model="scorer", score="utility"))


def test_ratings_by_hand() -> None:
    assert [rating_of(3, left) for left in (4, 3, 2, 0)] == [AWAY, SAME, NEARER, REACHED]


def test_moves_are_rated_by_what_the_expert_still_needs() -> None:
    env, turns = collect_turns("number_line", 200, "train", 0)
    for turn in turns:
        before, after = (abs(int(each[0]) - int(each[1])) for each in (turn.before, turn.after))
        assert turn.rating == rating_of(before, after)
        assert turn.action or np.array_equal(turn.before, turn.after), "an unreadable reply changes nothing"
    assert {turn.rating for turn in turns} == {AWAY, SAME, NEARER, REACHED}
    env.close()


def test_held_out_layouts_are_never_trained_on() -> None:
    layouts = []
    for split in ("train", "held_out"):
        env, turns = collect_turns("doorkey_6x6", 400, split, 0, splits_starts=True)
        doors = [turn.before[:-3].reshape(6, 6, 3)[..., 0] for turn in turns]
        layouts.append({tuple(np.argwhere(grid == 4)[0]) + tuple(np.argwhere(grid == 5).ravel()) for grid in doors})
        env.close()
    starts = [{each for each in side if len(each) == 4} for side in layouts]  # with the key still in its place
    assert starts[0] and starts[1] and len(starts[0] & starts[1]) < len(starts[1])


def test_a_push_is_read_from_its_last_image_alone() -> None:
    pushes = collect_pushes(300, "train", 0)
    told = readable(np.stack([push.snapshots[-1] for push in pushes])).reshape(len(pushes), -1, 3)
    for push, row in zip(pushes, told, strict=True):
        asked = int(push.snapshots[0, table.COLOURS])
        assert (row[asked, 2] == 2) == push.is_success == push.is_reached(push.instruction, push.snapshots[-1])
        assert (row[:, 2] > 0).sum() == 2, "two blocks are on the table"
    others = [push.is_reached(goal, push.snapshots[-1]) for push in pushes for goal in push.other_instructions]
    assert any(others), "some bring the wrong block to the pad"


@pytest.mark.slow
def test_questions_turned_round_and_off_the_goal_have_their_own_answers() -> None:
    dataset, rng = QuestionDataset("train", 60, 10, 0), np.random.default_rng(0)
    turns = [dataset.turn(rng) for _ in range(300)]
    assert {question.answer for question in turns} == {"1", "2", "4", "5"}
    goals = {turn.goal for turn, _ in dataset.turns}
    assert {question.answer for question in turns if question.goal not in goals} == {"2"}
    clips = [dataset.clip(3, rng) for _ in range(100)]
    assert {question.answer for question in clips} == {"yes", "no"}
    assert all(0 <= image < len(dataset) for question in [*turns, *clips] for image in question.images)


@pytest.mark.slow
def test_a_training_of_two_steps_leaves_a_judge(tmp_path: Path) -> None:
    out = tmp_path / "weights"
    Trainer(TrainConfig(out=out, moves=40, pushes=6, seeing_steps=1, talking_steps=2, batch=8)).train()
    made = build_judge(JudgeConfig(model=str(out), score="success"))
    assert made.stamp.judge.startswith("pocket:")
    with pytest.raises(UnsupportedQuestion, match="judge.score progress, it knows success, utility"):
        build_judge(JudgeConfig(model=str(out)))
    (out / ABILITIES_FILE).write_text("{}")
    with pytest.raises(JudgeUnavailable, match="cannot be read"):
        build_judge(JudgeConfig(model=str(out), score="success"))


def test_the_weights_are_small_and_questions_are_those_they_were_taught() -> None:
    """Whole sentences are single tokens; another wording would fall apart into many and mean nothing to the model."""
    assert sum(file.stat().st_size for file in weights_folder("scorer").iterdir()) < MAX_BYTES
    shipped = json.loads((weights_folder("scorer") / "tokenizer.json").read_text())
    words = {each["content"] for each in shipped["added_tokens"]}
    limits: dict[ScoreMode, int] = {"utility": 60, "success": 40}
    for mode, most in limits.items():
        question = Question(mode=mode, goal="reach the green goal square", action="turn left", images=(0, 1), answer="")
        texts = [part.get("text", "") for turn in chat_of(question, 2) for part in turn["content"]]
        ids = make_tokenizer()("".join(texts)).input_ids
        assert len(ids) < most and texts[-1] in words, "the question was reworded: train the scorer again"


@pytest.mark.slow
@pytest.mark.parametrize("task", TURN_TASKS, ids=lambda task: task.name)
def test_it_rates_turns_as_its_card_says(judge: Judge, task: object) -> None:
    figures, recorded = measure_turns(judge, task, EvaluateConfig(turns=80)), RECORDED[task.name]  # pyright: ignore
    assert figures["right"] > recorded["right"] - 0.1
    assert figures["better above worse"] > recorded["better above worse"] - 0.08
    assert figures["another goal"] < 0.35 and figures["unanswered"] == 0


@pytest.mark.slow
def test_it_tells_success_of_clips_as_its_card_says() -> None:
    judge = build_judge(JudgeConfig(model="scorer", score="success"))
    figures = measure_clips(judge, EvaluateConfig(clips=80), 2)
    assert figures["success above failure"] > RECORDED["push_block, 2 images"]["success above failure"] - 0.05
    assert figures["successes turned round"] < 0.1 and figures["successes, another colour asked for"] < 0.2


def test_the_card_tells_of_every_env() -> None:
    card = (weights_folder("scorer").parent / "CARD.md").read_text()
    assert all(f"`{name.partition(',')[0]}`" in card for name in RECORDED)
