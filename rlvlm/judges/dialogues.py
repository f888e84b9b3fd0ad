"""Dialogues: for each form of question, the chats sent to a model and the parsing of its replies.

A dialogue is a generator: it yields the next request to the model, is sent the reply, and returns the result. So
the same code serves a model in this process, which answers a batch of dialogues turn by turn, and one behind an API,
which runs many of them concurrently. Pure; `asking` runs them.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import fsum, isfinite

import numpy as np

from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Usage, Verdict
from rlvlm.core.steps import spread
from rlvlm.judges import prompts
from rlvlm.judges.config import Mode, ScoreMode
from rlvlm.judges.reading import parse_change, parse_label, parse_rating, parse_score
from rlvlm.vlms.chats import Chat, ChatReply, ChatRequest

MIN_CHOICE_MASS = 1e-3
"""Total probability of the choices below which the model did not answer the question: invalid."""
WRITTEN_MASS = 0.5
"""Total probability of the choices as first tokens below which a label that the reply writes out goes before them: the
model answered in a sentence."""
MAX_BLUR = 0.1
"""How far choices that a server did not list among its likeliest tokens may move a value, at most."""
EMPTY = "(an empty reply)"
CUT = "(cut off by judge.max_new_tokens before the reply began; models that think first need thousands)"
REFUSAL = "(refused) "
LABELS = (Label.LEFT, Label.RIGHT, Label.TIE)
"""Labels in the order of `prompts.LABEL_TEXTS`."""
LABEL_TOKENS = [("0",), ("1",), tuple(text for minus in "-\u2212\u2013" for text in (minus, f"{minus}1"))]
"""First tokens of each label. In most vocabularies a tie is two tokens; no other label begins with a minus."""
YES_AND_NO = [prompts.ANSWERS_YES, prompts.ANSWERS_NO]
TRUE_AND_FALSE = [("True",), ("False",)]
RATINGS = [(text,) for text in prompts.RATING_TEXTS]
_CHOICES: dict[ScoreMode, list[tuple[str, ...]]] = {
    "success": YES_AND_NO,
    "utility": RATINGS,
    "statement": TRUE_AND_FALSE,
    "statement_raw": [(" True", "True"), (" False", "False")],  # the text goes on behind a colon
}
GRADED = frozenset(_CHOICES)
"""Forms of score that are read from probabilities."""
_ROUNDING = 1.01
_MARKS = " \t\r\n\"'`*.:"

Tokens = Sequence[tuple[str, float]]
"""First tokens and their probabilities."""
Spellings = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DialogueResult:
    """Result of a dialogue."""

    value: Label | float | None = None
    """Label, or score in [0, 1]; None if it could not be read or no answer came."""
    text: str
    """Model's reply, untrusted; if no answer came, the reason."""
    has_failed: bool = False
    """Whether no answer came."""
    fix: str = ""
    """What the user can do if no answer came, as far as the engine knows."""
    probabilities: tuple[float, float, float] | None = None
    """Probabilities of left, right and tie, if the model gives them."""
    latency_s: float = 0.0
    """Seconds until the answer; for a batch, until all of its answers. If none came, how long it was waited for: 0 for
    a question that was refused."""
    usage: Usage | None = None

    @property
    def _kept_text(self) -> str:
        return f"{self.text} ({self.fix})" if self.fix else self.text

    def verdict(self, stamp: Stamp) -> Verdict:
        """Returns the result as the answer to a comparison."""
        label = self.value if isinstance(self.value, Label) else None
        return Verdict(
            status=Status.FAILED if self.has_failed else Status.of(label),
            label=label,
            stamp=stamp,
            probabilities=self.probabilities,
            text=self._kept_text,
            latency_s=self.latency_s,
            usage=self.usage,
        )

    def score(self, stamp: Stamp, num_frames: int | None = None) -> Score:
        """Returns the result as the answer about a clip of which `num_frames` frames were shown."""
        value = self.value if isinstance(self.value, float) else None
        return Score(
            status=Status.FAILED if self.has_failed else Status.of(value),
            value=value,
            stamp=stamp,
            text=self._kept_text,
            latency_s=self.latency_s,
            usage=self.usage,
            num_frames=num_frames,
        )


Dialogue = Generator[ChatRequest, ChatReply, DialogueResult]
Choosing = Generator[ChatRequest, ChatReply, "tuple[_Shares | None, ChatReply]"]


def label_dialogue(mode: Mode) -> Callable[[Query], Dialogue]:
    """Returns the dialogue that asks for a comparison in the form `mode`."""
    return {"direct": _label_directly, "single_stage": _label_in_one, "two_stage": _label_in_two}[mode]


