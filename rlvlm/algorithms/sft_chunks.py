"""The supervised start of a policy that acts in chunks: demonstrations by the env's script or of a folder, and the
imitation of them.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rlvlm.algorithms.sft import fit
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core.episodes import Observations
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.chunk_form import folder_form, form_of, is_whole, kept_images
from rlvlm.demonstrations.collect import Perturbation, play_episodes
from rlvlm.demonstrations.folder import open_folder
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.vla.pocket import PocketVLA
from rlvlm.policies.vla.policy import VLAPolicy
from rlvlm.policies.vla.tokens import NUM_BINS, ActionScale, encode

_WARM_UP = 20
"""Updates over which the step size rises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstrations:
    """What was seen and done, chunk by chunk, in successful episodes only."""

    obs: Observations
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


def imitate(
    policy: VLAPolicy,
    env: ChunkEnv,
    demonstrations: Demonstrations,
    scale: ActionScale,
    config: ChunkSFTConfig,
    rng: np.random.Generator,
    log: Callable[[str], None],
) -> float:
    """Teaches the policy the demonstrations' action tokens; returns the last ten updates' mean loss, in nats per token
    where nothing is learned beside.

    The steps that a chunk still holds after the episode's end are learned too: they are what the script would do. A
    policy that predicts offsets learns them beside, where the demonstrations have snapshots: at the demonstrated
    moments, and in `config.scenes` that nobody has played.

    Raises:
        NumericsError: the loss is not finite.
        UsageError: the env cannot rearrange its scenes.
    """
    bins = torch.from_numpy(encode(scale.from_env(demonstrations.actions)))  # [N, L, A]
    targets = soft_targets(config.label_width).to(policy.device)
    # a bell around a bin says that its neighbours are nearly as good, which is untrue of a gripper's two positions
    is_soft = torch.tensor(scale.scaled) & (torch.tensor(scale.high) > torch.tensor(scale.low))
    images, words, proprio = network_inputs(policy, env, demonstrations.obs, demonstrations.images)
    offsets = None
    if policy.predicts_offsets and demonstrations.images is None:
        net = cast(PocketVLA, policy)
        offsets = OffsetLoss(net, env, demonstrations.obs, demonstrations.begins, config.scenes, rng, log)
    elif policy.predicts_offsets:
        log("the demonstrations keep images and no states: the policy does not learn to predict offsets from them")

    def loss_of(update: int) -> Tensor:
        rows = torch.from_numpy(rng.integers(len(bins), size=config.batch_size))
        seen = images[rows], words[rows], proprio[rows]
        if offsets is None:
            logits, beside = policy(*seen), 0.0
        else:
            logits, predicted = offsets.policy.forward_with_offsets(*seen)
            beside = offsets.loss(predicted, rows, rng)
        logits = logits.view(*bins[rows].shape, -1)
        return imitation_loss(logits, bins[rows].to(logits.device), targets, is_soft) + beside

    def lr_of(update: int) -> float:
        # up over the first updates, then down along half a cosine to a fiftieth
        rise = min(1.0, (update + 1) / _WARM_UP)
        return config.lr * (rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * update / config.updates))))

    return fit(
        torch.optim.AdamW(policy.parameters(), weight_decay=config.weight_decay),
        loss_of,
        updates=config.updates,
        lr_of=lr_of,
        log_every=200,
        log=log,
    )


