"""Episodes in chunks: played by an env's script, for a folder or for a run's own lessons.

Every episode has random numbers of its own, decided by the seed and by its place: a collection that was stopped goes on
as if it had not been, and a run that plays by itself sees what `rlvlm collect` writes down with the same seed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.folder import DemonstrationFolder
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.envs.chunk_env import FIRST_HELD_OUT_STATE, ChunkEnv
from rlvlm.labels.images import MissingImage

Log = Callable[[str], None]
_STREAM = 6
"""Of a seed's random numbers; others are for policies and judges."""
_TELL_EVERY = 50
"""Demonstrations between lines about them."""
_MOST_SKIPPED = 50
"""Initial states without a script, one after the other, after which the env is taken to have none."""
_HOPELESS = 20
"""Failures without a success after which no more is tried."""
_CHANCES = 4
"""Episodes that the script may play for each one that is wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkForm:
    """What the chunks of a folder look like; a policy can learn from those that look like its env's."""

    chunk_steps: int
    """L."""
    action_size: int
    """A."""
    proprio_size: int
    """P."""
    snapshot_size: int
    """S; 0 where images are kept, and not the states that they can be drawn from."""
    cameras: tuple[str, ...]
    image_px: int = 0
    """Side of the images that are kept; 0 where they are drawn."""

    def against(self, other: "ChunkForm") -> list[str]:
        """What differs from `other`, in words."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in self.__slots__]
        return [f"{name} {mine}, not {theirs}" for name, mine, theirs in pairs if mine != theirs]


def form_of(env: ChunkEnv, image_px: int = 0) -> ChunkForm:
    """The form of the chunks of `env`; with `image_px` that of such chunks with images in place of snapshots."""
    return ChunkForm(
        chunk_steps=env.chunk_steps,
        action_size=len(env.action_low),
        proprio_size=env.proprio_size,
        snapshot_size=0 if image_px else env.snapshot_size,
        cameras=tuple(env.cameras),
        image_px=image_px,
    )


def folder_form(folder: DemonstrationFolder) -> ChunkForm:
    """The form of the chunks in a folder.

    Raises:
        UsageError: it holds no chunks.
    """
    try:
        told: dict[str, Any] = {name: folder.chunks[name] for name in ChunkForm.__slots__}
        return ChunkForm(**{**told, "cameras": tuple(told["cameras"])})
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{folder.path} holds {folder.kind} of {folder.task}, and no chunks",
            "make chunks with rlvlm collect push_block, or with rlvlm data import --form libero",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbation:
    """What happens to a script as it plays, so that its episodes show more than the straight way."""

    noise: float = 0.0
    """Standard deviation of what is added to its actions, scaled to [-1, 1]."""
    p_perturb: float = 0.0
    """Probability that an earlier chunk of the episode is carried out again in place of the script's. A thing is missed
    or lost by it, and the script begins again; the chunks' `perturbed` say which they were."""

    @property
    def player(self) -> str:
        """A name for who plays so."""
        astray = f"-perturb-{self.p_perturb:g}" if self.p_perturb else ""
        return (f"script-noise-{self.noise:g}" if self.noise else "script") + astray


def scripted_episodes(
    env: ChunkEnv,
    task: str,
    *,
    wanted: int,
    perturbation: Perturbation,
    seed: int,
    known: Mapping[str, bool] | None = None,
    log: Log = lambda line: None,
) -> Iterator[EpisodeRecord]:
    """Episodes by the env's script, failures too, until `wanted` of them have succeeded; tells how far it is.

    An env of several tasks may have a script for some of them; the others are not demonstrated, which is told.

    Args:
        env: with exact physics, whose episodes end at success.
        task: its name.
        wanted: successes.
        perturbation: of the script.
        seed: decides initial states and perturbation.
        known: success of the episodes that have been played already, by id: they are counted, and not played again.
        log: takes a line.

    Raises:
        UsageError: the env has no script, or the script fails most of the time.
    """
    without_script: set[str] = set()
    successes = failures = num_skipped = place = 0
    while successes < wanted:
        if successes + failures >= _CHANCES * wanted or (failures >= _HOPELESS and not successes):
            raise UsageError(
                f"the script succeeded in {successes} of {successes + failures} episodes, {wanted} are wanted",
                "ask for fewer demonstrations, for less noise, for a smaller p-perturb, or for longer episodes with "
                "--env.episode-steps",
            )
        name = f"{perturbation.player}-{seed}-{place}"
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_STREAM, place)))
        place += 1
        if known is not None and name in known:
            successes, failures = successes + known[name], failures + (not known[name])
            continue
        record = _play(env, task, name, perturbation, rng)
        if isinstance(record, str):
            without_script.add(record)
            num_skipped += 1
            if num_skipped >= _MOST_SKIPPED and not successes + failures:
                fix = "choose a policy that is trained, or import demonstrations with rlvlm data import"
                raise UsageError(f"no script could demonstrate: {', '.join(sorted(without_script))}", fix)
            continue
        successes, failures = successes + record.success, failures + (not record.success)
        if record.success and successes % _TELL_EVERY == 0:
            log(f"demonstrations: {successes} of {wanted}, {failures} failures left out")
        yield record
    if without_script:
        log(f"not demonstrated, for want of a script: {', '.join(sorted(without_script))}")


