import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from rlvlm.errors import MachineError, UsageError
from rlvlm.judges.config import JudgeConfig
from rlvlm.rewards.config import RewardConfig
from rlvlm.runs import doctor
from rlvlm.runs.config import TrackConfig
from rlvlm.runs.doctor import Finding, check_before_run, examine_machine, port_is_free
from rlvlm.runs.preference.config import PreferenceRunConfig
from rlvlm.runs.recipes import recipe

ORACLE = PreferenceRunConfig(task="drawer_open", reward=RewardConfig(teacher="oracle"))


def findings(*ends: tuple[bool, bool]):
    return tuple(
        lambda end=end: Finding(name="thing", is_ok=end[0], found="seen", fix="mend it", is_essential=end[1])
        for end in ends
    )


@pytest.mark.parametrize(
    ("ends", "code"), [([(True, True)], 0), ([(True, True), (False, False)], 0), ([(False, True), (True, True)], 3)]
)
def test_only_an_essential_failure_counts(
    ends: list[tuple[bool, bool]], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", findings(*ends))
    assert examine_machine(as_json=False) == code
    text = capsys.readouterr().out
    assert ("FAIL" in text) == (code == 3) and "fix: mend it" in text
    assert examine_machine(as_json=True) == code
    report = json.loads(capsys.readouterr().out)
    assert report["is_fit"] == (code == 0) and len(report["findings"]) == len(ends)


def test_every_check_answers_and_every_failure_names_a_fix() -> None:
    for check in doctor.CHECKS:
        finding = check()
        assert finding.name and finding.found
        assert finding.is_ok or finding.fix


def test_a_scratch_that_cannot_be_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLVLM_SCRATCH", str(tmp_path / "file"))
    assert not doctor._scratch().is_ok
    monkeypatch.setenv("RLVLM_SCRATCH", str(tmp_path / "folder"))
    assert doctor._scratch().is_ok and "GiB free" in doctor._scratch().found


def test_a_bogus_renderer_is_found_with_what_works_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "try_renderer", lambda backend: None if backend == "osmesa" else "broken")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    finding = doctor._rendering()
    assert not finding.is_ok and finding.fix == "unset MUJOCO_GL"
    assert "egl: broken" in finding.found and "osmesa: draws" in finding.found
    with pytest.raises(MachineError, match="drawing with egl does not work: broken"):
        check_before_run(ORACLE)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert doctor._rendering().is_ok


def test_a_taken_port_is_found_before_the_run() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free(port)
        with pytest.raises(MachineError, match=f"port {port}") as caught:
            check_before_run(replace(ORACLE, track=TrackConfig(dashboard=True, dashboard_port=port)))
        assert "--track.dashboard-port" in caught.value.fix
    assert port_is_free(port)


def test_a_missing_model_folder_matters_only_to_those_who_ask_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "try_renderer", lambda _: None)
    lost = JudgeConfig(backend="transformers", model="/no/such/folder")
    with pytest.raises(UsageError, match="/no/such/folder is not a folder"):
        check_before_run(PreferenceRunConfig(task="drawer_open", judge=lost))
    check_before_run(replace(ORACLE, judge=lost))


def test_a_judge_is_not_asked_about_a_goal_that_nobody_said() -> None:
    config = recipe("gym:MountainCarContinuous-v0")
    with pytest.raises(UsageError, match="no goal phrase of its own") as caught:
        check_before_run(config)
    assert "--goal" in caught.value.fix
    check_before_run(replace(config, goal="drive the car up to the flag"))
    check_before_run(replace(config, reward=replace(config.reward, teacher="oracle")))
