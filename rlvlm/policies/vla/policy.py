"""Common base of all VLAs, whatever their answers are made of: images, an instruction and proprioception in, a
chunk of actions out.

`VLAPolicy` is what rollouts, the supervised start, learners and checkpoints need of one. A VLA of your own derives from
it and gives `read`, `sample`, `log_probs` and `imitation`; `--policy.head my_file:NAME` then acts and learns by it.
`TokenVLA` (token_policy.py) answers in action tokens.
"""

from collections.abc import Sequence
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
    """How chunks are drawn."""

    temperature: float | None = None
    """> 0; None takes the likeliest chunk, as the policy has it."""
    generator: torch.Generator | None = None
    """On the CPU, of the draws; None: a fresh one of seed 0."""
    noise_per: Literal["token", "chunk"] = "token"
    """chunk: one random number for each dimension of the action serves all steps of a chunk. Each element has the same
    distribution in both."""
    explored: NDArray[np.bool_] | None = None
    """[A] dimensions of an action that are drawn, as `VLAPolicy.explored` gives them; None: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledChunks:
    """A chunk of L actions for each of M observations, as a policy drew it; N elements of each have a log-prob."""

    actions: FloatArray
    """[M, L, A] in the env's units."""
    answers: Sequence[Answer]
    """M, as the policy reads them."""
    log_probs: FloatArray
    """[M, N] of each element; 0 where it was taken and not drawn."""
    mask: NDArray[np.bool_]
    """[M, N] elements that were drawn."""
    steps: IntArray
    """[N] env step of the chunk, 0 to L - 1, that each element belongs to."""
    values: FloatArray
    """[M] a value head's; 0 without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstrations:
    """Observations and actions, chunk by chunk: in successful episodes, or weighted by a judge's labels."""

    obs: Observations
    """Observations before M chunks; without snapshots where there are images."""
    actions: FloatArray
    """[M, L, A] in the env's units."""
    begins: NDArray[np.intp]
    """[E] row of each episode's first chunk."""
    num_failures: int
    """Episodes that failed, left out."""
    images: Frames | None = None
    """[M, cameras, H, W, 3] where they were kept; None where they are drawn."""
    weights: Any = None
    """What each chunk counts by a judge's labels, see `demonstrations.weighting.Weights`; None: all alike."""

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.begins)


class VLAPolicy(Policy):
    """A network that acts in chunks.

    Elements of an answer lie env step by env step, an action's A dimensions side by side; an answer that draws each of
    them several times, as a flow does, has them one draw after the other.
    """

    config: VLAConfig = VLAConfig()
    """What it was built by."""
    image_px: int
    """Side of the square images it looks at."""
    comes_trained: bool = False
    """Whether it can act as it is loaded: then nothing is demonstrated to it."""

    # specific to each VLA

    def read(self, instructions: Sequence[str]) -> Tensor:
        """`[B, W]` int64: the instructions as the network takes them, on its device."""
        raise NotImplementedError("each VLA has its own tokens")

    def sample(self, obs: Observations, sampling: Sampling) -> SampledChunks:
        """A chunk for each of `obs`, whose images it was shown.

        Raises:
            NumericsError: the policy's numbers are not finite.
        """
        raise NotImplementedError("each VLA has its own answers")

    def learn_statistics(self, shown: Demonstrations, env: ChunkEnv) -> None:
        """Takes from demonstrations what its numbers are scaled by."""

    @property
    def statistics(self) -> str:
        """Scales of its numbers, as JSON; empty before there are any. Checkpoints have them, and env runners."""
        return ""

    def load_statistics(self, text: str) -> None:
        """Takes over the `statistics` of a policy of the same kind.

        Raises:
            ValueError: they are not such.
        """

    def explored(self, env: ChunkEnv, min_range: float) -> NDArray[np.bool_]:
        """[A] dimensions of actions that are drawn where something is: those of whose range in `env` demonstrations
        use the share `min_range` or more.
        """
        return np.ones(len(env.action_low), bool)

    # common to all

    def draw(self, env: Any, snapshots: FloatArray) -> Frames:
        """[N, cameras, H, W, 3] the images of `snapshots` [N, D] by every camera."""
        return env.draw_cameras(snapshots, self.image_px)

    def inputs(self, obs: Observations) -> tuple[Tensor, Tensor, Tensor]:
        """Images, token ids and proprioception of `obs`, whose images it was shown, on its device."""
        images = torch.from_numpy(np.stack(self.images.get(obs.images))).to(self.device)
        return images, self.read(self.asked(obs)), torch.from_numpy(obs.proprio).to(self.device)

    def asked(self, obs: Observations) -> tuple[str, ...]:
        """The instructions of `obs` as the policy is asked when it plays, see `advantage_prompt`."""
        return positive(obs.texts) if self.config.conditioned else obs.texts

    def shown_inputs(
        self, env: ChunkEnv, obs: Observations, images: Frames | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same of M demonstrated moments, whose images are drawn by `env`, or given as `images` [M, cameras, H, W,
        3]; instructions are read as they are.
        """
        drawn = self.draw(env, obs.snapshots) if images is None else images
        token_ids, proprio = self.read(obs.texts), torch.from_numpy(obs.proprio)
        return torch.from_numpy(drawn).to(self.device), token_ids, proprio.to(self.device)

    def meta(self) -> dict[str, Any]:
        """Content of its checkpoint beside the weights that learn, as JSON."""
        return {"config": asdict(self.config), "statistics": self.statistics}
