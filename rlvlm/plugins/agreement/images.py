"""The images that outputs of judges are about, from recorded data; and people's answers about the same images."""

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Clip, Score, Stamp, Status
from rlvlm.core.steps import Frames, spread
from rlvlm.demonstrations.recordings import Recordings, find_form
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.judges.prompts import check_goal
from rlvlm.labels.images import image_digest
from rlvlm.labels.records import PERSON_PREFIX, describe
from rlvlm.labels.store import LabelStore
from rlvlm.plugins.agreement.outputs import Outputs

MAX_SHOWN = 8
"""Maximum number of images that people are shown of an episode up to the frame."""
Frame = tuple[str, int]
"""Episode and index of a frame."""


def images_of(data: Path, camera: str, frames: Collection[Frame]) -> Iterator[tuple[Frame, Frames, str]]:
    """Yields each frame that the data have, with its image [H, W, 3] and the image's digest.

    Args:
        data: recorded data, whose episodes have the names of the outputs', maybe with an ending such as .mp4.
        camera: camera of the data; empty for the first that is not a wrist's.
        frames: frames wanted.

    Raises:
        UsageError: the data cannot be read, have none of the episodes, or fewer frames than an episode of the outputs.
    """
    for film, wanted in _films(data, camera, frames):
        for (_, index), image in zip(wanted, film.images(np.array([index for _, index in wanted])), strict=True):
            yield (wanted[0][0], index), image[0], image_digest(image[0])


def people_of(store: LabelStore) -> dict[str, dict[str, float]]:
    """Returns what people said about clips, in [0, 1] by person, by the digest of the clip's last image; people are
    numbered in the order of their first answers.
    """
    found: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    for item in store.answers():
        if isinstance(item.answer, Score) and item.answer.value is not None:
            if (judge := item.answer.stamp.judge).startswith(PERSON_PREFIX):
                name = names.setdefault(judge, f"person {len(names) + 1}")
                found.setdefault(item.question.left[-1], {})[name] = item.answer.value
    return found


def keep_outputs(outputs: Outputs, data: Path, camera: str, goal: str, store: LabelStore) -> tuple[int, int]:
    """Puts the values of judges into a store as their answers about the episode up to each frame.

    Args:
        outputs: values of judges.
        data: see `images_of`.
        camera: see `images_of`.
        goal: goal of all questions; empty for each episode's own.
        store: store to write; what it has already is not asked twice.

    Returns:
        Number of answers, and of frames.

    Raises:
        UsageError: as `images_of`, or an episode has no goal.
    """
    count = num_frames = 0
    for film, wanted in _films(data, camera, outputs):
        try:
            said = check_goal(goal or film.instruction)
        except ValueError as error:
            raise UsageError(f"episode {film.name}: {error}", 'give the goal in a few words: --goal "..."') from error
        answers = []
        for frame in wanted:
            shown = spread(np.array([index for _, index in wanted if index <= frame[1]]), MAX_SHOWN)
            question, images = describe(Clip(goal=said, frames=film.images(shown)[:, 0]))
            store.keep_images(images)
            for judge, value in outputs[frame].items():
                stamp = Stamp(judge=f"imported:{judge}", revision="", prompt="imported", decoding="")
                answers.append((question, Score(status=Status.OK, value=value, stamp=stamp)))
        store.add_answers(answers)
        count, num_frames = count + len(answers), num_frames + len(wanted)
    return count, num_frames


def _films(data: Path, camera: str, frames: Collection[Frame]) -> Iterator[tuple[RobotTrajectory, list[Frame]]]:
    """Yields each episode that frames are wanted of, with these in order."""
    by_episode: dict[str, list[Frame]] = {}
    for frame in sorted(frames):
        by_episode.setdefault(frame[0], []).append(frame)
    there = []
    for film in Recordings(path=data, form=find_form(data), camera=camera):
        if not isinstance(film, RobotTrajectory):
            continue
        there.append(film.name)
        wanted = by_episode.get(film.name) or by_episode.get(Path(film.name).stem)
        if wanted and wanted[-1][1] >= len(film.actions):
            what = f"{data}: episode {film.name} has {len(film.actions)} frames, and the outputs one at {wanted[-1][1]}"
            raise UsageError(what, "name the data that the judges were asked about")
        if wanted:
            yield film, wanted
    if by_episode and not {*there, *(Path(name).stem for name in there)} & by_episode.keys():
        what = f"{data} has none of the episodes {', '.join(list(by_episode)[:3])}; it has {', '.join(there[:3])}"
        raise UsageError(what, "name the data that the judges were asked about; episodes go by their names")
