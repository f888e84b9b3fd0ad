"""Steps of optimisation, and dialogues about images as a Qwen3-VL takes them."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rlvlm.pocket.models import weights_folder
from rlvlm.vlms.config import VLMConfig
from rlvlm.vlms.loading import load_vlm
from rlvlm.vlms.supervised import IGNORED, DialogueBuilder, adamw, answer_loss, cosine, encode, optimise, patches_of


def test_step_sizes_worked_by_hand():
    assert [cosine(step, 100) for step in (0, 50)] == pytest.approx([0.1, 0.5])
    assert cosine(24, 1_000) == pytest.approx(0.5, abs=1e-3)  # 50 steps at most to warm up


def test_every_parameter_moves_and_follows_the_schedule():
    torch.manual_seed(0)
    layer, metrics = nn.Linear(3, 3), {}
    before = [each.detach().clone() for each in layer.parameters()]
    optimizers = [adamw([layer.weight], 0.2), adamw([layer.bias], 0.1)]

    def loss_of_step():
        loss = layer(torch.ones(2, 3)).square().mean()
        return loss, {"loss": float(loss.detach())}

    steps = optimise("test", 4, optimizers, loss_of_step, schedule=lambda step, _: 0.5**step, metrics=metrics)
    assert list(steps) == [1, 2, 3, 4] and metrics["loss"] > 0
    assert all(not torch.equal(old, new) for old, new in zip(before, layer.parameters(), strict=True))
    assert [group["lr"] for optimizer in optimizers for group in optimizer.param_groups] == [0.2 / 8, 0.1 / 8]


def test_images_encoded_apart_give_the_models_own_logits():
    """With padding on the right, and rotary positions as the model counts them for the images."""
    folder = weights_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = load_vlm(VLMConfig(model=str(folder))).processor
    frames = np.random.default_rng(0).integers(0, 256, (2, 96, 96, 3), np.uint8)
    chats = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}, {"type": "image"}]}]
        for text in ("First:", "a longer text than the other")
    ]
    images = np.array([[0, 1], [1, 0]])
    batch = DialogueBuilder(tokenizer, "<|image_pad|>", 9 * "<|image_pad|>").build(
        [(chats[0], "1"), (chats[1], "-1")], images
    )
    answers = [tokenizer.decode(row[row != IGNORED]) for row in batch.targets]
    assert answers == ["1<|im_end|>", "-1<|im_end|>"] and (batch.targets[0] == IGNORED).sum() > 20
    with torch.no_grad():
        loss, _ = answer_loss(model, batch, encode(model, patches_of(frames, processor.image_processor)))
        expected = 0.0
        for chat, answer, shown in zip(chats, answers, images, strict=True):
            text = processor.apply_chat_template(chat) + answer
            inputs = processor(text=[text], images=[list(frames[shown])])
            logits = model(**inputs).logits[0].log_softmax(-1)
            ids = inputs["input_ids"][0]
            size = len(tokenizer(answer).input_ids)
            expected -= logits[-size - 1 : -1].gather(1, ids[-size:, None]).sum().item()
    assert loss.item() == pytest.approx(expected / 2, abs=1e-4)
