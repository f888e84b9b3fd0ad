"""The pocket VLA: a small network with OpenVLA-OFT's interface, made by SFT within a run.

Source: Kim et al. 2025, arXiv:2502.19645 (OpenVLA-OFT), for parallel decoding of a chunk's action tokens and for FiLM
by the instruction. Departures: a few convolutions and a spatial softmax (Levine et al. 2016, arXiv:1504.00702) replace
DINOv2, SigLIP and Llama 2; words are hashed, so there is no tokenizer.
"""

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlvlm.policies.vla.config import PocketVLAConfig
from rlvlm.policies.vla.token_policy import TokenVLA
from rlvlm.policies.vla.tokens import NUM_BINS

_WORDS = 32
"""Maximum number of words and pairs of words used; a longer instruction is cut."""


class PocketBody(nn.Module):
    """Body of pocket VLAs: a few convolutions per camera, conditioned on the instruction, and a trunk.

    Args:
        config: widths.
        num_cameras: images of each observation.
        proprio_size: P, the numbers of proprioception.
        num_offsets: numbers in the offsets from the hand to the things of the task, see `ChunkEnv.offsets`.
    """

    places: Tensor
    value_head: nn.Module | None

    def __init__(self, config: PocketVLAConfig, *, num_cameras: int, proprio_size: int, num_offsets: int) -> None:
        super().__init__()
        self.image_px = config.image_px
        self._vocabulary = config.vocabulary
        first, second = config.channels
        self.words = nn.Embedding(config.vocabulary + 1, config.word_width, padding_idx=config.vocabulary)
        self.look = nn.Conv2d(3, first, 5, stride=2, padding=2)
        self.look_for = nn.Linear(config.word_width, 2 * first)
        self.find = nn.Conv2d(first, second, 3, padding=1)
        self.find_for = nn.Linear(config.word_width, 2 * second)
        # a soft argmax over positions: without sharpening it would give the middle of the image for nearly everything
        self.log_sharpness = nn.Parameter(torch.full((second, 1), math.log(5.0)))
        places = torch.linspace(-1, 1, config.image_px // 2)
        self.register_buffer("places", torch.cartesian_prod(places, places), persistent=False)  # rows of (y, x)
        size_seen = num_cameras * 3 * second + config.word_width + proprio_size
        self.trunk = nn.Sequential(
            nn.Linear(size_seen, config.hidden), nn.ReLU(), nn.Linear(config.hidden, config.hidden), nn.ReLU()
        )
        self.make_head(config)  # here, so that a seed gives the token policy the same weights as before
        self.look_around = nn.ModuleList(
            nn.Conv2d(first, first, 3, padding=2**n, dilation=2**n) for n in range(1, config.dilated + 1)
        )
        self.look_around_for = nn.ModuleList(nn.Linear(config.word_width, 2 * first) for _ in range(config.dilated))
        self.predicts_offsets = config.predicts_offsets and num_offsets > 0
        if self.predicts_offsets:
            self.offset_head = nn.Linear(config.hidden, num_offsets)
        self.value_head = None
        if config.has_values:
            self.value_head = nn.Sequential(
                nn.Linear(config.hidden, config.hidden), nn.ReLU(), nn.Linear(config.hidden, 1)
            )

    def make_head(self, config: PocketVLAConfig) -> None:
        """Makes the layers that act on the trunk's output."""
        raise NotImplementedError("each pocket VLA has its own head")

    def read(self, instructions: Sequence[str]) -> Tensor:
        """Returns [B, 32] rows of the word table: of each word and each pair of neighbours, lower-cased."""
        rows = {text: self._rows(text) for text in set(instructions)}
        return torch.tensor([rows[text] for text in instructions], device=self.log_sharpness.device)

    def _rows(self, instruction: str) -> list[int]:
        words = instruction.lower().split()
        texts = [*words, *(f"{left} {right}" for left, right in zip(words, words[1:], strict=False))]
        # not `hash`, which differs between processes
        rows = [zlib.crc32(text.encode()) % self._vocabulary for text in texts][:_WORDS]
        # the row after the last is always zero: it pads short instructions
        return rows + [self._vocabulary] * (_WORDS - len(rows))

    def see(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> Tensor:
        """Returns [B, hidden], the trunk's output."""
        num, cameras = images.shape[:2]
        # the instruction is the mean of its words; it selects the active filters (FiLM)
        counted = (token_ids != self._vocabulary).sum(dim=1, keepdim=True).clamp(min=1)
        said = self.words(token_ids).sum(dim=1) / counted
        pixels = images.flatten(0, 1).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        filters = said.repeat_interleave(cameras, dim=0)
        maps = functional.relu(_film(self.look(pixels), self.look_for(filters)))
        for look, look_for in zip(self.look_around, self.look_around_for, strict=True):
            maps = maps + functional.relu(_film(look(maps), look_for(filters)))
        maps = functional.relu(_film(self.find(maps), self.find_for(filters))).flatten(2)  # [B * C, channels, places]
        # each channel gives the position of its feature as (y, x): a policy needs positions, not a pooled impression
        attention = (maps * self.log_sharpness.exp()).softmax(dim=2)
        where = (attention @ self.places).flatten(1)
        seen = torch.cat([where, maps.mean(dim=2)], dim=1).view(num, -1)
        return self.trunk(torch.cat([seen, said, proprio], dim=1))


class PocketVLA(PocketBody, TokenVLA):
    """Maps images, words and proprioception to logits of all action tokens of a chunk in one forward pass.

    Args:
        config: widths.
        num_cameras, proprio_size, num_offsets: see `PocketBody`.
        num_tokens: L * A action tokens of a chunk.
    """

    def __init__(
        self, config: PocketVLAConfig, *, num_cameras: int, proprio_size: int, num_tokens: int, num_offsets: int = 0
    ) -> None:
        self._num_tokens = num_tokens
        super().__init__(config, num_cameras=num_cameras, proprio_size=proprio_size, num_offsets=num_offsets)

    def make_head(self, config: PocketVLAConfig) -> None:
        """Makes a query for each token, and the table of bins."""
        self.queries = nn.Linear(config.hidden, self._num_tokens * config.token_width)
        self.norm = nn.LayerNorm(config.token_width)
        # Neighbouring bins are neighbouring actions: the table of bins starts as smooth waves over the range.
        middles = (torch.arange(NUM_BINS) + 0.5) / NUM_BINS
        self.bins = nn.Parameter(torch.cos(middles[:, None] * torch.arange(config.token_width) * math.pi))
        self.bias = nn.Parameter(torch.zeros(self._num_tokens, NUM_BINS))

    def forward(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> Tensor:
        """Returns logits [B, L * A, 256] for `images` [B, C, H, W, 3], `token_ids` [B, 32] and `proprio` [B, P]."""
        return self._act(self.see(images, token_ids, proprio))

    def with_values(self, images: Tensor, token_ids: Tensor, proprio: Tensor, detach: bool) -> tuple[Tensor, Tensor]:
        """Returns the logits, and [B] values; `detach` stops the value head's loss at the head."""
        assert self.value_head is not None, "asked of a policy with one"
        hidden = self.see(images, token_ids, proprio)
        return self._act(hidden), self.value_head(hidden.detach() if detach else hidden)[:, 0]

    def forward_with_offsets(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits, and [B, num_offsets], the predicted offsets from the hand to the things of the task."""
        hidden = self.see(images, token_ids, proprio)
        return self._act(hidden), self.offset_head(hidden)

    def predict_offsets(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> Tensor:
        """Returns [B, num_offsets], the offsets only."""
        return self.offset_head(self.see(images, token_ids, proprio))

    def _act(self, hidden: Tensor) -> Tensor:
        tokens = self.norm(self.queries(hidden).view(len(hidden), self._num_tokens, -1))
        # one table for all tokens: neighbours in one dimension of an action are neighbours in the others
        return tokens @ self.bins.T + self.bias


def _film(maps: Tensor, scale_and_shift: Tensor) -> Tensor:
    """Scales and shifts each channel of `maps` [N, C, H, W] by `scale_and_shift` [N, 2 C]."""
    scale, shift = scale_and_shift[:, :, None, None].chunk(2, dim=1)
    return maps * (1 + scale) + shift
