"""Trains the pocket judge from scratch: `python -m rlvlm.judges.pocket.train`.

First the eyes: every visual token learns to tell the progress. Then the language model learns to score, describe and
compare what the eyes tell it, on the dialogues of `texts`. Everything random hangs on the seed.
"""

import copy
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures
from transformers.utils.logging import disable_progress_bar

from rlvlm.judges.pocket import weights_folder
from rlvlm.judges.pocket.batches import GRID, IGNORED, Album, Batch, Lessons
from rlvlm.judges.pocket.model import build_image_processor, build_model
from rlvlm.judges.pocket.scenes import Scenes, find_provider
from rlvlm.judges.pocket.texts import Task, corpus, phrases
from rlvlm.judges.pocket.tokenizer import build_tokenizer

_LOGGER = logging.getLogger(__name__)
_PERCENTS = 101

Facts = dict[str, float]
StepLoss = Callable[[], tuple[Tensor, Facts]]
SHARES: dict[Task, float] = {"direct": 1.0, "single_stage": 0.5, "two_stage": 0.5, "label": 0.4, "score": 0.3}
"""Pairs asked about in each way, as a share of `TrainConfig.num_pairs`; each is asked in both orders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the pocket judge is made."""

    out: Path = weights_folder()
    """Folder of the finished weights; replaced as a whole."""
    scenes: str = "rlvlm.experiments.scenes:drawer_open"
    """Scene provider, `module:function`."""
    seed: int = 0
    """Of scenes, weights and batches."""
    seeing_steps: int = 500
    """Steps that train the eyes alone."""
    talking_steps: int = 1_500
    """Steps that train the language model on what the eyes, by then fixed, tell it."""
    num_pairs: int = 24
    """Pairs of pictures per step; each is asked about in several ways."""
    lr: float = 1e-3
    """AdamW's highest step size; it warms up and falls to zero along a cosine, once per phase."""
    threads: int = 1
    """CPU threads; more are no faster on a machine that is shared."""
    save_every_steps: int = 250
    """Steps between saves while talking, so that a run that is cut short leaves weights."""


class Eyes(nn.Module):
    """What each visual token tells about its picture's progress; used in training only, never shipped.

    Args:
        width: size of a visual token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.amount = nn.Linear(width, 1)
        self.percent = nn.Linear(width, _PERCENTS)

    def forward(self, tokens: Tensor, progress: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss and the mean absolute error of the progress.

        Args:
            tokens: [B, ..., D] visual tokens of every layer that the language model gets to see.
            progress: [B] in [0, 1].
        """
        tokens = tokens.flatten(1, -2)
        amount = self.amount(tokens).squeeze(-1)
        places = torch.arange(_PERCENTS) / (_PERCENTS - 1)
        soft = torch.softmax(-(((places - progress[:, None]) / 0.01) ** 2), dim=-1)  # [B, 101]
        surprise = -(soft[:, None] * torch.log_softmax(self.percent(tokens), dim=-1)).sum(-1).mean()
        error = amount - progress[:, None]
        return 10 * error.square().mean() + 0.3 * surprise, error.mean(1).abs().mean()


