"""Google's Gemini models through their own client. Extra: api."""

import logging
import math
from typing import Any

from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.judging import Usage
from rlvlm.vlms.chats import TOP_P, Message, Reply
from rlvlm.vlms.config import ApiConfig
from rlvlm.vlms.engines.remote import (
    ApiRequest,
    Refused,
    RemoteEngine,
    TransientError,
    encode_png,
    failure_of,
    retry_after_s,
)
from rlvlm.vlms.engines.secret import Secret, read_key

logger = logging.getLogger(__name__)

NUM_LOG_PROBS = 20
"""First tokens whose probabilities are asked for, the most that the API gives."""
_ROLES = {"user": "user", "assistant": "model"}
_HARMS = ("HARASSMENT", "HATE_SPEECH", "SEXUALLY_EXPLICIT", "DANGEROUS_CONTENT")
"""Filters that are switched off, as the reference does: they take a robot's gripper for many things."""
_ENDED_WELL = ("STOP", "MAX_TOKENS")


def connect(model: str, api: ApiConfig, seed: int = 0) -> RemoteEngine:
    """The model of that name at Google, or on a server that speaks like it. Nothing is sent yet.

    Raises:
        ModelUnavailable: the client library or the key is missing.
    """
    key = read_key(api, usual=("GEMINI_API_KEY", "GOOGLE_API_KEY"), is_needed=True)
    return RemoteEngine(GeminiProvider(model, api, key), api, key, seed)


class GeminiProvider:
    """`generateContent`, one try at a time.

    Args:
        model: what the server calls it.
        api: names the server.
        key: sent in a header.

    Raises:
        ModelUnavailable: the package `google-genai` is missing.
    """

    def __init__(self, model: str, api: ApiConfig, key: Secret) -> None:
        try:
            import httpx2
            from google import genai
            from google.genai import errors, types
        except ImportError as error:
            raise ModelUnavailable(
                "the engine gemini needs the package google-genai", "pip install google-genai"
            ) from error
        self._model = model
        self._section = api.section
        self._gives_log_probs = True
        self._types = types
        self._errors = errors
        self._transport_error = httpx2.HTTPError
        client = httpx2.AsyncClient(timeout=api.timeout_s, follow_redirects=False)
        self._client = genai.Client(
            vertexai=False,
            api_key=key.reveal(),
            http_options=types.HttpOptions(base_url=api.base_url or None, httpx_async_client=client),
        )

    async def ask(self, request: ApiRequest) -> Reply:
        """One reply; see `remote.Provider`."""
        wants_log_probs = request.wants_log_probs and self._gives_log_probs
        system = [part["text"] for turn in request.chat if turn["role"] == "system" for part in turn["content"]]
        turns = [self._turn(turn) for turn in request.chat if turn["role"] != "system"]
        settings = self._settings(request, "\n".join(system), wants_log_probs)
        try:
            response = await self._client.aio.models.generate_content(
                model=self._model, contents=turns, config=settings
            )
        except self._errors.APIError as error:
            raise self._failure(error, wants_log_probs) from None
        except self._transport_error as error:
            raise TransientError(f"no connection: {type(error).__name__}: {error}") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:  # the client trusts what it reads
            raise TransientError(f"the answer is not what this API promises: {error}") from None
        return _reply(response)

    def _settings(self, request: ApiRequest, system: str, wants_log_probs: bool) -> Any:
        sampling = {"top_p": TOP_P, "seed": request.seed} if request.temperature > 0 else {}
        log_probs = {"response_logprobs": True, "logprobs": NUM_LOG_PROBS} if wants_log_probs else {}
        return self._types.GenerateContentConfig.model_validate(
            {
                "temperature": request.temperature,
                "max_output_tokens": request.max_new_tokens,
                "system_instruction": system or None,
                "safety_settings": [{"category": f"HARM_CATEGORY_{harm}", "threshold": "OFF"} for harm in _HARMS],
                "automatic_function_calling": {"disable": True},
                **sampling,
                **log_probs,
            }
        )

    def _turn(self, turn: Message) -> Any:
        part_of = self._types.Part
        parts = [
            part_of.from_text(text=part["text"])
            if part["type"] == "text"
            else part_of.from_bytes(data=encode_png(part["image"]), mime_type="image/png")
            for part in turn["content"]
        ]
        return self._types.Content(role=_ROLES[turn["role"]], parts=parts)

    def _failure(self, error: Any, wants_log_probs: bool) -> Exception:
        """What an error status means."""
        reason = str(error.message or error.status or "no reason given")
        if error.code == 400 and wants_log_probs and "logprobs" in reason.lower():  # noqa: PLR2004
            logger.warning("%s gives no probabilities; its text is read instead", self._model)
            self._gives_log_probs = False
            return TransientError(reason, 0.0)
        if error.code == 400 and "api key" in reason.lower():  # noqa: PLR2004 - this API's way of saying 401
            return failure_of(401, reason, section=self._section)
        asked_s = _retry_delay_s(error.details)
        if asked_s is None:
            asked_s = retry_after_s(getattr(error.response, "headers", None) or {})
        return failure_of(error.code or 500, reason, retry_after_s=asked_s, section=self._section)


def _retry_delay_s(details: Any) -> float | None:
    """Seconds in the `RetryInfo` of an error's body; None where there is none."""
    try:
        for detail in details["error"]["details"]:
            if str(detail.get("@type", "")).endswith("RetryInfo"):
                return max(0.0, float(str(detail["retryDelay"]).removesuffix("s")))
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    return None


def _reply(response: Any) -> Reply:
    """The reply in a response, untrusted.

    Raises:
        TransientError: there is none in it.
        Refused: the provider blocked the question or the answer.
    """
    blocked = getattr(response.prompt_feedback, "block_reason", None)
    if blocked:
        raise Refused(f"the question was blocked by the provider: {_name(blocked)}")
    if not response.candidates:
        raise TransientError("the answer is not what this API promises: it holds no candidates")
    candidate = response.candidates[0]
    ending = _name(candidate.finish_reason) if candidate.finish_reason else "STOP"
    if ending not in _ENDED_WELL:
        raise Refused(f"the answer was blocked by the provider: {ending}")
    parts = (candidate.content.parts if candidate.content else None) or []
    return Reply(
        text="".join(part.text for part in parts if part.text and not part.thought),
        is_whole=ending == "STOP",
        first_tokens=_first_tokens(candidate),
        usage=_usage(response.usage_metadata),
    )


def _first_tokens(candidate: Any) -> tuple[tuple[str, float], ...] | None:
    try:
        top = candidate.logprobs_result.top_candidates[0].candidates
        return tuple((str(entry.token), math.exp(min(entry.log_probability, 0.0))) for entry in top) or None
    except (AttributeError, IndexError, TypeError):
        return None  # the server gives none


def _usage(usage: Any) -> Usage | None:
    """Thoughts are written, and charged, too."""
    if usage is None or usage.prompt_token_count is None:
        return None
    tokens_out = (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
    return Usage(tokens_in=usage.prompt_token_count, tokens_out=tokens_out)


def _name(value: Any) -> str:
    return str(getattr(value, "value", value)).upper()
