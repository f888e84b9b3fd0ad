"""`rlvlm slurm`: its words, and what a user reads when the job is submitted."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro

from rlvlm.errors import EXIT_DONE, UsageError
from rlvlm.experiments.config import RunConfig
from rlvlm.experiments.folder.run_folder import default_path
from rlvlm.experiments.slurm import SlurmConfig, job_script, log_file, submit, write_job
from rlvlm.experiments.terminal.arguments import parse_run
from rlvlm.judges.config import WEIGHT_BACKENDS

_SPLIT = "--"


@dataclass(frozen=True)
class SlurmArguments:
    """Run a task as a SLURM job that saves, requeues itself and goes on. The run's own options follow after a --."""

    task: tyro.conf.Positional[str]
    """The task, as for rlvlm run."""
    job: Annotated[SlurmConfig, tyro.conf.arg(name="")] = field(default_factory=SlurmConfig)
    out: Path | None = None
    """The run's folder, on a disk that all nodes share; by default runs/TASK/<time>. Script and log lie beside it."""
    show: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the script and stop."""


def slurm_command(words: Sequence[str], prog: str) -> int:
    """`slurm TASK [options] [-- options of the run]`."""
    own, options = _split(words)
    try:
        arguments = tyro.cli(SlurmArguments, args=own, prog=prog)
    except ValueError as error:  # a rule of SlurmConfig
        raise UsageError(str(error), f"{prog} --help") from error
    run_words = [arguments.task, *options]
    config = parse_run(run_words, f"{prog} {_SPLIT}").config  # what is wrong with it is said now, not by a job tomorrow
    if config.out is not None:
        raise UsageError("--out belongs before the --", f"{prog} {arguments.task} --out {config.out} -- ...")
    if config.asks_judge and not config.serve.app:
        _check_judge(arguments.job, config)
    out = (arguments.out or default_path(config.task, datetime.now())).absolute()
    if arguments.show:
        sys.stdout.write(job_script(arguments.job, out, run_words))
        return EXIT_DONE
    script = write_job(arguments.job, out, run_words)
    job = submit(script)
    sys.stdout.write(
        f"job {job} submitted: {config.title}\n"
        f"  script  {script}\n"
        f"  follow  tail -F {log_file(out)}\n"
        f"  state   squeue --job {job}\n"
        f"  stop    scancel --batch --signal=TERM {job}   (saves first; go on with: sbatch {script})\n"
        f"  result  {out}\n"
    )
    return EXIT_DONE


def _check_judge(job: SlurmConfig, config: RunConfig) -> None:
    """Raises UsageError where the run's judge wants GPUs or weights that the job will not have."""
    wanted, there = config.serve.num_gpus * config.serve.num_replicas, job.gpus_per_node * job.nodes
    if wanted > there:
        fix = f"--gpus-per-node {math.ceil(wanted / job.nodes)}, before the --"
        raise UsageError(f"the judge asks for {wanted:g} GPUs, the job for {there}", fix)
    if not job.offline or config.judge.backend not in WEIGHT_BACKENDS:
        return
    from rlvlm.experiments.fetch import is_here  # imports the hub's client

    if not is_here(config.judge.model, config.judge.revision):
        raise UsageError(f"{config.judge.model} is not on this disk, and the job will not look for it on the network",
                         f"rlvlm fetch {config.judge.model}  (or --no-offline, before the --)")


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first `--`, and those after it."""
    place = list(words).index(_SPLIT) if _SPLIT in words else len(words)
    return list(words[:place]), list(words[place + 1 :])
