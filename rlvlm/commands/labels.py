"""`rlvlm labels show | export | import | ask`: label stores."""

import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rlvlm.core.checks import PositiveInt, check_bounds
from rlvlm.core.console.arguments import HELP, run_form, value_of
from rlvlm.core.console.signals import StopRequest
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.guests import guest_of, load, with_guests
from rlvlm.judges.config import HumanConfig, JudgeConfig
from rlvlm.runs.folder import check_trust, find_folder, label_store
from rlvlm.serving.config import PageConfig

if TYPE_CHECKING:
    from rlvlm.labels.people import PeopleQueue
    from rlvlm.labels.store import LabelStore

_LABEL_FILES = "pkl"
"""Form of `labels import` for files whose names do not say it."""
_LINE_EVERY_S = 15.0
"""Minimum interval between two progress lines, in seconds."""


@dataclass(frozen=True)
class ShowLabelsArguments:
    """Summarise a label store, checking every line."""

    store: tyro.conf.Positional[Path]
    """Folder of the store, e.g. `labels` in a run's folder."""


@dataclass(frozen=True)
class ExportLabelsArguments:
    """Export a label store as one Parquet file."""

    store: tyro.conf.Positional[Path]
    """Folder of the store."""
    out: Path = Path("labels.parquet")
    """File to write; an existing one is replaced."""
    names: tyro.conf.FlagCreatePairsOff[bool] = False
    """Keep the names of people; otherwise they become human:person-1, human:person-2."""


@dataclass(frozen=True, kw_only=True)
class AskArguments:
    """Let people answer questions in a browser, on a page of this machine behind a token."""

    place: tyro.conf.Positional[Path]
    """Folder of a run, label store, or recorded data as for `rlvlm score`."""
    page: Annotated[PageConfig, tyro.conf.arg(name="")] = field(default_factory=PageConfig)
    questions: Literal["auto", "waiting", "answered"] = "auto"
    """waiting: questions that a run asks people, now and later; answered: those that other judges answered, to
    compare a person with them; auto: waiting if a run asks people, else answered. For recorded data the questions
    are pairs of frames and of ends of episodes."""
    max_questions: PositiveInt | None = None
    """Number of questions drawn at random from those that other judges answered, >= 1; by default all."""
    agreement: PositiveInt = 1
    """Number of different people who answer each of these questions, >= 1."""
    goal: str = ""
    """Goal in the questions, instead of recorded episodes' own sentences."""
    camera: str = ""
    """Camera of recorded data to show; by default the first that is not a wrist's."""
    every: PositiveInt = 10
    """Interval between frames of recorded data that may be shown, >= 1."""
    pairs: PositiveInt = 4
    """Pairs of frames per recorded episode, >= 1."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""
    seed: int = 0
    """Seed of the random draws."""

    def __post_init__(self) -> None:
        check_bounds(self, "--")


def command(words: Sequence[str], prog: str) -> int:
    """Runs `labels show STORE`, `labels export STORE [--out FILE]`, `labels import FILES` or `labels ask PLACE`."""
    if words and words[0] == "import":
        return import_labels(words[1:], f"{prog} import")
    forms = {
        "show": (ShowLabelsArguments, show),
        "export": (ExportLabelsArguments, export),
        "ask": (AskArguments, ask),
    }
    return run_form(words, prog, forms, {"import": "Import other people's labels into a label store."})


def import_labels(words: Sequence[str], prog: str) -> int:
    """Runs `labels import FILES [--form NAME]`: hands over to the guest that reads such files.

    Raises:
        UsageError: no guest does.
    """
    kinds = with_guests("imports", {})
    ending = Path(next((word for word in words if not word.startswith("-")), "")).suffix.removeprefix(".")
    form = value_of("--form", words) or (ending if ending in kinds else _LABEL_FILES)
    if form not in kinds or (words and words[0] in HELP):
        lines = "".join(f"  {prog} FILES --form {name:10} {kind.text}\n" for name, kind in kinds.items())
        if form in kinds:
            sys.stdout.write(f"{lines}\noptions: {prog} --form {form} --help\n")
            return EXIT_DONE
        what = f"--form is one of {', '.join(kinds) or 'those of guests'}, got {form}{guest_of('imports', form)}"
        raise UsageError(what, f"{prog} --help")
    return load(kinds[form].call)(words, prog)


def show(arguments: ShowLabelsArguments) -> str:
    """Returns the number of answers of each judge, and people's statistics."""
    from rlvlm.labels.people import PeopleQueue
    from rlvlm.labels.store import open_store

    store = open_store(arguments.store)
    counts = store.count_lines()
    lines = [
        f"{counts['verdict']:,} verdicts, {counts['score']:,} scores, {counts['truth']:,} truths, "
        f"{counts['damaged']:,} damaged and {counts['unfinished']:,} unfinished lines; "
        f"{len(store):,} distinct answers\n"
    ]
    lines += [
        f"{count:>8,}  {stamp.judge}, {stamp.prompt}, {stamp.decoding}, revision {stamp.revision[:12] or 'unknown'}\n"
        for stamp, count in store.stamps().most_common()
    ]
    queue = PeopleQueue(store)
    queue.refresh()
    return "".join(lines + _people_lines(queue))


