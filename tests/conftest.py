"""Fixtures that several rooms' tests share."""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_vlms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of random-weight chat VLMs of real architectures: `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl`."""
    from tiny_vlm import save_tiny_vlm

    root = tmp_path_factory.mktemp("tiny_vlms")
    return {family: save_tiny_vlm(root / family, family) for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}