def score_dialogue(mode: ScoreMode, sentences: Mapping[str, str] = prompts.SENTENCES) -> Callable[[Clip], Dialogue]:
    """Returns the dialogue that asks for a score in the form `mode`, with its own words from `sentences` if any."""
    if mode == "delta":
        return partial(_score_delta, sentences)
    return partial(_score_by_choice if mode in GRADED else _score_in_words, mode, sentences)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shares:
    """Distribution of a model's probability over some choices."""

    shares: list[float]
    """Probability of each choice, normalised to sum to 1; all equal if no choice has any."""
    total: float
    """Total probability of the choices among all possible replies."""
    unlisted: float
    """Most that choices may hold beside that which a server did not list; 0 for our own engines."""
    text: str
    """Likeliest choice, or the written reply; if it is no answer, the reason."""
    is_answer: bool
    """Whether the model answered the question, and its text does not contradict that."""

    @property
    def blur(self) -> float:
        """Most by which `unlisted` may move one of the shares."""
        return self.unlisted / (self.total + self.unlisted) if self.unlisted else 0.0


def _choose(
    chat: Chat,
    choices: Sequence[Spellings],
    place_of: Callable[[str], int | None],
    tokens: Sequence[Spellings] | None = None,
) -> Choosing:
    """Asks a model to choose, and returns its probabilities, or None if it gives none, and its reply.

    An engine in our hands gives the probability of each choice, a server those of its likeliest first tokens. Both are
    read by one rule: the choices are normalised among themselves, and are an answer from `MIN_CHOICE_MASS` on.

    Args:
        chat: the question.
        choices: all spellings of each choice.
        place_of: returns the index of the choice that a text names; None if it names none for certain.
        tokens: first tokens that stand for each choice, for servers that give only those; None for the spellings.
    """
    # each spelling is a separate choice for the engine: a model that would write `Yes` means yes
    texts = tuple(text for spellings in choices for text in spellings)
    reply = yield ChatRequest(chat=chat, choices=texts, wants_log_probs=True)
    unlisted, written = 0.0, None
    if reply.choice_log_p is not None:
        each = iter(np.exp(reply.choice_log_p).tolist())
        masses = [fsum(next(each) for _ in spellings) for spellings in choices]
        text = texts[int(reply.choice_log_p.argmax())]
    else:
        listed = None if reply.is_refusal else token_masses(reply.first_tokens or (), tokens or choices)
        if listed is None:
            return None, reply
        masses, unlisted = listed
        text, written = _kept_text(reply), place_of(reply.readable)
    total = fsum(masses)
    if not isfinite(total):  # an engine's numbers that are no probabilities answer nothing
        total = 0.0
    shares = [mass / total for mass in masses] if total else [1 / len(masses)] * len(masses)
    likeliest, is_answer = shares.index(max(shares)), total >= MIN_CHOICE_MASS
    if not is_answer:
        names = ", ".join(spellings[0] for spellings in choices)
        reason = f"(none of {names}: together they have a probability of {total:.1g}, {MIN_CHOICE_MASS:g} is needed)"
        text = reason if reply.choice_log_p is not None else f"{text} {reason}"
    elif written not in (None, likeliest) and not reply.is_sampled:
        # a sampled text may differ from the likeliest choice; if a greedy one does, one of the two is not the answer,
        # such as a token of the model's reasoning
        is_answer, text = False, f"{text} (its probabilities say {choices[likeliest][0]})"
    return _Shares(shares=shares, total=total, unlisted=unlisted, text=text, is_answer=is_answer), reply


def token_masses(tokens: Tokens, choices: Sequence[Spellings]) -> tuple[list[float], float] | None:
    """Returns the probabilities of the choices as the first token of a server's reply.

    Args:
        tokens: the likeliest first tokens, each with its probability.
        choices: spellings of each choice.

    Returns:
        [C] probability of each choice, 0 if it is not listed; and the most that choices which are not listed may hold
        together: each at most as much as the least likely listed token, and all no more than the list leaves. None if
        nothing is listed, or the numbers are no probabilities.
    """
    listed = fsum(p for _, p in tokens)
    # rounded log-probabilities may sum to a little over 1; a larger sum means that they are not probabilities
    if not 0 < listed <= _ROUNDING:
        return None
    masses = [fsum(p for token, p in tokens if token.strip(_MARKS) in spellings) for spellings in choices]
    return masses, max(0.0, min(masses.count(0.0) * min(p for _, p in tokens), 1.0 - listed))


def _label_directly(query: Query) -> Dialogue:
    """Reads the label from the probabilities of the labels, or from the text if a server gives none."""
    labels = [(text,) for text in prompts.LABEL_TEXTS]

    def place_of(text: str) -> int | None:
        label = parse_label(text)
        return None if label is None else LABELS.index(label)

    known, reply = yield from _choose(prompts.compare_messages("direct", query), labels, place_of, LABEL_TOKENS)
    if known is None or known.blur > MAX_BLUR:
        return _label_of(reply)
    left, right, tie = known.shares
    # equal probabilities: the first wins, as max is stable, so the answer repeats
    label = LABELS[max(range(3), key=known.shares.__getitem__)]
    if known.total < WRITTEN_MASS and not known.is_answer:
        # a sentence that ends in a label says more than what it might have begun with
        answer = _label_of(reply)
        if answer.value is not None:
            return answer
    return DialogueResult(value=label if known.is_answer else None, text=known.text, probabilities=(left, right, tie))


