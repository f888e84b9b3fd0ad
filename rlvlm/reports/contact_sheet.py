"""Contact sheets: rows of small images under a title, from `rlvlm check-task` or from demonstrations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlvlm.core.steps import Frames
from rlvlm.demonstrations.card import SHEET
from rlvlm.demonstrations.chunk_form import folder_form, is_whole, kept_images
from rlvlm.demonstrations.folder import DemonstrationFolder
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.envs.env import ChunkEnv
from rlvlm.envs.registry import make_env, own_settings, task_env
from rlvlm.runs.settings.tree import read_settings

COLUMNS = 7
"""Images per row of the sheet."""
IMAGE_PX = 150
_MARGIN_PX, _TITLE_PX, _LABEL_PX = 12, 26, 20
_PAPER, _INK, _FAINT = (250, 250, 248), (38, 70, 83), (120, 132, 138)

_EPISODES = 6
"""Maximum number of episodes on the sheet; each instruction once before any repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of images."""

    title: str
    images: Frames
    """[N, H, W, 3] uint8, N >= 1; all rows of a sheet have the same H and W."""
    labels: tuple[str, ...]
    """N short texts, one below each image."""


def contact_sheet(title: str, rows: Sequence[Row]) -> Image.Image:
    """Returns an image of the rows below one another under a title, as wide as the longest row or title."""
    height, width = rows[0].images.shape[1:3]
    row_px = _TITLE_PX + height + _LABEL_PX
    large, small = ImageFont.load_default(size=16), ImageFont.load_default(size=12)
    images_px = max(len(row.images) for row in rows) * (width + _MARGIN_PX)
    title_px = _MARGIN_PX + round(max(large.getlength(title), *(small.getlength(row.title) for row in rows)))
    height_px = _TITLE_PX + _MARGIN_PX + len(rows) * row_px + _MARGIN_PX
    page = Image.new("RGB", (_MARGIN_PX + max(images_px, title_px), height_px), _PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((_MARGIN_PX, _MARGIN_PX // 2), title, fill=_INK, font=large)
    for number, row in enumerate(rows):
        top = _TITLE_PX + _MARGIN_PX + number * row_px
        draw.text((_MARGIN_PX, top + 6), row.title, fill=_INK, font=small)
        for column, (image, label) in enumerate(zip(row.images, row.labels, strict=True)):
            left = _MARGIN_PX + column * (width + _MARGIN_PX)
            page.paste(Image.fromarray(np.ascontiguousarray(image)), (left, top + _TITLE_PX))
            draw.text((left, top + _TITLE_PX + height + 3), label, fill=_FAINT, font=small)
    return page


def folder_env(folder: DemonstrationFolder, *, trust: bool) -> Any:
    """Returns an env of the folder's task that draws as when it was collected; the folder has the settings.

    Args:
        folder: demonstrations, or other episodes, of a task.
        trust: whether the user trusts code that the folder names.

    Raises:
        UsageError: the task is not trusted, or the settings do not suit it.
    """
    task = folder.trusted_task(trust=trust)
    kind = type(task_env(task))
    return make_env(task, read_settings(kind, own_settings(kind, folder.env)), 0)


def write_sheet(folder: DemonstrationFolder, open_env: Callable[[], ChunkEnv]) -> Path | None:
    """Writes a sheet of a few episodes as seen by each camera, and returns its file; None if there is no episode.

    Args:
        folder: demonstrations in chunks.
        open_env: makes an env of its task; called only if images are drawn from states.

    Raises:
        UsageError: stored images are missing or damaged.
        MachineError: the machine cannot draw.
    """
    form = folder_form(folder)
    chosen: list[EpisodeRecord] = []
    others: list[EpisodeRecord] = []
    for record in folder.episodes():
        # each instruction once before any repeats
        is_new = record.goal not in {other.goal for other in chosen} and is_whole(record, form)
        if is_new and len(chosen) < _EPISODES:
            chosen.append(record)
        elif len(others) < _EPISODES and is_whole(record, form):
            others.append(record)
    chosen += others[: _EPISODES - len(chosen)]
    if not chosen:
        return None
    env = None if form.image_px else open_env()
    rows = []
    for record in chosen:
        # stored images show the moment before each chunk; states also show the end
        num = len(record.arrays["actions"]) + (env is not None)
        moments = np.unique(np.linspace(0, num - 1, COLUMNS).astype(int))
        ends = np.concatenate([[0], np.cumsum(record.arrays["steps"])])
        labels = tuple(f"step {ends[moment]}" for moment in moments)
        ending = "success" if record.success else "failure"
        kept = None if env is not None else kept_images(folder, record)[moments]
        for place, camera in enumerate(form.cameras):
            if kept is None:
                assert env is not None, "else there are images"
                images = env.draw(record.arrays["snapshots"][moments], IMAGE_PX, camera)
            else:
                size = (IMAGE_PX, IMAGE_PX)
                resized = [Image.fromarray(image).resize(size, Image.Resampling.BICUBIC) for image in kept[:, place]]
                images = np.stack([np.asarray(image) for image in resized])
            title = f"{record.goal} ({record.id}, {ending}), {camera}"
            rows.append(Row(title=title, images=images, labels=labels))
    contact_sheet(f"{folder.task}: demonstrations", rows).save(folder.path / SHEET)
    if env is not None:
        env.close()
    return folder.path / SHEET
