"""Device and precision of a network: the meaning of `auto` for judges, policies and learners alike."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rlvlm.core.errors import ModelUnavailable

logger = logging.getLogger(__name__)

_ASSIGNS = {
    "judge": "; a replica is given one by --serve.num-gpus",
    "policy": "; a learner of --algo.num-learners is given one by --algo.gpus-per-learner, a replica of "
    "--engine.num-replicas by --engine.num-gpus, a worker of rlvlm sft by --job.gpus-per-worker",
}
"""By section of the command line, the setting that makes Ray assign a GPU to processes beside the run's own."""
_LEARNERS = "; a learner of --algo.num-learners is given one by --algo.gpus-per-learner"
"""The same for checkpoints, whose sections are within `policy`, e.g. `policy.lerobot`."""


_ALLOCATOR, _EXPANDABLE = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
_given: tuple[int | None, bool] | None = None
"""GPU that Ray assigned to this process, as torch's index of visible ones, None for a CPU; and whether it applies
unless a setting contradicts. None: nothing was decided, as in a command without Ray."""


@contextmanager
def own_gpu(index: int | None) -> Iterator[None]:
    """Makes `auto` and `cuda` mean the GPU of that index while the context is open; None: `auto` means the CPU."""
    global _given  # noqa: PLW0603 - a process has one, and what loads a network knows of no run
    before, _given = _given, (index, False)
    try:
        yield
    finally:
        _given = before


def use_expandable_segments() -> None:
    """Makes torch's allocator in this process grow its segments rather than add others, unless the user configured it.

    Otherwise passes of different sizes leave unusable gaps: 3.6 to 4.4 GiB for a policy of 3 billion. Must be called
    before CUDA is first used here. Child processes inherit it; vLLM, whose sleep needs segments of its own, reverts it
    (`vlms.engines.vllm`).
    """
    if not {_ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ[_ALLOCATOR] = _EXPANDABLE


def use_own_segments() -> None:
    """Reverts `use_expandable_segments`."""
    if os.environ.get(_ALLOCATOR) == _EXPANDABLE:
        del os.environ[_ALLOCATOR]


def follow_ray(gpus: Sequence[str]) -> None:
    """Places every network of this process, a Ray worker, on the GPU that Ray assigned to it, or on the CPU: `device`
    settings concern the run's own process. Does nothing if that was decided already.

    Args:
        gpus: ids of the GPUs that Ray assigned to it.
    """
    global _given  # noqa: PLW0603 - as above
    if gpus:
        use_expandable_segments()
    if _given is None:
        _given = (torch.device(torch_device(gpus[0])).index if gpus else None), True


def pick_device(device: str, section: str) -> torch.device:
    """Returns the device for a `device` setting.

    In a run's own process both `auto` and `cuda` mean the GPU that Ray reserved for it (`own_gpu`), and in a Ray worker
    every setting means the GPU assigned to it (`follow_ray`). Elsewhere `auto` takes a GPU only if one was assigned
    through CUDA_VISIBLE_DEVICES, as SLURM does: a GPU that is merely visible may be another user's. Inside Ray Serve
    the deployment resolves the setting itself, by Ray's bookkeeping.

    Args:
        device: auto, cpu, cuda or cuda:N.
        section: prefix of the setting on the command line, e.g. `judge`.

    Raises:
        ModelUnavailable: a GPU is named but torch sees none, or the name is not a device.
    """
    has_cuda = torch.cuda.is_available()
    if _given is not None:
        index, is_all = _given
        if has_cuda and index is not None and (is_all or device in ("auto", "cuda")):
            return torch.device("cuda", index)
        if device == "auto" or (is_all and index is None):
            return torch.device("cpu")
    if device == "auto":
        # Ray and SLURM assign GPUs through this variable; people hide all GPUs by -1
        is_assigned = os.environ.get("CUDA_VISIBLE_DEVICES", "") not in ("", "-1")
        if has_cuda and not is_assigned:
            logger.warning("a GPU is visible but not assigned to this process; --%s.device cuda takes it", section)
        return torch.device("cuda" if has_cuda and is_assigned else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ModelUnavailable(
            f"{device!r} is no device", f"use --{section}.device auto, cpu, cuda or cuda:0"
        ) from error
    if chosen.type == "cuda" and not (has_cuda and (chosen.index or 0) < torch.cuda.device_count()):
        assigns = _ASSIGNS.get(section, _LEARNERS if "." in section else "")
        raise ModelUnavailable(
            f"the {section} wants {device}, which torch does not see here",
            f"use --{section}.device cpu, or a CUDA build of torch where there is a GPU{assigns}",
        )
    return chosen


@contextmanager
def gradient_settings(device: torch.device, is_deterministic: bool) -> Iterator[None]:
    """Sets up torch for a forward and backward pass in this thread.

    On a CPU, numbers too small for full precision (below 1e-38 in float32) count as 0: arithmetic with them is many
    times slower, and in the backward pass of attention they are common enough to double the time of an update. Outside
    of passes they count as they are, for simulators and others to compute what they always do. Of several threads of
    torch only the calling one is set.

    On a GPU, and where `is_deterministic`, gradients are the same to the bit each time, as they are on a CPU anyway.
    Attention in 16 bits otherwise sums the gradient of its queries in whatever order its blocks finish, so that no run
    repeats and none resumes exactly. The forward pass belongs inside too: recomputed activations must come from the
    kernels that the first ones came from. Sampling needs nothing of the kind, and calls what has no such form.

    Raises:
        RuntimeError: an operation has no deterministic form on a GPU; the message names it.
    """
    if device.type == "cuda" and is_deterministic:
        # torch requires it; RLlib's own setting of it has no effect here
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        switch = torch.use_deterministic_algorithms
    elif device.type == "cpu":
        switch = torch.set_flush_denormal
    else:
        yield
        return
    switch(True)
    try:
        yield
    finally:
        switch(False)


def free_gpu() -> None:
    """Releases GPU memory that torch reserved in this process without using it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def visible_gpus() -> list[str]:
    """Returns the ids of the GPUs visible to this process, in torch's order; empty if unrestricted."""
    return [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]


def gpu_id(device: torch.device) -> str:
    """Returns the id of torch's GPU `device`, as in CUDA_VISIBLE_DEVICES; empty for a CPU."""
    if device.type != "cuda":
        return ""
    seen, number = visible_gpus(), device.index or 0
    return seen[number] if seen else str(number)


def torch_device(gpu: str) -> str:
    """Returns torch's name of the GPU with that id; the CPU if empty."""
    seen = visible_gpus()
    # Ray counts GPUs by node, torch by visibility to this process
    return f"cuda:{seen.index(gpu) if gpu in seen else int(gpu)}" if gpu else "cpu"


def place(inputs: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of `inputs` by name, on the model's device and in its precision; token ids stay integers."""
    return {
        name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in inputs.items()
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name used in stamps, e.g. `float32`."""
    return str(dtype).removeprefix("torch.")


def gpu_memory() -> int | None:
    """Returns the memory of the smallest GPU visible to torch, bytes; None if there is none."""
    if not torch.cuda.is_available():
        return None
    return min(torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count()))


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Returns the precision for `VLMConfig.dtype`: `auto` is bfloat16 on a GPU, float32 elsewhere."""
    # most CPUs are slower in bfloat16 than in float32, and have the memory
    named = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    return named.get(dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)