def _label_in_one(query: Query) -> Dialogue:
    """Reads the label from one reply that holds analysis and label."""
    reply = yield ChatRequest(chat=prompts.compare_messages("single_stage", query))
    return _label_of(reply)


def _label_in_two(query: Query) -> Dialogue:
    """Reads the label from the answer to a second, text-only question about the model's report on the images."""
    report = yield ChatRequest(chat=prompts.compare_messages("two_stage", query))
    if report.is_refusal or not report.text.strip():  # nothing to ask about
        return _label_of(report)
    # only the text after the model's reasoning: a label that it tried there is not part of its report
    chat = prompts.label_messages(query.goal, report.text.rpartition("</think>")[2])
    answer = yield ChatRequest(chat=chat, choices=prompts.LABEL_TEXTS)
    return _label_of(answer, f"{report.text}\n\n")


def _score_by_choice(mode: ScoreMode, sentences: Mapping[str, str], clip: Clip) -> Dialogue:
    """Reads a score from the probabilities of a few words, or from the written word if a server lists none at all.

    `success`: probability of yes, given yes or no. `statement`, `statement_raw`: probability of True among all words.
    `utility`: mean rating by the probabilities, 1 as 0 and 5 as 1, which is finer than the likeliest rating.

    Source: TOPReward, arXiv:2602.19313 (statement); Liu et al. 2023 (G-Eval), arXiv:2303.16634, sec. 2 (the mean).
    Departure: the probability is given, not its logarithm: the same order, in [0, 1].
    """
    choices = _CHOICES[mode]

    def place_of(text: str) -> int | None:
        if mode == "utility":
            rating = parse_rating(text)
            return None if rating is None else round(rating * (len(RATINGS) - 1))
        word = text.rpartition("</think>")[2].strip(_MARKS + "!").lower()
        return next((place for place, words in enumerate(choices) if word in map(str.lower, words)), None)

    known, reply = yield from _choose(prompts.score_messages(mode, clip, sentences), choices, place_of)
    if known is None:  # no probabilities: the written word decides, all or nothing
        values = [place / 4 for place in range(len(RATINGS))] if mode == "utility" else [1.0, 0.0]
        place = place_of(reply.readable)
        return _score_of(reply, lambda _: None if place is None else values[place])
    value, blur = known.shares[0], known.blur
    if mode in (
        "statement",
        "statement_raw",
    ):  # it counts by its probability among all words, so the normalisation is undone
        value, blur = value * known.total, known.unlisted
    elif mode == "utility":
        value = fsum(share * place / (len(RATINGS) - 1) for place, share in enumerate(known.shares))
    if known.is_answer and blur > MAX_BLUR:
        text = f"{known.text} (the server lists too few tokens: the others may move this score by {blur:.2g})"
        return DialogueResult(text=text)
    return DialogueResult(value=min(1.0, value) if known.is_answer else None, text=known.text)


def _score_in_words(mode: ScoreMode, sentences: Mapping[str, str], clip: Clip) -> Dialogue:
    """Reads a score from a written number. Departure from RoboReward: a reply without a rating is invalid, not 1."""
    reply = yield ChatRequest(chat=prompts.score_messages(mode, clip, sentences))
    return _score_of(reply, parse_rating if mode in ("rating", "rubric") else parse_score)


def _score_delta(sentences: Mapping[str, str], clip: Clip) -> Dialogue:
    """Sums signed percentages between neighbouring images, each taken of the remaining distance.

    Source: VLAC, arXiv:2509.15937, and its code's default: v + (100 - v) c / 100 from v = 0, for gains and losses.
    Departure: a score ends in [0, 1]. One image alone is compared with itself.
    """
    frames, value, texts = spread(clip.frames, prompts.MAX_FRAMES), 0.0, []
    for number in range(max(1, len(frames) - 1)):
        pair = replace(clip, frames=frames[[number, min(number + 1, len(frames) - 1)]])
        reply = yield ChatRequest(chat=prompts.score_messages("delta", pair, sentences))
        texts.append(_kept_text(reply))
        change = None if reply.is_refusal else parse_change(reply.readable)
        if change is None:  # one unread step and the sum means nothing, so the rest is not asked
            return DialogueResult(value=None, text=" | ".join(texts))
        # v + (100 - v) c / 100 in shares: a gain is taken of what is left
        value += (1 - value) * change
    return DialogueResult(value=min(max(value, 0.0), 1.0), text=" | ".join(texts))


def _label_of(reply: ChatReply, before: str = "") -> DialogueResult:
    """Returns the label in a written reply; a refusal has none."""
    label = None if reply.is_refusal else parse_label(reply.readable)
    return DialogueResult(value=label, text=before + _kept_text(reply))


def _score_of(reply: ChatReply, parse: Callable[[str], float | None]) -> DialogueResult:
    """Returns the score in a written reply; a refusal has none."""
    return DialogueResult(value=None if reply.is_refusal else parse(reply.readable), text=_kept_text(reply))


def _kept_text(reply: ChatReply) -> str:
    """Returns the text to store of a reply: its own, or a note why it is missing."""
    if reply.is_refusal:
        return REFUSAL + reply.text
    return reply.text or (EMPTY if reply.is_whole else CUT)
