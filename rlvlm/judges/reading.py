r"""Parsers of a judge's replies: labels, percentages and ratings, without ever guessing.

If an engine constrains a reply to its choices, or gives their probabilities, nothing is parsed here. These parsers are
for free text, which is untrusted. Text outside of the grammar gives None: callers count it as invalid, never as a tie.

    answer      = { sentence } reading { reading | explanation }   behind reasoning that ends
    reading     = a line with the value alone                      `1`, `**1**`, `(1)`
                | [lead] [the|my] [final] NAME link value          `So the answer is 1.`, `Label: 1`, `{"label": 1}`
                | a mark of answers with one of the two in it      `\boxed{1}`, `<answer>1</answer>`
    explanation = a sentence that opens as one about images does, and takes nothing back

All readings must agree, or the last one must call itself the final answer. A sentence before them must be the model's
own: it may not speak of an example, of a sign, or of somebody else's words; right before a reading it must be whole and
speak of no answers or numbers.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache

from rlvlm.core.judging import Label

MAX_CHARS = 20_000
"""Number of last characters of an answer that are read."""

# --- values, and the forms in which they are given --------------------------------------------------------------------
# a value is not part of a longer number, a date, a range or a fraction of something else
_BEFORE, _AFTER = r"(?<![\d.,+\-/~#])", r"(?![\d%/]|\s?/\s?\d|[.,:\-]\d)"
_NAMES = (
    "answer|label|choice|verdict|antwort|réponse|respuesta|risposta|resposta|ответ|метка|答案|回答|标签|答え|정답|답"
)
_LABEL = _BEFORE + r"(?:-1|0|1)(?![\d%/]|[.,:]\d)", _NAMES
_PERCENT = (
    _BEFORE + r"\d{1,3}(?:\.\d{1,6})?(?:\s?%|\s?/\s?100|\sout of 100|\spercent)?" + _AFTER,
    _NAMES + "|score|progress",
)
_RATING = _BEFORE + r"[1-5](?:\s?/\s?5|\sout of 5)?" + _AFTER, _NAMES + "|score|rating"
_CHANGE = re.compile(r"[*\s]*(?P<value>[+-]?\d{1,3}(?:\.\d{1,6})?)\s?%?[.*\s]*")
_LABELS = {"0": Label.LEFT, "1": Label.RIGHT, "-1": Label.TIE}
_OPEN = r"[\s*_`\"'“‘「【(\[{:]{0,12}"
_CLOSE = r"[\s*_`\"'”’」】)\]}.。!！,，;；]*"
# `is` in the languages that models fall into, and its equivalents in lists and JSON
_LINK = r"(?:is|ist|est|es|è|é|是)(?![^\W\d])|[:：=]|->|=>|→|은|는"
# words that only lead up to an answer; three at most, so that the pattern stays linear
_LEAD = (
    r"(?:(?:so|therefore|thus|hence|then|and|now|finally|overall|in (?:conclusion|summary)|conclusion|"
    r"i (?:think|believe|conclude)(?:\sthat)?|based on (?:this|that|these))(?:\s?[,:]\s?|\s+)){0,3}"
)
_MARK = re.compile(
    r"<(answer|label|score|rating)>([^<]{0,200})</\1>|\\boxed\{([^{}\n]{0,40})\}|<\|begin_of_box\|>([^<]{0,40})<\|end_of_box\|>",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"<[a-z/|!]|\u25c1|\\boxed", re.IGNORECASE)
_WHY = re.compile(
    r"[*_`\"'\]}\s]*(?:[(,;，:]|-+\s|[—–]|(?=(?:because|since|as)\b))\s*(\S.*)", re.IGNORECASE | re.DOTALL
)

# --- the text around a value: who speaks, and what is said ------------------------------------------------------------
_OPENING = re.compile(
    r"(?:the|this|these|its?|it's|they|there|both|neither|each|either|in|on|at|from|here|because|since|as|first|"
    r"second|left|right|images?|pictures?|clips?|frames?|all|only|nothing|same|similar|identical|compar(?:ed|ing)|"
    r"between|while|whereas|with|reason(?:ing)?|explanation|rationale|analysis|observations?|comparison|confidence|"
    r"no (?:visible |clear )?(?:difference|change)|i (?:can )?see|i am (?:not sure|unsure)|i cannot tell)(?![\w'])",
    re.IGNORECASE,
)
"""First words of a sentence that explains an answer."""
_FOREIGN = re.compile(
    r"\b(?:annotators?|label+ers?|raters?|colleagues?|some(?:one|body|thing)|anybody|everyone|people|users?|humans?|"
    r"experts?|reviewers?|teachers?|friends?|models?|assistants?|another|others|he|she|manual|judges?|"
    r"sa(?:y|ys|id|ying)|tells?|told|writes?|wrote|written|write|reads|vote[sd]?|claim(?:s|ed)?|according|reported|chose|"
    r"suggest(?:s|ed)?|answer(?:s|ed)|pick(?:s|ed)|insist(?:s|ed)?|decide[sd]?|shown|marked|repl(?:y|ies|ied)|stated?s?|"
    r"thinks?|thought|believe[sd]|quot(?:e|es|ed|ing)|asked|inscri\w*|bears|spells|signs?|stickers?|posters?|screens?|"
    r"captions?|texts?|notes?|printed|tags?|placards?|watermarks?|options?|theor\w*|examples?|e\.g|instances?|such as|"
    r"samples?|templates?|formats?|placeholders?|instruct(?:ions?|ed)|prompts?|demonstrations?|illustrat\w*|dummy|"
    r"previous|previously|last time|suppos\w*|imagin\w*|pretend\w*|hypothe\w*|assum\w*|unless|ignore|system)\b"
    r"|\bif\b.*\b(?:were|was|had|would)\b",
    re.IGNORECASE,
)
"""Marks of somebody else's words, an example, or a hypothesis."""
_ANSWERS = re.compile(
    r"\b(?:answers?|label(?:s|led)?|choices?|choose|verdicts?|scores?|ratings?|digits?|numbers?|maximum|max|scale|"
    r"out of (?:\d|ten|a hundred))\b",
    re.IGNORECASE,
)
"""Talk of answers or of another scale, beside the reading itself."""
# words that take an answer back, and numbers in words, which may be another answer
_RETRACTION = re.compile(
    r"\b(?:actually|wait|hm+|oops|sorry|correct(?:ion|ed|ing)?|mistak\w*|wrong|incorrect|errors?|instead|scratch|"
    r"retract\w*|withdraw\w*|reconsider\w*|rethink\w*|second (?:thought|look)|look(?:ed|ing)? again|reflection|mind|"
    r"opposite|revers\w*|swap\w*|other way|disregard|never|jok\w*|kidding|false|revis\w*|updat\w*|contrary|meant?|typo|"
    r"in fact|guess\w*|not (?:so|it|that|this|what|my|right|true|the case)|doubt\w*|void|invalid|random\w*|flip\w*|"
    r"coin|zero|one|minus|negative)\b",
    re.IGNORECASE,
)
# doubt about a choice; a tie may be unsure
_HEDGE = re.compile(
    r"\b(?:if|would|could|might|may|should|maybe|perhaps|probably|possibly|unsure|uncertain|not sure|"
    r"(?:cannot|can't) tell|depend\w*|or)\b",
    re.IGNORECASE,
)
# a sentence that breaks off here continues in the next line, with unknown text
_DANGLING = re.compile(
    r"\b(?:is|be|was|are|am|not|of|an?|the|to|than|number|say|as|for|at|with|and|or|but|gets?|gives?|means?|only|"
    r"it|that|this|by|about|around|between|from|in|on)$",
    re.IGNORECASE,
)
# numbers that name a thing or a measure, so no answers: `image 2`, `5 cm`
_THING_NUMBER = re.compile(
    r"\b(?:pictures?|images?|clips?|frames?|scenes?|photos?)\s?#?\d{1,3}(?:\s(?:and|than|to)\s\d{1,3})?(?![\d%/])|"
    r"\b\d{1,4}(?:\.\d{1,4})?\s?(?:cm|mm|m|px|pixels?|degrees?)\b",
    re.IGNORECASE,
)
_SIDE = re.compile(r"\b(?:(first|left)|second|right)\b", re.IGNORECASE)
_NEARER = re.compile(r"\b(?:nearer|closer|better)(?: to (?:the|its|our) goal)?(?:[,.;]| than\b|$)", re.IGNORECASE)
_NEGATION = re.compile(r"\b(?:not?|nor|none|never|less|hardly|neither)\b|n't\b", re.IGNORECASE)
_MARKS = " \t*_`\"'”’“‘#>()[]{},.;:-—–"

