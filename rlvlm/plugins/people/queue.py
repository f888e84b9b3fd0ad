"""Questions that wait for a person, and people's answers: the folder `people/` of a label store.

`judge` puts questions here and takes answers out; `page` shows them to people. The two are
separate processes that share nothing but this folder, so either may die and come back. As in the store itself, each
writer appends lines to its own segment and nothing is ever changed: taking an answer back is one more line.

An answer is on disk before the page shows the next question. It can be taken back for `UNDO_S` seconds; then it is
*kept*: it goes into the label store under the stamp `human:NAME`, where judges find it.
"""

import fcntl
import hmac
import json
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any, Literal

import numpy as np

from rlvlm.core.disk import NOT_OFFERED
from rlvlm.core.errors import first_line
from rlvlm.core.foreign import open_inside
from rlvlm.core.judging import Label, Score, Stamp, Status, Verdict
from rlvlm.labels.records import PERSON_PREFIX, Answer, Question, read_as, read_question
from rlvlm.labels.segments import CorruptLine, Place, Segments
from rlvlm.labels.store import LabelStore

FOLDER = "people"
"""Folder within a label store; holds the lines, and a lock file for each judge that asks."""
UNDO_S = 10.0
"""Time in which an answer can be taken back, in seconds."""
NAME_RULE = "1 to 32 letters, digits, dots, underscores or hyphens"
MAX_RATING = 5
"""Highest rating of a clip, for a finished task; 1 is the lowest."""
MANY_EQUAL = 0.5
"""Share of `equal` above which the pairs teach next to nothing."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,32}")
_TICKET = re.compile(r"[qr][0-9a-f]{16}")
_MAX_SECONDS = 3_600.0
_RANKS = {"ask": 0, "said": 1}
"""Rank of a line's kind among lines that are read together; others have 2."""


Choice = Literal["left", "right", "equal", "skip"] | float
"""A person's choice: a side of a pair, or the rating of a clip from 1 to `MAX_RATING`."""


def check_name(name: str) -> str:
    """Returns the name of a person, after checking that it is fit for stamps, links and cookies.

    Raises:
        ValueError: it is not.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"a person's name is {NAME_RULE}, got {name[:80]!r}; use initials or a nickname")
    return name


def new_ticket(
    key: bytes = b"", question: str = "", name: str = "", *, is_repeat: bool = False, swapped: bool | None = None
) -> str:
    """Returns a new name for one showing of a question; it encodes the order of the sides, and a signature by which
    `is_given` knows it again, so servers keep no state.

    Args:
        key: key of the server.
        question: `Question.id`.
        name: name of the person.
        is_repeat: whether the person has answered the question before.
        swapped: whether the sides are exchanged; None draws it.
    """
    kind, drawn = "r" if is_repeat else "q", secrets.token_hex(4)
    if swapped is not None:
        drawn = drawn[:-1] + f"{int(drawn[-1], 16) // 2 * 2 + swapped:x}"
    return kind + _signature(key, kind, drawn, question, name) + drawn


def is_given(ticket: str, key: bytes, question: str, name: str) -> bool:
    """Returns whether `new_ticket` made this ticket with these arguments."""
    signature = _signature(key, ticket[:1], ticket[9:], question, name)
    return bool(_TICKET.fullmatch(ticket)) and hmac.compare_digest(ticket[1:9], signature)


def _signature(key: bytes, *parts: str) -> str:
    return hmac.new(key, json.dumps(parts).encode(), "sha256").hexdigest()[:8]


def is_swapped(ticket: str) -> bool:
    """Returns whether the showing has left and right exchanged."""
    return bool(int(ticket[-1], 16) & 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """One person's answer to one showing of a question."""

    question: str
    """`Question.id`, for the order in which it was asked."""
    ticket: str
    """Name of the showing; an answer that is sent twice has the same ticket."""
    name: str
    """Name of the person."""
    client: str
    """Number of the browser page that sent the answer."""
    choice: Choice
    """Choice in the order in which the question was asked, however it was shown."""
    seconds: float
    """Seconds from the display of the images to the answer."""
    when: float
    """Unix time, seconds."""

    def __post_init__(self) -> None:
        if not _TICKET.fullmatch(self.ticket):
            raise ValueError("a ticket is q or r and 16 hexadecimal digits")
        check_name(self.name)
        if not 0 <= self.seconds <= _MAX_SECONDS:
            raise ValueError(f"an answer takes 0 to {_MAX_SECONDS:g} seconds, got {self.seconds}")

    @property
    def is_repeat(self) -> bool:
        """Whether the person had answered the question before, in the other order."""
        return self.ticket.startswith("r")


