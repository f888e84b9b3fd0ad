"""Training data of the pocket judge: it learns to read progress off drawn scenes, and to score, describe and compare.

The dialogues are the prompts of `rlvlm.judges.prompts` with the answers it should give.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pocket_models.dataset import Rows
from pocket_models.network import (
    IMAGE,
    TOKENS_PER_IMAGE,
    build_image_processor,
    build_tokenizer,
    longest_first,
    split_phrases,
)
from pocket_models.scenes import TIE_GAP, Scenes, collect_scenes, label_of
from rlvlm.core.judging import Clip, Query
from rlvlm.judge_bench.items import draw_gap_pairs
from rlvlm.judges import prompts
from rlvlm.vlms.chats import Chat
from rlvlm.vlms.images import resize
from rlvlm.vlms.supervised import DialogueBuilder, Dialogues, Metrics

_LOGGER = logging.getLogger(__name__)

Form = Literal["direct", "single_stage", "two_stage", "label", "score"]
FORMS: dict[Form, float] = {"direct": 1.0, "single_stage": 0.4, "two_stage": 0.4, "label": 0.2, "score": 0.3}
"""What is asked (`label` is stage 2 of two_stage, `score` is about one image), and how often, relative to `direct`."""
CONCLUSIONS = {
    0: "The first is nearer to the goal.",
    1: "The second is nearer to the goal.",
    -1: "There is no clear difference.",
}
PATCH_PX = 16
_SEPARATORS = ("First: ", ". Second: ", ". ")
_BLANK = np.zeros((1, 2, 2, 3), np.uint8)
_GOAL_SLOT, _REPORT_SLOT = "GOALSLOT", "REPORTSLOT"
_PERCENTS = 101


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeData:
    """The pocket judge: pairs of scenes of the seven tasks."""

    scenes: str = "all"
    """A task, `all` of them, or `module:function` that makes scenes of one's own."""

    def load(self, seed: int, rng: np.random.Generator, tokenizer: Any = None) -> "JudgeDataset":
        """Plays and draws the scenes; a tokenizer is built unless given."""
        return JudgeDataset(collect_scenes(self.scenes, "train", seed), tokenizer)


