"""`rlvlm resume DIR`: resumes a run or a sweep."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from rlvlm.algorithms.checkpoint import CorruptCheckpoint
from rlvlm.core.console.arguments import parse
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.imports import uncollected
from rlvlm.runs.files.folder import check_newest, find_folder, read_state, write_settings
from rlvlm.runs.settings.arguments import parse_options
from rlvlm.runs.settings.config_file import config_text
from rlvlm.runs.start.preflight import check_before_run


@dataclass(frozen=True)
class ResumeArguments:
    """Resume a stopped run exactly at its newest checkpoint, or a sweep. A run's settings may follow, such as --steps
    40000; those that define what is learned cannot change.
    """

    path: tyro.conf.Positional[Path]
    """The run's folder, a checkpoint in it, or any file in it; or a sweep's folder."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""


def command(words: Sequence[str], prog: str) -> int:
    """Runs `resume DIR [options of the run]`: resumes with the last settings, changed by the options."""
    parsed: Any = parse(ResumeArguments, words, prog, return_unknown_args=True)  # then with the remaining arguments
    arguments, options = parsed
    from rlvlm.sweeps.folder import check_trust, find_sweep

    check_trust([arguments.path], trust=arguments.trust)

    sweep = find_sweep(arguments.path)
    if sweep is not None:
        if options:
            raise UsageError(f"a sweep takes no {options[0]}", f"change {sweep.path / 'sweep.yaml'}, then {prog}")
        from rlvlm.sweeps.sweep import run_sweep

        return run_sweep(sweep.path, sweep.config())
    folder = find_folder(arguments.path)
    config, summary = folder.config(), folder.summary()
    if options:
        wanted = parse_options(config, options, f"{prog} {arguments.path}")
        if odd := [name for name in ("smoke", "print_config", "plan") if getattr(wanted, name)]:
            option = f"--{odd[0].replace('_', '-')}"
            raise UsageError(f"{option} is for a run that begins", f"leave out {option}")
        config = wanted.config
    newest = next(iter(folder.checkpoints.newest_first()), None)
    # refused before Ray starts; if it is damaged, an older one is resumed, and its settings are checked then
    with suppress(CorruptCheckpoint):
        if newest is not None:
            read_state(newest, config)
    # finished, unless more steps are wanted now
    if summary.get("exit_reason") == "done" and summary.get("env_steps", config.steps) >= config.steps:
        sys.stdout.write(f"{folder.path} is finished; see its README.md. To train on: {prog} DIR --steps N\n")
        return EXIT_DONE
    check_newest(folder, arguments.path)
    with uncollected():  # it imports torch for some settings
        check_before_run(config, has_started=newest is not None)
    if options:
        with folder.locked():  # not while the run works: its folder would no longer describe it
            write_settings(folder.path / "config.yaml", config_text(config), config)
    if newest is None:
        kept = ", with the supervised updates that it made" if folder.unfinished_start.exists() else ""
        sys.stdout.write(f"{folder.path} has no checkpoint yet, so the run starts again from step 0{kept}\n")
    with uncollected():
        from rlvlm.pages.run import write_run_pages
        from rlvlm.runs.train import resume_run

    return resume_run(folder, config, write_run_pages)
