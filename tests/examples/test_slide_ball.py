from pathlib import Path

import pytest

from rlvlm.envs.registry import make_env
from rlvlm.reports.task.check import check_task
from rlvlm.runs.recipes import recipe

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_the_example_of_the_docs_keeps_every_promise(tmp_path: Path) -> None:
    assert check_task("slide_ball:TASK", tmp_path / "sheet.png", num_episodes=2, seed=0) == 0
    assert (tmp_path / "sheet.png").stat().st_size > 1_000


def test_it_brings_its_recipe_stays_short_and_is_what_the_docs_show() -> None:
    config = recipe("slide_ball:TASK")
    assert (config.task, config.steps, config.env.episode_steps) == ("slide_ball:TASK", 5_000, 50)
    assert make_env(config.task, config.env, 0).goal == "put the red ball into the green ring"
    whole = (EXAMPLES / "slide_ball.py").read_text()
    assert whole in (EXAMPLES.parent / "docs" / "tasks.md").read_text()
    code = [line for line in whole.splitlines() if line.strip()]
    assert len(code) <= 60
