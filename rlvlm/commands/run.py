"""`rlvlm run TASK`, and `python -m rlvlm.run TASK`: trains on a task."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime

from rlvlm.commands.arguments import parse_run
from rlvlm.core.console.tables import plain_console
from rlvlm.core.errors import EXIT_DONE
from rlvlm.runs.config_file import config_text
from rlvlm.runs.folder import create_folder
from rlvlm.runs.preflight import check_before_run
from rlvlm.runs.settings import commented


def command(words: Sequence[str], prog: str) -> int:
    """Runs `run TASK [options]`: trains, or prints the configuration."""
    arguments = parse_run(words, prog)
    if arguments.print_config:
        sys.stdout.write(commented(config_text(arguments.config), arguments.config))
        return EXIT_DONE
    # before the folder is created: a run that cannot start leaves nothing behind
    check_before_run(arguments.config)
    if arguments.plan:
        from rlvlm.runs.networks import envs_advice
        from rlvlm.runs.placement import plan_table
        from rlvlm.runs.ray_session import ray_session

        with ray_session() if os.environ.get("RAY_ADDRESS") else nullcontext():
            plain_console().print(plan_table(arguments.config))
            if advice := envs_advice(arguments.config):
                plain_console().print(advice)
        return EXIT_DONE
    folder = create_folder(arguments.config, [*prog.split(), *words], datetime.now())
    from rlvlm.runs.train import start_run  # torch and ray, after everything that can be checked without them

    return start_run(folder, arguments.config)
