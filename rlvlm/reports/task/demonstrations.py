"""A contact sheet of demonstrations in chunks, beside their card."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from rlvlm.demonstrations.card import SHEET
from rlvlm.demonstrations.chunks import folder_form, is_whole, kept_images
from rlvlm.demonstrations.folder import DemonstrationFolder
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.envs.chunk_env import ChunkEnv
from rlvlm.reports.task.check import COLUMNS, PICTURE_PX, Row, contact_sheet

_EPISODES = 6
"""On the sheet, at most: one of each instruction first."""


def write_sheet(folder: DemonstrationFolder, make_env: Callable[[], ChunkEnv]) -> Path | None:
    """Writes a few episodes as each camera sees them, and returns the file; None where there is no episode.

    Args:
        folder: of chunks.
        make_env: makes an env of its task; asked only where images are drawn from states.

    Raises:
        UsageError: images that were kept are missing or damaged.
        MachineError: the machine cannot draw.
    """
    form = folder_form(folder)
    chosen: list[EpisodeRecord] = []
    others: list[EpisodeRecord] = []
    for record in folder.episodes():
        is_new = record.goal not in {one.goal for one in chosen} and is_whole(record, form)
        if is_new and len(chosen) < _EPISODES:
            chosen.append(record)
        elif len(others) < _EPISODES and is_whole(record, form):
            others.append(record)
    chosen += others[: _EPISODES - len(chosen)]
    if not chosen:
        return None
    env = None if form.image_px else make_env()
    rows = []
    for record in chosen:
        num = len(record.arrays["actions"]) + (env is not None)  # states tell the end too
        moments = np.unique(np.linspace(0, num - 1, COLUMNS).astype(int))
        ends = np.concatenate([[0], np.cumsum(record.arrays["steps"])])
        labels = tuple(f"step {ends[moment]}" for moment in moments)
        ending = "success" if record.success else "failure"
        kept = None if env is not None else kept_images(folder, record)[moments]
        for place, camera in enumerate(form.cameras):
            if kept is None:
                assert env is not None, "else there are images"
                images = env.draw(record.arrays["snapshots"][moments], PICTURE_PX, camera)
            else:
                images = np.stack([_resized(image) for image in kept[:, place]])
            title = f"{record.goal} ({record.id}, {ending}), {camera}"
            rows.append(Row(title=title, images=images, labels=labels))
    contact_sheet(f"{folder.task}: demonstrations", rows).save(folder.path / SHEET)
    if env is not None:
        env.close()
    return folder.path / SHEET


def _resized(image: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((PICTURE_PX, PICTURE_PX), Image.Resampling.BICUBIC))
