"""Shows that the core does without a guest: `python -m tests.without_guest NAME [pytest's arguments]`.

Copies the tree, deletes the guest's folder and its tests, and checks in the copy that the core's fast tests pass, that
`rlvlm --help` lacks the guest's lines, and that what needs the guest says which one is missing. Without a name it draws
one; CI does so each time. With arguments for pytest only those tests run.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rlvlm.core.guests import FOLDER, guests

ROOT = Path(__file__).resolve().parents[1]
FAST = ("-n", "auto", "--dist", "loadfile", "-m", "not ray and not slow and not gpu and not full and not vllm")
USES = {
    "commands": ["{name}"],
    "judges": ["run", "drawer_open", "--judge.backend", "{name}", "--judge.model", "x"],
    "tasks": ["check-task", "{name}/x"],
}
"""Command lines that need something of a guest, by table of `Guest`."""


def copy_without(name: str, copy: Path) -> None:
    """Copies the files that git tracks or would, without the guest and its tests."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    parts = {f"rlvlm/plugins/{name}/", f"tests/plugins/{name}/"}
    for file in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / file).is_file() and not any(file.startswith(part) for part in parts):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, copy / file)


def faults_of(name: str, copy: Path) -> list[str]:
    """Returns what the command line of the copy says wrongly about the missing guest."""
    faults = []
    env = os.environ | {"PYTHONPATH": str(copy), "COLUMNS": "300"}

    def rlvlm(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlvlm.cli", *words]
        return subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)

    help_text = rlvlm("--help").stdout
    for command, entry in guests()[name].commands.items():
        if f"rlvlm {command} " in help_text or entry.text.rpartition("   ")[2] in help_text:
            faults.append(f"rlvlm --help still lists {command}")
    names: dict[str, dict[str, str]] = json.loads((FOLDER / "names.json").read_text())
    for table, owners in names.items():
        for entry in (entry for entry, owner in owners.items() if owner == name and table in USES):
            words = " ".join(USES[table]).format(name=entry).split()
            child = rlvlm(*words)
            said = " ".join(child.stderr.replace("│", " ").split())
            if child.returncode != 2 or f"comes with the guest {name}" not in said:
                faults.append(f"rlvlm {' '.join(words)}: exit code {child.returncode}, {said}")
    return faults


def main(words: Sequence[str]) -> int:
    """Runs the proof for one guest, and returns 0 if the core does without it."""
    name = words[0] if words else random.choice([file.parent.name for file in FOLDER.glob("*/guest.py")])
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_without(name, copy)
        faults = faults_of(name, copy)
        env = os.environ | {"PYTHONPATH": str(copy)}
        tests = subprocess.run([sys.executable, "-m", "pytest", "-q", *(words[1:] or FAST)], cwd=copy, env=env)
    said = "\n".join(faults) or "the command line lacks its names and says so"
    print(  # noqa: T201 - a command
        f"without {name}: pytest {tests.returncode}, {time.monotonic() - start:.0f} s; {said}"
    )
    return int(bool(tests.returncode or faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
