"""A large label store: seconds and memory to add, open and look up, and to keep an image:

    python benchmarks/label_store.py --answers 1000000

Opens it twice, each time in a new process: as a store without an index, and as one with it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import tyro

from rlvlm.core.judging import Score, Stamp, Status
from rlvlm.labels.images import ImageStore, image_digest
from rlvlm.labels.records import Question, answer_key
from rlvlm.labels.store import LabelStore, open_store

STAMP = Stamp(judge="none", revision="", prompt="none", decoding="")
BLOCK = 5_000


@dataclass(frozen=True, kw_only=True)
class Config:
    answers: int = 100_000
    lookups: int = 2_000
    folder: Path | None = None
    """Store to open, which this has made before; None makes one in a temporary folder."""
    child: bool = False
    """Opens `folder` and prints what it took."""


def question(number: int) -> Question:
    return Question(kind="score", goal="open the drawer", left=(f"{number:064x}",))


def fill(config: Config, folder: Path) -> float:
    """Microseconds an answer."""
    store, spent = LabelStore(folder), 0.0
    for begin in range(0, config.answers, BLOCK):
        answers = [
            (question(number), Score(status=Status.OK, value=number % 101 / 100, stamp=STAMP, text=f"{number}"))
            for number in range(begin, min(begin + BLOCK, config.answers))
        ]
        began = time.perf_counter()
        store.add_answers(answers)
        spent += time.perf_counter() - began
    return 1e6 * spent / config.answers


def look(config: Config, folder: Path) -> dict[str, float]:
    process = psutil.Process()
    before, began = process.memory_full_info().uss, time.perf_counter()
    store = open_store(folder)
    opened = time.perf_counter() - began
    keys = [answer_key(question(int(number)).id, STAMP) for number in
            np.random.default_rng(0).integers(0, config.answers, config.lookups)]  # fmt: skip
    began = time.perf_counter()
    assert all(store.find(key) is not None for key in keys)
    found = time.perf_counter() - began
    began = time.perf_counter()
    assert not any(store.find(answer_key(key, STAMP)) for key in keys)
    missed = time.perf_counter() - began
    return {
        "open, s": round(opened, 2),
        "memory, MB": round((process.memory_full_info().uss - before) / 1e6, 1),
        "look up what is there, us": round(1e6 * found / config.lookups),
        "look up what is not, us": round(1e6 * missed / config.lookups),
    }


def keep_images(folder: Path, count: int = 100) -> dict[str, float]:
    """Of a scene with shades and some noise, 300 pixels wide."""
    rng = np.random.default_rng(0)
    shade = np.linspace(0, 200, 300)
    scene = (np.add.outer(shade, shade)[..., None] / np.array([2, 3, 4])).astype(np.uint8)
    images = [
        scene + rng.integers(0, 4, scene.shape, np.uint8) * (rng.random((300, 300, 1)) < 0.2) for _ in range(count)
    ]
    named = [(image_digest(image), image.astype(np.uint8)) for image in images]
    began = time.process_time()
    ImageStore(folder).keep(named)
    spent = time.process_time() - began
    size = sum(file.stat().st_size for file in folder.rglob("*.png"))
    return {"keep an image, ms": round(1000 * spent / count, 2), "KiB": round(size / count / 1024, 1)}


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    if config.child:
        assert config.folder is not None
        print(json.dumps(look(config, config.folder)))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = config.folder or Path(place) / "store"
        if not folder.exists():
            print(f"add: {fill(config, folder):.0f} us an answer")
        print(keep_images(Path(place) / "images"))
        words = [sys.executable, __file__, "--child", "--folder", str(folder), "--answers", str(config.answers)]
        for what in ("the first time", "with its index"):
            print(what, subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip(), flush=True)
        print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
