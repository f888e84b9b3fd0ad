"""Training data of the pocket video judge: it learns where LIBERO's things lie, and whether a clip ends with success.

The tasks' script plays, with more or less noise, and now and then with a gripper that lets go and never closes again,
so that it misses things or drops them: `python -m pocket_models.video --out FILE`.
"""

import gc
import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from numpy.typing import NDArray

from pocket_models.dataset import (
    FINE_PATCH_PX,
    ImageGroup,
    LabelledQuestion,
    ReadingHeads,
    Rows,
    build_dialogues,
    question_phrases,
)
from pocket_models.network import PATCHES, build_tokenizer
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import FIRST_HELD_OUT_STATE, ChunkEnv
from rlvlm.envs.libero.expert import OPEN
from rlvlm.envs.libero.scene import LiberoScene, shared_scene
from rlvlm.envs.registry import make_env, task_env
from rlvlm.judges import prompts
from rlvlm.pocket.models import VIDEO_TASKS
from rlvlm.vlms.supervised import Dialogues

_LOGGER = logging.getLogger(__name__)

MOMENTS = 8
"""Frames kept of an episode, evenly spread, the first and the last among them."""
_CLIP_FRAMES = (2, 4)  # frames of the clips of a step, one of these
_P_WHOLE, _P_BACKWARDS, _P_OTHER_INSTRUCTION = 0.8, 0.15, 0.3
_P_SAME_SUITE = 0.8  # of the instructions of other tasks
_BINS, _REACH_M = 15, 0.45  # places along both sides of the table are read in so many bins between plus and minus this
_AT_M = 0.07  # what is so near to a target, along both sides of the table, is at it
_NOISES, _P_NOISES = (0.02, 0.1, 0.2, 0.6), (0.4, 0.2, 0.1, 0.3)
_EPISODE_STEPS = 144
_P_LETS_GO = 0.4
_LETS_GO = 12  # the last chunk from which on a gripper may stay open; most things are where they should be by then


@dataclass(frozen=True, kw_only=True, slots=True)
class Clips:
    """Episodes of all tasks, as `play` writes them."""

    frames: Frames
    """[N, MOMENTS, 144, 144, 3]."""
    places: FloatArray
    """[N, MOMENTS, K, 3] of each thing and each target, metres; NaN where a scene has no such thing."""
    things: tuple[str, ...]
    """K names."""
    targets: tuple[str, ...]
    """Those that something is wanted in or on."""
    tasks: tuple[str, ...]
    """N names, e.g. `libero_object/0`."""
    instructions: tuple[str, ...]
    """N of them."""
    success: NDArray[np.bool_]
    """[N] whether the last moment is one of success; no earlier one is."""

    def save(self, file: Path) -> None:
        """Writes the clips as npz."""
        arrays: dict[str, Any] = {each.name: np.asarray(getattr(self, each.name)) for each in fields(self)}
        np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, file: Path) -> "Clips":
        """What `save` wrote."""
        with np.load(file, allow_pickle=False) as saved:
            names = {name: tuple(saved[name].tolist()) for name in ("things", "targets", "tasks", "instructions")}
            return cls(frames=saved["frames"], places=saved["places"], success=saved["success"], **names)

    def of_suite(self, suite: str) -> "Clips":
        """Clips of one suite."""
        rows = [row for row, task in enumerate(self.tasks) if suite_of(task) == suite]
        return replace(
            self,
            frames=self.frames[rows],
            places=self.places[rows],
            tasks=tuple(self.tasks[row] for row in rows),
            instructions=tuple(self.instructions[row] for row in rows),
            success=self.success[rows],
        )

    def question(self, row: int, moments: NDArray[np.int64], goal: str) -> LabelledQuestion:
        """The question whether `goal` is reached at the last of `moments` of an episode."""
        is_reached = bool(self.success[row]) and int(moments[-1]) == MOMENTS - 1 and goal == self.instructions[row]
        images = tuple((row * MOMENTS + moments).tolist())
        return LabelledQuestion(mode="success", goal=goal, images=images, answer="yes" if is_reached else "no")


