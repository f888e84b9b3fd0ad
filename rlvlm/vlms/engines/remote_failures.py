"""What an API's errors mean: whether to ask again and when, and what the user can do. All of it is untrusted text.

Called by `remote` for each answer with an error, also inside of HTTP 200.
"""

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import mktime_tz, parsedate_tz
from http import HTTPStatus
from typing import Any

from rlvlm.core.errors import ModelUnavailable
from rlvlm.vlms.chats import Refused, TransientError

_PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
_LONGEST_PAUSE_S = 3600.0
"""Pause above which the API is taken for unavailable: other questions would wait as long."""
_EPOCH_S = 1e9
"""Numbers from here on are times since 1970; as a pause they would be 30 years."""
_MAX_DETAILS_CHARS = 20_000
_DURATION = re.compile(r"(?:\d{1,9}(?:\.\d{1,9})?(?:ms|[dhms]))+")
_DURATION_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|[dhms])")
_UNIT_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
# what servers write beside a status, in the words of those that were seen
_DAY = re.compile(r"\b(?:per[ -]day|daily|today)\b", re.IGNORECASE)
_PAGE = re.compile(r"\s*(?:<!--.{0,200}-->\s*)?<(?:!doctype html|html|head|body)\b", re.IGNORECASE | re.DOTALL)
_TITLE = re.compile(r"<title>([^<]{1,200})", re.IGNORECASE)
_SPENT = re.compile(
    r"\b(?:credits?|balance|billing|spending limit|insufficient (?:funds|quota)|prepaid)\b", re.IGNORECASE
)
_FLAGGED = re.compile(r"\b(?:flagged|moderation|content policy)\b", re.IGNORECASE)
_BLIND = re.compile(
    r"\bat most 0 images?\b|unknown variant .?image_url|not a (?:multi-?modal|vision)|\btext[- ]only\b"
    r"|(?:not|n't|no endpoints found that) (?:currently )?(?:support|accept|have|take)\w*[^.]{0,30}"
    r"(?:\bimages?\b(?! (?:larger|bigger|over|above|of|with))|image_url|vision|multi-?modal)"
    r"|\b(?:image_url|image inputs?|images|vision)\b[^.]{0,20}(?:not (?:supported|allowed|enabled)|unsupported)",
    re.IGNORECASE,
)
_MANY_IMAGES = re.compile(
    r"too many images|(?:number|count) of images|at most \d+ (?:images?|multi-?modal)|\d+ images? (?:per|in|at most)"
    r"|(?:maximum|max|limit)(?: number)? of (?:\d+ )?images|images? limit",
    re.IGNORECASE,
)
_TOO_LONG = re.compile(
    r"context[ _-](?:length|window|size)|max_model_len|too many tokens|(?:prompt|input) is too long"
    r"|tokens?\b[^.]{0,40}(?:exceed|maximum|limit)|(?:exceed|longer than)[^.]{0,60}\btokens",
    re.IGNORECASE,
)
_LARGE_IMAGE = re.compile(r"(?:entity|payload|body|request|images?)\b[^.]{0,40}(?:too large|exceeds)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What an error means whose status and words are these."""

    kind: type[ModelUnavailable] | type[Refused]
    """ModelUnavailable if no other question would fare better."""
    statuses: tuple[int, ...]
    words: re.Pattern[str] | None
    """Pattern in the server's message; None for any."""
    what: str
    """Beginning of the message, in place of a bare status."""
    fix: str
    """With the slots `section`, prefix of the API's settings on the command line, and `role`, whose model it is."""


ROOT_FIX = "check --{section}.base-url: it is the root of the API, which mostly ends in /v1"
_KEYLESS, _UNFIT = (401, 403), (400, 404, 413, 415, 422)
_TOP_UP = ("the account of the API has nothing left", "top it up, then go on with `rlvlm resume`")
# the first that fits counts: from the server's words to its bare status
_MEANINGS = (
    _Meaning(ModelUnavailable, (402,), None, *_TOP_UP),
    _Meaning(ModelUnavailable, (400, 403), _SPENT, *_TOP_UP),
    # a firewall or a sign-in before the API, which has not seen the key
    _Meaning(
        ModelUnavailable, _KEYLESS, _PAGE, "the API is not what answers", ROOT_FIX + "; a proxy may stand before it"
    ),
    _Meaning(Refused, (403,), _FLAGGED, "blocked by the provider", ""),
    _Meaning(
        ModelUnavailable,
        _KEYLESS,
        None,
        "the API does not accept the key",
        "check --{section}.key-file or --{section}.key-env",
    ),
    _Meaning(ModelUnavailable, _UNFIT, _BLIND, "this model sees no images", "name one that does: --{role}.model"),
    _Meaning(
        Refused,
        _UNFIT,
        _MANY_IMAGES,
        "too many images",
        "raise the server's limit (vLLM: --limit-mm-per-prompt), or show shorter clips",
    ),
    _Meaning(
        Refused,
        _UNFIT,
        _TOO_LONG,
        "the question is too long",
        "smaller images (--{role}.image-px), fewer --{role}.max-new-tokens, or a model with a longer context",
    ),
    *(
        _Meaning(
            Refused,
            statuses,
            words,
            "the images are too large",
            "smaller ones (--{role}.image-px), or raise the limit of the server or the proxy before it",
        )
        for statuses, words in (((413,), None), (_UNFIT, _LARGE_IMAGE))
    ),
    _Meaning(
        ModelUnavailable,
        (404,),
        None,
        "the API has no such model or address",
        "check the model's name and --{section}.base-url",
    ),
    _Meaning(Refused, (400, 405, 406, 415, 422), _PAGE, "the API is not what answers", ROOT_FIX),
)


def failure_of(
    status: int, reason: str, *, retry_after_s: float | None = None, code: str = "", section: str = "judge.api"
) -> Exception:
    """Returns the exception for an HTTP error status, with what the user can do about it.

    Args:
        status: HTTP status of the answer.
        reason: the server's message, untrusted.
        retry_after_s: pause that it asks for, seconds; infinite if the quota of a whole day is spent.
        code: its machine-readable error code, if any.
        section: prefix of this API's settings on the command line.
    """
    answer = f"HTTP {status}: {page_in(reason) or reason}"
    if code == "insufficient_quota":
        status = HTTPStatus.PAYMENT_REQUIRED
    for meaning in _MEANINGS:
        if status in meaning.statuses and (meaning.words is None or meaning.words.search(reason)):
            fix = meaning.fix.format(section=section, role=section.partition(".")[0])
            return meaning.kind(f"{meaning.what} ({answer})", fix)
    if retry_after_s is not None and retry_after_s > _LONGEST_PAUSE_S:
        back = f"in {retry_after_s / 3600:,.1f} hours" if math.isfinite(retry_after_s) else "on its next day"
        return ModelUnavailable(
            f"the API answers again {back} ({answer})", "raise the quota, or go on then with `rlvlm resume`"
        )
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        fix = f"lower --{section}.concurrency, or raise --{section}.deadline-s to wait for longer"
        return TransientError(answer, retry_after_s, fix)
    if status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return TransientError(answer, retry_after_s, "look at the provider's status, or at the server's own log")
    return Refused(answer)


def page_in(text: str) -> str:
    """Returns what to say of a web page in place of an API's answer; empty if the text is none."""
    if not _PAGE.match(text):
        return ""
    title = _TITLE.search(text)
    return f"a web page{f' titled {title[1].strip()[:80]!r}' if title else ''}, not JSON"


def pause_of(status: int, headers: Mapping[str, str], error: Mapping[str, Any]) -> float | None:
    """Returns the seconds until the server wants to be asked again; None if it does not say.

    Infinite if the quota of a whole day is spent and nothing says when it is renewed.

    Args:
        status: HTTP status of the answer.
        headers: headers of the answer.
        error: the error in its body. OpenRouter repeats headers of the provider behind it in `metadata.headers`, Google
            says more in `details`.
    """
    metadata, details = error.get("metadata"), error.get("details")
    inner = metadata.get("headers") if isinstance(metadata, Mapping) else None
    named = [*(inner.items() if isinstance(inner, Mapping) else ()), *headers.items()]
    told = {str(name).lower(): str(value) for name, value in named}
    pause_s = retry_delay_s(details)
    # Google's pause after a spent day is that of its minute
    is_day = status == HTTPStatus.TOO_MANY_REQUESTS and "PerDay" in str(details)[:_MAX_DETAILS_CHARS]
    if pause_s is None:
        pause_s = retry_after_s(told)
    if status == HTTPStatus.TOO_MANY_REQUESTS and pause_s is None:
        pause_s = reset_s(told)
        is_day |= pause_s is None and _DAY.search(str(error.get("message"))) is not None
    return math.inf if is_day else pause_s


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds in a `Retry-After` header, a number or a date; None if it is absent or unreadable.

    Args:
        headers: headers of the answer, any mapping with lower-case look-up.
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        if (seconds := _seconds_in(headers.get(name) or "")) is not None:
            return seconds * unit
    return None


def reset_s(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds until the quotas of `*ratelimit*reset*` headers are renewed; None if none can be read.

    Of several quotas those with nothing `remaining` count, and of these the last; if none says so, the first.

    Args:
        headers: headers of a 429, names in lower case: `X-RateLimit-Reset` as seconds or as time since 1970 (also in
            milliseconds), OpenAI's `x-ratelimit-reset-tokens: 6m0s`, Anthropic's `anthropic-ratelimit-tokens-reset`,
            a date.
    """
    waits: dict[bool, list[float]] = {True: [], False: []}
    for name, value in headers.items():
        if "ratelimit" in name and "reset" in name and (seconds := _seconds_in(value)) is not None:
            waits[headers.get(name.replace("reset", "remaining"), "").strip() == "0"].append(seconds)
    return max(waits[True]) if waits[True] else min(waits[False], default=None)


def _seconds_in(text: str) -> float | None:
    """Returns the seconds from now to a time or for a duration, >= 0; None if it cannot be read.

    Reads `20`, `1m30s`, `250ms`, seconds and milliseconds since 1970, and dates of HTTP and of ISO 8601.
    """
    text, now = text.strip(), time.time()
    try:
        if _DURATION.fullmatch(text):
            return sum(float(number) * _UNIT_S[unit] for number, unit in _DURATION_PART.findall(text))
        if re.match(r"\d{4}-\d\d-\d\d[Tt ]", text):
            return max(0.0, datetime.fromisoformat(text).timestamp() - now)
        if date := parsedate_tz(text):
            seconds = mktime_tz(date) - now
            return seconds if seconds >= 0 else None
        seconds = float(text)
    except (ValueError, OverflowError):  # an impossible date
        return None
    if seconds >= _EPOCH_S:
        seconds = max(0.0, (seconds / 1e3 if seconds >= 1e3 * _EPOCH_S else seconds) - now)
    return seconds if 0 <= seconds < math.inf else None


def retry_delay_s(details: Any) -> float | None:
    """Returns the seconds in the `RetryInfo` of an error's details, as Google's servers send it; None without one."""
    try:
        for detail in details:
            if str(detail.get("@type", "")).endswith("RetryInfo"):
                delay_s = float(str(detail["retryDelay"]).removesuffix("s"))
                return max(0.0, delay_s) if math.isfinite(delay_s) else None
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    return None
