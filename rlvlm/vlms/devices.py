"""On which device a network computes, and how precisely: what `auto` means for judges, policies and learners alike."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rlvlm.core.errors import ModelUnavailable

logger = logging.getLogger(__name__)

_ASSIGNS = {
    "judge": "; a replica is given one by --serve.num-gpus",
    "policy": "; a learner of --algo.num-learners is given one by --algo.gpus-per-learner, a replica of "
    "--engine.num-replicas by --engine.num-gpus, a worker of rlvlm sft by --job.gpus-per-worker",
    "policy.openvla": "; a learner of --algo.num-learners is given one by --algo.gpus-per-learner",
    "policy.lerobot": "; a learner of --algo.num-learners is given one by --algo.gpus-per-learner",
}
"""Which setting makes Ray assign a GPU to the processes that compute a section's network outside of the run's own."""


_ALLOCATOR, _EXPANDABLE = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
_given: tuple[int | None, bool] | None = None
"""The GPU that Ray has given this process, as torch counts those that it sees, None for a CPU; and whether settings say
nothing against it. None: nothing was decided, as in a command without Ray."""


@contextmanager
def own_gpu(index: int | None) -> Iterator[None]:
    """While the context is open `auto` and `cuda` mean the GPU of that number here; None: `auto` means the CPU."""
    global _given  # noqa: PLW0603 - a process has one, and what loads a network knows of no run
    before, _given = _given, (index, False)
    try:
        yield
    finally:
        _given = before


def use_expandable_segments() -> None:
    """Has torch's allocator in this process grow its segments instead of adding others, unless the user has set it up.

    Passes of unlike sizes otherwise leave gaps in which nothing fits: 3.6 to 4.4 GiB of a policy of 3 billion. Called
    before CUDA is first used here. Processes that are started later inherit it; vLLM, whose sleep needs segments of its
    own, takes it back (`vlms.engines.vllm`).
    """
    if not {_ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ[_ALLOCATOR] = _EXPANDABLE


def use_own_segments() -> None:
    """Takes `use_expandable_segments` back."""
    if os.environ.get(_ALLOCATOR) == _EXPANDABLE:
        del os.environ[_ALLOCATOR]


def follow_ray(gpus: Sequence[str]) -> None:
    """Has every network of this process, one of Ray's workers, lie on the GPU that Ray gave it, or on the CPU: a
    `device` setting says where the run's own process computes. Where that was decided already, nothing changes.

    Args:
        gpus: ids of the GPUs that Ray has given it.
    """
    global _given  # noqa: PLW0603 - as above
    if gpus:
        use_expandable_segments()
    if _given is None:
        _given = (torch.device(torch_device(gpus[0])).index if gpus else None), True


def pick_device(device: str, section: str) -> torch.device:
    """The device that a `device` setting means.

    In a run's own process both `auto` and `cuda` mean the GPU that Ray has set aside for it (`own_gpu`), and in a
    worker of Ray's every setting means the one that it was given (`follow_ray`). Elsewhere `auto` takes a GPU only
    where one was assigned through CUDA_VISIBLE_DEVICES, as SLURM does: a GPU that is merely visible may be somebody
    else's. Inside Ray Serve the deployment resolves the setting itself, by Ray's bookkeeping.

    Args:
        device: auto, cpu, cuda or cuda:N.
        section: where the setting stands on the command line, e.g. `judge`.

    Raises:
        ModelUnavailable: a GPU is named and torch sees none, or the name is no device.
    """
    has_cuda = torch.cuda.is_available()
    if _given is not None:
        index, is_all = _given
        if has_cuda and index is not None and (is_all or device in ("auto", "cuda")):
            return torch.device("cuda", index)
        if device == "auto" or (is_all and index is None):
            return torch.device("cpu")
    if device == "auto":
        # Ray and SLURM both say so by this variable; -1 is how people hide all GPUs
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
        raise ModelUnavailable(
            f"the {section} wants {device}, which torch does not see here",
            f"use --{section}.device cpu, or a CUDA build of torch where there is a GPU{_ASSIGNS.get(section, '')}",
        )
    return chosen


@contextmanager
def repeatable(device: torch.device, is_asked_for: bool) -> Iterator[None]:
    """Has torch compute the same gradient to the bit each time: as it does on a CPU, and on a GPU where `is_asked_for`.

    Attention in 16 bits otherwise sums the gradient of its queries in whatever order its blocks finish, so that no run
    repeats and none resumes exactly. The forward pass belongs inside too: recomputed activations must come from the
    kernels that the first ones came from. Sampling needs nothing of the kind, and calls what has no such form.

    Raises:
        RuntimeError: torch has no such form of an operation on a GPU; it names it.
    """
    if device.type != "cuda" or not is_asked_for:
        yield
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch insists on it; what RLlib writes here it does not read
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def free_gpu() -> None:
    """Gives back what torch holds of this process's GPU without using it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may see, in torch's order; none where nothing says so, and it sees them all."""
    return [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]


def gpu_id(device: torch.device) -> str:
    """The id of a GPU that torch calls `device` here, as CUDA_VISIBLE_DEVICES has it; empty for a CPU."""
    if device.type != "cuda":
        return ""
    seen, number = visible_gpus(), device.index or 0
    return seen[number] if seen else str(number)


def torch_device(gpu: str) -> str:
    """Torch's name of the GPU of that id here; the CPU for none."""
    seen = visible_gpus()
    # Ray counts GPUs by the node, torch by what this process may see
    return f"cuda:{seen.index(gpu) if gpu in seen else int(gpu)}" if gpu else "cpu"


def place(inputs: Any, model: Any) -> dict[str, torch.Tensor]:
    """The tensors of `inputs` by name, on the model's device and in its precision; numbers of tokens stay whole."""
    return {
        name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in inputs.items()
    }


def dtype_name(dtype: torch.dtype) -> str:
    """As it stands in stamps, e.g. `float32`."""
    return str(dtype).removeprefix("torch.")


def gpu_memory() -> int | None:
    """Memory of the smallest GPU that torch sees here, in bytes; None where it sees none."""
    if not torch.cuda.is_available():
        return None
    return min(torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count()))


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The precision that `VLMConfig.dtype` means: `auto` is bfloat16 on a GPU, float32 elsewhere."""
    # most CPUs compute bfloat16 more slowly than float32, and have the memory
    named = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    return named.get(dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)
