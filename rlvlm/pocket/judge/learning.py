"""What every training of a pocket judge does: steps of optimisation, looking, the loss of an answer, saving."""

import copy
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from rlvlm.core.disk import replace_folder
from rlvlm.pocket.judge.batches import GRID, IGNORED, Dialogues
from rlvlm.vlms.images import process

_LOGGER = logging.getLogger(__name__)

Facts = dict[str, float]
StepLoss = Callable[[], tuple[Tensor, Facts]]
Ramp = Callable[[int, int], float]
"""Step, from 0, and number of steps in; share of the highest step size out."""

_WARM_UP = 50
_SHOWN_AT_ONCE = 64
_FALL = 0.3
_MATRIX_LR = 2.0
"""Step size of matrices, as a multiple of everything else's."""


def optimise(
    name: str,
    num_steps: int,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_of_step: StepLoss,
    *,
    ramp: Ramp,
    facts: Facts,
) -> Iterator[int]:
    """Optimises and yields the number of each finished step, from 1.

    Args:
        name: of the phase, for the log.
        num_steps: how many.
        optimizers: of what learns, each with its highest step size.
        loss_of_step: gives a loss and what is to be told about it.
        ramp: share of the highest step size at each step.
        facts: takes running means of what the steps tell.
    """
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [parameter for group, _ in groups for parameter in group["params"]]
    start = time.monotonic()
    for step in range(num_steps):
        for group, lr in groups:
            group["lr"] = lr * ramp(step, num_steps)
        loss, facts_now = loss_of_step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        facts |= {key: 0.95 * facts.get(key, value) + 0.05 * value for key, value in facts_now.items()}
        if step % 50 == 49 or step == num_steps - 1:
            _report(name, step + 1, num_steps, time.monotonic() - start, facts)
        yield step + 1


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Returns AdamW over `parameters`, for the highest step size `lr`."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)


