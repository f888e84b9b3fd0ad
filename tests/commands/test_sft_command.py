from pathlib import Path

import pytest

from rlvlm.algorithms.sft_replies import sft_manifest_of, write_sft_manifest
from rlvlm.cli import main, run_word
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.folder import create_folder, open_folder
from rlvlm.envs.config import EnvConfig
from rlvlm.policies.vlm.config import PolicyConfig


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sft --from somewhere", "name a task first"),
        ("sft number_line --from empty", "is no folder of demonstrations"),
        ("sft number_line --from other", "holds demonstrations of ez_points, not of number_line"),
        ("sft number_line --sft.updates 0", "sft.updates must be > 0"),
        ("sft number_line --from demos --job.max-reply-tokens 0", "job.max_reply_tokens must be >= 1, got 0"),
        ("sft number_line --from demos --sft.turns 5 --sft.p-wrong 0.1", "sft.turns, sft.p_wrong would have no effect"),
    ],
)
def test_a_mistake_is_told_before_anything_is_made(
    line: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    create_folder(tmp_path / "other", "ez_points", "turns", ("1",))
    assert main(line.split()) == 2
    assert told in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "other"]


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
