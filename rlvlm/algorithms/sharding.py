"""A policy that no single GPU holds: its weights, gradients and Adam's averages are spread over the learners (FSDP2).

Each learner keeps a slice of every weight. A block is gathered when it is computed, forwards and backwards, and let go
again; its gradient is summed over the learners on the way into the slices. Loss, gradient and step are those of one
learner that holds everything.

Sources: Zhao et al. 2023, arXiv:2304.11277 (FSDP); Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO, stage 3).
Departure: gradients are summed, not averaged, because shares of a minibatch may be uneven and are weighted by what they
count.

Gathering is a collective call, so every learner must go through the policy equally often, in the same order: also
through a VLM's vision encoder, which looks once at each image (`policies.protocol.look`).
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
from rlvlm.policies.weights import slice_like
from rlvlm.vlms.blocks import blocks_of
from rlvlm.vlms.skeleton import Pending, pending


def shard(policy: Any, compute_dtype: torch.dtype | None) -> None:
    """Leaves each learner its slice of `policy`'s weights; all learners call it, with equal policies.

    Each learner reads only its slices of a policy built within `vlms.skeleton.skeletons` from the model's files.

    Args:
        policy: a `Policy` on its device; changed in place, and from then on called by all learners together.
        compute_dtype: that weights are gathered and computed in, the slices stay what they are; None: their own.

    Raises:
        UsageError: its weights are quantised, or it is too small to have blocks.
    """
    # slow to import, and most learners are not sharded
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # Inner modules first, as FSDP2 wants it: each block is a group of its own that is gathered when it is computed, and
    # the root takes what is left, embeddings and norms.
    parts = policy.shardable()
    if any(not parameter.is_floating_point() for parameter in parts.root.parameters()):
        raise UsageError("4-bit weights cannot be sharded", "leave out --algo.shard or --policy.quantization nf4")
    device, waiting = policy.device, pending(policy)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    # An adapter is float32 beside bfloat16: without a compute type each is gathered as it is.
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # Weights are let go after every pass, the outermost too: in between, names lead to the slices, which are changed.
    settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    for block in blocks_of(parts.root):
        if any(True for _ in block.parameters()):
            fully_shard(block, mp_policy=precision, **settings)
    for head in parts.heads:  # in float32, whatever the rest computes in
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
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


@torch.no_grad()
def _read(policy: nn.Module, waiting: Sequence[Pending], device: torch.device) -> None:
    """Brings what of `policy` is in files to `device`, of each weight the rows that this learner keeps.

    Weights in no file, a fresh adapter, are zero until `take_weights` hands out what the run's own policy has drawn.
    """
    for weight in waiting:
        (module, name), *_ = weight.owners
        shape: Any = getattr(module, name)
        value = nn.Parameter(torch.empty_like(shape, device=device), requires_grad=shape.requires_grad)
        own = local(value.detach())
        if weight.source is None:
            assert value.requires_grad, f"{name} of {type(module).__name__} is in no file and would stay zero"
            own.zero_()
        elif own.numel():
            # FSDP cuts along the first dimension, into parts of equal size but for the last ones
            size = -(-len(value) // distributed.get_world_size())
            first = distributed.get_rank() * size if is_sharded([value]) else 0
            own.copy_(weight.source.read(first, len(own)))
        for owner, its_name in weight.owners:
            owner._parameters[its_name] = value
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Whether any of `parameters` is a slice."""
    return any(hasattr(parameter, "to_local") for parameter in parameters)  # of DTensor, whose module is slow to import


def local(tensor: Any) -> Tensor:
    """The part of `tensor` in this process, sharing its memory."""
    return tensor.to_local() if is_sharded([tensor]) else tensor


