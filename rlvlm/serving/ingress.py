"""The HTTP server of judges and policies as a Serve deployment: guard outside, FastAPI routes inside.

`/v1/*` are our own routes; `/generate`, `/score` and `/health` accept the requests of the reference systems' clients,
without the flaws that made their server unsafe. Departures: an unreadable score is null with its status, never a
made-up 0; `video_path` names files below one folder only; no URL is fetched; `nframes` above 64 counts as 64.

Source: the LIBERO-10 reward server of the RLinf fork (`/score`); Qwen's chat message format (`/generate`).
"""

import asyncio
import hashlib
import json
import logging
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import BackpressureConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus
from starlette.responses import Response
from starlette.types import ASGIApp

import rlvlm
from rlvlm.core.episodes import Observations
from rlvlm.core.errors import MachineError
from rlvlm.core.judging import Clip, Query, Status
from rlvlm.core.steps import Frames, spread
from rlvlm.envs.replies import read_reply
from rlvlm.judges.prompts import check_goal
from rlvlm.judges.reading import parse_score
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.serving import messages as wire
from rlvlm.serving.app_client import AsyncAppClient
from rlvlm.serving.app_file import GatewayArgs
from rlvlm.serving.completions import VOCABULARIES, check_supported, completion, question_of, split_model
from rlvlm.serving.config import HttpConfig
from rlvlm.serving.error_answers import answer_errors
from rlvlm.serving.guard import Guard, make_token, read_token
from rlvlm.serving.media import MAX_VIDEO_FRAMES, MediaRoot, read_images, read_video
from rlvlm.serving.policy_replica import ReplyCall
from rlvlm.serving.refusal import RETRY_AFTER_S, AsciiJSON, Refusal, overloaded
from rlvlm.serving.replica import marked
from rlvlm.templates import render
from rlvlm.vlms.chats import Chat

logger = logging.getLogger(__name__)

MAX_ONGOING = 900
"""Number of requests in one copy, most of them waiting for a body or a judge. Ray's own limit is 1,000."""
MAX_QUEUED = 100
"""Number of requests that Serve queues before it answers 429 itself."""
_DECODERS = 2
"""Number of threads that decode images."""
_MAX_DECODING = 64
"""Number of requests that may wait for a decoding thread."""
_FRESH_S = 2.0
"""Age up to which `/health` repeats its last answer, seconds."""
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": wire.ErrorAnswer, "description": text}
    for status, text in {
        400: "malformed, or a video that may not be read",
        401: "no or wrong token",
        408: "body too slow",
        413: "body too long",
        415: "not JSON",
        422: "a field or image breaks a rule",
        429: "overloaded; Retry-After",
        503: "the judge does not answer",
        504: "the judge took too long",
    }.items()
}
_LIMITS = {"minimum": ">=", "maximum": "<=", "minItems": "items >=", "maxItems": "items <=", "maxLength": "chars <="}

_SLOTS = ("{task_instruction}", "{task}")
"""Placeholders of the task in a caller's template."""
_UNIT = re.compile(r"0(?:\.\d+)?|1(?:\.0+)?")

Result = TypeVar("Result")
Ready = Callable[[], Awaitable[Collection[str]]]
"""Async function that returns the names of the apps that answer now."""


