"""The judge that has read English: what it is asked, in which words, and that its weights fit what is fetched."""

from itertools import islice, product

import numpy as np
import pytest
import torch
from tiny_gguf import write_tiny_gguf

from pocket_models import smollm_network as network
from pocket_models.scenes import TIE_GAP, Scenes
from pocket_models.smollm import WEIGHTS_FILE, SmolConfig, Trainer, _Stream
from pocket_models.smollm_data import Questions, build, dialogue_builder
from pocket_models.smollm_scenes import read_scenes, write_scenes
from pocket_models.words import FRAMES, WORDS
from rlvlm.envs.registry import task_goal

TASKS = ("drawer_open", "soccer")


def bars(task: str, num_images: int = 12) -> Scenes:
    progress = np.linspace(0, 1, num_images, dtype=np.float32)
    images = np.zeros((num_images, network.IMAGE_PX, network.IMAGE_PX, 3), np.uint8)
    for image, value in zip(images, progress, strict=True):
        image[32:64, : round(128 * float(value)), TASKS.index(task)] = 255
    return Scenes(
        task=task, name="bars", goal=task_goal(task), phrase="", images=images, progress=progress,
        success=progress > 0.9, frames=np.arange(num_images),
    )  # fmt: skip


@pytest.fixture(scope="module")
def questions() -> Questions:
    return Questions(scenes=[bars(task) for task in TASKS], words="taught")


def test_no_words_are_both_taught_and_tried():
    for name, words in WORDS.items():
        said = {share: {frame.format(goal=goal) for goal in getattr(words, share) for frame in FRAMES[share]}
                for share in FRAMES}  # fmt: skip
        assert words.taught and words.tried and not said["taught"] & said["tried"], name
        assert not words.undone_by or WORDS[words.undone_by].undone_by == name, name
    own = {name: task_goal(name) for name, words in WORDS.items() if words.is_scene and "push_block" not in name}
    assert {name: WORDS[name].taught[0] for name in own} == own  # what a run asks about is taught first


def test_answers_follow_from_scene_and_goal(questions):
    rng = np.random.default_rng(0)
    progress = np.tile(np.linspace(0, 1, 12), 2)
    cases = product(("pair", "success", "progress"), ("own", "undoing", "other", "noise"))
    for question in [question for form, case in cases for question in questions.draw(form, 40, rng, case)]:
        shown = progress[list(question.rows)] if question.case != "noise" else np.empty(0)
        if question.form == "pair" and question.case in ("own", "undoing"):
            gap = (shown[1] - shown[0]) * (1 if question.case == "own" else -1)
            assert question.answer == ("-1" if abs(gap) < TIE_GAP else str(int(gap > 0)))
        elif question.form == "success" and question.case == "own":
            assert question.answer == ("yes" if shown[-1] > 0.9 else "no")
        elif question.form == "success" and question.case == "undoing":
            assert question.answer == ("yes" if shown[-1] < TIE_GAP else "no")
        elif question.form == "progress" and question.case == "own":
            assert question.answer == str(round(100 * shown[-1]))
        elif question.case in ("other", "noise"):
            assert question.answer == {"pair": "-1", "success": "no", "progress": "0"}[question.form]
        # the goal is one of the task whose case it is
        task = WORDS[question.task].undone_by if question.case == "undoing" else question.task
        is_own = any(goal in question.goal for goal in WORDS[task].taught)
        assert is_own == (question.case != "other"), question
    assert {question.answer for question in questions.draw("success", 60, rng, "own")} == {"yes", "no"}


def test_scenes_come_back_from_a_file(tmp_path):
    drawn = bars("drawer_open")
    write_scenes(tmp_path / "a.npz", [("train", drawn), ("held_out", bars("soccer", 4))])
    (read,) = read_scenes([tmp_path], "train")
    assert (read.task, read.goal, read.share) == (drawn.task, drawn.goal, drawn.share)
    np.testing.assert_array_equal(read.success, drawn.success)
    assert np.abs(read.images.astype(int) - drawn.images).mean() < 3  # WebP loses a little
    assert len(read_scenes([tmp_path], "held_out")[0].images) == 4


@pytest.mark.slow
def test_trained_weights_fit_what_is_fetched(tmp_path, questions):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    write_scenes(tmp_path / "a.npz", [("train", bars(task)) for task in TASKS])
    config = SmolConfig(
        gguf=tmp_path / "tiny.gguf", scenes=(tmp_path,), out=tmp_path, seconds=0.1, batch=4, device="cpu"
    )
    trainer = Trainer(config)
    trainer.train()  # a step or two: how many hangs on the machine
    with torch.no_grad():
        for parameter in trainer._lora:  # as if it had learned for longer
            parameter.normal_(0, 0.3)
    (batch,) = islice(_Stream(questions, trainer._tokenizer, config), 1)
    metrics = trainer._step(batch, 1.0)
    assert metrics.keys() == {"read", *(f"{form}{end}" for form in batch for end in ("", "_right"))}
    trainer.save()
    model, processor = network.build(config.gguf)
    network.align(model, tmp_path / WEIGHTS_FILE)
    (asked,) = questions.draw("pair", 1, np.random.default_rng(0))
    frames = list(questions.frames[list(asked.rows)])
    chat = processor.apply_chat_template(asked.chat(), add_generation_prompt=True)
    inputs = processor(text=[chat], images=[frames], return_tensors="pt")
    ids = build([asked], dialogue_builder(processor.tokenizer)).ids
    assert inputs["input_ids"][0].tolist() == ids[0, : inputs["input_ids"].shape[1]].tolist()  # taught as it is asked
    # the merged model says what the trained one says, up to the 16 bits of the file
    merged, trained = (net.eval()(**inputs).logits.detach() for net in (model, trainer.model))
    bare = network.build(config.gguf)[0].eval()(**inputs).logits.detach()
    assert (merged - trained).abs().max() < 0.1 * (merged - bare).abs().max()
