"""The shipped weights, through the same door as any other judge: real forward passes on freshly drawn scenes."""

import numpy as np
import pytest
from metaworld.policies import SawyerDrawerOpenV3Policy
from safetensors import safe_open

from rlvlm.core.judging import Clip, Label, Query, Status
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.pocket.judge.texts import TASKS, messages, report
from rlvlm.vlms.loading import load_vlm
from rlvlm.vlms.shipped import weights_folder

EPISODE_SEED = 987_654
SWAPPED = {Label.LEFT: Label.RIGHT, Label.RIGHT: Label.LEFT, Label.TIE: Label.TIE}


@pytest.fixture(scope="module")
def scene():
    """Images [N, 300, 300, 3] of an episode that no training has seen, with their progress [N]."""
    env = make_env("drawer_open", EnvConfig(), EPISODE_SEED)
    policy, rng = SawyerDrawerOpenV3Policy(), np.random.default_rng(EPISODE_SEED)
    obs, info = env.reset(seed=EPISODE_SEED)
    snapshots, progress = [info["snapshot"]], [info["progress"]]
    for _ in range(80):
        action = policy.get_action(obs.astype(np.float64)) + 0.2 * rng.standard_normal(4)
        obs, _, _, _, info = env.step(np.clip(action, -1, 1).astype(np.float32))
        snapshots.append(info["snapshot"])
        progress.append(info["progress"])
    order = np.argsort(progress)
    kept = order[np.searchsorted(np.asarray(progress)[order], np.linspace(0, max(progress), 24))]
    images = env.draw(np.stack(snapshots)[kept], 300)
    env.close()
    return images, np.asarray(progress)[kept]


@pytest.fixture(scope="module")
def pairs(scene):
    """40 pairs with a gap of at least 0.2, as queries and true labels."""
    images, progress = scene
    drawn = np.random.default_rng(0).integers(len(progress), size=(400, 2))
    easy = [pair for pair in drawn if abs(progress[pair[0]] - progress[pair[1]]) > 0.2][:40]
    queries = [Query(goal="open the drawer", left=images[[left]], right=images[[right]]) for left, right in easy]
    return queries, [Label.RIGHT if progress[right] > progress[left] else Label.LEFT for left, right in easy]


def judge(prompt):
    return build_judge(JudgeConfig(prompt=prompt))


@pytest.mark.slow
def test_an_open_drawer_is_nearer_to_the_goal_than_a_closed_one(scene):
    images, progress = scene
    assert progress[0] < 0.05 < 0.9 < progress[-1]
    [verdict] = judge("direct").compare([Query(goal="open the drawer", left=images[:1], right=images[-1:])])
    assert verdict.label is Label.RIGHT
    assert verdict.probabilities[1] > 0.9


def test_direct_labels_are_right_and_swap_with_the_images(pairs):
    queries, truth = pairs
    direct = judge("direct")
    verdicts = direct.compare(queries)
    swapped = direct.compare([Query(goal=each.goal, left=each.right, right=each.left) for each in queries])
    assert sum(verdict.label is label for verdict, label in zip(verdicts, truth, strict=True)) >= 39
    assert sum(SWAPPED[one.label] is other.label for one, other in zip(verdicts, swapped, strict=True)) >= 39


@pytest.mark.parametrize("prompt", ["single_stage", "two_stage"])
def test_written_answers_are_right(pairs, prompt):
    queries, truth = pairs
    verdicts = judge(prompt).compare(queries[:10])
    assert [verdict.label for verdict in verdicts] == truth[:10]
    assert all("the drawer is" in verdict.text for verdict in verdicts)


def test_one_image_twice_is_no_difference(scene):
    images, _ = scene
    [verdict] = judge("direct").compare([Query(goal="open the drawer", left=images[9:10], right=images[9:10])])
    assert verdict.status is Status.NO_PREFERENCE


@pytest.mark.slow
def test_scores_are_near_the_progress(scene):
    images, progress = scene
    scores = judge("direct").score([Clip(goal="open the drawer", frames=images[[place]]) for place in (0, 12, 23)])
    assert [score.value for score in scores] == pytest.approx(progress[[0, 12, 23]], abs=0.05)


def test_the_weights_are_small_and_bfloat16():
    file = weights_folder() / "model.safetensors"
    assert file.stat().st_size <= 8 * 2**20
    with safe_open(file, "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}


@pytest.mark.parametrize("task", TASKS)
def test_the_prompts_are_still_those_of_the_training(task):
    """Words that the tokenizer does not hold as phrases were not trained on: train anew after a change of prompts."""
    processor = load_vlm(JudgeConfig(model=str(weights_folder()))).processor
    told = report("the drawer is {percent}% open", 0.37, 0.9, 1)
    chat = processor.apply_chat_template(messages(task, "open the drawer", told))
    assert len(processor.tokenizer(chat).input_ids) <= 26
