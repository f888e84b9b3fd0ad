"""Versioned weights of a policy on their way from the learner to the replicas that sample.

They are in Ray's object store, in buckets, and a request names the version that it needs: a replica fetches missing
buckets one by one, so a new or restarted one needs no special treatment. The buckets stay there until the next version
replaces them, because a lost replica must find all of them again while the learners compute the next update.

Weights that arrive truncated, foreign or not finite are refused. If that is found after half of them were loaded, the
replica has no weights until a request brings valid ones, which may be the old ones; it never answers with a mixture.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import safetensors.torch
import torch
from ray.exceptions import GetTimeoutError, RayError

from rlvlm.core.episodes import IntArray, Observations
from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.policies.buckets import Bucket, Content, digest_of, fill_from_buckets, read_bucket, write_buckets
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.policies.vlm.vllm_worker import FAILED, MODEL
from rlvlm.vlms.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS

FETCH_TIMEOUT_S = 300.0
"""Maximum wait for weights from another machine, seconds."""
_POLL_S = 0.002
_BOUND = 1e-3
_COARSE_BOUND = 0.1
"""Maximum mean difference of a token's log-probs, in nats, between two copies of equal weights: in float32, and in
lower precision, where kernels differ between GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A fixed reply to a fixed turn, by which two copies of a policy are compared."""

    obs: Observations
    """Observation of the turn."""
    prompt_ids: IntArray
    """Token ids of its prompt, for vLLM, which gets no text."""
    ids: IntArray
    """[N] token ids of the reply."""
    frame: Frames
    """[1, H, W, 3] image of the turn."""
    log_probs: FloatArray
    """[N] log-probs of the reply's tokens on the learner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """One version of a policy's weights: a small handle that travels with every request, without the buckets."""

    version: int
    buckets: tuple[Bucket, ...]
    """Everything that learns; where there is an `adapter`, all of that, in a policy's names or in PEFT's."""
    probe: Probe
    adapter: str = ""
    """PEFT's `adapter_config.json`, if the buckets hold an adapter for vLLM."""
    digest: str = field(init=False)
    """Digest of the content of all buckets."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest_of(self.buckets))


def pack_weights(  # noqa: PLR0913 - a version, and what it is known by
    policy: VLMPolicy,
    version: int,
    obs: Observations,
    ids: IntArray,
    frame: Frames,
    *,
    buckets: Sequence[Bucket] = (),
    bucket_bytes: int,
    vllm_dtype: str | None = None,
) -> Weights:
    """Packs the present weights of `policy`, with its log-probs of a fixed reply.

    Args:
        policy: policy whose weights to pack.
        version: version number to give them.
        obs: observation of a fixed turn.
        ids: token ids of the fixed reply to it.
        frame: [1, H, W, 3] its image, which `policy` was shown.
        buckets: the same weights where learners have put them into the store already.
        bucket_bytes: that a bucket holds at most.
        vllm_dtype: what engines on vLLM compute in, such as `bfloat16`; weights are cast to it here, once for all of
            them, and with an empty one sent as they are. They are given no heads, and of an adapter all. None: engines
            are copies of `policy`.
    """

    def put(content: Content) -> Any:
        # in a tuple, or Ray would fetch the bytes for every request
        return (ray.put(content),)

    adapter, state = "", policy.trained_state()
    if vllm_dtype is not None and policy.config.has_adapter:
        import peft

        settings = {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in policy.model.active_peft_config.to_dict().items()
        }
        adapter = json.dumps(settings, default=str)
        # also what of it does not learn: vLLM has none of it
        state = peft.get_peft_model_state_dict(policy.model, save_embedding_layers=False)
    elif vllm_dtype is not None:
        state = {name: value for name, value in state.items() if name.startswith(MODEL)}
    there = {
        _peft_name(tensor.name) if adapter else tensor.name: tensor for bucket in buckets for tensor in bucket.tensors
    }
    if any(name not in there or there[name].dtype != (vllm_dtype or there[name].dtype) for name in state):
        # rounded as vLLM would: to the nearest, ties to even
        dtype = getattr(torch, vllm_dtype or "", None)
        buckets = write_buckets(
            state, put, size=bucket_bytes, whole=lambda value: value.detach().to(dtype or value.dtype).cpu()
        )
    # by what they say and not by their bytes alone: a dtype or kernel that differs would pass every checksum
    with torch.no_grad():
        log_probs = policy.read(obs, [ids]).log_probs[0].cpu().numpy()
    return Weights(
        version=version,
        buckets=tuple(buckets),
        probe=Probe(obs=obs, prompt_ids=policy.prompts(obs)[0], ids=ids, frame=frame, log_probs=log_probs),
        adapter=adapter,
    )


def fetch(
    weights: Weights, bucket: Bucket, waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Content:
    """Returns the bytes of one bucket of `weights`, read-only; waits for them in the context `waiting`, and
    starts fetching the next one.

    Raises:
        ModelUnavailable: they do not arrive.
    """
    following = weights.buckets[weights.buckets.index(bucket) :][1:2]
    try:
        with waiting():
            content: Any = ray.get(bucket.where[0], timeout=FETCH_TIMEOUT_S)
            if following:  # it is fetched while this one is copied
                ray.wait([following[0].where[0]], timeout=0, fetch_local=True)
    except GetTimeoutError as error:
        raise _refused(weights, f"they did not come within {FETCH_TIMEOUT_S:.0f} s") from error
    except RayError as error:
        raise _refused(weights, f"they are gone: {type(error).__name__}") from error
    return content


def load_weights(
    policy: VLMPolicy, weights: Weights, waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> float:
    """Loads the weights into `policy`, bucket by bucket, each waited for in the context `waiting`.

    Returns:
        Mean difference of its log-probs of the probe from the learner's, nats per token.

    Raises:
        ModelUnavailable: they are truncated, of another policy, not finite, or give other outputs here than on the
            learner. `policy` may hold some of them by then and must not be used before it gets valid ones.
    """
    try:
        fill_from_buckets(policy.trained_state(), weights.buckets, lambda bucket: fetch(weights, bucket, waiting))
    except ValueError as error:
        raise _refused(weights, str(error)) from error
    policy.forget_stale_images()  # computed by the vision tower's former weights
    probe = weights.probe
    if policy.images.missing(probe.obs.images):
        policy.show(probe.obs.images, probe.frame)
    with torch.no_grad():
        here = policy.read(probe.obs, [probe.ids]).log_probs[0].cpu().numpy()
    return check_probe(weights, here, is_coarse=next(policy.model.parameters()).dtype != torch.float32)


def write_adapter(weights: Weights, folder: Path) -> None:
    """Writes an adapter that was packed for vLLM into `folder`, as PEFT would, after checking that it is complete.

    Raises:
        ModelUnavailable: it is truncated or not finite; nothing was written.
    """
    # checked before a byte is written: vLLM must never find half an adapter
    try:
        state = {
            _peft_name(name): value
            for bucket in weights.buckets
            for name, value in read_bucket(bucket, fetch(weights, bucket))
            if "lora_" in name  # the heads are the trainer's own
        }
    except ValueError as error:
        raise _refused(weights, str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(weights.adapter)
    safetensors.torch.save_file(state, folder / ADAPTER_WEIGHTS)


def _peft_name(name: str) -> str:
    """PEFT's name in its files of a weight of an adapter that has `name` in a policy, or in such a file."""
    return name.removeprefix(MODEL).replace(".default.", ".")


