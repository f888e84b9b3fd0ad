"""Runs as SLURM jobs: the script, and whole jobs under commands that do on this machine what SLURM's do on many."""

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from plugins.slurm import fake_slurm
from tiny_run import WORDS

from benchmarks.memory_plan import write_config
from rlvlm.cli import main
from rlvlm.core.guests import guests
from rlvlm.plugins.slurm.command import SlurmConfig, job_script, submit

TEMPLATE = Path(__file__).parents[3] / "cluster" / "slurm.sh"


def test_the_script_has_the_settings_on_top_and_the_template_below(tmp_path):
    config = SlurmConfig(nodes=2, gpus_per_node=1, time="2-00:00:00", image="/images/rlvlm.sif", extra=("qos=high",))
    script = job_script(config, tmp_path / "run", ["drawer_open", "--goal", "it's open"])
    top, _, body = script.partition("set -euo pipefail\n")
    lines = top.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    options = ["--nodes=2", "--gpus-per-node=1", "--time=2-00:00:00", "--requeue", "--signal=B:USR1@180", "--qos=high"]
    assert {f"#SBATCH {option}" for option in [*options, f"--output={tmp_path}/run.log"]} <= set(lines)
    assert "export RLVLM_IMAGE=/images/rlvlm.sif" in lines and "export HF_HUB_OFFLINE=1" in lines
    assert lines[-1] == f"set -- {tmp_path}/run drawer_open --goal 'it'\"'\"'s open'"
    assert TEMPLATE.read_text().endswith(body) and "srun" in body


