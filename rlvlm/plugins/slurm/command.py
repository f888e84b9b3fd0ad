"""`rlvlm slurm`: submits a run or a sweep as a SLURM job, with a script that is written beside its folder."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from rlvlm.core.checks import Bound, NonNegativeInt, PositiveInt, check_bounds
from rlvlm.core.console.arguments import parse
from rlvlm.core.disk import shipped
from rlvlm.core.errors import EXIT_DONE, MachineError, UsageError
from rlvlm.runs.files.folder import default_path
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.settings.config import JUDGE_ROLE, Role, RunConfig
from rlvlm.sweeps.config import find_sweep_file, read_sweep
from rlvlm.sweeps.plan import expand, shared_judges

if TYPE_CHECKING:
    from rlvlm.runs.start.placement import Layout, Node

BODY = "# ---- below this line the copies are alike ----\n"
"""Line of the template below which all jobs' scripts are equal."""
_MAX_GPUS_PER_NODE, _MAX_CPUS_PER_NODE = 16, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig:
    """Resources that a job requests from SLURM."""

    nodes: PositiveInt = 1
    """Machines, >= 1. The run is on the first; judges are placed where their GPUs are."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs per node. One is enough for two judges at --serve.num-gpus 0.5."""
    cpus: Annotated[int, Bound(">= 2")] = 4
    """CPU cores per node, >= 2: one for learning, one for the judge."""
    memory_gb: PositiveInt = 16
    """Memory per node, in GB."""
    time: str = "24:00:00"
    """Time limit of the job, in SLURM's format; a run that needs more is requeued and resumed."""
    partition: str = ""
    """Partition; empty takes the cluster's default."""
    account: str = ""
    """Account to charge; empty takes yours."""
    save_s: Annotated[int, Bound("[30, 3600]")] = 180
    """Time between the signal to save and the time limit, in seconds, 30 to 3600."""
    restarts: NonNegativeInt = 20
    """Maximum number of times that the job requeues itself, >= 0."""
    image: str = ""
    """Apptainer image to run in (cluster/rlvlm.def); empty runs with this Python."""
    scratch: str = ""
    """Fast disk for checkpoints, the job's RLVLM_SCRATCH; the newest and the best are copied to the run's folder."""
    offline: bool = True
    """Whether the job finds weights on disk only (`rlvlm fetch` puts them there)."""
    extra: tuple[str, ...] = ()
    """Additional options for sbatch, without their dashes, e.g. qos=high exclusive."""

    def __post_init__(self) -> None:
        check_bounds(self, "--")
        if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", self.time):
            raise ValueError(f"time must be like 90, 24:00:00 or 2-12 (days-hours), got {self.time!r}")
        for option in (*self.extra, self.partition, self.account):
            if re.search(r"\s|^-", option):
                raise ValueError(f"options for sbatch are single words without dashes, got {option!r}; like qos=high")


@dataclass(frozen=True)
class SlurmArguments:
    """Run a task as a SLURM job that saves, requeues itself and resumes. The run's own options follow after a --. A
    sweep works in the same way; the job writes its report at the end.
    """

    task: tyro.conf.Positional[str]
    """Task, as for rlvlm run; or a sweep's YAML file, as for rlvlm sweep."""
    job: Annotated[SlurmConfig, tyro.conf.arg(name="")] = field(default_factory=SlurmConfig)
    out: Path | None = None
    """The run's folder, on a disk that all nodes share; by default runs/TASK/<time>, or runs/sweeps/NAME for a
    sweep. Script and log lie beside it."""
    show: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the script and stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What a job runs."""

    words: list[str]
    """Words after `rlvlm`, or after `python -m rlvlm.run`."""
    title: str
    home: Path
    """Folder of its results, if none is named."""
    configs: Sequence[RunConfig]
    lay_out: Callable[[Sequence["Node"]], "Layout | None"]
    """Places its processes on a job's nodes; raises MachineError if they have too little."""


def _run_work(arguments: SlurmArguments, options: Sequence[str], prog: str) -> _Work:
    """Returns one run."""
    words = [arguments.task, *options]
    config = parse_run(words, f"{prog} --").config
    if config.out is not None:
        raise UsageError("--out belongs before the --", f"{prog} {arguments.task} --out {config.out} -- ...")
    home = default_path(config.task, datetime.now())
    from rlvlm.runs.start.placement import layout_of  # torch and Ray, after all that a user may get wrong

    lay_out = partial(layout_of, config, is_here=False)
    return _Work(words=words, title=config.title, home=home, configs=[config], lay_out=lay_out)