def feed_buckets(weights: Weights, folder: Path, readers: int, is_over: threading.Event) -> None:
    """Passes the buckets to processes without Ray, as files that `policies.vlm.vllm_worker` reads: one is read while
    the next is written.

    Args:
        weights: weights to pass on.
        folder: folder for the files, which are deleted afterwards.
        readers: number of processes that read each of them.
        is_over: set by the readers' caller once they are done, have failed or are not waited for any more; readers that
            have not read everything by then are stopped.

    Raises:
        ModelUnavailable: a bucket does not arrive; the readers are stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def wait_until_read(number: int) -> None:
        while len(list(folder.glob(f"{number}.read-*"))) < readers and not is_over.is_set():
            time.sleep(_POLL_S)
        (folder / str(number)).unlink(missing_ok=True)

    try:
        for number, bucket in enumerate(weights.buckets):
            if is_over.is_set():
                break
            content = fetch(weights, bucket)
            content.tofile(folder / f"{number}.part")
            del content  # frees its memory in the object store before the next one arrives
            (folder / f"{number}.part").rename(folder / str(number))
            # the previous one was read meanwhile; at most two are ever on disk
            if number:
                wait_until_read(number - 1)
        wait_until_read(len(weights.buckets) - 1)
    finally:  # readers still waiting for a file would do so for ever
        (folder / FAILED).touch()


def check_probe(weights: Weights, here: FloatArray, *, is_coarse: bool) -> float:
    """Returns how much loaded weights differ here in their log-probs of the probe.

    Args:
        weights: the loaded weights.
        here: [N] log-probs of the probe's reply with them.
        is_coarse: whether they have less than 32 bits.

    Returns:
        Mean absolute difference from the learner's log-probs, nats per token.

    Raises:
        ModelUnavailable: the outputs differ too much.
    """
    distance = float(np.abs(here - weights.probe.log_probs).mean())
    if not distance <= (_COARSE_BOUND if is_coarse else _BOUND):  # also refuses NaN
        raise _refused(weights, f"a fixed reply differs by {distance:.2g} nats a token from where they come from")
    return distance


def _refused(weights: Weights, why: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"weights of version {weights.version} are refused: {why}", "go on from the last checkpoint: rlvlm resume"
    )
