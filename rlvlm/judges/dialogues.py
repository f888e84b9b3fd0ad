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
from numpy.typing import NDArray

from rlvlm.core.judging import Clip, Label, Query
from rlvlm.judges import prompts
from rlvlm.judges.config import Mode, ScoreMode
from rlvlm.judges.reading.verdicts import parse_change, parse_label, parse_rating, parse_score, parse_video_score
from rlvlm.vlms.chats import Chat, Reply

MIN_CHOICE_MASS = 1e-3
"""Where all choices together are less likely than this, the model was not answering the question: invalid."""
MIN_TOKEN_MASS = 0.5
"""Servers report only their likeliest tokens. Where the answers together hold less, the reply's text is read."""
EMPTY = "(an empty reply)"
CUT = "(cut off by judge.max_new_tokens before the reply began; models that think first need thousands)"
REFUSAL = "(refused) "
YES_AND_NO = (*prompts.ANSWERS_YES, *prompts.ANSWERS_NO)
TRUE_AND_FALSE = ("True", "False")
_LABELS = (Label.LEFT, Label.RIGHT, Label.TIE)
_MINUS = ("-", "\u2212", "\u2013")
_ROUNDING = 1.01
_MARKS = " \t\r\n\"'`*.:"

Tokens = Sequence[tuple[str, float]]
"""First tokens and their probabilities."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """What the model is to be asked next."""

    chat: Chat
    choices: tuple[str, ...] = ()
    """The only texts that the reply may be, for models that can be held to them."""
    wants_log_probs: bool = False
    """Whether the probabilities of the choices are wanted in the place of a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceLogProbs:
    """A model's answer in log-probabilities of the choices, where it can give them exactly."""

    log_p: NDArray[np.float64]
    """[C], as `ModelRequest.choices`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedReply:
    """What a dialogue came to."""

    value: Label | float | None
    """The label, or the score in [0, 1]; None where it could not be read."""
    text: str
    """What the model wrote, untrusted."""
    probabilities: tuple[float, float, float] | None = None
    """Of left, right and tie, where the model gives them."""


Dialogue = Generator[ModelRequest, Reply | ChoiceLogProbs, ParsedReply]


def label_dialogue(mode: Mode) -> Callable[[Query], Dialogue]:
    """The dialogue that asks for a comparison in this form."""
    return {"direct": _label_directly, "single_stage": _label_in_one, "two_stage": _label_in_two}[mode]


def score_dialogue(mode: ScoreMode, sentences: Mapping[str, str] = prompts.SENTENCES) -> Callable[[Clip], Dialogue]:
    """The dialogue that asks for a score in this form, where that has sentences of its own in these."""
    if mode == "success":
        return _score_success
    if mode == "utility":
        return _score_utility
    worded = {"statement": _score_statement, "rubric": _score_rubric, "delta": _score_delta}.get(mode)
    if worded is not None:
        return partial(worded, sentences)
    parse = {"progress": parse_score, "rating": parse_rating, "video": parse_video_score}[mode]

    def score(clip: Clip) -> Dialogue:
        reply = yield ModelRequest(chat=prompts.score_messages(mode, clip))
        assert isinstance(reply, Reply)
        return ParsedReply(value=None if reply.is_refusal else parse(reply.readable), text=_told(reply))

    return score


def _label_directly(query: Query) -> Dialogue:
    """From the probabilities of the label texts, without a text; from the text where a server gives no odds."""
    choices = prompts.LABEL_TEXTS
    reply = yield ModelRequest(chat=prompts.compare_messages("direct", query), choices=choices, wants_log_probs=True)
    if isinstance(reply, ChoiceLogProbs):
        left, right, tie = _normalised(reply.log_p)
        choice = int(reply.log_p.argmax())
        label = _LABELS[choice] if np.exp(reply.log_p).sum() >= MIN_CHOICE_MASS else None
        return ParsedReply(value=label, text=choices[choice], probabilities=(left, right, tie))
    probabilities = label_probabilities(reply.first_tokens) if reply.first_tokens and not reply.is_refusal else None
    if probabilities is None:
        return _label_of(reply)
    return ParsedReply(
        value=_LABELS[max(range(3), key=probabilities.__getitem__)], text=reply.text, probabilities=probabilities
    )


def _label_in_one(query: Query) -> Dialogue:
    """From one answer that holds the analysis and the label."""
    reply = yield ModelRequest(chat=prompts.compare_messages("single_stage", query))
    return _label_of(reply)


def _label_in_two(query: Query) -> Dialogue:
    """From a report on the images and a second, text-only question about the report."""
    report = yield ModelRequest(chat=prompts.compare_messages("two_stage", query))
    assert isinstance(report, Reply)
    if report.is_refusal or not report.text.strip():  # nothing to ask about
        return _label_of(report)
    chat = prompts.label_messages(query.goal, report.text.rpartition("</think>")[2])
    answer = yield ModelRequest(chat=chat, choices=prompts.LABEL_TEXTS)
    return _label_of(answer, f"{report.text}\n\n")


def _score_success(clip: Clip) -> Dialogue:
    """The share of yes among yes and no; without probabilities a plain yes is 1 and a plain no is 0."""
    reply = yield ModelRequest(chat=prompts.score_messages("success", clip), choices=YES_AND_NO, wants_log_probs=True)
    if isinstance(reply, ChoiceLogProbs):
        p_yes = min(1.0, float(sum(_normalised(reply.log_p)[: len(prompts.ANSWERS_YES)])))  # sums of shares round up
        is_answer = np.exp(reply.log_p).sum() >= MIN_CHOICE_MASS
        return ParsedReply(value=p_yes if is_answer else None, text=YES_AND_NO[int(reply.log_p.argmax())])
    value = None
    if not reply.is_refusal:
        value = yes_probability(reply.first_tokens) if reply.first_tokens else None
        value = {"yes": 1.0, "no": 0.0}.get(reply.readable.strip(" \n.!*").lower()) if value is None else value
    return ParsedReply(value=value, text=_told(reply))


def _score_utility(clip: Clip) -> Dialogue:
    """The mean of the ratings by their probabilities, 1 as 0 and 5 as 1; without probabilities the rating written.

    Source: Liu et al. 2023 (G-Eval), arXiv:2303.16634, sec. 2: a mean over the scale's tokens is finer than the
    likeliest of them.
    """
    choices = prompts.RATING_TEXTS
    reply = yield ModelRequest(chat=prompts.score_messages("utility", clip), choices=choices, wants_log_probs=True)
    if isinstance(reply, ChoiceLogProbs):
        is_answer = np.exp(reply.log_p).sum() >= MIN_CHOICE_MASS
        value = _mean_rating(_normalised(reply.log_p))
        return ParsedReply(value=value if is_answer else None, text=choices[int(reply.log_p.argmax())])
    probabilities = rating_probabilities(reply.first_tokens) if reply.first_tokens and not reply.is_refusal else None
    if probabilities is not None:
        return ParsedReply(value=_mean_rating(probabilities), text=_told(reply))
    return ParsedReply(value=None if reply.is_refusal else parse_rating(reply.readable), text=_told(reply))


def _score_statement(sentences: Mapping[str, str], clip: Clip) -> Dialogue:
    """The probability of True as the next word, among all words.

    Source: Chen et al. 2026 (TOPReward), arXiv:2602.19313. Departures: the answer begins the model's turn and does not
    end the user's, and it is the probability that is given, not its logarithm: the same order, in [0, 1].
    """
    chat = prompts.worded_messages("statement", clip, sentences)
    reply = yield ModelRequest(chat=chat, choices=TRUE_AND_FALSE, wants_log_probs=True)
    if isinstance(reply, ChoiceLogProbs):
        shares = np.exp(reply.log_p)
        value = min(1.0, float(shares[0])) if shares.sum() >= MIN_CHOICE_MASS else None
        return ParsedReply(value=value, text=TRUE_AND_FALSE[int(reply.log_p.argmax())])
    value = None
    if reply.first_tokens and not reply.is_refusal:
        true, false = (
            fsum(p for token, p in reply.first_tokens if token.strip(_MARKS) == word) for word in TRUE_AND_FALSE
        )
        value = min(1.0, true) if true + false >= MIN_CHOICE_MASS else None
    elif not reply.is_refusal:
        value = {"true": 1.0, "false": 0.0}.get(reply.readable.strip(_MARKS).lower())
    return ParsedReply(value=value, text=_told(reply))


def _score_rubric(sentences: Mapping[str, str], clip: Clip) -> Dialogue:
    """1 to 5, as 0 to 1.

    Source: RoboReward, arXiv:2601.00675. Departure: what is no rating is invalid, and not 1.
    """
    reply = yield ModelRequest(chat=prompts.worded_messages("rubric", clip, sentences))
    assert isinstance(reply, Reply)
    return ParsedReply(value=None if reply.is_refusal else parse_rating(reply.readable), text=_told(reply))


def _score_delta(sentences: Mapping[str, str], clip: Clip) -> Dialogue:
    """Signed percents between neighbouring images, each taken of what is left, or of what there is where it is lost.

    Source: VLAC, arXiv:2509.15937: v + (100 - v) c / 100 for c > 0 and v + v c / 100 for c < 0, from v = 0. One image
    alone is compared with itself.
    """
    frames, value, texts = prompts.thin(clip.frames), 0.0, []
    for number in range(max(1, len(frames) - 1)):
        pair = replace(clip, frames=frames[[number, min(number + 1, len(frames) - 1)]])
        reply = yield ModelRequest(chat=prompts.worded_messages("delta", pair, sentences))
        assert isinstance(reply, Reply)
        texts.append(_told(reply))
        change = None if reply.is_refusal else parse_change(reply.readable)
        if change is None:
            return ParsedReply(value=None, text=" | ".join(texts))
        value += (1 - value) * change if change > 0 else value * change
    return ParsedReply(value=value, text=" | ".join(texts))


def _mean_rating(shares: Sequence[float]) -> float:
    """In [0, 1], of the shares [5] of the ratings."""
    return min(1.0, fsum(share * place / (len(shares) - 1) for place, share in enumerate(shares)))


def rating_probabilities(tokens: Tokens) -> list[float] | None:
    """Probabilities of the ratings, summing to 1; None where the reply hardly begins with one."""
    masses = [fsum(p for token, p in tokens if token.strip(_MARKS) == text) for text in prompts.RATING_TEXTS]
    total = fsum(masses)
    return [mass / total for mass in masses] if MIN_TOKEN_MASS <= total <= _ROUNDING else None


def label_probabilities(tokens: Tokens) -> tuple[float, float, float] | None:
    """Probabilities of left, right and tie, summing to 1; None where the reply hardly begins with a label.

    A tie is written `-1`, in most vocabularies two tokens: whatever begins with a minus counts as one, since no other
    label does. Departure from models in this process, whose second token's probability is known too.
    """
    tie = [text for minus in _MINUS for text in (minus, f"{minus}1")]
    masses = [fsum(p for token, p in tokens if token.strip(_MARKS) in texts) for texts in (["0"], ["1"], tie)]
    if not MIN_TOKEN_MASS <= fsum(masses) <= _ROUNDING:
        return None
    left, right, neither = (mass / fsum(masses) for mass in masses)
    return left, right, neither


def yes_probability(tokens: Tokens) -> float | None:
    """Probability of yes among yes and no, however they are capitalised; None where the reply hardly begins so."""
    yes, no = (fsum(p for token, p in tokens if token.strip(_MARKS).lower() == word) for word in ("yes", "no"))
    return yes / (yes + no) if MIN_TOKEN_MASS <= yes + no <= _ROUNDING else None


def _label_of(reply: Reply | ChoiceLogProbs, before: str = "") -> ParsedReply:
    """The label that a written reply holds; one that was refused holds none."""
    assert isinstance(reply, Reply)
    return ParsedReply(value=None if reply.is_refusal else parse_label(reply.readable), text=before + _told(reply))


def _told(reply: Reply) -> str:
    """What is kept of a reply; where there is nothing, why."""
    if reply.is_refusal:
        return REFUSAL + reply.text
    return reply.text or (EMPTY if reply.is_whole else CUT)


def _normalised(log_p: NDArray[np.float64]) -> list[float]:
    """Probabilities [C] that sum to 1, of log-probabilities [C]; equal where none has any."""
    top = log_p.max()
    shares = np.exp(log_p - top) if np.isfinite(top) else np.ones_like(log_p)
    return (shares / shares.sum()).tolist()
