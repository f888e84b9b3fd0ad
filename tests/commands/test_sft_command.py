from pathlib import Path

import pytest

from rlvlm.algorithms.sft_replies import sft_manifest_of, write_sft_manifest
from rlvlm.cli import run_word
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.folder import create_folder, open_folder
from rlvlm.envs.config import EnvConfig
from rlvlm.policies.vlm.config import PolicyConfig


def test_a_task_is_wanted_first() -> None:
    with pytest.raises(UsageError, match="name a task first"):
        run_word(["sft", "--from", "somewhere"])


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder of demonstrations"):
        run_word(["sft", "number_line", "--from", str(tmp_path)])
    create_folder(tmp_path / "demos", "ez_points", "turns", ("1",))
    with pytest.raises(UsageError, match="holds demonstrations of ez_points, not of number_line"):
        run_word(["sft", "number_line", "--from", str(tmp_path / "demos")])


def test_what_was_taught_otherwise_is_not_gone_on_with(tmp_path: Path) -> None:
    source, out = str(tmp_path / "demos"), tmp_path / "out"
    assert run_word(["collect", "empty_random_5x5", "--episodes", "1", "--out", source]) == 0
    names = open_folder(tmp_path / "demos").action_names
    out.mkdir()
    write_sft_manifest(out, sft_manifest_of("empty_random_5x5", EnvConfig(shows_last=True), PolicyConfig(), names))
    with pytest.raises(UsageError, match="learned otherwise: .*env.shows_last was True, not False"):
        run_word(["sft", "empty_random_5x5", "--from", source, "--out", str(out)])


def test_demonstrations_of_other_prompts_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    source, out = str(tmp_path / "demos"), tmp_path / "out"
    assert run_word(["collect", "empty_random_5x5", "--episodes", "1", "--out", source]) == 0
    with pytest.raises(UsageError, match="collected with env.shows_last False, not True"):
        run_word(["sft", "empty_random_5x5", "--from", source, "--out", str(out), "--env.shows-last"])
    assert not out.exists()


def test_a_wrong_number_is_told_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_word(["sft", "number_line", "--sft.updates", "0"])
    assert "sft.updates must be > 0" in capsys.readouterr().err


def test_what_would_have_no_effect_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"sft.turns, sft.p_wrong would have no effect"):
        run_word(["sft", "number_line", "--from", "demos", "--sft.turns", "5", "--sft.p-wrong", "0.1"])
    with pytest.raises(SystemExit) as caught:
        run_word(["sft", "number_line", "--from", "demos", "--job.max-reply-tokens", "0"])
    assert caught.value.code == 2 and "job.max_reply_tokens must be >= 1, got 0" in capsys.readouterr().err


def test_the_policy_and_its_lessons_are_those_of_the_tasks_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_word(["sft", "pick_place_can", "--help"])
    told = "".join(line.strip("│ ") for line in capsys.readouterr().out.splitlines())
    assert "(default: head)" in told and "(default: 800)" in told
