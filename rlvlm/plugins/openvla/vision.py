"""The two image encoders of OpenVLA, DINOv2 and SigLIP, with timm's weight names. Used by `network`.

timm cannot be imported without torchvision, so its vision transformer is reimplemented here, as far as these two need
it. Unused weights of a checkpoint (the last block, its norm, SigLIP's pooling) are kept as well: weights are loaded and
saved whole, and published LoRA adapters fit.

Sources: Oquab et al. 2023, arXiv:2304.07193 (DINOv2); Darcet et al. 2023, arXiv:2309.16588 (registers); Zhai et al.
2023, arXiv:2303.15343 (SigLIP); Karamcheti et al. 2024, arXiv:2402.07865 (Prismatic: both, features of the block before
the last, side by side).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_EPSILON = 1e-6
"""Epsilon of every layer norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerSize:
    """Shape of one vision transformer."""

    width: int
    depth: int
    """Number of blocks; the features are those of the last but one."""
    heads: int
    hidden: int
    """Inner width of the blocks' MLPs."""
    patch_px: int = 14
    registers: int | None = None
    """Tokens beside the class token that are dropped from the features; None: no class token either (SigLIP)."""
    scaled: bool = False
    """Whether each branch is scaled by learned factors (DINOv2)."""
    pooled: bool = False
    """Whether the checkpoint contains an attention pooling, which is not used (SigLIP)."""

    def __post_init__(self) -> None:
        if min(self.width, self.heads, self.hidden, self.patch_px) < 1 or self.depth < 2 or self.width % self.heads:
            raise ValueError(f"sizes must be >= 1, depth >= 2 and width a multiple of heads, got {self}")


TOWERS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": TowerSize(
        width=1024, depth=24, heads=16, hidden=4096, registers=4, scaled=True
    ),
    "vit_so400m_patch14_siglip_224": TowerSize(width=1152, depth=27, heads=16, hidden=4304, pooled=True),
}
"""Sizes by the encoder's name in a checkpoint's config, which is timm's."""


class Tower(nn.Module):
    """A vision transformer from images to the features of their patches, before the last block.

    Args:
        size: shape of the transformer.
        image_px: side of its square images, pixels.
    """

    def __init__(self, size: TowerSize, image_px: int) -> None:
        super().__init__()
        num_patches = (image_px // size.patch_px) ** 2
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, size.width, size.patch_px, stride=size.patch_px)})
        # patches only: class and register tokens have no position in the image
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches, size.width))
        self.cls_token = self.reg_token = None
        if size.registers is not None:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, size.width))
            self.reg_token = nn.Parameter(torch.zeros(1, size.registers, size.width))
        self.blocks = nn.ModuleList(_Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width, eps=_EPSILON)
        self.attn_pool = _Pool(size) if size.pooled else None

    def forward(self, pixels: Tensor) -> Tensor:
        """Returns [B, patches, width] for normalised images [B, 3, H, W], without class and register tokens."""
        tokens = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2) + self.pos_embed
        extra = [token.expand(len(tokens), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        num_extra = sum(part.shape[1] for part in extra)
        tokens = torch.cat([*extra, tokens], dim=1)
        # Prismatic reads the block before the last; the last one exists for its weights' names
        for block in self.blocks[:-1]:
            tokens = block(tokens)
        return tokens[:, num_extra:]


class FusedVision(nn.Module):
    """Both encoders; the features of a patch are those of DINOv2 and SigLIP, concatenated.

    Args:
        sizes: sizes of both encoders.
        image_px: side of the square images, pixels.
    """

    def __init__(self, sizes: tuple[TowerSize, TowerSize], image_px: int) -> None:
        super().__init__()
        self.featurizer = Tower(sizes[0], image_px)
        self.fused_featurizer = Tower(sizes[1], image_px)

    def forward(self, pixels: Tensor) -> Tensor:
        """Returns [B, cameras * patches, width of both] for images [B, cameras, 2, 3, H, W], normalised for each."""
        batch, cameras = pixels.shape[:2]
        # the cameras of a moment are rows of one larger batch
        flat = pixels.flatten(0, 1)
        features = torch.cat([self.featurizer(flat[:, 0]), self.fused_featurizer(flat[:, 1])], dim=-1)
        return features.view(batch, cameras * features.shape[1], -1)


class _Block(nn.Module):
    def __init__(self, size: TowerSize) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width, eps=_EPSILON)
        self.attn = _Attention(size)
        self.ls1 = _Scale(size.width) if size.scaled else nn.Identity()
        self.norm2 = nn.LayerNorm(size.width, eps=_EPSILON)
        self.mlp = _Mlp(size)
        self.ls2 = _Scale(size.width) if size.scaled else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.ls1(self.attn(self.norm1(tokens)))
        return tokens + self.ls2(self.mlp(self.norm2(tokens)))


class _Attention(nn.Module):
    def __init__(self, size: TowerSize) -> None:
        super().__init__()
        self._heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        split = self.qkv(tokens).unflatten(-1, (3, self._heads, -1))  # [B, N, 3, heads, width / heads]
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, size: TowerSize) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size.width, size.hidden)
        self.fc2 = nn.Linear(size.hidden, size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(tokens)))


class _Scale(nn.Module):
    """Learned factors of a branch; the checkpoints' name for them differs from timm's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # initial value as in LayerScale (Touvron et al. 2021, arXiv:2103.17239); a checkpoint has its own
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.scale_factor


class _Pool(nn.Module):
    """SigLIP's attention pooling: unused weights that come with a checkpoint."""

    def __init__(self, size: TowerSize) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, size.width))
        self.q = nn.Linear(size.width, size.width)
        self.kv = nn.Linear(size.width, 2 * size.width)
        self.proj = nn.Linear(size.width, size.width)
        self.norm = nn.LayerNorm(size.width, eps=_EPSILON)
        self.mlp = _Mlp(size)
