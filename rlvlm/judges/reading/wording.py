r"""The words around a value in a judge's text: which lines count, and what may stand before and after an answer.

`verdicts` finds values; this file says whose they are. Everything here is a list of what is accepted: forms of
reasoning that can be taken out, openings of a sentence that explains, and the words that make a sentence doubtful
(somebody else's answer, an example, a hypothesis, a retraction). What is on no list is not accepted.
"""

import re
import unicodedata
from collections import Counter

MAX_CHARS = 20_000
"""Only this many last characters of an answer are read."""
MARK_OPEN, MARK_CLOSE = "\ue000", "\ue001"
"""Stand around a value that was marked as the answer."""

_MINUS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"))
_QUOTES = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', MARK_OPEN: " ", MARK_CLOSE: " "})
_THOUGHT = re.compile(
    r"(?:<\|?|\u25c1|\[)\s?(?P<close>/|end_of_)?(?:begin_of_|seed:)?"
    r"(?P<name>think(?:ing)?|thoughts?|reason(?:ing)?|analysis|reflection|scratchpad)"
    r"(?:\s[^<>\n]{0,80})?\s?(?:\|?>|\u25b7|\])",
    re.IGNORECASE,
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w{0,20})[^<\n]{0,40}<\|message\|>")
_START_TOKEN = re.compile(r"<\|(?:assistant|im_start|start|begin_of_text|bot)\|>|<s>|<start_of_turn>", re.IGNORECASE)
_END_TOKEN = re.compile(
    r"<\|(?:im_end|endoftext|end|return|eot_id|eom_id|eot|end_of_text)\|>|</s>|<eos>|<end_of_turn>", re.IGNORECASE
)
_FORMAT_TAG = re.compile(r"</?(?:b|strong|i|em|u|code|pre)>", re.IGNORECASE)
_BREAK_TAG = re.compile(r"<br\s?/?>|</?p>", re.IGNORECASE)
_FENCE = re.compile(r"```\w{0,12}")
_FRAME_LINE = re.compile(r"[-*_=]{3,}|[\s{}\[\]$,]+")
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])")

