"""Files that claim more than they hold, or hold more than they claim."""

import json
import os
import tracemalloc
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from malicious_files import npy_header, npz

from rlvlm.core.foreign import open_regular, read_arrays, read_json
from rlvlm.demonstrations.folder import create_folder, open_folder
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.demonstrations.tables import read_table

COUNT = 100_000_000
ZEROS = npy_header("{'descr': '|u1', 'fortran_order': False, 'shape': (100000000,), }\n")
TERABYTE = npy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (137438953472,), }\n", bytes(64))
PICKLE = npy_header("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", bytes(64))


def lying(data: bytes, says: int) -> bytes:
    """A zip whose only member says that it has `says` bytes."""
    copy = bytearray(data)
    for mark, place in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = copy.index(mark) + place
        copy[at : at + 4] = says.to_bytes(4, "little")
    return bytes(copy)


def bombs() -> dict[str, bytes]:
    bomb = npz({"a.npy": ZEROS + bytes(COUNT)}, zipfile.ZIP_DEFLATED)
    return {
        "bomb": bomb,
        "small-bomb": lying(bomb, len(ZEROS) + 100),
        "terabyte": npz({"a.npy": TERABYTE}, zipfile.ZIP_DEFLATED),
        "pickle": npz({"a.npy": PICKLE}),
        "letter": npz({"a.npy": b"hello"}),
    }


@pytest.mark.slow
def test_arrays_are_read_and_those_that_claim_too_much_are_refused_in_little_memory(tmp_path):
    held = {"a": np.arange(12.0).reshape(3, 4), "b": np.array(["x", "yy"]), "c": np.zeros((0, 3), np.int64)}
    np.savez_compressed(tmp_path / "good.npz", allow_pickle=False, **held)
    found = read_arrays(tmp_path / "good.npz", is_compressed=True)
    assert found.keys() == held.keys() and all(np.array_equal(found[name], held[name]) for name in held)
    with pytest.raises(ValueError, match="compressed, which ours are not"):
        read_arrays(tmp_path / "good.npz", is_compressed=False)
    made = bombs()
    folder = create_folder(tmp_path / "d", "push_block", "chunks")
    about = {"task": "push_block", "kind": "chunks", "seed": 0, "player": "x", "goal": "", "env_return": 0.0}
    for name in ("good", *made):
        folder.add(EpisodeRecord(id=name, success=True, terminated=True, arrays=held, **about))
    for name, data in made.items():
        (tmp_path / "d" / "arrays" / f"{name}.npz").write_bytes(data)
    tracemalloc.start()
    for name in made:
        with pytest.raises((ValueError, zipfile.BadZipFile), match="claims to hold|does not fit|magic string|CRC"):
            read_arrays(tmp_path / "d" / "arrays" / f"{name}.npz", is_compressed=True)
    opened = open_folder(tmp_path / "d")
    assert [record.id for record in opened.episodes()] == ["good"] and opened.num_damaged == len(made)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


@pytest.mark.slow
def test_a_table_that_claims_more_rows_than_its_file_may_hold_is_refused(tmp_path):
    rows = pa.table({"episode_index": pa.array(np.zeros(9_000_000, np.int8))})
    pq.write_table(rows, tmp_path / "many.parquet")
    with pytest.raises(ValueError, match="claims to hold"):
        read_table(tmp_path / "many.parquet")


def test_json_of_others_is_bounded_in_size_and_depth(tmp_path):
    files = (
        ("deep", "[" * 100_000, "too deeply"),
        ("long", json.dumps("x" * 100_000), "more than"),
        ("digits", f"[{10**400}]", "a number of 401 digits"),
    )
    for name, text, reason in files:
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=reason):
            read_json(tmp_path / name, 100_000)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "pipe")
