"""Drives envs by a VLA, chunk after chunk, and gathers whole episodes: for training and for players."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.core.chunks import ChunkEpisode, ChunkObs, ChunkStep
from rlvlm.core.finite import check_finite
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.chunk_env import ChunkEnv, ChunkEnvs
from rlvlm.policies.vla.policy import VLAPolicy
from rlvlm.policies.vla.sampling import draw_bins, likeliest_bins
from rlvlm.policies.vla.tokens import ActionScale, decode

_FIX = "mend the env; rlvlm check-task looks at it"
Drawn = dict[tuple[str, bytes], Frames]
"""Images by camera and snapshot."""
Choice = tuple[NDArray[np.int64], FloatArray]
"""Bins [N, L * A] and their log-probabilities, [N, L * A]."""


class ObsProcessor:
    """Turns observations into what a policy takes: images of every camera, words, and proprioception.

    Args:
        policy: says how large images are and how words are written.
        env: draws.
        memory_bytes: of the newest images, which are kept so that what a rollout looked at is not drawn again for the
            update.
    """

    def __init__(self, policy: VLAPolicy, env: ChunkEnv, memory_bytes: int = 0) -> None:
        self._policy = policy
        self._env = env
        self._most = memory_bytes // (3 * policy.image_px**2)
        self._drawn: OrderedDict[tuple[str, bytes], Frames] = OrderedDict()

    def give(self) -> Drawn:
        """The images that are kept, which are then forgotten here."""
        drawn, self._drawn = dict(self._drawn), OrderedDict()
        return drawn

    def take(self, drawn: Drawn) -> None:
        """Keeps images that others have given, as far as there is room."""
        self._drawn.update(drawn)
        self._forget()

    def _forget(self) -> None:
        """The oldest ones beyond what there is room for."""
        while len(self._drawn) > self._most:
            self._drawn.popitem(last=False)

    def look(self, obs: ChunkObs, images: Frames | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Images [N, cameras, H, W, 3] uint8, words [N, W] and proprioception [N, P], on the policy's device.

        Args:
            obs: of N moments.
            images: of these moments, where they were kept; else they are drawn.
        """
        device = next(self._policy.parameters()).device
        if images is None:
            images = np.stack([self._images(obs.snapshots, camera) for camera in self._env.cameras], axis=1)
        words = self._policy.read(obs.instructions)
        return torch.from_numpy(images).to(device), words, torch.from_numpy(obs.proprio).to(device)

    def augment_scenes(self, obs: ChunkObs, starts: ChunkObs, rng: np.random.Generator) -> ChunkObs:
        """Scenes as `ChunkEnv.augment_scenes` at N moments and N starts; words and proprioception are the moments'."""
        scenes = self._env.augment_scenes(obs.snapshots, starts.snapshots, rng)
        return replace(obs, snapshots=scenes)

    def true_ways(self, obs: ChunkObs) -> Tensor:
        """[N, W] as `ChunkEnv.ways` at N moments, on the policy's device."""
        return torch.from_numpy(self._env.ways(obs.snapshots)).to(next(self._policy.parameters()).device)

    def _images(self, snapshots: FloatArray, camera: str) -> Frames:
        """[N, H, W, 3] by one camera; of snapshots that are equal to the bit one is drawn."""
        size_px = self._policy.image_px
        if not self._most:
            return self._env.draw(snapshots, size_px, camera)
        keys = [(camera, row.tobytes()) for row in snapshots]
        missing = {key: row for row, key in enumerate(keys) if key not in self._drawn}
        if missing:
            images = self._env.draw(snapshots[list(missing.values())], size_px, camera)
            self._drawn.update(zip(missing, images, strict=True))
        found = np.stack([self._drawn[key] for key in keys])
        self._forget()
        return found


