"""Destinations of a run's metrics: `metrics.jsonl`, TensorBoard, Ray's endpoint and, if wanted, Weights & Biases."""

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
from rlvlm.runs.files.folder import RunFolder
from rlvlm.runs.settings.config import RunConfig
from rlvlm.serving.monitoring import show_figures

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 20
"""Maximum wait for Weights & Biases to start, seconds; a run never depends on it."""


class Trackers:
    """Writes rows of metrics to all destinations of a run.

    Args:
        folder: folder of the run. Its TensorBoard files are rewritten from `metrics.jsonl`, so they agree after a
            resume.
        config: config of the run; `track.wandb` enables Weights & Biases.
    """

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self._lines = folder.metrics
        # event files cannot be cut, so a resumed run rewrites its curves
        shutil.rmtree(folder.tensorboard, ignore_errors=True)
        self._board = SummaryWriter(str(folder.tensorboard))
        for row in self._lines.read():
            self._to_board(row)
        self._show_figures = show_figures(config.task)
        self.trouble = ""
        """Reason why Weights & Biases is not used although it was requested; empty if all is well."""
        self._wandb = self._start_wandb(folder, config) if config.track.wandb != "off" else None

    def log(self, row: Mapping[str, float]) -> None:
        """Writes one row. Numbers that are not finite are left out: neither JSON nor the trackers accept them."""
        # a metric that is not measured yet is NaN
        finite = {key: value for key, value in row.items() if math.isfinite(value)}
        self._lines.append([finite])
        self._to_board(finite)
        self._show_figures(finite)
        if self._wandb is not None:
            try:
                self._wandb.log(finite, step=int(row[ENV_STEPS]))
            except Exception as error:  # its own process may die; see `_start_wandb`
                logger.warning("Weights & Biases takes no more metrics, going on without it: %s", error)
                self._wandb = None

    def close(self) -> None:
        """Flushes and closes all destinations."""
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
        """Returns the Weights & Biases run of this folder, or None with a warning: it must never stop a training."""
        import wandb

        assert config.track.wandb != "off", "asked for only where it is on"
        try:
            return wandb.init(
                project=config.track.wandb_project,
                id=wandb_id(folder.path),
                name=config.title,
                # groups the runs of a sweep
                group=next((path.name for path in folder.path.parents if (path / "sweep.yaml").is_file()), None),
                resume="allow",
                dir=str(folder.path),
                mode=config.track.wandb,
                config=asdict(config),
                settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True),
            )
        except Exception as error:  # any failure of a tracker only costs its curves
            logger.warning("Weights & Biases does not start, going on without it: %s", error)
            self.trouble = f"Weights & Biases does not start, going on without it: {first_line(error)}"
            return None


def wandb_id(folder: Path) -> str:
    """Returns a run's id at Weights & Biases: drawn once, from allowed letters, and stored in the run's folder, so that
    no two runs share one, whatever the names of tasks and folders, and a moved run keeps its own.
    """
    file = folder / "wandb_id.txt"
    if not file.exists():
        write_whole(file, f"{secrets.token_hex(8)}\n")
    return file.read_text().strip()
