"""The supervised start: demonstrations by the env's script or of a folder, and the policy's lessons from them."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.algorithms.policy_gradient.config import SFTConfig
from rlvlm.algorithms.policy_gradient.ways import WaysLessons
from rlvlm.core.chunks import ChunkObs
from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.collect import (
    Perturbation,
    folder_form,
    form_of,
    is_whole,
    kept_images,
    scripted_episodes,
)
from rlvlm.demonstrations.folder import open_folder
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.vla.observe import ObsProcessor
from rlvlm.policies.vla.pocket import PocketVLA
from rlvlm.policies.vla.policy import VLAPolicy
from rlvlm.policies.vla.tokens import NUM_BINS, ActionScale, encode

_WARM_UP = 20
"""Gradient steps over which the step size rises."""
_SHAPES_PLAY = ("episode_steps", "moved")
"""Settings of an env in chunks that demonstrations depend on: physics are always exact, and they end at success."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstrations:
    """What was seen and done, chunk by chunk, in successful episodes only."""

    obs: ChunkObs
    """Of N chunks; without snapshots where there are images."""
    actions: FloatArray
    """[N, L, A] in the env's units."""
    begins: NDArray[np.intp]
    """[E] row of each episode's first chunk."""
    num_failures: int
    """Episodes that failed, left out."""
    images: Frames | None = None
    """[N, cameras, H, W, 3] where they were kept; None where they are drawn."""

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.begins)


def demonstrate(
    world: ChunkEnv, config: SFTConfig, seed: int, log: Callable[[str], None] = lambda line: None
) -> Demonstrations:
    """Plays the env's script until it has succeeded `config.demonstrations` times, and tells how far it is.

    Raises:
        UsageError: the env has no script, or the script fails most of the time.
    """
    wanted, num_failures = config.demonstrations, 0
    successes: list[EpisodeRecord] = []
    perturbation = Perturbation(noise=config.noise, p_perturb=config.p_perturb)
    for record in scripted_episodes(world, "", wanted=wanted, perturbation=perturbation, seed=seed, log=log):
        num_failures += not record.success
        successes += [record] if record.success else []
    return _gathered(successes, num_failures)


