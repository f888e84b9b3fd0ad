"""Sharding of a policy too large for any single GPU: weights, gradients and Adam's averages over learners (FSDP2).

Each learner keeps a slice of every weight. A block is gathered when it is computed, forwards and backwards, and then
released; its gradient is summed over the learners on the way into the slices. Loss, gradient and step are those of a
single learner with all weights.

Sources: Zhao et al. 2023, arXiv:2304.11277 (FSDP); Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO, stage 3).
Departure: gradients are summed, not averaged, because shares of a minibatch may be uneven and have weights of their
own.

Gathering is a collective call, so every learner must call the policy equally often, in the same order: also a VLM's
vision encoder, which encodes each image once (`policies.protocol.look`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
import torch
from torch import Tensor, distributed, nn

from rlvlm.core.errors import UsageError
from rlvlm.policies.buckets import Bucket, Content, write_buckets
from rlvlm.policies.protocol import Policy
from rlvlm.policies.weights import slice_like
from rlvlm.vlms.blocks import blocks_of
from rlvlm.vlms.skeleton import Pending, pending


def shard(policy: Policy, compute_dtype: torch.dtype | None) -> None:
    """Leaves each learner its slice of `policy`'s weights; all learners call it, with equal policies.

    If the policy was built within `vlms.skeleton.skeletons`, each learner reads only its slices from the model's files.

    Args:
        policy: a `Policy` on its device; changed in place, and afterwards called by all learners together.
        compute_dtype: dtype in which weights are gathered and computed, while slices keep theirs; None: their own.

    Raises:
        UsageError: its weights are quantised, or it is too small to have blocks.
    """
    # slow to import, and most learners are not sharded
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # Inner modules first, as FSDP2 requires: each block is a group of its own that is gathered when it is computed, and
    # the root takes the rest, embeddings and norms.
    parts = policy.shardable()
    if any(not parameter.is_floating_point() for parameter in parts.root.parameters()):
        raise UsageError("4-bit weights cannot be sharded", "leave out --algo.shard or --policy.quantization nf4")
    device, waiting = policy.device, pending(policy)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    # An adapter is float32 beside bfloat16: without a compute dtype each is gathered in its own.
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # Weights are released after every pass, including the outermost: in between, names refer to the slices, which
    # change.
    settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    for block in blocks_of(parts.root):
        if any(True for _ in block.parameters()):
            fully_shard(block, mp_policy=precision, **settings)
    for head in parts.heads:  # in float32, whatever the compute dtype
        fully_shard(head, **settings)
    fully_shard(parts.root, mp_policy=replace(precision, cast_forward_inputs=False), **settings)
    if waiting:
        _read(policy, waiting, device)
    for method in parts.methods:
        register_fsdp_forward_method(parts.root, method)
    for outer in (parts.root, *parts.heads):
        for module in outer.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo supports no other


@torch.no_grad()
def _read(policy: nn.Module, waiting: Sequence[Pending], device: torch.device) -> None:
    """Reads the policy's weights from files to `device`, only the rows of each weight that this learner keeps.

    Weights in no file, such as a fresh adapter's, are zero until `take_weights` distributes the run's own.
    """
    for weight in waiting:
        (module, name), *_ = weight.owners
        shape: Tensor = getattr(module, name)
        value = nn.Parameter(torch.empty_like(shape, device=device), requires_grad=shape.requires_grad)
        own = local(value.detach())
        if weight.source is None:
            assert value.requires_grad, f"{name} of {type(module).__name__} is in no file and would stay zero"
            own.zero_()
        elif own.numel():
            # FSDP splits along the first dimension, into parts of equal size except for the last ones
            size = -(-len(value) // distributed.get_world_size())
            first = distributed.get_rank() * size if is_sharded([value]) else 0
            own.copy_(weight.source.read(first, len(own)))
        for owner, its_name in weight.owners:
            owner._parameters[its_name] = value
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Returns whether any of `parameters` is a slice."""
    return any(hasattr(parameter, "to_local") for parameter in parameters)  # of DTensor, whose module is slow to import


def local(tensor: Any) -> Tensor:
    """Returns the part of `tensor` in this process, sharing its memory."""
    return tensor.to_local() if is_sharded([tensor]) else tensor


