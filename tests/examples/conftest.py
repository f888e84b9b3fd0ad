from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    """As where a user starts a run: the folder of the task, judge or policy of their own."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