def rejoined(part: Tensor, like: Any) -> Any:
    """`part`, where it is what `local` gives of a tensor sliced as `like`, as such a slice again; else itself."""
    if is_sharded([part]) or not is_sharded([like]):
        return part
    from torch.distributed.tensor import DTensor  # slow to import, and only sharded learners come here

    there = part.to(like.device)
    return DTensor.from_local(there, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def gathered(tensor: Any) -> Tensor:
    """The whole of `tensor` on the CPU, detached; slices are gathered by all learners together.

    Only the first learner's answers are read, so the others let go of what they gathered, tensor by tensor, and return
    an empty one.
    """
    if not is_sharded([tensor]):
        return tensor.detach().cpu()
    full = tensor.detach().full_tensor()
    return full.cpu() if distributed.get_rank() == 0 else full.new_empty(0, device="cpu")


def into_store(content: Content) -> Any:
    """Reference to a copy of `content` in Ray's object store."""
    return (ray.put(content),)  # in a tuple, or Ray would fetch the bytes for every receiver of a bucket


def put_buckets(state: Mapping[str, Any], size: int, put: Callable[[Content], Any] = into_store) -> list[Bucket]:
    """`state` in buckets; called by all learners, and put by the first of them.

    No process holds more of it, beside its own weights, than a bucket and a tensor, which is there twice while it is
    gathered.

    Args:
        state: name and value, slices or not.
        size: bytes of a bucket.
        put: keeps the bytes of one.

    Returns:
        The buckets to the first learner, none to the others.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
        for value in state.values():
            if is_sharded([value]):
                gathered(value)  # a collective call, whose result is the first learner's
        return []
    return write_buckets(state, put, size=size, whole=gathered)


def fetch_bucket(bucket: Bucket) -> Content:
    """The bytes of `bucket` in this machine's shared memory, read-only."""
    return ray.get(bucket.where[0])


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scales the gradients of `parameters` to a norm of `max_norm` at most; returns the norm before, the same in all
    learners.
    """
    if not is_sharded(parameters):
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # norm of the slices of all learners, and of the weights that each learner holds whole
    spread, own = (torch.zeros((), device=local(parameters[0]).device) for _ in range(2))
    for gradient in gradients:
        part = spread if is_sharded([gradient]) else own
        part += local(gradient).float().square().sum()
    distributed.all_reduce(spread)
    norm = (spread + own).sqrt()  # what each learner holds whole is alike in all, and counts once
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
    for gradient in gradients:
        local(gradient).mul_(factor)
    return float(norm)


@contextmanager
def at_hand(optimizer: torch.optim.Optimizer, is_offloaded: bool) -> Iterator[None]:
    """Within, the state of `optimizer` lies where its parameters do; outside, where it is offloaded, in main memory.
    What is computed is the same.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if value.ndim and not is_sharded([value]):  # the number of steps stays where it is
                state[name] = rejoined(value.to(local(parameter).device), parameter)
    try:
        yield
    finally:
        for state in optimizer.state.values() if is_offloaded else ():
            for name, value in state.items():
                if value.ndim:
                    state[name] = local(value).to("cpu")


def sliced_state(states: Mapping[int, Mapping[str, Any]], parameters: Sequence[nn.Parameter]) -> dict[int, Any]:
    """An optimiser's state, whole, by number of its parameter: cut as the parameters are."""
    return {
        number: {
            name: slice_like(value, parameters[number]) if value.shape == parameters[number].shape else value
            for name, value in state.items()
        }
        for number, state in states.items()
    }


def plain(value: Tensor) -> Tensor:
    """The whole of `value` as a state tree can hold it: numpy knows no bfloat16, and float32 holds it exactly."""
    whole = gathered(value)
    return whole.float() if whole.dtype == torch.bfloat16 else whole


def optimizer_tree(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of `optimizer`, whole, as a state tree; sharded, all learners call it together."""
    return {
        str(number): {name: plain(value) for name, value in state.items()}
        for number, state in optimizer.state_dict()["state"].items()
    }


def load_optimizer_tree(
    optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> None:
    """Restores what `optimizer_tree` returned into a fresh optimiser of `parameters`, cut as these are."""
    states = {  # copied: the tree may lie in memory that other learners read too, and Adam writes in place
        int(number): {name: torch.as_tensor(value).clone() for name, value in state.items()}
        for number, state in tree.items()
    }
    optimizer.load_state_dict(optimizer.state_dict() | {"state": sliced_state(states, parameters)})
