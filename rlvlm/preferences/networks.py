"""The networks of a learned reward and what each looks at: images, or state and action. Used by the ensemble.

All give one number per step, in [-BOUND, BOUND] unless rewards are normalised. A choice between them is a choice of
`RewardInput`, nothing else.
"""

import math
from collections.abc import Callable
from functools import partial
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import skip_init

from rlvlm.envs.env import StepEnv
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Steps
from rlvlm.rewards.config import StepRewardConfig

_CONVOLUTIONS = ((16, 5, 4), (32, 3, 2), (64, 3, 2), (128, 3, 2))
"""Channels out, kernel and stride of each layer."""
_HIDDEN = (256, 256, 256)
BOUND = 3.0
"""Largest reward. Departure from 1 in both papers: within [-1, 1] the Bradley-Terry model can be at most 88 % sure, so
every fit pushes all rewards to the two ends, and a quarter of the way is worth as much as all of it."""
_MIN_SCALE = 0.1
"""Standard deviation, in units of the observation, below which an input is not scaled up any further."""


def bounded(values: Tensor) -> Tensor:
    """`values`, pressed smoothly into [-BOUND, BOUND]; small ones stay as they are."""
    return BOUND * torch.tanh(values / BOUND)


class RewardNetwork(nn.Module):
    """From rows `[M, ...]` to rewards `[M]`."""

    is_bounded = True
    """Whether they lie in [-BOUND, BOUND]."""

    def rewards(self, values: Tensor) -> Tensor:
        """Rewards `[M]` of what the last layer gives, `values` `[M, 1]`."""
        return bounded(values.squeeze(-1)) if self.is_bounded else values.squeeze(-1)

    def calibrate(self, rows: Tensor, /) -> None:
        """Gets the rows that are fitted: the first, before any update, or each time. Pixels have a known range."""

    def features(self, rows: Tensor, /) -> Tensor:
        """`[M, E]` what it makes of them: the space in which rows are near or far."""
        raise NotImplementedError


def spread(layer: nn.Module, bound: float | None, rng: torch.Generator) -> nn.Module:
    """`layer` with weights uniform in +-bound (None: +-1 / sqrt(inputs of a unit)) and no bias."""
    if bound is None:
        bound = 1 / math.sqrt(layer.get_parameter("weight")[0].numel())
    with torch.no_grad():
        layer.get_parameter("weight").uniform_(-bound, bound, generator=rng)
        layer.get_parameter("bias").zero_()
    return layer


class ImageNetwork(RewardNetwork):
    """Four convolutions, one linear layer, bounded by a tanh.

    Source: Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681, its image reward: 16-32-64-128 channels, kernels 5-3-3-3,
    and its initial weights. Departures, because our images have 64 pixels a side and not 300: the first stride is 4
    and not 3, and borders are padded. Without padding the last layer would see only the upper left 47 pixels of 64;
    with strides 4-2-2-2 the layers' sizes are 16, 8, 4 and 2, and only the last row and column are not seen.

    Args:
        image_px: side of the images.
        rng: of the initial weights.
    """

    def __init__(self, image_px: int, rng: torch.Generator) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels, size = 3, image_px
        for channels_out, kernel, stride in _CONVOLUTIONS:
            layer = skip_init(nn.Conv2d, channels, channels_out, kernel, stride=stride, padding=kernel // 2)
            layers += [spread(layer, None, rng), nn.ReLU()]
            channels, size = channels_out, (size - 1) // stride + 1
        head = spread(skip_init(nn.Linear, channels * size**2, 1), 1e-3, rng)
        self.layers = nn.Sequential(*layers, nn.Flatten(), head)
        # images come as [H, W, 3]: with channels last, convolutions read them as they lie
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def features(self, images: Tensor) -> Tensor:
        """`[M, E]` what the linear layer reads of `images` `[M, H, W, 3]` uint8."""
        return self.layers[:-1](images.permute(0, 3, 1, 2).float() / 255)

    def forward(self, images: Tensor) -> Tensor:
        """Rewards `[M]` of `images` `[M, H, W, 3]` uint8."""
        return self.rewards(self.layers[-1](self.features(images)))


class ResNetNetwork(RewardNetwork):
    """ResNet-18 with random weights and one linear layer, bounded by a tanh as the small CNN is.

    Source: He et al. 2016, arXiv:1512.03385; as the image reward of the deformable tasks in Wang et al. 2024
    (RL-VLM-F), arXiv:2402.03681. Departure from the latter: bounded, so that rewards of all models have one scale.

    Batches are normalised by their own statistics in training, and by running ones otherwise.

    Args:
        rng: of the initial weights.
    """

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetModel  # slow to load, and few want it

        widths = [64, 128, 256, 512]
        resnet18 = ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=widths)
        seed = int(torch.randint(2**62, (), generator=rng))
        # transformers draws from the global generator; forked, so that no other random draw changes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = ResNetModel(resnet18)
            self.head = spread(nn.Linear(widths[-1], 1), 1e-3, rng)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def features(self, images: Tensor) -> Tensor:
        """`[M, 512]` means over the last map of `images` `[M, H, W, 3]` uint8."""
        return self.body(images.permute(0, 3, 1, 2).float() / 255).pooler_output.flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        """Rewards `[M]` of `images` `[M, H, W, 3]` uint8."""
        return self.rewards(self.head(self.features(images)))


