"""Demonstrations for the supervised start of a policy in chunks: from the env's script, or from a folder."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core.episodes import Observations
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.chunk_form import folder_form, form_of, is_whole, kept_images
from rlvlm.demonstrations.collect import Disturbance, play_episodes
from rlvlm.demonstrations.folder import open_folder
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.demonstrations.weighting import folder_weights
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.vla.policy import Demonstrations, VLAPolicy


def demonstrate(
    env: ChunkEnv,
    config: ChunkSFTConfig,
    seed: int,
    log: Callable[[str], None] = lambda line: None,
    horizon: int | None = None,
) -> Demonstrations:
    """Plays the env's script until it has succeeded `config.episodes` times, and logs its progress; `horizon` is the
    policy's.

    Raises:
        UsageError: the env has no script, or the script mostly fails.
    """
    wanted, num_failures = config.episodes, 0
    successes: list[EpisodeRecord] = []
    disturbance = Disturbance(noise=config.noise, p_perturb=config.p_perturb)
    for record in play_episodes(env, disturbance, "", wanted=wanted, seed=seed, log=log):
        num_failures += not record.success
        successes += [record] if record.success else []
    return _gathered(successes, num_failures, horizon)


def read_demonstrations(
    sft: ChunkSFTConfig, task: str, settings: EnvConfig, env: ChunkEnv, policy: VLAPolicy, log: Callable[[str], None]
) -> Demonstrations:
    """Returns the successful episodes of a folder from `rlvlm collect` or `rlvlm data import` or, with a judge's
    labels, all of them with a weight for each chunk.

    Args:
        sft: settings with the folder and, if there are any, the labels.
        task: task of the run.
        settings: settings of its envs.
        env: env of the task, whose chunks a policy is to learn.
        policy: policy that learns; says the side of its images and its horizon.
        log: receives messages about what was left out, and about settings that differ from those at collection.

    Raises:
        UsageError: it contains another task's episodes, chunks of another form, or no success; or the labels belong to
            other data, or make all weights 0.
    """
    path, image_px = Path(sft.demonstrations).expanduser(), policy.image_px
    folder = open_folder(path)
    folder.check_task(task)
    form = folder_form(folder)
    if form.image_px not in (0, image_px):
        raise UsageError(
            f"{path} keeps images of {form.image_px} pixels, and the policy looks at {image_px}",
            f"import it anew with --cut.image-px {image_px}, or give the policy's own image-px as {form.image_px}",
        )
    if odd := form.against(form_of(env, form.image_px)):
        raise UsageError(f"{path} holds chunks of another form: {'; '.join(odd)}", "collect or import it anew")
    if other := folder.differs(settings.play_settings()):
        log(f"{path} was collected with {'; '.join(other)}")
    outcomes = Counter[str]()
    successes: list[EpisodeRecord] = []  # or all, if a judge's labels give their worth
    lengths: list[int] = []  # of all episodes: labels refer to positions in the folder
    for record in folder.episodes():
        outcome = "unusable" if not is_whole(record, form) else "successes" if record.success else "failures"
        outcomes[outcome] += 1
        is_learned = outcome == "successes" or (outcome == "failures" and bool(sft.labels))
        successes += [record] if is_learned else []
        lengths.append(len(record.arrays["actions"]) if is_learned else 0)
    players = ", ".join(sorted({record.player for record in successes})) or "nobody"
    failures = f"{outcomes['failures']} failures"
    with_failures, left_out = (f" and {failures}", "") if sft.labels else ("", f"{failures}, ")
    log(
        f"{outcomes['successes']} demonstrations{with_failures} from {path} by {players}; left out: {left_out}"
        f"{outcomes['unusable'] + folder.num_damaged} that are damaged"
    )
    if not successes:
        raise UsageError(f"{path} has no successful episode", f"collect some: rlvlm collect {task} --out {path}")
    images = np.concatenate([kept_images(folder, record) for record in successes]) if form.image_px else None
    shown = _gathered(successes, 0 if sft.labels else outcomes["failures"], policy.horizon, images)
    if shown.known is not None and not shown.known[:, -1].any():
        log(f"no episode has {shown.known.shape[1]} steps: the last ones of the policy's chunks are not learned")
    if not sft.labels:
        return shown
    weights = folder_weights(path, sft.labels, lengths, sft.weighting, sft.min_worth, sft.advantage_steps)
    log(weights.told())
    kept = np.concatenate([~_perturbed(record) for record in successes])
    return replace(shown, weights=weights.at(kept))


def _perturbed(record: EpisodeRecord) -> NDArray[np.bool_]:
    """Returns [T], chunks that replaced the player's choice."""
    return record.arrays.get("perturbed", np.zeros(len(record.arrays["actions"]), bool))


