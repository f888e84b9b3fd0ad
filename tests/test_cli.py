"""What users type by mistake, and what they see: a box, the fix, the right exit code, nothing left behind."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from tiny_run import box_words

from rlvlm.cli import COMMANDS, main
from rlvlm.core.guests import with_guests
from rlvlm.core.judging import Query
from rlvlm.demonstrations.folder import create_folder
from rlvlm.judges.cache import CachedJudge
from rlvlm.labels.store import LabelStore
from rlvlm.run import main as run_main
from rlvlm.runs.files.checkpoints import RunState
from rlvlm.runs.files.folder import find_folder
from rlvlm.runs.settings.config_file import read_config_text
from rlvlm.runs.settings.tree import flat
from rlvlm.testing import FakeJudge

MISTAKES = [
    ("", 0, "rlvlm run"),
    ("rnu drawer_open", 2, "did you mean rlvlm run?"),
    ("train drawer_open", 2, "did you mean rlvlm run?"),
    ("judge-bench letters --reference oracle", 2, "is no LeRobot data set"),
    ("run", 2, "drawer_open, "),
    ("run drawer_opne", 2, "did you mean drawer_open?"),
    ("run no.such:TASK", 2, "no/such.py must lie in this folder"),
    ("run drawer_open --algo.batchsize 3", 2, "--algo.batch-size"),
    ("run drawer_open --lerning-rate 3", 2, "did you mean --algo.actor-lr (Learning rate of the actor), or"),
    ("run push_block --learning-rate 3", 2, "or --algo.lr (Initial step size of Adam for the policy), or"),
    ("run drawer_open --algo.learning-rate=3", 2, "did you mean --algo.actor-lr (Learning rate of the actor), or"),
    ("run drawer_open --algo.batch-size lots", 2, "--algo.batch-size is a whole number, got 'lots'"),
    ("run drawer_open --algo.batch-size 0", 2, "algo.batch_size must be >= 1, got 0"),
    ("run drawer_open --env.start randm", 2, "'fixed', 'near', 'random'"),
    ("run drawer_open --judge.backend transformers", 2, "needs judge.model"),
    ("run drawer_open --judge.model random", 2, "is for the backends"),
    ("run drawer_open --reward.source score --feedback.segment-steps 2", 2, "feedback.segment_steps must be 1, got 2"),
    ("run drawer_open --reward.source score --reward-model.label-smoothing 0.1", 2, "label_smoothing is of pairs"),
    ("run drawer_open --reward.source score --feedback.sampling entropy", 2, "use disagreement or k_center"),
    ("run drawer_open --feedback.sampling best", 2, "entropy, k_center, or my_file:NAME"),
    ("run drawer_open --judge.backend transformers --judge.model /no/such/model", 2, "is not a folder"),
    ("run drawer_open --out used", 2, "rlvlm resume"),
    ("run drawer_open --out letters", 2, "is not empty"),
    ("run drawer_open --out letters/a.txt", 2, "is a file"),
    ("run drawer_open --track.dashboard --track.dashboard-port {port}", 3, "--track.dashboard-port"),
    ("resume", 2, "PATH"),
    ("resume nowhere", 2, "does not exist"),
    ("resume letters", 2, "not in a run's folder"),
    ("resume broken", 2, "did you mean seed?"),
    ("eval nowhere", 2, "does not exist"),
    ("eval used", 2, "no checkpoint yet"),
    ("eval used --episodes none", 2, "invalid literal for int()"),
    ("sweep", 2, "Missing from rlvlm sweep"),
    ("sweep reward_sorces", 2, "ready ones: feedback_budget"),
    ("sweep nowhere.yaml", 2, "cannot read nowhere.yaml"),
    ("sweep used/config.yaml", 2, "unknown key task"),
    ("sweep reward_sources --out letters", 2, "holds no sweep"),
    ("report", 2, "rlvlm report runs/"),
    ("report letters", 2, "not in a run's folder"),
    ("doctor --jsn", 2, "--json"),
    ("run drawer_open --judge.backend cached", 2, "needs judge.cached.store"),
    ("run drawer_open --judge.store letters", 2, "not empty"),
    ("labels", 2, "followed by show, export"),
    ("labels shw store", 2, "rlvlm labels show"),
    ("labels show nowhere", 2, "no label store"),
    ("judge-report", 2, "at least one"),
    ("judge-report nowhere", 2, "does not exist"),
    ("judge-report store --ask-swapped -1", 2, "must be >= 0"),
    ("judge-report store --ask-swapped 5", 2, "not in a run"),
    ("collect", 2, "name a task"),
    ("collect numberline", 2, "did you mean"),
    ("collect drawer_open", 2, "an env in steps"),
    ("collect minigrid/MiniGrid-Playground-v0", 2, "no scripted expert"),
    ("collect number_line --seed 1000", 2, "--seed must be 0 to 999, got 1000"),
    ("collect number_line --wrong-actions 2", 2, "--wrong-actions must be in [0, 1], got 2"),
    ("collect push_block --noise -1", 2, "--noise must be in [0, inf), got -1"),
    ("collect number_line --noise 0.1", 2, "--noise would have no effect"),
    ("collect push_block --no-pictures", 2, "--pictures would have no effect"),
    ("collect push_block --player.model a/b", 2, "--player would have no effect on push_block"),
    ("collect number_line --player.temperature 1", 2, "no effect without --player.model"),
    ("collect number_line --player.model a/b --wrong-actions 0.5", 2, "apply to the scripted expert"),
    ("collect number_line --out letters", 2, "name a new or an empty folder with --out"),
    ("data show nowhere", 2, "not a folder of demonstrations"),
    ("sft --from somewhere", 2, "name a task"),
    ("sft push_block --from d", 2, "is not a folder of demonstrations"),
    ("sft drawer_open --from d", 2, "it needs no demonstrations: rlvlm run drawer_open"),
    ("sft number_line", 2, "name a folder of demonstrations with --from"),
    ("sft number_line --from letters", 2, "is not a folder of demonstrations"),
    ("sft number_line --from other", 2, "holds demonstrations of ez_points, not of number_line"),
    ("sft number_line --from demos --job.max-reply-tokens 0", 2, "job.max_reply_tokens must be >= 1, got 0"),
    (
        "sft number_line --from demos --sft.turns 5 --sft.p-wrong 0.1",
        2,
        "--sft.turns, --sft.p-wrong: no effect with --from",
    ),
]


@pytest.fixture
def taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a run, one whose config was edited badly, a store of one label, demonstrations, and letters."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").touch()
    for name, text in (("used", "task: drawer_open\n"), ("broken", "task: drawer_open\nsede: 1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
        (tmp_path / name / "command.txt").write_text("rlvlm\n")
    query = Query(goal="open it", left=np.zeros((1, 4, 4, 3), np.uint8), right=np.ones((1, 4, 4, 3), np.uint8))
    CachedJudge(FakeJudge(), LabelStore(tmp_path / "store")).compare([query])
    create_folder(tmp_path / "other", "ez_points", "turns", ("1",))
    create_folder(tmp_path / "chunks", "push_block", "chunks")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("line", "code", "message"), MISTAKES, ids=[line or "nothing" for line, _, _ in MISTAKES])
def test_a_mistake_is_reported_with_its_fix(line, code, message, place, taken_port, capsys):
    before = sorted(place.rglob("*"))
    # the judge and the drawing are not what these lines are about
    plain = ["--reward.teacher", "oracle"] if line.startswith("run drawer_open") and "judge" not in line else []
    assert main([*line.format(port=taken_port).split(), *plain]) == code
    out, err = capsys.readouterr()
    assert message in box_words(out if code == 0 else err)
    assert "Traceback" not in out + err
    assert not (code and out)
    assert sorted(place.rglob("*")) == before


@pytest.mark.slow
def test_python_m_takes_the_same_words(place, capsys):
    assert run_main(["drawer_opne"]) == 2
    assert "did you mean drawer_open?" in capsys.readouterr().err
    assert run_main(["drawer_open", "--seed", "5", "--print-config"]) == 0
    assert read_config_text(capsys.readouterr().out).seed == 5
    assert not (place / "runs").exists()


def test_a_missing_renderer_is_reported(place, monkeypatch, capsys):
    monkeypatch.setenv("MUJOCO_GL", "bogus")
    assert main(["run", "drawer_open", "--reward.teacher", "oracle"]) == 3
    assert "fix: unset MUJOCO_GL" in box_words(capsys.readouterr().err)
    assert not (place / "runs").exists()


def test_a_finished_run_says_so(place, capsys):
    (place / "used" / "summary.json").write_text('{"exit_reason": "done"}')
    assert main(["resume", "used"]) == 0
    assert "is finished" in capsys.readouterr().out


def test_a_finished_run_goes_on_once_its_config_wants_more_steps(place, monkeypatch):
    wanted = read_config_text((place / "used" / "config.yaml").read_text()).steps
    monkeypatch.setattr("rlvlm.runs.train.resume_run", lambda folder, config, _: 75)
    for done, code in ((wanted, 0), (wanted - 1, 75)):
        (place / "used" / "summary.json").write_text(f'{{"exit_reason": "done", "env_steps": {done}}}')
        assert main(["resume", "used"]) == code


@pytest.mark.slow
def test_a_run_is_resumed_with_settings_of_its_place_and_length_and_no_others(place, monkeypatch, capsys):
    went_on = []
    monkeypatch.setattr("rlvlm.runs.train.resume_run", lambda folder, config, _: went_on.append(config.steps) or 75)
    folder = find_folder(place / "used")
    state = RunState(env_steps=5, wall_s=1.0, peak_rss_mb=1.0, settings=flat(folder.config()))
    folder.checkpoints.save(state, lambda algorithm: algorithm.mkdir(), is_best=True)
    assert main(["resume", "used", "--steps", "77", "--reward.teacher", "oracle"]) == 2
    assert "reward.teacher is 'oracle', before" in box_words(capsys.readouterr().err)
    assert main(["resume", "used", "--steps", "77"]) == 75
    assert went_on == [77] and folder.config().steps == 77, "what is written there is what runs"
    (place / "used" / "summary.json").write_text('{"exit_reason": "done", "env_steps": 77}')
    assert main(["resume", "used", "--seed", "9"]) == 2, "a finished run of another seed is another run"
    assert "seed is 9, before 0" in box_words(capsys.readouterr().err)


@pytest.fixture
def full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("a disk of one megabyte needs the right to mount one")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_reported(full_disk, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["run", "rlvlm.testing:TINY", "--reward.teacher", "oracle", "--out", str(full_disk / "run")]
    assert main(words) == 3
    assert "1 MiB free, a run needs 512 MiB" in box_words(capsys.readouterr().err)
    assert list(full_disk.iterdir()) == []


HEAVY = ("torch", "ray", "numpy", "mujoco", "matplotlib", "transformers")


@pytest.mark.slow
def test_light_commands_load_neither_torch_nor_ray():
    lines = ["--help", "run drawer_open --print-config", "run drawer_open --help", "eval --help", "resume --help"]
    lines += ["judge-report --help", "labels show --help"]
    # last, as the options of a guest may be a config of demonstrations, whose files are arrays
    of_guests = [f"{command} --help" for command in with_guests("commands", {})]
    code = (
        "import sys\nfrom rlvlm.cli import main\nfor line in sys.argv[1:]:\n    code = main(line.split())\n"
        f"    heavy = set({HEAVY}) - ({{'numpy'}} if line in {of_guests} else set())\n"
        "    loaded = heavy & set(sys.modules)\n"
        "    assert code == 0 and not loaded, (line, code, loaded)\n"
    )
    child = subprocess.run([sys.executable, "-c", code, *lines, *of_guests], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "usage: rlvlm" in child.stdout and "task: drawer_open" in child.stdout


@pytest.mark.slow
def test_a_wrong_name_is_refused_before_torch_and_ray_are_imported():
    lines = [f"{name} nowhere" for name in with_guests("commands", COMMANDS) if name != "doctor" and " " not in name]
    lines += [f"labels {form} nowhere" for form in ("show", "export", "ask")] + ["serve nowhere.yaml", "sweep no.yaml"]
    code = (
        "import sys\nfrom rlvlm.cli import main\nfor line in sys.argv[1:]:\n    code = main(line.split())\n"
        "    loaded = {'torch', 'ray'} & set(sys.modules)\n    print(line, code, loaded)\n"
        "    assert code == 2 and not loaded\n"
    )
    child = subprocess.run([sys.executable, "-c", code, *lines], capture_output=True, text=True, env=os.environ)
    assert child.returncode == 0, child.stdout


@pytest.mark.slow
@pytest.mark.parametrize("module", ["rlvlm.runs.train", "rlvlm.algorithms.policy_gradient.chunks"])
def test_a_run_and_its_env_runners_wait_for_nothing_that_their_first_step_does_not_need(module):
    idle = {"transformers", "peft", "scipy.spatial", "scipy.special", "sympy", "matplotlib", "av"}
    idle |= {"ray.serve", "fastapi"}
    code = f"import sys, {module}; print({idle} & set(sys.modules))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "set()\n", "each of them costs every process of a run half a second to two"


def test_a_module_of_the_working_folder_is_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "task_of_mine.py").write_text(
        "from rlvlm.envs.registry import Task\n"
        "MINE = Task(name='mine', goal='push the red block to the green line', maker='rlvlm.testing:TinyEnv')\n"
    )
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.chdir(tmp_path)
    assert main(["check-task", "task_of_mine:MINE", "--episodes", "2"]) == 0
    assert "passes the env contract" in capsys.readouterr().out
