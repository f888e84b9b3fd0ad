import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlvlm.pocket.judge.batches import GRID, DialogueBuilder, ScenePairs, rope_positions, to_patches
from rlvlm.pocket.judge.model import build_model
from rlvlm.pocket.judge.texts import TASKS, Topic, corpus, phrases
from rlvlm.pocket.judge.tokenizer import build_tokenizer
from rlvlm.pocket.judge.train import TrainConfig, Trainer
from rlvlm.pocket.scenes.pairs import Scenes

LONG = Topic(goal="lengthen the bar", phrase="the bar is {percent}% long")
TIES = np.full(2, 0.02)
SHORT = Topic(goal="make the white bar as short as possible", phrase="the bar is {percent}% gone")


def make_scenes(num_pictures=12, topic=LONG, share=1.0):
    """White bars whose length is the progress."""
    progress = np.linspace(0, 1, num_pictures, dtype=np.float32)
    images = np.zeros((num_pictures, 48, 48, 3), np.uint8)
    for image, value in zip(images, progress, strict=True):
        image[16:32, : round(48 * float(value))] = 255
    return Scenes(
        task=topic.goal,
        name="bars",
        goal=topic.goal,
        phrase=topic.phrase,
        images=images,
        progress=progress,
        frames=np.arange(num_pictures),
        share=share,
    )


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(corpus([LONG, SHORT]), phrases([LONG.phrase, SHORT.phrase]))


def train(folder, seeing_steps, talking_steps):
    config = TrainConfig(
        out=folder, num_pairs=3, talking_pairs=3, seeing_steps=seeing_steps, talking_steps=talking_steps
    )
    trainer = Trainer(config, [make_scenes(), make_scenes(topic=SHORT)])
    trainer.train()
    return trainer


def test_rope_positions_worked_by_hand():
    side = GRID // 2
    mask = torch.tensor([[False] + [True] * side**2 + [False]])
    positions = rope_positions(mask)[:, 0]
    assert positions[:, 0].tolist() == [0, 0, 0]
    assert positions[:, 1].tolist() == [1, 1, 1]  # upper left visual token
    assert positions[:, side**2].tolist() == [1, side, side]  # lower right one
    assert positions[:, -1].tolist() == [1 + side] * 3


@pytest.mark.parametrize("task", TASKS)
def test_rope_positions_are_those_of_the_model(tokenizer, task):
    model = build_model(tokenizer).model
    batch = DialogueBuilder(tokenizer).batch(
        task, [LONG, SHORT], np.array([[0.1, 0.9], [1.0, 0.05]], np.float32), np.array([[0, 1], [1, 0]]), TIES
    )
    is_visual = (batch.ids == model.config.image_token_id).int()
    grid = torch.tensor([[1, GRID, GRID]]).expand(batch.images.numel(), 3)
    expected, _ = model.get_rope_index(batch.ids, is_visual, image_grid_thw=grid)
    assert torch.equal(batch.positions, expected)


def test_pairs_show_one_set_up_of_one_task_as_often_as_its_share_says():
    scenes = ScenePairs([make_scenes(12), make_scenes(20, SHORT, share=3.0)])
    assert scenes.topics == [LONG, SHORT]
    pairs = scenes.draw_pairs(400, np.random.default_rng(0))
    topics = [[scenes.topic_of(image) for image in pair] for pair in pairs]
    assert all(left == right for left, right in topics)
    assert np.mean([left == SHORT for left, _ in topics]) == pytest.approx(0.75, abs=0.07)
    assert scenes.task_of(11) == LONG.goal
    assert scenes.task_of(12) == SHORT.goal
    assert scenes.progress(np.array([11, 12, 31])).tolist() == [1.0, 0.0, 1.0]


def test_training_images_are_kept_as_the_processor_makes_them():
    pairs, scenes = ScenePairs([make_scenes(3)]), make_scenes(3)
    seen = torch.stack([pairs.patches(np.arange(3), np.random.default_rng(seed)) for seed in range(200)]).mean(0)
    assert torch.allclose(seen, to_patches(scenes.images).float(), atol=0.02)


def test_the_drawn_images_are_let_go():
    scenes = make_scenes(3)
    images = weakref.ref(scenes.images)
    pairs = ScenePairs(iter([scenes]))
    del scenes
    assert images() is None
    assert len(pairs) == 3


def test_only_answers_are_learned(tokenizer):
    batch = DialogueBuilder(tokenizer).batch(
        "single_stage", [LONG, SHORT], np.array([[0.1, 0.9], [1.0, 1.0]], np.float32), np.array([[0, 1], [1, 1]]), TIES
    )
    learned = batch.targets >= 0
    assert torch.equal(batch.targets[learned], batch.ids[learned])
    answers = [tokenizer.decode(row[row >= 0]) for row in batch.targets]
    assert answers == [
        "First: the bar is 10% long. Second: the bar is 90% long. The second is nearer to the goal.\n1<|im_end|>",
        "First: the bar is 100% gone. Second: the bar is 100% gone. There is no clear difference.\n-1<|im_end|>",
    ]


def test_a_gap_below_the_tie_gap_is_taught_as_no_difference(tokenizer):
    progress, images = np.array([[0.0, 0.5], [0.0, 0.5]], np.float32), np.array([[0, 1], [0, 1]])
    batch = DialogueBuilder(tokenizer).batch("direct", [LONG, LONG], progress, images, np.array([0.4, 0.6]))
    assert [tokenizer.decode(row[row >= 0]) for row in batch.targets] == ["1<|im_end|>", "-1<|im_end|>"]


def test_patches_are_what_the_model_takes(tokenizer):
    patches = to_patches(make_scenes(3).images)
    assert patches.shape == (3, GRID**2, build_model(tokenizer).model.visual.patch_embed.proj.weight[0].numel())


@pytest.mark.slow
def test_training_reduces_the_loss_and_repeats_itself(tmp_path):
    first = train(tmp_path / "first", seeing_steps=1, talking_steps=1).facts
    longer = train(tmp_path / "longer", seeing_steps=50, talking_steps=20).facts
    again = train(tmp_path / "again", seeing_steps=50, talking_steps=20).facts
    assert longer["seeing"]["loss"] < 0.8 * first["seeing"]["loss"]
    assert longer["talking"]["direct"] < 0.8 * first["talking"]["direct"]
    assert longer == again
    weights, same = (load_file(tmp_path / name / "model.safetensors") for name in ("longer", "again"))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert all(weight.dtype is torch.bfloat16 for weight in weights.values())


def test_saved_weights_replace_the_old_folder_as_a_whole(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale.txt").write_text("old")
    train(tmp_path / "out", seeing_steps=1, talking_steps=1)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
