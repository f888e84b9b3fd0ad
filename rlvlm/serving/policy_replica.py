"""One copy of a policy in a process of its own: samples replies with exactly the weights that a request names."""

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rlvlm.core.disk import claim, clear_abandoned
from rlvlm.core.episodes import IntArray, Observations, SampledReply
from rlvlm.core.errors import ModelUnavailable, RunError
from rlvlm.core.steps import Frames
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.policies.vlm.vllm import TokenRules, VllmSampler
from rlvlm.serving.bags import each_answer
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.fair_queue import FairQueue
from rlvlm.serving.gpu_leases import LeaseHolder
from rlvlm.serving.replica import Heartbeat, Replica
from rlvlm.serving.weights import FETCH_TIMEOUT_S, Weights, check_probe, feed_buckets, load_weights, write_adapter
from rlvlm.vlms.config import EngineConfig
from rlvlm.vlms.devices import free_gpu, torch_device, use_expandable_segments

BATCH_WAIT_S = 0.002
"""Time for which a request waits for others to share its batch, seconds."""
_PREFIX = "rlvlm-weights-"
"""Prefix of the temporary folder in which a replica stores weights for vLLM."""

PolicyBuilder = Callable[[PolicyConfig, int], VLMPolicy]
"""Function that makes a policy from its config and a number of actions; must pickle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyCall:
    """Turns to be answered, sent together."""

    key: str
    """Key shared by all tries of this request: a replica that receives it twice samples once."""
    obs: Observations
    """Observations of the turns."""
    seeds: tuple[int, ...]
    """Seed of each reply."""
    frames: tuple[Frames, ...]
    """Images of each turn, [H, W, 3], or [k, H, W, 3] if a prompt has k."""
    sampling: ReplySampling
    weights: Weights | None
    """Weights that must be used; None takes those with which the policy was loaded."""
    prompts: tuple[IntArray, ...] = ()
    """Token ids of each prompt for vLLM, which gets no text; empty for a replica with the policy."""
    rules: TokenRules | None = None
    """Rules for the reply's tokens, for vLLM; None for a replica with the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyReceipt:
    """Answers to one call, in order."""

    answers: list[SampledReply]
    sync_error: float
    """Mean difference of this replica's log-probs of the fixed reply when it loaded the weights, nats per token."""
    dtype: str | None = None
    """Dtype in which vLLM computes here; None for the policy itself."""


class PolicyReplica(Replica):
    """Replica with the policy itself. Small requests are merged, and a thread runs the model. If it shares GPUs with
    the learners, it loads the model at its first lease. For the arguments see `deployments.bind_policy`.
    """

    def __init__(
        self,
        config: PolicyConfig,
        num_actions: int,
        placement: PlacementConfig,
        batch_size: int,
        build: PolicyBuilder = load_policy,
        shares_gpus: bool = False,
    ) -> None:
        use_expandable_segments()
        super().__init__("policy", config.device, placement, section="engine")
        self._sync_error = 0.0
        self._digest: str | None = ""
        """Digest of its weights; empty for those it was loaded with, None if they may be a mixture."""
        self._make = lambda device: PolicyEngine(build(replace(config, device=device), num_actions), batch_size)
        self._engine: PolicyEngine | None = None
        self._turns = LeaseHolder(self._wake, self._sleep) if shares_gpus else None
        if self._turns is None:
            self._engine = self._load(lambda: self._make(self._device))
        self._batches = FairQueue(partial(self._run, self._answers), batch_size=batch_size, wait_s=BATCH_WAIT_S)

    def _wake(self, gpu: str) -> None:
        device = torch_device(gpu)
        if self._engine is not None:
            self._engine.policy.to(device)
            return
        # only now is it known whether the model runs on a GPU, whose waiting threads show other signs of life
        self._heartbeat = Heartbeat(waits_for_gpu=device != "cpu")
        self._engine = self._load(lambda: self._make(device))

    def _sleep(self) -> None:
        assert self._engine is not None, "it was awake"
        self._engine.policy.to("cpu")
        self._engine.policy.images.clear()  # encoded images are on the GPU too; requests carry the images
        free_gpu()

    async def ask(self, call: ReplyCall) -> ReplyReceipt | RunError:
        """Returns the replies to one request, or its error as a value: Serve would log a raised one as its fault."""
        async with self._turns.awake() if self._turns else nullcontext():
            if call.weights is not None and call.weights.digest != self._digest:
                # Prefetch the first bucket while the model is still busy; not all of them, or this machine's object
                # store would hold the whole model for each replica.
                begun = partial(ray.wait, [call.weights.buckets[0].where[0]], timeout=FETCH_TIMEOUT_S, fetch_local=True)
                await asyncio.get_running_loop().run_in_executor(None, begun)
            # turn by turn, each with its call: a batch may contain turns of several calls
            items = [(call, place) for place in range(len(call.obs))]
            answers = await self._batches.put(items, key=call.key)
            if failed := [answer for answer in answers if isinstance(answer, RunError)]:
                return failed[0]
            return ReplyReceipt(answers=answers, sync_error=self._sync_error)

    async def ask_each(
        self, calls: Mapping[int, ReplyCall]
    ) -> AsyncIterator[list[tuple[int, ReplyReceipt | RunError]]]:
        """Yields what `ask` returns for each of `calls`, with its number, as soon as it is there."""
        async for answers in each_answer(self.ask, calls):
            yield answers

    def _answers(self, items: Sequence[tuple[ReplyCall, int]]) -> list[SampledReply | RunError]:
        """Returns an answer or an error for each turn; turns with equal sampling are processed together."""
        # weights are loaded once per version rather than per turn; seeds belong to turns, so the batch changes no reply
        alike: dict[tuple[int, str, ReplySampling], list[int]] = {}
        for place, (call, _) in enumerate(items):
            version, digest = (0, "") if call.weights is None else (call.weights.version, call.weights.digest)
            alike.setdefault((version, digest, call.sampling), []).append(place)
        answers: list[Any] = [None] * len(items)
        engine = self._engine
        assert engine is not None, "it is awake, or has a GPU of its own"
        for (version, digest, sampling), places in alike.items():
            outcome: Sequence[SampledReply | RunError]
            try:
                weights = items[places[0]][0].weights
                if weights is not None and (version, digest) != (engine.version, self._digest):
                    # in the model's thread, between two batches: no batch sees a mixture of old and new weights
                    self._digest = None  # refused weights may have left a mixture: the next ones are loaded anew
                    policy: Any = engine.policy  # a chat VLM: users' own policies are not served
                    self._sync_error = load_weights(policy, weights, self._heartbeat.fetching)
                    engine.use(version)
                    self._digest = digest
                if self._digest is None:
                    raise ModelUnavailable("this replica was given weights that it refused", "send it good ones")
                outcome = self._sample(engine, [items[place] for place in places], sampling)
            except RunError as error:
                outcome = [error] * len(places)
            for place, answer in zip(places, outcome, strict=True):
                answers[place] = answer
        return answers

    def _sample(
        self, engine: PolicyEngine, items: Sequence[tuple[ReplyCall, int]], sampling: ReplySampling
    ) -> Sequence[SampledReply]:
        # only texts and images: turns of different callers have snapshots of different sizes
        obs = Observations(
            texts=tuple(call.obs.texts[place] for call, place in items),
            images=tuple(call.obs.images[place] for call, place in items),
        )
        seeds = [call.seeds[place] for call, place in items]
        for index in engine.missing(obs.images):
            call, place = items[index]
            engine.show([obs.images[index]], np.asarray(call.frames[place])[None])  # sizes may differ
        return engine.reply(obs, seeds, sampling)


