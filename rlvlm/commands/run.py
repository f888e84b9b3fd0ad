"""`rlvlm run TASK`, and `python -m rlvlm.run TASK`: trains on a task. From Python: `rlvlm.train(config)`."""

import asyncio
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import datetime

from rlvlm.core.console.tables import plain_console
from rlvlm.core.errors import EXIT_DONE
from rlvlm.core.imports import uncollected
from rlvlm.core.install import check_train
from rlvlm.runs.files.folder import RunFolder, create_folder
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.config_file import config_text
from rlvlm.runs.settings.tree import commented
from rlvlm.runs.start.preflight import check_before_run


def command(words: Sequence[str], prog: str) -> int:
    """Runs `run TASK [options]`: trains, or prints the configuration."""
    check_train(prog)
    with uncollected():
        arguments = parse_run(words, prog)
    if arguments.print_config:
        sys.stdout.write(commented(config_text(arguments.config), arguments.config))
        return EXIT_DONE
    # before the folder is created: a run that cannot start leaves nothing behind
    with uncollected():  # it imports torch for some settings
        check_before_run(arguments.config)
    if arguments.plan:
        from rlvlm.runs.start.networks import envs_advice
        from rlvlm.runs.start.placement import plan_table
        from rlvlm.runs.start.ray_session import ray_session

        with ray_session() if os.environ.get("RAY_ADDRESS") else nullcontext():
            plain_console().print(plan_table(arguments.config))
            if advice := envs_advice(arguments.config):
                plain_console().print(advice)
        return EXIT_DONE
    folder = create_folder(arguments.config, [*prog.split(), *words], datetime.now())
    return _run(folder, arguments.config)


def train(config: RunConfig) -> RunFolder:
    """Runs `config` to its end, as `python -m rlvlm.run` does, and returns its folder.

    Works in scripts and in notebooks. A notebook's cell runs in an asyncio loop, where Ray Serve's handles do not
    answer: there the run gets a thread of its own, which no signal can stop.

    Raises:
        RunError: it cannot start or continue.
    """
    check_train("rlvlm.train")
    check_before_run(config)
    folder = create_folder(config, ["rlvlm.train"], datetime.now())
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # there is no loop
        _run(folder, config)
        return folder
    # Serve's handles refuse to block inside a running loop
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(_run, folder, config).result()
    return folder


def _run(folder: RunFolder, config: RunConfig) -> int:
    # torch, Ray and matplotlib, after everything that can be checked without them
    with uncollected():
        from rlvlm.pages.run import write_run_pages
        from rlvlm.runs.train import start_run

    return start_run(folder, config, write_run_pages)
