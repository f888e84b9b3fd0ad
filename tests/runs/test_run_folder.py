"""A run's folder and its growing tables: made, found, cut, held, and not trusted."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from damaged import damage
from ray.exceptions import ActorDiedError, OutOfDiskError

from rlvlm.cli import main
from rlvlm.core.disk import write_whole
from rlvlm.core.errors import MachineError, RunError, UsageError
from rlvlm.runs.files.answers import final_answers
from rlvlm.runs.files.checkpoints import RunState
from rlvlm.runs.files.folder import QUERY_COLUMNS, RunFolder, check_newest, create_folder, find_folder
from rlvlm.runs.files.tables import MAX_CELL, CsvTable, JsonLines
from rlvlm.runs.settings.config_file import config_text
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.runs.train import convert_errors, start_run
from rlvlm.sweeps.folder import check_trust

NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_a_new_folder_holds_the_config_and_the_command(folder, config):
    assert sorted(file.name for file in folder.path.iterdir()) == ["command.txt", "config.yaml", "environment.json"]
    assert folder.command() == "rlvlm run drawer_open --seed 3"
    assert folder.config() == config
    environment = folder.environment()
    assert environment["cpu_cores"] >= 1 and "ray" in environment["packages"]
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert (environment["commit"] or "").rstrip("+") == asked.stdout.strip(), "empty where there is no checkout"


def test_without_out_the_name_is_task_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [create_folder(StepsRun(task="drawer_open"), ["rlvlm"], NOW).path for _ in range(2)]
    names = [str(path.relative_to(tmp_path)) for path in made]
    assert names == ["runs/drawer_open/20260102-030405", "runs/drawer_open/20260102-030405-2"]


def test_a_folder_that_another_run_takes_at_the_same_moment_stays_whole(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = create_folder(replace(config, out=None), ["rlvlm"], NOW)
    monkeypatch.setattr("rlvlm.runs.files.folder.default_path", lambda task, started: first.path)  # seen free by both
    second = create_folder(replace(config, out=None), ["rlvlm"], NOW)
    assert second.path.name == f"{first.path.name}-2"
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(()))  # nothing lay in it yet when the other one looked
    (first.path / "config.yaml").unlink()
    with pytest.raises(UsageError, match="another run has just taken"):
        create_folder(replace(config, out=first.path), ["rlvlm"], NOW)
    with first.locked(), pytest.raises(UsageError, match="another process"):
        start_run(RunFolder(first.path, 2), config)
    assert first.command() == "rlvlm"


def test_a_job_may_not_leave_its_run_where_ray_cleans_up(tmp_path, monkeypatch):
    copy = tmp_path / "working_dir_files" / "_ray_pkg_029f88d5ecc55e1e"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    for out in (None, Path("run")):
        with pytest.raises(UsageError, match="which Ray deletes") as caught:
            create_folder(StepsRun(task="drawer_open", out=out), ["rlvlm"], NOW)
        assert "absolute path" in caught.value.fix
    assert list(copy.iterdir()) == []
    assert create_folder(StepsRun(task="drawer_open", out=tmp_path / "run"), ["rlvlm"], NOW).path.is_dir()


def test_a_used_folder_is_refused_with_the_way_on(folder, config, tmp_path):
    with pytest.raises(UsageError, match="already holds a run") as caught:
        create_folder(config, ["rlvlm"], NOW)
    assert f"rlvlm resume {folder.path}" in caught.value.fix
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    with pytest.raises(UsageError, match="not empty"):
        create_folder(replace(config, out=tmp_path / "other"), ["rlvlm"], NOW)
    with pytest.raises(UsageError, match="is a file"):
        create_folder(replace(config, out=tmp_path / "other" / "letter.txt"), ["rlvlm"], NOW)


def test_a_full_disk_is_reported_before_anything_is_made(config, tmp_path, monkeypatch):
    monkeypatch.setattr("rlvlm.runs.files.folder.BYTES_NEEDED", shutil.disk_usage(tmp_path).total + 1)
    with pytest.raises(MachineError, match="MiB free, a run needs"):
        create_folder(config, ["rlvlm"], NOW)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_died_with_its_node_is_no_bug(folder):
    with pytest.raises(MachineError, match="a process of the run, or its node, is gone: ActorDiedError") as caught:
        with convert_errors(folder):
            raise ActorDiedError
    assert folder.resume_command in caught.value.fix and "ActorDiedError" in folder.crash.read_text()
    with pytest.raises(MachineError, match="object store and the disk .* are full: no room") as full:
        with convert_errors(folder):
            raise OutOfDiskError("no room")
    assert "--object-store-memory" in full.value.fix and folder.resume_command in full.value.fix
    with pytest.raises(RunError, match="unexpected KeyError") as found, convert_errors(folder):
        raise KeyError("lost")
    assert not isinstance(found.value, MachineError)


def test_removing_takes_the_parents_that_were_made_and_no_others(config, tmp_path):
    (tmp_path / "mine").mkdir()
    folder = create_folder(replace(config, out=tmp_path / "mine" / "a" / "b"), ["rlvlm"], NOW)
    folder.remove()
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"] and list((tmp_path / "mine").iterdir()) == []
    folder = create_folder(replace(config, out=tmp_path / "mine"), ["rlvlm"], NOW)
    folder.remove()
    assert (tmp_path / "mine").is_dir() and list((tmp_path / "mine").iterdir()) == []


def save(folder: RunFolder, step: int) -> Path:
    return folder.checkpoints.save(RunState(env_steps=step, wall_s=0.0, peak_rss_mb=0.0), Path.mkdir, is_best=False)


def test_a_run_is_found_from_any_path_in_it(filled, tmp_path):
    checkpoint = save(filled, 1_000)
    for path in (
        filled.path,
        filled.path / "eval.csv",
        checkpoint,
        checkpoint / "run.json",
        filled.checkpoints.path / "last",
    ):
        assert find_folder(path).path == filled.path
    with pytest.raises(UsageError, match="does not exist"):
        find_folder(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="not in a run's folder"):
        find_folder(tmp_path)


def test_only_the_newest_checkpoint_can_be_gone_on_from(filled):
    older, newest = save(filled, 1_000), save(filled, 2_000)
    for path in (filled.path, filled.path / "eval.csv", newest, newest / "run.json"):
        check_newest(filled, path)
    with pytest.raises(UsageError, match="not the newest"):
        check_newest(filled, older / "run.json")
    damage(newest / "run.json", at=20)
    check_newest(filled, older / "run.json")


def test_a_cut_takes_everything_back_to_one_step(filled):
    for step in (1_000, 2_000, 3_000):
        save(filled, step)
    filled.write_summary({"exit_reason": "SIGTERM"})
    filled.cut(2_000)
    assert [row["step"] for row in filled.evaluations.read()] == ["1000", "2000"]
    assert {row["env_step"] for row in filled.queries.read()} == {"1500"}
    assert [row["env_steps"] for row in filled.metrics.read()] == [1_000, 2_000]
    assert {row["env_steps"] for row in filled.samples.read()} == {1_500}
    assert filled.checkpoints.all()[-1].state.env_steps == 2_000
    assert filled.summary() == {}


def test_a_folder_is_held_by_one_process_at_a_time(folder, config, monkeypatch, capsys):
    monkeypatch.setattr("rlvlm.commands.resume.check_before_run", lambda *_, **__: None)  # it takes seconds
    file = folder.path / "config.yaml"
    before = file.read_text()
    assert main(["resume", str(folder.path), "--print-config"]) == 2, "and does not train"
    assert "--print-config is for a run that begins" in capsys.readouterr().err
    with folder.locked():
        assert main(["resume", str(folder.path), "--steps", "40000"]) == 2
        assert "another process" in capsys.readouterr().err and file.read_text() == before
        write_whole(file, config_text(replace(config, steps=40_000)))  # the name is another file's now
        with pytest.raises(UsageError, match="another process"), folder.locked():
            pass
    with folder.locked():
        pass


def test_a_folder_says_what_became_of_the_run_wherever_it_is(folder, tmp_path):
    assert not folder.has_begun()
    folder.ledger.write_text("{}")
    assert folder.has_begun(), "something was paid for"
    folder.write_summary({"a": 1})
    folder.write_summary({"a": 2})
    assert json.loads((folder.path / "summary.json").read_text()) == folder.summary() == {"a": 2}
    file = folder.path.rename(tmp_path / "elsewhere") / "config.yaml"
    moved = find_folder(tmp_path / "elsewhere")
    assert moved.config().out == tmp_path / "elsewhere"
    file.write_text(f"{file.read_text()}sede: 1\n")
    with pytest.raises(UsageError, match=f"{re.escape(str(file))}: unknown key sede") as caught:
        moved.config()
    assert caught.value.fix == "did you mean seed?"


SWEEP = "title: x\nseeds: [0]\ntasks: [soccer]\nsources: {{a: {{title: a, settings: {{{}}}}}}}"


@pytest.mark.parametrize(
    ("file", "text", "asks"),
    [
        ("config.yaml", "task: gym:CartPole-v1", False),
        ("config.yaml", "task: gym:mine:CartPole-v1", True),
        ("config.yaml", "task: metaworld/door-open-v3", False),
        ("config.yaml", "task: rlvlm.testing:TINY", False),
        ("config.yaml", "task: rlvlm_mine:TASK", True),
        ("config.yaml", "task: rlvlm.py:TASK", True),
        ("config.yaml", "task: soccer\njudge: {backend: 'rlvlm.testing:judge', api: {base_url: ''}}", False),
        ("config.yaml", "task: soccer\njudge: {backend: transformers, model: name/of-the-hub}", False),
        ("config.yaml", "task: soccer\njudge: {backend: transformers, model: ./of_this_machine}", True),
        ("config.yaml", "task: soccer\nout: /elsewhere", False),
        ("config.yaml", "kind: turns\ntask: number_line\nalgo: {loss: {policy: 'mine:loss'}}", True),
        ("config.yaml", "task: soccer\njudge: {engine: {python: '/tmp/mine:/python'}}", True),
        ("sweep.yaml", SWEEP.format("").replace("[soccer]", "[soccer, 'mine:TASK']"), True),
        ("sweep.yaml", SWEEP.format(""), False),
        ("sweep.yaml", SWEEP.format("reward.teacher: 'mine:NAME'"), True),
        ("sweep.yaml", SWEEP.format("judge: {store: /elsewhere}"), True),
    ],
)
def test_which_folders_ask_for_trust(file, text, asks, tmp_path):
    run = tmp_path / "runs" / "one"
    (run / "checkpoints" / "last").mkdir(parents=True)
    (run / file).write_text(text + "\n")
    (run / "command.txt").write_text("rlvlm run\n")
    inside = [run / "checkpoints" / "last"] if file == "config.yaml" else []  # in a sweep lie runs, which say it all
    for path in (run, *inside, tmp_path / "runs"):  # itself, below it, above it
        if not asks:
            check_trust([path], trust=False)
            continue
        with pytest.raises(UsageError, match="names code outside of rlvlm|leads out of its folder"):
            check_trust([path], trust=False)
    if "mine" not in text and ".py:" not in text:  # else there is no such file to import
        check_trust([run], trust=True)
        check_trust([run], trust=False)


@pytest.fixture
def table(tmp_path):
    return CsvTable(tmp_path / "t.csv", ("step", "text"), "step")


def test_any_text_of_a_judge_stays_one_row(table):
    table.append([{"step": 1, "text": 'a "quote", a\nbreak and \u2028 another'}, {"step": 2, "text": None}])
    assert table.path.read_text() == 'step,text\n1,"a ""quote"", a\\nbreak and \u2028 another"\n2,\n'
    assert [row["step"] for row in table.read()] == ["1", "2"]
    whole = table.path.read_text()
    with pytest.raises(ValueError, match="colour"):  # an unknown column is refused, and nothing is written
        table.append([{"step": 1, "text": ""}, {"step": 2, "colour": "red"}])
    assert table.path.read_text() == whole
    table.append([{"step": 3, "text": "\n" * 200_000}])
    assert len(table.read()[-1]["text"]) == MAX_CELL, "an answer without end can be read again"
    table.append([{"step": 4, "text": "half \ud83d of a sign"}])
    assert table.read()[-1]["text"] == "half ? of a sign"
    table.write([{"step": True, "text": 1 / 3}])
    assert table.path.read_text() == "step,text\n1,0.333333\n"


def test_a_torn_tail_is_not_read_and_cut_takes_it_away(table):
    table.append([{"step": step, "text": "x"} for step in (1, 2, 3)])
    whole = table.path.read_bytes()
    table.path.write_bytes(whole + b"4,to")
    assert [row["step"] for row in table.read()] == ["1", "2", "3"]
    table.cut(2)
    assert table.path.read_text() == "step,text\n1,x\n2,x\n"
    table.cut(0)
    assert not table.path.exists()


def test_after_a_cut_the_file_equals_one_that_never_went_further(tmp_path):
    straight = CsvTable(tmp_path / "a.csv", ("step", "text"), "step")
    returned = CsvTable(tmp_path / "b.csv", ("step", "text"), "step")
    rows = [{"step": step, "text": f'say "{step}"\nor, less'} for step in range(6)]
    straight.append(rows)
    returned.append(rows[:4])
    returned.cut(2)
    returned.append(rows[3:])
    assert straight.path.read_bytes() == returned.path.read_bytes()


def test_json_lines_are_cut_alike(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl", "env_steps")
    lines.append([{"env_steps": step, "x": 0.1 * step} for step in range(4)])
    whole = lines.path.read_bytes()
    lines.path.write_bytes(whole + b'{"env_st')
    assert len(lines.read()) == 4
    lines.cut(1)
    lines.append([{"env_steps": step, "x": 0.1 * step} for step in (2, 3)])
    assert lines.path.read_bytes() == whole
    with pytest.raises(ValueError, match="JSON"):
        lines.append([{"env_steps": 9, "x": float("nan")}])


def test_an_answer_that_was_used_after_the_checkpoint_is_cut_however_early_it_was_asked(tmp_path):
    folder = RunFolder(tmp_path, 2)
    asked = {"env_step": 10, "status": "ok"}
    used = [asked | {"used_step": 30, "index": 0}, asked | {"used_step": 15, "index": 1}]
    folder.queries.append([*used, asked | {"used_step": None, "index": 2}])  # set aside for a person
    folder.samples.append({"env_steps": 10, **row} for row in used)
    for table in (folder.queries, folder.samples):
        table.cut(20)
    assert [row["index"] for row in folder.queries.read()] == ["1", "2"]
    assert [row["index"] for row in folder.samples.read()] == [1]
    # a log of an older rlvlm has no such column, and gets it with the first cut
    older = [name for name in QUERY_COLUMNS if name not in ("answered_by", "used_step")]
    CsvTable(folder.queries.path, older, "env_step").write([{"env_step": step} for step in (10, 20, 30)])
    folder.queries.cut(20)
    assert [row["env_step"] for row in folder.queries.read()] == ["10", "20"]
    assert len(final_answers(folder.queries.read())) == 2
