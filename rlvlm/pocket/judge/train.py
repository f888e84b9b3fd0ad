"""Trains the pocket judge from scratch: `python -m rlvlm.pocket.judge.train`.

First the vision encoder: every visual token learns to tell the progress. Then the language model learns to score,
describe and compare what the vision encoder tells it, on the dialogues of `texts`. Everything random hangs on the
seed.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from rlvlm.pocket.judge.batches import DialogueBuilder, ScenePairs
from rlvlm.pocket.judge.learning import (
    Facts,
    StepLoss,
    answer_loss,
    hold_then_fall,
    language_optimizers,
    look,
    optimise,
    save,
    vision_optimizers,
)
from rlvlm.pocket.judge.model import build_image_processor, build_model
from rlvlm.pocket.judge.texts import Task, corpus, phrases
from rlvlm.pocket.judge.tokenizer import build_tokenizer
from rlvlm.pocket.scenes.pairs import TIE_GAP, Scenes, find_provider
from rlvlm.vlms.patch_embedding import flatten_patch_embedding
from rlvlm.vlms.shipped import weights_folder

_PERCENTS = 101

SHARES: dict[Task, float] = {"direct": 1.0, "single_stage": 0.4, "two_stage": 0.4, "label": 0.2, "score": 0.3}
"""Pairs asked about in each way, as a share of `TrainConfig.talking_pairs`; each is asked in both orders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the pocket judge is made."""

    out: Path = weights_folder()
    """Folder of the finished weights; replaced as a whole."""
    scenes: str = "rlvlm.pocket.scenes:all_tasks"
    """Scene provider, `module:function`."""
    seed: int = 0
    """Of scenes, weights and batches."""
    seeing_steps: int = 4_300
    """Steps that train the vision encoder alone."""
    talking_steps: int = 1_900
    """Steps that train the language model on what the vision encoder, by then fixed, tells it."""
    num_pairs: int = 24
    """Pairs of images per step of seeing."""
    talking_pairs: int = 10
    """Pairs per step of talking; each is asked about in several ways."""
    lr: float = 1.5e-3
    """AdamW's highest step size, Muon's is twice that; in each phase it warms up, holds, and falls to zero."""
    threads: int = 1
    """CPU threads; more are no faster on a machine that is shared."""
    save_every_steps: int = 250
    """Steps between saves while talking, so that a run that is cut short leaves weights."""


class ProgressHead(nn.Module):
    """What each visual token tells about its image's progress; used in training only, never shipped.

    Args:
        width: size of a visual token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.amount = nn.Linear(width, 1)
        self.percent = nn.Linear(width, _PERCENTS)

    def forward(self, tokens: Tensor, progress: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss and the absolute error of the progress [B], as the mean of all tokens tells it.

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
        return 10 * error.square().mean() + 0.3 * surprise, error.mean(1).abs()


class Trainer:
    """One run: model, data and the loss of a step.

    Args:
        config: how.
        scenes: what the judge sees, of one task or several.
    """

    def __init__(self, config: TrainConfig, scenes: Iterable[Scenes]) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self._scenes = ScenePairs(scenes)
        topics = self._scenes.topics
        self.tokenizer = build_tokenizer(corpus(topics), phrases([topic.phrase for topic in topics]))
        self.model: Any = build_model(self.tokenizer)
        flatten_patch_embedding(self.model)
        self.progress_head = ProgressHead(self.model.config.text_config.hidden_size)
        self._dialogues = DialogueBuilder(self.tokenizer)
        self._rng = np.random.default_rng(config.seed)
        self.facts: dict[str, Facts] = {}
        """Running means of losses and accuracies, per phase."""

    def train(self) -> None:
        """Both phases; the finished weights lie in `config.out`."""
        self.see()
        self.talk()

    def see(self) -> None:
        """Trains the vision encoder alone."""
        sight = vision_optimizers(self.model, self.progress_head, self.config.lr)
        for _ in self._steps("seeing", self.config.seeing_steps, sight, self._seeing_loss):
            pass

    def talk(self) -> None:
        """Trains the language model on what the vision encoder, from now on fixed, tells it; saves now and then."""
        self._seen, self._off_by = self._encode_all()
        speech = language_optimizers(self.model, self.config.lr)
        for step in self._steps("talking", self.config.talking_steps, speech, self._talking_loss):
            if step % self.config.save_every_steps == 0 or step == self.config.talking_steps:
                save(self.model, self.tokenizer, build_image_processor(), self.config.out)

    def _steps(
        self, name: str, num_steps: int, optimizers: list[torch.optim.Optimizer], loss_of_step: StepLoss
    ) -> Iterator[int]:
        """Optimises; yields the number of each finished step."""
        facts = self.facts.setdefault(name, {})
        return optimise(name, num_steps, optimizers, loss_of_step, ramp=hold_then_fall, facts=facts)

    def _seeing_loss(self) -> tuple[Tensor, Facts]:
        images = self._scenes.draw_pairs(self.config.num_pairs, self._rng).ravel()
        features = look(self.model, self._scenes.patches(images, self._rng))
        progress = torch.from_numpy(self._scenes.progress(images))
        loss, errors = self.progress_head(features, progress)
        tasks = np.array([self._scenes.task_of(int(image)) for image in images])
        off_by = {f"off_by/{task}": float(errors.detach()[tasks == task].mean()) for task in np.unique(tasks)}
        return loss, {"loss": float(loss.detach()), **off_by}

    @torch.no_grad()
    def _encode_all(self) -> tuple[Tensor, NDArray[np.float32]]:
        """Visual tokens [N, layers, tokens, D] of all images, and by how much [N] they misread the progress."""
        places = np.arange(len(self._scenes))
        chunks = np.array_split(places, len(places) // 64 + 1)
        seen = torch.cat([look(self.model, self._scenes.patches(chunk, self._rng)) for chunk in chunks])
        off_by = [
            self.progress_head(part, torch.from_numpy(self._scenes.progress(chunk)))[1]
            for part, chunk in zip(seen.split([len(chunk) for chunk in chunks]), chunks, strict=True)
        ]
        return seen, torch.cat(off_by).numpy()

    def _talking_loss(self) -> tuple[Tensor, Facts]:
        loss, facts = torch.zeros(()), {}
        for task, share in SHARES.items():
            pairs = self._scenes.draw_pairs(max(1, round(share * self.config.talking_pairs)), self._rng)
            pairs = np.concatenate([pairs, pairs[:, ::-1]])
            topics = [self._scenes.topic_of(left) for left in pairs[:, 0]]
            tie_gaps = np.maximum(TIE_GAP, self._off_by[pairs].sum(1))  # the vision encoder tells wider gaps apart
            batch = self._dialogues.batch(task, topics, self._scenes.progress(pairs), pairs, tie_gaps)
            task_loss, right = answer_loss(self.model, batch, self._seen)
            loss = loss + task_loss
            facts |= {task: float(task_loss.detach()), f"{task}_right": right}
        return loss, facts


def main() -> None:
    """Collects scenes and trains."""
    disable_progress_bar()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = tyro.cli(TrainConfig, description=__doc__)
    torch.set_num_threads(config.threads)
    Trainer(config, find_provider(config.scenes)("train", config.seed)).train()


if __name__ == "__main__":
    main()
