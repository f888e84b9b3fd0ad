"""Batches of the pocket judge's training: pictures as patches, dialogues as token ids. Used by `train`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.judges.pocket import texts
from rlvlm.judges.pocket.model import MERGE, PATCH_PX, PICTURE_PX, build_image_processor
from rlvlm.judges.pocket.scenes import Scenes, draw_gap_pairs, label_of
from rlvlm.judges.pocket.tokenizer import IMAGE, STOP

GRID = PICTURE_PX // PATCH_PX
NUM_VISUAL_TOKENS = (GRID // MERGE) ** 2
IGNORED = -100
"""Marks tokens that are not learned."""
_CHUNK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Dialogues of one task, padded on the right."""

    ids: Tensor
    """[B, N] tokens."""
    targets: Tensor
    """[B, N] the answer's tokens where they stand, `IGNORED` elsewhere."""
    positions: Tensor
    """[3, B, N] rope positions: time, height, width."""
    pictures: Tensor
    """[B, 0 to 2] which of the step's pictures each dialogue shows."""


def to_patches(pictures: NDArray[np.uint8]) -> Tensor:
    """Returns pictures [N, H, W, 3] as float16 input [N, patches, values] of the model, made by its processor."""
    processor = build_image_processor()
    chunks = [list(pictures[start : start + _CHUNK]) for start in range(0, len(pictures), _CHUNK)]
    patches = [processor(chunk, return_tensors="pt")["pixel_values"].half() for chunk in chunks]
    return torch.cat(patches).view(len(pictures), GRID * GRID, -1)


class Album:
    """The training scenes as patches, and pairs drawn from them.

    Args:
        scenes: set-ups, drawn by their `share`.
    """

    def __init__(self, scenes: Sequence[Scenes]) -> None:
        self._scenes = list(scenes)
        self._patches = torch.cat([to_patches(each.pictures) for each in scenes])
        self._progress = np.concatenate([each.progress for each in scenes])
        self._starts = np.cumsum([0, *(len(each.pictures) for each in scenes)])

    def __len__(self) -> int:
        return len(self._progress)

    def draw_pairs(self, num_pairs: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Returns [num_pairs, 2] pictures, both of one set-up: gaps of all sizes, small ones more often."""
        shares = np.array([each.share for each in self._scenes])
        setups = rng.choice(len(shares), size=num_pairs, p=shares / shares.sum())
        sizes = np.where(rng.random(num_pairs) < 0.5, rng.random(num_pairs), 0.3 * rng.random(num_pairs) ** 2)
        gaps = (sizes * rng.choice([-1, 1], size=num_pairs)).astype(np.float32)
        pairs = np.empty((num_pairs, 2), np.int64)
        for number, each in enumerate(self._scenes):
            drawn = setups == number
            pairs[drawn] = draw_gap_pairs(each, gaps[drawn], rng) + self._starts[number]
        return pairs

    def patches(self, pictures: NDArray[np.int64], rng: np.random.Generator) -> Tensor:
        """Returns [N, patches, values] of `pictures`, with a little noise, brightness and contrast, float32."""
        clean = self._patches[torch.from_numpy(pictures)].float()
        contrast, brightness = (torch.from_numpy(rng.normal(mean, 0.03, (len(clean), 1, 1))).float() for mean in (1, 0))
        return clean * contrast + brightness

    def progress(self, pictures: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the progress of `pictures`, same shape."""
        return self._progress[pictures]


class Lessons:
    """Turns progress into dialogues of token ids.

    Args:
        goal: fills the slot of the prompt.
        phrase: what a picture shows, with the slot `{percent}`.
        tokenizer: the pocket judge's.
    """

    def __init__(self, goal: str, phrase: str, tokenizer: Any) -> None:
        self._goal = goal
        self._phrase = phrase
        self._tokenizer = tokenizer
        self._image = tokenizer.convert_tokens_to_ids(IMAGE)

    def batch(self, task: texts.Task, progress: NDArray[np.float32], pictures: NDArray[np.int64]) -> Batch:
        """Returns the dialogues of `task`.

        Args:
            task: what is asked.
            progress: [B, 2] of the left and right picture.
            pictures: [B, 2] places of these pictures in the step's list.
        """
        dialogues = [self._dialogue(task, float(left), float(right)) for left, right in progress]
        length = max(len(prompt) + len(answer) for prompt, answer in dialogues)
        ids = torch.full((len(dialogues), length), self._tokenizer.pad_token_id)
        targets = torch.full_like(ids, IGNORED)
        for row, (prompt, answer) in enumerate(dialogues):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            targets[row, len(prompt) : end] = torch.tensor(answer)
        shown = {"label": 0, "score": 1}.get(task, 2)
        return Batch(
            ids=ids,
            targets=targets,
            positions=rope_positions(ids == self._image),
            pictures=torch.from_numpy(pictures[:, :shown].copy()),
        )

    def _dialogue(self, task: texts.Task, left: float, right: float) -> tuple[list[int], list[int]]:
        label = label_of(left, right)
        report = texts.report(self._phrase, left, right, label) if task == "label" else ""
        turn = texts.messages(task, self._goal, report)
        prompt = self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        prompt = prompt.replace(IMAGE, IMAGE * NUM_VISUAL_TOKENS)
        answer = texts.answer(task, self._phrase, left, right, label) + STOP
        return self._tokenizer(prompt).input_ids, self._tokenizer(answer).input_ids


def rope_positions(is_visual: Tensor) -> Tensor:
    """Returns [3, B, N] positions as Qwen3-VL counts them: a picture's tokens share one time and spread over a grid.

    Args:
        is_visual: [B, N] True for pictures' tokens, in runs of `NUM_VISUAL_TOKENS`, at the same places in every row.

    Source: Qwen3-VL's interleaved rotary positions, `Qwen3VLModel.get_rope_index` in transformers, for square pictures.
    """
    side = GRID // MERGE
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    grid = torch.stack([torch.zeros_like(rows), rows, columns]).flatten(1)  # [3, NUM_VISUAL_TOKENS]
    pieces, place, position = [], 0, 0
    mask = is_visual[0].tolist()
    while place < len(mask):
        if mask[place]:
            pieces.append(grid + position)
            place, position = place + NUM_VISUAL_TOKENS, position + side
        else:
            pieces.append(torch.full((3, 1), position))
            place, position = place + 1, position + 1
    return torch.cat(pieces, dim=1)[:, None].expand(3, len(is_visual), -1)
