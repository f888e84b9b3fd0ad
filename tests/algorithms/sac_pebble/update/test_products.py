"""Whichever library multiplies, products keep float32's precision, and outside nothing is changed."""

import pytest
import torch

from rlvlm.algorithms.sac_pebble.update import products
from rlvlm.algorithms.sac_pebble.update.products import fast_products


def test_products_are_float32s() -> None:
    rows, columns = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    with fast_products():
        product = rows @ columns
    torch.testing.assert_close(product.double(), rows.double() @ columns.double(), rtol=1e-5, atol=1e-4)


CPUS = {
    "Zen 5": ({"cpu_name": "AMD EPYC 9755", "avx512_vp2intersect": True, "amx_tile": False}, "bf16"),
    "Zen 4": ({"cpu_name": "AMD EPYC 9654", "avx512_vp2intersect": False, "amx_tile": False}, "none"),
    "rounds inputs": ({"cpu_name": "AMD of a later day", "avx512_vp2intersect": True, "amx_tile": True}, "none"),
    "Intel": ({"cpu_name": "Intel(R) Xeon(R)", "avx512_vp2intersect": True, "amx_tile": False}, "none"),
    "ARM": ({"architecture": "aarch64"}, "none"),
}


@pytest.mark.parametrize("cpu", CPUS)
def test_only_cpus_that_gain_change_and_only_inside(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities, inside = CPUS[cpu]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    products._mkl_is_half_as_wide.cache_clear()
    try:
        with pytest.raises(ZeroDivisionError), fast_products():
            assert torch.backends.mkldnn.matmul.fp32_precision == inside
            raise ZeroDivisionError
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"
    finally:
        products._mkl_is_half_as_wide.cache_clear()
