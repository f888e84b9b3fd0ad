"""A policy that samples in replicas behind Ray Serve, with the interface of the engine in process."""

import math
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from rlvlm.core import metrics
from rlvlm.core.episodes import IntArray, Observations, SampledReply
from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.steps import Frames
from rlvlm.policies.buckets import Bucket
from rlvlm.policies.protocol import SeenImages
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.policies.vlm.vllm import TokenRules
from rlvlm.serving.app_client import REFUSED, AppClient
from rlvlm.serving.bags import BagSender
from rlvlm.serving.config import ServedEngineConfig
from rlvlm.serving.gpu_leases import begin_lease
from rlvlm.serving.policy_replica import ReplyCall, ReplyReceipt
from rlvlm.serving.weights import Weights, pack_weights


class ServedEngine:
    """The `Engine` protocol over a Serve app.

    Turns are sent in pieces cut by position alone, each of them a batch of a replica: with a single client the model
    sees the same batches whatever the timing. A piece lost with its replica is sent again; replies follow from their
    seeds, so a turn gets the same reply however often it is requested. Every piece names the version of the weights to
    use, and an answer of another version is refused.

    Args:
        app: name of the Serve application.
        policy: policy in training here; replicas use its weights after `use` was called.
        obs: a fixed turn, with which every replica that loads weights is compared with `policy`.
        ids: token ids of a fixed reply to it.
        frame: [1, H, W, 3] its image.
        config: settings of the app: number and content of the replicas. Those with vLLM exchange token ids; `policy`
            decodes the texts, and values of states are NaN.
    """

    def __init__(
        self,
        app: str,
        policy: VLMPolicy,
        obs: Observations,
        ids: IntArray,
        frame: Frames,
        *,
        config: ServedEngineConfig,
    ) -> None:
        self.version = 0
        """Version of the weights with which replies are sampled now."""
        self.bucket_bytes = config.bucket_mib << 20
        self._app, self._is_colocated = app, config.colocated
        self._policy = policy
        self._probe, self._frame = (obs, ids), frame
        self._by_tokens = config.backend == "vllm"
        # weights are sent as they are until an answer says what vLLM computes in, which its machine decides
        self._vllm_dtype = "" if self._by_tokens else None
        self._num_replicas = config.num_replicas
        self._weights: Weights | None = None
        self._frames = SeenImages[Frames](policy.config.cache_mib << 20)
        self._sync_error, self._measured = 0.0, -1
        self._num_retries = 0
        self._client = AppClient(
            app,
            what="policy",
            section="engine",
            unavailable=ModelUnavailable,
            timeout_s=config.timeout_s,
            retries=config.retries,
            note=self._note,
        )
        self._sender = BagSender(partial(self._client.stream, "ask_each"), config.num_replicas, _check)

    def pack(self, version: int, buckets: Sequence[Bucket] = ()) -> Weights:
        """Stores the policy's present weights where every replica finds them when it is asked for `version`."""
        # the image cache may have dropped it since
        obs, ids = self._probe
        if self._policy.images.missing(obs.images):
            self._policy.show(obs.images, self._frame)
        return pack_weights(
            self._policy, version, obs, ids, self._frame,
            buckets=buckets, bucket_bytes=self.bucket_bytes, vllm_dtype=self._vllm_dtype,
        )  # fmt: skip

    def use(self, weights: Weights) -> None:
        """Requests replies with `weights` from now on, which replicas fetch when asked."""
        self._weights, self.version = weights, weights.version

    def missing(self, images: Sequence[bytes]) -> list[int]:
        return self._frames.missing(images)

    def show(self, images: Sequence[bytes], frames: Frames) -> None:
        for key, frame in zip(images, frames, strict=True):
            self._frames.add(key, frame)

    def reply(self, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[SampledReply]:
        """Returns replies to `obs`, in order; see `PolicyEngine.reply`.

        Raises:
            ModelUnavailable: a piece was not answered within its tries, or no replica could load the weights.
            UsageError: a prompt and its reply would be longer than the model's window.
        """
        # as even as possible: the slowest replica determines the duration of the rollout
        size = max(1, -(-len(obs) // self._num_replicas))
        parts = [range(begin, min(begin + size, len(obs))) for begin in range(0, len(obs), size)]
        calls = [self._call(obs.at(part), [seeds[row] for row in part], sampling) for part in parts]
        self._client.connect()  # a missing app is reported at once, without retries
        return self.end(self._sender.send(calls, gathers=False))

    def begin(self, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[Future[ReplyReceipt]]:
        """Requests each reply by itself and returns at once; `end` returns them once all are there. Those requested
        within some milliseconds travel together.
        """
        calls = [self._call(obs.at([row]), [seed], sampling) for row, seed in enumerate(seeds)]
        self._client.connect()
        return self._sender.send(calls, gathers=True)

    def end(self, asked: Sequence[Future[ReplyReceipt]]) -> list[SampledReply]:
        """Waits for the replies requested by `begin` and returns them; called by the same thread."""
        receipts = [each.result() for each in asked]
        # the error is that of the newest weights; an older version's says nothing about them
        if self.version != self._measured:
            self._sync_error, self._measured = 0.0, self.version
        answers = [answer for receipt in receipts for answer in receipt.answers]
        newest = [receipt for receipt in receipts if receipt.answers[0].version == self.version]
        self._sync_error = max([self._sync_error, *(receipt.sync_error for receipt in newest)])
        if not self._by_tokens:
            return answers
        self._vllm_dtype = receipts[-1].dtype
        # vLLM has no value head; if a critic is used, the learner computes the values later.
        text_of = self._policy.text_of
        return [replace(answer, text=text_of(answer.ids), value=math.nan) for answer in answers]

    def report(self) -> dict[str, float]:
        """Returns the error of replicas when they loaded the newest weights that answered, and the number of
        retries.
        """
        return {metrics.ENGINE_SYNC_ERROR: self._sync_error, metrics.ENGINE_RETRIES: float(self._num_retries)}

    @property
    def shares_gpus(self) -> bool:
        return self._is_colocated

    def sleep(self) -> None:
        """Makes every replica leave the learners' GPUs; returns once they have."""
        begin_lease(self._app, is_engines=False)

    def wake(self, gpus: Sequence[tuple[str, str]]) -> None:
        """Makes every replica take the GPU of a learner; returns once they have."""
        begin_lease(self._app, is_engines=True, gpus=tuple(gpus))

    def close(self) -> None:
        """Ends the thread that waits for answers."""
        self._sender.close()

    def _call(self, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> ReplyCall:
        frames = tuple(self._frames.get(obs.images))
        call = ReplyCall(
            key=uuid.uuid4().hex,
            obs=obs,
            seeds=tuple(seeds),
            frames=frames,
            sampling=sampling,
            weights=self._weights,
        )
        if not self._by_tokens:
            return call
        # vLLM loads a checkpoint itself, so without weights it would answer untrained
        assert self._weights is not None, "`use` comes first"
        policy = self._policy
        prompts = [
            policy.backbone.encode(text, (frame.shape[-3], frame.shape[-2]), policy.config.history)
            for text, frame in zip(obs.texts, frames, strict=True)
        ]
        policy.check_window(prompts, sampling.max_new_tokens)
        rules = TokenRules(
            stop_id=policy.stop_id, banned_ids=tuple(policy.banned_ids.tolist()), image_id=policy.backbone.image_id
        )
        return replace(call, prompts=tuple(prompts), rules=rules)

    def _note(self, reason: str) -> None:
        self._num_retries += reason != REFUSED


def _check(call: ReplyCall, receipt: ReplyReceipt) -> None:
    """Raises ModelUnavailable unless `receipt` answers `call`: another replica may have the right weights."""
    version, answers = 0 if call.weights is None else call.weights.version, receipt.answers
    # like a judge's digests: an answer to another question would be learned from
    if tuple(answer.image for answer in answers) != call.obs.images:
        raise ModelUnavailable("the policy's app answered a turn that was not asked about")
    if any(answer.version != version for answer in answers):
        raise ModelUnavailable(f"the policy's app answered with other weights than version {version}")
