"""Contents of a trainer's dataset: images, heads that read what the simulator knows about them, and dialogues."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from pocket_models.network import IMAGE, TOKENS_PER_IMAGE, longest_first, split_phrases
from rlvlm.core.judging import Clip
from rlvlm.core.steps import Frames
from rlvlm.judges import prompts
from rlvlm.judges.config import ScoreMode
from rlvlm.vlms.chats import Chat
from rlvlm.vlms.supervised import DialogueBuilder, Dialogues, Metrics

Rows = NDArray[np.int64]
"""Which of a dataset's images."""
FINE_PATCH_PX = 24
"""Of 144 px images: the 16-point formula of points24 stays legible, a tile of a 6 x 6 MiniGrid is one patch."""
_GOAL_SLOT, _ACTION_SLOT = "GOALSLOT", "ACTIONSLOT"


class VisionHeads(Protocol):
    """A module that reads what the simulator knows off visual tokens; used in training only, never shipped."""

    def loss(self, encoded: Tensor, rows: Rows) -> tuple[Tensor, Metrics]:
        """How well it reads the images `rows` off `encoded` [B, layers, tokens, D]."""
        ...

    def errors(self, encoded: Tensor, rows: Rows) -> Tensor:
        """[B] by how much it misreads each, 0 to 1."""
        ...


class Dataset(Protocol):
    """One of the four: `judge.JudgeDataset`, `scorer.ScorerDataset`, `video.VideoDataset`, `policy.PolicyDataset`."""

    tokenizer: Any
    patch_px: int
    frames: Frames
    """[N, H, W, 3] all images, each once, at the size that the model sees."""
    held_out: dict[str, Rows]
    """Images of each task that the vision encoder never trains on; it has learned enough when it reads these."""
    jitters_training: bool
    """Whether the vision encoder is trained on images of jittered brightness and contrast."""
    jitters_encoding: bool
    """Whether the language model then gets to see jittered ones as well."""
    abilities: dict[str, Any]
    """What a judge made of the weights may be asked; empty for one that may be asked as the pocket judge."""

    def build_heads(self, width: int) -> Any:
        """`VisionHeads` for visual tokens of that width."""
        ...

    def draw_images(self, num: int, rng: np.random.Generator) -> Rows:
        """About `num` images of a step of the vision encoder."""
        ...

    def draw_dialogues(self, num: int, rng: np.random.Generator, errors: NDArray[np.float32]) -> dict[str, Dialogues]:
        """The dialogues of a step of the language model by kind, given how far the encoder misreads each image."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageGroup:
    """Images of one env, each different one once, with what there is to read in them."""

    task: str
    start: int
    """Where they begin among all images."""
    values: NDArray[np.int64]
    """[N, V] what there is to read in each."""
    sizes: tuple[int, ...]
    """[V] how many values each column may take."""


def readable_columns(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Columns of images' keys [N, P] that differ among the images of a task, and how many values each may take."""
    columns = np.flatnonzero((keys != keys[0]).any(0))  # what never differs cannot be read off an image
    return columns, tuple(int(keys[:, column].max()) + 1 for column in columns)


class ReadingHeads(nn.Module):
    """Reads values off all visual tokens of an image, with one linear layer per group of images.

    Args:
        groups: in the order of their images.
        width: of a visual token.
    """

    def __init__(self, groups: Sequence[ImageGroup], width: int) -> None:
        super().__init__()
        self._groups = groups
        self.readers = nn.ModuleList(nn.Linear(width * TOKENS_PER_IMAGE, sum(group.sizes)) for group in groups)

    def loss(self, encoded: Tensor, rows: Rows) -> tuple[Tensor, Metrics]:
        """Cross-entropies in nats, over values summed and divided by the root of their number, summed over groups."""
        total, metrics = torch.zeros(()), {}
        # sum / sqrt(V): a group with many values counts more, but does not drown the others
        for group, _, columns in self._read(encoded, rows):
            losses = torch.stack([functional.cross_entropy(logits, wanted) for logits, wanted in columns])
            total = total + losses.sum() / len(columns) ** 0.5
            right = torch.stack([logits.argmax(1) == wanted for logits, wanted in columns])
            metrics[f"read/{group.task}"] = float(right.float().mean())
        return total, {"loss": float(total.detach()), **metrics}

    def errors(self, encoded: Tensor, rows: Rows) -> Tensor:
        """[B] share of each image's values that are misread."""
        found = torch.zeros(len(rows))
        for _, inside, columns in self._read(encoded, rows):
            wrong = torch.stack([logits.argmax(1) != wanted for logits, wanted in columns])
            found[torch.from_numpy(inside)] = wrong.float().mean(0)
        return found

    def _read(
        self, encoded: Tensor, rows: Rows
    ) -> list[tuple[ImageGroup, NDArray[np.bool_], list[tuple[Tensor, Tensor]]]]:
        """Each group that is met, which of `rows` are its, and per value the logits and the truth."""
        found = []
        for group, reader in zip(self._groups, self.readers, strict=True):
            inside = (rows >= group.start) & (rows < group.start + len(group.values))
            if inside.any():  # a small batch may have no image of a group
                # all tokens of the last layer at once: where in the image a value stands differs from env to env
                logits = reader(encoded[torch.from_numpy(inside)][:, -1].flatten(1))
                values = torch.from_numpy(group.values[rows[inside] - group.start])
                found.append(
                    (group, inside, list(zip(logits.split(group.sizes, dim=1), values.unbind(1), strict=True)))
                )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledQuestion:
    """What a judge is asked about some images, and the right answer."""

    mode: ScoreMode
    goal: str
    images: tuple[int, ...]
    """Indices into the dataset, in order of time."""
    answer: str
    action: str = ""

    @property
    def chat(self) -> Chat:
        """What a judge is asked in a run, with blanks in the place of the images."""
        # the words come from where a run takes them; images are put in as tokens that were encoded once
        blank = np.zeros((len(self.images), 2, 2, 3), np.uint8)
        return prompts.score_messages(self.mode, Clip(goal=self.goal, frames=blank, action=self.action))


def build_dialogues(questions: Sequence[LabelledQuestion], tokenizer: Any) -> Dialogues:
    """Questions about equally many images, as token ids."""
    builder = DialogueBuilder(tokenizer, IMAGE, IMAGE * TOKENS_PER_IMAGE)
    images = np.array([question.images for question in questions])
    return builder.build([(question.chat, question.answer) for question in questions], images)


def question_phrases() -> list[str]:
    """The fixed pieces of the questions about utility and success: one token each."""
    texts = []
    for mode in ("utility", "success"):
        question = LabelledQuestion(mode=mode, goal=_GOAL_SLOT, action=_ACTION_SLOT, images=(0, 1), answer="")
        texts += [part["text"] for message in question.chat for part in message["content"] if part["type"] == "text"]
    fixed = {"user\n", "assistant\n", *prompts.RATING_TEXTS, *prompts.ANSWERS_YES, *prompts.ANSWERS_NO}
    return longest_first(fixed | split_phrases(texts, (_GOAL_SLOT, _ACTION_SLOT)) - {""})
