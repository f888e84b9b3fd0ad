"""How each form of question is put to a chat model and its replies are read. Pure; `asking` runs them.

A dialogue is a generator: it yields what the model is to be asked next, is sent the reply, and returns what the replies
say. So one text serves a model in this process, which answers a batch of dialogues turn by turn, and one behind an API,
which has many of them under way side by side.
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
"""Where all choices together are less likely than this, the model was not answering the question: invalid."""
MIN_TOKEN_MASS = 0.5
"""Servers report only their likeliest tokens. Where the answers together hold less, the reply's text is read."""
EMPTY = "(an empty reply)"
CUT = "(cut off by judge.max_new_tokens before the reply began; models that think first need thousands)"
REFUSAL = "(refused) "
LABELS = (Label.LEFT, Label.RIGHT, Label.TIE)
"""In the order of `prompts.LABEL_TEXTS`."""
LABEL_TOKENS = [("0",), ("1",), tuple(text for minus in "-\u2212\u2013" for text in (minus, f"{minus}1"))]
"""How a reply begins that is a label. A tie is in most vocabularies two tokens; no other label begins with a minus."""
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
    """The result of a dialogue."""

    value: Label | float | None = None
    """The label, or the score in [0, 1]; None where it could not be read, and where no answer came."""
    text: str
    """What the model wrote, untrusted; where no answer came, why."""
    has_failed: bool = False
    """Whether no answer came."""
    probabilities: tuple[float, float, float] | None = None
    """Probabilities of left, right and tie, where the model gives them."""
    latency_s: float = 0.0
    """Seconds until it was there; in a batch, until all of the batch were."""
    usage: Usage | None = None

    def verdict(self, stamp: Stamp) -> Verdict:
        """As the answer to a comparison."""
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
        """As the answer about a clip, of which so many frames were shown."""
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
    """The dialogue that asks for a comparison in this form."""
    return {"direct": _label_directly, "single_stage": _label_in_one, "two_stage": _label_in_two}[mode]


