"""JSON of model folders and runs that somebody else made: a damaged file is one clear error, and takes no memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peak_memory import peak_of

from rlvlm.algorithms.sft_folders import read_sft_manifest
from rlvlm.core.errors import RunError
from rlvlm.core.foreign import MAX_JSON_BYTES
from rlvlm.core.guests import guests
from rlvlm.judges.build import abilities_of
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.prompts import sentences_of
from rlvlm.runs.files.checkpoints import Checkpoint
from rlvlm.runs.files.folder import RunFolder
from rlvlm.runs.files.tables import JsonLines
from rlvlm.vlms.loading import check_shards, load_vlm
from rlvlm.vlms.lora import check_adapter

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a judge's abilities": ("abilities.json", lambda folder: abilities_of("pocket", str(folder))),
    "a chat model": ("config.json", lambda folder: load_vlm(JudgeConfig(backend="transformers", model=str(folder)))),
    "an adapter": ("adapter_config.json", check_adapter),
    "an index of weights": ("model.safetensors.index.json", check_shards),
    "a supervised start": ("sft.json", read_sft_manifest),
    "a wording": (
        "wording.json",
        lambda folder: sentences_of(JudgeConfig(score="rubric", wording=str(folder / "wording.json"))),
    ),
    "a checkpoint's state": ("run.json", lambda folder: Checkpoint(folder).state),
    "a run's summary": ("summary.json", lambda folder: RunFolder(folder, 1).summary()),
}
if "openvla" in guests():
    from rlvlm.plugins.openvla import config, loading

    READERS["an OpenVLA"] = ("config.json", loading._settings)
    READERS["its statistics"] = (
        "dataset_statistics.json",
        lambda folder: loading._statistics(folder, loading.CheckpointConfig(), config.OpenVLAConfig()),
    )


def make_pipe(file: Path) -> None:
    os.mkfifo(file)


def make_deep(file: Path) -> None:
    file.write_text('{"a":' * 100_000)


def make_huge(file: Path) -> None:
    with open(file, "wb") as stream:
        stream.truncate(MAX_JSON_BYTES + 2**30)


BY_TRANSFORMERS = ("a chat model", make_huge)
"""Reads a file whole, whatever its size."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "make"),
    [(name, make) for name in READERS for make in (make_pipe, make_deep, make_huge) if (name, make) != BY_TRANSFORMERS],
)
def test_a_damaged_file_is_one_clear_error(name, make, tmp_path):
    file, read = READERS[name]
    make(tmp_path / file)

    def refuse() -> None:
        with pytest.raises(RunError) as caught:
            read(tmp_path)
        assert caught.value.fix and str(tmp_path) in str(caught.value)

    assert peak_of(refuse) < 3 * MAX_JSON_BYTES


def test_a_damaged_line_names_its_file(tmp_path):
    for text in ('{"a": 1}\n{"a": \n', "[" * 100_000 + "\n"):
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(RunError, match=r"metrics\.jsonl is damaged"):
            JsonLines(tmp_path / "metrics.jsonl", "a").read()
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n{"a": ')  # a crash left half a line
    assert JsonLines(tmp_path / "metrics.jsonl", "a").read() == [{"a": 1}]
