"""A large label store beside SQLite and Arrow: time to add, open and look up, memory, and to keep an image:

    python benchmarks/label_store.py --answers 1000000

ours: segments of JSON lines, and an index on disk; opened twice, without an index and with it.
sqlite: the same lines in one table, the 32 bytes of the key its primary key, WAL, on disk after each block.
arrow: the same lines in one IPC file, mapped into memory, sorted by key; a block that is added later would have to be
    written as a file of its own, or all of it anew, so its time is that of the first writing.

Blocks of 5,000 answers. Adding is time of the processor, without waiting for the disk, and holds the making of lines;
each way is opened and asked in a new process, which parses what it finds.
"""

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import pyarrow as pa
import tyro

from rlvlm.core.judging import Score, Stamp, Status
from rlvlm.labels.images import ImageStore, image_digest
from rlvlm.labels.records import Answer, Question, StoredAnswer, answer_key, from_record, to_record
from rlvlm.labels.segments import decode_line, encode_line
from rlvlm.labels.store import LabelStore, open_store

STAMP = Stamp(judge="none", revision="", prompt="none", decoding="")
BLOCK = 5_000
Find = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Config:
    answers: int = 100_000
    lookups: int = 2_000
    folder: Path | None = None
    """Store to open, which this has made before; None makes one in a temporary folder."""
    child: Literal["", "ours", "sqlite", "arrow"] = ""
    """Opens `folder` in this way and prints what it took."""


def question(number: int) -> Question:
    return Question(kind="score", goal="open the drawer", left=(f"{number:064x}",))


def blocks(config: Config) -> Iterator[list[tuple[Question, Answer]]]:
    for begin in range(0, config.answers, BLOCK):
        yield [
            (question(number), Score(status=Status.OK, value=number % 101 / 100, stamp=STAMP, text=f"{number}"))
            for number in range(begin, min(begin + BLOCK, config.answers))
        ]


def lines_of(block: list[tuple[Question, Answer]]) -> list[tuple[bytes, bytes]]:
    """Key and line of each answer, as our store makes them."""
    found, now = [], time.time()
    for asked, answer in block:
        key = answer_key(asked.id, STAMP)
        record = to_record(StoredAnswer(key=key, question=asked, answer=answer, when=now))
        found.append((bytes.fromhex(key), encode_line(record)))
    return found


def fill_ours(config: Config, folder: Path) -> None:
    store = LabelStore(folder)
    for block in blocks(config):
        store.add_answers(block)


def fill_sqlite(config: Config, folder: Path) -> None:
    folder.mkdir(parents=True)
    base = sqlite3.connect(folder / "labels.db")
    base.execute("pragma journal_mode=wal")
    base.execute("pragma synchronous=full")  # as ours: an answer that was added survives a power cut
    base.execute("create table answers (key blob primary key, line blob) without rowid")
    for block in blocks(config):
        with base:
            base.executemany("insert or ignore into answers values (?, ?)", lines_of(block))
    base.close()


def fill_arrow(config: Config, folder: Path) -> None:
    folder.mkdir(parents=True)
    parts = []
    for block in blocks(config):
        keys, lines = zip(*lines_of(block), strict=True)
        parts.append(pa.table({"key": pa.array(keys, pa.binary(32)), "line": pa.array(lines, pa.large_binary())}))
    table = pa.concat_tables(parts).sort_by("key").combine_chunks()
    with pa.OSFile(str(folder / "labels.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def open_ours(folder: Path) -> Find:
    return open_store(folder).find


def open_sqlite(folder: Path) -> Find:
    base = sqlite3.connect(folder / "labels.db")

    def find(key: str) -> object:
        row = base.execute("select line from answers where key = ?", (bytes.fromhex(key),)).fetchone()
        return row and from_record(decode_line(row[0]))

    return find


def open_arrow(folder: Path) -> Find:
    batch = pa.ipc.open_file(pa.memory_map(str(folder / "labels.arrow"))).get_batch(0)
    # by the first eight bytes, in the order of the whole keys
    keys, lines = np.frombuffer(batch["key"].buffers()[1], ">u8")[::4], batch["line"]

    def find(key: str) -> object:
        name = bytes.fromhex(key)
        first = int(np.searchsorted(keys, int.from_bytes(name[:8], "big")))
        is_there = first < len(keys) and batch["key"][first].as_py() == name
        return from_record(decode_line(lines[first].as_py())) if is_there else None

    return find


FILL = {"ours": fill_ours, "sqlite": fill_sqlite, "arrow": fill_arrow}
OPEN = {"ours": open_ours, "sqlite": open_sqlite, "arrow": open_arrow}


def look(config: Config, folder: Path) -> dict[str, float]:
    process = psutil.Process()
    before, began = process.memory_full_info().uss, time.process_time()
    find = OPEN[config.child](folder)
    opened = time.process_time() - began
    keys = [answer_key(question(int(number)).id, STAMP) for number in
            np.random.default_rng(0).integers(0, config.answers, config.lookups)]  # fmt: skip
    others = [answer_key(key, STAMP) for key in keys]
    began = time.process_time()
    assert all(find(key) is not None for key in keys)
    found = time.process_time() - began
    began = time.process_time()
    assert not any(find(key) for key in others)
    missed = time.process_time() - began
    return {
        "open, s": round(opened, 3),
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


def opened(config: Config, way: str, folder: Path) -> str:
    words = ["--child", way, "--folder", str(folder), "--answers", str(config.answers)]
    return subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    if config.child:
        assert config.folder is not None
        print(json.dumps(look(config, config.folder)))
        return
    with tempfile.TemporaryDirectory() as place:
        for way in FILL if config.folder is None else ["ours"]:
            folder = config.folder or Path(place) / way
            if not folder.exists():
                began = time.process_time()
                FILL[way](config, folder)
                print(f"{way}: add {1e6 * (time.process_time() - began) / config.answers:.0f} us an answer", flush=True)
            for what in ("the first time", "with its index") if way == "ours" else ("",):
                print(way, what, opened(config, way, folder), flush=True)
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            print(f"{way}: {size / 1e6:.0f} MB on disk", flush=True)
        print(keep_images(Path(place) / "images"))
        print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