# --- lines and sentences ----------------------------------------------------------------------------------------------
_PLAIN = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-")
    | {"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\x00": " "}
)
_THOUGHT = re.compile(
    r"(?:<\|?|\u25c1|\[)\s?(?P<close>/|end_of_)?(?:begin_of_|seed:)?"
    r"(?P<name>think(?:ing)?|thoughts?|reason(?:ing)?|analysis|reflection|scratchpad|planning|observation)"
    r"(?:\s[^<>\n]{0,80})?\s?(?:\|?>|\u25b7|\])",
    re.IGNORECASE,
)
# gpt-oss writes its reasoning and its answer into channels
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w{0,20})[^<\n]{0,40}<\|message\|>")
_START_TOKEN = re.compile(r"<\|(?:assistant|im_start|start|begin_of_text|bot)\|>|<s>|<start_of_turn>", re.IGNORECASE)
_END_TOKEN = re.compile(
    r"<\|(?:im_end|endoftext|end|return|eot_id|eom_id|eot|end_of_text)\|>|</s>|<eos>|<end_of_turn>", re.IGNORECASE
)
_TYPE_TAG = re.compile(r"</?(?:b|strong|i|em|u|code|pre)>", re.IGNORECASE)
_EMPTY_LINE = re.compile(r"```\w{0,12}|[-*_=]{3,}|[\s{}\[\]$,]+")
_SENTENCE_END = re.compile(
    r"(?<=[.!?;])\s+|(?<=[。！？；])|,?\s+(?:and\s+)?(?=(?:so|therefore|thus|hence)\b)", re.IGNORECASE
)
_BECAUSE = re.compile(r"\b((?:because|since|as)\s[^,]{3,300}),\s+(?=the\s|my\s)", re.IGNORECASE)
"""A reason before the answer, which becomes a separate sentence."""
_LIST_HEAD = re.compile(r"[\s*_(]{0,8}(?:\d{1,2}\s?[.):][*_]{0,3}|[-•*+])\s+")
_ITEM_NUMBER = re.compile(r"[\s*_(]*([1-9])\s*(?:[.):]|$)")
_JSON_REASONS = frozenset({"reason", "reasoning", "explanation", "rationale", "analysis", "observation", "comparison"})


