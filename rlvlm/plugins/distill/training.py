"""Trains a pocket judge on another judge's labels: `rlvlm distill --from STORE --out DIR`.

The student learns the form `direct`: one forward pass per pair, a thousand times cheaper than a large VLM that writes
its reasoning. It learns the teacher's answers, right or wrong; the truth, if the store has it, only grades both.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Label, Query, Stamp, Verdict
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.prompts import compare_messages
from rlvlm.labels.images import MissingImage
from rlvlm.labels.records import truth_about
from rlvlm.labels.store import LabelStore, open_store
from rlvlm.plugins.distill.config import DistillConfig
from rlvlm.pocket.models import weights_folder
from rlvlm.vlms.supervised import (
    DialogueBuilder,
    Dialogues,
    Metrics,
    adamw,
    answer_loss,
    cosine,
    encode,
    jitter,
    optimise,
    patches_of,
    save,
)

_LOGGER = logging.getLogger(__name__)

MIN_LABELS = 20
"""Minimum number of labels to learn from, and to be graded on; fewer would make the figures meaningless."""
_ANSWERS = {Label.LEFT: "0", Label.RIGHT: "1", Label.TIE: "-1"}
"""Labels as written by `prompts.LABEL_TEXTS`."""
_DECIDED = (Label.LEFT, Label.RIGHT)
_BLANK = np.zeros((1, 2, 2, 3), np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """One label of the teacher."""

    goal: str
    left: str
    """Digest of the left image."""
    right: str
    answer: Label
    truth: Label | None
    """Side with more true progress, tie if they are equal; None if unknown."""


AGREES = "agrees with the teacher"
Grades = dict[str, float]
"""Shares by row name, as in the card's table; NaN if there is nothing to divide by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Distillation:
    """The result of a distillation."""

    teacher: Stamp
    num_learnt: int
    """Number of labels learned from."""
    num_graded: int
    """Number of held-out labels behind the figures."""
    goals: tuple[str, ...]
    teacher_accuracy: float
    """Accuracy of the teacher on the graded labels, as far as the truth is known."""
    before: Grades
    """Grades of the initial weights."""
    after: Grades