@dataclass(kw_only=True, slots=True)
class Asked:
    """A question for people, with their answers so far."""

    question: Question
    agreement: int = 1
    """Number of different people to ask, >= 1."""
    each_order: bool = False
    """Whether a pair in the other order is another question, as a bench needs it."""
    said: dict[str, Said] = field(default_factory=dict)
    """Answers by ticket, without those taken back."""
    kept: set[str] = field(default_factory=set)
    """Tickets of the answers in the label store."""

    @property
    def answers(self) -> dict[str, Said]:
        """First answer of each person, by name, without repeats."""
        found: dict[str, Said] = {}
        for said in self.said.values():
            if not said.is_repeat:
                found.setdefault(said.name, said)
        return found

    @property
    def is_open(self) -> bool:
        """Whether more people have to answer."""
        return len(self.answers) < self.agreement

    def agreed(self, *, is_final: bool = False) -> Choice | None:
        """Returns the choice of more than half of the people, else `equal` or the mean of the ratings.

        None while answers are missing or, unless `is_final`, can still be taken back.
        """
        given = [said for said in self.answers.values() if is_final or said.ticket in self.kept]
        choices: list[Choice] = [said.choice for said in given[: self.agreement]]
        if len(choices) < self.agreement:
            return None
        for choice in choices:
            if 2 * choices.count(choice) > len(choices):
                return choice
        # without a majority for `skip` somebody gave a rating
        ratings = [choice for choice in choices if not isinstance(choice, str)]
        return "equal" if self.question.is_pair else float(np.mean(ratings))


@dataclass(frozen=True, kw_only=True, slots=True)
class PersonFigures:
    """Statistics of a person's answers."""

    answers: int
    """Number of answers without repeats."""
    median_s: float
    """Median time per answer in seconds; NaN without answers."""
    equal: int
    """Number of pairs called equal."""
    pairs: int
    repeats: int
    """Number of pairs that were shown again with left and right exchanged."""
    different: int
    """Number of repeats with another answer than the first time: the person's own error."""

    @property
    def teaches_little(self) -> bool:
        """Whether the person calls so many pairs equal that they teach next to nothing."""
        return self.pairs >= 10 and self.equal > MANY_EQUAL * self.pairs


