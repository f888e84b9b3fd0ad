"""Networks of a learned reward and their inputs: images, or state and action. Used by the ensemble.

All return one number per step, in [-BOUND, BOUND] unless rewards are normalised. To choose one, choose a `RewardInput`.
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
"""Output channels, kernel size and stride of each layer."""
_HIDDEN = (256, 256, 256)
BOUND = 3.0
"""Largest reward. Departure from 1 in both papers: within [-1, 1] the Bradley-Terry model gives at most 88 %, so
every fit pushes all rewards to the two ends, and a quarter of the way gets as much as all of it."""
_MIN_SCALE = 0.1
"""Standard deviation, in units of the observation, below which an input is not scaled up any further."""


def bounded(values: Tensor) -> Tensor:
    """Squashes `values` smoothly into [-BOUND, BOUND]; small ones hardly change."""
    return BOUND * torch.tanh(values / BOUND)


class RewardNetwork(nn.Module):
    """Network from rows [M, ...] to rewards [M]."""

    is_bounded = True
    """Whether the rewards lie in [-BOUND, BOUND]."""

    def rewards(self, values: Tensor) -> Tensor:
        """Returns rewards [M] for the last layer's output, `values` [M, 1]."""
        return bounded(values.squeeze(-1)) if self.is_bounded else values.squeeze(-1)

    def calibrate(self, rows: Tensor, /) -> None:
        """Receives the rows to fit, before the first update or before each fit.

        Image networks ignore them: pixels have a known range.
        """

    def features(self, rows: Tensor, /) -> Tensor:
        """Returns [M, E] features: the space in which rows are near or far."""
        raise NotImplementedError


def spread(layer: nn.Module, bound: float | None, rng: torch.Generator) -> nn.Module:
    """Initialises `layer` with weights uniform in +-bound (None: +-1 / sqrt(inputs of a unit)) and no bias."""
    if bound is None:
        bound = 1 / math.sqrt(layer.get_parameter("weight")[0].numel())
    with torch.no_grad():
        layer.get_parameter("weight").uniform_(-bound, bound, generator=rng)
        layer.get_parameter("bias").zero_()
    return layer


class ImageNetwork(RewardNetwork):
    """Four convolutions, one linear layer, bounded by a tanh.

    Source: Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681, its image reward: 16-32-64-128 channels, kernels 5-3-3-3, and
    its initial weights. Departures, because our images have 64 pixels a side and not 300: the first stride is 4 and not
    3, and borders are padded. Without padding the last layer would see only the upper left 47 pixels of 64; with
    strides 4-2-2-2 the layers' sizes are 16, 8, 4 and 2, and only the last row and column are not seen.

    Args:
        image_px: side length of the images.
        rng: source of the initial weights.
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
        # images come as [H, W, 3]: with channels last, convolutions need no copy
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def features(self, images: Tensor) -> Tensor:
        """Returns [M, E] inputs of the linear layer for `images` [M, H, W, 3] uint8."""
        return self.layers[:-1](images.permute(0, 3, 1, 2).float() / 255)

    def forward(self, images: Tensor) -> Tensor:
        return self.rewards(self.layers[-1](self.features(images)))


class ResNetNetwork(RewardNetwork):
    """ResNet-18 with random weights and one linear layer, bounded by a tanh like the small CNN.

    Source: He et al. 2016, arXiv:1512.03385; as the image reward of the deformable tasks in Wang et al. 2024
    (RL-VLM-F), arXiv:2402.03681. Departure from the latter: bounded, so that rewards of all models have one scale.

    Batches are normalised by their own statistics in training, and by running ones otherwise.

    Args:
        rng: source of the initial weights.
    """

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetModel  # slow to load, and rarely used

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
        """Returns [M, 512] means over the last feature map for `images` [M, H, W, 3] uint8."""
        return self.body(images.permute(0, 3, 1, 2).float() / 255).pooler_output.flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        return self.rewards(self.head(self.features(images)))


class StateNetwork(RewardNetwork):
    """Three hidden layers of 256 LeakyReLU units, bounded by a tanh.

    Source: Lee et al. 2021 (PEBBLE), arXiv:2106.05091, app. B. Departure: inputs are centred and scaled by the rows
    that are fitted. Positions in metres differ by centimetres around offsets of half a metre; left as they are, a fit
    of 100 updates orders far fewer held-out pairs.

    Args:
        num_inputs: length of a row.
        rng: source of the initial weights.
    """

    def __init__(self, num_inputs: int, rng: torch.Generator) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size_in, size_out in zip((num_inputs, *_HIDDEN), _HIDDEN, strict=False):
            layers += [spread(skip_init(nn.Linear, size_in, size_out), None, rng), nn.LeakyReLU()]
        head = spread(skip_init(nn.Linear, _HIDDEN[-1], 1), None, rng)
        self.layers = nn.Sequential(*layers, head)
        # buffers: saved with the weights, and not updated by the optimiser
        self.centre = nn.Buffer(torch.zeros(num_inputs))
        self.scale = nn.Buffer(torch.ones(num_inputs))

    def calibrate(self, rows: Tensor) -> None:
        """Sets the inputs' centre and scale to mean and standard deviation of `rows` [M, D + A]."""
        self.centre.copy_(rows.mean(dim=0))
        # a dimension that hardly moved yet may move far later; the floor keeps it from dominating then
        self.scale.copy_(rows.std(dim=0, correction=0).clamp_min(_MIN_SCALE))

    def features(self, rows: Tensor) -> Tensor:
        """Returns the rows [M, D + A], centred and scaled."""
        return (rows - self.centre) / self.scale

    def forward(self, rows: Tensor) -> Tensor:
        return self.rewards(self.layers(self.features(rows)))


