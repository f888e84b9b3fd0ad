"""A user without a home, words with a `~`, and streams that are closed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlvlm.core.disk import expand_home
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import from_yaml, override
from rlvlm.sweeps.config import SweepConfig


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("~/demos", "/home/x/demos"),
        ("--out=~/demos", "--out=/home/x/demos"),
        ("--judge.store=~", "--judge.store=/home/x"),
        ("~", "/home/x"),
        ("a~/b", "a~/b"),
        ("--goal=~ nearly", "--goal=~ nearly"),
        ("/tmp/~/x", "/tmp/~/x"),
    ],
)
def test_a_tilde_is_the_home_folder_where_a_path_begins(word, read, monkeypatch):
    monkeypatch.setenv("HOME", "/home/x")
    assert expand_home(word) == read


def test_files_of_settings_know_it_too(monkeypatch):
    monkeypatch.setenv("HOME", "/home/x")
    text = "{title: ~/t, tasks: [drawer_open], seeds: [0], sources: {a: {title: b}}}"
    assert from_yaml(SweepConfig, text).title == "/home/x/t"
    assert override(recipe("drawer_open"), {"out": "~/run"}).out == Path("/home/x/run")


@pytest.mark.slow
def test_a_user_without_an_entry_and_without_a_home_can_import_everything(tmp_path):
    code = (
        "import pwd\ndef nobody(uid): raise KeyError(uid)\npwd.getpwuid = nobody\n"
        "import rlvlm, getpass, os, pathlib, ray\nassert os.access(pathlib.Path.home(), os.W_OK)\n"
        "print(getpass.getuser(), pathlib.Path.home())"
    )
    known = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME", "USERNAME")}
    known |= {"TMPDIR": str(tmp_path), "LNAME": ""}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=known)
    uid = os.getuid()
    assert child.stdout.split() == [f"uid{uid}", str(tmp_path / f"rlvlm-home-{uid}")], child.stderr
    assert (tmp_path / f"rlvlm-home-{uid}").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_end_nothing(closing):
    words = f"{sys.executable} -m rlvlm.cli --help {closing}"
    child = subprocess.run(["sh", "-c", words], capture_output=True, text=True)
    assert child.returncode == 0 and not child.stderr, child.stderr
