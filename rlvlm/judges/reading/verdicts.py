r"""Reading a judge's text: labels, percentages and ratings out of whatever a model wrote, without ever guessing.

An answer is untrusted. This is all that counts as one; everything else is None, which callers count as invalid, and
which never becomes a tie:

    answer   = { sentence } reading { explanation | reading }      after reasoning that ends
    reading  = a line with the value alone (`1`, `**1**`, `(1)`)
             | [lead] [the|my] [final] WORD link value             `So the answer is 1`, `Label: 1`, `정답은 0`
             | [lead] marked value                                 `\boxed{1}`, `<answer>1</answer>`
             | because sentence, so reading                        `The second is open, so the answer is 1.`
    behind   = nothing | a bracket | [, ; -] explanation           in the sentence of a named or marked value

Lead, WORD and link are lists, and so are the ways in which an explanation begins (`wording`). The sentence before a
reading must be whole and the model's own: none that speaks of an example, of what somebody or a sign says, or of
answers at all; a sentence behind it must explain and not take back. All readings agree; the final ones (alone, marked
or called final) outweigh named ones that stand earlier.
"""

import re
from dataclasses import dataclass

from rlvlm.core.judging import Label, Status
from rlvlm.judges.reading.wording import (
    MARK_CLOSE,
    MARK_OPEN,
    answer_lines,
    explains,
    favours,
    introduces,
    is_harmless_remark,
    opens_foreign_block,
    sentences,
    without_list_head,
)

