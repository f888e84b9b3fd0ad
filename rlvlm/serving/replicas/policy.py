"""One copy of a policy in a process of its own: samples replies, with exactly the weights that a request names."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlvlm.core.errors import ModelUnavailable, RunError, first_line
from rlvlm.core.sampling import ReplyRequest, SampledAction, SampledReply
from rlvlm.core.steps import Frames
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.replicas.batches import FairBatches
from rlvlm.serving.replicas.gpu import assigned_device, check_share, limit_share
from rlvlm.serving.replicas.watchdog import Heartbeat, Watchdog, loading_within
from rlvlm.serving.startup import START_TIMEOUT_S, marked
from rlvlm.serving.weights import Weights, brought_here, take_over

logger = logging.getLogger(__name__)

BATCH_WAIT_S = 0.002
"""How long a request waits for others to share its batch."""

PolicyBuilder = Callable[[PolicyConfig, int], VLMPolicy]
"""Makes the policy of a config for so many actions; it must pickle."""
Sampled = SampledReply | SampledAction


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How replies are sampled."""

    max_new_tokens: int
    temperature: float
    greedy: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyCall:
    """Some turns that are to be answered, sent together."""

    key: str
    """The same for every try of this request: a replica that meets it twice samples once."""
    requests: tuple[ReplyRequest, ...]
    frames: tuple[Frames, ...]
    """[H, W, 3] the image of each."""
    sampling: Sampling
    weights: Weights | None
    """That must answer; None takes those that the policy was loaded with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyReceipt:
    """The answers to one `ReplyCall`, in its order."""

    answers: list[Sampled]
    sync_error: float
    """How far this replica's log-probs of the fixed reply were off when it took the weights over, nats per token."""


class PolicyReplica:
    """One copy of a policy. Small requests are merged, and one thread runs the model.

    Args:
        config: of the policy.
        num_actions: that an action head chooses from.
        placement: with which resources.
        batch_size: turns answered together.
        build: makes the policy.
    """

    def __init__(
        self,
        config: PolicyConfig,
        num_actions: int,
        placement: PlacementConfig,
        batch_size: int,
        build: PolicyBuilder = load_policy,
    ) -> None:
        self._placement = placement
        self._watchdog: Watchdog | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")
        device = assigned_device(config.device)
        self._heartbeat = Heartbeat(waits_for_gpu=device.startswith("cuda"))
        self._sync_error = 0.0
        self._sha256 = ""
        try:
            with loading_within(START_TIMEOUT_S):
                load = self._thread.submit(self._load, replace(config, device=device), num_actions, batch_size, build)
                self._engine = load.result()
        except Exception as error:  # whatever it is, Serve would hide it in a traceback
            logger.exception("the policy cannot be loaded")
            what = f"the policy cannot be loaded: {first_line(error)}"
            fix = getattr(error, "fix", "") or "the traceback is in the replica's log in Ray's session folder"
            raise marked(ModelUnavailable(what, fix)) from error
        self._batches = FairBatches(self._run, batch_size=batch_size, wait_s=BATCH_WAIT_S)

    def _load(self, config: PolicyConfig, num_actions: int, batch_size: int, build: PolicyBuilder) -> PolicyEngine:
        limit_share(config.device, self._placement.num_gpus)
        torch.set_num_threads(max(1, int(self._placement.num_cpus)))
        policy = build(config, num_actions)
        check_share(config.device, self._placement.num_gpus)
        return PolicyEngine(policy, batch_size)

    async def ask(self, call: ReplyCall) -> ReplyReceipt | RunError:
        """The replies to one request, or the error that hit them: raised, Serve would log it as a fault of its own."""
        if call.weights is not None and call.weights.sha256 != self._sha256:
            # not in the model's thread: there the watchdog would take the wait for a model that is stuck
            await asyncio.get_running_loop().run_in_executor(None, brought_here, call.weights)
        items = [(call, place) for place in range(len(call.requests))]
        answers = await self._batches.put(items, key=call.key)
        if failed := [answer for answer in answers if isinstance(answer, RunError)]:
            return failed[0]
        return ReplyReceipt(answers=answers, sync_error=self._sync_error)

    async def check_health(self) -> None:
        """Passes: a model or an event loop that is stuck is the watchdog's to find."""
        if self._watchdog is None:
            placement = self._placement
            self._watchdog = Watchdog(self._heartbeat, stall_s=placement.stall_s, deadline_s=placement.timeout_s)
            self._watchdog.start(asyncio.get_running_loop())

    async def _run(self, items: list[Any]) -> list[Any]:
        """Runs the model in its one thread, so that the event loop stays free for health checks."""

        def timed() -> list[Any]:
            with self._heartbeat.working():
                return self._answered(items)

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)

    def _answered(self, items: Sequence[tuple[ReplyCall, int]]) -> list[Sampled | RunError]:
        """An answer to each turn, or why there is none; turns that are sampled alike go through the model together."""
        alike: dict[tuple[int, str, Sampling], list[int]] = {}
        for place, (call, _) in enumerate(items):
            version, digest = (0, "") if call.weights is None else (call.weights.version, call.weights.sha256)
            alike.setdefault((version, digest, call.sampling), []).append(place)
        answers: list[Any] = [None] * len(items)
        for (_, _, sampling), places in alike.items():
            outcome: Sequence[Sampled | RunError]
            try:
                self._sync_weights(items[places[0]][0].weights)
                outcome = self._sampled([items[place] for place in places], sampling)
            except RunError as error:
                outcome = [error] * len(places)
            for place, answer in zip(places, outcome, strict=True):
                answers[place] = answer
        return answers

    def _sync_weights(self, weights: Weights | None) -> None:
        if weights is None or (weights.version, weights.sha256) == (self._engine.version, self._sha256):
            return
        self._sync_error = take_over(self._engine.policy, weights)
        self._engine.take(weights.version)
        self._sha256 = weights.sha256

    def _sampled(self, items: Sequence[tuple[ReplyCall, int]], sampling: Sampling) -> Sequence[Sampled]:
        requests = [call.requests[place] for call, place in items]
        missing = self._engine.missing([request.image for request in requests])
        frames = [items[place][0].frames[items[place][1]] for place in missing]
        for place, frame in zip(missing, frames, strict=True):  # sizes may differ from run to run
            self._engine.show([requests[place].image], np.asarray(frame)[None])
        if self._engine.acts == "head":
            return self._engine.act(requests, greedy=sampling.greedy)
        return self._engine.reply(
            requests,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            greedy=sampling.greedy,
        )
