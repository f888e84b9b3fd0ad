"""Weights of a policy on their way from who trains them to who acts with them, under a version of their own.

They lie in Ray's object store and a request names the version that it wants, so a replica fetches what it lacks, and
one that joins late needs no telling. What arrives torn, foreign or not finite is refused, and the old weights stay.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import ray
import safetensors.torch
import torch
from ray import ObjectRef
from safetensors import SafetensorError
from torch import Tensor

from rlvlm.errors import ModelUnavailable
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.types.sampling import ReplyTokens
from rlvlm.types.steps import FloatArray, Frames

FETCH_TIMEOUT_S = 300.0
"""Longest wait for weights from another machine."""
_BOUND = {torch.float32: 1e-3}
_COARSE_BOUND = 0.1
"""Largest mean distance between the log-probs of a token, in nats, that two copies of equal weights may show: in
float32, and in the coarser types, where kernels differ from card to card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A fixed reply to a fixed prompt, by which two copies of a policy are compared."""

    tokens: ReplyTokens
    frame: Frames
    """[1, H, W, 3] the image."""
    log_probs: FloatArray
    """[N] of the reply's tokens, where the weights come from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """One version of a policy's weights: small enough to go with every request, for what is heavy stays behind."""

    version: int
    sha256: str
    """Of the bytes behind `parcel`."""
    parcel: tuple[ObjectRef[bytes]]
    """The trained tensors in safetensors' format. In a tuple, or Ray would fetch them for every request."""
    probe: Probe


def packed(policy: VLMPolicy, version: int, probe: ReplyTokens, frame: Frames) -> Weights:
    """The weights that `policy` has now, with what it says of `probe`, whose image it was shown."""
    state = {name: value.cpu().contiguous() for name, value in policy.trained_state().items()}
    content = safetensors.torch.save(state)
    with torch.no_grad():
        log_probs = policy.read([probe]).log_probs[0].cpu().numpy()
    return Weights(
        version=version,
        sha256=hashlib.sha256(content).hexdigest(),
        parcel=(ray.put(content),),
        probe=Probe(tokens=probe, frame=frame, log_probs=log_probs),
    )


def take_over(policy: VLMPolicy, weights: Weights) -> float:
    """Gives `policy` the weights, once they are known to be whole, and says how far its log-probs of the probe are off.

    Returns:
        Mean distance per token, nats.

    Raises:
        ModelUnavailable: they are torn, of another policy, not finite, or make another policy here than where they come
            from. `policy` has its old ones then.
    """
    content = ray.get(weights.parcel[0], timeout=FETCH_TIMEOUT_S)
    state = _opened(content, weights)
    before = {name: value.clone() for name, value in policy.trained_state().items()}
    try:
        policy.load_trained_state(state)
    except ValueError as error:
        raise _refused(weights, str(error)) from error
    distance = probe_distance(policy, weights.probe)
    dtype = next(policy.model.parameters()).dtype
    if not distance <= _BOUND.get(dtype, _COARSE_BOUND):
        policy.load_trained_state(before)
        raise _refused(weights, f"a fixed reply differs by {distance:.2g} nats a token from where they come from")
    return distance


@torch.no_grad()
def probe_distance(policy: VLMPolicy, probe: Probe) -> float:
    """Mean absolute difference of the probe's log-probs here and there, nats per token."""
    if policy.images.missing([probe.tokens.image]):
        policy.show([probe.tokens.image], probe.frame)
    here = policy.read([probe.tokens]).log_probs[0].cpu().numpy()
    return float(np.abs(here - probe.log_probs).mean())


def _opened(content: bytes, weights: Weights) -> Mapping[str, Tensor]:
    if hashlib.sha256(content).hexdigest() != weights.sha256:
        raise _refused(weights, "their digest is not the one that was told: they are torn")
    try:
        state = safetensors.torch.load(content)
    except SafetensorError as error:
        raise _refused(weights, f"they cannot be read: {error}") from error
    if odd := [name for name, value in state.items() if not bool(value.isfinite().all())]:
        raise _refused(weights, f"{odd[0]} is not finite")
    return state


def _refused(weights: Weights, why: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"weights of version {weights.version} are refused, the old ones stay: {why}",
        "go on from the last checkpoint: rlvlm resume",
    )