class ImageInput:
    """Network inputs by image: steps become rows of the image after each step; equal images share one row.

    Args:
        frames: draws and caches images.
        build: builds a network that reads them; becomes `build_network`.
        affordable_kinds: rows that an ensemble of three reads in about half a second on one core, drawing included.
        rows_per_pass: rows of every pass, padded if there are fewer: a larger number suits many rows, a smaller one the
            handful after a rollout.
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
        """Returns the [U] first step of each kind, ascending, and the [N] kind of every step."""
        return self._frames.distinct(steps.snapshots)

    def names(self, steps: Steps, chosen: NDArray[np.int64]) -> list[bytes]:
        """Returns a key for each chosen step [M], equal for equal rows; None if rows hardly ever repeat."""
        # a cloth's key has thousands of bytes; a digest suffices
        return [blake2b(key, digest_size=16).digest() for key in self._frames.keys(steps.snapshots[chosen])]

    def rows(self, steps: Steps, chosen: NDArray[np.int64]) -> Tensor:
        """Returns the network's rows [M, ...] for the chosen steps [M]."""
        return torch.from_numpy(self._frames.frames(steps.snapshots[chosen]))


class StateInput:
    """Network inputs by state: the observation after a step and the action that led to it, a separate row for each.

    Departure from PEBBLE, which takes the observation before the step: a judge is shown the image after it, and the
    reward should see what was judged.

    Args:
        obs_size: size D of an observation.
        action_size: size A of an action.
    """

    affordable_kinds = 16_384
    rows_per_pass = 64

    def __init__(self, obs_size: int, action_size: int) -> None:
        self.build_network = partial(StateNetwork, obs_size + action_size)

    def distinct(self, steps: Steps) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        # states hardly ever repeat exactly: a search for equal rows would cost more than reading them
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
    """Returns the input of the reward model that `reward.model` names."""
    if reward.model == "image":
        return ImageInput(frames, partial(ImageNetwork, reward_model.image_px))
    if reward.model == "resnet18":
        affordable = max(200_000 // reward_model.image_px**2, 1)  # by three of them in half a second, on one core
        return ImageInput(frames, ResNetNetwork, affordable, rows_per_pass=16)
    return StateInput(env.observation_space.shape[0], env.action_space.shape[0])