def read_demonstrations(
    path: Path, task: str, env: EnvConfig, world: ChunkEnv, image_px: int, log: Callable[[str], None]
) -> Demonstrations:
    """The successful episodes of a folder that `rlvlm collect` or `rlvlm data import` made.

    Args:
        path: of the folder.
        task: of the run.
        env: settings of its envs.
        world: of the task, whose chunks a policy is to learn.
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
    if odd := form.against(form_of(world, form.image_px)):
        raise UsageError(f"{path} holds chunks of another form: {'; '.join(odd)}", "collect or import it anew")
    if other := folder.differs({name: getattr(env, name) for name in _SHAPES_PLAY}):
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
    """The chunks of all `records`, one after the other; what was led astray is left out."""
    arrays = [record.arrays for record in records]
    shown = [np.flatnonzero(~one.get("perturbed", np.zeros(len(one["actions"]), bool))) for one in arrays]
    pairs = list(zip(arrays, shown, strict=True))
    snapshots = [np.empty((len(rows), 0)) if images is not None else one["snapshots"][rows] for one, rows in pairs]
    obs = ChunkObs(
        snapshots=np.concatenate(snapshots).astype(np.float32),
        instructions=tuple(record.goal for record, rows in zip(records, shown, strict=True) for _ in rows),
        proprio=np.concatenate([one["proprio"][rows] for one, rows in pairs]).astype(np.float32),
    )
    return Demonstrations(
        obs=obs,
        actions=np.concatenate([one["actions"][rows] for one, rows in pairs]).astype(np.float32),
        begins=np.cumsum([0, *map(len, shown[:-1])]),
        num_failures=num_failures,
        images=images,
    )


def imitate(
    policy: VLAPolicy,
    obs_processor: ObsProcessor,
    demonstrations: Demonstrations,
    scale: ActionScale,
    config: SFTConfig,
    rng: np.random.Generator,
    log: Callable[[str], None],
) -> float:
    """Teaches the policy the demonstrations' action tokens; returns the last ten steps' mean loss, nats per token.

    The steps that a chunk still holds after the episode's end are learned too: they are what the script would do. A
    policy that tells ways learns them beside, where the demonstrations have snapshots: at the demonstrated moments, and
    in `config.scenes` that nobody has played.

    Raises:
        NumericsError: the loss is not finite.
        UsageError: the env cannot rearrange its scenes.
    """
    bins = torch.from_numpy(encode(scale.from_env(demonstrations.actions)))  # [N, L, A]
    targets = soft_targets(config.label_width)
    is_soft = torch.tensor(scale.scaled) & (torch.tensor(scale.high) > torch.tensor(scale.low))
    images, words, proprio = obs_processor.look(demonstrations.obs, demonstrations.images)
    lessons = None
    if policy.predicts_offsets and demonstrations.images is None:
        net = cast(PocketVLA, policy)
        lessons = WaysLessons(net, obs_processor, demonstrations.obs, demonstrations.begins, config.scenes, rng, log)
    elif policy.predicts_offsets:
        log("the demonstrations keep images and no states: the policy does not learn to tell ways from them")
    optimizer = torch.optim.AdamW(policy.parameters(), config.lr, weight_decay=config.weight_decay)
    losses: list[float] = []
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _share_of_lr(step, config.steps)
        rows = torch.from_numpy(rng.integers(len(bins), size=config.batch_size))
        seen, loss_of_ways = (images[rows], words[rows], proprio[rows]), 0.0
        if lessons is None:
            logits = policy(*seen)
        else:
            logits, told = lessons.policy.forward_with_offsets(*seen)
            loss_of_ways = lessons.loss(told, rows, rng)
        logits = logits.view(*bins[rows].shape, -1)
        loss = imitation_loss(logits, bins[rows].to(logits.device), targets.to(logits.device), is_soft)
        optimizer.zero_grad()
        (loss + loss_of_ways).backward()
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise NumericsError(f"the loss of step {step + 1} of imitation is {losses[-1]}", "a smaller --sft.lr")
        if (step + 1) % 200 == 0:
            log(f"imitation: step {step + 1} of {config.steps}, loss {np.mean(losses[-10:]):.2f} nats per token")
    return float(np.mean(losses[-10:])) if losses else math.nan


def soft_targets(width: float) -> Tensor:
    """Row b of the result [256, 256] is what bin b is taught as: a bell around it, cut at the range's ends; sums to 1.

    Args:
        width: standard deviation in units of normalised actions, which span 2; 0 gives single bins.
    """
    if width == 0:
        return torch.eye(NUM_BINS)
    bins = torch.arange(NUM_BINS, dtype=torch.float32)
    width_bins = width * (NUM_BINS - 1) / 2
    return torch.softmax(-0.5 * ((bins[:, None] - bins) / width_bins) ** 2, dim=1)


def imitation_loss(logits: Tensor, bins: Tensor, targets: Tensor, is_soft: Tensor) -> Tensor:
    """Cross-entropy, in nats per token.

    Args:
        logits: [B, L, A, 256].
        bins: [B, L, A] that were demonstrated.
        targets: [256, 256] what each bin is taught as in the dimensions of `is_soft`.
        is_soft: [A]; the other dimensions are taught the single bin.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    soft = -(targets[bins[..., is_soft]] * log_probs[..., is_soft, :]).sum()
    hard = -log_probs[..., ~is_soft, :].gather(-1, bins[..., ~is_soft, None]).sum()
    return (soft + hard) / bins.numel()


def _share_of_lr(step: int, steps: int) -> float:
    """Rises over the first steps, falls along a cosine to a fiftieth."""
    return min(1.0, (step + 1) / _WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
