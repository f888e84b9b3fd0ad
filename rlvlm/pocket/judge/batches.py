"""Batches of a pocket judge's training: images as patches, dialogues as token ids."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.core.steps import FloatArray
from rlvlm.pocket.judge import texts
from rlvlm.pocket.judge.model import MERGE, PATCH_PX, PICTURE_PX, build_image_processor
from rlvlm.pocket.judge.tokenizer import IMAGE, STOP
from rlvlm.pocket.scenes.pairs import Scenes, draw_gap_pairs, label_of

_LOGGER = logging.getLogger(__name__)

GRID = PICTURE_PX // PATCH_PX
NUM_VISUAL_TOKENS = (GRID // MERGE) ** 2
IGNORED = -100
"""Marks tokens that are not learned."""
_CHUNK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialogues:
    """Dialogues of one task, padded on the right."""

    ids: Tensor
    """[B, N] tokens."""
    targets: Tensor
    """[B, N] the answer's tokens where they stand, `IGNORED` elsewhere."""
    positions: Tensor
    """[3, B, N] rope positions: time, height, width."""
    images: Tensor
    """[B, 0 to 2] which of the step's images each dialogue shows."""


def to_patches(images: NDArray[np.uint8]) -> Tensor:
    """Returns images [N, H, W, 3] as float16 input [N, patches, values] of the model, made by its processor."""
    processor = build_image_processor()
    chunks = [list(images[start : start + _CHUNK]) for start in range(0, len(images), _CHUNK)]
    patches = [processor(chunk, return_tensors="pt")["pixel_values"].half() for chunk in chunks]
    return torch.cat(patches).view(len(images), GRID * GRID, -1)


def jittered(patches: Tensor, rng: np.random.Generator) -> Tensor:
    """Patches [N, patches, values] with a little brightness and contrast of their own per image, float32."""
    contrast, brightness = (torch.from_numpy(rng.normal(mean, 0.03, (len(patches), 1, 1))).float() for mean in (1, 0))
    return patches * contrast + brightness