class PeopleQueue:
    """Questions of a store that wait for people, as far as this process has read them.

    Args:
        store: keeps images and answers.
    """

    def __init__(self, store: LabelStore) -> None:
        self.store = store
        self.folder = store.folder / FOLDER
        self.asked: dict[str, Asked] = {}
        """Questions by `Question.id`, in the order in which they were first asked."""
        self._lines = Segments(self.folder)
        self._questions: dict[str, str] = {}  # ticket to question, also for answers that were taken back
        self._early: list[tuple[Place, dict[str, Any]]] = []

    def refresh(self) -> None:
        """Reads the lines that any process wrote since the last call."""
        found = [*self._early, *self._lines.new_records()]
        self._early = []
        # questions, then answers, then what became of them: another process wrote each, perhaps in an earlier segment.
        # A line about one that is not there yet is kept for the next call.
        for place, record in sorted(found, key=lambda item: _RANKS.get(str(item[1].get("kind")), 2)):
            try:
                self._take(record)
            except KeyError:
                self._early.append((place, record))
            except (CorruptLine, TypeError, ValueError) as error:
                self._lines.report(place, f"its record makes no sense: {type(error).__name__} {first_line(error)}")

    def find(self, question: Question) -> tuple[Asked, bool] | None:
        """Returns the question as asked, and whether with left and right exchanged; None if it never was."""
        if asked := self.asked.get(question.id):
            return asked, False
        mirrored = self.asked.get(question.swapped.id) if question.is_pair else None
        return (mirrored, True) if mirrored is not None and not mirrored.each_order else None

    def ask(self, questions: Iterable[Question], *, agreement: int = 1, each_order: bool = False) -> int:
        """Opens questions, whose images are in the store, and returns the number of new ones.

        Raises:
            OSError: the disk cannot be written.
        """
        self.refresh()
        fresh: dict[str, Question] = {}
        for question in questions:
            is_mirrored = not each_order and question.is_pair and question.swapped.id in fresh
            if question.id not in self.asked and not is_mirrored and (each_order or self.find(question) is None):
                fresh[question.id] = question
        about = {"kind": "ask", "agreement": agreement, "each_order": each_order}
        self._append([{**about, "question": asdict(question), "when": time.time()} for question in fresh.values()])
        return len(fresh)

    def add(self, said: Said) -> bool:
        """Writes an answer to disk, and returns whether it counts.

        It does not if it was sent before, or if the person has answered the question in another window.

        Raises:
            KeyError: there is no such question.
            ValueError: the question has no such answer.
            OSError: the disk cannot be written.
        """
        asked = self.asked[said.question]
        _check_choice(asked.question, said.choice)
        if said.ticket in self._questions or (not said.is_repeat and said.name in asked.answers):
            return False
        self._append([{"kind": "said", **asdict(said)}])
        return True

    def undo(self, client: str) -> Said | None:
        """Takes back a page's last answer, and returns it; None if there is none, or if it was kept already."""
        found = [
            said
            for asked in self.asked.values()
            for said in asked.said.values()
            if said.client == client and said.ticket not in asked.kept
        ]
        if not found:
            return None
        last = max(found, key=lambda said: said.when)
        self._append([{"kind": "undo", "ticket": last.ticket}])
        return last

    def keep(self, undo_s: float = UNDO_S) -> int:
        """Puts answers older than `undo_s` into the label store, and returns their number.

        If killed half way it repeats the work, which is harmless: of equal lines in a store the first counts.

        Raises:
            OSError: the disk cannot be written; nothing is lost.
        """
        now = time.time()
        ripe = [
            (asked.question, said)
            for asked in self.asked.values()
            for said in asked.said.values()
            if said.ticket not in asked.kept and said.when <= now - undo_s
        ]
        self.store.add_answers([_stored(question, said) for question, said in ripe])
        if ripe:
            self._append([{"kind": "kept", "tickets": [said.ticket for _, said in ripe]}])
        return len(ripe)

    def waiting(self) -> int:
        return sum(asked.is_open for asked in self.asked.values())

    def figures(self, name: str) -> PersonFigures:
        first, repeats = [], []
        for asked in self.asked.values():
            for said in asked.said.values():
                if said.name == name:
                    (repeats if said.is_repeat else first).append((asked, said))
        pairs = [said for asked, said in first if asked.question.is_pair]
        return PersonFigures(
            answers=len(first),
            median_s=float(np.median([said.seconds for _, said in first])) if first else float("nan"),
            equal=sum(said.choice == "equal" for said in pairs),
            pairs=len(pairs),
            repeats=len(repeats),
            different=sum(
                said.choice != asked.answers[name].choice for asked, said in repeats if name in asked.answers
            ),
        )

    def people(self) -> list[str]:
        return sorted({said.name for asked in self.asked.values() for said in asked.said.values()})

    def attend(self) -> IO[bytes]:
        """Marks this process as waiting for answers, until the file is closed or the process ends."""
        self.store.mark()  # a folder with other contents would not count as a store
        askers = self.folder / "askers"
        askers.mkdir(parents=True, exist_ok=True)
        file = open(askers / f"{secrets.token_hex(8)}.lock", "wb")  # noqa: SIM115 - held by the caller
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # without locks a page never learns that a run has ended
            if error.errno not in NOT_OFFERED:
                raise
        return file

    def askers(self) -> Literal["none", "alive", "gone"]:
        """Returns whether a run or bench waits for answers; gone: one did, and has ended."""
        files = sorted((self.folder / "askers").glob("*.lock")) if self.folder.is_dir() else []
        for path in files:
            with suppress(OSError), open_inside(self.store.folder, path) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the kernel released it with the process
                except OSError:
                    return "alive"
        return "gone" if files else "none"

    def _append(self, records: Sequence[dict[str, Any]]) -> None:
        self.store.mark()
        self._lines.append(records)
        self.refresh()

    def _take(self, record: dict[str, Any]) -> None:
        """Processes one line; raises if it makes no sense."""
        match record["kind"]:
            case "ask":
                question = read_question(record["question"])
                agreement, each_order = int(record["agreement"]), bool(record["each_order"])
                self.asked.setdefault(
                    question.id, Asked(question=question, agreement=max(1, agreement), each_order=each_order)
                )
            case "said":
                said = read_as(Said, {name: value for name, value in record.items() if name != "kind"})
                asked = self.asked[said.question]
                _check_choice(asked.question, said.choice)
                if said.ticket not in self._questions:  # sent twice, it counts once
                    self._questions[said.ticket] = said.question
                    asked.said[said.ticket] = said
            case "undo":
                self.asked[self._questions[record["ticket"]]].said.pop(record["ticket"], None)
            case "kept":
                for ticket in record["tickets"]:
                    self.asked[self._questions[ticket]].kept.add(ticket)
            case other:
                raise ValueError(f"no kind {other!r} is known")