def parse_label(text: str) -> Label | None:
    """Returns the label in an answer: left for 0, right for 1, tie for -1, None if it cannot be read for certain.

    Total: every string has a result, in time linear in its length.
    """
    value = _read(answer_lines(text), *_LABEL)
    return None if value is None else _LABELS[value]


def parse_score(text: str) -> float | None:
    """Returns the share of the goal that an answer gives in percent, in [0, 1]; None if it cannot be read for certain.

    A fraction up to 1 without a percent sign (`0.7`) is not read: it may mean 70 percent or 0.7 percent.
    """
    value = _read(answer_lines(text), *_PERCENT)
    if value is None:
        return None
    # the number alone, of `40 %`, `40/100`, `40 out of 100`
    number = float(re.split(r"[\s%/]", value, maxsplit=1)[0])
    is_ambiguous = number <= 1 and "." in value and not value.endswith(("%", "100", "percent"))
    return None if is_ambiguous or number > 100 else number / 100


def parse_rating(text: str) -> float | None:
    """Returns the rating from 1 to 5 in an answer, mapped to [0, 1]; None if it cannot be read for certain.

    1 is 0, 5 is 1. `3.5`, `6` and `4/10` are not on the scale and are not read, nor is the last number of a list that
    counts 1, 2, 3: it may be an item without its text.
    """
    lines = answer_lines(text)
    heads = [int(match[1]) for match in map(_ITEM_NUMBER.match, lines) if match]
    if len(heads) > 1 and heads == list(range(1, len(heads) + 1)):
        return None
    value = _read(lines, *_RATING)
    return None if value is None else (int(value[0]) - 1) / 4


def parse_change(text: str) -> float | None:
    """Returns a signed percentage that stands alone, mapped to [-1, 1]; None if it cannot be read for certain."""
    lines = answer_lines(text)
    # alone on its line: in a sentence, a signed number may be a range or a hyphen
    found = _CHANGE.fullmatch(lines[0]) if len(lines) == 1 else None
    value = float(found["value"]) / 100 if found else 2.0
    return value if abs(value) <= 1 else None


