import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlvlm
from rlvlm.algorithms.policy_gradient.player import policy_file
from rlvlm.runs.build import make_policy
from tests.runs.test_acting import run_with

PAGE = (Path(rlvlm.__file__).parents[1] / "docs" / "python.md").read_text()
EXAMPLE, POLICY_EXAMPLE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_every_public_name_is_there_and_on_the_page() -> None:
    for name in rlvlm.PUBLIC:
        assert getattr(rlvlm, name).__name__ == name and f"`{name}" in PAGE
    with pytest.raises(AttributeError, match="public names: Clip"):
        assert rlvlm.no_such_name


def test_the_bare_import_is_light() -> None:
    code = "import sys, rlvlm; print({'torch', 'ray', 'numpy', 'gymnasium'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_tab_shows_the_public_names_and_nothing_else() -> None:
    assert sorted(dir(rlvlm)) == sorted([*rlvlm.PUBLIC, "__version__"])


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


@pytest.mark.slow
def test_the_example_of_a_trained_policy_runs_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = rlvlm.override(rlvlm.recipe("number_line"), {"out": tmp_path / "run"})
    env = rlvlm.make_env("number_line", config.env, seed=0)
    run = run_with(config, policy_file(make_policy(config.policy, env), None, None))
    exec(POLICY_EXAMPLE.replace("runs/number_line/<time>", str(run.path)), {})  # noqa: S102 - the page's own lines
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 10 and all(line.split()[-1] in ("True", "False") for line in lines)
