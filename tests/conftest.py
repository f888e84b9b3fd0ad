"""Fixtures that several rooms' tests share."""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small matrices: a second thread costs more than it gives

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_vlms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of random-weight chat VLMs of real architectures: `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl`."""
    from tiny_vlm import save_tiny_vlm

    root = tmp_path_factory.mktemp("tiny_vlms")
    return {family: save_tiny_vlm(root / family, family) for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A real Ray of this machine with two CPUs, for one file: the next may want another."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()
