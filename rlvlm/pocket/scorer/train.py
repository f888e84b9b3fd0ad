"""Trains the pocket scorer: `python -m rlvlm.pocket.scorer.train`.

Its vision encoder begins as the pocket policy's, which reads the envs in turns, and learns to read push_block as
well. Then the language model, from random weights, learns to rate turns and to tell a clip's success. Everything
random hangs on the seed.
"""

import json
import logging
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from rlvlm.envs.registry import make_env, task_env
from rlvlm.judges.build import ABILITIES_FILE
from rlvlm.pocket.judge.batches import NUM_VISUAL_TOKENS
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
from rlvlm.pocket.scorer.config import TrainConfig
from rlvlm.pocket.scorer.dataset import TURN_TASKS, QuestionDataset, corpus, dialogues_of, phrases

_LOGGER = logging.getLogger(__name__)
_CLIP_FRAMES = (2, 2, 3, 4, 6, 8)
"""Frames of the clips of a step, one of these."""
_VOCABULARY = 500
ABILITIES = {"compare": [], "score": ["success", "utility"], "goal_pictures": False}
"""What a judge made of these weights may be asked."""


class Trainer:
    """One run: model, dataset and the loss of a step.

    Args:
        config: how.
    """

    def __init__(self, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self._rng = np.random.default_rng(config.seed)
        self.dataset = QuestionDataset("train", config.moves, config.pushes, config.seed)
        self.tokenizer = make_tokenizer()
        self.model = build_model(self.tokenizer, config.eyes)
        width = self.model.config.text_config.hidden_size * NUM_VISUAL_TOKENS
        self.readers = nn.ModuleList(nn.Linear(width, sum(env.sizes)) for env in self.dataset.envs)
        """What is read off all visual tokens of an image; used in training only, never shipped."""
        self._processor = build_image_processor()
        self.facts: dict[str, Facts] = {}

    def train(self) -> None:
        """Both phases; the finished weights lie in `config.out`."""
        if self.config.seeing_steps:
            self.see()
            save(self.model, self.tokenizer, self._processor, self.config.out)
        self.talk()

    def see(self) -> None:
        """Trains the vision encoder alone."""
        optimizers = vision_optimizers(self.model, self.readers, self.config.lr)
        facts = self.facts.setdefault("seeing", {})
        steps = self.config.seeing_steps
        for _ in optimise("seeing", steps, optimizers, self._seeing_loss, ramp=hold_then_fall, facts=facts):
            pass

    def _seeing_loss(self) -> tuple[Tensor, Facts]:
        """Cross-entropy of every value of every image; half of the images are of the last env, push_block."""
        worlds, batch = self.dataset.envs, self.config.batch
        shares = np.array([*(task.share**0.5 for task in TURN_TASKS), 4.0])[: len(worlds)]
        counts = np.maximum(2, np.round(batch * shares / shares.sum()).astype(int))
        rows = [self._rng.integers(len(env.frames), size=n) for env, n in zip(worlds, counts, strict=True)]
        patches = [patches_of(env.frames[own], self._processor) for env, own in zip(worlds, rows, strict=True)]
        seen = look(self.model, torch.cat(patches))[:, -1].flatten(1).split(counts.tolist())
        total, facts = torch.zeros(()), {}
        for env, reader, own, part in zip(worlds, self.readers, rows, seen, strict=True):
            loss, right = reading_loss(reader(part), torch.from_numpy(env.values[own]), env.sizes)
            total = total + loss
            facts[f"read/{env.task}"] = float(right.float().mean())
        return total, {"loss": float(total.detach()), **facts}

    def talk(self) -> None:
        """Trains the language model on what the vision encoder, from now on fixed, tells it; saves now and then."""
        worlds = self.dataset.envs
        self._seen = torch.cat([encode_all(self.model, env.frames, self._processor) for env in worlds])
        optimizers = language_optimizers(self.model, self.config.lr)
        facts = self.facts.setdefault("talking", {})
        steps = self.config.talking_steps
        for step in optimise("talking", steps, optimizers, self._talking_loss, ramp=hold_then_fall, facts=facts):
            if step % self.config.save_every_steps == 0 or step == steps:
                save(self.model, self.tokenizer, self._processor, self.config.out)
                (self.config.out / ABILITIES_FILE).write_text(json.dumps(ABILITIES, indent=1) + "\n")

    def _talking_loss(self) -> tuple[Tensor, Facts]:
        """Cross-entropy of the answers to freshly drawn questions."""
        turns = [self.dataset.turn(self._rng) for _ in range(self.config.batch)]
        loss, right = answer_loss(self.model, dialogues_of(turns, self.tokenizer), self._seen)
        facts = {"turns": float(loss.detach()), "turns_right": right}
        if self.dataset.pushes:
            num_frames = int(self._rng.choice(_CLIP_FRAMES))
            clips = [self.dataset.clip(num_frames, self._rng) for _ in range(self.config.batch // 2)]
            clip_loss, clips_right = answer_loss(self.model, dialogues_of(clips, self.tokenizer), self._seen)
            loss = loss + clip_loss
            facts |= {"clips": float(clip_loss.detach()), "clips_right": clips_right}
        return loss, facts


def make_tokenizer() -> Any:
    """The scorer's: fixed sentences of its questions are single tokens."""
    names = {name for task in TURN_TASKS for name in make_env(task.name, task_env(task.name), 0).action_names}
    return build_tokenizer(corpus(sorted(names)), phrases(), _VOCABULARY)


def main() -> None:
    """Reads the command line and trains."""
    disable_progress_bar()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    config = tyro.cli(TrainConfig, description=__doc__)
    torch.set_num_threads(config.threads)
    Trainer(config).train()


if __name__ == "__main__":
    main()
