"""The pocket judge that ships, asked as any other judge: real forward passes on freshly drawn scenes."""

import numpy as np
import pytest
from metaworld.policies import SawyerDrawerOpenV3Policy
from safetensors import safe_open

from rlvlm.core.judging import Clip, Label, Query, Status
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.envs.registry import make_env
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.pocket.models import known_tasks, shipped_folder, weights_folder

EPISODE_SEED = 987_654
SWAPPED = {Label.LEFT: Label.RIGHT, Label.RIGHT: Label.LEFT, Label.TIE: Label.TIE}
MAX_BYTES = {"judge": 8_000_000, "scorer": 6_000_000, "video": 6_000_000, "policy": 8_000_000}


@pytest.fixture(scope="module")
def scene():
    """Images [N, 300, 300, 3] of an episode that no training has seen, with their progress [N]."""
    env = make_env("drawer_open", MetaWorldConfig(), EPISODE_SEED)
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


def test_direct_labels_are_right_and_swap_with_the_images(scene, pairs):
    queries, truth = pairs
    direct = build_judge(JudgeConfig(prompt="direct"))
    verdicts = direct.compare(queries)
    swapped = direct.compare([Query(goal=each.goal, left=each.right, right=each.left) for each in queries])
    assert sum(verdict.label is label for verdict, label in zip(verdicts, truth, strict=True)) >= 39
    assert sum(SWAPPED[one.label] is other.label for one, other in zip(verdicts, swapped, strict=True)) >= 39
    images, progress = scene
    assert progress[0] < 0.05 < 0.9 < progress[-1]
    closed_open, same = direct.compare(
        [Query(goal="open the drawer", left=images[[left]], right=images[[right]]) for left, right in ((0, -1), (9, 9))]
    )
    assert closed_open.label is Label.RIGHT and closed_open.probabilities[1] > 0.9
    assert same.status is Status.NO_PREFERENCE


@pytest.mark.parametrize("prompt", ["single_stage", "two_stage"])
def test_written_answers_are_right(pairs, prompt):
    queries, truth = pairs
    verdicts = build_judge(JudgeConfig(prompt=prompt)).compare(queries[:10])
    assert [verdict.label for verdict in verdicts] == truth[:10]
    assert all("the drawer is" in verdict.text for verdict in verdicts)


@pytest.mark.slow
def test_scores_are_near_the_progress(scene):
    images, progress = scene
    judge = build_judge(JudgeConfig(prompt="direct"))
    scores = judge.score([Clip(goal="open the drawer", frames=images[[place]]) for place in (0, 12, 23)])
    assert [score.value for score in scores] == pytest.approx(progress[[0, 12, 23]], abs=0.05)


@pytest.mark.parametrize("model", MAX_BYTES)
def test_weights_are_small_and_bfloat16_and_the_card_names_the_known_tasks(model):
    folder = weights_folder(model)
    assert shipped_folder(model) == folder and shipped_folder("nobody") is None and shipped_folder("..") is None
    assert sum(file.stat().st_size for file in folder.iterdir()) < MAX_BYTES[model]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}
    card = (folder.parent / "CARD.md").read_text()
    known = {task.partition("/")[0] for task in known_tasks(model)}
    assert all(task in card for task in known)
    assert bool(known) == (model != "policy")
