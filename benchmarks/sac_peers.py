"""SAC's env steps per second beside its peers, on one core: `python benchmarks/sac_peers.py`.

One update per step, two hidden layers of 256, batches of 256. Every contestant is a process of its own, pinned to one
core; they take turns of one round each, so that a busy machine slows them all, and the medians over the rounds count.
rlvlm runs inside its RLlib algorithm. Run `benchmarks/peers/install.sh` first. Prints JSON, and writes it to --out.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
PEERS = HERE / "peers"
BASELINES = HERE / ".envs" / "baselines" / "bin" / "python"
CONTESTANTS = {
    "rlvlm": [sys.executable, PEERS / "run_rlvlm.py"],
    "sbx": [BASELINES, PEERS / "run_sb3.py", "sbx"],
    "sb3": [BASELINES, PEERS / "run_sb3.py", "sb3"],
    "cleanrl": [sys.executable, PEERS / "run_cleanrl.py"],
    "rllib": [sys.executable, PEERS / "run_rllib.py", "plain"],
    "rllib_default": [sys.executable, PEERS / "run_rllib.py", "default"],
}
WARM_UP = 600
"""Steps before the first round: the random ones, and what compiles."""
SLOW = ("rllib", "rllib_default")
"""These take rounds of half the steps: the speed is the same, the wait is not."""
BATCH, HIDDEN = 256, 256


class Contestant:
    """A process that steps an env when told to."""

    def __init__(self, name: str, task: str, core: int) -> None:
        self.name, self.rounds = name, []
        one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
        environment = (
            os.environ
            | one_thread
            | {
                "PYTHONPATH": f"{HERE.parent}:{PEERS}",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_MODE": "disabled",
                "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
            }
        )
        command = ["taskset", "-c", str(core), *map(str, CONTESTANTS[name]), task]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def advance(self, steps: int) -> dict[str, float]:
        """Steps of the env per second of wall and of processor time."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise SystemExit(f"{self.name} ended with code {self._process.wait()}; run its script by hand to see why")
        told = json.loads(answer)
        return {clock: told["steps"] / told[f"{clock}_s"] for clock in ("wall", "cpu")}

    def stop(self) -> None:
        """Ends the process by ending its orders."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=60)


def measure_matmul() -> float:
    """GFLOPS of fp32 matrix products on this core now, the best of the shapes and by the library that SAC uses."""
    code = (
        "import torch, time; torch.set_num_threads(1); best = 0.0\n"
        "from rlvlm.algorithms.sac_pebble.dense import fast_products\n"
        "with fast_products():\n"
        "    for n in (256, 512):\n"
        "        a = torch.randn(n, n)\n"
        "        for _ in range(40):\n"
        "            started = time.thread_time(); [a @ a for _ in range(8)]\n"
        "            best = max(best, 8 * 2 * n**3 / (time.thread_time() - started) / 1e9)\n"
        "print(best)"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def update_gflop(obs: int, actions: int) -> float:
    """Floating-point operations, in 10^9, of the matrix products that one textbook update of SAC needs."""
    policy = obs * HIDDEN + HIDDEN**2 + HIDDEN * 2 * actions
    critics = 2 * ((obs + actions) * HIDDEN + HIDDEN**2 + HIDDEN)
    policy_back = HIDDEN**2 + HIDDEN * 2 * actions  # gradients at the inputs of all layers but the first
    critics_back = 2 * (HIDDEN**2 + HIDDEN)
    passes = (
        2 * policy  # at the next observation, and at this one
        + critics  # the target
        + critics
        + critics_back
        + critics  # values, gradients of values and of the weights
        + critics
        + critics_back
        + 2 * HIDDEN * actions  # values of the policy's actions, gradients there
        + policy_back
        + policy
    )
    return 2 * BATCH * passes / 1e9


def compare(task: str, names: list[str], rounds: int, steps: int, core: int) -> dict[str, object]:
    contestants = [Contestant(name, task, core) for name in names]
    try:
        for contestant in contestants:
            contestant.advance(WARM_UP)
        matmul = []
        for _ in range(rounds):
            matmul.append(measure_matmul())
            for contestant in contestants:
                contestant.rounds.append(contestant.advance(steps // 2 if contestant.name in SLOW else steps))
                print(task, contestant.name, contestant.rounds[-1], file=sys.stderr, flush=True)
    finally:
        for contestant in contestants:
            contestant.stop()
    gflop = update_gflop(*{"pendulum": (3, 1), "drawer_open": (39, 4)}[task])
    result: dict[str, object] = {
        "gflop_per_update": round(gflop, 3),
        "matmul_gflops": round(statistics.median(matmul), 1),
    }
    for clock in ("wall", "cpu"):
        speeds = {peer.name: statistics.median(row[clock] for row in peer.rounds) for peer in contestants}
        result[f"steps_per_{clock}_s"] = {name: round(speed, 1) for name, speed in speeds.items()}
        ours = next(peer.rounds for peer in contestants if peer.name == "rlvlm")
        result[f"{clock}_ratio"] = {
            one.name: round(
                statistics.median(mine[clock] / theirs[clock] for mine, theirs in zip(ours, one.rounds, strict=True)), 2
            )
            for one in contestants
            if one.name != "rlvlm"
        }
        result[f"share_of_matrix_bound_{clock}"] = round(speeds["rlvlm"] * gflop / statistics.median(matmul), 3)
    return result


def machine() -> dict[str, object]:
    model = next(
        (
            line.partition(": ")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", nargs="+", default=["pendulum", "drawer_open"], choices=["pendulum", "drawer_open"])
    parser.add_argument("--peers", nargs="+", default=list(CONTESTANTS)[1:], choices=list(CONTESTANTS)[1:])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500, help="env steps per round")
    parser.add_argument("--core", type=int, default=0, help="the core they are pinned to")
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args()
    result = {"machine": machine()} | {
        task: compare(task, ["rlvlm", *chosen.peers], chosen.rounds, chosen.steps, chosen.core) for task in chosen.envs
    }
    text = json.dumps(result, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
