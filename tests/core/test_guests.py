"""Guests are found where they lie, add what they say, and cost nothing else where one is broken or was taken out."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlvlm.cli import main
from rlvlm.core import guests
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.recordings import Recordings, find_form
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig, backends
from rlvlm.preferences.queries import STRATEGIES, find_strategy
from rlvlm.preferences.teachers import build_teacher
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.testing import check_judge

COMMAND = """
from rlvlm.core.guests import Command, Guest
GUEST = Guest(about="greets", commands={{
    "greet": Command(call="{name}.commands:greet", text="NAME   say hello"),
    "labels count": Command(call="{name}.commands:count", text="STORE   count labels"),
    {taken!r}: Command(call="{name}.commands:greet", text="NAME   replaces ours"),
}})
"""
CODE = """
def greet(words, prog):
    print(prog, "says hello to", *words)
    return 0
def count(words, prog):
    print(prog, "counts", *words)
    return 0
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with an entry point, as pip would."""

    def write(name: str, guest: str, code: str = CODE) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "guest.py").write_text(guest)
        (tmp_path / name / "commands.py").write_text(code)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[rlvlm.plugins]\n{name} = {name}.guest:GUEST\n")
        guests.guests.cache_clear()
        backends.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield write  # pyright: ignore[reportReturnType]
    guests.guests.cache_clear()
    backends.cache_clear()
    for name in [name for name in sys.modules if name.startswith("guest_in_test")]:
        del sys.modules[name]


def test_an_installed_package_adds_a_command_and_a_form_of_another(install, capsys, caplog):
    install("guest_in_test_a", COMMAND.format(name="guest_in_test_a", taken="run"))
    assert main(["greet", "Ann"]) == 0 and capsys.readouterr().out == "rlvlm greet says hello to Ann\n"
    assert main(["labels", "count", "x"]) == 0 and capsys.readouterr().out == "rlvlm labels count counts x\n"
    assert main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "rlvlm greet NAME say hello" in text and "| count label stores" in text and "replaces ours" not in text
    assert main(["labels", "--help"]) == 0 and "count labels" in capsys.readouterr().out
    assert "commands run of the guest guest_in_test_a is left out: the name is taken" in caplog.text


def test_a_judge_with_a_command_of_its_own_is_two_files_as_contributing_says(install, tmp_path, capsys):
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    guest, judge = re.findall(r"```python\n(from rlvlm\.core\.guests.*?|import sys.*?)```", page, re.DOTALL)
    name = "guest_in_test_bright"
    install(name, guest.replace("bright.judge", f"{name}.commands"), judge)
    files = [tmp_path / f"{shade}.png" for shade in (51, 255)]
    for file in files:
        Image.new("RGB", (4, 4), (int(file.stem),) * 3).save(file)
    assert main(["brightness", *map(str, files)]) == 0 and capsys.readouterr().out == "[0.2 1. ]\n"
    assert main(["brightness", "nowhere.png"]) == 2 and "name image files" in capsys.readouterr().err
    check_judge(build_judge(JudgeConfig(backend="bright")))
    with pytest.raises(ValueError, match="bright, or my_file:FUNCTION, got 'brihgt'; did you mean bright"):
        JudgeConfig(backend="brihgt")


OBJECTS = """
from rlvlm.core.guests import Guest
GUEST = Guest(about="names", objects={{
    "reward.teacher": {{"patient": "{name}.commands:Patient", "oracle": "{name}.commands:Patient"}},
    "feedback.sampling": {{"nearest": "{name}.commands:nearest"}},
}})
"""
TEACHER = """
from rlvlm.preferences.queries import query_strategy
from rlvlm.preferences.teachers import Teacher
class Patient(Teacher):
    def answer(self, questions):
        return []
@query_strategy("nearest of a guest")
def nearest(candidates, count):
    return range(count)
"""


def test_a_guests_short_name_stands_for_an_object_of_its_own(install):
    install("guest_in_test_d", OBJECTS.format(name="guest_in_test_d"), TEACHER)
    assert StepRewardConfig(teacher="patient").teacher == "patient"
    with pytest.raises(ValueError, match="did you mean patient"):
        StepRewardConfig(teacher="patiant")
    patient = guests.load("guest_in_test_d.commands:Patient")
    about: dict[str, Any] = {"judge": None, "frames": None, "goal": "open it", "seed": 0}
    assert isinstance(build_teacher("patient", **about), patient)
    assert not isinstance(build_teacher("oracle", **about), patient), "a name that ships means what it did"
    assert find_strategy("nearest").__name__ == "nearest"
    STRATEGIES.pop("nearest of a guest")


FORMAT = """
from rlvlm.core.guests import DataFormat, Guest
GUEST = Guest(about="reads arrays", formats={{
    "arrays": DataFormat(is_here="{name}.commands:is_here", read="{name}.commands:read"),
}})
"""
READER = """
import numpy as np
from rlvlm.demonstrations.trajectory import RobotTrajectory
def is_here(path):
    return path.suffix == ".npy"
