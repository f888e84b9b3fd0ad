"""Dialogues: for each form of question, the chats sent to a model and the parsing of its replies.

A dialogue is a generator: it yields the next request to the model, is sent the reply, and returns the result. So
the same code serves a model in this process, which answers a batch of dialogues turn by turn, and one behind an API,
which runs many of them concurrently. Pure; `asking` runs them.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import fsum

import numpy as np

from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Usage, Verdict
from rlvlm.core.steps import spread
from rlvlm.judges import prompts
from rlvlm.judges.config import Mode, ScoreMode
from rlvlm.judges.reading import parse_change, parse_label, parse_rating, parse_score
from rlvlm.vlms.chats import Chat, ChatReply, ChatRequest

MIN_CHOICE_MASS = 1e-3
"""Total probability of the choices below which the model did not answer the question: invalid."""
MIN_TOKEN_MASS = 0.5
"""Total probability of the choices among a server's likeliest tokens below which the reply's text is read instead."""
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
    probabilities: tuple[float, float, float] | None = None
    """Probabilities of left, right and tie, if the model gives them."""
    latency_s: float = 0.0
    """Seconds until the answer; for a batch, until all of its answers."""
    usage: Usage | None = None

    def verdict(self, stamp: Stamp) -> Verdict:
        """Returns the result as the answer to a comparison."""
        label = self.value if isinstance(self.value, Label) else None
        return Verdict(
            status=Status.FAILED if self.has_failed else Status.of(label),
            label=label,
            stamp=stamp,
            probabilities=self.probabilities,
            text=self.text,
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
            text=self.text,
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
    return partial(
        _score_by_choice if mode in ("success", "utility", "statement") else _score_in_words, mode, sentences
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shares:
    """Distribution of a model's probability over some choices."""

    shares: list[float]
    """Probability of each choice, normalised to sum to 1."""
    total: float
    """Total probability of the choices among all possible replies."""
    text: str
    """Likeliest choice, or the written reply; if it is no answer, the reason."""
    is_answer: bool
    """Whether the model answered the question, and its text does not contradict that."""


def _choose(
    chat: Chat,
    choices: Sequence[Spellings],
    place_of: Callable[[str], int | None],
    tokens: Sequence[Spellings] | None = None,
) -> Choosing:
    """Asks a model to choose, and returns its probabilities, or None if it gives none, and its reply.

    Args:
        chat: the question.
        choices: all spellings of each choice.
        place_of: returns the index of the choice that a text names; None if it names none for certain.
        tokens: first tokens that stand for each choice, for servers that give only those; None for the spellings.
    """
    # each spelling is a separate choice for the engine: a model that would write `Yes` means yes
    texts = tuple(text for spellings in choices for text in spellings)
    reply = yield ChatRequest(chat=chat, choices=texts, wants_log_probs=True)
    if reply.choice_log_p is None:
        # a server: it wrote a text, and gave its likeliest first tokens at best
        known = None if reply.is_refusal else token_shares(reply.first_tokens or (), tokens or choices)
        if known is None:
            return None, reply
        written, likeliest = place_of(reply.readable), known[0].index(max(known[0]))
        # a sampled text may differ from the likeliest choice; if a greedy one does, one of the two is not the answer,
        # such as a token of the model's reasoning
        is_answer = written in (None, likeliest) or reply.is_sampled
        text = _kept_text(reply)
        if not is_answer:
            text += f" (its probabilities say {choices[likeliest][0]})"
        return _Shares(shares=known[0], total=known[1], text=text, is_answer=is_answer), reply
    log_p = reply.choice_log_p
    # shifted by the largest: exp of raw log-probabilities of long texts is 0 for all of them
    scaled = np.exp(log_p - log_p.max()) if np.isfinite(log_p.max()) else np.ones_like(log_p)
    each, shares = iter((scaled / scaled.sum()).tolist()), list[float]()
    for spellings in choices:
        shares.append(min(1.0, sum(next(each) for _ in spellings)))  # sums of shares round up
    total, text = float(np.exp(log_p).sum()), texts[int(log_p.argmax())]
    is_answer = total >= MIN_CHOICE_MASS
    if not is_answer:
        names = ", ".join(spellings[0] for spellings in choices)
        text = f"(none of {names}: together they have a probability of {total:.1g}, {MIN_CHOICE_MASS:g} is needed)"
    return _Shares(shares=shares, total=total, text=text, is_answer=is_answer), reply


def token_shares(tokens: Tokens, choices: Sequence[Spellings]) -> tuple[list[float], float] | None:
    """Returns the choices' probabilities, normalised, and their total; None if the reply hardly begins with one."""
    masses = [fsum(p for token, p in tokens if token.strip(_MARKS) in spellings) for spellings in choices]
    total = fsum(masses)
    # rounded log-probabilities may sum to a little over 1; a larger sum means that they are not probabilities
    return ([mass / total for mass in masses], total) if MIN_TOKEN_MASS <= total <= _ROUNDING else None


def _label_directly(query: Query) -> Dialogue:
    """Reads the label from the probabilities of the labels, or from the text if a server gives none."""
    labels = [(text,) for text in prompts.LABEL_TEXTS]

    def place_of(text: str) -> int | None:
        label = parse_label(text)
        return None if label is None else LABELS.index(label)

    known, reply = yield from _choose(prompts.compare_messages("direct", query), labels, place_of, LABEL_TOKENS)
    if known is None:
        return _label_of(reply)
    left, right, tie = known.shares
    # equal probabilities: the first wins, as max is stable, so the answer repeats
    label = LABELS[max(range(3), key=known.shares.__getitem__)]
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
    """Reads a score from the probabilities of a few words, or from the written word if a server gives none.

    `success`: probability of yes, given yes or no. `statement`: probability of True among all words. `utility`: mean
    rating by the probabilities, 1 as 0 and 5 as 1, which is finer than the likeliest rating.

    Source: TOPReward, arXiv:2602.19313 (statement); Liu et al. 2023 (G-Eval), arXiv:2303.16634, sec. 2 (the mean).
    Departure: the probability is given, not its logarithm: the same order, in [0, 1].
    """
    choices = {"success": YES_AND_NO, "utility": RATINGS, "statement": TRUE_AND_FALSE}[mode]

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
    # a statement counts by its probability among all words, so the normalisation is undone
    value = known.shares[0] * (known.total if mode == "statement" else 1.0)
    if mode == "utility":
        value = fsum(share * place / (len(RATINGS) - 1) for place, share in enumerate(known.shares))
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
