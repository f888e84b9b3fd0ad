"""Supervised training of a small Qwen3-VL on dialogues about images: what `rlvlm distill` and `pocket_models` share.

The vision encoder and the language model are run apart, so that an image that several dialogues show is encoded once.
"""

import copy
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from rlvlm.core.disk import replace_folder
from rlvlm.vlms.chats import Chat
from rlvlm.vlms.images import process
from rlvlm.vlms.processors import adds_begin

_LOGGER = logging.getLogger(__name__)

Metrics = dict[str, float]
StepLoss = Callable[[], tuple[Tensor, Metrics]]
Schedule = Callable[[int, int], float]
"""Step, from 0, and number of steps in; share of the highest step size out."""
IGNORED = -100
"""Marks tokens that are not learned."""
_ENCODED_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialogues:
    """Turns about equally many images each, padded on the right."""

    ids: Tensor
    """[B, N] tokens."""
    targets: Tensor
    """[B, N] the answer's tokens where they stand, `IGNORED` elsewhere."""
    images: Tensor
    """[B, P] which images each dialogue shows, in order."""


class DialogueBuilder:
    """Chats and answers to token ids.

    Args:
        tokenizer: of the model, with its chat template.
        image_token: what the template writes in the place of an image.
        image_text: what the model's processor makes of that: as many tokens as an image has, and marks around them.
    """

    def __init__(self, tokenizer: Any, image_token: str, image_text: str) -> None:
        self._tokenizer = tokenizer
        self._image = image_token
        self._image_text = image_text
        self._known: dict[str, list[int]] = {}

    def build(self, turns: Sequence[tuple[Chat, str]], images: NDArray[np.int64]) -> Dialogues:
        """The dialogues of `turns`, each a chat with the answer to be learned, about `images` [B, P]."""
        rows = []
        for chat, answer in turns:
            prompt = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            # as the processor does, without loading one: all images have one size here
            prompt = prompt.replace(self._image, self._image_text)
            begins = adds_begin(self._tokenizer, prompt)
            rows.append((self._ids(prompt, begins), self._ids(answer + self._tokenizer.eos_token)))
        ids = torch.full(
            (len(rows), max(len(prompt) + len(answer) for prompt, answer in rows)), self._tokenizer.pad_token_id
        )
        targets = torch.full_like(ids, IGNORED)
        for row, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor([*prompt, *answer])
            targets[row, len(prompt) : end] = torch.tensor(answer)
        return Dialogues(ids=ids, targets=targets, images=torch.from_numpy(images.copy()))

    def _ids(self, text: str, begins: bool = False) -> list[int]:
        if text not in self._known:  # prompts differ by the goal alone, so the same few come again and again
            self._known[text] = self._tokenizer(text, add_special_tokens=begins).input_ids
        return self._known[text]


def optimise(
    name: str,
    num_steps: int,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_of_step: StepLoss,
    *,
    schedule: Schedule,
    metrics: Metrics,
) -> Iterator[int]:
    """Optimises and yields the number of each finished step, from 1.

    Args:
        name: of the phase, for the log.
        num_steps: how many.
        optimizers: of what learns, each with its highest step size.
        loss_of_step: gives a loss and its metrics.
        schedule: share of the highest step size at each step.
        metrics: takes running means of the steps' metrics.
    """
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [parameter for group, _ in groups for parameter in group["params"]]
    start = time.monotonic()
    for step in range(num_steps):
        for group, lr in groups:
            group["lr"] = lr * schedule(step, num_steps)
        loss, latest = loss_of_step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        # a batch of odd scenes now and then has gradients a hundred times as large
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        # a running mean: the loss of one step says little
        metrics |= {key: 0.95 * metrics.get(key, value) + 0.05 * value for key, value in latest.items()}
        if step % 50 == 49 or step == num_steps - 1:
            elapsed_s = time.monotonic() - start
            left_s = elapsed_s / (step + 1) * (num_steps - step - 1)
            text = " ".join(f"{key}={value:.3f}" for key, value in metrics.items())
            _LOGGER.info("%s %d/%d, %.0f s, %.0f s left: %s", name, step + 1, num_steps, elapsed_s, left_s, text)
        yield step + 1


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Returns AdamW over `parameters`, for the highest step size `lr`."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)


