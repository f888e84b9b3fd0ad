from pathlib import Path

import pytest

from rlvlm.reports.task.turns import check_turn_task
from rlvlm.runs.recipes import recipe

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_the_example_of_the_docs_keeps_every_promise(tmp_path: Path) -> None:
    assert check_turn_task("press_button:TASK", tmp_path / "sheet.png", 2, 0) == 0
    assert (tmp_path / "sheet.png").stat().st_size > 1_000


def test_it_is_learned_by_a_policy_that_writes() -> None:
    config = recipe("press_button:TASK")
    assert config.algorithm == "ppo" and config.env.episode_steps == 4
    assert config.smoke().steps == 256
