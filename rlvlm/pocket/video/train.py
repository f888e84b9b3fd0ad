"""Trains the pocket video judge on clips that `play` wrote: `python -m rlvlm.pocket.video.train --clips FILE`.

Its vision encoder begins as the pocket scorer's and learns where LIBERO's things lie; then the language model, from
random weights, learns to tell successes from failures. Everything random hangs on the seed.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from rlvlm.judges import prompts
from rlvlm.judges.build import ABILITIES_FILE
from rlvlm.pocket.judge.batches import NUM_VISUAL_TOKENS, jittered
from rlvlm.pocket.judge.learning import (
    Facts,
    answer_loss,
    encode_all,
    hold_then_fall,
    language_optimizers,
    look,
    optimise,
    patches_of,
    reading_loss,
    save,
    vision_optimizers,
)
from rlvlm.pocket.judge.tokenizer import build_tokenizer
from rlvlm.pocket.policy.model import build_image_processor, build_model
from rlvlm.pocket.scorer.dataset import dialogues_of, phrases
from rlvlm.pocket.video.dataset import Clips, draw_question, readable, readable_sizes
from rlvlm.vlms.shipped import weights_folder

_CLIP_FRAMES = (2, 4)
"""Frames of the clips of a step, one of these."""
_VOCABULARY = 500
ABILITIES = {"compare": [], "score": ["success"], "goal_pictures": False}
"""What a judge made of these weights may be asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the pocket video judge is made."""

    clips: Path
    """File that `play` wrote."""
    out: Path = weights_folder("video")
    """Folder of the finished weights; replaced as a whole."""
    eyes: Path = weights_folder("scorer")
    """Folder of a model of the same shapes, whose vision encoder training goes on from."""
    seed: int = 0
    """Of weights and batches."""
    seeing_steps: int = 1000
    """Steps that train the vision encoder."""
    talking_steps: int = 2400
    """Steps that train the language model on what the vision encoder, by then fixed, tells it."""
    batch: int = 32
    """Frames per step of seeing, clips per step of talking."""
    lr: float = 1.5e-3
    """AdamW's highest step size, Muon's is twice that."""
    threads: int = 1
    """CPU threads."""


class Trainer:
    """One run: model, clips and the loss of a step.

    Args:
        config: how.
    """

    def __init__(self, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self._rng = np.random.default_rng(config.seed)
        self._clips = Clips.load(config.clips)
        self._frames = self._clips.frames.reshape(-1, *self._clips.frames.shape[2:])
        self._values = readable(self._clips).reshape(len(self._frames), -1)
        self._sizes = readable_sizes(self._clips)
        texts = sorted(set(self._clips.instructions))
        self.tokenizer = build_tokenizer([*texts, prompts.OTHER_GOAL] * 3, phrases(), _VOCABULARY)
        self.model = build_model(self.tokenizer, config.eyes)
        self._reader = nn.Linear(self.model.config.text_config.hidden_size * NUM_VISUAL_TOKENS, sum(self._sizes))
        self._processor = build_image_processor()
        self.facts: dict[str, Facts] = {"seeing": {}, "talking": {}}

    def train(self) -> None:
        """Both phases; the finished weights lie in `config.out`."""
        config = self.config
        optimizers = vision_optimizers(self.model, self._reader, config.lr)
        seeing = {"ramp": hold_then_fall, "facts": self.facts["seeing"]}
        for _ in optimise("seeing", config.seeing_steps, optimizers, self._seeing_loss, **seeing):
            pass
        self._seen = encode_all(self.model, self._frames, self._processor)
        optimizers = language_optimizers(self.model, config.lr)
        talking = {"ramp": hold_then_fall, "facts": self.facts["talking"]}
        for _ in optimise("talking", config.talking_steps, optimizers, self._talking_loss, **talking):
            pass
        save(self.model, self.tokenizer, self._processor, config.out)
        (config.out / ABILITIES_FILE).write_text(json.dumps(ABILITIES, indent=1) + "\n")

    def _seeing_loss(self) -> tuple[Tensor, Facts]:
        """Cross-entropy of every value of every frame."""
        rows = self._rng.integers(len(self._frames), size=self.config.batch)
        patches = jittered(patches_of(self._frames[rows], self._processor), self._rng)
        seen = look(self.model, patches)[:, -1].flatten(1)
        loss, right = reading_loss(self._reader(seen), torch.from_numpy(self._values[rows]), self._sizes)
        return loss, {"loss": float(loss.detach()), "read": float(right.float().mean())}

    def _talking_loss(self) -> tuple[Tensor, Facts]:
        """Cross-entropy of the answers to freshly drawn questions."""
        num_frames = int(self._rng.choice(_CLIP_FRAMES))
        questions = [draw_question(self._clips, num_frames, self._rng) for _ in range(self.config.batch)]
        loss, right = answer_loss(self.model, dialogues_of(questions, self.tokenizer), self._seen)
        return loss, {"loss": float(loss.detach()), "right": right}


def main() -> None:
    """Reads the command line and trains."""
    disable_progress_bar()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    config = tyro.cli(TrainConfig, description=__doc__)
    torch.set_num_threads(config.threads)
    Trainer(config).train()


if __name__ == "__main__":
    main()
