"""Scenes for the judge that has read English: the pocket judge's and more, drawn once and kept in a file.

`python -m pocket_models.smollm_scenes --out FILE TASK...` plays and draws; `read_scenes` gives them back to `smollm`.
"""

import io
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import tyro
from numpy.typing import NDArray
from PIL import Image

from pocket_models.scenes import IMAGE_PX, TASKS, Scenes, SceneTask, Setup, Split, collect
from pocket_models.scorer import collect_pushes
from pocket_models.smollm_network import IMAGE_PX as SEEN_PX
from pocket_models.words import WORDS
from rlvlm.core.steps import Frames
from rlvlm.envs import push_block as table
from rlvlm.envs.registry import task_env

_LOGGER = logging.getLogger(__name__)
_PUSH = "push_block"
_PUSHES, _PUSH_MOMENTS = 300, 5
_FEW = 0.25  # of the pocket judge's episodes: what is learned here is to read goals, not the last percent of a rope
_SCENE_FIELDS = ("progress", "success", "frames")


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneArguments:
    """Play and draw scenes."""

    tasks: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names of tasks; none takes all of them."""
    out: Path
    """File that is written, `*.npz`."""
    images: int = 500
    """Of each set-up of a task, in training; half as many are held out."""
    seed: int = 0
    """Of play."""


def draw_scenes(tasks: Iterable[str], split: Split, max_images: int, seed: int) -> Iterator[Scenes]:
    """Yields scenes of `tasks` at the size that the model sees.

    Args:
        tasks: names of `words.WORDS` with scenes, or push_block for all of its colours.
        split: the two share no episode.
        max_images: of each set-up.
        seed: of play.
    """
    for name in tasks:
        if name == _PUSH:
            yield from _push_scenes(split, seed)
            continue
        known = TASKS.get(name)
        if known is None:
            env = task_env(name)
            known = SceneTask(
                name=name,
                phrase="",
                setups=(Setup(config=env, episodes=24, max_images=max_images, share=0.5),),
                p_aimless=0.1,
            )
        setups = tuple(
            replace(setup, episodes=max(24, round(_FEW * setup.episodes)), max_images=min(max_images, setup.max_images))
            for setup in known.setups
            if name not in TASKS or setup.share >= 0.1
        )
        for scenes in collect(replace(known, setups=setups, mirrors=()), split, seed):
            _LOGGER.info("%s, %s, %s: %d images", split, scenes.task, scenes.name, len(scenes.images))
            yield replace(scenes, images=shrink(scenes.images))


def shrink(images: Frames) -> Frames:
    """Images [N, H, W, 3] as the model's processor makes them of square ones."""
    size = (SEEN_PX, SEEN_PX)
    return np.stack([np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS)) for image in images])


def _push_scenes(split: Split, seed: int) -> Iterator[Scenes]:
    """Tables of push_block by the colour that is asked for; each table is asked about for both of its blocks."""
    pushes = collect_pushes(_PUSHES if split == "train" else _PUSHES // 2, split, seed)
    states = np.concatenate([push.thinned(_PUSH_MOMENTS).snapshots for push in pushes])
    exchanged = states.copy()
    exchanged[:, table.ASKED], exchanged[:, table.OTHER] = states[:, table.OTHER], states[:, table.ASKED]
    exchanged[:, table.COLOURS], exchanged[:, table.COLOURS + 1] = states.T[[table.COLOURS + 1, table.COLOURS]]
    both = np.concatenate([states, exchanged])
    for number, colour in enumerate(table.COLOUR_NAMES):
        asked = both[np.rint(both[:, table.COLOURS]) == number]
        parts = np.array_split(asked, len(asked) // 200 + 1)  # all of them at full size would be gigabytes
        yield Scenes(
            task=f"{_PUSH}/{colour}",
            name=colour,
            goal=table.INSTRUCTIONS[number],
            phrase="",
            images=np.concatenate([shrink(table.draw_tables(part, IMAGE_PX)) for part in parts]),
            progress=table.progress_of(asked),
            success=table.is_solved(asked),
            frames=np.arange(len(asked)),
            share=0.4,
        )


def write_scenes(file: Path, scenes: Iterable[tuple[Split, Scenes]]) -> None:
    """Writes scenes into one file, some kilobytes an image."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for number, (split, each) in enumerate(scenes):
        arrays[f"{number}/about"] = np.array([split, each.task, each.name, each.goal, each.phrase, repr(each.share)])
        arrays |= {f"{number}/{field}": getattr(each, field) for field in _SCENE_FIELDS}
        packed = [_webp(image) for image in each.images]
        arrays[f"{number}/bytes"] = np.frombuffer(b"".join(packed), np.uint8)
        arrays[f"{number}/ends"] = np.cumsum([len(image) for image in packed])
    fresh = file.with_suffix(".new")
    with fresh.open("wb") as out:  # play may be cut off: a file is whole or is not there
        np.savez(out, allow_pickle=False, **arrays)
    fresh.replace(file)


def read_scenes(files: Iterable[Path], split: Split) -> list[Scenes]:
    """The scenes of one split in `files`, or in folders of such; images [N, SEEN_PX, SEEN_PX, 3]."""
    found = []
    for file in [part for path in files for part in (sorted(path.glob("*.npz")) if path.is_dir() else [path])]:
        with np.load(file) as arrays:
            for number in [name.partition("/")[0] for name in arrays.files if name.endswith("/about")]:
                own_split, task, setup, goal, phrase, share = arrays[f"{number}/about"].tolist()
                if own_split != split:
                    continue
                packed = np.split(arrays[f"{number}/bytes"], arrays[f"{number}/ends"][:-1])
                images = np.stack([np.asarray(Image.open(io.BytesIO(image.tobytes()))) for image in packed])
                values = {field: arrays[f"{number}/{field}"] for field in _SCENE_FIELDS}
                about = {"task": task, "name": setup, "goal": goal, "phrase": phrase, "share": float(share)}
                found.append(Scenes(images=images, **about, **values))
    return found


def _webp(image: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "webp", quality=88)
    return file.getvalue()


def all_tasks() -> list[str]:
    """The names that `draw_scenes` takes."""
    return [*(name for name, words in WORDS.items() if words.is_scene and "push" not in name.split("/")[0]), _PUSH]


def main() -> None:
    """Reads the command line, plays and writes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    arguments = tyro.cli(SceneArguments, description=__doc__)
    tasks = arguments.tasks or all_tasks()

    def both() -> Iterator[tuple[Split, Scenes]]:
        for split in get_args(Split):
            for scenes in draw_scenes(tasks, split, arguments.images, arguments.seed):
                yield split, scenes

    write_scenes(arguments.out, both())


if __name__ == "__main__":
    main()