def warm_up(step: int, num_steps: int) -> float:
    """A `Schedule`: up within 50 steps (or a tenth), then constant."""
    return min(1.0, (step + 1) / min(50, num_steps / 10))


def cosine(step: int, num_steps: int) -> float:
    """A `Schedule`: warm-up, then down to zero along a cosine."""
    return warm_up(step, num_steps) * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def jitter(patches: Tensor, rng: np.random.Generator) -> Tensor:
    """Patches [N, patches, values] with a little brightness and contrast of their own per image, float32."""
    contrast, brightness = (torch.from_numpy(rng.normal(mean, 0.03, (len(patches), 1, 1))).float() for mean in (1, 0))
    return patches * contrast + brightness


def patches_of(frames: NDArray[np.uint8], image_processor: Any) -> Tensor:
    """[N, patches, values] of `frames` [N, H, W, 3], as the vision encoder takes them."""
    pixels = process(list(frames), image_processor)["pixel_values"]
    return pixels.view(len(frames), -1, pixels.shape[-1])


def encode(model: Any, patches: Tensor) -> Tensor:
    """Visual tokens [B, layers, tokens, D] of square images' `patches` [B, patches, values], the last layer's last."""
    side = math.isqrt(patches.shape[1])
    grid = torch.tensor([[1, side, side]]).expand(len(patches), 3)
    encoded = model.model.get_image_features(patches.flatten(0, 1), grid)
    layers = (*encoded.deepstack_features, encoded.pooler_output)
    return torch.stack([torch.stack(tuple(layer)) for layer in layers], 1)


@torch.no_grad()
def encode_all(
    model: Any, frames: NDArray[np.uint8], image_processor: Any, rng: np.random.Generator | None = None
) -> Tensor:
    """Visual tokens [N, layers, tokens, D] of `frames` [N, H, W, 3], some at a time, jittered where `rng` is given."""
    parts = []
    for rows in np.array_split(np.arange(len(frames)), len(frames) // _ENCODED_AT_ONCE + 1):
        patches = patches_of(frames[rows], image_processor)
        parts.append(encode(model, patches if rng is None else jitter(patches, rng)))
    return torch.cat(parts)


def answer_loss(model: Any, batch: Dialogues, encoded: Tensor) -> tuple[Tensor, float]:
    """Cross-entropy of the answers, in nats per dialogue, and the share of answers that are right to the letter.

    Args:
        model: a small Qwen3-VL.
        batch: dialogues.
        encoded: [N, layers, tokens, D] visual tokens of the images that the batch numbers.
    """
    shown: dict[str, Any] = {}
    if batch.images.numel():
        is_image = batch.ids == model.config.image_token_id
        layers: Any = [(layer.flatten(0, 1),) for layer in encoded[batch.images.flatten()].unbind(1)]
        side = math.isqrt(encoded.shape[2]) * model.config.vision_config.spatial_merge_size
        shown = {  # the grids are for the rotary positions alone: encoded images are handed over as they are
            "mm_encoder_outputs": {
                "image": BaseModelOutputWithDeepstackFeatures(pooler_output=layers[-1], deepstack_features=layers[:-1])
            },
            "image_grid_thw": torch.tensor([[1, side, side]]).expand(batch.images.numel(), 3),
            "mm_token_type_ids": is_image.int(),
        }
    hidden = model.model(input_ids=batch.ids, **shown).last_hidden_state
    targets = batch.targets[:, 1:]
    # only the places of answers go through the output head, whose vocabulary is most of the work
    learned = targets != IGNORED
    logits = model.lm_head(hidden[:, :-1][learned])
    loss = functional.cross_entropy(logits, targets[learned], reduction="sum") / len(targets)
    wrong = torch.zeros_like(targets)
    # an answer is right to the letter or not at all: one wrong digit is another label
    wrong[learned] = (logits.argmax(-1) != targets[learned]).long()
    return loss, float((wrong.sum(1) == 0).float().mean())


def save(model: Any, tokenizer: Any, image_processor: Any, folder: Path) -> None:
    """Writes model (bfloat16), tokenizer and image processor as a Qwen3-VL folder; it appears whole or not at all."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    image_processor.save_pretrained(fresh)
    for file in fresh.iterdir():
        file.chmod(0o644)  # safetensors leaves its file readable by its maker alone
    replace_folder(fresh, folder)
