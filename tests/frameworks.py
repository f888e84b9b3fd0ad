"""What the tests of adapters share: docs/in_your_framework.md, run in the environment of each framework."""

import os
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from http_edge import Edge

from rlvlm.core.judging import Score, Status
from rlvlm.testing import FakeJudge

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "in_your_framework.md"


class Faulty(FakeJudge):
    """Sees brightness, notes how many images each clip had, gives some answers of a call another status, or raises."""

    def __init__(self, *statuses: Status, error: Exception | None = None) -> None:
        super().__init__()
        self.statuses, self.error, self.lengths = statuses, error, []

    def score(self, clips):
        if self.error:
            raise self.error
        self.lengths += [len(clip.frames) for clip in clips]
        scores = super().score(clips)
        for index, status in enumerate(self.statuses[: len(scores)]):
            if status is not Status.OK:
                scores[index] = Score(status=status, value=None, stamp=self.stamp)
        return scores


def needs(name: str) -> pytest.MarkDecorator:
    """A mark of tests that need an environment of `environments/`."""
    script = "environments/" + ("lerobot.sh" if name == "lerobot" else f"frameworks.sh {name}")
    return pytest.mark.skipif(not python_of(name).exists(), reason=f"needs the environment of {name}: {script}")


def python_of(name: str) -> Path:
    return Path(os.environ.get("ENVS", ROOT / ".envs")) / name / "bin" / "python"


def snippet(heading: str, language: str = "python") -> str:
    """What stands in a language under a heading of the page, as one program."""
    section = re.split(r"^#+ ", PAGE.read_text().partition(f" {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE))


@contextmanager
def served(folder: Path, **config):
    """A judge of brightness at a port; yields its address and a home with its token."""
    edge = Edge(folder / "edge", **config)
    home = folder / "home" / ".rlvlm"
    home.mkdir(parents=True)
    (home / "token").write_text(edge.token)
    (home / "token").chmod(0o600)
    with edge.listening() as url:
        yield url, home.parent


def tiny_model(folder: Path) -> None:
    """Makes `my_model`, a random language model of a few signs, in TRL's environment."""
    make = [python_of("trl"), ROOT / "tests" / "tiny_signs.py", folder / "my_model"]
    subprocess.run(make, check=True, capture_output=True)


def run(name: str, program: str, folder: Path) -> str:
    """What a program prints in the environment of a framework, with `http://127.0.0.1:8123` being a judge's server."""
    with served(folder) as (url, home):
        file = folder / "program.py"
        file.write_text(program.replace("http://127.0.0.1:8123", url))
        environment = {**os.environ, "HOME": str(home), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([python_of(name), file], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-5_000:]
    return done.stdout
