"""The commands in the docs: every one is understood by the command line of today."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro

import rlvlm
from rlvlm.cli import run_command
from rlvlm.core.errors import RunError
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.settings.tree import flat

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PLACEHOLDERS = {"TASK": "number_line", "my_file:TASK": "slide_ball:TASK"}


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of ours in the blocks of code of a page; `rlvlm run` where it is a run."""
    text = page.read_text().replace("\\\n", " ")
    fenced = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    (?! )(.*)$", rest, re.MULTILINE)
    for line in [line for block in fenced for line in block.splitlines()] + indented:
        for part in line.split("#")[0].split(";"):
            match = re.search(r"(?:^|\s)(?:(rlvlm) (?!run\b)|(?:python -m rlvlm\.run|rlvlm run) )(.*)", part)
            if match and match[2].strip():  # `git clone ... rlvlm` is no command of ours
                words = [word.removesuffix("...") or word for word in shlex.split(match[2])]
                words = [PLACEHOLDERS.get(word, word) for word in words]
                yield words if match[1] else ["run", *words]


class ParsedError(Exception):
    """The command line was understood, and nothing more is to happen."""


@pytest.mark.slow  # a fifth of a second for each run's options
@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=lambda page: page.name)
def test_the_command_line_understands(page, monkeypatch, capsys):
    parse = tyro.cli

    def parse_alone(*words: Any, **settings: Any) -> None:
        parse(*words, **settings)
        raise ParsedError

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    misunderstood = []
    for words in commands(page):
        command, run_options = words, []
        if "--" in words:  # a job's run
            place = words.index("--")
            command, run_options = words[:place], ["run", words[1], *words[place + 1 :]]
        for one in filter(None, (command, run_options)):
            if one == ["data"]:  # its forms are named in a sentence
                continue
            try:
                if one[0] == "run":
                    parse_run(one[1:], "rlvlm run")
                else:
                    with monkeypatch.context() as patch:
                        patch.setattr(tyro, "cli", parse_alone)
                        run_command(one)
                        misunderstood.append(f"{shlex.join(one)}: did something")
            except ParsedError:
                pass
            except (RunError, SystemExit) as error:
                if getattr(error, "code", 1) != 0:
                    misunderstood.append(f"{shlex.join(one)}: {error} {capsys.readouterr().err[:600]}")
    assert not misunderstood, "\n".join(misunderstood)


def test_a_report_is_of_the_folder_that_its_sweep_writes():
    lost, found = [], 0
    for page in PAGES:
        folder = ""
        for words in commands(page):
            if words[0] == "sweep" and "--plan" not in words:
                folder = f"runs/sweeps/{Path(words[1]).stem}{'-smoke' if '--smoke' in words else ''}"
            if words[0] in ("report", "resume") and words[1].startswith("runs/sweeps/"):
                found += 1
                lost += [f"{page.name}: {words[1]}, not {folder}"] if words[1] != folder else []
    assert found > 2 and not lost


@pytest.mark.parametrize("name", ["troubleshooting.md", "bring.md"])
def test_options_in_tables_exist(name):
    tasks = ("drawer_open", "number_line", "push_block", "empty_random_5x5", "pick_place_can")
    known = {setting.replace("_", "-") for task in tasks for setting in flat(rlvlm.recipe(task))}
    known |= {"steps", "plan", "print-config", "help-all", "trust", "env.NAME"}  # of the command itself
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs" / name).read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`]*)`", text)
    options = {option for span in spans for option in re.findall(r"(?<!\S)--([\w.-]+)", span)}
    assert len(options) > 5 and not {option for option in options if option.replace(".no-", ".") not in known}