_LIST_HEAD = re.compile(r"[\s*_(]{0,8}(?:\d{1,2}\s?[.):]|[-•*+])\s+")
_MARKS = " \t*_`\"'”’“‘#>()[]{},.;:-—–"
_OPENING = re.compile(
    r"(?:the|this|these|its?|it's|they|there|both|neither|each|either|in|on|at|from|here|because|since|as|first|"
    r"second|left|right|pictures?|images?|clips?|frames?|one|all|only|nothing|same|similar|identical|compar(?:ed|ing)|"
    r"between|while|whereas|with|reason(?:ing)?|explanation|rationale|justification|analysis|observations?|"
    r"comparison|confidence|no (?:visible |clear |real )?(?:difference|change)|i (?:can )?see|i compared|"
    r"i (?:chose|picked) it|i am (?:not sure|unsure)|i'm (?:not sure|unsure)|i (?:cannot|can't) tell)(?![\w'])",
    re.IGNORECASE,
)
_FRAME = re.compile(
    r"\b(?:annotators?|label+ers?|raters?|colleagues?|someone|somebody|anybody|everyone|people|persons?|users?|humans?|"
    r"experts?|reviewers?|teachers?|friends?|models?|assistants?|another|others|he|she|"
    r"sa(?:y|ys|id|ying)|tells?|told|writes?|wrote|written|reads|vote[sd]?|claim(?:s|ed)?|according|reported|"
    r"judges?|chose|options?|inscri\w*|bears|theor\w*|something|suggest(?:s|ed)?|answer(?:s|ed)|pick(?:s|ed)|insist(?:s|ed)?|decide[sd]?|shown|marked|repl(?:y|ies|ied)|states|stated|thinks?|thought|believes|believed|quot(?:e|es|ed|ing)|asked|"
    r"signs?|stickers?|posters?|screens?|captions?|texts?|notes?|printed|tags?|placards?|plates?|watermarks?|"
    r"examples?|e\.g|instances?|such as|samples?|templates?|formats?|placeholders?|instruct(?:ions?|ed)|prompts?|"
    r"demonstrations?|illustrat\w*|dummy|previous|previously|last time|"
    r"suppos\w*|imagin\w*|pretend\w*|hypothe\w*|assum\w*|unless)\b|\bif\b.*\b(?:were|was|had|would)\b",
    re.IGNORECASE,
)
_ANSWER_WORD = re.compile(
    r"\b(?:answers?|labels?|label+ed|choices?|choose|verdicts?|scores?|ratings?|digits?|numbers?)\b", re.IGNORECASE
)
_RETRACTION = re.compile(
    r"\b(?:actually|wait|hm+|oops|sorry|correct(?:ion|ed|ing)?|mistak\w*|wrong|incorrect|errors?|instead|scratch|"
    r"retract\w*|withdraw\w*|reconsider\w*|rethink\w*|second thought|reflection|mind|opposite|revers\w*|swap\w*|"
    r"other way|disregard|ignore|never|jok\w*|kidding|false|revis\w*|updat\w*|contrary|meant?|typo|in fact|guess\w*|"
    r"not (?:so|it|that|this|what|my|right|true|the case)|doubt\w*|void|invalid|random\w*|flip\w*|coin|"
    r"zero|minus|negative)\b",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"\b(?:if|would|could|might|may|should|maybe|perhaps|probably|possibly|unsure|uncertain|not sure|"
    r"(?:cannot|can't) tell|depend\w*|or)\b",
    re.IGNORECASE,
)
_NEGATION = re.compile(r"\b(?:not?|nor|none|never|hardly|without|un\w+)\b|n't\b", re.IGNORECASE)
_SCALE = re.compile(r"\b(?:out of|scale|max(?:imum)?|ten|hundred|stars?|points?|of)\b|/", re.IGNORECASE)
_SCALE_NAMED = re.compile(r"\b(?:maximum|scale|out of (?:\d|ten|a hundred))", re.IGNORECASE)
_THING_NUMBER = re.compile(
    r"\b(?:pictures?|images?|clips?|frames?|scenes?|photos?|figures?)\s?#?\d{1,3}(?:\s(?:and|than|to)\s\d{1,3})?(?![\d%/])|"
    r"\b\d{1,4}(?:\.\d{1,4})?\s?(?:cm|mm|m|px|pixels?|degrees?|inch(?:es)?)\b",
    re.IGNORECASE,
)
_SIDE = re.compile(r"\b(first|left|second|right)\b", re.IGNORECASE)
_NEARER = re.compile(r"\b(?:nearer|closer|better)(?: to (?:the|its|our) goal)?(?:[,.;]|$)", re.IGNORECASE)
_DANGLING = re.compile(
    r"\b(?:is|be|was|are|am|not|of|an?|the|to|than|number|say|as|for|at|with|and|or|but|gets?|gives?|means?|only|"
    r"it|that|this|by|about|around|between|from|in|on)$",
    re.IGNORECASE,
)


def answer_lines(text: str) -> list[str]:
    """Non-empty lines after the reasoning, with plain ASCII digits, minus signs and quotes.

    Empty where reasoning never ends, in whatever form, and where a chat goes on after its answer's end.
    """
    text = _answer_part(text.replace("\x00", " ").translate(_QUOTES))
    if len(text) > MAX_CHARS:
        text = text[-MAX_CHARS:].partition("\n")[2]
    text = re.sub(r"<\|begin_of_box\|>([^<]{0,40})<\|end_of_box\|>", r"\\boxed{\1}", text)
    text = _START_TOKEN.sub(" ", text)
    end = _END_TOKEN.search(text)
    if end and _END_TOKEN.sub(" ", text[end.start() :]).strip():
        return []
    text = (text[: end.start()] if end else text).translate(_MINUS)
    text = _BREAK_TAG.sub("\n", _FORMAT_TAG.sub("*", text))
    text = "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text)
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not _FENCE.fullmatch(line) and not _FRAME_LINE.fullmatch(line)]


def _answer_part(text: str) -> str:
    """What stands after all reasoning; empty where some of it was opened and never closed."""
    if "<|channel|>" in text:
        channels = list(_CHANNEL.finditer(text))
        if not channels or channels[-1][1] != "final" or text.rindex("<|channel|>") != channels[-1].start():
            return ""
        text = text[channels[-1].end() :]
    last_end, depth, last = 0, Counter[str](), dict[str, bool]()
    for mark in _THOUGHT.finditer(text):
        name, closes = mark["name"].lower(), mark["close"] is not None
        depth[name] += -1 if closes else 1
        last[name] = closes
        last_end = mark.end() if closes else last_end
    is_open = any(count > 0 for count in depth.values()) or not all(last.values())
    return "" if is_open else text[last_end:]