class Routes:
    """Implementation of the routes; each method is one endpoint. Made by `build_app` from its arguments."""

    def __init__(
        self,
        config: HttpConfig,
        judges: Mapping[str, AsyncAppClient],
        policies: Mapping[str, AsyncAppClient],
        ready: Ready,
    ) -> None:
        self._config = config
        self._judges = judges
        self._policies = policies
        self._ready = ready
        self._media = MediaRoot(config.media_root)
        self._read_images = partial(read_images, max_images=config.max_images)
        self._pool = ThreadPoolExecutor(_DECODERS, thread_name_prefix="images")
        self._num_decoding = 0

    async def preference(self, request: wire.PreferenceRequest) -> wire.PreferenceAnswer:
        """Answers which of two clips is nearer to the goal."""
        return (await self._compare([request], request.backend))[0]

    async def preference_batch(self, request: wire.PreferenceBatchRequest) -> wire.PreferenceBatchAnswer:
        """Answers several comparisons at once."""
        return wire.PreferenceBatchAnswer(answers=await self._compare(request.queries, request.backend))

    async def score(self, request: wire.ScoreRequest) -> wire.ScoreAnswer:
        """Answers how much of the goal is reached at the end of a clip."""
        return (await self._score([request], request.backend))[0]

    async def score_batch(self, request: wire.ScoreBatchRequest) -> wire.ScoreBatchAnswer:
        """Scores several clips at once."""
        return wire.ScoreBatchAnswer(answers=await self._score(request.clips, request.backend))

    async def generate(self, request: wire.GenerateRequest) -> wire.GenerateAnswer:
        """Returns the reply of a chat model to a chat with images (the reference systems' route)."""
        name, judge = self._judge(request.backend)
        if request.max_tokens > self._config.max_tokens:
            raise Refusal(
                422,
                "max_tokens",
                f"max_tokens is at most {self._config.max_tokens} here, got {request.max_tokens}",
                "ask for a shorter reply",
            )
        chat = await self._decode(_read_chat, request.messages, self._config.max_images)
        start = time.perf_counter()
        text = await judge.generate(chat, request.max_tokens, request.temperature)
        return wire.GenerateAnswer(text=text, backend=name, latency_s=time.perf_counter() - start)

    async def score_video(self, request: wire.VideoScoreRequest) -> wire.VideoScoreAnswer:
        """Answers how much of its task a video shows done (the reference systems' route)."""
        name, judge = self._judge(request.backend)
        # before decoding a video: the cheap checks first
        goal = _checked_goal(request.task_text)
        frames = await self._decode(self._read_clip, request)
        options = request.backend_kwargs or wire.BackendOptions()
        if options.prompt_template is not None or options.user_prompt is not None or options.system_prompt is not None:
            start = time.perf_counter()
            text = await judge.generate(_worded_chat(options, goal, frames), self._config.max_tokens, 0.0)
            # only a bare number is on the scale of 0 to 1: in a sentence `0.7` may be 70 % or anything else
            share = _UNIT.fullmatch(text.strip()) if options.score_mode == "unit" else None
            value = float(share[0]) if share else parse_score(text)
            return wire.VideoScoreAnswer(
                score=value,
                model_output=text,
                backend=name,
                status=Status.INVALID if value is None else Status.OK,
                frames_used=len(frames),
                latency_s=time.perf_counter() - start,
            )
        [answer] = await judge.score([Clip(goal=goal, frames=frames)])
        return wire.VideoScoreAnswer(
            score=answer.value,
            model_output=answer.text,
            backend=name,
            status=answer.status,
            frames_used=len(frames) if answer.num_frames is None else answer.num_frames,
            latency_s=answer.latency_s,
        )

    async def act(self, request: wire.ActRequest) -> wire.ActAnswer:
        """Returns a policy's action for an image, prompted with the text that it was trained with."""
        name = request.policy or next(iter(self._policies))
        if name not in self._policies:
            raise Refusal(422, "policy", f"there is no policy {name!r} here", f"use one of {list(self._policies)}")
        config = next(config for config in self._config.policies if config.app == name)
        [frames] = await self._decode(read_images, [[request.image]])
        # drawn here and returned, so that any answer can be reproduced
        seed = secrets.randbits(62) if request.seed is None else request.seed
        obs = Observations(texts=(request.prompt,), images=(hashlib.sha256(frames.tobytes()).digest(),))
        sampling = ReplySampling(
            max_new_tokens=config.max_reply_tokens, temperature=config.temperature, greedy=request.greedy
        )
        start = time.perf_counter()
        # a caller's turn has no key: it is never sent again
        call = ReplyCall(key="", obs=obs, seeds=(seed,), frames=(frames[0],), sampling=sampling, weights=None)
        receipt = await self._policies[name].ask("ask", call)
        [answer] = receipt.answers
        action = answer.action
        if action is None:  # for a policy that acts in text, the reply names the action
            action = read_reply(answer.text, config.action_names, range(len(config.action_names))).action
        return wire.ActAnswer(
            text=answer.text,
            action=None if action is None else config.action_names[action],
            log_prob=float(answer.log_probs.sum()),
            value=answer.value,
            is_complete=answer.is_complete,
            seed=seed,
            policy=name,
            latency_s=time.perf_counter() - start,
        )

    async def health(self) -> wire.HealthAnswer:
        """Answers that the server listens; with a token also lists judges and policies, and whether they answer."""
        names, ready = [*self._judges, *self._policies], await self._ready()
        return wire.HealthAnswer(
            status="ok",
            default_backend=names[0],
            loaded_backends=[name for name in names if name in ready],
            deploying_backends=[name for name in names if name not in ready],
        )

    async def models(self) -> wire.ModelList:
        """Lists the judges that answer now, and the server's limits."""
        names = [name for name in self._judges if name in await self._ready()]
        stamps = await asyncio.gather(*(self._judges[name].stamp() for name in names))
        facts = wire.ServerFacts(
            version=rlvlm.__version__,
            max_images=self._config.max_images,
            body_bytes=self._config.body_bytes,
            judges={name: wire.StampAnswer.model_validate(stamp) for name, stamp in zip(names, stamps, strict=True)},
        )
        cards = [wire.ModelCard(id=f"{name}#{form}") for name in names for form in VOCABULARIES]
        return wire.ModelList(data=cards, rlvlm=facts)

    async def complete(self, request: wire.ChatCompletionRequest) -> dict[str, Any]:
        """Answers about the images of the last user message, in OpenAI's form and in the vocabulary of `model`."""
        check_supported(request)
        name, vocabulary = split_model(request.model, self._judges, self._config.aliases)
        text, images = question_of(request)
        goal = _checked_goal(text)
        [frames] = await self._decode(self._read_images, [images])
        reply = await VOCABULARIES[vocabulary](self._judges[name], goal, frames, self._config.success_threshold)
        return completion(request.model, reply)

    async def _compare(
        self, questions: Sequence[wire.PreferenceQuestion], backend: str | None
    ) -> list[wire.PreferenceAnswer]:
        _, judge = self._judge(backend)
        goals = [_checked_goal(question.goal) for question in questions]
        # all images of a request together: the limits on number and pixels apply to the request
        groups = [group for question in questions for group in (question.left, question.right, _goal_images(question))]
        sides = await self._decode(self._read_images, groups)
        queries = [
            Query(goal=goal, left=left, right=right, goal_picture=extra if len(extra) else None)
            for goal, left, right, extra in zip(goals, sides[::3], sides[1::3], sides[2::3], strict=True)
        ]
        return list(map(wire.PreferenceAnswer.model_validate, await judge.compare(queries)))

    async def _score(self, questions: Sequence[wire.ScoreQuestion], backend: str | None) -> list[wire.ScoreAnswer]:
        _, judge = self._judge(backend)
        goals = [_checked_goal(question.goal) for question in questions]
        shown = await self._decode(
            self._read_images,
            [group for question in questions for group in (question.frames, _goal_images(question))],
        )
        clips = [
            Clip(goal=goal, frames=frames, goal_picture=extra if len(extra) else None)
            for goal, frames, extra in zip(goals, shown[::2], shown[1::2], strict=True)
        ]
        return list(map(wire.ScoreAnswer.model_validate, await judge.score(clips)))

    def _judge(self, name: str | None) -> tuple[str, AsyncAppClient]:
        """Returns the judge that a request names, by default the first; an empty name counts as none, as in the
        reference.

        Raises:
            Refusal: there is no judge of that name.
        """
        chosen = self._config.aliases.get(name or "", name) or next(iter(self._judges))
        if chosen not in self._judges:
            known = list(self._judges)
            raise Refusal(422, "backend", f"there is no judge {chosen!r} here", f"use one of {known}, or none")
        return chosen, self._judges[chosen]

    async def _decode(self, work: Callable[..., Result], *args: Any) -> Result:
        """Runs decoding work in a bounded pool of threads and returns its result.

        Raises:
            Refusal: too many requests are waiting already.
        """
        # decoding is the only expensive work here; an unbounded queue would grow faster than two threads can empty it
        if self._num_decoding >= _MAX_DECODING:
            raise overloaded("too many images are waiting to be decoded")
        self._num_decoding += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
        finally:
            self._num_decoding -= 1

    def _read_clip(self, request: wire.VideoScoreRequest) -> Frames:
        """Returns the frames [L, H, W, 3] that a request names or contains, evenly thinned to `nframes`."""
        wanted = min(request.nframes, MAX_VIDEO_FRAMES)
        if request.video_path is not None:
            return read_video(self._media.read(request.video_path), wanted, request.max_pixels)
        [frames] = self._read_images([request.frames or []], request.max_pixels)
        return spread(frames, wanted)