def answer_lines(text: str) -> list[str]:
    """Returns the non-empty lines after the reasoning, with plain ASCII digits, minus signs and quotes.

    Empty if the reasoning never ends, in any form, or if the chat continues after the answer's end.
    """
    text = text.translate(_PLAIN)
    # the last channel must be the final one: anything else is reasoning that was cut off
    if "<|channel|>" in text:
        channels = list(_CHANNEL.finditer(text))
        if not channels or channels[-1][1] != "final" or text.rindex("<|channel|>") != channels[-1].start():
            return []
        text = text[channels[-1].end() :]
    last_end, depth, is_closed = 0, dict[str, int](), dict[str, bool]()
    # a chat template may have opened the first thought, so an end without a beginning counts too
    for mark in _THOUGHT.finditer(text):
        name, closes = mark["name"].lower(), mark["close"] is not None
        depth[name] = depth.get(name, 0) + (-1 if closes else 1)
        is_closed[name] = closes
        last_end = mark.end() if closes else last_end
    # a last thought that is never closed may hold any number of tried answers
    if any(count > 0 for count in depth.values()) or not all(is_closed.values()):
        return []
    text = text[last_end:]
    # answers stand at the end; the first of the remaining lines may be cut
    if len(text) > MAX_CHARS:
        text = text[-MAX_CHARS:].partition("\n")[2]
    text = _START_TOKEN.sub(" ", text)
    # after the end of its turn a model plays the user, or a whole other chat
    end = _END_TOKEN.search(text)
    if end and _END_TOKEN.sub(" ", text[end.start() :]).strip():
        return []
    text = _TYPE_TAG.sub("*", text[: end.start()] if end else text)
    text = re.sub(r"<br\s?/?>|</?p>", "\n", text, flags=re.IGNORECASE)
    text = re.sub(r"\$([^$\n]{1,60})\$", r"\1", text)  # formulas
    text = "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text)
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not _EMPTY_LINE.fullmatch(line)]
    if not lines or not lines[0].startswith("{"):
        return lines
    try:  # a JSON object becomes lines `name: value`, and its reasons become sentences
        pairs: list[tuple[str, object]] = json.loads("\n".join(lines), object_pairs_hook=list)  # a name may be twice
    except (ValueError, RecursionError):
        return lines
    said = [(name.lower(), str(value)) for name, value in pairs if name.lower() != "confidence"]
    return [
        line for name, value in said for line in (value if name in _JSON_REASONS else f"{name}: {value}").splitlines()
    ]


@cache
def _forms(value: str, names: str) -> tuple[re.Pattern[str], ...]:
    """Returns patterns for a line with only the value, a sentence naming it, a heading, and a final answer's name."""
    named = (
        rf"(?:the\s+|my\s+)?(?:(?:final|correct|best)\s+)?(?:{names})(?![a-z])"
        r"(?:\s(?:for|to) (?:this|the) (?:pair|question|comparison|query|goal|scene|task|clip|image|picture))?"
        r"[\s*_`\"']{0,8}"
    )
    start = rf"{_OPEN}(?:#+\s)?(?:[-*•]\s)?{_OPEN}{_LEAD}"
    alone = re.compile(rf"(?P<head>(?:#+\s)?{_OPEN})(?P<value>{value})(?P<tail>{_CLOSE})")
    # twice, for a mark in a sentence: `So the answer is \boxed{1}`
    reading = re.compile(rf"{start}(?:{named}(?:{_LINK}){_OPEN}){{1,2}}(?P<value>{value})", re.IGNORECASE)
    heading = re.compile(rf"{start}(?:{named}(?:{_LINK})?|conclusion|result)[\s*_:]*", re.IGNORECASE)
    final = re.compile(rf"\bfinal\s+(?:{names})(?![a-z])", re.IGNORECASE)
    return alone, reading, heading, final


