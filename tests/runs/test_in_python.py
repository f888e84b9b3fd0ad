import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlvlm

PAGE = (Path(rlvlm.__file__).parents[1] / "docs" / "python.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]


def test_every_public_name_is_there_and_on_the_page() -> None:
    for name in rlvlm.PUBLIC:
        assert getattr(rlvlm, name).__name__ == name and f"`{name}" in PAGE
    with pytest.raises(AttributeError, match="public names: Clip"):
        assert rlvlm.no_such_name


def test_the_bare_import_is_light() -> None:
    code = "import sys, rlvlm; print({'torch', 'ray', 'numpy', 'gymnasium'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_the_example_has_a_dozen_lines_at_most() -> None:
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 12


@pytest.mark.ray
@pytest.mark.slow
def test_the_example_of_the_page_runs_as_written(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLE)
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2_000:]
    *_, label, rewards = done.stdout.strip().splitlines()
    assert label in ("left", "right", "tie", "None") and len(rewards.strip("[]").split()) == 2