def read(path, camera):
    frames = np.load(path)
    none = np.zeros((len(frames), 0), np.float32)
    yield RobotTrajectory(name="only", file=path, instruction="open it", actions=none, proprio=none,
                          look=lambda steps: frames[steps][:, None], digest="x")
"""


def test_recorded_data_of_a_guests_format_are_found_and_read(install, tmp_path):
    file = tmp_path / "clip.npy"
    np.save(file, np.full((3, 8, 8, 3), 7, np.uint8))
    with pytest.raises(UsageError, match="no recorded episodes that can be read"):
        find_form(file)
    install("guest_in_test_e", FORMAT.format(name="guest_in_test_e"), READER)
    (episode,) = Recordings(path=file, form=find_form(file), goal="close it")
    assert isinstance(episode, RobotTrajectory)
    assert episode.instruction == "close it" and episode.images(np.arange(3)).shape == (3, 1, 8, 8, 3)


@pytest.mark.parametrize(
    ("guest", "said"),
    [
        ("raise ImportError('no such thing\\nat all')", "ImportError: no such thing"),
        ("GUEST = 3", "TypeError: guest_in_test_b.guest:GUEST is a int"),
        ("THIS = 3", "AttributeError"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_broken_guest_is_one_line_and_never_a_dead_help(guest, said, install, caplog):
    install("guest_in_test_b", guest)
    with caplog.at_level(logging.WARNING):
        assert main(["--help"]) == 0
    [line] = [record.getMessage() for record in caplog.records if record.name == guests.__name__]
    assert line.startswith("the guest guest_in_test_b is left out") and said in line and "\n" not in line


def test_code_of_a_guest_that_fails_is_an_error_of_that_command_alone(install, capsys):
    install("guest_in_test_c", COMMAND.format(name="guest_in_test_c", taken="x"), "raise ImportError('no torch')")
    assert main(["greet"]) == 2
    assert "no torch" in capsys.readouterr().err
    assert main(["doctor", "--help"]) == 0


def test_a_name_of_a_guest_that_was_taken_out_says_which(monkeypatch, capsys):
    found = guests.guests()
    for name in found:
        with monkeypatch.context() as patch:
            patch.setattr(guests, "guests", lambda left=name: {k: v for k, v in found.items() if k != left})
            for table, names in json.loads(guests.NAMES_FILE.read_text()).items():
                for entry in (entry for entry, owner in names.items() if owner == name):
                    assert f"comes with the guest {name}" in guests.guest_of(table, entry)
                    assert not guests.guest_of(table, "nothing")


def test_the_names_of_our_guests_are_on_file():
    """The file is for a guest that is not there any more; families of tasks depend on what else is installed."""
    names: dict[str, dict[str, str]] = json.loads(guests.NAMES_FILE.read_text())
    for guest in sorted(path.parent.name for path in guests.FOLDER.glob("*/guest.py")):
        declared = guests.guests()[guest]
        for table in ("commands", "judges"):
            listed = {name for name, owner in names.get(table, {}).items() if owner == guest}
            assert listed == set(getattr(declared, table)), f"{guest}: {table} in {guests.NAMES_FILE}"


def test_every_guest_that_ships_has_code_a_page_and_tests():
    root = guests.FOLDER.parents[1]
    for file in guests.FOLDER.glob("*/guest.py"):
        guest = guests.guests()[file.parent.name]
        assert guest.about and (root / "docs" / guest.docs).is_file(), file
        assert any((root / "tests/plugins" / file.parent.name).glob("test_*.py")), file
        made = [command.call for command in guest.commands.values()] + [judge.build for judge in guest.judges.values()]
        for reference in [*made, *filter(None, [guest.tasks, guest.bench_files])]:
            assert callable(guests.load(reference)), reference


def test_finding_guests_imports_none_of_their_code():
    heavy = ("torch", "ray", "numpy", "tyro", "pyarrow")
    code = (
        "import sys, rlvlm.core.guests as g\n"
        "found = g.guests(); own = [f'{g.GROUP}.{name}' for name in found]\n"
        f"print([m for m in sys.modules if m in {heavy} or m.rpartition('.')[0] in own and not m.endswith('.guest')])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert child.stdout == "[]\n"


def test_a_reference_that_leads_nowhere_is_named():
    with pytest.raises(UsageError, match="guest_of_nobody:x cannot be imported: ModuleNotFoundError"):
        guests.load("guest_of_nobody:x")