def padded(dialogues: Sequence[tuple[Sequence[int], Sequence[int]]], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids [B, N] of prompts and answers, padded on the right, and the answers alone, `IGNORED` elsewhere."""
    ids = torch.full((len(dialogues), max(len(prompt) + len(answer) for prompt, answer in dialogues)), pad)
    targets = torch.full_like(ids, IGNORED)
    for row, (prompt, answer) in enumerate(dialogues):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer])
        targets[row, len(prompt) : end] = torch.tensor(answer)
    return ids, targets


class ScenePairs:
    """The training scenes as patches, and pairs drawn from them.

    Held as bytes, which loses nothing: the processor shrinks images to whole numbers.

    Args:
        scenes: set-ups of any tasks, drawn by their `share`; taken one by one, and their images let go.
    """

    def __init__(self, scenes: Iterable[Scenes]) -> None:
        self._setups: list[_Setup] = []
        patches: list[Tensor] = []
        for each in scenes:
            _LOGGER.info("%s, %s: %d images from %d frames", each.task, each.name, len(each.progress), len(each.frames))
            start = self._setups[-1].end if self._setups else 0
            self._setups.append(
                _Setup(
                    scenes=replace(each, images=each.images[:, :0, :0].copy()),
                    start=start,
                    end=start + len(each.progress),
                    topic=texts.Topic(goal=each.goal, phrase=each.phrase),
                )
            )
            starts = range(0, len(each.images), _CHUNK)
            for first in starts:  # as bytes: the processor's scaling to [-1, 1] undone
                scaled = to_patches(each.images[first : first + _CHUNK]).float()
                patches.append((scaled * 127.5 + 127.5).round().to(torch.uint8))
        self._patches = torch.cat(patches)
        self._progress = np.concatenate([each.scenes.progress for each in self._setups])
        self._ends = np.array([each.end for each in self._setups])

    def __len__(self) -> int:
        return len(self._progress)

    @property
    def topics(self) -> list[texts.Topic]:
        """What the dialogues are about, one per task."""
        return list(dict.fromkeys(each.topic for each in self._setups))

    def draw_pairs(self, num_pairs: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Returns [num_pairs, 2] images, both of one set-up: gaps of all sizes, small ones more often."""
        shares = np.array([each.scenes.share for each in self._setups])
        setups = rng.choice(len(shares), size=num_pairs, p=shares / shares.sum())
        sizes = np.where(rng.random(num_pairs) < 0.5, rng.random(num_pairs), 0.3 * rng.random(num_pairs) ** 2)
        gaps = (sizes * rng.choice([-1, 1], size=num_pairs)).astype(np.float32)
        pairs = np.empty((num_pairs, 2), np.int64)
        for number, each in enumerate(self._setups):
            drawn = setups == number
            pairs[drawn] = draw_gap_pairs(each.scenes, gaps[drawn], rng) + each.start
        return pairs

    def patches(self, images: NDArray[np.int64], rng: np.random.Generator) -> Tensor:
        """Returns [N, patches, values] of `pictures`, with a little noise, brightness and contrast, float32."""
        return jittered(self._patches[torch.from_numpy(images)].float() / 127.5 - 1.0, rng)

    def progress(self, images: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the progress of `pictures`, same shape."""
        return self._progress[images]

    def topic_of(self, image: int) -> texts.Topic:
        """Returns what a dialogue about `picture` is about."""
        return self._setup_of(image).topic

    def task_of(self, image: int) -> str:
        """Returns the task that `picture` shows."""
        return self._setup_of(image).scenes.task

    def _setup_of(self, image: int) -> "_Setup":
        return self._setups[int(np.searchsorted(self._ends, image, side="right"))]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setup:
    """Scenes without their images, and where these lie among all."""

    scenes: Scenes
    start: int
    end: int
    topic: texts.Topic


class DialogueBuilder:
    """Turns progress into dialogues of token ids.

    Args:
        tokenizer: the pocket judge's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._image = tokenizer.convert_tokens_to_ids(IMAGE)

    def batch(
        self,
        task: texts.Task,
        topics: Sequence[texts.Topic],
        progress: NDArray[np.float32],
        images: NDArray[np.int64],
        tie_gaps: FloatArray,
    ) -> Dialogues:
        """Returns the dialogues of `task`.

        Args:
            task: what is asked.
            topics: [B] what each is about.
            progress: [B, 2] of the left and right image.
            images: [B, 2] places of these images in the step's list.
            tie_gaps: [B] a gap in progress below this is no difference.
        """
        dialogues = [
            self._dialogue(task, topic, float(left), float(right), label_of(left, right, tie_gap))
            for topic, (left, right), tie_gap in zip(topics, progress, tie_gaps, strict=True)
        ]
        ids, targets = padded(dialogues, self._tokenizer.pad_token_id)
        shown = {"label": 0, "score": 1}.get(task, 2)
        return Dialogues(
            ids=ids,
            targets=targets,
            positions=rope_positions(ids == self._image),
            images=torch.from_numpy(images[:, :shown].copy()),
        )

    def _dialogue(
        self, task: texts.Task, topic: texts.Topic, left: float, right: float, label: int
    ) -> tuple[list[int], list[int]]:
        report = texts.report(topic.phrase, left, right, label) if task == "label" else ""
        turn = texts.messages(task, topic.goal, report)
        prompt = self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        prompt = prompt.replace(IMAGE, IMAGE * NUM_VISUAL_TOKENS)
        answer = texts.answer(task, topic.phrase, left, right, label) + STOP
        return self._tokenizer(prompt).input_ids, self._tokenizer(answer).input_ids


def rope_positions(is_visual: Tensor) -> Tensor:
    """Returns [3, B, N] positions as Qwen3-VL counts them: an image's tokens share one time and spread over a grid.

    Args:
        is_visual: [B, N] True for images' tokens, in runs of `NUM_VISUAL_TOKENS`.

    Source: Qwen3-VL's interleaved rotary positions, `Qwen3VLModel.get_rope_index` in transformers, for square images.
    """
    layouts, layout_of_row = torch.unique(is_visual, dim=0, return_inverse=True)  # a few: one per length of the goal
    return torch.stack([_layout_positions(layout.tolist()) for layout in layouts], dim=1)[:, layout_of_row]


def _layout_positions(is_visual: Sequence[bool]) -> Tensor:
    """[3, N] positions of one row."""
    side = GRID // MERGE
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    grid = torch.stack([torch.zeros_like(rows), rows, columns]).flatten(1)  # [3, NUM_VISUAL_TOKENS]
    pieces, place, position = [], 0, 0
    while place < len(is_visual):
        if is_visual[place]:
            pieces.append(grid + position)
            place, position = place + NUM_VISUAL_TOKENS, position + side
        else:
            pieces.append(torch.full((3, 1), position))
            place, position = place + 1, position + 1
    return torch.cat(pieces, dim=1)