class JudgeDataset:
    """Scenes at the size that the model sees, and dialogues about pairs of them.

    Args:
        scenes: set-ups of any tasks, drawn by their `share`; taken one by one, and their full-size images dropped.
        tokenizer: of a model to go on from; None builds one.
    """

    patch_px = PATCH_PX
    jitters_training = jitters_encoding = True

    def __init__(self, scenes: Iterable[Scenes], tokenizer: Any = None) -> None:
        self.held_out: dict[str, Rows] = {}
        self.abilities: dict[str, Any] = {}
        self._setups: list[Scenes] = []
        image_processor = build_image_processor(PATCH_PX)
        frames = []  # only what the model sees is kept: at full size all scenes would be some gigabytes
        for each in scenes:
            _LOGGER.info("%s, %s: %d images, %d frames", each.task, each.name, len(each.images), len(each.frames))
            frames += [resize(image, image_processor) for image in each.images]
            self._setups.append(replace(each, images=each.images[:, :0, :0].copy()))  # a copy: a view would keep all
        self.frames = np.stack(frames)
        self.progress = np.concatenate([each.progress for each in self._setups])
        self._ends = np.cumsum([len(each.progress) for each in self._setups])
        topics = dict.fromkeys((each.goal, each.phrase) for each in self._setups)
        self.tokenizer = tokenizer or build_tokenizer(corpus(topics), phrases([phrase for _, phrase in topics]))
        self._dialogues = DialogueBuilder(self.tokenizer, IMAGE, IMAGE * TOKENS_PER_IMAGE)

    def setup_of(self, row: int) -> Scenes:
        """The set-up that an image belongs to."""
        return self._setups[int(np.searchsorted(self._ends, row, side="right"))]

    def build_heads(self, width: int) -> "ProgressHead":
        """The head that reads the progress."""
        return ProgressHead(width, self.progress, [each.task for each in self._setups for _ in each.progress])

    def draw_images(self, num: int, rng: np.random.Generator) -> Rows:
        """Images of pairs, so that small differences are seen as often as they are asked about."""
        return self.draw_pairs(num // 2, rng).ravel()

    def draw_pairs(self, num_pairs: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """[num_pairs, 2] images, both of one set-up: gaps of all sizes, small ones more often."""
        shares = np.array([each.share for each in self._setups])  # not by their images: hard tasks are drawn more often
        setups = rng.choice(len(shares), size=num_pairs, p=shares / shares.sum())
        # half of the gaps are small: a run's judge is mostly asked about images that are nearly alike
        sizes = np.where(rng.random(num_pairs) < 0.5, rng.random(num_pairs), 0.3 * rng.random(num_pairs) ** 2)
        gaps = (sizes * rng.choice([-1, 1], size=num_pairs)).astype(np.float32)
        pairs = np.empty((num_pairs, 2), np.int64)
        for number, each in enumerate(self._setups):
            drawn = setups == number
            start = self._ends[number] - len(each.progress)
            pairs[drawn] = draw_gap_pairs(each.progress, gaps[drawn], rng) + start
        return pairs

    def draw_dialogues(self, num: int, rng: np.random.Generator, errors: NDArray[np.float32]) -> dict[str, Dialogues]:
        """Dialogues of every form about `num` pairs times its share, each pair in both orders.

        A gap counts as no difference where it is smaller than the encoder's own `errors` on both images together: the
        judge learns to decide where it sees, and to say so where it does not.
        """
        batches = {}
        for form, share in FORMS.items():
            pairs = self.draw_pairs(max(1, round(share * num)), rng)
            pairs = np.concatenate([pairs, pairs[:, ::-1]])  # both orders, or it would learn to prefer a side
            batches[form] = self.dialogues(form, pairs, np.maximum(TIE_GAP, errors[pairs].sum(1)))
        return batches

    def dialogues(self, form: Form, pairs: NDArray[np.int64], tie_gaps: NDArray[np.floating]) -> Dialogues:
        """The dialogues of one form about `pairs` [B, 2]; a gap in progress below `tie_gaps` [B] is no difference."""
        turns = []
        for pair, tie_gap in zip(pairs, tie_gaps, strict=True):
            scenes, (left, right) = self.setup_of(pair[0]), self.progress[pair]
            label = label_of(left, right, tie_gap)
            reported = report(scenes.phrase, left, right, label) if form == "label" else ""
            turns.append((chat_of(form, scenes.goal, reported), answer(form, scenes.phrase, left, right, label)))
        num_shown = {"label": 0, "score": 1}.get(form, 2)
        return self._dialogues.build(turns, pairs[:, :num_shown])


class ProgressHead(nn.Module):
    """Reads an image's progress off each of its visual tokens.

    Args:
        width: of a visual token.
        progress: [N] of all images, in [0, 1].
        tasks: [N] what each shows, for the log.
    """

    def __init__(self, width: int, progress: NDArray[np.floating], tasks: Sequence[str]) -> None:
        super().__init__()
        self.amount = nn.Linear(width, 1)
        self.percent = nn.Linear(width, _PERCENTS)
        self._progress = torch.from_numpy(progress)
        self._tasks = np.array(tasks)

    def loss(self, encoded: Tensor, rows: Rows) -> tuple[Tensor, Metrics]:
        """Squared error of the amount, and cross-entropy of the percentage, over the tokens of every layer."""
        progress = self._progress[rows]
        places = torch.arange(_PERCENTS) / (_PERCENTS - 1)
        # a soft target over percentages: a miss by one percent is nearly right
        soft = torch.softmax(-(((places - progress[:, None]) / 0.01) ** 2), dim=-1)  # [B, 101]
        tokens = encoded.flatten(1, -2)
        surprise = -(soft[:, None] * torch.log_softmax(self.percent(tokens), dim=-1)).sum(-1).mean()
        error = self.amount(tokens).squeeze(-1) - progress[:, None]
        loss = 10 * error.square().mean() + 0.3 * surprise
        errors, tasks = error.detach().mean(1).abs(), self._tasks[rows]
        by_task = {f"error/{task}": float(errors[torch.from_numpy(tasks == task)].mean()) for task in np.unique(tasks)}
        return loss, {"loss": float(loss.detach()), **by_task}

    def errors(self, encoded: Tensor, rows: Rows) -> Tensor:
        """[B] distance of the tokens' mean from the progress."""
        return (self.amount(encoded.flatten(1, -2)).squeeze(-1).mean(1) - self._progress[rows]).abs()


def report(phrase: str, left: float, right: float, label: int) -> str:
    """A stage-1 answer about two progresses in [0, 1] and the label 0, 1 or -1."""
    shown = [phrase.format(percent=round(100 * progress)) for progress in (left, right)]
    first, second, end = _SEPARATORS
    return f"{first}{shown[0]}{second}{shown[1]}{end}{CONCLUSIONS[label]}"


def answer(form: Form, phrase: str, left: float, right: float, label: int) -> str:
    """What the judge should answer; `right` and `label` do not matter for a score."""
    if form == "score":
        return str(round(100 * left))
    if form == "two_stage":
        return report(phrase, left, right, label)
    if form == "single_stage":
        return f"{report(phrase, left, right, label)}\n{label}"
    return str(label)


def chat_of(form: Form, goal: str, reported: str = "") -> Chat:
    """What the judge is asked in a run, with blanks in the place of the images."""
    if form == "label":
        return prompts.label_messages(goal, reported)
    if form == "score":
        return prompts.score_messages("progress", Clip(goal=goal, frames=_BLANK))
    return prompts.compare_messages(form, Query(goal=goal, left=_BLANK, right=_BLANK))


def phrases(described: Sequence[str]) -> list[str]:
    """The fixed pieces of all prompts and answers: one token each.

    Args:
        described: the phrases of all tasks, each with the slot `{percent}`.
    """
    chats = [chat_of(form, _GOAL_SLOT, _REPORT_SLOT) for form in FORMS]
    texts = [part.get("text", "") for chat in chats for message in chat for part in message["content"]]
    pieces = {"user\n", "assistant\n", *CONCLUSIONS.values()} | split_phrases(texts, (_GOAL_SLOT, _REPORT_SLOT))
    # what stands before and after a percentage, with the separators that a report puts between the two images
    for phrase in described:
        before, _, after = phrase.partition("{percent}")
        pieces |= {_SEPARATORS[0] + before, after + _SEPARATORS[1] + before, after + _SEPARATORS[2]}
    return longest_first(piece for piece in pieces if len(piece) > 1)


def corpus(topics: Iterable[tuple[str, str]]) -> list[str]:
    """Dialogues about each goal and phrase with all amounts: what the tokenizer learns its merges from."""
    texts = []
    for goal, phrase in topics:  # every number, for a number that was never met is cut into other tokens than its like
        for percent in range(_PERCENTS):
            left, right = percent / 100, 1 - percent / 100
            label = int(right > left)
            for form in FORMS:
                chat = chat_of(form, goal, report(phrase, left, right, label))
                asked = [part.get("text", "") for message in chat for part in message["content"]]
                texts.append("\n".join([*asked, answer(form, phrase, left, right, label)]))
    return texts
