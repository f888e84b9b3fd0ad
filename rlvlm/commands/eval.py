"""`rlvlm eval DIR`: plays a run's policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.core.checks import PositiveInt, check_bounds
from rlvlm.core.console.arguments import parse
from rlvlm.core.console.tables import plain_console
from rlvlm.core.disk import check_links
from rlvlm.core.imports import uncollected
from rlvlm.runs.files.folder import check_trust, choose_checkpoint, find_folder
from rlvlm.runs.start.preflight import check_before_play


@dataclass(frozen=True)
class EvalArguments:
    """Play the best policy of a run."""

    path: tyro.conf.Positional[Path]
    """The run's folder, a checkpoint in it, or any file in it."""
    episodes: PositiveInt = 10
    """Episodes with the deterministic policy; for VLMs and VLAs that act, as many again with sampling."""
    video: bool = False
    """Whether to write one video per episode."""
    out: Path | None = None
    """Folder for evaluation.json and the videos; by default the run's own."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""

    def __post_init__(self) -> None:
        check_bounds(self, "--")


def command(words: Sequence[str], prog: str) -> int:
    """Runs `eval DIR [--episodes N] [--video] [--out DIR]`: prints a table of the episodes."""
    arguments = parse(EvalArguments, words, prog)
    check_trust([arguments.path], trust=arguments.trust)
    folder = find_folder(arguments.path)
    check_links(arguments.out or folder.path)
    checkpoint = choose_checkpoint(folder, arguments.path, plain_console(soft_wrap=True).print)
    check_before_play(folder.config())
    with uncollected():
        from rlvlm.runs.evaluate import evaluate_run  # torch, after what can be said without it

    return evaluate_run(folder, checkpoint, arguments.episodes, arguments.video, arguments.out)
