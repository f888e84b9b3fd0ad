"""A judge behind `rlvlm serve`, over HTTP: the `Judge` protocol for processes that have neither Ray nor torch."""

import asyncio
import base64
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import rlvlm
from rlvlm.core.errors import JudgeUnavailable, ModelUnavailable, UnsupportedQuestion, first_line
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.core.steps import Frames
from rlvlm.judges.batching import Answer, Batches, Item, Kind
from rlvlm.vlms.chats import Refused
from rlvlm.vlms.engines.http_client import Proxy, make_http_client
from rlvlm.vlms.engines.loop import PerProcess
from rlvlm.vlms.engines.remote_failures import retry_after_s
from rlvlm.vlms.engines.secret import Secret, read_secret
from rlvlm.vlms.stills import to_png

IN_FLIGHT = 4
"""Requests at a time: enough that a judge never waits for the next one."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 10.0
CONNECT_S = 10.0
"""Maximum time for the first request of a process, seconds: a server that is not there is reported soon."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ROUTES: dict[Kind, tuple[str, str]] = {
    "score": ("/v1/score/batch", "clips"),
    "compare": ("/v1/preference/batch", "queries"),
}
_OWN_FIX = "see where `rlvlm serve` runs: it prints its address and the file of its token"


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a server says of itself."""

    max_images: int
    body_bytes: int
    stamps: Mapping[str, Stamp]


class HttpJudge:
    """The `Judge` protocol over HTTP. Requests are split by the server's limits, repeated while it is overloaded or
    being replaced, and shared by all callers of a process. It pickles, and works in forks.

    Args:
        url: address of the server, e.g. `http://127.0.0.1:8123`.
        token: its bearer token, or the file with it; empty reads `~/.rlvlm/token` for a server on this machine.
        name: name of the judge there; empty takes the server's first.
        timeout_s: maximum wait for one request's answer, seconds.
        deadline_s: maximum time for one request with all pauses and tries, seconds.
    """

    def __init__(
        self, url: str, *, token: str | Path = "", name: str = "", timeout_s: float = 120.0, deadline_s: float = 600.0
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError(f"the address of a judge looks like http://127.0.0.1:8123, got {url!r}")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._name, self._timeout_s, self._deadline_s = name, timeout_s, deadline_s
        own = Path.home() / ".rlvlm" / "token"
        # that token is for this machine: another's server must never learn it
        self._token = token or (own if parts.hostname in _LOOPBACK and own.is_file() else "")
        self._client = PerProcess(self._connect)
        self._facts: _Facts | None = None
        self.batches = Batches(self._ask, self._limit, IN_FLIGHT)

    @property
    def stamp(self) -> Stamp:
        """Identity of the judge, asked once.

        Raises:
            JudgeUnavailable: the server does not answer.
        """
        facts = self._facts or self.batches.call(self._learn)
        return facts.stamps[self._name]

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """Returns one score per clip, in order; raises as `Batches.run`."""
        return self.batches.run("score", clips)

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        return self.batches.run("compare", queries)

    async def _limit(self) -> int:
        return (await self._learn()).max_images

    async def _learn(self) -> _Facts:
        """Returns the server's limits and judges, asked once.

        Raises:
            JudgeUnavailable: it does not answer, has another version of rlvlm, or no judge of that name.
        """
        if self._facts is None:
            said = await self._request("GET", "/v1/models", deadline_s=CONNECT_S)
            try:
                own = said["rlvlm"]
                version = str(own["version"])
                stamps = {str(name): Stamp(**stamp) for name, stamp in own["judges"].items()}
                facts = _Facts(int(own["max_images"]), int(own["body_bytes"]), stamps)
            except (KeyError, TypeError, ValueError) as error:
                what = f"{self._url} is no server of rlvlm {rlvlm.__version__}: its list of models is another's"
                raise JudgeUnavailable(
                    what, "another server's judge: --judge.backend openai; see docs/judges.md"
                ) from error
            if version.split(".")[:2] != rlvlm.__version__.split(".")[:2]:
                what = f"{self._url} runs rlvlm {version}, and this is rlvlm {rlvlm.__version__}"
                raise JudgeUnavailable(what, "install the same version on both sides")
            name = self._name or next(iter(facts.stamps), "")
            if name not in facts.stamps:
                known = ", ".join(facts.stamps) or "none that answers now"
                raise JudgeUnavailable(f"{self._url} has no judge {name!r}; judges: {known}", "name one of them")
            self._name, self._facts = name, facts
        return self._facts

    def _connect(self) -> tuple[Any, Secret]:
        import openai  # slow to import, and this is its HTTP client

        token = self._token
        secret = Secret(token) if isinstance(token, str) else read_secret(token.expanduser())
        try:
            return make_http_client(openai, self._url, Proxy.of(self._url)), secret
        except ModelUnavailable as error:
            raise JudgeUnavailable(str(error), error.fix) from error

    async def _ask(self, kind: Kind, items: list[Item]) -> list[Answer]:
        facts = await self._learn()
        route, field = _ROUTES[kind]
        # in a thread: the loop goes on for the other requests
        questions = await asyncio.to_thread(lambda: list(map(_question, items)))
        body = json.dumps({field: questions, "backend": self._name}).encode()
        if len(body) > facts.body_bytes:
            raise Refused(f"a request has at most {facts.body_bytes:,} bytes here, and this one {len(body):,}")
        said = await self._request("POST", route, body)
        try:
            return [_READ[kind](answer) for answer in said["answers"]]
        except (KeyError, TypeError, ValueError) as error:
            raise JudgeUnavailable(f"{self._url} gave an answer that cannot be read: {first_line(error)}") from error

    async def _request(self, method: str, route: str, body: bytes | None = None, deadline_s: float = math.inf) -> Any:
        """Returns the JSON of the answer, after as many tries as fit into the deadline.

        Raises:
            JudgeUnavailable: it did not answer in time, or accepts no caller with this token.
            UnsupportedQuestion: its judge cannot be asked this.
            Refused: it does not accept these questions.
        """
        client, token = self._client()
        headers = {"authorization": f"Bearer {token.reveal()}"} if token else {}
        headers |= {"content-type": "application/json"} if body else {}
        deadline_s = min(deadline_s, self._deadline_s)
        give_up, pause_s = time.monotonic() + deadline_s, FIRST_PAUSE_S
        while True:
            try:
                answer = await client.request(
                    method, f"{self._url}{route}", content=body, headers=headers, timeout=self._timeout_s
                )
            except Exception as error:  # noqa: BLE001 - what a client raises that reads whatever a server sends
                reason, wait_s = f"{type(error).__name__}: {first_line(error)}", None
            else:
                if answer.status_code == HTTPStatus.OK:
                    return _json(answer)
                reason, wait_s = token.scrub(_reason(answer)), retry_after_s(answer.headers)
                if answer.status_code not in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT) and (
                    answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR
                ):
                    raise self._refusal(answer.status_code, reason, _json(answer))
            # spread: requests that were refused together would return together
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            wait_s = (pause_s if wait_s is None else wait_s) * random.uniform(1.0, 1.25)
            if time.monotonic() + wait_s > give_up:
                what = f"the judge at {self._url} gave no answer within {deadline_s:g} s: {reason}"
                raise JudgeUnavailable(what, _OWN_FIX)
            await asyncio.sleep(wait_s)

    def _refusal(self, status: int, reason: str, said: object) -> Exception:
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return JudgeUnavailable(f"{self._url} does not accept this token", _OWN_FIX)
        if status == HTTPStatus.NOT_FOUND:
            what = f"{self._url} is no server of rlvlm {rlvlm.__version__}, or of an older version ({reason})"
            return JudgeUnavailable(what, _OWN_FIX)
        code = said.get("error", {}).get("code") if isinstance(said, Mapping) else ""
        return UnsupportedQuestion(reason) if code == "unsupported" else Refused(reason)


def _json(answer: Any) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def _reason(answer: Any) -> str:
    """Returns the server's message, untrusted."""
    said = _json(answer)
    error = said.get("error") if isinstance(said, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else answer.reason_phrase
    return f"HTTP {answer.status_code}: {str(message)[:500]}"


def _question(item: Item) -> dict[str, Any]:
    """Returns a question in the server's form."""
    if isinstance(item, Clip) and item.action:
        raise UnsupportedQuestion(
            "clips with the text of an action are not asked over HTTP", "ask a judge in this process"
        )
    sides = {"frames": item.frames} if isinstance(item, Clip) else {"left": item.left, "right": item.right}
    asked: dict[str, Any] = {name: [_image(frame) for frame in frames] for name, frames in sides.items()}
    if item.goal_picture is not None:
        asked["goal_picture"] = _image(item.goal_picture[0])
    return {"goal": item.goal, **asked}


def _image(frame: Frames) -> str:
    return base64.b64encode(to_png(frame)).decode()


def _score(said: Mapping[str, Any]) -> Score:
    value = said["value"]
    if value is not None and not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"a score lies in [0, 1], got {value}")
    return Score(value=value, **_shared(said))


def _verdict(said: Mapping[str, Any]) -> Verdict:
    odds, label = said["probabilities"], said["label"]
    return Verdict(
        label=None if label is None else Label(label),
        probabilities=None if odds is None else (odds["left"], odds["right"], odds["tie"]),
        **_shared(said),
    )


def _shared(said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "status": Status(said["status"]),
        "stamp": Stamp(**said["stamp"]),
        "text": str(said["text"]),
        "latency_s": float(said["latency_s"]),
    }


_READ = {"score": _score, "compare": _verdict}