def muon_and_adamw(layers: nn.Module, others: Iterable[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
    """Returns Muon over the matrices of `layers` and AdamW over everything else: fewer steps from scratch than AdamW.

    Args:
        layers: transformer layers.
        others: parameters that learn too; those of `layers` may be among them.
        lr: AdamW's highest step size; the matrices' is twice that.

    Source: Jordan et al. 2024, Muon, as in torch, with step sizes made comparable to AdamW's (Liu et al. 2025,
    arXiv:2502.16982, sec. 2.2).
    """
    matrices = [module.weight for module in layers.modules() if isinstance(module, nn.Linear)]
    turned = {id(matrix) for matrix in matrices}
    rest = [parameter for parameter in others if id(parameter) not in turned]
    muon = torch.optim.Muon(matrices, lr=_MATRIX_LR * lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw(rest, lr)]


def vision_optimizers(model: Any, readers: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Those of the phase that trains the vision encoder, with what `readers` tell off the visual tokens."""
    visual = model.model.visual
    return muon_and_adamw(visual.blocks, [*visual.parameters(), *readers.parameters()], lr)


def language_optimizers(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Those of the phase that trains the language model on what the vision encoder, by then fixed, tells it."""
    language = model.model.language_model
    return muon_and_adamw(language.layers, [*language.parameters(), *model.lm_head.parameters()], lr)


def reading_loss(told: Tensor, values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """How well values are read off images.

    Args:
        told: [B, sum of sizes] logits of every choice of every value.
        values: [B, V] what there is to read, from 0.
        sizes: of each value, the number of its choices.

    Returns:
        Cross-entropies in nats, summed over values and divided by the root of their number; and [B, V] which were read
        rightly.
    """
    columns = list(zip(told.split(list(sizes), dim=1), values.unbind(1), strict=True))
    losses = [functional.cross_entropy(logits, wanted) for logits, wanted in columns]
    right = torch.stack([logits.argmax(1) == wanted for logits, wanted in columns], dim=1)
    return torch.stack(losses).sum() / len(losses) ** 0.5, right


def look(model: Any, patches: Tensor) -> Tensor:
    """Visual tokens [B, layers, tokens, D] of `patches` [B, patches, values], the last layer's last."""
    grid = torch.tensor([[1, GRID, GRID]]).expand(len(patches), 3)
    seen = model.model.get_image_features(patches.flatten(0, 1), grid)
    return torch.stack([torch.stack(tuple(layer)) for layer in (*seen.deepstack_features, seen.pooler_output)], 1)


def patches_of(frames: NDArray[np.uint8], processor: Any) -> Tensor:
    """[N, patches, values] of `frames` [N, H, W, 3], as `look` takes them."""
    pixels = process(list(frames), processor)["pixel_values"]
    return pixels.view(len(frames), -1, pixels.shape[-1])


@torch.no_grad()
def encode_all(model: Any, frames: NDArray[np.uint8], processor: Any) -> Tensor:
    """Visual tokens [N, layers, tokens, D] of `frames` [N, H, W, 3], some at a time."""
    starts = range(0, len(frames), _SHOWN_AT_ONCE)
    return torch.cat([look(model, patches_of(frames[at : at + _SHOWN_AT_ONCE], processor)) for at in starts])


def answer_loss(model: Any, batch: Dialogues, seen: Tensor) -> tuple[Tensor, float]:
    """Cross-entropy of the answers, in nats per dialogue, and the share of answers that are right to the letter.

    Args:
        model: a pocket judge.
        batch: dialogues.
        seen: [N, layers, tokens, D] from `look`, of the images that the batch numbers.
    """
    hidden = model.model(
        input_ids=batch.ids, position_ids=batch.positions, mm_encoder_outputs=_shown(seen, batch.images)
    ).last_hidden_state
    targets = batch.targets[:, 1:]
    learned = targets != IGNORED
    logits = model.lm_head(hidden[:, :-1][learned])
    loss = functional.cross_entropy(logits, targets[learned], reduction="sum") / len(targets)
    wrong = torch.zeros_like(targets)
    wrong[learned] = (logits.argmax(-1) != targets[learned]).long()
    return loss, float((wrong.sum(1) == 0).float().mean())


def save(model: Any, tokenizer: Any, processor: Any, folder: Path) -> None:
    """Writes model (bfloat16), tokenizer and image processor as a Qwen3-VL folder; it appears whole or not at all."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    processor.save_pretrained(fresh)
    for file in fresh.iterdir():
        file.chmod(0o644)  # safetensors leaves its file readable by its maker alone
    replace_folder(fresh, folder)


def _shown(seen: Tensor, pictures: Tensor) -> dict[str, BaseModelOutputWithDeepstackFeatures] | None:
    """What the language model gets to see of `pictures` [B, P], in the order in which the dialogues show them."""
    if pictures.shape[1] == 0:
        return None
    layers: Any = [(layer.flatten(0, 1),) for layer in seen[pictures.flatten()].unbind(1)]
    return {"image": BaseModelOutputWithDeepstackFeatures(pooler_output=layers[-1], deepstack_features=layers[:-1])}


def along_cosine(step: int, num_steps: int) -> float:
    """A `Ramp`: up within 50 steps (or a tenth), then down to zero along a cosine."""
    return _warm_up(step, num_steps) * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def hold_then_fall(step: int, num_steps: int) -> float:
    """A `Ramp`: up within 50 steps (or a tenth), held, and down to zero on a line over the last three tenths."""
    return min(_warm_up(step, num_steps), (num_steps - step) / (_FALL * num_steps))


def _warm_up(step: int, num_steps: int) -> float:
    return min(1.0, (step + 1) / min(_WARM_UP, num_steps / 10))


def _report(name: str, step: int, num_steps: int, elapsed_s: float, facts: Facts) -> None:
    left_s = elapsed_s / step * (num_steps - step)
    words = " ".join(f"{key}={value:.3f}" for key, value in facts.items())
    _LOGGER.info("%s %d/%d, %.0f s, %.0f s left: %s", name, step, num_steps, elapsed_s, left_s, words)
