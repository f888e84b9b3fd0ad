"""Trains a pocket model: `python -m pocket_models.train judge|scorer|video|policy --out DIR`.

First the vision encoder: heads on the visual tokens learn to read what the simulator knows about the image. Then the
vision encoder is fixed, and the language model learns the dialogues. Everything random hangs on the seed.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from pocket_models.dataset import Dataset
from pocket_models.judge import JudgeData
from pocket_models.network import build_image_processor, build_model
from pocket_models.policy import PolicyData
from pocket_models.scorer import ScorerData
from pocket_models.video import VideoData
from rlvlm.judges.build import ABILITIES_FILE
from rlvlm.pocket.models import weights_folder
from rlvlm.vlms.images import flatten_patch_embedding
from rlvlm.vlms.supervised import (
    Metrics,
    adamw,
    answer_loss,
    encode,
    encode_all,
    jitter,
    optimise,
    patches_of,
    save,
    warm_up,
)

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How a pocket model is made."""

    data: JudgeData | ScorerData | VideoData | PolicyData
    """What it learns from."""
    out: Path
    """Folder of the finished weights; replaced as a whole."""
    start: Path | None = None
    """Folder of weights to go on from, with their tokenizer; none begins with random ones."""
    vision_from: Path | None = None
    """Folder of a model of the same shapes whose vision encoder training goes on from."""
    seed: int = 0
    """Seed of data, weights and batches."""
    vision_steps: int
    """Steps that train the vision encoder alone, at most; 0 leaves it as it is."""
    enough: float = 0.997
    """Share of held-out values read rightly in every task that ends the vision encoder's training early."""
    language_steps: int
    """Steps that train the language model on what the vision encoder, by then fixed, makes of the images."""
    vision_batch: int
    """Images per step of the vision encoder."""
    language_batch: int
    """Pairs, questions or replies per step of the language model."""
    lr: float = 1.5e-3
    """AdamW's highest step size, Muon's is twice that; in each phase it warms up, holds, and falls to zero."""
    threads: int = 1
    """CPU threads."""
    save_every_steps: int = 200
    """Steps between saves of the second phase, so that a run that is cut short leaves weights."""

    def __post_init__(self) -> None:
        for name in ("language_steps", "vision_batch", "language_batch", "threads", "save_every_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.vision_steps < 0 or (self.vision_steps == 0 and self.start is None and self.vision_from is None):
            raise ValueError(
                "vision_steps must be >= 1, or 0 to go on from a trained vision encoder: --start DIR or "
                "--vision-from DIR"
            )


CONFIGS = {
    "judge": TrainConfig(
        data=JudgeData(),
        out=weights_folder("judge"),
        vision_steps=4_300,
        language_steps=1_900,
        vision_batch=48,
        language_batch=10,
    ),
    "scorer": TrainConfig(
        data=ScorerData(),
        out=weights_folder("scorer"),
        vision_from=weights_folder("policy"),
        vision_steps=500,
        language_steps=500,
        vision_batch=48,
        language_batch=48,
    ),
    "video": TrainConfig(
        data=VideoData(),
        out=weights_folder("video"),
        vision_from=weights_folder("scorer"),
        vision_steps=1_000,
        language_steps=2_400,
        vision_batch=32,
        language_batch=32,
    ),
    "policy": TrainConfig(
        data=PolicyData(),
        out=weights_folder("policy"),
        vision_steps=2_000,
        language_steps=600,
        vision_batch=32,
        language_batch=32,
    ),
}
"""The models that ship, each with its defaults."""


class Trainer:
    """One run: model, data and the loss of a step.

    Args:
        config: how.
    """

    def __init__(self, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)  # of the weights; data and batches hang on a generator of their own
        self.config = config
        self._rng = np.random.default_rng(config.seed)
        tokenizer = None if config.start is None else AutoTokenizer.from_pretrained(config.start)
        self.data: Dataset = config.data.load(config.seed, self._rng, tokenizer)
        if config.start is None:
            self.model: Any = build_model(self.data.tokenizer, self.data.patch_px)
        else:
            self.model = AutoModelForImageTextToText.from_pretrained(config.start, dtype=torch.float32)
            flatten_patch_embedding(self.model)
        if config.vision_from is not None:  # reading images is what takes long, and carries over between tasks
            trained: Any = AutoModelForImageTextToText.from_pretrained(config.vision_from, dtype=torch.float32)
            self.model.model.visual.load_state_dict(trained.model.visual.state_dict())
        self.heads = self.data.build_heads(self.model.config.text_config.hidden_size)
        self._image_processor = build_image_processor(self.data.patch_px)
        self.metrics: dict[str, Metrics] = {"vision": {}, "language": {}}
        """Running means of losses and accuracies, per phase."""

    def train(self) -> None:
        """Both phases; the finished weights lie in `config.out`."""
        if self.config.vision_steps:
            self._train_vision()
            self._save()
        self._train_language()

    def _train_vision(self) -> None:
        def loss_of_step() -> tuple[Tensor, Metrics]:
            rows = self.data.draw_images(self.config.vision_batch, self._rng)
            patches = patches_of(self.data.frames[rows], self._image_processor)
            if self.data.jitters_training:
                patches = jitter(patches, self._rng)
            return self.heads.loss(encode(self.model, patches), rows)

        visual = self.model.model.visual
        optimizers = muon_and_adamw(visual.blocks, [*visual.parameters(), *self.heads.parameters()], self.config.lr)
        metrics, num_steps = self.metrics["vision"], self.config.vision_steps
        steps = optimise("vision", num_steps, optimizers, loss_of_step, schedule=hold_then_fall, metrics=metrics)
        for step in steps:
            # what it reads in images that it never trained on, and no loss, says that it has learned enough
            if not self.data.held_out or (step % 100 and step != num_steps):
                continue
            read = {}
            for task, rows in self.data.held_out.items():
                encoded = encode_all(self.model, self.data.frames[rows], self._image_processor)
                with torch.no_grad():
                    read[task] = 1 - self.heads.errors(encoded, rows).numpy().mean()
            metrics |= {f"held_out/{task}": float(share) for task, share in read.items()}
            if min(read.values()) >= self.config.enough:
                break

    def _train_language(self) -> None:
        rng = self._rng if self.data.jitters_encoding else None
        encoded = encode_all(self.model, self.data.frames, self._image_processor, rng)  # once: it no longer changes
        with torch.no_grad():  # where it misreads, a right answer would teach the language model to guess
            errors = self.heads.errors(encoded, np.arange(len(encoded))).numpy()

        def loss_of_step() -> tuple[Tensor, Metrics]:
            total, metrics = torch.zeros(()), {}
            # each kind is a batch of its own, whose dialogues show equally many images
            for kind, batch in self.data.draw_dialogues(self.config.language_batch, self._rng, errors).items():
                loss, right = answer_loss(self.model, batch, encoded)
                total = total + loss
                metrics |= {kind: float(loss.detach()), f"{kind}_right": right}
            return total, metrics

        language = self.model.model.language_model
        parameters = [*language.parameters(), *self.model.lm_head.parameters()]
        optimizers = muon_and_adamw(language.layers, parameters, self.config.lr)
        metrics, num_steps = self.metrics["language"], self.config.language_steps
        steps = optimise("language", num_steps, optimizers, loss_of_step, schedule=hold_then_fall, metrics=metrics)
        for step in steps:
            if step % self.config.save_every_steps == 0 or step == num_steps:
                self._save()

    def _save(self) -> None:
        save(self.model, self.data.tokenizer, self._image_processor, self.config.out)
        if self.data.abilities:
            (self.config.out / ABILITIES_FILE).write_text(json.dumps(self.data.abilities, indent=1) + "\n")


def muon_and_adamw(layers: nn.Module, others: Iterable[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
    """Muon over the matrices of `layers` and AdamW over everything else: fewer steps from scratch than AdamW.

    Args:
        layers: transformer layers.
        others: parameters that learn too; those of `layers` may be among them.
        lr: AdamW's highest step size; the matrices' is twice that.

    Source: Jordan et al. 2024, Muon, as in torch, with step sizes made comparable to AdamW's (Liu et al. 2025,
    arXiv:2502.16982, sec. 2.2).
    """
    matrices = [module.weight for module in layers.modules() if isinstance(module, nn.Linear)]
    by_muon = {id(matrix) for matrix in matrices}
    rest = [parameter for parameter in others if id(parameter) not in by_muon]
    muon = torch.optim.Muon(matrices, lr=2 * lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw(rest, lr)]


def hold_then_fall(step: int, num_steps: int) -> float:
    """A `Schedule`: warm-up, held, and down to zero on a line over the last three tenths."""
    return min(warm_up(step, num_steps), (num_steps - step) / (0.3 * num_steps))


def main() -> None:
    """Reads the command line and trains."""
    disable_progress_bar()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    named = {name: (str(type(config.data).__doc__), config) for name, config in CONFIGS.items()}
    config = tyro.extras.overridable_config_cli(named, description=__doc__, config=(tyro.conf.AvoidSubcommands,))
    torch.set_num_threads(config.threads)
    Trainer(config).train()


if __name__ == "__main__":
    main()