def _sweep_work(arguments: SlurmArguments, options: Sequence[str]) -> _Work:
    """Returns all runs of a sweep's file."""
    if options:
        raise UsageError(f"a sweep takes no {options[0]}", f"change {arguments.task}, or a copy of it")
    file = Path(arguments.task) if Path(arguments.task).exists() else find_sweep_file(Path(arguments.task).stem)
    sweep = read_sweep(file)
    plans = expand(sweep)
    from rlvlm.runs.start.placement import place  # torch and Ray, after all that a user may get wrong

    def lay_out(machines: Sequence["Node"]) -> None:
        # all of its judges work at once, with at least one run beside them; fewer cores mean fewer concurrent runs
        judges = shared_judges(plans, sweep.resources.judge_cpus, Path()).values()
        started = [role for judge in judges for role in judge.roles if role.name == JUDGE_ROLE]
        mine = Role(name="a run's own process", gpus=sweep.resources.gpus, setting="resources.gpus of the sweep")
        for plan in plans:
            roles = [*started, mine, *(role for role in plan.config.roles if role.name != JUDGE_ROLE)]
            cpus = sum(role.count * role.cpus for role in roles)
            place(roles, [replace(node, cpus=max(node.cpus, cpus), gpus=[*node.gpus]) for node in machines])

    words, home = ["sweep", str(file.absolute())], Path("runs/sweeps") / file.stem
    return _Work(words=words, title=sweep.title, home=home, configs=[plan.config for plan in plans], lay_out=lay_out)


def command(words: Sequence[str], prog: str) -> int:
    """Runs `slurm TASK [options] [-- options of the run]`: prints the job's id, and how to follow it."""
    # options before the -- are the job's, those after it the run's
    split = list(words).index("--") if "--" in words else len(words)
    own, options = words[:split], words[split + 1 :]
    arguments = parse(SlurmArguments, own, prog)
    # errors are reported now, not by a job tomorrow
    is_sweep = Path(arguments.task).suffix in (".yaml", ".yml")
    work = _sweep_work(arguments, options) if is_sweep else _run_work(arguments, options, prog)
    layout = _check_places(arguments.job, work.lay_out)
    if layout is not None:
        from rlvlm.runs.start.networks import main_memory

        _check_memory(arguments.job, main_memory(work.configs[0], layout.roles, layout.where))
    _check_weights(arguments.job, work.configs)
    out = (arguments.out or work.home).absolute()
    if arguments.show:
        sys.stdout.write(job_script(arguments.job, out, work.words))
        return EXIT_DONE
    script = write_job(arguments.job, out, work.words)
    job = submit(script)
    sys.stdout.write(
        f"job {job} submitted: {work.title}\n"
        f"  script  {script}\n"
        f"  follow  tail -F {out}.log\n"
        f"  state   squeue --job {job}\n"
        f"  stop    scancel --batch --signal=TERM {job}   (saves first; resume with: sbatch {script})\n"
        f"  result  {out}\n"
    )
    return EXIT_DONE


def _check_memory(job: SlurmConfig, taken: Mapping[str, Mapping[str, float]]) -> None:
    """Raises UsageError if processes with a large policy need more main memory (`main_memory`) than a node has."""
    for node, roles in taken.items():
        if (total := sum(roles.values())) > job.memory_gb:
            parts = ", ".join(f"{name} {size:.0f}" for name, size in roles.items())
            raise UsageError(
                f"in this job {node} has {job.memory_gb} GB of main memory, and the processes with the policy take "
                f"{total:.0f} at least ({parts})",
                f"--memory-gb {-(-int(1.25 * total) // 8) * 8}, before the --",
            )


def _check_places(job: SlurmConfig, lay_out: Callable[[Sequence["Node"]], "Layout | None"]) -> "Layout | None":
    """Returns the result of `lay_out`, which places each process on the job's nodes, or raises UsageError, with the
    number of GPUs or cores per node that would suffice, if any.
    """
    from rlvlm.runs.start.placement import Node

    def machines(gpus: int, cpus: int) -> list[Node]:
        return [
            Node(name=f"node {number + 1}", cpus=float(cpus), gpus=[1.0] * gpus, is_own=number == 0)
            for number in range(job.nodes)
        ]

    try:
        return lay_out(machines(job.gpus_per_node, job.cpus))
    except MachineError as error:
        more_gpus = range(job.gpus_per_node + 1, _MAX_GPUS_PER_NODE + 1)
        more = [(f"--gpus-per-node {gpus}", machines(gpus, job.cpus)) for gpus in more_gpus]
        more_cpus = range(job.cpus + 1, _MAX_CPUS_PER_NODE + 1)
        more += [(f"--cpus {cpus}", machines(job.gpus_per_node, cpus)) for cpus in more_cpus]
        for option, nodes in more:
            with suppress(MachineError):
                lay_out(nodes)
                raise UsageError(f"in this job {error}", f"{option}, before the --") from error
        raise UsageError(f"in this job {error}", error.fix) from error


