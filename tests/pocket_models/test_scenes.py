"""Scenes of every task, a few episodes of each: real envs, really drawn, shown to the judge that knows them."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from pocket_models.scenes import TASKS, Scenes, collect, collect_scenes, draw_uniform_pairs, label_of
from rlvlm.core.judging import Label, Query
from rlvlm.envs.registry import task_goal
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.runs.settings.recipes import RECIPES

EPISODES = {"fold_cloth": 80, "straighten_rope": 16, "pass_water": 12, "cartpole": 16}


def few(name):
    """A task with some episodes of the recipe's own set-up; half of them and 20 images are held out."""
    setup = replace(TASKS[name].setups[0], episodes=EPISODES.get(name, 10), max_images=40)
    return replace(TASKS[name], setups=(setup,))


def make_scenes(num_images=200, frames=None):
    return Scenes(
        task="test",
        name="all",
        goal="open the drawer",
        phrase="the drawer is {percent}% open",
        images=np.zeros((num_images, 4, 4, 3), np.uint8),
        progress=np.linspace(0, 1, num_images, dtype=np.float32),
        frames=np.arange(num_images) if frames is None else np.asarray(frames),
    )


def own_scenes(split, seed):
    yield make_scenes(seed)


def test_labels_of_pairs_worked_by_hand():
    assert [label_of(*pair) for pair in ((0.3, 0.5), (0.5, 0.3), (0.5, 0.51), (0.51, 0.5))] == [1, 0, -1, -1]
    assert [label_of(0.5, right, tie_gap=0.1) for right in (0.59, 0.61)] == [-1, 1]


def test_uniform_pairs_follow_the_frames_and_never_show_one_image_twice():
    pairs = draw_uniform_pairs(make_scenes(frames=[3] * 7 + [7]), 50, np.random.default_rng(0))
    assert pairs.shape == (50, 2) and {tuple(pair) for pair in pairs} == {(3, 7), (7, 3)}


def test_scenes_must_be_whole_and_have_a_name_that_leads_somewhere(monkeypatch):
    for broken in ({"progress": np.zeros(3, np.float32)}, {"frames": np.array([0, 200])}):
        with pytest.raises(ValueError, match="progress per image|frames must name"):
            replace(make_scenes(), **broken)
    monkeypatch.setitem(sys.modules, "own_scenes", sys.modules[__name__])
    assert [len(scene.images) for scene in collect_scenes("own_scenes:own_scenes", "train", 7)] == [7]
    for name in ("nowhere", "own_scenes:missing"):
        with pytest.raises(ValueError, match="no scenes"):
            next(collect_scenes(name, "train", 0))
    assert set(TASKS) <= set(RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_images_range_from_untouched_to_far_on_the_way_and_the_judge_sees_it(name):
    [found] = collect(few(name), "held_out", 7)
    assert found.goal == task_goal(found.task)
    assert found.images.shape == (len(found.progress), 300, 300, 3) and 15 < len(found.images) <= 20
    assert found.progress.min() < 0.4 and found.progress.max() > 0.75
    assert len({image.tobytes() for image in found.images}) > 10  # a cup that left the image looks like another
    order = np.argsort(found.progress)
    asked = [
        Query(goal=found.goal, left=found.images[left, None], right=found.images[right, None])
        for left in order[:4]
        for right in order[-4:]
    ]
    verdicts = build_judge(JudgeConfig()).compare(asked)
    assert np.mean([verdict.label is Label.RIGHT for verdict in verdicts]) >= 0.75


def test_a_seed_plays_the_same_episodes_and_the_splits_different_ones():
    [one], [again], [other] = (collect(few("cartpole"), split, 0) for split in ("train", "train", "held_out"))
    assert np.array_equal(one.images, again.images)
    assert not set(one.progress[one.progress > 0].tolist()) & set(other.progress[other.progress > 0].tolist())


def test_training_sees_mirrored_images_where_the_task_allows_them():
    task = replace(few("cartpole"), mirrors=((2,),))
    [plain], [mirrored] = collect(few("cartpole"), "train", 0), collect(task, "train", 0)
    assert np.array_equal(mirrored.images[len(plain.images) :], plain.images[:, :, ::-1])
    assert np.array_equal(mirrored.progress, np.tile(plain.progress, 2))
    assert np.array_equal(mirrored.frames, plain.frames)
    [held_out] = collect(task, "held_out", 0)
    assert len(held_out.images) <= 20
