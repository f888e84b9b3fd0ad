import errno
import os
from pathlib import Path

import pytest

from rlvlm.runs.tables import CsvTable, JsonLines


@pytest.fixture
def table(tmp_path: Path) -> CsvTable:
    return CsvTable(tmp_path / "t.csv", ("step", "text"), "step")


def test_rows_are_lines_whatever_a_judge_writes(table: CsvTable) -> None:
    table.append([{"step": 1, "text": 'a "quote", a\nbreak and \u2028 another'}, {"step": 2, "text": None}])
    assert table.path.read_text() == 'step,text\n1,"a ""quote"", a\\nbreak and \u2028 another"\n2,\n'
    assert [row["step"] for row in table.read()] == ["1", "2"]
    whole = table.path.read_text()
    with pytest.raises(ValueError, match="colour"):  # an unknown column is refused, and nothing is written
        table.append([{"step": 1, "text": ""}, {"step": 2, "colour": "red"}])
    assert table.path.read_text() == whole
    table.write([{"step": True, "text": 1 / 3}])
    assert table.path.read_text() == "step,text\n1,0.333333\n"


def test_a_torn_tail_is_not_read_and_cut_takes_it_away(table: CsvTable) -> None:
    table.append([{"step": step, "text": "x"} for step in (1, 2, 3)])
    whole = table.path.read_bytes()
    table.path.write_bytes(whole + b"4,to")
    assert [row["step"] for row in table.read()] == ["1", "2", "3"]
    table.cut(2)
    assert table.path.read_text() == "step,text\n1,x\n2,x\n"
    table.cut(0)
    assert not table.path.exists()


def test_after_a_cut_the_file_equals_one_that_never_went_further(tmp_path: Path) -> None:
    straight = CsvTable(tmp_path / "a.csv", ("step", "text"), "step")
    returned = CsvTable(tmp_path / "b.csv", ("step", "text"), "step")
    rows = [{"step": step, "text": f'say "{step}"\nor, less'} for step in range(6)]
    straight.append(rows)
    returned.append(rows[:4])
    returned.cut(2)
    returned.append(rows[3:])
    assert straight.path.read_bytes() == returned.path.read_bytes()


def test_json_lines_are_cut_alike(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl", "env_steps")
    lines.append([{"env_steps": step, "x": 0.1 * step} for step in range(4)])
    whole = lines.path.read_bytes()
    lines.path.write_bytes(whole + b'{"env_st')
    assert len(lines.read()) == 4
    lines.cut(1)
    lines.append([{"env_steps": step, "x": 0.1 * step} for step in (2, 3)])
    assert lines.path.read_bytes() == whole
    with pytest.raises(ValueError, match="JSON"):
        lines.append([{"env_steps": 9, "x": float("nan")}])


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_a_table_as_it_was(table: CsvTable, monkeypatch: pytest.MonkeyPatch) -> None:
    table.append([{"step": 1, "text": "x"}])
    before = table.path.read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        table.append([{"step": 2, "text": "x"}])
    assert table.path.read_bytes() == before
