"""Demonstrations for the supervised start of a policy that acts in chunks: by the env's script, or of a folder."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core.episodes import Observations
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.chunk_form import folder_form, form_of, is_whole, kept_images
from rlvlm.demonstrations.collect import Perturbation, play_episodes
from rlvlm.demonstrations.folder import open_folder
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.vla.policy import Demonstrations


def demonstrate(
    env: ChunkEnv, config: ChunkSFTConfig, seed: int, log: Callable[[str], None] = lambda line: None
) -> Demonstrations:
    """Plays the env's script until it has succeeded `config.episodes` times, and logs how far it is.

    Raises:
        UsageError: the env has no script, or the script fails most of the time.
    """
    wanted, num_failures = config.episodes, 0
    successes: list[EpisodeRecord] = []
    perturbation = Perturbation(noise=config.noise, p_perturb=config.p_perturb)
    for record in play_episodes(env, perturbation, "", wanted=wanted, seed=seed, log=log):
        num_failures += not record.success
        successes += [record] if record.success else []
    return _gathered(successes, num_failures)


def read_demonstrations(
    path: Path, task: str, settings: EnvConfig, env: ChunkEnv, image_px: int, log: Callable[[str], None]
) -> Demonstrations:
    """The successful episodes of a folder that `rlvlm collect` or `rlvlm data import` made.

    Args:
        path: of the folder.
        task: of the run.
        settings: of its envs.
        env: of the task, whose chunks a policy is to learn.
        image_px: side of the images that the policy looks at.
        log: takes lines on what was left out, and on what was set otherwise when it was collected.

    Raises:
        UsageError: it holds another task's episodes, chunks of another form, or no success.
    """
    folder = open_folder(path)
    folder.check_task(task)
    form = folder_form(folder)
    if form.image_px not in (0, image_px):
        raise UsageError(
            f"{path} keeps images of {form.image_px} pixels, and the policy looks at {image_px}",
            f"--policy.pocket.image-px {form.image_px}, or import it anew with --cut.image-px {image_px}",
        )
    if odd := form.against(form_of(env, form.image_px)):
        raise UsageError(f"{path} holds chunks of another form: {'; '.join(odd)}", "collect or import it anew")
    if other := folder.differs(settings.play_settings()):
        log(f"{path} was collected with {'; '.join(other)}")
    outcomes = Counter[str]()
    successes: list[EpisodeRecord] = []
    for record in folder.episodes():
        outcome = "unusable" if not is_whole(record, form) else "successes" if record.success else "failures"
        outcomes[outcome] += 1
        successes += [record] if outcome == "successes" else []
    players = ", ".join(sorted({record.player for record in successes})) or "nobody"
    log(
        f"{outcomes['successes']} demonstrations from {path} by {players}; left out: {outcomes['failures']} failures, "
        f"{outcomes['unusable'] + folder.num_damaged} that are damaged"
    )
    if not successes:
        raise UsageError(f"{path} has no successful episode", f"collect some: rlvlm collect {task} --out {path}")
    images = np.concatenate([kept_images(folder, record) for record in successes]) if form.image_px else None
    return _gathered(successes, outcomes["failures"], images)


def _gathered(records: Sequence[EpisodeRecord], num_failures: int, images: Frames | None = None) -> Demonstrations:
    """The chunks of all `records`, one after the other; perturbed ones are left out."""
    arrays = [record.arrays for record in records]
    # a perturbed chunk is what nobody should imitate; the ones after it show how to go on from there
    shown = [np.flatnonzero(~one.get("perturbed", np.zeros(len(one["actions"]), bool))) for one in arrays]
    pairs = list(zip(arrays, shown, strict=True))
    snapshots = [np.empty((len(rows), 0)) if images is not None else one["snapshots"][rows] for one, rows in pairs]
    obs = Observations(
        snapshots=np.concatenate(snapshots).astype(np.float32),
        texts=tuple(record.goal for record, rows in zip(records, shown, strict=True) for _ in rows),
        proprio=np.concatenate([one["proprio"][rows] for one, rows in pairs]).astype(np.float32),
    )
    return Demonstrations(
        obs=obs,
        actions=np.concatenate([one["actions"][rows] for one, rows in pairs]).astype(np.float32),
        begins=np.cumsum([0, *map(len, shown[:-1])]),
        num_failures=num_failures,
        images=images,
    )
