"""Where a run's metrics go: `metrics.jsonl`, TensorBoard, Ray's own endpoint, and Weights & Biases where asked for."""

import logging
import math
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.utils.tensorboard.writer import SummaryWriter

from rlvlm.core.disk import write_whole
from rlvlm.core.errors import first_line
from rlvlm.core.metrics import ENV_STEPS
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder import RunFolder
from rlvlm.serving.monitoring import show_figures

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 20
"""Longest wait for Weights & Biases to start; a run never depends on it."""


class Trackers:
    """Writes rows of metrics to every place a run keeps them.

    Args:
        folder: the run. Its TensorBoard files are written anew from `metrics.jsonl`, so they agree after a resume.
        config: `track.wandb` chooses whether Weights & Biases takes part.
    """

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self._lines = folder.metrics
        # event files cannot be cut, so a resumed run writes its curves anew
        shutil.rmtree(folder.tensorboard, ignore_errors=True)
        self._board = SummaryWriter(str(folder.tensorboard))
        for row in self._lines.read():
            self._to_board(row)
        self._show_figures = show_figures(config.task)
        self.trouble = ""
        """Why Weights & Biases takes no part though it was asked for; empty where all is well."""
        self._wandb = self._start_wandb(folder, config) if config.track.wandb != "off" else None

    def log(self, row: Mapping[str, float]) -> None:
        """Writes one row. Numbers that are not finite are left out: neither JSON nor the trackers know them."""
        # a metric that is not measured yet is NaN
        finite = {key: value for key, value in row.items() if math.isfinite(value)}
        self._lines.append([finite])
        self._to_board(finite)
        self._show_figures(finite)
        if self._wandb is not None:
            try:
                self._wandb.log(finite, step=int(row[ENV_STEPS]))
            except Exception as error:  # its own process may die; as in `_start_wandb`
                logger.warning("Weights & Biases takes no more metrics, going on without it: %s", error)
                self._wandb = None

    def close(self) -> None:
        """Flushes and closes."""
        self._board.close()
        if self._wandb is not None:
            try:
                self._wandb.finish()
            except Exception as error:
                logger.warning("Weights & Biases does not end well: %s", error)

    def _to_board(self, row: Mapping[str, float]) -> None:
        for key, value in row.items():
            if key != ENV_STEPS:
                self._board.add_scalar(key, value, int(row[ENV_STEPS]))

    def _start_wandb(self, folder: RunFolder, config: RunConfig) -> Any:
        """The Weights & Biases run of this folder, or None with a warning: it must never stop a training."""
        import wandb

        assert config.track.wandb != "off", "asked for only where it is on"
        try:
            return wandb.init(
                project=config.track.wandb_project,
                id=wandb_id(folder.path),
                name=config.title,
                # runs of a sweep stand together
                group=next((path.name for path in folder.path.parents if (path / "sweep.yaml").is_file()), None),
                resume="allow",
                dir=str(folder.path),
                mode=config.track.wandb,
                config=asdict(config),
                settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True),
            )
        except Exception as error:  # a tracker's failure, of whatever kind, costs its curves and no more
            logger.warning("Weights & Biases does not start, going on without it: %s", error)
            self.trouble = f"Weights & Biases does not start, going on without it: {first_line(error)}"
            return None


def wandb_id(folder: Path) -> str:
    """A run's id at Weights & Biases: drawn once, of letters that it takes, and kept in the run's folder. So no two
    runs share one, whatever their tasks and folders are called, and a run that was moved goes on as itself.
    """
    file = folder / "wandb_id.txt"
    if not file.exists():
        write_whole(file, f"{secrets.token_hex(8)}\n")
    return file.read_text().strip()