@pytest.mark.parametrize("script", ["template", "rendered"])
def test_the_script_is_clean_bash(script, tmp_path):
    text = TEMPLATE.read_text() if script == "template" else job_script(SlurmConfig(), tmp_path / "run", ["x"])
    file = tmp_path / "job.sh"
    file.write_text(text)
    checkers = [["bash", "-n", str(file)]] + ([["shellcheck", str(file)]] if shutil.which("shellcheck") else [])
    for command in checkers:
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "--nodes must be >= 1"),
        ({"cpus": 1}, "--cpus must be >= 2"),
        ({"time": "soon"}, "24:00:00"),
        ({"save_s": 5}, r"--save-s must be in \[30, 3600\]"),
        ({"restarts": -1}, "--restarts must be >= 0"),
        ({"extra": ("--qos=high",)}, "without dashes"),
        ({"partition": "a b"}, "single words"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        SlurmConfig(**wrong)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """State of a SLURM whose nodes are all this machine."""
    folder = tmp_path / "slurm"
    for name, value in fake_slurm.install(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    return folder


TWO_LEARNERS_AND_ENGINES = (
    "-- --algo.num-learners 2 --algo.gpus-per-learner 1 --engine.num-replicas 2 --engine.num-gpus 0.5"
)

COLOCATED = (
    "-- --algo.num-learners 2 --algo.gpus-per-learner 1 --engine.colocated --engine.num-replicas 2 --engine.num-cpus 1"
)
SPLIT_SHARES = "-- --algo.num-learners 2 --algo.gpus-per-learner 1 --algo.env-runners 1 --algo.gpus-per-env-runner 0.5"


OF_A_CHECKPOINT = [
    ("push_block -- --policy.model owner/none", 2, "hf download owner/none"),
    ("libero_rewards.yaml --nodes 2 --gpus-per-node 1", 2, "--gpus-per-node 2"),
    ("libero_rewards.yaml --nodes 2 --gpus-per-node 4", 2, "hf download /shared/openvla-oft"),
    ("libero_rewards.yaml -- --seed 1", 2, "a sweep takes no --seed"),
] * ({"openvla", "reward_heads"} <= guests().keys())


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("drawer_opne", 2, "did you mean drawer_open?"),
        ("drawer_open -- --sead 1", 2, "--seed"),
        ("drawer_open --nodes 0", 2, "--nodes must be >= 1"),
        ("drawer_open -- --out x", 2, "before the --"),
        ("drawer_open -- --serve.num-gpus 0.5", 2, "--gpus-per-node 1"),
        ("number_line -- --algo.num-learners 4 --algo.gpus-per-learner 1", 2, "--gpus-per-node 4"),
        (f"number_line --nodes 2 {TWO_LEARNERS_AND_ENGINES}", 2, "--gpus-per-node 2"),
        # a sum of GPUs that fits, and processes that do not: 2 x 0.7 on one card, on two of the job's they do
        ("drawer_open --gpus-per-node 1 -- --serve.num-replicas 2 --serve.num-gpus 0.7", 2, "--gpus-per-node 2"),
        (f"push_block --gpus-per-node 2 {SPLIT_SHARES}", 2, "--gpus-per-node 3"),
        ("push_block --nodes 2 -- --algo.env-runners 9", 2, "--cpus 5"),
        (f"number_line --nodes 2 --gpus-per-node 2 {COLOCATED}", 2, "leave out --engine.colocated"),
        ("drawer_open --gpus-per-node 1 -- --judge.device cuda", 2, "--serve.num-gpus 1"),
        ("drawer_open -- --judge.backend transformers --judge.model owner/none", 2, "rlvlm fetch owner/none"),
        *OF_A_CHECKPOINT,
        ("no_such_rewards.yaml", 2, "there is no sweep 'no_such_rewards'"),
        ("drawer_open --out runs/there", 2, "is there already"),
        ("drawer_open --partition none", 3, "invalid partition specified"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_queued(line, code, message, slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "there").mkdir(parents=True)
    assert main(["slurm", *line.split()]) == code
    out, err = capsys.readouterr()
    assert message in err and not out
    assert not list(slurm.glob("*.sh"))


@pytest.mark.slow
def test_a_node_without_the_main_memory_of_a_large_policy_is_refused(slurm, tmp_path, capsys):
    write_config("qwen2.5-vl-7b", tmp_path / "7b")
    run = ["--", "--policy.model", str(tmp_path / "7b"), "--policy.learns", "lora"]
    job = ["slurm", "number_line", "--gpus-per-node", "1"]
    assert main([*job, *run]) == 2
    message = capsys.readouterr().err
    # 15.4 GiB of weights in bfloat16 on their way to the GPU, and the process itself
    assert "node 1 has 16 GB of main memory" in message and "take 17 at least (the run's own process" in message
    assert "--memory-gb 24, before the --" in message
    assert main([*job, "--memory-gb", "24", "--show", *run]) == 0
    assert "#SBATCH --mem=24G" in capsys.readouterr().out


@pytest.mark.slow
def test_without_slurm_the_script_is_there_and_the_box_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["slurm", "drawer_open", "--out", str(tmp_path / "run")]) == 3
    assert "no sbatch on this machine" in capsys.readouterr().err
    assert (tmp_path / "run.sbatch").is_file()


def submit_with(python: str, script: str, folder: Path) -> str:
    """Submits a job whose Python is the shell script `python`, and returns its id."""
    (folder / "python").write_text(python)
    (folder / "python").chmod(0o755)
    (folder / "job.sbatch").write_text(re.sub("RLVLM_PYTHON=.*", f"RLVLM_PYTHON={folder / 'python'}", script))
    return submit(folder / "job.sbatch")


RUN_THAT_WAITS = """#!/bin/bash
echo "ran $3" >> "$FAKE_SLURM/told"
[[ $3 == resume ]] && exit 0
mkdir -p "${@: -1}" && touch "${@: -1}/config.yaml"
trap 'exit 75' USR1
touch "$FAKE_SLURM/started"
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("number", "restarts", "codes", "ran"),
    [
        (signal.SIGUSR1, 20, [75, 0], ["ran run", "ran resume"]),  # the time limit
        (signal.SIGTERM, 20, [75], ["ran run"]),  # scancel, or a pre-emption after which SLURM itself decides
        (signal.SIGUSR1, 0, [75], ["ran run"]),  # enough is enough
    ],
)
def test_how_the_script_handles_signals(number, restarts, codes, ran, slurm, tmp_path):
    job = submit_with(RUN_THAT_WAITS, job_script(SlurmConfig(restarts=restarts), tmp_path / "run", ["x"]), tmp_path)
    wait_for(slurm / "started", tmp_path / "run.log")
    fake_slurm.signal(slurm, job, number)
    assert fake_slurm.wait(slurm, job) == {"codes": codes}
    assert (slurm / "told").read_text().splitlines() == ran
    said = (tmp_path / "run.log").read_text()
    assert ("restarts are enough; go on with: rlvlm resume" in said) == (restarts == 0)


RUN_THAT_IS_LOST = """#!/bin/bash
n=$(($(cat "$FAKE_SLURM/count" 2>/dev/null || echo 0) + 1))
echo $n > "$FAKE_SLURM/count"
out=$4; [[ $3 == resume ]] || out="${@: -1}"
mkdir -p "$out/checkpoints" && touch "$out/config.yaml"
read -r code step <<< "$(sed -n ${n}p "$FAKE_SLURM/plan")"
[[ -z $step ]] || mkdir "$out/checkpoints/step_$step"
exit $code
"""


@pytest.mark.parametrize(
    ("plan", "codes"),
    [
        (["3 00001000", "0"], [3, 0]),  # a node was lost after a checkpoint
        (["137 00001000", "5 00002000", "3"], [137, 5, 3]),  # memory, the judge, and then it gets no further
        (["3"], [3]),  # it never got anywhere
        (["4 00001000"], [4]),  # its numbers: they would be the same again
        (["2"], [2]),  # its settings
    ],
)
def test_a_job_comes_back_as_long_as_it_gets_further(plan, codes, slurm, tmp_path):
    (slurm / "plan").write_text("\n".join(plan) + "\n")
    job = submit_with(RUN_THAT_IS_LOST, job_script(SlurmConfig(), tmp_path / "run", ["x"]), tmp_path)
    assert fake_slurm.wait(slurm, job) == {"codes": codes}


SWEEP_THAT_IS_LOST = """#!/bin/bash
echo "ran $3 $4" >> "$FAKE_SLURM/told"
[[ $3 == report ]] && exit 0
[[ $3 == resume ]] && exit $(<"$FAKE_SLURM/last")
mkdir -p "$6/task/source/seed_0/checkpoints/step_00001000" && touch "$6/sweep.yaml"
exit 1
"""


@pytest.mark.parametrize(("last", "codes"), [("0", [1, 0]), ("1", [1, 1])])
def test_a_lost_sweep_is_resumed_and_reported_at_its_end(last, codes, slurm, tmp_path):
    """Runs that failed are tried once more; those that fail again are in the report with their cause."""
    out = tmp_path / "sweep"
    (slurm / "last").write_text(last)
    text = job_script(SlurmConfig(), out, ["sweep", "/shared/small.yaml"])
    assert "#SBATCH --job-name=rlvlm-small\n" in text
    assert fake_slurm.wait(slurm, submit_with(SWEEP_THAT_IS_LOST, text, tmp_path)) == {"codes": codes}
    ran = (slurm / "told").read_text().splitlines()
    assert ran == ["ran sweep /shared/small.yaml", f"ran resume {out}", f"ran report {out}"]


def wait_for(file: Path, log: Path) -> None:
    end = time.monotonic() + 300
    while not file.exists():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.01)


@pytest.mark.ray
@pytest.mark.full
def test_a_job_of_two_nodes_saves_at_its_time_limit_comes_back_and_ends(slurm, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["--nodes", "2", "--", *WORDS[1:], "--track.checkpoint-every-steps", "200"]
    assert main(["slurm", "rlvlm.testing:TINY", "--out", str(out), *words]) == 0
    job = capsys.readouterr().out.split()[1]
    shared = Path(f"{out}.job-{job}")
    wait_for(shared / "ready", tmp_path / "run.log")  # there only when both nodes are
    assert (shared / "token").stat().st_mode & 0o777 == 0o600
    wait_for(out / "metrics.jsonl", tmp_path / "run.log")
    fake_slurm.signal(slurm, job, signal.SIGUSR1)
    assert fake_slurm.wait(slurm, job) == {"codes": [75, 0]}
    assert not shared.exists()
    said = (tmp_path / "run.log").read_text()
    assert "slurm: SIGUSR1, saving" in said and "slurm: requeue for the time limit, after 0 restarts" in said
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["exit_reason"], summary["env_steps"]) == ("done", 400)
    steps = [int(json.loads(line)["env_steps"]) for line in open(out / "metrics.jsonl")]
    assert steps == sorted(set(steps))
