"""Weights of a policy on their way from who trains them to who acts with them, under a version of their own.

They lie in Ray's object store and a request names the version that it wants, so a replica fetches what it lacks, and
one that joins late is sent nothing. What arrives torn, foreign or not finite is refused, and the old weights stay.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
import safetensors.torch
import torch
from ray import ObjectRef
from safetensors import SafetensorError
from torch import Tensor

from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.sampling import ReplyTokens
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.vlms.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS

FETCH_TIMEOUT_S = 300.0
"""Longest wait for weights from another machine."""
_BOUND = 1e-3
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
    adapter: str = ""
    """`adapter_config.json` of PEFT, where the parcel is an adapter in its names."""


def pack_weights(
    policy: VLMPolicy, version: int, probe: ReplyTokens, frame: Frames, *, for_vllm: bool = False
) -> Weights:
    """The weights that `policy` has now, with what it says of a fixed reply.

    Args:
        policy: whose weights they are.
        version: they are to have.
        probe: the fixed reply.
        frame: [1, H, W, 3] its image, which `policy` was shown.
        for_vllm: in the names that other libraries know and without our heads: the adapter, or all of the chat VLM.
    """
    # what is not trained is the same everywhere and stays behind
    adapter, state = "", policy.trained_state()
    if for_vllm and not policy.config.has_adapter:
        state = policy.model.state_dict()
    elif for_vllm:
        import peft

        settings = {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in policy.model.active_peft_config.to_dict().items()
        }
        adapter = json.dumps(settings, default=str)
        state = peft.get_peft_model_state_dict(policy.model, save_embedding_layers=False)
    # no pickle: what comes from another machine is data and never code
    content = safetensors.torch.save({name: value.detach().cpu().contiguous() for name, value in state.items()})
    with torch.no_grad():
        log_probs = policy.read([probe]).log_probs[0].cpu().numpy()
    return Weights(
        version=version,
        sha256=hashlib.sha256(content).hexdigest(),
        parcel=(ray.put(content),),
        probe=Probe(tokens=probe, frame=frame, log_probs=log_probs),
        adapter=adapter,
    )


def load_weights(policy: VLMPolicy, weights: Weights) -> float:
    """Gives `policy` the weights, once they are known to be whole, and says how far its log-probs of the probe are off.

    Returns:
        Mean distance per token, nats.

    Raises:
        ModelUnavailable: they are torn, of another policy, not finite, or make another policy here than where they come
            from. `policy` has its old ones then.
    """
    state = _opened(ray.get(weights.parcel[0], timeout=FETCH_TIMEOUT_S), weights)
    # a copy: `load_trained_state` writes into the very tensors, and a refusal must put them back
    before = {name: value.clone() for name, value in policy.trained_state().items()}
    try:
        policy.load_trained_state(state)
    except ValueError as error:
        raise _refused(weights, str(error)) from error
    probe = weights.probe
    if policy.images.missing([probe.tokens.image]):
        policy.show([probe.tokens.image], probe.frame)
    with torch.no_grad():
        here = policy.read([probe.tokens]).log_probs[0].cpu().numpy()
    try:
        return check_probe(weights, here, is_coarse=next(policy.model.parameters()).dtype != torch.float32)
    except ModelUnavailable:
        policy.load_trained_state(before)
        raise


def write_weights(weights: Weights, folder: Path) -> None:
    """Puts weights that were packed for vLLM into `folder`, once they are known to be whole.

    Raises:
        ModelUnavailable: they are torn or not finite; nothing was written.
    """
    content = ray.get(weights.parcel[0], timeout=FETCH_TIMEOUT_S)
    _opened(content, weights)
    folder.mkdir(parents=True, exist_ok=True)
    if weights.adapter:
        (folder / ADAPTER_CONFIG).write_text(weights.adapter)
    (folder / (ADAPTER_WEIGHTS if weights.adapter else "model.safetensors")).write_bytes(content)


def check_probe(weights: Weights, here: FloatArray, *, is_coarse: bool) -> float:
    """How far weights that were loaded are off where they are now, in what they say of the probe.

    Args:
        weights: that were loaded.
        here: [N] log-probs of the probe's reply with them.
        is_coarse: whether they are of less than 32 bits.

    Returns:
        Mean absolute difference from what was said where they come from, nats per token.

    Raises:
        ModelUnavailable: they make another policy here.
    """
    distance = float(np.abs(here - weights.probe.log_probs).mean())
    if not distance <= (_COARSE_BOUND if is_coarse else _BOUND):  # NaN is refused too
        raise _refused(weights, f"a fixed reply differs by {distance:.2g} nats a token from where they come from")
    return distance


def _opened(content: bytes, weights: Weights) -> Mapping[str, Tensor]:
    if hashlib.sha256(content).hexdigest() != weights.sha256:
        raise _refused(weights, "their digest is not the one that was sent along: they are torn")
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
