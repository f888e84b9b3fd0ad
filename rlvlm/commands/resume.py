"""`rlvlm resume DIR`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.core.errors import EXIT_DONE
from rlvlm.runs.doctor import check_before_run
from rlvlm.runs.folder.run_folder import check_newest, find_folder
from rlvlm.runs.folder.trust import check_trust


@dataclass(frozen=True)
class ResumeArguments:
    """Go on with a run that was stopped, exactly where its newest checkpoint is; or with a sweep."""

    path: tyro.conf.Positional[Path]
    """The run's folder, a checkpoint in it, or any file in it; or a sweep's folder."""
    trust: bool = False
    """Import the task or the pipeline that the folder names as MODULE:NAME, which runs its code."""


def command(words: Sequence[str], prog: str) -> int:
    """`resume DIR`: goes on as it was last started."""
    arguments = tyro.cli(ResumeArguments, args=words, prog=prog)
    check_trust([arguments.path], trust=arguments.trust)
    from rlvlm.sweeps.folder import find_sweep

    sweep = find_sweep(arguments.path)
    if sweep is not None:
        from rlvlm.sweeps.sweep import run_sweep

        return run_sweep(sweep.path, sweep.config())
    folder = find_folder(arguments.path)
    config, summary = folder.config(), folder.summary()
    if summary.get("exit_reason") == "done" and summary.get("env_steps", config.steps) >= config.steps:
        sys.stdout.write(f"{folder.path} is finished; see its README.md. To go on, raise steps in its config.yaml\n")
        return EXIT_DONE
    check_newest(folder, arguments.path)
    check_before_run(config)
    from rlvlm.runs.train import resume_run

    return resume_run(folder, config)
