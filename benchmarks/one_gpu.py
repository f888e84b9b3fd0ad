"""Whole runs on one GPU with random weights of published sizes: memory of each process, seconds, exact resume.

    python benchmarks/one_gpu.py write sizes exact judge vla sac --models /dev/shm/models --out one_gpu
    python benchmarks/one_gpu.py write exact --parts policy --deterministic    # is a resumed 3B the same to the digit?
    python benchmarks/one_gpu.py write exact --small    # tiny checkpoints: what a CPU can try

Stages are played one after the other, and the commands of a stage beside each other; each ends after its time limit.
`write` makes the checkpoints that the others use. Every half second the driver (nvidia-smi) is asked what each process
holds on the GPU. `OUT/report.json` has seconds, exit codes and peaks by command and process, `OUT/NAME.log` what a
command printed.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import tyro

PYTHON = sys.executable
POLL_S = 0.5
GPU_TESTS = ("tests/serving/test_replica.py", "tests/algorithms/test_on_a_second_device.py")


@dataclass(frozen=True, kw_only=True)
class Config:
    stages: tyro.conf.Positional[list[Literal["write", "sizes", "exact", "judge", "vla", "sac"]]]
    models: Path = Path("/dev/shm/models")
    """Where the checkpoints are, 48 GB of them."""
    out: Path = Path("one_gpu")
    small: bool = False
    """Tiny checkpoints."""
    limit_s: float = 240.0
    """Longest time for a command."""
    cap_gib: float = 22.0
    """What the 7B VLA may use of the GPU; the rest is taken beforehand."""
    parts: tuple[Literal["policy", "judge", "vla", "smolvla"], ...] = ("policy", "judge", "vla", "smolvla")
    """Checkpoints that `write` makes."""
    deterministic: bool = False
    """Whether `exact` plays its runs with --algo.deterministic as well, beside those without."""


@dataclass
class Watch(threading.Thread):
    """The most that each process below this one has held on the GPU, in MiB, as the driver says."""

    peaks: dict[tuple[int, str], int] = field(default_factory=dict)
    """By the command that started it, as its process id, and by what the process calls itself."""
    total: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        while not self.is_over:
            for pid, mib in ask_driver("--query-compute-apps=pid,used_memory"):
                with suppress(psutil.Error):
                    process = psutil.Process(pid)
                    name = " ".join(process.cmdline())[:60]
                    above = [pid, *(parent.pid for parent in process.parents())]
                    # the one right below us, or the process itself where it is somebody else's
                    command = above[above.index(os.getpid()) - 1] if os.getpid() in above[1:] else pid
                    key = (command, name)
                    self.peaks[key] = max(self.peaks.get(key, 0), mib)
            self.total = max([self.total, *(mib for _, mib in ask_driver("--query-gpu=index,memory.used"))])
            time.sleep(POLL_S)


def ask_driver(query: str) -> list[tuple[int, int]]:
    """Pairs of whole numbers; none without a driver."""
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.splitlines()
        return [(int(first), int(second)) for first, second in (line.split(",") for line in lines)]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    config.out.mkdir(parents=True, exist_ok=True)
    config.models.mkdir(parents=True, exist_ok=True)
    path = config.out / "report.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    for stage in config.stages:
        report[stage] = play(config, stage)
        path.write_text(json.dumps(report, indent=2) + "\n")
        print(stage, json.dumps(report[stage], indent=2), flush=True)


def play(config: Config, stage: str) -> dict[str, Any]:
    watch = Watch()
    watch.start()
    began = time.monotonic()
    rows = {"write": write, "sizes": sizes, "exact": exact, "judge": judge, "vla": vla, "sac": sac}[stage](config)
    watch.is_over = True
    watch.join()
    peaks = sorted(watch.peaks.items(), key=lambda item: -item[1])
    return {
        "seconds": round(time.monotonic() - began, 1),
        "gpu_peak_gib": round(watch.total / 1024, 2),
        "process_peaks_gib": [f"{mib / 1024:.2f} {pid} {name}" for (pid, name), mib in peaks[:16]],
        "commands": rows,
    }


def write(config: Config) -> dict[str, Any]:
    script = [PYTHON, "benchmarks/real_sizes.py"]
    options = ["--folder", str(config.models), "--write-only", *(["--small"] if config.small else [])]
    return beside(config, {f"write_{part}": [*script, part, *options] for part in config.parts})


def sizes(config: Config) -> dict[str, Any]:
    """Flow policies, each alone on the GPU: their speed counts."""
    size = ["--small", "--rows", "8", "--turns", "2"] if config.small else []
    script = [PYTHON, "benchmarks/real_sizes.py"]
    rows = {}
    for part in ("smolvla", "pi0"):
        out = config.out / f"sizes_{part}.json"
        command = [*script, part, "--folder", str(config.models), "--out", str(out), *size]
        rows |= beside(config, {f"sizes_{part}": command})
        if out.exists():
            rows[f"sizes_{part}"]["found"] = json.loads(out.read_text())
    return rows


def exact(config: Config) -> dict[str, Any]:
    """Two undisturbed runs of the 3B, and one that is killed at its first checkpoint after an update and resumed."""
    options = (
        "--policy.learns lora --policy.dtype auto --algo.num-envs 16 --algo.rollout-turns 32 --algo.minibatch-turns 32 "
        "--algo.epochs 1 --algo.max-reply-tokens 24 --algo.microbatch-tokens 4096 --policy.cache-mib 128 --steps 96 "
        "--env.episode-steps 4 --eval.every-steps 96 --eval.episodes 4 --sft.turns 32 --sft.updates 2 "
        "--sft.batch-size 8 --track.checkpoint-every-steps 32 --track.log-every-steps 32 --algo.no-shrinkage "
        "--algo.max-kl 0"
    )
    base = [*rlvlm("run"), "number_line", "--policy.model", str(config.models / "policy"), *shlex.split(options)]
    modes = {"": []} | ({"deterministic_": ["--algo.deterministic"]} if config.deterministic else {})
    folders = {
        f"{mode}{name}": config.out / "runs" / f"{mode}{name}"
        for mode in modes
        for name in ("first", "second", "killed")
    }
    commands = {
        f"exact_{mode}{name}": [*base, *more, *out(config, f"{mode}{name}")]
        for mode, more in modes.items()
        for name in ("first", "second", "killed")
    }
    kills = {f"exact_{mode}killed": folders[f"{mode}killed"] / "checkpoints" for mode in modes}
    rows = beside(config, commands, kills=kills)
    resumed = {f"exact_{mode}resumed": [*rlvlm("cli"), "resume", str(folders[f"{mode}killed"])] for mode in modes}
    rows |= beside(config, resumed)
    for mode in modes:
        first = figures(folders[f"{mode}first"])
        for name in (f"{mode}second", f"{mode}killed"):
            other = figures(folders[name])
            differ = {key: (first[key], other.get(key)) for key in first if first[key] != other.get(key)}
            rows[f"{mode}first against {name}"] = {
                "values": len(first),
                "differ": len(differ),
                "which": dict([*differ.items()][:12]),
            }
    for name in resumed:
        print(f"{name}: planned {planned(folders['killed'])}; the driver {rows[name]['gpu_gib']}", flush=True)
    return rows


def planned(run: Path) -> str:
    """The memory plan of a run's learner, part by part."""
    from rlvlm.runs.files.folder import read_config
    from rlvlm.runs.start.networks import learner_memory

    return learner_memory(read_config(run))