class StateNetwork(RewardNetwork):
    """Three hidden layers of 256 LeakyReLU units, bounded by a tanh.

    Source: Lee et al. 2021 (PEBBLE), arXiv:2106.05091, app. B. Departure: inputs are centred and scaled by the rows
    that are fitted. Positions in metres differ by centimetres around offsets of half a metre; left as they are, a fit
    of 100 updates orders far fewer held-out pairs.

    Args:
        num_inputs: length of a row.
        rng: of the initial weights.
    """

    def __init__(self, num_inputs: int, rng: torch.Generator) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size_in, size_out in zip((num_inputs, *_HIDDEN), _HIDDEN, strict=False):
            layers += [spread(skip_init(nn.Linear, size_in, size_out), None, rng), nn.LeakyReLU()]
        head = spread(skip_init(nn.Linear, _HIDDEN[-1], 1), None, rng)
        self.layers = nn.Sequential(*layers, head)
        # buffers: they are saved with the weights, and no optimiser moves them
        self.centre = nn.Buffer(torch.zeros(num_inputs))
        self.scale = nn.Buffer(torch.ones(num_inputs))

    def calibrate(self, rows: Tensor) -> None:
        """Centres and scales inputs by mean and standard deviation of `rows` `[M, D + A]`."""
        self.centre.copy_(rows.mean(dim=0))
        # a dimension that hardly moved yet may move far later; the floor keeps it from drowning everything else then
        self.scale.copy_(rows.std(dim=0, correction=0).clamp_min(_MIN_SCALE))

    def features(self, rows: Tensor) -> Tensor:
        """`[M, D + A]` the rows, centred and scaled."""
        return (rows - self.centre) / self.scale

    def forward(self, rows: Tensor) -> Tensor:
        """Rewards `[M]` of `rows` `[M, D + A]`."""
        return self.rewards(self.layers(self.features(rows)))


class ImageInput:
    """Turns steps into rows that a network reads: the image after each; those that look the same share one row.

    Args:
        frames: draws and remembers images.
        build: makes a network that reads them; it is `build_network` then.
        affordable_kinds: rows that an ensemble of three reads in about half a second on one core, with the drawing.
        rows_per_pass: of every pass, filled up where there are fewer: more suit many rows, fewer the handful after a
            turn.
    """

    def __init__(
        self,
        frames: FrameStore,
        build: Callable[[torch.Generator], RewardNetwork],
        affordable_kinds: int = 512,
        rows_per_pass: int = 32,
    ) -> None:
        self._frames = frames
        self.build_network = build
        self.affordable_kinds = affordable_kinds
        self.rows_per_pass = rows_per_pass

    def distinct(self, steps: Steps) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`[U]` the first step of each kind, ascending, and `[N]` the kind of every step."""
        return self._frames.distinct(steps.snapshots)

    def names(self, steps: Steps, chosen: NDArray[np.int64]) -> list[bytes]:
        """Equal names, equal rows: one for each of the chosen steps `[M]`; none where hardly a row comes twice."""
        # the key of a cloth has thousands of bytes; a digest does as well
        return [blake2b(key, digest_size=16).digest() for key in self._frames.keys(steps.snapshots[chosen])]

    def rows(self, steps: Steps, chosen: NDArray[np.int64]) -> Tensor:
        """`[M, ...]` what the network reads of the chosen steps `[M]`."""
        return torch.from_numpy(self._frames.frames(steps.snapshots[chosen]))


class StateInput:
    """The same of the observation after a step and the action that led to it, each a row of its own.

    Departure from PEBBLE, which takes the observation before the step: a judge is shown the image after it, and the
    reward should see what was judged.

    Args:
        obs_size: D.
        action_size: A.
    """

    affordable_kinds = 16_384
    rows_per_pass = 64

    def __init__(self, obs_size: int, action_size: int) -> None:
        self.build_network = partial(StateNetwork, obs_size + action_size)

    def distinct(self, steps: Steps) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        # states hardly ever repeat to the bit: looking for equal rows would cost more than reading them
        every = np.arange(len(steps))
        return every, every

    def names(self, steps: Steps, chosen: NDArray[np.int64]) -> None:
        return None

    def rows(self, steps: Steps, chosen: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.concatenate([steps.next_obs[chosen], steps.actions[chosen]], axis=1))


RewardInput = ImageInput | StateInput


def reward_input(
    env: StepEnv, frames: FrameStore, reward: StepRewardConfig, reward_model: RewardModelConfig
) -> RewardInput:
    """Input of the reward model that `reward.model` names."""
    if reward.model == "image":
        return ImageInput(frames, partial(ImageNetwork, reward_model.image_px))
    if reward.model == "resnet18":
        affordable = max(200_000 // reward_model.image_px**2, 1)  # by three of them in half a second, on one core
        return ImageInput(frames, ResNetNetwork, affordable, rows_per_pass=16)
    return StateInput(env.observation_space.shape[0], env.action_space.shape[0])