_LABELS = {"0": Label.LEFT, "1": Label.RIGHT, "-1": Label.TIE}
_BEFORE = r"(?<![\d.,+\-/~#])"
_LABEL = _BEFORE + r"(?:-1|0|1)(?![\d%/]|[.,:]\d)"
_PERCENT = _BEFORE + r"\d{1,3}(?:\.\d{1,6})?(?:\s?%|\s?/\s?100|\sout of 100|\spercent)?(?![\d%/]|\s?/\s?\d|[.,:\-]\d)"
_RATING = _BEFORE + r"[1-5](?:\s?/\s?5|\sout of 5)?(?![\d%/]|\s?/\s?\d|[.,:\-]\d)"
_WORDS = (
    "answer|label|choice|verdict|antwort|réponse|respuesta|risposta|resposta|ответ|метка|答案|回答|标签|答え|정답|답"
)
_OPEN = r"[\s*_`\"'“‘「【(\[{$:]{0,12}"
_CLOSE = r"[\s*_`\"'”’」】)\]}$.。!！,，;；]*"
_LINK = r"(?:is|would be|should be|ist|est|es|è|é|是)(?![^\W\d])|[:：=]|->|=>|→|은|는"
_LEAD = (
    r"(?:(?:so|therefore|thus|hence|then|and|now|finally|overall|conclusion|in conclusion|in summary|to conclude|"
    r"that is|i (?:think|believe|would say|conclude)(?:\sthat)?|i'd say|"
    r"based on (?:this|that|these|the (?:above|images|images|comparison|differences?)))"
    r"(?:\s?[,:]\s?|\s+|(?=[$\\" + MARK_OPEN + r"]))){0,3}"
)
_DETERMINER = r"(?:(?:the|my|our)\s+)?(?P<final>(?:final|correct|best)\s+)?"
_FOR_THIS = r"(?:\s(?:for|to) (?:this|the) (?:pair|question|comparison|query|goal|scene|task|clip|image|picture))?"
_CHANGE = re.compile(r"[*\s]*(?P<value>[+-]?\d{1,3}(?:\.\d{1,6})?)\s?%?[.*\s]*")
_NUMBERED = re.compile(r"[\s*_(]*([1-9])\s*(?:[.):]|$)")
_LIST_ITEM = re.compile(r"[\s*_(]*2\s*(?:[.):]|$)")
_TAGGED = re.compile(r"<(answer|label|score|rating)>([^<]{0,200})</\1>", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{([^{}\n]{0,40})\}")
_MARKUP = re.compile(r"<[a-z/|!]|\u25c1|\\boxed", re.IGNORECASE)
_THEREFORE = re.compile(r"(?P<clause>.{3,300}?),?\s+(?:and\s+)?(?=(?:so|therefore|thus|hence)\b)", re.IGNORECASE)
_BECAUSE = re.compile(r"(?P<clause>(?:since|because|as)\s.{3,300}?),\s+(?=(?:the|my|i)\s|\w+:)", re.IGNORECASE)
_REMARK = re.compile(r"[\s*_`\"'”]{0,4}\((?P<remark>[^()]{1,120})\)[\s*_`.]*")
_BEHIND = re.compile(
    r"[*_`\"'”)\]}\s]*(?:[,;，:]|\s-+|\s?[—–]|(?=\s(?:because|since|as)\b))\s*(?P<why>\S.*)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class _Reading:
    value: str
    is_strong: bool
    """Bare, marked or called final; what strong readings say outweighs earlier weak ones."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A line with a value alone, or one sentence."""

    text: str
    reading: _Reading | None


@dataclass(frozen=True, slots=True)
class _Grammar:
    """The patterns that find one kind of value."""

    bare: re.Pattern[str]
    named: re.Pattern[str]
    marked: re.Pattern[str]
    heading: re.Pattern[str]
    value: re.Pattern[str]
    is_score: bool


def _grammar(value: str, words: str, *, is_score: bool) -> _Grammar:
    flags = re.IGNORECASE
    named = rf"{_OPEN}(?:#+\s)?(?:[-*•]\s)?{_OPEN}{_LEAD}{_DETERMINER}(?:{words})(?![a-z]){_FOR_THIS}[\s*_`\"']{{0,8}}"
    marks = rf"{_OPEN}{MARK_OPEN}(?P<value>{value}){MARK_CLOSE}"
    return _Grammar(
        bare=re.compile(rf"(?P<head>(?:#+\s)?{_OPEN})(?P<value>{value})(?P<tail>{_CLOSE})", flags),
        named=re.compile(rf"{named}(?:{_LINK}){_OPEN}(?P<value>{value})", flags),
        marked=re.compile(rf"{_OPEN}{_LEAD}(?:{_DETERMINER}(?:{words})[\s*_]{{0,4}}(?:{_LINK})?)?{marks}", flags),
        heading=re.compile(
            rf"(?:{named}|[\s*_#]*(?:conclusion|summary|result|output)[\s*_]*)(?:{_LINK})?[\s*_]*"
            rf"|{_OPEN}(?:here is|here's|this is) (?:the|my) (?:{words})[\s*_]*[:：.]?[\s*_]*",
            flags,
        ),
        value=re.compile(value),
        is_score=is_score,
    )


_LABEL_GRAMMAR = _grammar(_LABEL, _WORDS, is_score=False)
_PERCENT_GRAMMAR = _grammar(_PERCENT, _WORDS + "|score|progress", is_score=True)
_RATING_GRAMMAR = _grammar(_RATING, _WORDS + "|score|rating", is_score=True)


def parse_label(text: str) -> Label | None:
    """The label an answer gives: left for 0, right for 1, tie for -1, None when it cannot be read for certain.

    Total: every string has an answer, in time linear in its length. Reasoning between `<think>` and `</think>` does
    not count, and an answer whose reasoning never ends has no label. Prose that merely holds digits (`image 1`,
    `0.5`, `10`) has none either, nor has one that names two labels.
    """
    value = _one_value(answer_lines(text), _LABEL_GRAMMAR)
    return None if value is None else _LABELS[value]


def parse_score(text: str) -> float | None:
    """The share of the goal that an answer names in percent, as a number in [0, 1]; None when it cannot be read.

    A fraction up to 1 without a percent sign (`0.7`) is not read: it may mean 70 percent or 0.7.
    """
    return _percent(answer_lines(text))


def parse_rating(text: str) -> float | None:
    """The rating from 1 to 5 that an answer gives, as a number in [0, 1]; None when it cannot be read for certain.

    1 is 0, 5 is 1. `3.5`, `6` and `4/10` are not on the scale and are not read, nor is the last number of a list that
    counts 1, 2, 3: it may be an item that was never written.
    """
    lines = answer_lines(text)
    heads = [int(match[1]) for match in map(_NUMBERED.match, lines) if match]
    if len(heads) > 1 and heads == list(range(1, len(heads) + 1)):
        return None
    value = _one_value(lines, _RATING_GRAMMAR)
    return None if value is None else (int(value[0]) - 1) / 4


def parse_video_score(text: str) -> float | None:
    """The percentage behind written reasoning, as a number in [0, 1]; None when it cannot be read for certain.

    The scale is fixed: 1 is one percent, and `0.7` is not read. An `<answer>` that is there must hold a percentage and
    be the model's own; without any, the text after the reasoning is read as `parse_score` reads it. A number inside
    reasoning that was cut short never counts.
    """
    return _percent(answer_lines(text))


def parse_change(text: str) -> float | None:
    """A signed percentage that stands alone, as a number in [-1, 1]; None when it cannot be read for certain."""
    lines = answer_lines(text)
    found = _CHANGE.fullmatch(lines[0]) if len(lines) == 1 else None
    value = float(found["value"]) / 100 if found else 2.0
    return value if abs(value) <= 1 else None


def status_of(label: Label | None) -> Status:
    """What a parsed label makes of a question: ok, no_preference or invalid."""
    if label is None:
        return Status.INVALID
    return Status.NO_PREFERENCE if label is Label.TIE else Status.OK


def _percent(lines: list[str]) -> float | None:
    value = _one_value(lines, _PERCENT_GRAMMAR)
    if value is None:
        return None
    number = float(re.split(r"[\s%/]", value, maxsplit=1)[0])
    is_ambiguous = number <= 1 and "." in value and not value.endswith(("%", "100", "percent"))
    return None if is_ambiguous or number > 100 else number / 100


def _one_value(lines: list[str], grammar: _Grammar) -> str | None:
    """The value that everything readable in the lines agrees on, unless something around it forbids to read it."""
    marked = _canonical("\n".join(lines), grammar)
    if marked is None:
        return None
    units = _units(marked.splitlines(), grammar)
    found = [(at, unit.reading) for at, unit in enumerate(units) if unit.reading]
    strong = [at for at, reading in found if reading.is_strong]
    counted = [(at, reading) for at, reading in found if not strong or at >= strong[0]]
    values = {reading.value for _, reading in counted}
    if len(values) != 1:
        return None
    value, last = counted[0][1].value, counted[-1][0]
    if any(opens_foreign_block(unit.text) for unit in units[:last]):
        return None
    for at, _ in counted:
        before = units[at - 1] if at else None
        if before and not before.reading:
            if not introduces(before.text, grammar.value, grammar.heading):
                return None
    traits = {"is_tie": value == "-1", "is_score": grammar.is_score}
    behind = [unit.text for unit in units[last + 1 :]]
    if not all(explains(text, grammar.value, **traits) for text in behind):
        return None
    is_contradicted = not grammar.is_score and any(favours(text) not in (None, value) for text in behind)
    return None if is_contradicted else value


def _canonical(text: str, grammar: _Grammar) -> str | None:
    """The text with every `<answer>1</answer>` and boxed value in one form; None where one of them cannot be read."""

    def mark(inner: str) -> str:
        inner = inner.strip()
        match = grammar.bare.fullmatch(inner)
        if match is None and (named := grammar.named.match(inner)) and re.fullmatch(_CLOSE, inner[named.end() :]):
            match = named
        return f"{MARK_OPEN}{match['value']}{MARK_CLOSE}" if match else "<!"

    text = _TAGGED.sub(lambda tag: mark(tag[2]), text)
    text = _BOXED.sub(lambda box: mark(box[1]), text)
    return None if _MARKUP.search(text) else text


def _units(lines: list[str], grammar: _Grammar) -> list[_Unit]:
    """Every line, cut into sentences, with the value that each gives."""
    units: list[_Unit] = []
    is_list = any(_LIST_ITEM.match(line) for line in lines)
    for number, line in enumerate(lines, start=1):
        is_last = number == len(lines)
        bare = grammar.bare.fullmatch(line)
        if bare:
            heads_list = bare["value"] == "1" and bare["tail"].startswith(".")  # `1.` may be the first item's number
            numbers_item = ")" in bare["tail"] and "(" not in bare["head"]  # `1)` is an item's number
            if (is_last or not (is_list or heads_list)) and not numbers_item:
                units.append(_Unit(line, _Reading(bare["value"], is_strong=True)))
            continue
        for sentence in sentences(line):
            units.append(_Unit(sentence, _reading(sentence, grammar)))
    return units


def _reading(sentence: str, grammar: _Grammar) -> _Reading | None:
    """The value that a sentence gives as its answer, if all of the sentence is of an accepted form."""
    sentence = without_list_head(sentence)
    for pattern in (_THEREFORE, _BECAUSE):
        reasoned = pattern.match(sentence)
        if reasoned and explains(reasoned["clause"], grammar.value, is_score=grammar.is_score):
            sentence = sentence[reasoned.end() :]
            break
    match = grammar.named.match(sentence) or grammar.marked.match(sentence)
    if match is None:
        return None
    is_marked, value, rest = MARK_OPEN in match[0], match["value"], sentence[match.end() :]
    while is_marked and (again := grammar.marked.match(rest)):  # the same once more
        if again["value"] != value:
            return None
        rest = rest[again.end() :]
    if not _may_stand_behind(rest, value, grammar):
        return None
    return _Reading(value, is_strong=is_marked or bool(match["final"]))


def _may_stand_behind(rest: str, value: str, grammar: _Grammar) -> bool:
    """Whether what follows a value in its own sentence leaves it as it is."""
    is_tie, is_score = value == "-1", grammar.is_score
    remark = _REMARK.match(rest)
    if remark:
        said, traits = remark["remark"], {"is_tie": is_tie, "is_score": is_score}
        if not (is_harmless_remark(said, grammar.value, **traits) or explains(said, grammar.value, **traits)):
            return False
        rest = rest[remark.end() :]
    if re.fullmatch(_CLOSE, rest):
        return True
    why = _BEHIND.fullmatch(rest)
    return why is not None and explains(why["why"], grammar.value, is_tie=is_tie, is_score=is_score)
