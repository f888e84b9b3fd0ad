import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlvlm.cli import main
from rlvlm.commands import doctor
from rlvlm.commands.doctor import CheckResult


def one(name: str, check: Callable[[], Iterator[CheckResult]]) -> CheckResult:
    return next(finding for finding in check() if finding.name == name)


def findings(*ends: tuple[bool, bool]):
    """Checks, by whether each is ok and whether it is essential."""
    return tuple(
        lambda is_ok=is_ok, is_essential=is_essential: [
            CheckResult(name="thing", found="seen", fix="" if is_ok else "mend it", is_essential=is_essential)
        ]
        for is_ok, is_essential in ends
    )


@pytest.mark.parametrize(
    ("ends", "code"), [([(True, True)], 0), ([(True, True), (False, False)], 0), ([(False, True), (True, True)], 3)]
)
def test_only_an_essential_failure_counts(ends, code, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", findings(*ends))
    assert main(["doctor"]) == code
    text = capsys.readouterr().out
    assert ("FAIL" in text) == (code == 3) and ("fix: mend it" in text) == (ends != [(True, True)])
    assert main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["is_fit"] == (code == 0) and len(report["findings"]) == len(ends)


@pytest.mark.slow
def test_every_check_answers_and_every_failure_names_a_fix():
    found = [finding for check in doctor.CHECKS for finding in check()]
    assert len({finding.name for finding in found}) == len(found) == 15
    assert all(finding.found for finding in found)


def test_libero_that_does_not_load_is_found_and_stops_nothing(monkeypatch):
    def broken(module: str) -> None:
        raise FileNotFoundError("/no/such/assets")

    monkeypatch.setattr("rlvlm.envs.robosuite.scene.load", broken)
    monkeypatch.setattr(doctor, "weights_folder", lambda: Path("/no/such/folder"))
    finding = one("libero", doctor.software)
    assert not finding.is_ok and not finding.is_essential
    assert "/no/such/assets" in finding.found and "libero" in finding.fix


def test_a_scratch_that_cannot_be_written_is_found(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLVLM_SCRATCH", str(tmp_path / "file"))
    assert not one("scratch", doctor.disks).is_ok
    monkeypatch.setenv("RLVLM_SCRATCH", str(tmp_path / "folder"))
    assert one("scratch", doctor.disks).is_ok and "GiB free" in one("scratch", doctor.disks).found


def test_a_bogus_renderer_is_found_with_what_works_instead(monkeypatch):
    monkeypatch.setattr(doctor, "try_renderer", lambda backend: None if backend == "osmesa" else "broken")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    finding = one("rendering", doctor.rendering)
    assert not finding.is_ok and finding.fix == "unset MUJOCO_GL"
    assert "egl: broken" in finding.found and "osmesa: works" in finding.found
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert one("rendering", doctor.rendering).is_ok


def test_a_cluster_that_is_not_there_and_a_home_that_cannot_be_used_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    finding = one("ray cluster", doctor.network)
    assert not finding.is_ok and finding.is_essential and "unset RAY_ADDRESS" in finding.fix
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert not one("home folder", doctor.disks).is_ok


def test_a_check_that_breaks_off_is_a_failure_and_the_others_go_on(monkeypatch, capsys):
    def rendering() -> Iterator[CheckResult]:
        yield CheckResult(name="first", found="seen")
        raise PermissionError(13, "Permission denied", "/some/program")

    monkeypatch.setattr(doctor, "CHECKS", (rendering, *findings((True, True))))
    assert main(["doctor"]) == 3
    text = capsys.readouterr().out
    assert "FAIL  rendering" in text and "/some/program" in text and "first" in text and "thing" in text
