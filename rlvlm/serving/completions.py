"""Judges in OpenAI's form: what `POST /v1/chat/completions` takes, and the words in which a judge answers there.

`model` is `NAME#VOCABULARY`. The images of the last user message are the frames of a clip, in order of time, and its
text (or `goal` in the body) names the goal. The judge asks in its own words, those that it was measured with: sampling
settings of the request are ignored, and what would change the form of the answer is refused.
"""

import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from rlvlm.core.judging import Clip, Label, Query, Score, Status, Verdict
from rlvlm.core.steps import Frames
from rlvlm.serving import messages as wire
from rlvlm.serving.app_client import AsyncAppClient
from rlvlm.serving.refusal import Refusal

_TASK = re.compile(r"^\W*(?:task(?: instruction| description)?|goal|instruction)\W*:\s*(\S.*?)\s*$", re.I | re.M)
"""Pattern of the line of a longer prompt that names the goal, e.g. `Task instruction: open the drawer`."""
_UNSET = (None, False, "none", [], {})


class Reply(NamedTuple):
    """A judge's answer in the words of a vocabulary, and the answer itself."""

    text: str
    answer: Score | Verdict


async def _score(judge: AsyncAppClient, goal: str, frames: Frames) -> Score:
    [answer] = await judge.score([Clip(goal=goal, frames=frames)])
    return answer


def _checked(answer: Score | Verdict) -> None:
    """Raises Refusal unless there is an answer that can be read: a caller would take any text for one."""
    if answer.status is Status.INVALID:
        raise Refusal(502, "invalid_answer", "the judge's answer could not be read", "ask NAME#json for its status")
    if answer.status is Status.FAILED:
        raise Refusal(503, "judge", "the judge gave no answer", "try again; its operator sees why")


async def percent(judge: AsyncAppClient, goal: str, frames: Frames, threshold: float) -> Reply:
    """Answers with a number from 0 to 100."""
    answer = await _score(judge, goal, frames)
    _checked(answer)
    return Reply(f"{100 * (answer.value or 0.0):.4g}", answer)


async def grade(judge: AsyncAppClient, goal: str, frames: Frames, threshold: float) -> Reply:
    """Answers `GRADE: success` from the threshold on, else `GRADE: failure`."""
    answer = await _score(judge, goal, frames)
    _checked(answer)
    return Reply(f"GRADE: {'success' if (answer.value or 0.0) >= threshold else 'failure'}", answer)


async def trend(judge: AsyncAppClient, goal: str, frames: Frames, threshold: float) -> Reply:
    """Answers `positive` if the last image is nearer to the goal than the first, `negative` if the first is, and
    `unclear` if the judge sees no difference or cannot be understood.
    """
    if len(frames) < 2:
        raise Refusal(422, "pictures", "a trend needs two images or more, got 1", "send the first and the last")
    [answer] = await judge.compare([Query(goal=goal, left=frames[:1], right=frames[-1:])])
    if answer.status is Status.FAILED:
        _checked(answer)
    return Reply({Label.RIGHT: "positive", Label.LEFT: "negative"}.get(answer.label or Label.TIE, "unclear"), answer)


async def as_json(judge: AsyncAppClient, goal: str, frames: Frames, threshold: float) -> Reply:
    """Answers with JSON: status, value in [0, 1] or null, text and stamp of the judge."""
    answer = await _score(judge, goal, frames)
    said = {"status": answer.status, "value": answer.value, "text": answer.text, "judge": asdict(answer.stamp)}
    return Reply(json.dumps(said), answer)


VOCABULARIES: Mapping[str, Callable[[AsyncAppClient, str, Frames, float], Awaitable[Reply]]] = {
    "percent": percent,
    "trend": trend,
    "grade": grade,
    "json": as_json,
}
"""Forms of answer by name; the first is that of a model without one."""


def split_model(model: str, known: Mapping[str, Any], aliases: Mapping[str, str]) -> tuple[str, str]:
    """Returns the judge and the vocabulary that `model` names.

    Raises:
        Refusal: there is no such judge or vocabulary; lists the models.
    """
    name, _, vocabulary = model.partition("#")
    name, vocabulary = aliases.get(name, name), vocabulary or next(iter(VOCABULARIES))
    if name not in known or vocabulary not in VOCABULARIES:
        models = ", ".join(f"{judge}#{form}" for judge in known for form in VOCABULARIES)
        raise Refusal(404, "model_not_found", f"there is no model {model!r} here; models: {models}", "name one of them")
    return name, vocabulary


def check_supported(request: wire.ChatCompletionRequest) -> None:
    """Raises Refusal if the request wants another form of answer than one text, whole and at once."""
    extra = request.model_extra or {}
    wanted = {"stream": request.stream, "n > 1": request.n not in (None, 1)}
    names = ("tools", "functions", "tool_choice", "function_call", "logprobs", "top_logprobs", "audio", "prediction")
    wanted |= {name: extra.get(name) not in _UNSET for name in names}
    form = extra.get("response_format")
    wanted["response_format"] = form is not None and form != {"type": "text"}
    if refused := [name for name, is_wanted in wanted.items() if is_wanted]:
        what = f"a judge answers with one text, whole and at once; not supported: {', '.join(refused)}"
        raise Refusal(400, "unsupported_parameter", what, "leave it out; NAME#json answers with JSON")


def question_of(request: wire.ChatCompletionRequest) -> tuple[str, list[str]]:
    """Returns the goal, not yet checked, and the images of the last user message.

    Raises:
        Refusal: there is no user message, it has no image, or neither it nor the body has a goal.
    """
    last = next((turn for turn in reversed(request.messages) if turn.role == "user"), None)
    content = [] if last is None else last.content
    parts = [wire.TextPart(type="text", text=content)] if isinstance(content, str) else content or []
    images = [part.image_url.url for part in parts if isinstance(part, wire.ImageUrlPart)]
    if not images:
        what = "the last user message has no image, and a judge looks at some"
        raise Refusal(422, "pictures", what, "send its frames as image_url parts with data: URIs")
    text = "\n".join(part.text for part in parts if isinstance(part, wire.TextPart)).strip()
    named = _TASK.search(text)  # a longer prompt of another framework, whose rest is for a chat model
    goal = request.goal or (named[1] if named else text)
    if not goal:
        raise Refusal(422, "goal", "neither the last user message nor the body has a goal", 'add the text, or "goal"')
    return goal, images


def completion(model: str, reply: Reply) -> dict[str, Any]:
    """Returns the reply as a chat completion; the answer itself, with its status, is in `rlvlm`."""
    answer = reply.answer
    value = answer.value if isinstance(answer, Score) else None
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": reply.text, "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "rlvlm": {"status": answer.status, "value": value, "text": answer.text, "stamp": asdict(answer.stamp)},
    }