def network_inputs(
    policy: VLAPolicy, env: ChunkEnv, obs: Observations, images: Frames | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Images [N, cameras, H, W, 3] uint8, words [N, W] and proprioception [N, P], on the policy's device.

    Args:
        policy: says how large images are and how words are written.
        env: draws what it looks at.
        obs: of N moments.
        images: of these moments, where they were kept; else they are drawn.
    """
    drawn = policy.draw(env, obs.snapshots) if images is None else images
    words, proprio = policy.read(obs.texts), torch.from_numpy(obs.proprio)
    return torch.from_numpy(drawn).to(policy.device), words, proprio.to(policy.device)


def true_offsets(policy: VLAPolicy, env: ChunkEnv, obs: Observations) -> Tensor:
    """[N, W] as `ChunkEnv.offsets` at the N moments of `obs`, on the policy's device."""
    return torch.from_numpy(env.offsets(obs.snapshots)).to(policy.device)


def soft_targets(width: float) -> Tensor:
    """Row b of the result [256, 256] is the target of bin b: a bell around it, cut at the range's ends; sums to 1.

    Args:
        width: standard deviation in units of normalised actions, which span 2; 0 gives single bins.
    """
    if width == 0:
        return torch.eye(NUM_BINS)
    # softmax of a Gaussian's exponent: cut at the ends, it still sums to 1
    bins = torch.arange(NUM_BINS, dtype=torch.float32)
    width_bins = width * (NUM_BINS - 1) / 2
    return torch.softmax(-0.5 * ((bins[:, None] - bins) / width_bins) ** 2, dim=1)


def imitation_loss(logits: Tensor, bins: Tensor, targets: Tensor, is_soft: Tensor) -> Tensor:
    """Cross-entropy, in nats per token.

    Args:
        logits: [B, L, A, 256].
        bins: [B, L, A] that were demonstrated.
        targets: [256, 256] the target of each bin in the dimensions of `is_soft`.
        is_soft: [A]; in the other dimensions the target is the single bin.
    """
    # -sum_b q(b) log p(b), with q a bell around the demonstrated bin, or all of it on that bin
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    soft = -(targets[bins[..., is_soft]] * log_probs[..., is_soft, :]).sum()
    hard = -log_probs[..., ~is_soft, :].gather(-1, bins[..., ~is_soft, None]).sum()
    return (soft + hard) / bins.numel()


_SCENES_PER_CHUNK = 2
"""Scenes that nobody has played in a gradient step, for each of its demonstrated chunks."""


class OffsetLoss:
    """How wrong a policy is about where things are: an auxiliary loss of the supervised start.

    The simulator knows the offsets from the hand to the things of the task; the policy predicts them and acts on images
    alone. Demonstrations show the hand where it should be, so from them alone a policy predicts offsets from where its
    hand is, and is lost where the hand is elsewhere. Scenes that nobody has played teach it to look.

    Args:
        policy: predicts offsets.
        env: draws what it sees.
        shown: [N] demonstrated moments.
        begins: [E] which of them are the first of an episode.
        num_scenes: that nobody has played; 0 leaves them out.
        rng: of the scenes.
        log: takes a line.

    Raises:
        UsageError: the env cannot rearrange its scenes.
    """

    def __init__(
        self,
        policy: PocketVLA,
        env: ChunkEnv,
        shown: Observations,
        begins: NDArray[np.intp],
        num_scenes: int,
        rng: np.random.Generator,
        log: Callable[[str], None],
    ) -> None:
        self.policy = policy
        # drawn and measured once: gradient steps pick rows
        self._true = true_offsets(policy, env, shown)
        self._num_scenes = num_scenes
        if num_scenes:
            log(f"drawing {num_scenes:,} scenes that nobody has played, to learn to see from")
            scenes = augment_scenes(shown, begins, num_scenes, env, rng)
            self._scenes = (*network_inputs(policy, env, scenes), true_offsets(policy, env, scenes))

    def loss(self, predicted: Tensor, rows: Tensor, rng: np.random.Generator) -> Tensor:
        """Mean squared error, in multiples of the env's `offset_unit`: of `predicted` [B, W] at the moments `rows` [B],
        and of what the policy predicts in scenes drawn anew.
        """
        loss = functional.mse_loss(predicted, self._true[rows])
        if self._num_scenes:
            drawn = torch.from_numpy(rng.integers(self._num_scenes, size=_SCENES_PER_CHUNK * len(rows)))
            *seen, offsets = (part[drawn] for part in self._scenes)
            loss = loss + functional.mse_loss(self.policy.predict_offsets(*seen), offsets)
        return loss


def augment_scenes(
    shown: Observations, begins: NDArray[np.intp], num: int, env: ChunkEnv, rng: np.random.Generator
) -> Observations:
    """`num` scenes that nobody has played: the robot of a demonstrated moment among the things of an episode's start,
    each moved a little; both of one instruction, as it may decide which things there are.

    Raises:
        UsageError: the env cannot rearrange its scenes.
    """
    # the robot of one moment, the things of another episode's start: so the hand is where no script would have it
    moments, starts = rng.integers(len(shown), size=num), np.empty(num, np.intp)
    instructions = np.array(shown.texts)
    for instruction in np.unique(instructions):
        rows = np.flatnonzero(instructions[moments] == instruction)
        starts[rows] = rng.choice(begins[instructions[begins] == instruction], len(rows))
    scenes = env.augment_scenes(shown.at(moments).snapshots, shown.at(starts).snapshots, rng)
    return replace(shown.at(moments), snapshots=scenes, images=())
