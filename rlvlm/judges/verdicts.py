r"""Reading a judge's text: labels, percentages and ratings out of whatever a model wrote, without ever guessing.

An answer is untrusted. What cannot be read for certain is None, which callers count as invalid; it never becomes a
tie. A line counts when it holds nothing but the value (a *bare* line), when the value is marked (`\boxed{1}`,
`<answer>1</answer>`), or when it follows a word such as `Answer:`. All that counts must agree.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from rlvlm.types.judging import Label, Status

MAX_CHARS = 20_000
"""Only this many last characters of an answer are read."""

_LABELS = {"0": Label.LEFT, "1": Label.RIGHT, "-1": Label.TIE}
_LABEL = r"(?<![\d.,+\-/~#])(?:-1|0|1)(?![\d%/]|[.,:]\d)"
_PERCENT = r"(?<![\d.,+\-/~#])\d{1,3}(?:\.\d{1,6})?(?:\s?%|\s?/\s?100)?(?![\d%/]|[.,:\-]\d)"
_RATING = r"(?<![\d.,+\-/~#])[1-5](?:\s?/\s?5)?(?![\d%/]|[.,:\-]\d)"
_WORDS = (
    "answer|label|choice|verdict|antwort|réponse|respuesta|risposta|resposta|ответ|метка|答案|回答|标签|答え|정답|답"
)
_OPEN = r"[\s*_`\"'“‘「【(\[{$:]{0,12}"
_CLOSE = r"[\s*_`\"'”’」】)\]}$.。!！,，;；]*"
_LINK = r"(?:is|would be|should be|ist|est|es|è|é|是)(?![^\W\d])|[:：=]|->|=>|→|은|는"
_MINUS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"))
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>\n]{1,40}\|>|</?s>")
_CLOSED_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_NUMBERED = re.compile(r"[\s*_(]*([1-9])\s*(?:[.):]|$)")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_LIST_ITEM = re.compile(r"[\s*_(]*2\s*(?:[.):]|$)")


@dataclass(frozen=True, slots=True)
class _Reading:
    value: str
    is_strong: bool
    """Bare, marked or called final; what strong readings say outweighs earlier weak ones."""


@dataclass(frozen=True, slots=True)
class _Grammar:
    """The patterns that find one kind of value in one line."""

    bare: re.Pattern[str]
    marked: re.Pattern[str]
    named: re.Pattern[str]
    value: re.Pattern[str]


def _grammar(value: str, words: str) -> _Grammar:
    flags = re.IGNORECASE
    return _Grammar(
        bare=re.compile(rf"(?P<head>(?:#+\s)?{_OPEN})(?P<value>{value})(?P<tail>{_CLOSE})", flags),
        marked=re.compile(
            rf"\\boxed\{{\s*(?P<boxed>{value})\s*\}}|<(?:answer|label)>\s*(?P<tagged>{value})\s*<", flags
        ),
        named=re.compile(
            rf"(?P<final>final\s+)?(?<![a-z])(?:{words})(?![a-z])[\s*_`\"']{{0,8}}(?:{_LINK}){_OPEN}(?P<value>{value})",
            flags,
        ),
        value=re.compile(value),
    )


_LABEL_GRAMMAR = _grammar(_LABEL, _WORDS)
_PERCENT_GRAMMAR = _grammar(_PERCENT, _WORDS + "|score|progress")
_RATING_GRAMMAR = _grammar(_RATING, _WORDS + "|score|rating")
_AFTER_VALUE = re.compile(rf"{_CLOSE}$|[\s*_`\"'”)\]}}]*(?:[.。!,，;；(\n]|\s(?:because|since|as)\b)", re.IGNORECASE)


def parse_label(text: str) -> Label | None:
    """The label an answer gives: left for 0, right for 1, tie for -1, None when it cannot be read for certain.

    Total: every string has an answer, in time linear in its length. Reasoning between `<think>` and `</think>` does
    not count, and an answer whose reasoning never ends has no label. Prose that merely holds digits (`picture 1`,
    `0.5`, `10`) has none either, nor has one that names two labels.
    """
    value = _one_value(text, _LABEL_GRAMMAR)
    return None if value is None else _LABELS[value]


def parse_score(text: str) -> float | None:
    """The share of the goal that an answer names in percent, as a number in [0, 1]; None when it cannot be read.

    A fraction up to 1 without a percent sign (`0.7`) is not read: it may mean 70 percent or 0.7.
    """
    value = _one_value(text, _PERCENT_GRAMMAR)
    if value is None:
        return None
    number = float(re.split(r"[\s%/]", value, maxsplit=1)[0])
    is_ambiguous = number <= 1 and "." in value and not value.endswith(("%", "/100", "/ 100"))
    return None if is_ambiguous or number > 100 else number / 100


def parse_rating(text: str) -> float | None:
    """The rating from 1 to 5 that an answer gives, as a number in [0, 1]; None when it cannot be read for certain.

    1 is 0, 5 is 1. `3.5`, `6` and `4/10` are not on the scale and are not read, nor is the last number of a list that
    counts 1, 2, 3: it may be an item that was never written.
    """
    heads = [int(match[1]) for match in map(_NUMBERED.match, _answer_lines(text)) if match]
    if len(heads) > 1 and heads == list(range(1, len(heads) + 1)):
        return None
    value = _one_value(text, _RATING_GRAMMAR)
    return None if value is None else (int(value[0]) - 1) / 4


def parse_video_score(text: str) -> float | None:
    """The percentage behind written reasoning, as a number in [0, 1]; None when it cannot be read for certain.

    The scale is fixed: 1 is one percent, and `0.7` is not read. Only what stands between `<answer>` and `</answer>`
    counts, if there is one such pair; several are read where they agree. Without any, the text after the reasoning is
    read as `parse_score` reads it; a number inside reasoning that was cut short never counts.
    """
    lines = "\n".join(_answer_lines(text))
    answers = {parse_score(answer) for answer in _ANSWER.findall(lines)}
    if not answers:
        return None if "<answer>" in lines.lower() else parse_score(lines)
    return answers.pop() if len(answers) == 1 else None


def status_of(label: Label | None) -> Status:
    """What a parsed label makes of a question: ok, no_preference or invalid."""
    if label is None:
        return Status.INVALID
    return Status.NO_PREFERENCE if label is Label.TIE else Status.OK


def _one_value(text: str, grammar: _Grammar) -> str | None:
    """The value that everything readable in the text agrees on."""
    readings = list(_readings(_answer_lines(text), grammar))
    strong = [index for index, reading in enumerate(readings) if reading.is_strong]
    values = {reading.value for index, reading in enumerate(readings) if not strong or index >= strong[0]}
    return values.pop() if len(values) == 1 else None


def _answer_lines(text: str) -> list[str]:
    """Non-empty lines after the reasoning, with plain ASCII digits and minus signs."""
    text = text.replace("\x00", " ").rpartition("</think>")[2] if "</think>" in text else text
    if "<think>" in text:
        return []
    if len(text) > MAX_CHARS:
        text = text[-MAX_CHARS:].partition("\n")[2]
    text = _SPECIAL_TOKEN.sub(" ", text).translate(_MINUS)
    text = "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def _readings(lines: list[str], grammar: _Grammar) -> Iterator[_Reading]:
    """Every value that a line gives, in order."""
    is_list = any(_LIST_ITEM.match(line) for line in lines)
    for number, line in enumerate(lines, start=1):
        is_last = number == len(lines)
        bare = grammar.bare.fullmatch(line)
        if bare:
            heads_list = bare["value"] == "1" and bare["tail"].startswith(".")  # `1.` may be the first item's number
            numbers_item = ")" in bare["tail"] and "(" not in bare["head"]  # `1)` is an item's number
            if (is_last or not (is_list or heads_list)) and not numbers_item:
                yield _Reading(bare["value"], is_strong=True)
            continue
        for match in grammar.marked.finditer(line):
            yield _Reading(match["boxed"] or match["tagged"], is_strong=True)
        yield from _named_readings(line, grammar)


def _named_readings(line: str, grammar: _Grammar) -> Iterator[_Reading]:
    """Values behind a word such as `Answer:`, unless what follows names another value or makes it a sentence."""
    matches = list(grammar.named.finditer(line))
    for match, following in zip_longest(matches, matches[1:]):
        rest = line[match.end() : following.start() if following else len(line)]
        if _AFTER_VALUE.match(rest) and not grammar.value.search(rest):
            yield _Reading(match["value"], is_strong=bool(match["final"]))
