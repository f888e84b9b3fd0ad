"""The gateway as a Ray Serve deployment: guard outside, routes inside, judges and policies reached by their apps."""

import asyncio
import logging
import math
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import BackpressureConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus
from starlette.types import ASGIApp

from rlvlm.core.errors import MachineError
from rlvlm.gateway.acting import add_act_route
from rlvlm.gateway.async_client import AsyncAppClient, AsyncJudge
from rlvlm.gateway.config import HttpConfig
from rlvlm.gateway.guard import Guard
from rlvlm.gateway.media.files import MediaRoot
from rlvlm.gateway.reference import add_reference_routes
from rlvlm.gateway.routes import Ready, RequestHandler, build_app
from rlvlm.gateway.token_file import make_token, read_token
from rlvlm.serving.config import refuse_unknown_keys
from rlvlm.serving.refusal import RETRY_AFTER_S
from rlvlm.serving.startup import marked

logger = logging.getLogger(__name__)

DEPLOYMENT = "gateway"
_FRESH_S = 2.0
"""Age in seconds up to which `/health` repeats what it knew."""
MAX_ONGOING = 900
"""Requests inside one gateway, most of them waiting for a body or a judge. Ray's own ceiling is 1,000."""
MAX_QUEUED = 100
"""Requests that Serve holds back before it answers 429 itself."""


def build_gateway(config: HttpConfig, clients: dict[str, AsyncJudge], ready: Ready | None = None) -> ASGIApp:
    """The whole HTTP edge as one ASGI app; its token is made if there is none.

    Args:
        config: limits and names.
        clients: the judges by name.
        ready: as of `RequestHandler`.

    Raises:
        MachineError: the token file or the media root cannot be used.
    """
    make_token(config.token_path)
    token = read_token(config.token_path)
    handler = RequestHandler(clients, ready)
    app = build_app(handler)
    if config.judges:
        add_reference_routes(app, handler, MediaRoot(config.media_root), config.max_tokens)
    if config.policies:
        doors = {
            one.app: (one, AsyncAppClient(one.app, config.timeout_s, config.retries, "policy"))
            for one in config.policies
        }
        add_act_route(app, handler, doors)
    return Guard(app, token, config)


class RunningApps:
    """Which apps Serve says are running, asked at most once in `_FRESH_S`: its controller has other things to do."""

    def __init__(self) -> None:
        self._asked_at = -math.inf
        self._names: frozenset[str] = frozenset()

    async def names(self) -> frozenset[str]:
        """Their names; none where Serve does not say."""
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
    """One copy of the gateway. It holds no model and needs a tenth of a core."""

    def __init__(self, config: HttpConfig) -> None:
        """Stores the limits; the app is built once the replica's event loop runs."""
        self._config = config

    def __serve_build_asgi_app__(self) -> ASGIApp:  # noqa: PLW3201 - the name that Serve calls
        """The app that Serve puts behind its proxy.

        Raises:
            RuntimeError: it cannot be built; its line carries the cause and the fix.
        """
        config = self._config
        clients: dict[str, AsyncJudge] = {
            name: AsyncAppClient(name, config.timeout_s, config.retries) for name in config.judges
        }
        try:
            return build_gateway(config, clients, RunningApps().names)
        except MachineError as error:
            raise marked(error) from error


class GatewayArgs(BaseModel):
    """Arguments of `gateway_app` in a Serve YAML file: the fields of `HttpConfig`."""

    model_config = ConfigDict(extra="forbid")
    http: HttpConfig = HttpConfig()

    @field_validator("http", mode="before")
    @classmethod
    def _no_unknown_keys(cls, value: Any) -> Any:
        refuse_unknown_keys(HttpConfig, value, "http")
        return value


def gateway_app(args: GatewayArgs) -> serve.Application:
    """The Serve application of one gateway."""
    return bind_gateway(args.http)


def bind_gateway(config: HttpConfig) -> serve.Application:
    """The deployment of a gateway, bound and ready for `serve.run`."""
    make_deployment = serve.deployment(
        name=DEPLOYMENT,
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
