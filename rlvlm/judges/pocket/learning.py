"""What every training of a pocket judge does: steps of optimisation, looking, the loss of an answer, saving."""

import copy
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from rlvlm.judges.pocket.batches import GRID, IGNORED, Batch
from rlvlm.judges.pocket.model import build_image_processor

_LOGGER = logging.getLogger(__name__)

Facts = dict[str, float]
StepLoss = Callable[[], tuple[Tensor, Facts]]


def optimise(
    name: str, num_steps: int, parameters: list[nn.Parameter], loss_of_step: StepLoss, *, lr: float, facts: Facts
) -> Iterator[int]:
    """Optimises `parameters` with AdamW and yields the number of each finished step, from 1.

    Args:
        name: of the phase, for the log.
        num_steps: how many.
        parameters: what learns.
        loss_of_step: gives a loss and what is to be told about it.
        lr: the highest step size; it warms up and falls to zero along a cosine.
        facts: takes running means of what the steps tell.
    """
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    start = time.monotonic()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * _ramp(step, num_steps)
        loss, facts_now = loss_of_step()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        facts |= {key: 0.95 * facts.get(key, value) + 0.05 * value for key, value in facts_now.items()}
        if step % 50 == 49 or step == num_steps - 1:
            _report(name, step + 1, num_steps, time.monotonic() - start, facts)
        yield step + 1


def look(model: Any, patches: Tensor) -> Tensor:
    """Visual tokens [B, layers, tokens, D] of `patches` [B, patches, values], the last layer's last."""
    grid = torch.tensor([[1, GRID, GRID]]).expand(len(patches), 3)
    seen = model.model.get_image_features(patches.flatten(0, 1), grid)
    return torch.stack([torch.stack(tuple(layer)) for layer in (*seen.deepstack_features, seen.pooler_output)], 1)


def answer_loss(model: Any, batch: Batch, seen: Tensor) -> tuple[Tensor, float]:
    """Cross-entropy of the answers, in nats per dialogue, and the share of answers that are right to the letter.

    Args:
        model: a pocket judge.
        batch: dialogues.
        seen: [N, layers, tokens, D] from `look`, of the pictures that the batch numbers.
    """
    hidden = model.model(
        input_ids=batch.ids, position_ids=batch.positions, mm_encoder_outputs=_shown(seen, batch.pictures)
    ).last_hidden_state
    targets = batch.targets[:, 1:]
    learned = targets != IGNORED
    logits = model.lm_head(hidden[:, :-1][learned])
    loss = functional.cross_entropy(logits, targets[learned], reduction="sum") / len(targets)
    wrong = torch.zeros_like(targets)
    wrong[learned] = (logits.argmax(-1) != targets[learned]).long()
    return loss, float((wrong.sum(1) == 0).float().mean())


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes model (bfloat16), tokenizer and picture processor as a Qwen3-VL folder; it appears whole or not at all."""
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    build_image_processor().save_pretrained(fresh)
    for file in fresh.iterdir():
        file.chmod(0o644)  # safetensors leaves its file readable by its maker alone
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _shown(seen: Tensor, pictures: Tensor) -> dict[str, BaseModelOutputWithDeepstackFeatures] | None:
    """What the language model gets to see of `pictures` [B, P], in the order in which the dialogues show them."""
    if pictures.shape[1] == 0:
        return None
    layers: Any = [(layer.flatten(0, 1),) for layer in seen[pictures.flatten()].unbind(1)]
    return {"image": BaseModelOutputWithDeepstackFeatures(pooler_output=layers[-1], deepstack_features=layers[:-1])}


def _ramp(step: int, num_steps: int) -> float:
    """Share of the highest step size: up within 50 steps (or a tenth), then down to zero along a cosine."""
    return min(1.0, (step + 1) / min(50, num_steps / 10)) * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def _report(name: str, step: int, num_steps: int, elapsed_s: float, facts: Facts) -> None:
    left_s = elapsed_s / step * (num_steps - step)
    words = " ".join(f"{key}={value:.3f}" for key, value in facts.items())
    _LOGGER.info("%s %d/%d, %.0f s, %.0f s left: %s", name, step, num_steps, elapsed_s, left_s, words)