def judge(config: Config) -> dict[str, Any]:
    """An 8B judge in 4 bits on half of the GPU beside SAC; a 3B whose only learner has the whole; tests of the GPU."""
    share = "0" if config.small else "0.5"
    chat = f"--judge.backend transformers --judge.model {config.models / 'judge'} --judge.prompt direct"
    nf4 = "" if config.small else f"--judge.quantization nf4 --serve.num-gpus {share}"
    learner = "--policy.learns lora --algo.num-learners 1 --algo.rollout-turns 64 --algo.minibatch-turns 32 --steps 128"
    learner += " --algo.num-envs 32 --algo.max-reply-tokens 24 --algo.microbatch-tokens 8192 --env.episode-steps 4"
    learner += " --eval.episodes 8 --sft.turns 64 --sft.updates 2 --sft.batch-size 16"
    learner += "" if config.small else " --algo.gpus-per-learner 1"
    return beside(
        config,
        {
            "judged": [*rlvlm("run"), "drawer_open", "--smoke", *shlex.split(f"{chat} {nf4}"), *out(config, "judged")],
            "learner": [
                *rlvlm("run"), "number_line", "--policy.model", str(config.models / "policy"), *shlex.split(learner),
                *out(config, "learner"),
            ],
            "tests": [PYTHON, "-m", "pytest", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", *GPU_TESTS],
        },
    )  # fmt: skip


def vla(config: Config) -> dict[str, Any]:
    """OpenVLA-OFT 7B with LoRA where all but `cap_gib` of the GPU is taken, then SmolVLA."""
    ballast = (
        "import sys, time, torch; free, total = torch.cuda.mem_get_info(); "
        f"keep = torch.empty(max(0, free - int({config.cap_gib} * 2**30)), dtype=torch.uint8, device='cuda'); "
        "print(torch.cuda.mem_get_info(), flush=True); time.sleep(1000)"
    )
    options = "--algo.rounds 1 --algo.groups 4 --algo.group-size 8 --algo.warm-up 0 --steps 2048"
    options += " --eval.episodes 8 --env.episode-steps 32 --algo.microbatch-turns 8"
    options += " --algo.minibatches 2 --reward.source judged --reward.teacher progress --reward.noise 0.2"
    base = [*rlvlm("run"), "push_block", *shlex.split(options), "--policy.model"]
    taken = None if config.small else subprocess.Popen([PYTHON, "-c", ballast])
    time.sleep(0 if config.small else 8)
    rows = beside(config, {"vla": [*base, str(config.models / "vla"), *out(config, "vla")]})
    if taken:
        taken.kill()
        taken.wait()
    flow = shlex.split("--policy.head flow --policy.flow.steps 10 --policy.flow.learn one --policy.flow.start-std 1")
    command = [*base, str(config.models / "smolvla"), *flow, *out(config, "smolvla")]
    return rows | beside(config, {"smolvla": command})


def sac(config: Config) -> dict[str, Any]:
    """SAC's small networks on the GPU and on the CPU, one after the other, and where a short run's seconds go."""
    base = [
        *rlvlm("run"),
        "drawer_open",
        "--reward.source",
        "environment",
        "--steps",
        "600" if config.small else "3000",
    ]
    base += ["--eval.episodes", "1"]
    devices = ("cpu",) if config.small else ("cuda", "cpu")
    rows = {}
    for device in devices:
        name = f"sac_{device}"
        rows |= beside(config, {name: [*base, "--algo.device", device, *out(config, name)]})
    return rows | beside(config, {"start_up": [*rlvlm("run"), "number_line", "--smoke", *out(config, "start_up")]})


def rlvlm(module: str) -> list[str]:
    return [PYTHON, "-m", f"rlvlm.{module}"]


def out(config: Config, name: str) -> list[str]:
    return ["--out", str(config.out / "runs" / name)]


def beside(config: Config, commands: dict[str, list[str]], kills: dict[str, Path] | None = None) -> dict[str, Any]:
    """Plays commands at the same time; one of `kills` is killed as soon as a checkpoint after step 0 lies there."""
    watch = Watch()
    watch.start()
    began = time.monotonic()
    processes = {}
    for name, command in commands.items():
        with open(config.out / f"{name}.log", "w") as log:
            processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    rows: dict[str, Any] = {}
    while len(rows) < len(processes):
        for name, process in processes.items():
            if name in rows:
                continue
            late = time.monotonic() - began > config.limit_s
            saved = kills[name].glob("step_*") if kills and name in kills else ()
            due = any(int(folder.name.removeprefix("step_")) for folder in saved)
            if due or late:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.poll() is not None:
                seconds = round(time.monotonic() - began, 1)
                rows[name] = {"exit_code": process.returncode, "seconds": seconds, "late": late}
                rows[name]["command"] = shlex.join(commands[name])
        time.sleep(POLL_S)
    watch.is_over = True
    watch.join()
    for name, process in processes.items():
        held = {what: round(mib / 1024, 2) for (command, what), mib in watch.peaks.items() if command == process.pid}
        # where the driver counts processes by other ids than ours, as in a container: all on the card together
        rows[name]["gpu_gib"] = held or {"all processes": round(watch.total / 1024, 2)}
    return rows


def figures(run: Path) -> dict[str, Any]:
    """Every logged value of a run by its row, without seconds, rates and memory."""
    found: dict[str, Any] = {}
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    for number, row in enumerate(map(json.loads, lines)):
        for key, value in row.items():
            if not any(word in key for word in ("seconds", "_s", "rss", "gib", "memory")):
                found[f"{number} {key}"] = value
    return found


if __name__ == "__main__":
    main()