def distill(store: Path, out: Path, config: DistillConfig) -> Distillation:
    """Trains the student and writes it with its card into `out`, ready for `--judge.backend pocket --judge.model OUT`.

    Args:
        store: folder of the label store.
        out: new or empty folder.
        config: settings of the training.

    Raises:
        UsageError: `store` is no label store, has too few labels or several teachers; `out` is in use.
    """
    # checked before an hour of training; nothing of the user's is overwritten
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is in use", "choose a new folder with --out")
    opened = open_store(store)
    teacher, labels = read_labels(opened, config.judge, config.prompt)
    learnt, held_out = split(labels, config.held_out)
    if min(len(learnt), len(held_out)) < MIN_LABELS:
        raise UsageError(
            f"{len(learnt)} labels to learn from and {len(held_out)} held out are too few: "
            f"{MIN_LABELS} of each are needed",
            "collect more labels, or change --held-out",
        )
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    graded = []
    for label in held_out[:: -(-len(held_out) // config.graded)]:  # evenly spread over the store
        try:
            left, right = opened.image(label.left)[None], opened.image(label.right)[None]
        except MissingImage as missing:
            _LOGGER.warning("a held-out label is left out: %s", missing)
            continue
        graded.append((label, Query(goal=label.goal, left=left, right=right)))

    tokenizer = AutoTokenizer.from_pretrained(weights_folder(), trust_remote_code=False)
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(weights_folder())
    model = _initial_model(config)
    out.parent.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, image_processor, out)
    # graded as saved, in bfloat16, so that before and after differ by training alone
    before = grade(out, graded)
    dataset = LabelDataset(opened, learnt, tokenizer, image_processor, config.seed)

    def loss_of_step() -> tuple[Tensor, Metrics]:
        batch, patches = dataset.draw(config.num_pairs)
        loss, right = answer_loss(model, batch, encode(model, patches))  # both halves learn: new scenes need both
        return loss, {"loss": float(loss.detach()), "right": right}

    model.train()
    optimizers = [adamw(model.parameters(), config.lr)]
    for _ in optimise("distilling", config.steps, optimizers, loss_of_step, schedule=cosine, metrics={}):
        pass
    model.eval()
    save(model, tokenizer, image_processor, out)
    made = Distillation(
        teacher=teacher,
        num_learnt=len(learnt),
        num_graded=len(graded),
        before=before,
        after=grade(out, graded),
        goals=tuple(sorted({label.goal for label in labels})),
        teacher_accuracy=_accuracy([(label.answer, label.truth) for label, _ in graded]),
    )
    (out / "CARD.md").write_text(card(made, config))
    return made


def read_labels(store: LabelStore, judge: str = "", prompt: str = "") -> tuple[Stamp, list[Labelled]]:
    """Returns one teacher's stamp and its labels of pairs of single images.

    Args:
        store: label store.
        judge: part of the teacher's name as in `Stamp.judge`; may be empty if the store has only one.
        prompt: part of `Stamp.prompt`; may be empty if the store has only one.

    Raises:
        UsageError: the store has no such label, or several teachers to choose from.
    """
    truths = store.truths()
    found: list[tuple[Stamp, Labelled]] = []
    for item in store.answers():
        stamp, question, answer = item.answer.stamp, item.question, item.answer
        if judge not in stamp.judge or prompt not in stamp.prompt or not isinstance(answer, Verdict):
            continue
        is_pair = len(question.left) == len(question.right) == 1 and not question.goal_picture
        if answer.label is None or not is_pair or not store.has_images(question):
            continue
        truth = truth_about(question, truths)
        labelled = Labelled(
            goal=question.goal,
            left=question.left[0],
            right=question.right[0],
            answer=answer.label,
            truth=truth.better if truth else None,
        )
        found.append((stamp, labelled))
    # two teachers that disagree would teach a mixture that cannot be measured
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
    """Splits labels into learned and held-out ones; a held-out label shows an image that no learned one shows.

    The held-out images, a `share` in (0, 1) of all, are chosen by their content alone.
    """
    # by image and not by label: a label of two learned images would be no test of sight
    limit = int(share * 2**32)  # digests are uniform, so a share of their range is a share of the images
    sides: tuple[list[Labelled], list[Labelled]] = ([], [])
    for label in labels:
        sides[min(int(label.left[:8], 16), int(label.right[:8], 16)) < limit].append(label)
    return sides


class LabelDataset:
    """Labels as dialogues and their images as patches, drawn at random.

    Images are held at the pocket judge's input size, 28 kB each.

    Args:
        store: has the images; labels with an unreadable image are left out.
        labels: labels to learn.
        tokenizer: the pocket judge's.
        image_processor: the pocket judge's.
        seed: seed of the draws.

    Raises:
        UsageError: none of the images can be read.
    """

    def __init__(
        self, store: LabelStore, labels: Sequence[Labelled], tokenizer: Any, image_processor: Any, seed: int
    ) -> None:
        self._image_processor = image_processor
        self._rng = np.random.default_rng(seed)
        shapes = AutoConfig.from_pretrained(weights_folder())
        side_px = round(image_processor.size["longest_edge"] ** 0.5)
        visual = shapes.vision_config
        tokens_per_image = (side_px // visual.patch_size // visual.spatial_merge_size) ** 2
        image_token = tokenizer.convert_ids_to_tokens(shapes.image_token_id)
        self._dialogues = DialogueBuilder(tokenizer, image_token, image_token * tokens_per_image)
        digests = sorted({digest for label in labels for digest in (label.left, label.right)})
        # resized once: at every draw it would cost more than the step
        images, indices = [], {}
        for digest in digests:
            try:
                image = Image.fromarray(store.image(digest))
            except MissingImage:
                continue
            indices[digest] = len(images)
            images.append(np.asarray(image.resize((side_px, side_px), Image.Resampling.BICUBIC)))
        if not images:
            raise UsageError(f"none of {len(digests)} images in {store.folder} can be read", "restore its pictures/")
        self._images = np.stack(images)
        self._by_goal: dict[str, list[tuple[int, int, Label]]] = {}
        for label in sorted(labels, key=lambda each: each.goal):
            if label.left in indices and label.right in indices:
                rows = self._by_goal.setdefault(label.goal, [])
                rows.append((indices[label.left], indices[label.right], label.answer))
        # goals are drawn as often as they were labelled
        counts = np.array([len(rows) for rows in self._by_goal.values()])
        self._shares = counts / counts.sum()

    def draw(self, num_pairs: int) -> tuple[Dialogues, Tensor]:
        """Draws dialogues about `num_pairs` labels of one goal, each in both orders, and the patches of their images.

        Swapping the images swaps the label, so that the student learns no preference for a side.
        """
        # a batch is about one goal, so the prompt is tokenised once
        goal = list(self._by_goal)[self._rng.choice(len(self._shares), p=self._shares)]
        drawn = self._rng.integers(len(self._by_goal[goal]), size=num_pairs)
        rows = [self._by_goal[goal][index] for index in drawn]
        rows += [(right, left, answer.swapped) for left, right, answer in rows]
        # an image in several rows goes through the vision encoder once
        shown, indices = np.unique([row[:2] for row in rows], return_inverse=True)
        # only the text is used: images come as patches, so any two placeholders give the chat
        chat = compare_messages("direct", Query(goal=goal, left=_BLANK, right=_BLANK))
        batch = self._dialogues.build([(chat, _ANSWERS[answer]) for *_, answer in rows], indices.reshape(-1, 2))
        return batch, jitter(patches_of(self._images[shown], self._image_processor), self._rng)


def grade(folder: Path, graded: Sequence[tuple[Labelled, Query]]) -> Grades:
    """Returns the grades of the pocket judge in `folder`, asked in the form `direct` by the same code as in a run."""
    judge = build_judge(JudgeConfig(backend="pocket", model=str(folder)))
    queries = [query for _, query in graded]
    given = [verdict.label for verdict in judge.compare(queries)]
    turned = judge.compare([query.swapped for query in queries])
    teacher = [label.answer for label, _ in graded]
    same = [mine is theirs for mine, theirs in zip(given, teacher, strict=True)]
    decided = [hit for hit, theirs in zip(same, teacher, strict=True) if theirs is not Label.TIE] or [np.nan]
    swaps = [(mine and mine.swapped) is verdict.label for mine, verdict in zip(given, turned, strict=True)]
    return {
        AGREES: float(np.mean(same)),
        "agrees where the teacher decided": float(np.mean(decided)),
        "decided labels right, by the simulator": _accuracy(
            [(mine, label.truth) for mine, (label, _) in zip(given, graded, strict=True)]
        ),
        "label swaps with the order": float(np.mean(swaps)),
    }


def graded_table(made: Distillation) -> str:
    """Returns the grades before and after as a Markdown table."""
    rows = "".join(
        f"| {name} | {_percent(made.before[name])} | {_percent(made.after[name])} |\n" for name in made.after
    )
    return f"| on {made.num_graded:,} held-out labels | before | after |\n|---|---|---|\n{rows}"


def card(made: Distillation, config: DistillConfig) -> str:
    """Returns the student's card as Markdown."""
    teacher = made.teacher
    settings = ", ".join(f"{name} {value}" for name, value in asdict(config).items() if value != "")
    goals = "; ".join(f"`{goal}`" for goal in made.goals)
    return (
        "# A distilled pocket judge\n\n"
        f"Trained on {made.num_learnt:,} labels of `{teacher.judge}`, revision `{teacher.revision or 'unknown'}`, "
        f"prompt `{teacher.prompt or 'none'}`, `{teacher.decoding or 'no decoding'}`.\nGoals: {goals}. It answers in "
        "the mode `direct` and about these goals, as the teacher would, mistakes\nincluded. Written answers "
        "(`single_stage`, `two_stage`, scores) were not trained.\n\n"
        "Each held-out label shows an image that training never showed. Before: the weights it began with "
        f"({config.start}).\n\n{graded_table(made)}\n"
        f"The teacher's own decided labels are right in {_percent(made.teacher_accuracy)}.\n\n"
        f"Settings: {settings}.\n\nUse: `--judge.backend pocket --judge.model DIR --judge.prompt direct`\n"
    )


def _initial_model(config: DistillConfig) -> Any:
    """Returns the initial float32 model: the pocket judge's weights, or random ones of the same shapes."""
    folder = weights_folder()
    if config.start == "shipped":
        return AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
    shapes = AutoConfig.from_pretrained(folder)
    model: Any = AutoModelForImageTextToText.from_config(shapes, dtype=torch.float32)
    # generation settings, such as the stop tokens, exist only in the pretrained folder
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _accuracy(pairs: Sequence[tuple[Label | None, Label | None]]) -> float:
    """Returns the share of correct labels among those where both label and truth name a side."""
    hits = [given is truth for given, truth in pairs if given in _DECIDED and truth in _DECIDED]
    return sum(hits) / len(hits) if hits else float("nan")


def _percent(share: float) -> str:
    return "unknown" if share != share else f"{100 * share:.1f} %"