class Sampler:
    """Draws chunks from a policy at a temperature, or takes its likeliest tokens.

    Args:
        policy: of the tokens.
        obs_processor: what it is shown.
        temperature: > 0, or None for the likeliest token of each distribution.
        generator: of the draws, on the CPU.
        shared: see `draw_bins`.
        explored: [A] the dimensions of an action that are drawn; of the others the likeliest token is taken. None: all.
    """

    def __init__(
        self,
        policy: VLAPolicy,
        obs_processor: ObsProcessor,
        temperature: float | None,
        generator: torch.Generator | None = None,
        shared: int = 1,
        explored: NDArray[np.bool_] | None = None,
    ) -> None:
        self._policy = policy
        self._obs_processor = obs_processor
        self._temperature = temperature
        self._generator = generator or torch.Generator().manual_seed(0)
        self._shared = shared
        self._explored = explored

    @torch.no_grad()
    def choose(self, obs: ChunkObs) -> Choice:
        """Bins of a chunk for each of N envs and their log-probabilities; 0 where the likeliest are taken.

        Raises:
            NumericsError: the policy's numbers are not finite.
        """
        logits = self._policy(*self._obs_processor.look(obs))
        if self._temperature is None:
            bins = likeliest_bins(logits)
            return bins.cpu().numpy(), np.zeros(bins.shape, np.float32)
        explored = self._explored
        if explored is not None:
            explored = torch.from_numpy(np.tile(explored, logits.shape[-2] // len(explored)))
        bins, log_probs = draw_bins(logits, self._temperature, self._generator, self._shared, explored)
        # groups of a broken policy may all end alike: nothing would be learned from them, and nobody told
        check_finite("the policy, sampled", "go on from the last checkpoint: `rlvlm resume`", {"log-probs": log_probs})
        return bins.cpu().numpy(), log_probs.cpu().numpy()


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialStates:
    """Where N episodes begin."""

    task: str
    state_ids: NDArray[np.int64]
    """[N] initial states."""
    groups: NDArray[np.int64]
    """[N] the group that each belongs to: equal groups, equal initial states."""

    def __post_init__(self) -> None:
        states = {}
        for group, state_id in zip(self.groups.tolist(), self.state_ids.tolist(), strict=True):
            if states.setdefault(group, state_id) != state_id:
                raise ValueError(f"group {group} has two initial states, {states[group]} and {state_id}")


def roll_out(
    worlds: ChunkEnvs,
    starts: InitialStates,
    choose: Callable[[ChunkObs], Choice],
    to_actions: Callable[[NDArray[np.int64]], FloatArray],
) -> list[ChunkEpisode]:
    """Whole episodes, in the order of `starts`; those that end early are neither driven nor looked at any more.

    Args:
        worlds: driven side by side, as many at once as they say.
        starts: initial states and groups.
        choose: gives the action tokens for what is observed.
        to_actions: bins [n, L * A] to actions [n, L, A] in the env's units.

    Raises:
        NumericsError: what an env shows or gives is not finite.
    """
    played: dict[int, ChunkEpisode] = {}
    for places in worlds.batches(starts.state_ids):
        own = InitialStates(task=starts.task, state_ids=starts.state_ids[places], groups=starts.groups[places])
        played |= zip(places.tolist(), _driven(worlds, own, choose, to_actions), strict=True)
    return [played[place] for place in range(len(played))]


def _driven(
    worlds: ChunkEnvs,
    starts: InitialStates,
    choose: Callable[[ChunkObs], Choice],
    to_actions: Callable[[NDArray[np.int64]], FloatArray],
) -> list[ChunkEpisode]:
    """`roll_out` of a single batch."""
    obs = worlds.begin(starts.state_ids)
    first, rows = obs, np.arange(len(obs))
    told: list[tuple[NDArray[np.intp], ChunkObs, Choice, ChunkStep]] = []
    while len(rows):
        seen = {"numbers of observations": obs.snapshots, "numbers of proprioception": obs.proprio}
        check_finite(f"the env {starts.task}", _FIX, seen, {"state_ids": starts.state_ids[rows]})
        choice = choose(obs)
        came = worlds.step(rows, to_actions(choice[0]))
        told.append((rows, obs, choice, came))
        running = np.flatnonzero(~came.ended)
        rows = rows[running]
        obs = came.obs.at(running)
    episodes = [_episode(row, starts, first, told) for row in range(len(first))]
    rewards = np.concatenate([episode.env_rewards for episode in episodes])
    check_finite(f"the env {starts.task}", _FIX, {"rewards": rewards}, {"state_ids": starts.state_ids})
    return episodes


def _episode(
    row: int, starts: InitialStates, first: ChunkObs, told: list[tuple[NDArray[np.intp], ChunkObs, Choice, ChunkStep]]
) -> ChunkEpisode:
    """The episode of env `row` from what all of them were told; `rows` of every chunk ascend."""
    parts = []
    for rows, obs, (bins, log_probs), came in told:
        place = int(np.searchsorted(rows, row))
        if place == len(rows) or rows[place] != row:
            break
        parts.append((place, obs, bins, log_probs, came))
    place, *_, last = parts[-1]
    return ChunkEpisode(
        task=starts.task,
        instruction=first.instructions[row],
        state_id=int(starts.state_ids[row]),
        group=int(starts.groups[row]),
        snapshots=np.concatenate(
            [first.snapshots[row : row + 1], *(came.snapshots[at, : came.steps[at]] for at, *_, came in parts)]
        ),
        proprio=np.stack([obs.proprio[at] for at, obs, *_ in parts]),
        bins=np.stack([bins[at] for at, _, bins, *_ in parts]).astype(np.int16),
        log_probs=np.stack([log_probs[at] for at, _, _, log_probs, _ in parts]),
        steps=np.array([came.steps[at] for at, *_, came in parts], np.int64),
        env_rewards=np.concatenate([came.env_rewards[at, : came.steps[at]] for at, *_, came in parts]),
        success=any(bool(came.success[at]) for at, *_, came in parts),
        success_at_end=bool(last.success_at_end[place]),
        progress=float(last.progress[place]),
        terminated=bool(last.terminated[place]),
    )


def explored_dimensions(scale: ActionScale, env: ChunkEnv, least_range: float) -> NDArray[np.bool_]:
    """[A] those dimensions of `env`'s actions of whose range demonstrations use `least_range` or more."""
    return scale.share_used(env.action_low, env.action_high) >= least_range


def decoded_by(scale: ActionScale, chunk_steps: int) -> Callable[[NDArray[np.int64]], FloatArray]:
    """Bins [n, L * A] to actions [n, L, A] in the env's units, with the demonstrations' scale."""
    return lambda bins: scale.to_env(decode(bins).reshape(len(bins), chunk_steps, -1))


def seen_at_chunks(episodes: list[ChunkEpisode]) -> ChunkObs:
    """What the policy was given before each chunk of `episodes`, one after the other."""
    return ChunkObs(
        snapshots=np.concatenate([episode.chunk_snapshots for episode in episodes]),
        instructions=tuple(episode.instruction for episode in episodes for _ in episode.steps),
        proprio=np.concatenate([episode.proprio for episode in episodes]),
    )
