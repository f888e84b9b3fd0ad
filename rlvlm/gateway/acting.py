"""The route that a trained policy answers: an image and words in, its reply and the action in it out."""

import hashlib
import secrets
import time
from collections.abc import Mapping

from fastapi import FastAPI

from rlvlm.core.sampling import ReplyRequest, SampledAction
from rlvlm.envs.replies import read_reply
from rlvlm.gateway import messages as wire
from rlvlm.gateway.async_client import AsyncAppClient
from rlvlm.gateway.config import ActConfig
from rlvlm.gateway.media.images import read_pictures
from rlvlm.gateway.routes import RequestHandler
from rlvlm.serving.refusal import Refusal
from rlvlm.serving.replicas.policy import ReplyCall, Sampling


def add_act_route(app: FastAPI, handler: RequestHandler, doors: Mapping[str, tuple[ActConfig, AsyncAppClient]]) -> None:
    """Adds `/v1/act` to `app`.

    Args:
        app: behind the guard.
        handler: decodes the images.
        doors: how each policy is asked, by the name of its Serve app; the first is the default.
    """

    @app.post("/v1/act")
    async def act(request: wire.ActRequest) -> wire.ActAnswer:
        """What a policy does about an image, asked in the words that it was trained with."""
        name = next(iter(doors)) if request.policy is None else request.policy
        if name not in doors:
            raise Refusal(422, "policy", f"there is no policy {name!r} here", f"use one of {list(doors)}, or none")
        config, client = doors[name]
        [frames] = await handler.run(read_pictures, [[request.image]])
        seed = secrets.randbits(62) if request.seed is None else request.seed
        asked = ReplyRequest(prompt=request.prompt, image=hashlib.sha256(frames.tobytes()).digest(), seed=seed)
        call = ReplyCall(
            key="",
            requests=(asked,),
            frames=(frames[0],),
            sampling=Sampling(
                max_new_tokens=config.max_reply_tokens, temperature=config.temperature, greedy=request.greedy
            ),
            weights=None,
        )
        start = time.perf_counter()
        receipt = await client.sample(call)
        [answer] = receipt.answers
        latency_s, names = time.perf_counter() - start, config.action_names
        if isinstance(answer, SampledAction):
            return wire.ActAnswer(
                text="", action=names[answer.action], log_prob=answer.log_prob, value=answer.value, is_complete=True,
                seed=seed, policy=name, latency_s=latency_s,
            )  # fmt: skip
        reply = read_reply(answer.text, names, range(len(names)))
        return wire.ActAnswer(
            text=answer.text,
            action=None if reply.action is None else names[reply.action],
            log_prob=float(answer.log_probs.sum()),
            value=answer.value,
            is_complete=answer.is_complete,
            seed=seed,
            policy=name,
            latency_s=latency_s,
        )
