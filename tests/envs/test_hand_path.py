"""The path of the hand: where each family draws it, what is refused, and that no question mixes the two."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.playing import Style, play, player_of
from rlvlm.envs.hand_path import paint_path, project
from rlvlm.envs.images import FrameStore
from rlvlm.envs.registry import make_env, task_env
from rlvlm.judge_bench.asking import _draw
from rlvlm.judge_bench.suites import Suite
from rlvlm.judge_bench.task_items import make_items
from rlvlm.preferences.teachers import draw_sides
from rlvlm.reports.judge_bench import bench_judge
from rlvlm.reports.options import BenchOptions
from rlvlm.rewards.scoring_items import ScoringItem
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.runs.start.preflight import check_before_run
from tests.tiny_episodes import tiny_episodes


def opened(task: str, **settings: Any) -> Any:
    return make_env(task, replace(task_env(task), draw_path=True, **settings).for_model(is_pocket=True), 0)


def test_a_line_by_hand():
    image = np.full((100, 200, 3), 50, np.uint8)
    painted = paint_path(image, np.array([[0.1, 0.5], [np.nan, 0.2], [0.5, 0.5], [0.9, 0.5], [0.9, 1.4]], np.float32))
    assert (image == 50).all(), "a copy"
    changed = (painted != 50).any(-1)
    assert changed[48:52, 110:170].all(axis=1).any() and not changed[:, :95].any(), "broken where nothing is known"
    assert changed[60:, 179].all(), "it leaves the image"
    first, last = painted[49, 110].astype(int), painted[90, 179].astype(int)
    assert first[0] > last[0] and first[1] < last[1], "purple to cyan"
    # a camera 2 m above the table that looks down, with 90 degrees: 1 m to the right is half the half image
    seen = project(np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 3]]), np.array([0, 0, 2.0]), np.eye(3), 90)
    np.testing.assert_allclose(seen[:2], [[0.75, 0.5], [0.5, 0.25]])
    assert np.isnan(seen[2]).all()


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("push_block", {}),
        ("empty_random_6x6", {}),
        ("drawer_open", {"robot": "visible"}),
        pytest.param("fold_cloth", {}, marks=pytest.mark.slow),
        pytest.param("pass_water", {}, marks=pytest.mark.slow),
        pytest.param("pick_place_can", {"second_view": True}, marks=pytest.mark.slow),
        pytest.param("libero_spatial/0", {}, marks=pytest.mark.slow),
    ],
)
def test_the_end_of_the_path_is_where_the_image_changes_when_the_hand_moves(task, settings):
    env = opened(task, **settings)
    episode = play(env, 3, player_of(env, 3, Style(), None))
    assert episode is not None and env.draws_path
    snapshots = episode.snapshots[:25]
    path, image = env.hand_path(snapshots), env.draw_sized(snapshots[-1:], 128)[0]
    assert path.shape == (len(snapshots), 2) and ((0 <= path[-1]) & (path[-1] <= 1)).all()
    # what differs between the first and the last image is, in the middle, near the way between the path's ends
    moved = np.abs(env.draw_sized(snapshots[:1], 128)[0].astype(int) - image).sum(-1) > 60
    rows, columns = np.nonzero(moved)
    y, x = path[-1][::-1] * image.shape[:2]
    assert np.hypot(rows - y, columns - x).min() < 12, "the hand is there"
    assert (env.draw_path(image, snapshots) != image).any()
    assert env.image_key(snapshots).shape[0] == len(snapshots)
    env.close()


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        ("cartpole", {"env.draw_path": True}, "CartPole .* does not know where a hand is"),
        ("number_line", {"env.draw_path": True, "reward.source": "judged", "judge.score": "utility"}, "NumberLine"),
        ("pick_place_can", {"env.draw_path": True}, "env.draw_path needs env.second_view"),
        ("drawer_open", {"env.draw_path": True, "reward.source": "judged", "judge.score": "progress"}, "scores each"),
    ],
)
def test_an_undrawable_path_is_refused_by_name_before_anything_starts(task, settings, words):
    base = recipe(task)
    if task == "pick_place_can":
        settings = {"env.second_view": False} | settings
    with pytest.raises((UsageError, ValueError), match=words):
        check_before_run(override(base, settings))


def test_a_path_is_another_question():
    snapshots = np.zeros((2, 10), np.float32)
    item = ScoringItem(goal="go", snapshots=snapshots, is_success=None, progress=0.0)
    longer = replace(item, path=np.ones((3, 10), np.float32))
    assert len({item.key, longer.key, replace(item, path=np.ones((4, 10), np.float32)).key}) == 3


def test_a_judge_of_pairs_sees_the_path_on_the_last_image_alone():
    episode = tiny_episodes(1)[0]
    segment = episode.segment(2, 2, path_moments=16)
    assert segment.path.shape == (16, episode.snapshots.shape[1])
    np.testing.assert_array_equal(segment.path[:13], episode.snapshots[:1].repeat(13, axis=0))
    np.testing.assert_array_equal(segment.path[12:], episode.snapshots[:4])
    env = opened("push_block")
    rng = np.random.default_rng(0)
    tables = np.stack([env.reset(seed=int(seed))[0].snapshots[0] for seed in rng.integers(9, size=4)])
    plain = replace(segment, snapshots=tables[2:], path=np.empty((0, 0), np.float32))
    store = FrameStore(env, 64)
    assert store.path_moments == 16
    [[without]], [[drawn]] = (draw_sides([each], store) for each in (plain, replace(plain, path=tables)))
    np.testing.assert_array_equal(drawn[0], without[0])
    np.testing.assert_array_equal(drawn[1], env.draw_path(without[1], tables))
    assert (drawn[1] != without[1]).any()


def test_a_bench_paints_each_sides_own_path_on_its_last_image(tmp_path):
    suite = Suite(name="x", tasks=("push_block",), episodes=6, pairs=4, videos=2, controls=1, tracks=1)
    shown = []
    for draws in (False, True):
        made = make_items(suite, "push_block", replace(task_env("push_block"), draw_path=draws), 32, 0, False)
        asked = [(item, item.kind == "pair") for item in made.items if not item.change]
        shown.append([side for sides in _draw(made, asked, 4) for side in sides])
        assert (made.paint is not None) == draws
    # with its sides exchanged, a pair shows the right one first
    pair = next(item for item, _ in asked if item.kind == "pair")
    env = opened("push_block")
    image = env.draw(pair.sides[1][-1:], 32)[0]
    index = [item for item, _ in asked].index(pair)
    sides = _draw(made, asked[index : index + 1], 4)[0]
    np.testing.assert_array_equal(sides[0][-1], env.draw_path(image, pair.paths[1]))
    for plain, painted in zip(*shown, strict=True):
        np.testing.assert_array_equal(plain[:-1], painted[:-1])
        assert (plain[-1] != painted[-1]).any()
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text("{}")
    refused: list[tuple[str, dict[str, Any], str]] = [
        (str(tmp_path), {}, "is recorded, and its images do not say where the hand is"),
        ("push_block", {"reference": "oracle"}, "sees no image"),
        ("pick_place_can", {}, "needs env.second_view"),
        ("cartpole", {}, "does not know where a hand is"),
    ]
    for suite_name, options, words in refused:
        with pytest.raises(UsageError, match=words):
            bench_judge(BenchOptions(suite=suite_name, out=tmp_path / "out", draw_path=True, **options))