def build_app(
    config: HttpConfig,
    judges: Mapping[str, AsyncAppClient],
    policies: Mapping[str, AsyncAppClient],
    ready: Ready,
) -> ASGIApp:
    """Returns the whole HTTP server as one ASGI app; creates its token if there is none.

    Args:
        config: limits and names.
        judges: by name, the default first.
        policies: policies by name.
        ready: returns the names of the judges and policies that answer now.

    Raises:
        MachineError: the token file or the media root cannot be used.
    """
    # before anything listens: a server without a token would answer any client
    make_token(config.token_path)
    token = read_token(config.token_path)
    routes = Routes(config, judges, policies, ready)
    app = FastAPI(
        title="rlvlm",
        version=rlvlm.__version__,
        default_response_class=AsciiJSON,
        responses=_ERRORS,
        docs_url=None,  # FastAPI's own page loads its scripts from another server
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    if judges:
        app.post("/v1/preference")(routes.preference)
        app.post("/v1/preference/batch")(routes.preference_batch)
        app.post("/v1/score")(routes.score)
        app.post("/v1/score/batch")(routes.score_batch)
        app.get("/v1/models")(routes.models)
        app.post("/v1/chat/completions")(routes.complete)
        app.post("/generate")(routes.generate)
        app.post("/score")(routes.score_video)
    if policies:
        app.post("/v1/act")(routes.act)
    app.get("/health")(routes.health)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Returns a page generated from the OpenAPI document, without scripts: routes with fields, types and limits."""
        api, policy = app.openapi(), "default-src 'none'; style-src 'unsafe-inline'"
        page = render(
            "routes.html.j2",
            title=f"{api['info']['title']} {api['info']['version']}",
            paths=api["paths"],
            schemas=api.get("components", {}).get("schemas", {}),
            type_name=_type_name,
        )
        return HTMLResponse(page, headers={"content-security-policy": policy})

    answer_errors(app)
    return Guard(app, token, config)


class RunningApps:
    """Names of the running apps according to Serve, asked at most once in `_FRESH_S` to spare its controller."""

    def __init__(self) -> None:
        self._asked_at = -math.inf
        self._names: frozenset[str] = frozenset()

    async def names(self) -> frozenset[str]:
        """Returns the names of running apps; none if Serve does not answer."""
        # load balancers ask for health once a second, and Serve's controller answers one request at a time
        if time.monotonic() - self._asked_at > _FRESH_S:
            self._asked_at = time.monotonic()
            try:
                async with asyncio.timeout(_FRESH_S):
                    found = await asyncio.to_thread(serve.status)
            except (TimeoutError, RayError, RayServeException) as error:
                logger.warning("Serve does not say which judges run: %s", type(error).__name__)
                self._names = frozenset()
            else:
                running = (name for name, app in found.applications.items() if app.status is ApplicationStatus.RUNNING)
                self._names = frozenset(running)
        return self._names


@serve.ingress()
class Gateway:
    """One copy of the HTTP server. It holds no model and needs a tenth of a core."""

    def __init__(self, config: HttpConfig) -> None:
        """Stores the limits; the app is built once the replica's event loop runs."""
        self._config = config

    def __serve_build_asgi_app__(self) -> ASGIApp:  # noqa: PLW3201 - the name that Serve calls
        """Returns the app that Serve puts behind its proxy.

        Raises:
            RuntimeError: it cannot be built; the message contains the cause and the fix.
        """
        config = self._config
        judges = {name: AsyncAppClient(name, config.timeout_s, config.retries) for name in config.judges}
        policies = {
            policy.app: AsyncAppClient(policy.app, config.timeout_s, config.retries, "policy")
            for policy in config.policies
        }
        try:
            return build_app(config, judges, policies, RunningApps().names)
        except MachineError as error:
            raise marked(error) from error


def gateway_app(args: GatewayArgs) -> serve.Application:
    """Returns the Serve application of one HTTP server."""
    return bind_gateway(args.http)


def bind_gateway(config: HttpConfig) -> serve.Application:
    """Returns the deployment of an HTTP server, bound and ready for `serve.run`."""
    make_deployment = serve.deployment(
        name="gateway",
        num_replicas=config.num_replicas,
        ray_actor_options={"num_cpus": config.num_cpus},
        max_ongoing_requests=MAX_ONGOING,
        max_queued_requests=MAX_QUEUED,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        max_constructor_retry_count=1,
        health_check_period_s=5.0,
        graceful_shutdown_timeout_s=5.0,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    return make_deployment(Gateway).bind(config)


def _type_name(schema: dict[str, Any]) -> str:
    """Returns a field's type in a few words, with its limits and default."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        text = " or ".join(map(_type_name, options))
    elif schema.get("type") == "array":
        text = f"list of {_type_name(schema.get('items', {}))}"
    else:
        text = schema.get("type", "any")
    text += "".join(f", {sign} {schema[key]}" for key, sign in _LIMITS.items() if key in schema)
    if "enum" in schema or "const" in schema:
        text = json.dumps(schema.get("enum", [schema.get("const")]))
    return text + (f", default {json.dumps(schema['default'])}" if schema.get("default") is not None else "")


def _checked_goal(text: str) -> str:
    """Returns the goal if it is plain text.

    Raises:
        Refusal: it could end a turn of the chat, or is not a line of text.
    """
    try:
        return check_goal(text)
    except ValueError as error:
        raise Refusal(422, "goal", str(error), "say the goal in a few plain words") from None


def _goal_images(question: wire.PreferenceQuestion | wire.ScoreQuestion) -> list[str]:
    return [] if question.goal_picture is None else [question.goal_picture]


def _worded_chat(options: wire.BackendOptions, task: str, frames: Frames) -> Chat:
    """Returns a chat with a caller's own text: clip and template, or first image, clip, last image and a question."""
    shown: list[Any] = [{"type": "image", "image": frame} for frame in frames]
    words = options.prompt_template
    if words is None:
        shown = [shown[0], *shown, shown[-1]]
        words = options.user_prompt or ""
        if not any(slot in words for slot in _SLOTS):
            words = f"Task info:\n{_SLOTS[0]}\n\n{words}"
    # the task is plain text by now and cannot contain a placeholder
    for slot in _SLOTS:
        words = words.replace(slot, task)
    system = [{"type": "text", "text": options.system_prompt}] if options.system_prompt else []
    return [
        *([{"role": "system", "content": system}] if system else []),
        {"role": "user", "content": [*shown, {"type": "text", "text": words}]},
    ]


def _read_chat(turns: list[wire.ChatTurn], max_images: int) -> Chat:
    """Returns the chat in the judges' form, with decoded images.

    Raises:
        Refusal: an image breaks a rule.
    """
    parts = [
        [wire.TextPart(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
        for turn in turns
    ]
    shown = [[part.image] for turn in parts for part in turn if isinstance(part, wire.ImagePart)]
    images = iter(read_images(shown, max_images=max_images))
    return [
        {
            "role": turn.role,
            "content": [
                {"type": "text", "text": part.text}
                if isinstance(part, wire.TextPart)
                else {"type": "image", "image": next(images)[0]}
                for part in content
            ],
        }
        for turn, content in zip(turns, parts, strict=True)
    ]