class Trainer:
    """One run: model, data and the loss of a step.

    Args:
        config: how.
        scenes: what the judge sees; goal and phrase are those of the first.
    """

    def __init__(self, config: TrainConfig, scenes: Sequence[Scenes]) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        goal, phrase = scenes[0].goal, scenes[0].phrase
        self.tokenizer = build_tokenizer(corpus(goal, phrase), phrases([phrase]))
        self.model: Any = build_model(self.tokenizer)
        self.eyes = Eyes(self.model.config.text_config.hidden_size)
        self._album = Album(scenes)
        self._lessons = Lessons(goal, phrase, self.tokenizer)
        self._rng = np.random.default_rng(config.seed)
        self.facts: dict[str, Facts] = {}
        """Running means of losses and accuracies, per phase."""

    def train(self) -> None:
        """Both phases; the finished weights lie in `config.out`."""
        sight = [*self.model.model.visual.parameters(), *self.eyes.parameters()]
        for _ in self._steps("seeing", self.config.seeing_steps, sight, self._seeing_loss):
            pass
        self._seen = self._look_at_all()
        speech = [*self.model.model.language_model.parameters(), *self.model.lm_head.parameters()]
        for step in self._steps("talking", self.config.talking_steps, speech, self._talking_loss):
            if step % self.config.save_every_steps == 0 or step == self.config.talking_steps:
                save(self.model, self.tokenizer, self.config.out)

    def _steps(
        self, name: str, num_steps: int, parameters: list[nn.Parameter], loss_of_step: StepLoss
    ) -> Iterator[int]:
        """Optimises `parameters`; yields the number of each finished step."""
        optimizer = torch.optim.AdamW(parameters, lr=self.config.lr, betas=(0.9, 0.98), weight_decay=0.01)
        start, facts = time.monotonic(), self.facts.setdefault(name, {})
        for step in range(num_steps):
            for group in optimizer.param_groups:
                group["lr"] = self.config.lr * _ramp(step, num_steps)
            loss, facts_now = loss_of_step()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            facts |= {key: 0.95 * facts.get(key, value) + 0.05 * value for key, value in facts_now.items()}
            if step % 50 == 49 or step == num_steps - 1:
                _report(name, step + 1, num_steps, time.monotonic() - start, facts)
            yield step + 1

    def _seeing_loss(self) -> tuple[Tensor, Facts]:
        pictures = self._album.draw_pairs(self.config.num_pairs, self._rng).ravel()
        features = self._look(self._album.patches(pictures, self._rng))
        progress = torch.from_numpy(self._album.progress(pictures))
        loss, error = self.eyes(features, progress)
        return loss, {"loss": float(loss.detach()), "off_by": float(error.detach())}

    def _look(self, patches: Tensor) -> Tensor:
        """Visual tokens [B, layers, tokens, D] of `patches` [B, patches, values], the last layer's last."""
        grid = torch.tensor([[1, GRID, GRID]]).expand(len(patches), 3)
        seen = self.model.model.get_image_features(patches.flatten(0, 1), grid)
        return torch.stack([torch.stack(tuple(layer)) for layer in (*seen.deepstack_features, seen.pooler_output)], 1)

    @torch.no_grad()
    def _look_at_all(self) -> Tensor:
        """Visual tokens [N, layers, tokens, D] of the whole album; the eyes no longer change."""
        places = np.arange(len(self._album))
        chunks = np.array_split(places, len(places) // 64 + 1)
        return torch.cat([self._look(self._album.patches(chunk, self._rng)) for chunk in chunks])

    def _talking_loss(self) -> tuple[Tensor, Facts]:
        loss, facts = torch.zeros(()), {}
        for task, share in SHARES.items():
            pairs = self._album.draw_pairs(max(1, round(share * self.config.num_pairs)), self._rng)
            pairs = np.concatenate([pairs, pairs[:, ::-1]])
            batch = self._lessons.batch(task, self._album.progress(pairs), pairs)
            task_loss, right = self._answer_loss(batch)
            loss = loss + task_loss
            facts |= {task: float(task_loss.detach()), f"{task}_right": right}
        return loss, facts

    def _answer_loss(self, batch: Batch) -> tuple[Tensor, float]:
        """Cross-entropy of the answers, in nats per dialogue, and the share of answers that are right to the letter."""
        hidden = self.model.model(
            input_ids=batch.ids, position_ids=batch.positions, mm_encoder_outputs=self._shown(batch.pictures)
        ).last_hidden_state
        targets = batch.targets[:, 1:]
        learned = targets != IGNORED
        logits = self.model.lm_head(hidden[:, :-1][learned])
        loss = functional.cross_entropy(logits, targets[learned], reduction="sum") / len(targets)
        wrong = torch.zeros_like(targets)
        wrong[learned] = (logits.argmax(-1) != targets[learned]).long()
        return loss, float((wrong.sum(1) == 0).float().mean())

    def _shown(self, pictures: Tensor) -> dict[str, BaseModelOutputWithDeepstackFeatures] | None:
        """What the language model gets to see of `pictures` [B, P], in the order in which the dialogues show them."""
        if pictures.shape[1] == 0:
            return None
        layers: Any = [(layer.flatten(0, 1),) for layer in self._seen[pictures.flatten()].unbind(1)]
        return {"image": BaseModelOutputWithDeepstackFeatures(pooler_output=layers[-1], deepstack_features=layers[:-1])}


def _ramp(step: int, num_steps: int) -> float:
    """Share of the highest step size: up within 50 steps (or a tenth), then down to zero along a cosine."""
    return min(1.0, (step + 1) / min(50, num_steps / 10)) * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def _report(name: str, step: int, num_steps: int, elapsed_s: float, facts: Facts) -> None:
    left_s = elapsed_s / step * (num_steps - step)
    words = " ".join(f"{key}={value:.3f}" for key, value in facts.items())
    _LOGGER.info("%s %d/%d, %.0f s, %.0f s left: %s", name, step, num_steps, elapsed_s, left_s, words)


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


def main() -> None:
    """Collects scenes and trains."""
    disable_progress_bar()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = tyro.cli(TrainConfig, description=__doc__)
    torch.set_num_threads(config.threads)
    scenes = find_provider(config.scenes)("train", config.seed)
    for each in scenes:
        _LOGGER.info("%s: %d pictures from %d frames", each.name, len(each.pictures), len(each.frames))
    Trainer(config, scenes).train()


if __name__ == "__main__":
    main()
