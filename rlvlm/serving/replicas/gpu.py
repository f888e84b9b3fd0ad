"""A replica's share of a GPU: which device it is, and that its memory stays within what Ray was told.

Ray's `num_gpus: 0.5` is bookkeeping alone, so a judge that takes more starves its neighbour. Here the share becomes a
limit of torch's allocator; a judge beyond it runs out of memory by itself and names the share.
"""

from dataclasses import dataclass

import ray

from rlvlm.core.errors import JudgeUnavailable

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """What torch holds on this process's GPU, in bytes."""

    peak: int
    """The most that was reserved since the process began."""
    total: int
    """Of the card."""

    def exceeds(self, share: float) -> bool:
        """Whether the peak lies above `share` of the card; no share is no limit."""
        return 0 < share < 1 and self.peak > share * self.total

    def __str__(self) -> str:
        return f"{self.peak / GIB:.2f} of {self.total / GIB:.2f} GiB"


def assigned_device(device: str) -> str:
    """What `auto` means inside Ray: the GPU that Ray assigned to this process, else the CPU.

    Ray leaves every GPU visible to a process that asked for none (ray#54868), so visibility decides nothing.
    """
    if device != "auto":
        return device
    if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def limit_share(device: str, share: float) -> None:
    """Lets torch reserve no more than `share` of the card's memory; a whole card or none sets no limit."""
    if device.startswith("cuda") and 0 < share < 1:
        import torch

        torch.cuda.set_per_process_memory_fraction(share)


def measured(device: str) -> GpuMemory | None:
    """The memory of this process; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return GpuMemory(peak=torch.cuda.max_memory_reserved(), total=torch.cuda.get_device_properties(0).total_memory)


def check_share(device: str, share: float) -> None:
    """Raises JudgeUnavailable where the loaded and once asked judge holds more than its share.

    The CUDA context of each process, some hundred MB, comes on top and is in no process's share.
    """
    memory = measured(device)
    if memory and memory.exceeds(share):
        raise JudgeUnavailable(
            f"the judge holds {memory}, its share is {share:g} of the card",
            f"raise --serve.num-gpus to {min(1.0, memory.peak / memory.total + 0.1):.1f}, or --judge.quantization nf4",
        )
