"""What the pocket video judge learns: what is read in a frame, and which answer is right."""

from dataclasses import replace

import numpy as np
from tiny_clips import MILK, SOUP, make_clips

from pocket_models.video import MOMENTS, Clips, VideoDataset, readable_places


def test_places_are_read_in_bins_with_the_target_that_a_thing_is_at():
    # by hand: 0 lies in the middle of 15 bins, the eighth; 0.3 m is (0.3 + 0.45) / 0.06 = 12.5, the thirteenth
    places = [[0.0, 0.0, 0.1], [0.3, -9.0, 0.0], [np.nan] * 3, [0.06, -0.06, 0.0], [np.nan] * 3, [0.3, -8.95, 0.4]]
    shown = replace(
        make_clips(2),
        places=np.broadcast_to(np.array(places, np.float32), (2, MOMENTS, 6, 3)),
        things=("soup", "milk", "mug", "basket", "stove", "tray"),
        targets=("tray", "basket", "stove"),
    )
    values, sizes = readable_places(shown)
    assert values.shape == (2, MOMENTS, 18)
    soup, milk, basket, tray = [8, 8, 3], [13, 1, 2], [9, 7, 1], [13, 1, 1]  # at the basket, at the tray, at none
    assert values[1, 3].tolist() == [*soup, *milk, 0, 0, 0, *basket, 0, 0, 0, *tray]
    assert (values.reshape(-1, 18).max(axis=0) < sizes).all()


def test_every_other_instruction_of_two_is_one_of_the_same_suite():
    """Where the scene is the same, only the words tell what is wanted."""
    near, far = "put the mug on the plate", "open the drawer"
    shown = replace(
        make_clips(),
        tasks=("libero_object/0", "libero_object/7", "libero_goal/8", "libero_goal/0"),
        instructions=(SOUP, MILK, near, far),
        success=np.array([True, True, False, False]),
    )
    data, rng = VideoDataset(shown), np.random.default_rng(0)
    asked = [data.draw_question(2, rng) for _ in range(2000)]
    firsts = [one for one in asked if one.images[0] < 2 * MOMENTS]
    others = [first.goal for first in firsts if first.goal != shown.instructions[first.images[0] // MOMENTS]]
    in_suite = sum(goal in {SOUP, MILK} for goal in others) / len(others)
    assert 0.8 < in_suite < 0.94  # four fifths, and a third of the rest


def test_only_the_end_of_a_success_is_one_and_only_of_its_own_task():
    shown = make_clips()
    whole = np.arange(MOMENTS)
    assert shown.question(0, whole, SOUP).answer == "yes"
    for row, moments, goal in ((0, whole[::-1], SOUP), (0, whole[:5], SOUP), (0, whole, MILK), (2, whole, SOUP)):
        assert shown.question(row, moments, goal).answer == "no"
    assert shown.question(1, whole[[0, -1]], MILK).images == (MOMENTS, 2 * MOMENTS - 1)
    data, rng = VideoDataset(shown), np.random.default_rng(0)
    answers = [data.draw_question(4, rng).answer for _ in range(400)]
    assert 0.15 < answers.count("yes") / 400 < 0.35  # half of .8 x .85 x .7


def test_clips_are_kept_whole(tmp_path):
    shown = make_clips()
    shown.save(tmp_path / "clips.npz")
    again = Clips.load(tmp_path / "clips.npz")
    for name in ("things", "targets", "tasks", "instructions"):
        assert getattr(again, name) == getattr(shown, name)
    for name in ("frames", "places", "success"):
        np.testing.assert_array_equal(getattr(again, name), getattr(shown, name))
    assert again.of_suite("libero_goal").instructions == (MILK, MILK)
    np.testing.assert_array_equal(again.of_suite("libero_goal").frames, shown.frames[1::2])
