"""Teaches a pocket judge another judge's labels: `rlvlm distill --from STORE --out DIR`.

The student learns the mode `direct`: one forward pass per pair, a thousand times cheaper than a large VLM that writes
its reasoning. It learns what the teacher answered, right or wrong; the truth, where the store knows it, only grades
both.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Label, Query, Stamp
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.images import MissingImage
from rlvlm.labels.store import LabelStore, open_store
from rlvlm.pocket.judge.config import DistillConfig
from rlvlm.pocket.judge.labelled import LabelDataset, Labelled, read_labels, split, to_query
from rlvlm.pocket.judge.learning import Facts, adamw, along_cosine, answer_loss, look, optimise, save
from rlvlm.pocket.judge.model import build_image_processor, build_model
from rlvlm.vlms.shipped import weights_folder

logger = logging.getLogger(__name__)

FEWEST = 20
"""Labels to learn from, and to be graded on, below which a figure would mean nothing."""
_SWAPPED = {Label.LEFT: Label.RIGHT, Label.RIGHT: Label.LEFT, Label.TIE: Label.TIE, None: None}
_DECIDED = (Label.LEFT, Label.RIGHT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grades:
    """How a judge does on held-out labels; NaN where there is nothing to divide by."""

    agreement: float
    """Share of the teacher's labels that it gives too, ties among them."""
    agreement_decided: float
    """The same among labels that are left or right for the teacher."""
    accuracy: float
    """Share of its own decided labels that name the side with more true progress."""
    swaps: float
    """Share of pairs whose label swaps when the images swap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Distillation:
    """What a distillation came to."""

    teacher: Stamp
    num_learnt: int
    """Labels that were learnt from."""
    num_graded: int
    """Held-out labels that the figures are about."""
    goals: tuple[str, ...]
    teacher_accuracy: float
    """Of the teacher on the graded labels, as far as the truth is known."""
    before: Grades
    """Of the weights that it began with."""
    after: Grades


def distill(store: Path, out: Path, config: DistillConfig) -> Distillation:
    """Trains the student and writes it with its card into `out`, ready for `--judge.backend pocket --judge.model OUT`.

    Args:
        store: folder of the label store.
        out: new folder.
        config: how.

    Raises:
        UsageError: `store` is none, has too few labels or several teachers; `out` is in use.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is in use", "choose a new folder with --out")
    opened = open_store(store)
    teacher, labels = read_labels(opened, config.judge, config.prompt)
    learnt, held_out = split(labels, config.held_out)
    if min(len(learnt), len(held_out)) < FEWEST:
        raise UsageError(
            f"{len(learnt)} labels to learn from and {len(held_out)} held out are too few, {FEWEST} of each are wanted",
            "collect more labels, or change --held-out",
        )
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    graded = _readable(opened, held_out[:: -(-len(held_out) // config.graded)])  # evenly spread
    tokenizer, model = _begin(config.start)
    out.parent.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, build_image_processor(), out)
    before = grade(out, graded)
    _train(model, LabelDataset(opened, learnt, tokenizer, config.seed), config)
    save(model, tokenizer, build_image_processor(), out)
    known = [(one.answer, one.truth) for one, _ in graded]
    made = Distillation(
        teacher=teacher,
        num_learnt=len(learnt),
        num_graded=len(graded),
        before=before,
        after=grade(out, graded),
        goals=tuple(sorted({one.goal for one in labels})),
        teacher_accuracy=_accuracy(known),
    )
    (out / "CARD.md").write_text(card(made, config))
    return made


def grade(folder: Path, graded: Sequence[tuple[Labelled, Query]]) -> Grades:
    """How the pocket judge in `folder` does, asked directly and through the same code as in a run."""
    judge = build_judge(JudgeConfig(backend="pocket", model=str(folder)))
    queries = [query for _, query in graded]
    given = [verdict.label for verdict in judge.compare(queries)]
    turned = judge.compare([replace(query, left=query.right, right=query.left) for query in queries])
    teacher = [one.answer for one, _ in graded]
    same = [mine is theirs for mine, theirs in zip(given, teacher, strict=True)]
    return Grades(
        agreement=_share(same),
        agreement_decided=_share([hit for hit, theirs in zip(same, teacher, strict=True) if theirs is not Label.TIE]),
        accuracy=_accuracy([(mine, one.truth) for mine, (one, _) in zip(given, graded, strict=True)]),
        swaps=_share([_SWAPPED[mine] is verdict.label for mine, verdict in zip(given, turned, strict=True)]),
    )


def graded_table(made: Distillation) -> str:
    """Before and after, as a Markdown table."""
    lines = (
        ("agrees with the teacher", "agreement"),
        ("agrees where the teacher decided", "agreement_decided"),
        ("decided labels right, by the simulator", "accuracy"),
        ("label swaps with the order", "swaps"),
    )
    grades = (made.before, made.after)
    rows = "".join(
        f"| {name} | {' | '.join(_percent(getattr(each, figure)) for each in grades)} |\n" for name, figure in lines
    )
    return f"| on {made.num_graded:,} held-out labels | before | after |\n|---|---|---|\n{rows}"


def card(made: Distillation, config: DistillConfig) -> str:
    """The student's card, Markdown."""
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


def _begin(start: Literal["shipped", "scratch"]) -> tuple[Any, Any]:
    """Tokenizer and float32 model to go on from."""
    tokenizer = AutoTokenizer.from_pretrained(weights_folder(), trust_remote_code=False)
    if start == "scratch":
        return tokenizer, build_model(tokenizer)
    model = AutoModelForImageTextToText.from_pretrained(
        weights_folder(), dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    )
    return tokenizer, model


def _train(model: Any, dataset: LabelDataset, config: DistillConfig) -> None:
    """ProgressHead and speech together: new scenes need both."""

    def loss_of_step() -> tuple[torch.Tensor, Facts]:
        batch, patches = dataset.draw(config.num_pairs)
        loss, right = answer_loss(model, batch, look(model, patches))
        return loss, {"loss": float(loss.detach()), "right": right}

    facts: Facts = {}
    model.train()
    optimizers = [adamw(model.parameters(), config.lr)]
    for _ in optimise("distilling", config.steps, optimizers, loss_of_step, ramp=along_cosine, facts=facts):
        pass
    model.eval()


def _readable(store: LabelStore, labels: Sequence[Labelled]) -> list[tuple[Labelled, Query]]:
    """The labels with their questions; those whose images cannot be read are left out."""
    found = []
    for one in labels:
        try:
            found.append((one, to_query(store, one)))
        except MissingImage as missing:
            logger.warning("a held-out label is left out: %s", missing)
    return found


def _accuracy(pairs: Sequence[tuple[Label | None, Label | None]]) -> float:
    """Share of decided labels that are the true ones, where the truth decides too."""
    return _share([given is truth for given, truth in pairs if given in _DECIDED and truth in _DECIDED])


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else float("nan")


def _percent(share: float) -> str:
    return "unknown" if share != share else f"{100 * share:.1f} %"
