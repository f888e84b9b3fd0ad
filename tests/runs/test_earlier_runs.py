"""Runs of an earlier 0.2, from four commits before settings were renamed, are gone on with.

`earlier/KIND_COMMIT.tar.xz` is a run's folder as that commit wrote it: whole for the run in steps; of the others, whose
weights are large, the settings.
"""

import json
import tarfile
from pathlib import Path

import pytest
from tiny_run import run_here, table

from rlvlm.core.errors import UsageError
from rlvlm.runs.files.folder import RunFolder, find_folder, read_state
from rlvlm.runs.settings.config_file import RENAMED, read_saved_settings
from rlvlm.runs.settings.tree import flat

ARCHIVES = sorted(Path(__file__).with_name("earlier").glob("*.tar.xz"))


def unpack(archive: Path, place: Path) -> RunFolder:
    with tarfile.open(archive) as file:
        file.extractall(place / archive.name, filter="data")
    return find_folder(place / archive.name / archive.name.partition("_")[0])


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda archive: archive.name.partition(".")[0])
def test_its_checkpoints_have_the_settings_of_the_run(archive, tmp_path):
    run = unpack(archive, tmp_path)
    [checkpoint] = run.checkpoints.newest_first()
    config = run.config()
    state = read_state(checkpoint, config)
    assert state.settings == {name: value for name, value in flat(config).items() if name != "out"}
    # what was changed since is noticed under any name
    file = checkpoint.path / "run.json"
    saved = json.loads(file.read_text())
    saved["settings"]["judge.picture_px"] = 17
    file.write_text(json.dumps(saved))
    with pytest.raises(UsageError, match="judge.image_px is 300, before 17"):
        read_state(checkpoint, config)


def test_the_folders_have_every_setting_that_was_renamed(tmp_path):
    names: set[str] = set()
    for archive in ARCHIVES:
        [checkpoint] = unpack(archive, tmp_path).checkpoints.newest_first()
        names |= checkpoint.state.settings.keys()
    assert not [old for old in RENAMED if not any(name == old or name.startswith(f"{old}.") for name in names)]


def test_settings_that_contradict_each_other_are_an_error(tmp_path):
    config = unpack(ARCHIVES[-1], tmp_path).config()
    with pytest.raises(UsageError, match="policy.head stands beside policy"):
        read_saved_settings({"policy": 1, "policy.head": "text"}, config, "run.json")


@pytest.mark.ray
@pytest.mark.slow
def test_it_is_resumed(local_ray, tmp_path):
    [archive] = (archive for archive in ARCHIVES if archive.name.startswith("steps"))
    run = unpack(archive, tmp_path)
    run_here("resume", str(run.path), "--steps", "120")
    assert run.summary()["env_steps"] == 120
    assert [row["step"] for row in table(run.path / "eval.csv")] == ["80", "120"]