def export(arguments: ExportLabelsArguments) -> str:
    """Exports answers, and returns how many were written."""
    from rlvlm.labels.export import export_parquet
    from rlvlm.labels.store import open_store

    count = export_parquet(open_store(arguments.store), arguments.out, with_names=arguments.names)
    return f"{count:,} answers in {arguments.out}\n"


def ask(arguments: AskArguments) -> str:
    """Serves the page until Ctrl-C, or until recorded data are all answered, and returns a summary of the answers."""
    from rlvlm.labels.people import PeopleQueue
    from rlvlm.serving.label_page import label_page

    store, is_waited_for = _find_store(arguments.place, trust=arguments.trust)
    if store is None:
        return _ask_about_data(arguments)
    queue = PeopleQueue(store)
    queue.refresh()
    is_waited_for = is_waited_for or bool(queue.asked)
    if arguments.questions == "answered" or (arguments.questions == "auto" and not is_waited_for):
        questions = _of_other_judges(store)
        random.Random(arguments.seed).shuffle(questions)
        queue.ask(questions[: arguments.max_questions], agreement=arguments.agreement)
    before, last_line, last_text = _num_answers(queue), 0.0, ""
    with StopRequest() as stop, label_page(store, arguments.page, _say):
        _say("Ctrl-C ends the page; nothing is lost by that")
        while not stop:
            queue.refresh()
            text = f"{_num_answers(queue) - before:,} answered, {queue.waiting():,} questions wait"
            if text != last_text and time.monotonic() - last_line > _LINE_EVERY_S:
                _say(text)
                last_line, last_text = time.monotonic(), text
            time.sleep(0.2)
    queue.refresh()
    lines = [f"{_num_answers(queue) - before:,} answered now, {queue.waiting():,} questions wait\n"]
    return "".join(lines + _people_lines(queue))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()  # a link is of no use in a buffer


def _find_store(place: Path, *, trust: bool) -> "tuple[LabelStore | None, bool]":
    """Returns the store of a path, None for recorded data, and whether a run asks people; else raises UsageError. A
    run may name a store elsewhere, which is read and written, so its settings must be trusted.
    """
    from rlvlm.demonstrations.recordings import find_form
    from rlvlm.labels.store import is_store, open_store

    if is_store(place):
        return open_store(place), False
    with suppress(UsageError):
        find_form(place)
        return None, False
    try:
        folder = find_folder(place)
    except UsageError as error:
        what = f"{place} is neither a run's folder, a label store, nor recorded data" if place.exists() else str(error)
        raise UsageError(
            what, "name one like runs/TASK/<time>, its labels, or data that `rlvlm score` reads"
        ) from error
    check_trust([folder.path], trust=trust)
    config = folder.config()
    return label_store(folder, config), config.judge.is_human or config.asks_person


def _of_other_judges(store: "LabelStore") -> list[Any]:
    """Returns the questions that a judge, not a person, has answered, each once, if all of their images exist."""
    from rlvlm.labels.people import PREFIX

    found = {
        item.question.id: item.question for item in store.answers() if not item.answer.stamp.judge.startswith(PREFIX)
    }
    return [question for question in found.values() if store.has_images(question)]


def _ask_about_data(arguments: AskArguments) -> str:
    from rlvlm.reports.options import ScoreOptions  # reads recordings, which `labels show` does not
    from rlvlm.reports.score import score_data

    options = ScoreOptions(
        data=arguments.place,
        judge=JudgeConfig(backend="human", human=HumanConfig(agreement=arguments.agreement)),
        goal=arguments.goal,
        camera=arguments.camera,
        ask=("pairs",),
        every=arguments.every,
        pairs=arguments.pairs,
        preflight=0,
        trust=arguments.trust,
        seed=arguments.seed,
    )
    score_data(options, arguments.page)
    return ""


def _num_answers(queue: "PeopleQueue") -> int:
    return sum(len(asked.said) for asked in queue.asked.values())


def _people_lines(queue: "PeopleQueue") -> list[str]:
    """Returns a line for each person: number of answers, speed, consistency."""
    lines = []
    for name in queue.people():
        figures = queue.figures(name)
        again = f", {figures.different} of {figures.repeats} repeats answered differently" if figures.repeats else ""
        lines.append(
            f"{name}: {figures.answers:,} answers, median {figures.median_s:.1f} s, "
            f"{figures.equal:,} of {figures.pairs:,} pairs equal{again}\n"
        )
    return lines
