"""Scenes of every task, a few episodes of each: real worlds, really drawn, shown to the judge that knows them."""

from dataclasses import replace

import numpy as np
import pytest

from rlvlm.core.judging import Label, Query
from rlvlm.envs.registry import task_goal
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.pocket import scenes
from rlvlm.pocket.scenes.pairs import find_provider
from rlvlm.pocket.scenes.play import collect
from rlvlm.pocket.scenes.tasks import TASKS
from rlvlm.runs.recipes import RECIPES

EPISODES = {"fold_cloth": 80, "straighten_rope": 16, "pass_water": 12, "cartpole": 16}


def few(name):
    """A task with some episodes of the recipe's own set-up; half of them and 20 images are held out."""
    setup = replace(TASKS[name].setups[0], episodes=EPISODES.get(name, 10), max_pictures=40)
    return replace(TASKS[name], setups=(setup,))


@pytest.fixture(scope="module", params=TASKS)
def found(request):
    [found] = collect(few(request.param), "held_out", 7)
    return found


def test_every_task_with_a_recipe_is_played_and_has_a_provider_of_its_own():
    assert set(TASKS) == set(RECIPES)
    assert all(callable(find_provider(f"rlvlm.pocket.scenes:{name}")) for name in TASKS)
    assert scenes.soccer.args == (TASKS["soccer"],)


@pytest.mark.slow
def test_images_range_from_untouched_to_far_on_the_way(found):
    assert found.goal == task_goal(found.task)
    assert found.images.shape == (len(found.progress), 300, 300, 3)
    assert 15 < len(found.images) <= 20
    assert found.progress.min() < 0.4
    assert found.progress.max() > 0.75
    assert len({image.tobytes() for image in found.images}) > 10  # a cup that left the image looks like another


@pytest.mark.slow
def test_the_pocket_judge_tells_much_from_little(found):
    order = np.argsort(found.progress)
    asked = [
        Query(goal=found.goal, left=found.images[left, None], right=found.images[right, None])
        for left in order[:4]
        for right in order[-4:]
    ]
    verdicts = build_judge(JudgeConfig()).compare(asked)
    assert np.mean([verdict.label is Label.RIGHT for verdict in verdicts]) >= 0.75


def test_the_same_seed_plays_the_same_episodes_and_the_splits_different_ones():
    [one], [again], [other] = (collect(few("cartpole"), split, 0) for split in ("train", "train", "held_out"))
    assert np.array_equal(one.images, again.images)
    assert not set(one.progress[one.progress > 0].tolist()) & set(other.progress[other.progress > 0].tolist())


def test_training_sees_mirrored_images_where_the_task_allows_them():
    task = replace(few("cartpole"), mirrors=((2,),))
    [plain], [mirrored] = collect(few("cartpole"), "train", 0), collect(task, "train", 0)
    half = len(plain.images)
    assert np.array_equal(mirrored.images[half:], plain.images[:, :, ::-1])
    assert np.array_equal(mirrored.progress, np.tile(plain.progress, 2))
    assert np.array_equal(mirrored.frames, plain.frames)
    [held_out] = collect(task, "held_out", 0)
    assert len(held_out.images) <= 20
