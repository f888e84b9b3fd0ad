"""`rlvlm distill --from STORE --out DIR`: trains a pocket judge on labels."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from rlvlm.core.console.arguments import parse
from rlvlm.core.errors import EXIT_DONE
from rlvlm.core.foreign import visible
from rlvlm.plugins.distill.config import DistillConfig


@dataclass(frozen=True, kw_only=True)
class DistillArguments:
    """Train a pocket judge on another judge's labels, and report how far the two agree."""

    store: Annotated[Path, tyro.conf.arg(name="from")]
    """Folder of the label store to learn from."""
    out: Path
    """New folder for the weights and their card."""
    settings: Annotated[DistillConfig, tyro.conf.arg(name="")] = field(default_factory=DistillConfig)


def command(words: Sequence[str], prog: str) -> int:
    """Runs `distill --from STORE --out DIR [options]`: prints how far the new weights agree with the labels."""
    arguments = parse(DistillArguments, words, prog)
    from rlvlm.plugins.distill.training import distill, graded_table  # torch: not needed for help

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    outcome = distill(arguments.store, arguments.out, arguments.settings)
    sys.stdout.write(visible(graded_table(outcome)))
    sys.stdout.write(f"\nuse it with: --judge.backend pocket --judge.model {arguments.out}\n")
    return EXIT_DONE