def rejoined(part: Tensor, like: Any) -> Tensor:
    """Turns `part`, as returned by `local`, back into a slice like `like`; unchanged if `like` is no slice."""
    if is_sharded([part]) or not is_sharded([like]):
        return part
    from torch.distributed.tensor import DTensor  # slow to import, and only sharded learners need it

    there = part.to(like.device)
    return DTensor.from_local(there, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def gathered(tensor: Any) -> Tensor:
    """Returns the whole `tensor` on the CPU, detached; slices are gathered by all learners together.

    Only the first learner's result is used, so the others release each gathered tensor and return an empty one.
    """
    if not is_sharded([tensor]):
        return tensor.detach().cpu()
    full = tensor.detach().full_tensor()
    return full.cpu() if distributed.get_rank() == 0 else full.new_empty(0, device="cpu")


def into_store(content: Content) -> Any:
    """Stores a copy of `content` in Ray's object store and returns a reference."""
    return (ray.put(content),)  # in a tuple, or Ray would fetch the bytes for every receiver of a bucket


def put_buckets(state: Mapping[str, Any], size: int, put: Callable[[Content], Any] = into_store) -> list[Bucket]:
    """Writes `state` in buckets; called by all learners, and stored by the first of them.

    No process holds more of it, besides its own weights, than a bucket and a tensor, which exists twice while it is
    gathered.

    Args:
        state: values by name, slices or not.
        size: size of a bucket, bytes.
        put: stores the bytes of a bucket.

    Returns:
        The buckets for the first learner, none for the others.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
        for value in state.values():
            if is_sharded([value]):
                gathered(value)  # a collective call, whose result only the first learner uses
        return []
    return write_buckets(state, put, size=size, whole=gathered)


def fetch_bucket(bucket: Bucket) -> Content:
    """Returns the bytes of `bucket` in this machine's shared memory, read-only."""
    return ray.get(bucket.where[0])


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scales the gradients to a norm of at most `max_norm`; returns the norm before, equal in all learners."""
    if not is_sharded(parameters):
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # norm of the slices of all learners, and of the weights that each learner holds whole
    spread, own = (torch.zeros((), device=local(parameters[0]).device) for _ in range(2))
    for gradient in gradients:
        part = spread if is_sharded([gradient]) else own
        part += local(gradient).float().square().sum()
    distributed.all_reduce(spread)
    norm = (spread + own).sqrt()  # weights held whole are equal in all learners, and count once
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in torch.nn.utils.clip_grad_norm_
    for gradient in gradients:
        local(gradient).mul_(factor)
    return float(norm)


@contextmanager
def at_hand(optimizer: torch.optim.Optimizer, is_offloaded: bool) -> Iterator[None]:
    """Moves the state of `optimizer` to its parameters' device while the context is open and then, if offloaded, back
    to main memory. The computation is the same.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if value.ndim and not is_sharded([value]):  # the number of steps is not moved
                state[name] = rejoined(value.to(local(parameter).device), parameter)
    try:
        yield
    finally:
        for state in optimizer.state.values() if is_offloaded else ():
            for name, value in state.items():
                if value.ndim:
                    state[name] = local(value).to("cpu")


def sliced_state(states: Mapping[int, Mapping[str, Any]], parameters: Sequence[nn.Parameter]) -> dict[int, Any]:
    """Slices an optimiser's whole state, by parameter number, like its parameters."""
    return {
        number: {
            name: slice_like(value, parameters[number]) if value.shape == parameters[number].shape else value
            for name, value in state.items()
        }
        for number, state in states.items()
    }


def plain(value: Tensor) -> Tensor:
    """Returns the whole of `value` for a state tree: NumPy has no bfloat16, and float32 represents it exactly."""
    whole = gathered(value)
    return whole.float() if whole.dtype == torch.bfloat16 else whole


def own_parts(values: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies into main memory what this learner saves of `values`: its slices, and the first learner what all of them
    hold whole.

    Args:
        values: by name; the slices may be as `local` returns them.
        like: parameters by the same names, of which those that are slices tell.
    """
    is_first = not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank())
    return {
        name: local(value).detach().to("cpu", copy=True)
        for name, value in values.items()
        if is_first or (value.ndim and is_sharded([like[name]]))  # a number of steps is the same everywhere
    }


def optimizer_tree(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the whole state of `optimizer` as a state tree; if sharded, all learners call it together."""
    return {
        str(number): {name: plain(value) for name, value in state.items()}
        for number, state in optimizer.state_dict()["state"].items()
    }


def load_optimizer_tree(
    optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> None:
    """Restores a state of `optimizer_tree` into a fresh optimiser of `parameters`, sliced like these."""
    states = {  # copied: other learners may read the tree's memory too, and Adam writes in place
        int(number): {name: torch.as_tensor(value).clone() for name, value in state.items()}
        for number, state in tree.items()
    }
    optimizer.load_state_dict(optimizer.state_dict() | {"state": sliced_state(states, parameters)})
