"""Trains the pocket policy from scratch: `python -m rlvlm.pocket.policy.train --out DIR`.

First the vision encoder: linear layers on the visual tokens learn to tell what the simulator knows about the image.
Then the language model learns to write replies that name what it sees. Everything random hangs on the seed.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rlvlm.envs.turn_env import TurnEnv
from rlvlm.pocket.judge.learning import (
    Facts,
    hold_then_fall,
    look,
    muon_and_adamw,
    optimise,
    patches_of,
    reading_loss,
    save,
    vision_optimizers,
)
from rlvlm.pocket.judge.tokenizer import build_tokenizer
from rlvlm.pocket.policy.config import TrainConfig
from rlvlm.pocket.policy.dataset import (
    TAUGHT_TASKS,
    Moment,
    Replies,
    TaughtTask,
    collect_moments,
    key_phrases,
    prompt_phrases,
    readable,
)
from rlvlm.pocket.policy.model import build_image_processor, build_model
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.vlms.images import resize
from rlvlm.vlms.patch_embedding import flatten_patch_embedding
from rlvlm.vlms.processors import PillowProcessor

_LOGGER = logging.getLogger(__name__)

_HELD_OUT_SEED = 1_000_000
_SHOWN_AT_ONCE = 64


class TaskDataset:
    """The images of one task, shrunk once and kept as bytes, and what there is to read in them.

    Args:
        task: what to play.
        count: moments to train on.
        held_out: moments of other episodes.
        seed: of the play.
    """

    def __init__(self, task: TaughtTask, count: int, held_out: int, seed: int) -> None:
        self.task = task
        self.env, self.moments = collect_moments(task, count, seed)
        _, self.unseen = collect_moments(task, held_out, seed + _HELD_OUT_SEED)
        self.columns, self.sizes = readable([*self.moments, *self.unseen])
        self._processor = build_image_processor()
        self.frames = self._shrunk(self.moments)
        self.unseen_frames = self._shrunk(self.unseen)

    def _shrunk(self, moments: Sequence[Moment]) -> NDArray[np.uint8]:
        """[N, H, W, 3] as the model gets to see them, each image drawn once."""
        drawn: dict[bytes, NDArray[np.uint8]] = {}
        for moment in moments:
            if moment.image not in drawn:
                drawn[moment.image] = resize(self.env.draw(moment.snapshot[None])[0], self._processor)
        return np.stack([drawn[moment.image] for moment in moments])

    def patches(self, frames: NDArray[np.uint8]) -> Tensor:
        """[N, patches, values] of `frames`."""
        return patches_of(frames, self._processor)

    def values(self, moments: Sequence[Moment]) -> Tensor:
        """[N, columns] what there is to read in their images."""
        return torch.from_numpy(np.stack([moment.key[self.columns] for moment in moments]))


class Trainer:
    """One run: model, data and the loss of a step.

    Args:
        config: how.
        tasks: what is taught.
    """

    def __init__(self, config: TrainConfig, tasks: Sequence[TaughtTask]) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self._rng = np.random.default_rng(config.seed)
        self.datasets = [
            TaskDataset(each, round(config.moments * each.share), round(config.held_out * each.share), config.seed)
            for each in tasks
        ]
        moments = [moment for data in self.datasets for moment in data.moments]
        self.replies = Replies(tasks, moments)
        if config.start is None:
            self.tokenizer = self._tokenizer(tasks, moments)
            self.model: Any = build_model(self.tokenizer)
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(config.start)
            self.model = AutoModelForImageTextToText.from_pretrained(config.start, dtype=torch.float32)
            flatten_patch_embedding(self.model)
        width = self.model.config.text_config.hidden_size * 9
        self.readers = nn.ModuleList(nn.Linear(width, sum(data.sizes)) for data in self.datasets)
        """What is read off all visual tokens of an image; used in training only, never shipped."""
        self.facts: dict[str, Facts] = {}

    def _tokenizer(self, tasks: Sequence[TaughtTask], moments: Sequence[Moment]) -> Any:
        worlds = {data.task.name: data.env for data in self.datasets}
        replies = [self.replies.draw(moment, worlds[moment.task], self._rng) for moment in moments]
        prompts = [moment.prompt for moment in moments]
        phrases = [*prompt_phrases(moments), *key_phrases(replies), *(p for each in tasks for p in each.phrases)]
        names = (name for world in worlds.values() for name in world.action_names if len(name) > 2)
        words = ["user\n", "assistant\n", *map(str, range(10, 32)), *names]
        return build_tokenizer([*replies, *dict.fromkeys(prompts)], list(dict.fromkeys([*words, *phrases])), 700)

    def train(self) -> None:
        """Both phases; the finished weights lie in `config.out`."""
        if self.config.seeing_steps:
            self.see()
            save(self.model, self.tokenizer, build_image_processor(), self.config.out)
        self.talk()

    def see(self) -> None:
        """Trains the vision encoder, until it reads every task's held-out images well enough."""
        optimizers = vision_optimizers(self.model, self.readers, self.config.lr)
        facts = self.facts.setdefault("seeing", {})
        steps = self.config.seeing_steps
        for step in optimise("seeing", steps, optimizers, self._seeing_loss, ramp=hold_then_fall, facts=facts):
            if step % 100 == 0 or step == steps:
                right = {data.task.name: self.read_share(place) for place, data in enumerate(self.datasets)}
                facts |= {f"held_out/{task}": share for task, share in right.items()}
                _LOGGER.info("held out, read rightly: %s", right)
                if min(right.values()) >= self.config.seen_enough:
                    break

    def _seeing_loss(self) -> tuple[Tensor, Facts]:
        """Cross-entropy of every value of every image, tasks taking turns by their share."""
        shares = np.array([data.task.share for data in self.datasets])
        counts = np.maximum(1, np.round(self.config.batch * shares / shares.sum()).astype(int))
        places = [self._rng.integers(len(data.moments), size=n) for data, n in zip(self.datasets, counts, strict=True)]
        patches = [data.patches(data.frames[rows]) for data, rows in zip(self.datasets, places, strict=True)]
        seen = look(self.model, torch.cat(patches))[:, -1].flatten(1).split(counts.tolist())
        losses = {}
        for data, reader, rows, part in zip(self.datasets, self.readers, places, seen, strict=True):
            values = data.values([data.moments[row] for row in rows])
            losses[data.task.name], _ = reading_loss(reader(part), values, data.sizes)
        return torch.stack(list(losses.values())).sum(), {task: float(loss.detach()) for task, loss in losses.items()}

    @torch.no_grad()
    def read_share(self, place: int) -> float:
        """Share of the held-out values of a task that the vision encoder reads rightly."""
        data, reader = self.datasets[place], self.readers[place]
        right = []
        for begin in range(0, len(data.unseen), _SHOWN_AT_ONCE):
            seen = look(self.model, data.patches(data.unseen_frames[begin : begin + _SHOWN_AT_ONCE]))
            values = data.values(data.unseen[begin : begin + _SHOWN_AT_ONCE])
            right.append(reading_loss(reader(seen[:, -1].flatten(1)), values, data.sizes)[1])
        return float(torch.cat(right).float().mean())

    def talk(self) -> None:
        """Trains the language model on what the vision encoder, from now on fixed, tells it; saves now and then."""
        processor = PillowProcessor(build_image_processor(), self.tokenizer, self.model.config.image_token_id)
        policy = VLMPolicy(self.model, processor, PolicyConfig(learns="all"))
        examples = [(data.env, moment) for data in self.datasets for moment in data.moments]
        for data in self.datasets:
            images = [moment.image for moment in data.moments]
            missing = policy.images.missing(images)
            for begin in range(0, len(missing), _SHOWN_AT_ONCE):
                rows = missing[begin : begin + _SHOWN_AT_ONCE]
                policy.show([images[row] for row in rows], data.frames[rows])
        language = self.model.model.language_model
        optimizers = muon_and_adamw(language.layers, policy.backbone_parameters(), self.config.lr)
        facts = self.facts.setdefault("talking", {})
        steps = self.config.talking_steps

        def loss() -> tuple[Tensor, Facts]:
            return self._talking_loss(policy, examples)

        for step in optimise("talking", steps, optimizers, loss, ramp=hold_then_fall, facts=facts):
            if step % self.config.save_every_steps == 0 or step == steps:
                save(self.model, self.tokenizer, build_image_processor(), self.config.out)

    def _talking_loss(self, policy: VLMPolicy, examples: Sequence[tuple[TurnEnv, Moment]]) -> tuple[Tensor, Facts]:
        """Minus the log-prob of freshly drawn replies, per reply, in nats."""
        rows = self._rng.integers(len(examples), size=self.config.batch)
        asked = []
        for row in rows:
            world, moment = examples[row]
            asked.append(policy.write(moment.prompt, moment.image, self.replies.draw(moment, world, self._rng)))
        loss = -policy.read(asked).log_probs.sum() / len(asked)
        return loss, {"loss": float(loss.detach())}


def main() -> None:
    """Reads the command line and trains."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    disable_progress_bar()
    config = tyro.cli(TrainConfig, description=__doc__)
    torch.set_num_threads(config.threads)
    Trainer(config, [each for each in TAUGHT_TASKS if not config.tasks or each.name in config.tasks]).train()


if __name__ == "__main__":
    main()