def _check_weights(job: SlurmConfig, configs: Sequence[RunConfig]) -> None:
    """Raises UsageError if the runs need weights of judges or policies that the job will not find."""
    networks = [network for config in configs for network in config.kind.networks(config).values()]
    policies = {(model, revision) for _, model, revision in networks if model}
    judges = {
        (config.judge.model, config.judge.revision)
        for config in configs
        if config.reward.asks_judge and not config.serve.app and config.judge.wants_weights
    }
    if not job.offline or not (policies | judges):
        return  # pocket models ship, and others may be fetched by the job itself
    from rlvlm.vlms.files import is_here  # imports the hub's client

    for model, revision in sorted(policies | judges):
        if not is_here(model, revision):
            fetched = f"rlvlm fetch {model}" if (model, revision) in judges else f"hf download {model}"
            raise UsageError(
                f"{model} is not on this disk, and the job will not look for it on the network",
                f"{fetched}  (or --no-offline, before the --)",
            )


def job_script(config: SlurmConfig, out: Path, words: Sequence[str]) -> str:
    """Returns the whole script: the settings first, then the part that all jobs share.

    Args:
        config: resources of the job.
        out: the run's folder, absolute, on a disk that all nodes share.
        words: the task and its options; or `sweep` and its file.
    """
    name = re.sub("[^A-Za-z0-9_.-]+", "-", Path(words[1]).stem if words[0] == "sweep" else words[0])
    options = [
        f"--job-name=rlvlm-{name}",
        f"--output={out}.log",
        f"--nodes={config.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={config.cpus}",
        f"--mem={config.memory_gb}G",
        f"--time={config.time}",
        "--requeue",  # also after a node's failure, with the log kept whole by append
        "--open-mode=append",
        f"--signal=B:USR1@{config.save_s}",  # B: to the script, which passes it to the run and not to the judges
    ]
    # unused options are left out: some clusters refuse an empty or a zero request
    options += [f"--gpus-per-node={config.gpus_per_node}"] if config.gpus_per_node else []
    options += [f"--partition={config.partition}"] if config.partition else []
    options += [f"--account={config.account}"] if config.account else []
    options += [f"--{option}" for option in config.extra]
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options)]
    variables = {"RLVLM_PYTHON": sys.executable, "RLVLM_MAX_RESTARTS": str(config.restarts)}
    variables |= {"RLVLM_IMAGE": os.path.abspath(os.path.expanduser(config.image))} if config.image else {}
    variables |= {"RLVLM_SCRATCH": os.path.expanduser(config.scratch)} if config.scratch else {}
    variables |= {"HF_HUB_OFFLINE": "1"} if config.offline else {}
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += [f"set -- {shlex.join([str(out), *words])}", ""]
    return "\n".join(lines) + shipped("cluster/slurm.sh").read_text().split(BODY)[1]


def write_job(config: SlurmConfig, out: Path, words: Sequence[str]) -> Path:
    """Writes the script beside the run's folder and returns its path.

    Raises:
        UsageError: the path cannot be in a script, a job for this folder was written before, or it cannot be written.
    """
    script = out.with_name(f"{out.name}.sbatch")
    # SLURM would expand % as a pattern in the log's name
    if re.search(r"[\s%\\]", str(out)):
        raise UsageError(f"SLURM allows no spaces, % or \\ in a log's path, got {out}", "choose another --out")
    if script.exists() or out.exists():
        found = out if out.exists() else script
        raise UsageError(f"{found} is there already", f"go on with it: sbatch {script}  (or choose another --out)")
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(job_script(config, out, words))
    except OSError as error:
        raise UsageError(f"cannot write {script}: {error.strerror}", "choose another --out") from error
    return script


def submit(script: Path) -> str:
    """Submits the script to SLURM and returns the job's id.

    Raises:
        MachineError: there is no SLURM here, or it refuses the job; says why.
    """
    if shutil.which("sbatch") is None:
        raise MachineError("there is no sbatch on this machine", f"on a login node of the cluster: sbatch {script}")
    result = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    if result.returncode != 0:
        said = (result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}").splitlines()[-1]
        raise MachineError(f"SLURM refuses the job: {said}", f"correct {script}, then: sbatch {script}")
    # sites print lines of their own before the id; with several clusters the cluster's name follows it
    ids = re.findall(r"^(\d+)(?:;\S+)?\s*$", result.stdout, re.MULTILINE)
    if not ids:
        said = (result.stdout.strip() or "nothing").splitlines()[-1]
        raise MachineError(f"sbatch names no job, it says {said[:200]!r}", "look whether it is there: squeue --me")
    return ids[-1]