def suite_of(task: str) -> str:
    """`libero_object` of `libero_object/0`."""
    return task.partition("/")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoData:
    """The pocket video judge: clips of LIBERO."""

    clips: Path = Path("clips.npz")
    """File that `python -m pocket_models.video` wrote."""

    def load(self, seed: int, rng: np.random.Generator, tokenizer: Any = None) -> "VideoDataset":
        """Reads the file; a tokenizer is built unless given."""
        return VideoDataset(Clips.load(self.clips), tokenizer)


class VideoDataset:
    """Frames, and questions about clips.

    Args:
        clips: all.
        tokenizer: of a model to go on from; None builds one.
    """

    patch_px = FINE_PATCH_PX
    jitters_training, jitters_encoding = True, False
    abilities: dict[str, Any] = {"compare": [], "score": ["success"], "goal_pictures": False}

    def __init__(self, clips: Clips, tokenizer: Any = None) -> None:
        self.held_out: dict[str, Rows] = {}
        self._clips = clips
        self.frames = clips.frames.reshape(-1, *clips.frames.shape[2:])
        values, self._sizes = readable_places(clips)
        self._values = values.reshape(len(self.frames), -1)
        texts = [*sorted(set(clips.instructions)), prompts.OTHER_GOAL]
        self.tokenizer = tokenizer or build_tokenizer(texts * 3, question_phrases(), 500)

    def build_heads(self, width: int) -> ReadingHeads:
        """One for all frames."""
        return ReadingHeads([ImageGroup(task="libero", start=0, values=self._values, sizes=self._sizes)], width)

    def draw_images(self, num: int, rng: np.random.Generator) -> Rows:
        """Any frames."""
        return rng.integers(len(self.frames), size=num)

    def draw_dialogues(self, num: int, rng: np.random.Generator, errors: NDArray[np.float32]) -> dict[str, Dialogues]:
        """Freshly drawn questions about clips of equally many frames."""
        num_frames = int(rng.choice(_CLIP_FRAMES))
        questions = [self.draw_question(num_frames, rng) for _ in range(num)]
        return {"clips": build_dialogues(questions, self.tokenizer)}

    def draw_question(self, num_frames: int, rng: np.random.Generator) -> LabelledQuestion:
        """A question about `num_frames` moments of an episode or of its beginning; some backwards, some about another
        task, mostly of the same suite. Successes and failures come equally often.
        """
        clips = self._clips
        # the script succeeds in 61 %; drawn evenly, `yes` is no safer a guess than `no`
        row = int(rng.choice(np.flatnonzero(clips.success == (rng.random() < 0.5))))
        last = MOMENTS - 1 if rng.random() < _P_WHOLE else int(rng.integers(1, MOMENTS - 1))
        moments = np.linspace(0, last, num_frames).round().astype(int)
        if rng.random() < _P_BACKWARDS:
            moments = moments[::-1]
        goal, suite = clips.instructions[row], suite_of(clips.tasks[row])
        if rng.random() < _P_OTHER_INSTRUCTION:
            pairs = sorted({(suite_of(task), text) for task, text in zip(clips.tasks, clips.instructions, strict=True)})
            others = [(other, text) for other, text in pairs if text != goal]
            near = [text for other, text in others if other == suite]  # the scene is alike: only the words differ
            is_near = bool(rng.random() < _P_SAME_SUITE)
            goal = str(rng.choice(near if is_near and near else [text for _, text in others]))
        return clips.question(row, moments, goal)


def readable_places(clips: Clips) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """What there is to read in the frames, and how many values each column may take.

    Returns:
        [N, MOMENTS, 3 K]: of each thing the bins of its place along both sides of the table, and which target it is at
        (1: none, 2: the first, ...); 0 where a scene has no such thing.
    """
    across = clips.places[..., :2]
    is_there = np.isfinite(across[..., 0])
    share = (np.nan_to_num(across) + _REACH_M) / (2 * _REACH_M)
    bins = 1 + np.clip(share * _BINS, 0, _BINS - 1).astype(np.int64)
    columns = [clips.things.index(name) for name in clips.targets]
    apart = np.abs(across[..., :, None, :] - across[..., None, columns, :]).max(axis=-1)  # [N, MOMENTS, K, T]
    apart[..., columns, np.arange(len(columns))] = np.inf  # a target is not at itself
    apart = np.where(np.isfinite(apart), apart, np.inf)  # nor is what a scene does not have, whose places are NaN
    at = np.where(apart.min(axis=-1) < _AT_M, 2 + apart.argmin(axis=-1), 1)
    values = np.concatenate([bins, at[..., None]], axis=-1) * is_there[..., None]
    sizes = (_BINS + 1, _BINS + 1, len(clips.targets) + 2) * len(clips.things)
    return values.reshape(*values.shape[:-2], -1), sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayConfig:
    """What is played."""

    out: Path
    """File of the clips."""
    tasks: tuple[str, ...] = VIDEO_TASKS
    """Tasks of LIBERO, each of which asks for one thing in or on another."""
    episodes: int = 60
    """Episodes of each task."""
    held_out: bool = False
    """Whether they begin from the starts that are kept for evaluation."""
    start_jitter_m: float = 0.02
    """Things are shifted by up to so many metres."""


