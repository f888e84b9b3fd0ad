from pathlib import Path

import pytest

from rlvlm.algorithms.sft_replies import sft_manifest_of, write_sft_manifest
from rlvlm.cli import run_word
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.folder import open_folder
from rlvlm.envs.config import EnvConfig
from rlvlm.policies.vlm.config import PolicyConfig


def test_demonstrations_and_policies_of_other_prompts_are_not_mixed(tmp_path: Path) -> None:
    source, out = str(tmp_path / "demos"), tmp_path / "out"
    assert run_word(["collect", "empty_random_5x5", "--episodes", "1", "--out", source]) == 0
    words = ["sft", "empty_random_5x5", "--from", source, "--out", str(out)]
    with pytest.raises(UsageError, match="collected with env.shows_last False, not True"):
        run_word([*words, "--env.shows-last"])
    assert not out.exists()
    names = open_folder(tmp_path / "demos").action_names
    out.mkdir()
    write_sft_manifest(out, sft_manifest_of("empty_random_5x5", EnvConfig(shows_last=True), PolicyConfig(), names))
    with pytest.raises(UsageError, match="learned otherwise: .*env.shows_last was True, not False"):
        run_word(words)


def test_the_policy_and_its_lessons_are_those_of_the_tasks_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_word(["sft", "pick_place_can", "--help"])
    told = "".join(line.strip("│ ") for line in capsys.readouterr().out.splitlines())
    assert "(default: head)" in told and "(default: 800)" in told
