"""The supervised start: demonstrations by the world's script, and the policy's first lessons from them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlvlm.algorithms.grpo.config import SFTConfig
from rlvlm.algorithms.grpo.rollouts import Eyes
from rlvlm.envs.chunks import FIRST_HELD_OUT_STATE, ChunkWorld
from rlvlm.errors import NumericsError, UsageError
from rlvlm.policies.vla.policy import VLAPolicy
from rlvlm.policies.vla.tokens import NUM_BINS, ActionScale, encode
from rlvlm.types.chunks import ChunkObs
from rlvlm.types.steps import FloatArray

_WARM_UP = 20
"""Gradient steps over which the step size rises."""
_TELL_EVERY = 50
"""Demonstrations between lines about them."""
_MOST_SKIPPED = 50
"""Initial states without a script, one after the other, after which the world is taken to have none."""
_HOPELESS = 20
"""Failures without a success after which no more is tried."""
_CHANCES = 4
"""Episodes that the script may play for each one that is wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstrations:
    """What the script saw and did, chunk by chunk, in successful episodes only."""

    obs: ChunkObs
    """Of N chunks."""
    actions: FloatArray
    """[N, L, A] in the env's units."""
    num_episodes: int
    num_failures: int
    """Episodes that the script failed, left out."""


def demonstrate(
    world: ChunkWorld, config: SFTConfig, rng: np.random.Generator, tell: Callable[[str], None] = lambda line: None
) -> Demonstrations:
    """Plays the world's script until it has succeeded `config.demonstrations` times, and tells how far it is.

    A world of several tasks may have a script for some of them; the others are not demonstrated, which is told.

    Raises:
        UsageError: the world has no script, or the script fails most of the time.
    """
    seen: list[ChunkObs] = []
    done: list[FloatArray] = []
    without_script: set[str] = set()
    successes = failures = num_skipped = 0
    while successes < config.demonstrations:
        if successes + failures >= _CHANCES * config.demonstrations or (failures >= _HOPELESS and not successes):
            raise UsageError(
                f"the script succeeded in {successes} of {successes + failures} episodes, "
                f"{config.demonstrations} are wanted",
                "lower --sft.demonstrations or --sft.noise",
            )
        obs, _ = world.reset(options={"state_id": int(rng.integers(FIRST_HELD_OUT_STATE))})
        episode, success = _script_episode(world, obs, config.noise, rng)
        if not episode:
            without_script.add(obs.instructions[0])
            num_skipped += 1
            if num_skipped >= _MOST_SKIPPED and not successes + failures:
                fix = "choose a policy that is trained"
                raise UsageError(f"no script could demonstrate: {', '.join(sorted(without_script))}", fix)
            continue
        successes, failures = successes + success, failures + (not success)
        if success and successes % _TELL_EVERY == 0:
            tell(f"demonstrations: {successes} of {config.demonstrations}, {failures} failures left out")
        if success:
            seen += [obs for obs, _ in episode]
            done += [chunk for _, chunk in episode]
    if without_script:
        tell(f"not demonstrated, for want of a script: {', '.join(sorted(without_script))}")
    obs = ChunkObs(
        snapshots=np.concatenate([one.snapshots for one in seen]),
        instructions=tuple(one.instructions[0] for one in seen),
        proprio=np.concatenate([one.proprio for one in seen]),
    )
    return Demonstrations(obs=obs, actions=np.stack(done), num_episodes=successes, num_failures=failures)


def _script_episode(
    world: ChunkWorld, obs: ChunkObs, noise: float, rng: np.random.Generator
) -> tuple[list[tuple[ChunkObs, FloatArray]], bool]:
    """What the script sees and does from `obs` on, nothing where there is none; and whether it succeeds."""
    told: list[tuple[ChunkObs, FloatArray]] = []
    success = ended = False
    while not ended:
        chunk = world.scripted_chunk(noise, rng)
        if chunk is None:
            return [], False
        told.append((obs, chunk))
        obs, _, terminated, truncated, info = world.step(chunk)
        success, ended = info["success"], terminated or truncated
    return told, success


def imitate(
    policy: VLAPolicy,
    eyes: Eyes,
    demonstrations: Demonstrations,
    scale: ActionScale,
    config: SFTConfig,
    rng: np.random.Generator,
    tell: Callable[[str], None],
) -> float:
    """Teaches the policy the demonstrations' action tokens; returns the last ten steps' mean loss, nats per token.

    The steps that a chunk still holds after the episode's end are learned too: they are what the script would do.

    Raises:
        NumericsError: the loss is not finite.
    """
    bins = torch.from_numpy(encode(scale.from_env(demonstrations.actions)))  # [N, L, A]
    targets = soft_targets(config.label_width)
    is_soft = torch.tensor(scale.scaled) & (torch.tensor(scale.high) > torch.tensor(scale.low))
    images, words, proprio = eyes.look(demonstrations.obs)
    optimizer = torch.optim.AdamW(policy.parameters(), config.lr, weight_decay=config.weight_decay)
    losses: list[float] = []
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _share_of_lr(step, config.steps)
        rows = torch.from_numpy(rng.integers(len(bins), size=config.batch_size))
        logits = policy(images[rows], words[rows], proprio[rows]).logits.view(*bins[rows].shape, -1)
        loss = imitation_loss(logits, bins[rows].to(logits.device), targets.to(logits.device), is_soft)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise NumericsError(f"the loss of step {step + 1} of imitation is {losses[-1]}", "a smaller --sft.lr")
        if (step + 1) % 200 == 0:
            tell(f"imitation: step {step + 1} of {config.steps}, loss {np.mean(losses[-10:]):.2f} nats per token")
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
