"""Base of all VLAs, whatever their answers consist of: images, an instruction and proprioception in, a chunk of actions
out.

`VLAPolicy` is the interface for rollouts, the supervised start, learners and checkpoints. A VLA of your own derives
from it and implements `read`, `sample`, `log_probs` and `imitation`; `--policy.head my_file:NAME` then uses it.
`TokenVLA` (token_policy.py) answers in action tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.core.episodes import Answer, IntArray, Observations
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.advantage_prompt import positive
from rlvlm.policies.protocol import Policy
from rlvlm.policies.vla.config import VLAConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Settings of sampling chunks."""

    temperature: float | None = None
    """Temperature > 0; None takes the most likely chunk."""
    generator: torch.Generator | None = None
    """Generator on the CPU; None: a fresh one with seed 0."""
    noise_per: Literal["token", "chunk"] = "token"
    """Sharing of random numbers. chunk: one random number for each dimension of the action is used for all steps of a
    chunk. Each element has the same distribution in both."""
    from_noise: bool = False
    """Without a temperature: whether the chunk is denoised from random noise, as published flows are played, and not
    the most likely one; only for a policy that `starts_from_noise`."""
    explored: NDArray[np.bool_] | None = None
    """[A] dimensions of an action that are sampled, from `VLAPolicy.explored`; None: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledChunks:
    """A chunk of L actions for each of M observations, as sampled by a policy; N elements of each have a log-prob."""

    actions: FloatArray
    """[M, L, A] actions in the env's units."""
    answers: Sequence[Answer]
    """M answers, in the policy's own form."""
    log_probs: FloatArray
    """[M, N] log-probs of the elements; 0 for those not sampled but chosen."""
    mask: NDArray[np.bool_]
    """[M, N] elements that were sampled."""
    steps: IntArray
    """[N] env step of the chunk, 0 to L - 1, that each element belongs to."""
    values: FloatArray
    """[M] values from a value head; 0 without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstrations:
    """Demonstrated observations and actions by chunk: of successful episodes, or weighted by a judge's labels."""

    obs: Observations
    """Observations before M chunks; without snapshots if there are images."""
    actions: FloatArray
    """[M, H, A] actions in the env's units: those of the chunk, and the episode's next ones up to the policy's horizon;
    H = L where it has none."""
    begins: NDArray[np.intp]
    """[E] row of each episode's first chunk."""
    num_failures: int
    """Number of failed episodes, which are left out."""
    known: NDArray[np.bool_] | None = None
    """[M, H] whether a step was demonstrated; others, as after the episode's end, repeat the last one. None: all."""
    images: Frames | None = None
    """[M, cameras, height, width, 3] stored images; None if they are drawn."""
    weights: Any = None
    """Weights of chunks by a judge's labels, see `demonstrations.weighting.Weights`; None: all equal."""

    @property
    def num_episodes(self) -> int:
        """E, the number of episodes."""
        return len(self.begins)


class VLAPolicy(Policy):
    """A network that acts in chunks.

    Elements of an answer are ordered by env step, an action's A dimensions side by side; an answer that samples each of
    them several times, as a flow does, concatenates these samples.
    """

    config: VLAConfig = VLAConfig()
    """Settings with which it was built."""
    image_px: int
    """Side of its square images, pixels."""
    comes_trained: bool = False
    """Whether it can act as loaded: then it gets no demonstrations."""
    starts_from_noise: bool = False
    """Whether it was trained to denoise from noise, and is evaluated so too."""
    horizon: int | None = None
    """H, the steps of a demonstrated chunk that it learns, at least the env's; None: as many as the env runs."""

    # specific to each VLA

    def read(self, instructions: Sequence[str]) -> Tensor:
        """Returns `[B, W]` int64, the instructions in the network's form, on its device."""
        raise NotImplementedError("each VLA has its own tokens")

    def sample(self, obs: Observations, sampling: Sampling) -> SampledChunks:
        """Samples a chunk for each of `obs`, whose images it was shown.

        Raises:
            NumericsError: the policy's outputs are not finite.
        """
        raise NotImplementedError("each VLA has its own answers")

    def learn_statistics(self, shown: Demonstrations, env: ChunkEnv) -> None:
        """Determines the scales of its numbers from demonstrations."""

    @property
    def statistics(self) -> str:
        """Returns the scales of its numbers, as JSON, for checkpoints and env runners; empty before there are any."""
        return ""

    def load_statistics(self, text: str) -> None:
        """Loads the `statistics` of a policy of the same kind.

        Raises:
            ValueError: they are invalid.
        """

    def explored(self, env: ChunkEnv, min_range: float) -> NDArray[np.bool_]:
        """Returns [A], dimensions of actions that are explored: those of whose range in `env` demonstrations use at
        least the share `min_range`.
        """
        return np.ones(len(env.action_low), bool)

    # common to all

    def draw(self, env: Any, snapshots: FloatArray) -> Frames:
        """Returns [N, cameras, H, W, 3], images of `snapshots` [N, D] by every camera."""
        return env.draw_cameras(snapshots, self.image_px)

    def inputs(self, obs: Observations) -> tuple[Tensor, Tensor, Tensor]:
        """Returns images, token ids and proprioception of `obs`, whose images it was shown, on its device."""
        images = torch.from_numpy(np.stack(self.images.get(obs.images))).to(self.device)
        return images, self.read(self.asked(obs)), torch.from_numpy(obs.proprio).to(self.device)

    def asked(self, obs: Observations) -> tuple[str, ...]:
        """Returns the instructions of `obs` as used when the policy plays, see `advantage_prompt`."""
        return positive(obs.texts) if self.config.conditioned else obs.texts

    def guided(self, asked: Tensor, plain: Callable[[], Tensor]) -> Tensor:
        """Returns what the policy plays by: `asked`, the network's output for the instructions `asked`, carried on from
        `plain`, that for the instructions as they are, which is computed only if it counts.
        """
        weight = self.config.guidance
        return asked if weight == 1 else (without := plain()) + weight * (asked - without)

    def shown_inputs(
        self, env: ChunkEnv, obs: Observations, images: Frames | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns such inputs for M demonstrated moments, whose images are drawn by `env`, or given as `images` [M,
        cameras, H, W, 3]; instructions are used unchanged.
        """
        drawn = self.draw(env, obs.snapshots) if images is None else images
        token_ids, proprio = self.read(obs.texts), torch.from_numpy(obs.proprio)
        return torch.from_numpy(drawn).to(self.device), token_ids, proprio.to(self.device)

    def meta(self) -> dict[str, Any]:
        """Returns the content of its checkpoint besides trained weights, as JSON."""
        return {"config": asdict(self.config), "statistics": self.statistics}