def _play(
    env: ChunkEnv, task: str, name: str, perturbation: Perturbation, rng: np.random.Generator
) -> EpisodeRecord | str:
    """An episode of the script; where there is none for what is asked, the instruction."""
    state_id = int(rng.integers(FIRST_HELD_OUT_STATE))
    obs, info = env.reset(options={"state_id": state_id})
    instruction = obs.instructions[0]
    seen, chunks, steps, perturbed, rewards = [obs], [], [], [], 0.0
    terminated = truncated = False
    while not (terminated or truncated):
        chunk = env.scripted_chunk(perturbation.noise, rng)
        if chunk is None:
            return instruction
        perturbed.append(bool(perturbation.p_perturb and chunks and rng.random() < perturbation.p_perturb))
        if perturbed[-1]:
            chunk = chunks[rng.integers(len(chunks))]
        obs, reward, terminated, truncated, info = env.step(chunk)
        seen.append(obs)
        chunks.append(chunk)
        steps.append(info["steps"])
        rewards += float(reward)
    return EpisodeRecord(
        id=name,
        task=task,
        kind="chunks",
        seed=state_id,
        player=perturbation.player,
        goal=instruction,
        env_return=rewards,
        success=bool(info["success"]),
        terminated=bool(terminated),
        arrays={
            "snapshots": np.concatenate([one.snapshots for one in seen]),
            "proprio": np.concatenate([one.proprio for one in seen[:-1]]),
            "actions": np.stack(chunks),
            "steps": np.array(steps, np.int64),
            **({"perturbed": np.array(perturbed)} if perturbation.p_perturb else {}),
        },
    )


def collect_chunks(
    env: ChunkEnv,
    folder: DemonstrationFolder,
    wanted: int,
    perturbation: Perturbation,
    seed: int,
    log: Log = lambda line: None,
) -> int:
    """Plays until the folder has `wanted` successes of this seed and perturbation; returns how many episodes were new.

    Arguments and errors are those of `scripted_episodes`; what is there already is not played again.
    """
    known = {record.id: record.success for record in folder.episodes()}
    num_new = 0
    for record in scripted_episodes(
        env, folder.task, wanted=wanted, perturbation=perturbation, seed=seed, known=known, log=log
    ):
        folder.add(record)
        num_new += 1
    return num_new


def kept_images(folder: DemonstrationFolder, record: EpisodeRecord) -> Frames:
    """[C, cameras, H, W, 3] the images of an episode's chunks.

    Raises:
        UsageError: one is missing, damaged, or of another size than the folder says.
    """
    try:
        names = record.arrays["pictures"]
        images = np.stack([[folder.picture_store.load(str(name)) for name in row] for row in names])
        if images.shape[2:] != 2 * (folder_form(folder).image_px,) + (3,):
            raise ValueError(f"images of {images.shape[3]} x {images.shape[2]} pixels")
    except (MissingImage, KeyError, ValueError) as error:
        raise UsageError(
            f"{folder.path}: the images of {record.id} cannot be used: {error}", "import it anew"
        ) from error
    return images


def is_whole(record: EpisodeRecord, form: ChunkForm) -> bool:
    """Whether an episode's arrays have the shapes that its folder promises, and finite numbers."""
    arrays: Mapping[str, NDArray[Any]] = record.arrays
    if not {"proprio", "actions", "pictures" if form.image_px else "snapshots"} <= arrays.keys():
        return False
    if not all(np.issubdtype(arrays[name].dtype, np.floating) for name in ("proprio", "actions")):
        return False
    num = len(arrays["actions"])
    if "perturbed" in arrays and (arrays["perturbed"].shape != (num,) or arrays["perturbed"].dtype != bool):
        return False
    shapes = {"actions": (num, form.chunk_steps, form.action_size), "proprio": (num, form.proprio_size)}
    shapes |= {"pictures": (num, len(form.cameras))} if form.image_px else {"snapshots": (num + 1, form.snapshot_size)}
    return num > 0 and all(
        arrays[name].shape == shape and (name == "pictures" or bool(np.isfinite(arrays[name]).all()))
        for name, shape in shapes.items()
    )