def _read(lines: list[str], value: str, names: str) -> str | None:
    """Returns the value that all readings in the lines agree on, unless something around it forbids to read it."""
    alone, reading, heading, final = _forms(value, names)

    def value_of(sentence: str) -> str | None:
        """Returns the value of a sentence if all of it has an accepted form."""
        text = _without_list_head(sentence)
        match = reading.match(text)
        if match is None:
            return None
        rest = text[match.end() :]
        why = _WHY.fullmatch(rest)
        is_whole = re.fullmatch(_CLOSE, rest) or (why and _explains(why[1], match["value"]))
        return match["value"] if is_whole else None

    def open_mark(match: re.Match[str]) -> str:
        inner = (match[2] or match[3] or match[4] or "").strip()
        found = alone.fullmatch(inner)
        given = found["value"] if found else value_of(inner)
        return f"answer: {given}" if given else "<!"

    # marks become the form with a name, so that one grammar reads both
    text = _MARK.sub(open_mark, "\n".join(lines))
    if _MARKUP.search(text):  # a mark around something else, or an unknown one
        return None
    # several marks in a line are several readings, and a heading that calls the next line final belongs to that line
    text = re.sub(r"(answer: \S+?)[ \t,;]*(?=answer: )", r"\1\n", text)
    text = re.sub(rf"({final.pattern})[\s*_:：]*\n\s*", r"\1: ", text, flags=re.IGNORECASE)
    lines = [line for line in text.splitlines() if not heading.fullmatch(line)]
    said = _sentences(lines, alone, value_of)
    indices = [index for index, (_, given) in enumerate(said) if given]
    # no reading, or two that differ: a model that corrects itself is not sure, unless it calls the last one final
    deciding = [index for index in indices if final.search(said[index][0])]
    deciding = deciding if deciding and deciding[-1] == indices[-1] else indices
    if len({said[index][1] for index in deciding}) != 1:
        return None
    answer, last = said[indices[-1]][1], indices[-1]
    for index, (sentence, given) in enumerate(said[:last]):
        if given is None and _FOREIGN.search(sentence):
            return None
        following, is_reading = said[index + 1]
        if given is None and is_reading and not _introduces(sentence, following):
            return None
    if not all(_explains(sentence, answer) for sentence, _ in said[last + 1 :]):
        return None
    return answer


def _sentences(
    lines: Sequence[str], alone: re.Pattern[str], value_of: Callable[[str], str | None]
) -> list[tuple[str, str | None]]:
    """Cuts the lines into sentences, and returns each with its value."""
    said: list[tuple[str, str | None]] = []
    is_list = any((item := _ITEM_NUMBER.match(line)) and item[1] == "2" for line in lines)
    for number, line in enumerate(lines, start=1):
        if match := alone.fullmatch(line):
            is_item = ")" in match["tail"] and "(" not in match["head"]  # `1)` is the number of a list item
            may_be_item = is_list or (match["value"] == "1" and match["tail"].startswith("."))  # and so may `1.` be
            if not is_item and (number == len(lines) or not may_be_item):
                said.append((line, match["value"]))
            continue
        head = _LIST_HEAD.match(line)
        body = line[head.end() :] if head else line
        body, length = _BECAUSE.sub(r"\1. ", body), len(body)
        parts = [part for part in _SENTENCE_END.split(body) if part.strip(_MARKS)] or [""]
        parts[0] = line[: len(line) - length] + parts[0]
        said += [(part, value_of(part)) for part in parts]
    return said


def _without_list_head(line: str) -> str:
    head = _LIST_HEAD.match(line)
    return line[head.end() :] if head else line


def _has_number(text: str) -> bool:
    return any(char.isdigit() for char in _THING_NUMBER.sub(" ", _without_list_head(text)))


def _introduces(sentence: str, reading: str) -> bool:
    """Returns whether an answer may directly follow a sentence: it must be whole and about the scene."""
    text = sentence.strip(" \t*_`\"')]”’")
    if not text or _ANSWERS.search(text) or _has_number(text):
        return False
    if text[-1] in ".!。！;；" and not text.endswith("..."):
        return True
    # list items often lack a full stop, and so do clauses before a `so`
    may_be_open = _LIST_HEAD.match(text) or re.match(r"(?:so|therefore|thus|hence)\b", reading, re.IGNORECASE)
    return may_be_open is not None and text[-1] not in ":：,，-—–(=…" and _explains(text, "-1")


def _explains(sentence: str, value: str | None) -> bool:
    """Returns whether a sentence only explains the answer `value`: it opens as `_OPENING` says and has no doubts."""
    text = _without_list_head(sentence).strip(_MARKS)
    num_words = len(text.split())
    is_cut = num_words < 2 or (num_words < 4 and re.match(r"(?:because|since|as)\b", text, re.IGNORECASE))
    if is_cut or not _OPENING.match(text) or "?" in text or _DANGLING.search(text) or _has_number(text):
        return False
    if any(char.isalpha() and not char.isascii() for char in text):
        return False  # the lists are English
    doubts = (_FOREIGN, _ANSWERS, _RETRACTION, *(() if value == "-1" else (_HEDGE,)))  # a tie may be unsure
    if any(pattern.search(text) for pattern in doubts):
        return False
    side = _SIDE.search(text)
    if value in ("0", "1") and side and _NEARER.search(text):  # it must not call the other side the better one
        return ("0" if side[1] else "1") == value and not _NEGATION.search(text)
    return True