def play(config: PlayConfig) -> Clips:
    """The episodes of all tasks."""
    first = FIRST_HELD_OUT_STATE if config.held_out else 0
    rng = np.random.default_rng((first, len(config.tasks)))
    played: list[tuple[Frames, dict[str, FloatArray], bool]] = []
    targets: set[str] = set()
    instructions: list[str] = []
    for task in config.tasks:
        suite, _, number = task.partition("/")
        settings = replace(
            task_env(task),
            start_jitter_m=config.start_jitter_m,
            render_style="light",
            physics="fast",
            episode_steps=_EPISODE_STEPS,
        )
        # the env's own scene, which says where things are; it is the one that the env has made
        env, scene = make_env(task, settings, 0), shared_scene(suite, int(number), settings.mesh_cell)
        played += [_episode(env, scene, first + index, rng) for index in range(config.episodes)]
        targets.add(scene.goals[0][2])
        instructions += [scene.instruction] * config.episodes
        _LOGGER.info("%s: %d of %d succeeded", task, sum(row[2] for row in played[-config.episodes :]), config.episodes)
        env.close()
        del env, scene
        gc.collect()  # a compiled task is hundreds of megabytes, and refers to itself
    things = tuple(sorted({name for _, places, _ in played for name in places}))
    nowhere = np.full((MOMENTS, 3), np.nan, np.float32)
    return Clips(
        frames=np.stack([frames for frames, *_ in played]),
        places=np.stack([np.stack([places.get(name, nowhere) for name in things], 1) for _, places, _ in played]),
        things=things,
        targets=tuple(sorted(targets)),
        tasks=tuple(task for task in config.tasks for _ in range(config.episodes)),
        instructions=tuple(instructions),
        success=np.array([success for *_, success in played]),
    )


def _episode(
    env: ChunkEnv, scene: LiberoScene, state_id: int, rng: np.random.Generator
) -> tuple[Frames, dict[str, FloatArray], bool]:
    """Frames of `MOMENTS` moments, where each thing and the place it is wanted at was, and whether it succeeded."""
    noise = float(rng.choice(_NOISES, p=_P_NOISES))
    lets_go = int(rng.integers(_LETS_GO)) if rng.random() < _P_LETS_GO else _EPISODE_STEPS
    things = sorted({*scene.env.objects_dict, *scene.named})  # what lies about, and places that goals name

    def places() -> FloatArray:
        return np.stack([scene.place_of(name) for name in things]).astype(np.float32)

    obs, info = env.reset(options={"state_id": state_id})
    snapshots, found, is_over = [obs.snapshots[0]], [places()], False
    while not is_over:
        chunk = env.scripted_chunk(noise, rng)
        assert chunk is not None, "these tasks have a script"
        if len(found) > lets_go:  # misses and drops, as by a policy that learns
            chunk[:, -1] = OPEN
        obs, _, terminated, truncated, info = env.step(chunk)
        snapshots.append(obs.snapshots[0])
        found.append(places())
        is_over = terminated or truncated
    moments = np.linspace(0, len(snapshots) - 1, MOMENTS).round().astype(int)
    seen = np.stack(found)[moments]
    return (
        env.draw(np.stack(snapshots)[moments], PATCHES * FINE_PATCH_PX),
        {name: seen[:, place] for place, name in enumerate(things)},
        bool(info["success"]),
    )


def main() -> None:
    """Reads the command line, plays and writes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    config = tyro.cli(PlayConfig, description=__doc__)
    play(config).save(config.out)


if __name__ == "__main__":
    main()