def person_stamp(name: str) -> Stamp:
    """Returns the stamp of a person's answers."""
    return Stamp(judge=PERSON_PREFIX + name, revision="", prompt="page/1", decoding="")


def to_answer(kind: str, choice: Choice, stamp: Stamp, seconds: float) -> Answer:
    """Converts a choice to an answer to a question of that kind; `skip` becomes `invalid`."""
    if kind == "score":
        value = None if isinstance(choice, str) else (choice - 1) / (MAX_RATING - 1)
        return Score(status=Status.of(value), value=value, stamp=stamp, text=f"{choice}", latency_s=seconds)
    label = {"left": Label.LEFT, "right": Label.RIGHT, "equal": Label.TIE}.get(str(choice))
    return Verdict(status=Status.of(label), label=label, stamp=stamp, text=str(choice), latency_s=seconds)


def swap_choice(choice: Choice) -> Choice:
    """Returns the choice for exchanged sides."""
    return "right" if choice == "left" else "left" if choice == "right" else choice


def _stored(question: Question, said: Said) -> tuple[Question, Answer]:
    """Returns the question and answer for the label store.

    A repeat becomes an answer to the pair in the other order, as for a judge that is asked in both, so that reports
    count how often a person is consistent.
    """
    choice = said.choice
    if said.is_repeat:
        question, choice = question.swapped, swap_choice(choice)
    answer = to_answer(question.kind, choice, person_stamp(said.name), said.seconds)
    return question, replace(answer, question=question.id)


def _check_choice(question: Question, choice: Choice) -> None:
    known = ("left", "right", "equal", "skip") if question.is_pair else (*range(1, MAX_RATING + 1), "skip")
    if isinstance(choice, bool) or choice not in known:
        rule = "left, right, equal or skip" if question.is_pair else f"1 to {MAX_RATING}, or skip"
        raise ValueError(f"an answer is {rule}, got {str(choice)[:40]!r}")


def people_lines(store: LabelStore) -> list[str]:
    """Returns a line for each person: number of answers, speed, consistency."""
    queue, lines = PeopleQueue(store), []
    queue.refresh()
    for name in queue.people():
        figures = queue.figures(name)
        again = f", {figures.different} of {figures.repeats} repeats answered differently" if figures.repeats else ""
        lines.append(
            f"{name}: {figures.answers:,} answers, median {figures.median_s:.1f} s, "
            f"{figures.equal:,} of {figures.pairs:,} pairs equal{again}\n"
        )
    return lines
