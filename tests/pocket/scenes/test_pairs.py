from dataclasses import replace

import numpy as np
import pytest

from rlvlm.pocket.scenes.pairs import Scenes, draw_gap_pairs, draw_uniform_pairs, find_provider, label_of


def make_scenes(num_pictures=200, frames=None):
    images = np.zeros((num_pictures, 4, 4, 3), np.uint8)
    return Scenes(
        task="test",
        name="all",
        goal="open the drawer",
        phrase="the drawer is {percent}% open",
        images=images,
        progress=np.linspace(0, 1, num_pictures, dtype=np.float32),
        frames=np.arange(num_pictures) if frames is None else np.asarray(frames),
    )


def test_labels_of_pairs_worked_by_hand():
    assert label_of(0.30, 0.50) == 1
    assert label_of(0.50, 0.30) == 0
    assert label_of(0.50, 0.51) == label_of(0.51, 0.50) == -1
    assert label_of(0.50, 0.59, tie_gap=0.1) == -1
    assert label_of(0.50, 0.61, tie_gap=0.1) == 1


def test_uniform_pairs_follow_the_frames_and_never_show_one_image_twice():
    scenes = make_scenes(frames=[3, 3, 3, 3, 3, 3, 3, 7])
    pairs = draw_uniform_pairs(scenes, 50, np.random.default_rng(0))
    assert pairs.shape == (50, 2)
    assert {tuple(pair) for pair in pairs} == {(3, 7), (7, 3)}


def test_gap_pairs_have_about_the_gap_asked_for():
    scenes = make_scenes()
    gaps = np.linspace(-0.95, 0.95, 40, dtype=np.float32)
    pairs = draw_gap_pairs(scenes, gaps, np.random.default_rng(0))
    found = scenes.progress[pairs[:, 1]] - scenes.progress[pairs[:, 0]]
    assert np.abs(found - gaps).max() < 0.05


def test_images_of_one_progress_are_all_drawn():
    scenes = replace(make_scenes(4), progress=np.array([0, 0, 0, 1], np.float32))
    pairs = draw_gap_pairs(scenes, np.ones(200, np.float32), np.random.default_rng(0))
    assert {0, 1, 2} <= set(pairs[:, 0])
    assert set(pairs[:, 1]) == {3}


def test_frames_must_name_images():
    with pytest.raises(ValueError, match="images 0 to 199"):
        make_scenes(frames=[200])


@pytest.mark.parametrize("name", ["no.such.module:collect", "rlvlm.pocket.scenes.pairs:nothing", ""])
def test_a_provider_that_is_not_there_is_named(name):
    with pytest.raises(ValueError, match="scene provider"):
        find_provider(name)


def test_a_provider_is_found_by_name():
    assert find_provider("rlvlm.pocket.scenes.pairs:label_of") is label_of
