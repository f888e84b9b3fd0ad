import torch
from torch import nn

from rlvlm.vlms.config import VLMConfig
from rlvlm.vlms.loading import load_vlm
from rlvlm.vlms.patch_embedding import PatchProduct, flatten_patch_embedding


class TinyPatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv3d(1, 2, kernel_size=(1, 2, 2), stride=(1, 2, 2), bias=True)


def test_a_product_by_hand() -> None:
    # one patch [[1, 2], [3, 4]], first output weighs all with 1, the second takes the last alone
    model = TinyPatchEmbed()
    with torch.no_grad():
        model.proj.weight.copy_(torch.tensor([[[[[1.0, 1.0], [1.0, 1.0]]]], [[[[0.0, 0.0], [0.0, 1.0]]]]]))
        model.proj.bias.copy_(torch.tensor([0.5, 0.0]))  # type: ignore[union-attr]
    names = set(model.state_dict())
    assert flatten_patch_embedding(model) == 1 and set(model.state_dict()) == names
    patch = torch.tensor([[[[[1.0, 2.0], [3.0, 4.0]]]]])
    assert model.proj(patch).flatten().tolist() == [10.5, 4.0]
    assert flatten_patch_embedding(model) == 0


def test_every_family_computes_what_it_did(tiny_vlms) -> None:
    generator = torch.Generator().manual_seed(0)
    for folder in tiny_vlms.values():
        vision = load_vlm(VLMConfig(model=str(folder))).model.model.visual
        product = vision.patch_embed.proj
        assert isinstance(product, PatchProduct)
        patches = torch.randn(50, *product.weight.shape[1:], generator=generator)
        with torch.no_grad():
            wanted = nn.functional.conv3d(patches, product.weight, product.bias, stride=product.weight.shape[2:])
        # Sums of some thousand products, taken in another order, differ by some 1e-5.
        torch.testing.assert_close(product(patches), wanted, rtol=1e-4, atol=1e-4)
