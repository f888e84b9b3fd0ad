"""What the pocket scorer learns: rated turns, pushes, and questions about them."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from pocket_models.dataset import LabelledQuestion
from pocket_models.scorer import (
    AWAY,
    NEARER,
    REACHED,
    SAME,
    TURN_TASKS,
    ScorerDataset,
    collect_pushes,
    collect_turns,
    rating_of,
    readable_pushes,
)
from rlvlm.envs import push_block as table
from rlvlm.pocket.models import weights_folder

NUMBER_LINE, _, DOORKEY = TURN_TASKS


def test_moves_are_rated_by_the_experts_remaining_steps():
    assert [rating_of(3, left) for left in (4, 3, 2, 0)] == [AWAY, SAME, NEARER, REACHED]
    env, turns = collect_turns(NUMBER_LINE, 200, "train", 0)
    for turn in turns:
        before, after = (abs(int(each[0]) - int(each[1])) for each in turn.snapshots)
        assert turn.rating == rating_of(before, after)
        assert turn.action or np.array_equal(*turn.snapshots), "an unreadable reply changes nothing"
    assert {turn.rating for turn in turns} == {AWAY, SAME, NEARER, REACHED}
    env.close()


@pytest.mark.slow
def test_held_out_layouts_are_never_trained_on():
    layouts = []
    for split in ("train", "held_out"):
        env, turns = collect_turns(DOORKEY, 400, split, 0)
        grids = [turn.snapshots[0, :-3].reshape(6, 6, 3)[..., 0] for turn in turns]
        layouts.append({tuple(np.argwhere(grid == 4)[0]) + tuple(np.argwhere(grid == 5).ravel()) for grid in grids})
        env.close()
    starts = [{each for each in side if len(each) == 4} for side in layouts]  # with the key still in its place
    assert starts[0] and starts[1] and len(starts[0] & starts[1]) < len(starts[1])


def test_a_push_is_read_from_its_last_image_alone():
    pushes = collect_pushes(300, "train", 0)
    values, sizes = readable_pushes(np.stack([push.snapshots[-1] for push in pushes]))
    assert (values.max(0) < sizes).all()
    for push, row in zip(pushes, values.reshape(len(pushes), -1, 3), strict=True):
        asked = int(push.snapshots[0, table.COLOURS])
        assert (row[asked, 2] == 2) == push.is_success == push.is_reached(push.instruction, push.snapshots[-1])
        assert (row[:, 2] > 0).sum() == 2, "two blocks are on the table"
    others = [push.is_reached(goal, push.snapshots[-1]) for push in pushes for goal in push.other_instructions]
    assert any(others), "some bring the wrong block to the pad"


@pytest.mark.slow
def test_questions_backwards_and_off_the_goal_have_their_own_answers():
    dataset, rng = ScorerDataset(60, 10, 0), np.random.default_rng(0)
    turns = [dataset.draw_turn(rng) for _ in range(300)]
    assert {question.answer for question in turns} == {"1", "2", "4", "5"}
    goals = {turn.goal for turn, _ in dataset.turns}
    assert {question.answer for question in turns if question.goal not in goals} == {"2"}
    clips = [dataset.draw_clip(3, rng) for _ in range(100)]
    assert {question.answer for question in clips} == {"yes", "no"}
    assert all(0 <= image < len(dataset.frames) for question in [*turns, *clips] for image in question.images)
    rows = dataset.draw_images(48, rng)
    assert 0.4 < (rows >= dataset.groups[-1].start).mean() < 0.7, "about half of push_block"


@pytest.mark.parametrize(
    ("model", "mode", "most"), [("scorer", "utility", 60), ("scorer", "success", 40), ("video", "success", 60)]
)
def test_the_questions_are_still_those_of_the_training(model, mode, most):
    """Whole sentences are single tokens; another wording would fall apart into many and mean nothing to the model."""
    goal = "reach the green goal square" if model == "scorer" else "pick up the milk and place it in the basket"
    chat = LabelledQuestion(mode=mode, goal=goal, action="turn left", images=(0, 1), answer="").chat
    texts = [part.get("text", "") for message in chat for part in message["content"]]
    words = {
        each["content"] for each in json.loads((weights_folder(model) / "tokenizer.json").read_text())["added_tokens"]
    }
    ids = AutoTokenizer.from_pretrained(weights_folder(model))("".join(texts)).input_ids
    assert len(ids) < most and texts[-1] in words, "the question was reworded: train the model again"
