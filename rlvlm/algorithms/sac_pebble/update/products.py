"""Which library multiplies the matrices of an update. Used by the learner."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def fast_products() -> Iterator[None]:
    """Inside, float32 matrix products run in oneDNN on CPUs where MKL uses half of a core; elsewhere nothing changes.

    AMD's cores are 512 bits wide from Zen 5 on, and MKL's products for AMD 256. At 256 x 256 oneDNN is 2.1 times as
    fast there; products of a few rows are slower, so this is for updates, not for acting.

    torch gives products to oneDNN where it may round their inputs to bfloat16. oneDNN does so on CPUs with AMX alone,
    which are left out here: the results are float32's.
    """
    if not _mkl_is_half_as_wide():
        yield
        return
    products = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before


@cache
def _mkl_is_half_as_wide() -> bool:
    cpu = torch.cpu.get_capabilities()
    is_zen5 = cpu.get("cpu_name", "").startswith("AMD") and cpu.get("avx512_vp2intersect", False)  # Zen 4 lacks it
    return is_zen5 and not cpu.get("amx_tile", False)