class VllmPolicyReplica(Replica):
    """Replica with the policy's chat VLM on vLLM, with token ids in and out; every prompt enters the engine on its own,
    and `batch_size` replies are sampled at once. For the arguments see `deployments.bind_policy`.
    """

    _leaving: "asyncio.Future[None] | None" = None
    """Reference that keeps a running task from being garbage-collected by the event loop."""

    def __init__(
        self,
        config: PolicyConfig,
        settings: EngineConfig,
        placement: PlacementConfig,
        batch_size: int,
        shares_gpus: bool = False,
    ) -> None:
        super().__init__("policy", config.device, placement, section="engine", is_elsewhere=True)
        clear_abandoned(_PREFIX)  # gigabytes that a killed replica left on this machine
        self._kept = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self._claim = claim(Path(self._kept.name))
        self._folder = Path(self._kept.name) / "versions"
        self._sync_errors: dict[int, float] = {}
        # one version is loaded at a time, and requests for it wait
        self._taking = asyncio.Lock()
        self._idle = asyncio.Condition()
        self._under_way: dict[int, int] = {}
        # a function, because a replica with leases learns its device at its first lease
        self._make = lambda device: VllmSampler(
            replace(config, device=device), settings, max_requests=batch_size, sleeps=shares_gpus
        )
        self._loaded: VllmSampler | None = None
        self._turns = LeaseHolder(self._wake, lambda: self._sampler.sleep()) if shares_gpus else None
        if self._turns is None:
            self._loaded = self._load(lambda: self._make(self._device))
        self._slots = FairQueue(self._ask_engine, batch_size=1, concurrency=2 * batch_size)

    @property
    def _sampler(self) -> VllmSampler:
        assert self._loaded is not None, "it is awake, or has a GPU of its own"
        return self._loaded

    def _wake(self, gpu: str) -> None:
        if self._loaded is not None:
            self._loaded.wake()
            return
        if gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # for the engine's own processes, which use the first visible GPU
        self._loaded = self._load(lambda: self._make("cuda" if gpu else "cpu"))

    def __del__(self) -> None:
        """Deletes the files of weights; called by Serve when it stops the replica."""
        self._kept.cleanup()

    async def ask(self, call: ReplyCall) -> ReplyReceipt | RunError:
        """Returns the replies to one request, or its error as a value: Serve would log a raised one as its fault.

        Texts and values are missing: the trainer adds them.
        """
        assert call.weights is not None, "vLLM loads a checkpoint, with which nobody samples"
        version = call.weights.version
        async with self._turns.awake() if self._turns else nullcontext():
            try:
                await self._take_weights(call)
                try:
                    items = [(call, place) for place in range(len(call.obs))]
                    answers = await self._slots.put(items, key=call.key)
                finally:
                    await self._leave(version)
            except RunError as error:
                return error
            return ReplyReceipt(answers=answers, sync_error=self._sync_errors[version], dtype=self._sampler.dtype)

    async def ask_each(
        self, calls: Mapping[int, ReplyCall]
    ) -> AsyncIterator[list[tuple[int, ReplyReceipt | RunError]]]:
        """Yields what `ask` returns for each of `calls`, with its number, as soon as it is there."""
        async for answers in each_answer(self.ask, calls):
            yield answers

    async def _take_weights(self, call: ReplyCall) -> None:
        """Returns once the engine holds the weights of `call`, and counts the call as running.

        A caller that gives up does not cancel it: engines cannot be stopped in the middle of a load, and the next try,
        which needs the same weights, finds them loaded.
        """
        assert call.weights is not None, "sent to vLLM"
        version = call.weights.version

        async def take() -> None:
            async with self._turns.awake() if self._turns else nullcontext(), self._taking:
                await self._sync_weights(call)
                # counted before the lock is released: the next version waits for these calls
                self._under_way[version] = self._under_way.get(version, 0) + 1

        taking = asyncio.ensure_future(take())
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:

            def leave(done: asyncio.Future[None]) -> None:
                if not done.cancelled() and done.exception() is None:
                    self._leaving = asyncio.ensure_future(self._leave(version))

            taking.add_done_callback(leave)
            raise

    async def _leave(self, version: int) -> None:
        """Stops counting a call with `version` as running."""
        self._under_way[version] -= 1
        async with self._idle:
            self._idle.notify_all()

    async def check_health(self) -> None:
        """Raises if the engine is dead or a reply takes longer than callers wait.

        Raises:
            RuntimeError: it is dead, or a reply takes too long.
        """
        await super().check_health()
        if self._loaded is not None and self._loaded.is_dead:
            raise RuntimeError("vLLM's engine has died")

    async def _ask_engine(self, items: list[tuple[ReplyCall, int]]) -> list[SampledReply]:
        [(call, place)] = items
        assert call.weights is not None and call.rules is not None, "sent to vLLM"
        version = call.weights.version
        with self._heartbeat.waiting():
            sampled = await self._sampler.sample(
                call.prompts[place],
                call.frames[place],
                call.rules,
                call.sampling,
                seed=call.seeds[place],
                version=version,
            )
        reply = SampledReply(
            image=call.obs.images[place],
            answer={"ids": sampled.ids},
            log_probs=sampled.log_probs,
            value=float("nan"),
            is_complete=sampled.is_complete,
            version=version,
        )
        return [reply]

    async def _sync_weights(self, call: ReplyCall) -> None:
        """Loads the weights of `call` into the engine, after checking that they are complete and match the trainer's.

        Raises:
            ModelUnavailable: they are refused; the engine keeps its previous weights.
        """
        weights, rules = call.weights, call.rules
        assert weights is not None and rules is not None, "sent to vLLM"
        version = weights.version
        if self._sampler.holds(version):
            return
        loop, folder = asyncio.get_running_loop(), self._folder / f"version-{version}"
        if weights.adapter:
            await loop.run_in_executor(None, write_adapter, weights, folder)
        # Calls begun with one version end with it: whole weights overwrite those in use, an adapter is loaded beside
        # the newest one while older ones leave.
        kept = self._sampler.version if weights.adapter else None
        async with self._idle:
            await self._idle.wait_for(lambda: not any(n for v, n in self._under_way.items() if v != kept))
        with self._heartbeat.waiting():
            try:
                if weights.adapter:
                    await self._sampler.load_adapter(version, folder)
                else:
                    is_over = threading.Event()
                    folder.mkdir(parents=True, exist_ok=True)  # before vLLM looks for files in it
                    feeding = loop.run_in_executor(
                        None, feed_buckets, weights, folder, self._sampler.num_workers, is_over
                    )
                    try:
                        await self._sampler.load_buckets(version, folder, weights.buckets)
                    finally:
                        is_over.set()
                        try:
                            await feeding  # its own error is the cause of the engine's
                        finally:
                            shutil.rmtree(folder, ignore_errors=True)
                # before anything is sampled: a fixed reply must have the same probability as on the learner
                probe = weights.probe
                here = await self._sampler.read(probe.prompt_ids, probe.ids, probe.frame[0], rules, version)
                distance = check_probe(weights, here, is_coarse=self._sampler.dtype != "float32")
            except RunError:  # the weights may be a mixture: this version must not be used
                await self._sampler.forget(version)
                raise
        self._sync_errors[version] = distance
        # vLLM reads the files once; gigabytes of old versions would fill the disk
        for old in self._folder.iterdir() if weights.adapter else ():
            if not self._sampler.holds(int(old.name.rpartition("-")[2])):
                shutil.rmtree(old, ignore_errors=True)