def score_dialogue(mode: ScoreMode, sentences: Mapping[str, str] = prompts.SENTENCES) -> Callable[[Clip], Dialogue]:
    """The dialogue that asks for a score in this form, where that has sentences of its own in these."""
    if mode == "delta":
        return partial(_score_delta, sentences)
    return partial(
        _score_by_choice if mode in ("success", "utility", "statement") else _score_in_words, mode, sentences
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shares:
    """How a model's probability is spread over some choices."""

    shares: list[float]
    """Probability of each, summing to 1."""
    total: float
    """Probability of all of them, among everything that the model could have written."""
    text: str
    """The likeliest, or what was written; and where they are no answer, why."""
    is_answer: bool
    """Whether the model was answering the question, and its text does not say something else."""


def _choose(
    chat: Chat,
    choices: Sequence[Spellings],
    place_of: Callable[[str], int | None],
    tokens: Sequence[Spellings] | None = None,
) -> Choosing:
    """Has a model choose, and returns its probabilities, where it gives them, and its reply.

    Args:
        chat: the question.
        choices: each by all its spellings.
        place_of: which of the choices a text names; None where it names none for certain.
        tokens: first tokens that stand for each choice, where a server gives only those; the spellings, if None.
    """
    # every spelling is a choice of its own for the engine: a model that would write `Yes` has said yes
    texts = tuple(text for spellings in choices for text in spellings)
    reply = yield ChatRequest(chat=chat, choices=texts, wants_log_probs=True)
    if reply.choice_log_p is None:
        # a server: it wrote a text, and gave its likeliest first tokens at best
        known = None if reply.is_refusal else token_shares(reply.first_tokens or (), tokens or choices)
        if known is None:
            return None, reply
        written, likeliest = place_of(reply.readable), known[0].index(max(known[0]))
        # drawn at a temperature the text may be another; a greedy one that differs means that one of them is not the
        # answer, such as a token of the model's thoughts
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
    """Probabilities of the choices, summing to 1, and their sum before; None where the reply hardly begins with one."""
    masses = [fsum(p for token, p in tokens if token.strip(_MARKS) in spellings) for spellings in choices]
    total = fsum(masses)
    # a server's rounded logarithms may add up to a little over 1; to more than that, they are no probabilities
    return ([mass / total for mass in masses], total) if MIN_TOKEN_MASS <= total <= _ROUNDING else None


def _label_directly(query: Query) -> Dialogue:
    """From the probabilities of the labels, without a text; from the text where a server gives no odds."""
    labels = [(text,) for text in prompts.LABEL_TEXTS]

    def place_of(text: str) -> int | None:
        label = parse_label(text)
        return None if label is None else LABELS.index(label)

    known, reply = yield from _choose(prompts.compare_messages("direct", query), labels, place_of, LABEL_TOKENS)
    if known is None:
        return _label_of(reply)
    left, right, tie = known.shares
    # among equals the first: max is stable, so the answer repeats
    label = LABELS[max(range(3), key=known.shares.__getitem__)]
    return DialogueResult(value=label if known.is_answer else None, text=known.text, probabilities=(left, right, tie))


def _label_in_one(query: Query) -> Dialogue:
    """From one answer that holds the analysis and the label."""
    reply = yield ChatRequest(chat=prompts.compare_messages("single_stage", query))
    return _label_of(reply)


def _label_in_two(query: Query) -> Dialogue:
    """From a report on the images and a second, text-only question about the report."""
    report = yield ChatRequest(chat=prompts.compare_messages("two_stage", query))
    if report.is_refusal or not report.text.strip():  # nothing to ask about
        return _label_of(report)
    # only what comes behind the model's thoughts: a label that it tried on there is not its report
    chat = prompts.label_messages(query.goal, report.text.rpartition("</think>")[2])
    answer = yield ChatRequest(chat=chat, choices=prompts.LABEL_TEXTS)
    return _label_of(answer, f"{report.text}\n\n")


def _score_by_choice(mode: ScoreMode, sentences: Mapping[str, str], clip: Clip) -> Dialogue:
    """A score from the probabilities of a few words; from the word that was written, where a server gives no odds.

    `success`: the share of yes among yes and no. `statement`: the probability of True among all words. `utility`: the
    mean of the ratings by their probabilities, 1 as 0 and 5 as 1, which is finer than the likeliest of them.

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
    if known is None:  # no probabilities: the word that was written decides, all or nothing
        values = [place / 4 for place in range(len(RATINGS))] if mode == "utility" else [1.0, 0.0]
        place = place_of(reply.readable)
        return _score_of(reply, lambda _: None if place is None else values[place])
    # of a statement the probability among all words counts, so the normalisation is taken back
    value = known.shares[0] * (known.total if mode == "statement" else 1.0)
    if mode == "utility":
        value = fsum(share * place / (len(RATINGS) - 1) for place, share in enumerate(known.shares))
    return DialogueResult(value=min(1.0, value) if known.is_answer else None, text=known.text)


def _score_in_words(mode: ScoreMode, sentences: Mapping[str, str], clip: Clip) -> Dialogue:
    """From a number that is written. Departure from RoboReward: what is no rating is invalid, and not 1."""
    reply = yield ChatRequest(chat=prompts.score_messages(mode, clip, sentences))
    return _score_of(reply, parse_rating if mode in ("rating", "rubric") else parse_score)


def _score_delta(sentences: Mapping[str, str], clip: Clip) -> Dialogue:
    """Signed percents between neighbouring images, each taken of what is left.

    Source: VLAC, arXiv:2509.15937, and its code's default: v + (100 - v) c / 100 from v = 0, for gains and losses.
    Departure: a score ends in [0, 1]. One image alone is compared with itself.
    """
    frames, value, texts = spread(clip.frames, prompts.MAX_FRAMES), 0.0, []
    for number in range(max(1, len(frames) - 1)):
        pair = replace(clip, frames=frames[[number, min(number + 1, len(frames) - 1)]])
        reply = yield ChatRequest(chat=prompts.score_messages("delta", pair, sentences))
        texts.append(_kept_text(reply))
        change = None if reply.is_refusal else parse_change(reply.readable)
        if change is None:  # one unread step and the sum means nothing: the rest is not asked
            return DialogueResult(value=None, text=" | ".join(texts))
        # v + (100 - v) c / 100 in shares: a gain is taken of what is left
        value += (1 - value) * change
    return DialogueResult(value=min(max(value, 0.0), 1.0), text=" | ".join(texts))


def _label_of(reply: ChatReply, before: str = "") -> DialogueResult:
    """The label that a written reply holds; one that was refused holds none."""
    label = None if reply.is_refusal else parse_label(reply.readable)
    return DialogueResult(value=label, text=before + _kept_text(reply))


def _score_of(reply: ChatReply, parse: Callable[[str], float | None]) -> DialogueResult:
    """The score that a written reply holds, likewise."""
    return DialogueResult(value=None if reply.is_refusal else parse(reply.readable), text=_kept_text(reply))


def _kept_text(reply: ChatReply) -> str:
    """What is kept of a reply; where there is nothing, why."""
    if reply.is_refusal:
        return REFUSAL + reply.text
    return reply.text or (EMPTY if reply.is_whole else CUT)
