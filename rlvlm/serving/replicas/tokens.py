"""One copy of a policy's chat VLM on vLLM: samples token ids for token ids, with exactly the weights that are named."""

import asyncio
import logging
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rlvlm.core.disk import claim, clear_abandoned
from rlvlm.core.errors import ModelUnavailable, RunError, first_line
from rlvlm.core.sampling import ReplyTokens, SampledReply
from rlvlm.core.steps import Frames
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.vllm import TokenRules, TokenSampling, VllmSampler
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.replicas.gpu import assigned_device
from rlvlm.serving.replicas.policy import ReplyReceipt, Sampling
from rlvlm.serving.replicas.slots import FairSlots
from rlvlm.serving.replicas.watchdog import Heartbeat, Watchdog, loading_within
from rlvlm.serving.startup import START_TIMEOUT_S, marked
from rlvlm.serving.weights import Weights, check_distance, mean_distance, written
from rlvlm.vlms.config import EngineConfig

logger = logging.getLogger(__name__)
_PREFIX = "rlvlm-weights-"
"""Of the temporary folder in which a replica keeps weights for vLLM to load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCall:
    """Some prompts that are to be gone on with, sent together."""

    key: str
    """The same for every try of this request: a replica that meets it twice samples once."""
    prompts: tuple[ReplyTokens, ...]
    """Without a reply."""
    seeds: tuple[int, ...]
    frames: tuple[Frames, ...]
    """[H, W, 3] the image of each."""
    sampling: Sampling
    weights: Weights
    """That must answer."""
    rules: TokenRules


class TokenReplica:
    """vLLM behind Serve; every prompt enters the engine by itself.

    Args:
        config: of the policy.
        settings: of the engine.
        placement: with which resources.
        batch_size: replies written at once.
    """

    def __init__(
        self, config: PolicyConfig, settings: EngineConfig, placement: PlacementConfig, batch_size: int
    ) -> None:
        self._placement = placement
        self._watchdog: Watchdog | None = None
        self._heartbeat = Heartbeat(is_elsewhere=True)
        clear_abandoned(_PREFIX)
        self._kept = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self._claim = claim(Path(self._kept.name))
        self._folder = Path(self._kept.name) / "versions"
        self._sync_errors: dict[int, float] = {}
        self._taking = asyncio.Lock()
        self._idle = asyncio.Condition()
        self._under_way: dict[int, int] = {}
        thread = ThreadPoolExecutor(1, thread_name_prefix="policy")
        try:
            with loading_within(START_TIMEOUT_S):
                settled = replace(config, device=assigned_device(config.device))
                self._sampler = thread.submit(VllmSampler, settled, settings, max_requests=batch_size).result()
        except Exception as error:  # whatever it is, Serve would hide it in a traceback
            logger.exception("the policy cannot be loaded")
            what = f"the policy cannot be loaded: {first_line(error)}"
            fix = getattr(error, "fix", "") or "the traceback is in the replica's log in Ray's session folder"
            raise marked(ModelUnavailable(what, fix)) from error
        self._slots = FairSlots(self._sampled, slots=2 * batch_size)

    def __del__(self) -> None:
        """Called by Serve when it stops the replica: takes the files of weights along."""
        self._kept.cleanup()

    async def ask(self, call: TokenCall) -> ReplyReceipt | RunError:
        """The replies to one request, or the error that hit them: raised, Serve would log it as a fault of its own.

        Their texts and values are missing: those are the trainer's to say.
        """
        version = call.weights.version
        try:
            async with self._taking:
                await self._sync_weights(call)
                self._under_way[version] = self._under_way.get(version, 0) + 1
            try:
                items = [(call, place) for place in range(len(call.prompts))]
                answers = await self._slots.put(items, key=call.key)
            finally:
                self._under_way[version] -= 1
                async with self._idle:
                    self._idle.notify_all()
        except RunError as error:
            return error
        return ReplyReceipt(answers=answers, sync_error=self._sync_errors[version])

    async def check_health(self) -> None:
        """Passes: an engine or an event loop that is stuck is the watchdog's to find.

        Raises:
            RuntimeError: the engine is dead.
        """
        if self._watchdog is None:
            placement = self._placement
            self._watchdog = Watchdog(self._heartbeat, stall_s=placement.stall_s, deadline_s=placement.timeout_s)
            self._watchdog.start(asyncio.get_running_loop())
        if self._sampler.is_dead:
            raise RuntimeError("vLLM's engine has died")

    async def _sampled(self, item: tuple[TokenCall, int]) -> SampledReply:
        call, place = item
        prompt, sampling, version = call.prompts[place], call.sampling, call.weights.version
        with self._heartbeat.waiting():
            how = TokenSampling(
                seed=call.seeds[place],
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                greedy=sampling.greedy,
            )
            sampled = await self._sampler.sample(prompt, call.frames[place], call.rules, how, version)
        return SampledReply(
            tokens=replace(prompt, reply_ids=sampled.ids),
            text="",
            log_probs=sampled.log_probs,
            value=float("nan"),
            is_complete=sampled.is_complete,
            version=version,
        )

    async def _sync_weights(self, call: TokenCall) -> None:
        """Has the engine hold the weights of `call`, once they are known to be whole and to say what the trainer's say.

        Raises:
            ModelUnavailable: they are refused; the engine keeps those that it had.
        """
        weights, version = call.weights, call.weights.version
        if self._sampler.holds(version):
            return
        folder = self._folder / f"version-{version}"
        await asyncio.get_running_loop().run_in_executor(None, written, weights, folder)
        before = self._sampler.version
        async with self._idle:  # what began under one version ends under it
            await self._idle.wait_for(lambda: self._sampler.keeps_others or not sum(self._under_way.values()))
        with self._heartbeat.waiting():
            try:
                await self._sampler.load(version, folder)
                probe = weights.probe
                here = await self._sampler.read(probe.tokens, probe.frame[0], call.rules, version)
                distance = mean_distance(here, probe.log_probs)
                check_distance(weights, distance, is_coarse=self._sampler.is_coarse)
            except RunError:
                await self._sampler.go_back(version, None if before is None else self._folder / f"version-{before}")
                raise
        self._sync_errors[version] = distance
        for old in self._folder.iterdir():
            if not self._sampler.holds(int(old.name.rpartition("-")[2])):
                shutil.rmtree(old, ignore_errors=True)
