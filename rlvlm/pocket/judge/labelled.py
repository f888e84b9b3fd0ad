"""What a distilled judge learns from: another judge's labels in a store, with their images. Used by `distill`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Label, Query, Stamp, Verdict
from rlvlm.labels.images import MissingImage
from rlvlm.labels.records import truth_about
from rlvlm.labels.store import LabelStore
from rlvlm.pocket.judge.batches import NUM_VISUAL_TOKENS, Dialogues, jittered, padded, rope_positions, to_patches
from rlvlm.pocket.judge.model import PICTURE_PX
from rlvlm.pocket.judge.texts import messages
from rlvlm.pocket.judge.tokenizer import IMAGE, STOP

ANSWERS = {Label.LEFT: 0, Label.RIGHT: 1, Label.TIE: -1}
"""As `prompts.LABEL_TEXTS` writes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """One label of the teacher."""

    goal: str
    left: str
    """Digest of the image."""
    right: str
    answer: Label
    truth: Label | None
    """The side with more true progress, tie where they are equal; None where nobody knows."""


def read_labels(store: LabelStore, judge: str = "", prompt: str = "") -> tuple[Stamp, list[Labelled]]:
    """The labels of one teacher about pairs of single images, and the teacher's stamp.

    Args:
        store: any.
        judge: part of the name of the teacher, as it stands in `Stamp.judge`; may be empty where there is only one.
        prompt: part of `Stamp.prompt`, likewise.

    Raises:
        UsageError: no such label, or several teachers to choose from.
    """
    truths = store.truths()
    found: list[tuple[Stamp, Labelled]] = []
    for item in store.answers():
        stamp, question = item.answer.stamp, item.question
        is_pair = len(question.left) == len(question.right) == 1 and not question.goal_picture
        if judge in stamp.judge and prompt in stamp.prompt and is_pair and store.has_images(question):
            if isinstance(item.answer, Verdict) and item.answer.label is not None:
                truth = truth_about(question, truths)
                labelled = Labelled(
                    goal=question.goal,
                    left=question.left[0],
                    right=question.right[0],
                    answer=item.answer.label,
                    truth=truth.better if truth else None,
                )
                found.append((stamp, labelled))
    teachers = Counter(stamp for stamp, _ in found)
    if not teachers:
        raise UsageError(
            f"{store.folder} has no label to learn from: decided or tied, about two single images that "
            "are in the store" + (f", by a judge like {judge!r} {prompt!r}" if judge or prompt else ""),
            f"see what there is: rlvlm labels show {store.folder}",
        )
    if len(teachers) > 1:
        names = ", ".join(f"{stamp.judge} {stamp.prompt} ({count:,})" for stamp, count in teachers.most_common(8))
        raise UsageError(
            f"{store.folder} has labels of {len(teachers)} teachers: {names}",
            "name one: --judge NAME --prompt NAME; a part of the name will do",
        )
    return found[0][0], [labelled for _, labelled in found]


def split(labels: Sequence[Labelled], share: float) -> tuple[list[Labelled], list[Labelled]]:
    """Labels to learn from, and labels held out: those that show an image which no learnt one shows.

    Args:
        labels: all.
        share: of the images that are held out, in (0, 1); which ones depends on their content alone.
    """
    limit = int(share * 2**32)
    held_out = [min(int(one.left[:8], 16), int(one.right[:8], 16)) < limit for one in labels]
    return (
        [one for one, is_out in zip(labels, held_out, strict=True) if not is_out],
        [one for one, is_out in zip(labels, held_out, strict=True) if is_out],
    )


def to_query(store: LabelStore, labelled: Labelled) -> Query:
    """The question as it was put to the teacher.

    Raises:
        MissingImage: the store's file is not what was written.
    """
    return Query(goal=labelled.goal, left=store.image(labelled.left)[None], right=store.image(labelled.right)[None])


class LabelDataset:
    """The labels as dialogues and the images as patches, drawn at random.

    Images are held at the size that the pocket judge sees, 28 kB each.

    Args:
        store: of the images; labels whose image cannot be read are left out.
        labels: to learn.
        tokenizer: the pocket judge's.
        seed: of the draws.

    Raises:
        UsageError: not one image can be read.
    """

    def __init__(self, store: LabelStore, labels: Sequence[Labelled], tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = np.random.default_rng(seed)
        digests = sorted({digest for one in labels for digest in (one.left, one.right)})
        loaded = list(_load(store, digests))
        if not loaded:
            raise UsageError(f"none of {len(digests)} images in {store.folder} can be read", "restore its pictures/")
        self._images = np.stack([picture for _, picture in loaded])
        places = {digest: place for place, (digest, _) in enumerate(loaded)}
        self._by_goal: dict[str, NDArray[np.int64]] = {}
        for goal in sorted({one.goal for one in labels}):
            rows = [
                (places[one.left], places[one.right], ANSWERS[one.answer])
                for one in labels
                if one.goal == goal and one.left in places and one.right in places
            ]
            if rows:
                self._by_goal[goal] = np.array(rows)
        counts = np.array([len(rows) for rows in self._by_goal.values()])
        self._shares = counts / counts.sum()

    def draw(self, num_pairs: int) -> tuple[Dialogues, Tensor]:
        """Dialogues about `num_pairs` labels of one goal, each in both orders, and the patches of their images.

        Swapping the images swaps the label, so that the student cannot prefer a place.
        """
        goal = list(self._by_goal)[self._rng.choice(len(self._shares), p=self._shares)]
        rows = self._by_goal[goal][self._rng.integers(len(self._by_goal[goal]), size=num_pairs)]
        swapped = rows[:, [1, 0, 2]]
        swapped[:, 2] = np.array([1, 0, -1])[rows[:, 2]]
        rows = np.concatenate([rows, swapped])
        shown, places = np.unique(rows[:, :2], return_inverse=True)
        batch = self._dialogues(goal, rows[:, 2], torch.from_numpy(places.reshape(-1, 2)))
        return batch, jittered(to_patches(self._images[shown]).float(), self._rng)

    def _dialogues(self, goal: str, answers: NDArray[np.int64], pictures: Tensor) -> Dialogues:
        tokenizer = self._tokenizer
        prompt = tokenizer.apply_chat_template(messages("direct", goal), tokenize=False, add_generation_prompt=True)
        start = tokenizer(prompt.replace(IMAGE, IMAGE * NUM_VISUAL_TOKENS)).input_ids
        ends = {answer: tokenizer(f"{answer}{STOP}").input_ids for answer in (0, 1, -1)}
        ids, targets = padded([(start, ends[int(answer)]) for answer in answers], tokenizer.pad_token_id)
        image = tokenizer.convert_tokens_to_ids(IMAGE)
        return Dialogues(ids=ids, targets=targets, positions=rope_positions(ids == image), images=pictures)


def _load(store: LabelStore, digests: Sequence[str]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """The images that can be read, shrunk as the judge's processor would shrink them."""
    for digest in digests:
        try:
            picture = store.image(digest)
        except MissingImage:
            continue
        yield digest, np.asarray(Image.fromarray(picture).resize((PICTURE_PX, PICTURE_PX), Image.Resampling.BICUBIC))
