"""`rlvlm serve`: what its words start, and what it says of the start."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import box_words

from rlvlm.cli import main
from rlvlm.commands import served_apps
from rlvlm.commands.served_apps import REPORT_S, Progress
from rlvlm.core.errors import UsageError
from rlvlm.serving.app_file import AppFile, find_app

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def started(monkeypatch):
    """The files that would have been started."""
    files: list[AppFile] = []
    monkeypatch.setattr(served_apps, "serve_apps", lambda file, **options: files.append(file) or 0)
    monkeypatch.chdir("/")  # the checkout's own folder of apps is found from anywhere
    return files


def test_a_name_and_options_become_the_file_that_is_started(started, tmp_path):
    assert main(["serve", "pocket", "--port", "9001", "--media-root", str(tmp_path), "--token-file", "/k/token"]) == 0
    [file] = started
    assert (file.name, file.url, file.http.media_root) == ("pocket", "http://127.0.0.1:9001", str(tmp_path))
    assert str(file.http.token_path) == "/k/token"


def test_a_folder_does_not_hide_the_app_of_its_name(started, tmp_path, monkeypatch, capsys):
    (tmp_path / "pocket").mkdir()  # of `rlvlm judge-bench --out pocket`
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "pocket"]) == 0 and started[0].name == "pocket"
    assert main(["serve", "./pocket"]) == 2 and "not in a run's folder" in box_words(capsys.readouterr().err)


def test_a_path_works_as_a_name(started):
    assert main(["serve", str(REPOSITORY / "serve_apps" / "vlac.yaml")]) == 0
    assert started[0].judges[0].judge.score == "delta"


def test_the_list_names_every_app_with_its_model_and_gpus(started, capsys):
    assert main(["serve", "--list"]) == 0
    shown = capsys.readouterr().out
    for name in ("pocket", "primo_r1", "two_judges_one_card", "VLAC", "0.5 GPU", "PRIMO-R1 scores"):
        assert name in shown
    assert "primo_r1 (runs: --serve.app PRIMO-R1): " in shown
    assert not started


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "name an app"),
        (["poket"], "did you mean rlvlm serve pocket"),
        (["../serve_apps/pocket"], "no app"),
        (["/gone.yaml"], "/gone.yaml cannot be read"),
        (["pocket", "--host", "0.0.0.0"], "allowed-hosts"),
    ],
)
def test_wrong_arguments_are_refused_with_the_right_ones(started, capsys, words, reason):
    assert main(["serve", *words]) == UsageError.exit_code
    assert reason in box_words(capsys.readouterr().err)
    assert not started


def test_names_cannot_lead_out_of_the_folder():
    with pytest.raises(UsageError):
        find_app("x/../../etc/passwd")


def test_a_port_in_use_and_a_loose_token_are_reported_before_anything_starts(tmp_path, monkeypatch):
    import socket

    from rlvlm.core.errors import MachineError

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    token = tmp_path / "token"
    token.write_text("x" * 40)
    token.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = find_app("pocket").with_options(port=taken.getsockname()[1], token_file=str(token))
        with pytest.raises(MachineError, match="is taken"):
            served_apps.serve_apps(file)
    with pytest.raises(MachineError, match="yours alone"):
        served_apps.serve_apps(file)
    with pytest.raises(MachineError, match="media root /nowhere is not a folder"):
        served_apps.serve_apps(file.with_options(media_root="/nowhere"))


@pytest.fixture
def clock(monkeypatch):
    """Its one number is the time."""
    now = [1_000.0]
    monkeypatch.setattr(served_apps.time, "monotonic", lambda: now[0])
    return now


def test_each_new_state_is_a_line_and_a_lasting_one_is_repeated(clock):
    log = io.StringIO()
    progress = Progress(Console(file=log, soft_wrap=True))
    progress.say("starting Ray")
    for half_seconds in range(int(2 * 2.5 * REPORT_S)):  # two judges for a while, then one of them
        is_short = half_seconds < 4
        progress.say("loading pocket, clip" if is_short else "loading clip", half_seconds / 2)
        clock[0] += 0.5
    progress.end()
    # by hand: the second judge is named at 2 s, and again 15 and 30 s after that
    assert log.getvalue().splitlines() == [
        "starting Ray",
        "loading pocket, clip",
        "loading clip (2 s)",
        "loading clip (17 s)",
        "loading clip (32 s)",
    ]


def test_on_a_terminal_one_line_changes_and_is_taken_away():
    screen = io.StringIO()
    progress = Progress(Console(file=screen, force_terminal=True, width=60))
    progress.say("loading pocket", 3.2)
    progress.end()
    assert "loading pocket (3 s)" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")  # up a line, and away with it