def _goals(record: EpisodeRecord) -> NDArray[np.str_]:
    """Returns [C], the instruction of each chunk."""
    return np.asarray(record.arrays.get("goals", [record.goal] * len(record.arrays["actions"])))


def _gathered(
    records: Sequence[EpisodeRecord], num_failures: int, horizon: int | None = None, images: Frames | None = None
) -> Demonstrations:
    """Concatenates the chunks of all `records`, continued up to `horizon`; perturbed ones are left out."""
    arrays = [record.arrays for record in records]
    # a perturbed chunk must not be imitated; the ones after it show how to recover
    shown = [np.flatnonzero(~_perturbed(record)) for record in records]
    pairs = list(zip(arrays, shown, strict=True))
    snapshots = [
        np.empty((len(rows), 0)) if images is not None else columns["snapshots"][rows] for columns, rows in pairs
    ]
    obs = Observations(
        snapshots=np.concatenate(snapshots).astype(np.float32),
        texts=tuple(
            goal for record, rows in zip(records, shown, strict=True) for goal in _goals(record)[rows].tolist()
        ),
        proprio=np.concatenate([columns["proprio"][rows] for columns, rows in pairs]).astype(np.float32),
    )
    actions = [columns["actions"] for columns in arrays]
    known: NDArray[np.bool_] | None = None
    if horizon is not None and horizon > actions[0].shape[1]:
        actions, found = zip(*(_continued(record, horizon) for record in records), strict=True)
        known = np.concatenate([part[rows] for part, rows in zip(found, shown, strict=True)])
    return Demonstrations(
        obs=obs,
        actions=np.concatenate([part[rows] for part, rows in zip(actions, shown, strict=True)]).astype(np.float32),
        begins=np.cumsum([0, *map(len, shown[:-1])]),
        num_failures=num_failures,
        known=known,
        images=images,
    )


def _continued(record: EpisodeRecord, horizon: int) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Returns the chunks of an episode continued by its next actions to [C, H, A], and which of them are known [C, H].

    Unknown are steps after the end, between chunks that do not reach each other, and from a perturbed chunk on, which
    the player would not have chosen; they repeat the last known step.
    """
    chunks = record.arrays["actions"]
    num, length, size = chunks.shape
    # steps up to the next chunk; of a longer gap only matters that it is one
    steps = np.minimum(record.arrays.get("steps", np.full(num, length)), length + 1)
    starts = np.cumsum(steps) - steps
    track, is_whole_track = np.zeros((int(steps.sum()), size), np.float32), np.zeros(int(steps.sum()), bool)
    for start, count, chunk, is_perturbed in zip(starts, steps, chunks, _perturbed(record), strict=True):
        track[start : start + count][:length] = chunk[:count]
        is_whole_track[start : start + count][:length] = not is_perturbed
    indices = starts[:, None] + np.arange(length, horizon)
    inside = np.minimum(indices, len(track) - 1)
    known = np.logical_and.accumulate((indices < len(track)) & is_whole_track[inside], axis=1)
    known = np.concatenate([np.ones((num, length), bool), known], axis=1)
    actions = np.concatenate([chunks, track[inside]], axis=1)
    last = np.minimum(np.arange(horizon), known.sum(axis=1, keepdims=True) - 1)
    return np.take_along_axis(actions, last[..., None], axis=1), known