def sentences(line: str) -> list[str]:
    """The sentences of a line; the number of a list's item is no sentence of its own, but begins one."""
    text = without_list_head(line)
    first, *rest = [part for part in _SENTENCE_END.split(text) if part.strip(_MARKS)] or [""]
    return [line[: len(line) - len(text)] + first, *rest]


def without_list_head(line: str) -> str:
    """A line without the number or the bullet of a list's item."""
    head = _LIST_HEAD.match(line)
    return line[head.end() :] if head else line


def explains(sentence: str, value: re.Pattern[str], *, is_tie: bool = False, is_score: bool = False) -> bool:
    """Whether a sentence only explains the answer beside it: it opens as one of the list does, and doubts nothing.

    Args:
        sentence: one sentence, or what follows a value in its own sentence.
        value: finds a value; an explanation has none, but for images that are numbered and lengths with a unit.
        is_tie: not being sure is what a tie says, and no doubt about it.
        is_score: no other number may stand beside a score.
    """
    text = without_list_head(sentence).strip(_MARKS)
    if len(text.split()) < 2 or not _OPENING.match(text) or "?" in text or _DANGLING.search(text):
        return False
    return not _is_doubtful(text, value, is_tie=is_tie, is_score=is_score)


def is_harmless_remark(remark: str, value: re.Pattern[str], *, is_tie: bool, is_score: bool) -> bool:
    """Whether a bracket behind a value, e.g. `drawer just open`, neither doubts it nor says whose it is."""
    is_plain = 0 < len(remark.split()) <= 12 and not _NEGATION.search(remark) and not _HEDGE.search(remark)
    is_scaled = _SCALE.search(remark) or any(char.isdigit() for char in remark)
    return (
        is_plain and not (is_score and is_scaled) and not _is_doubtful(remark, value, is_tie=is_tie, is_score=is_score)
    )


def _is_doubtful(text: str, value: re.Pattern[str], *, is_tie: bool, is_score: bool) -> bool:
    if any(char.isalpha() and not char.isascii() for char in text):
        return True  # the lists are English
    numbers = _THING_NUMBER.sub(" ", text)
    if value.search(numbers) or (is_score and any(char.isdigit() for char in numbers)):
        return True
    if is_score and _SCALE_NAMED.search(text):
        return True
    doubts = [_FRAME, _ANSWER_WORD, _RETRACTION] + ([] if is_tie else [_HEDGE])
    return any(pattern.search(text) for pattern in doubts)


def favours(sentence: str) -> str | None:
    """The side, as a label, that a sentence alone calls nearer to the goal; None where it names both or none."""
    sides = {side.lower() for side in _SIDE.findall(sentence)}
    is_one = len(sides) == 1 and _NEARER.search(sentence) and not _NEGATION.search(sentence)
    return ("0" if sides <= {"first", "left"} else "1") if is_one else None


def introduces(sentence: str, value: re.Pattern[str], heading: re.Pattern[str]) -> bool:
    """Whether an answer may follow a sentence: a heading such as `Answer:`, or a sentence that is whole.

    Not whole, or not the model's own view: one that ends in a colon, a comma or a dash, that speaks of answers, of
    what somebody says or shows, of examples and hypotheses, or that names another value.

    Args:
        sentence: the one before the answer.
        value: finds a value.
        heading: matches the headings.
    """
    if heading.fullmatch(sentence.strip()):
        return True
    text = sentence.strip(" \t*_`\"')]”’")
    if (
        _FRAME.search(text)
        or _ANSWER_WORD.search(text)
        or not text
        or text[-1] in ":：,，-—–(=…"
        or text.endswith("...")
    ):
        return False
    if _SCALE_NAMED.search(text) or value.search(_THING_NUMBER.sub(" ", without_list_head(text))):
        return False
    if text[-1] in ".!。！;；":
        return True
    item = without_list_head(text)  # items of a list often go without a full stop
    return item != text and len(item.split()) >= 3 and explains(item, value, is_tie=True)


def opens_foreign_block(line: str) -> bool:
    """Whether what follows a line is not the model's own answer, e.g. `Example:` or `The annotator wrote:`."""
    return line.rstrip(" *_\"'`").endswith((":", "：")) and _FRAME.search(line) is not None
