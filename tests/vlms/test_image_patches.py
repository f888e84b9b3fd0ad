from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoImageProcessor

from rlvlm.core.judging import Query
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.pocket.models import weights_folder
from rlvlm.vlms import images
from rlvlm.vlms.config import VLMConfig
from rlvlm.vlms.images import PatchProduct, flatten_patch_embedding
from rlvlm.vlms.loading import load_vlm


@pytest.fixture(params=["pocket", "large"])
def processor(request):
    processor = AutoImageProcessor.from_pretrained(weights_folder())
    if request.param == "large":
        processor.size = {"shortest_edge": 65_536, "longest_edge": 200_000}
        processor.image_mean, processor.image_std = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
    return processor


def test_one_grey_image_by_hand():
    # a 300 px image becomes 96 x 96 px, 6 x 6 patches of 16; grey 255 is (1 - 0.5) / 0.5 = 1 everywhere
    processor = AutoImageProcessor.from_pretrained(weights_folder())
    made = images.process([np.full((300, 300, 3), 255, np.uint8)], processor)
    assert made["image_grid_thw"].tolist() == [[1, 6, 6]]
    assert made["pixel_values"].shape == (36, 3 * 2 * 16 * 16) and bool((made["pixel_values"] == 1).all())


def test_the_same_pixels_to_the_bit(processor):
    rng = np.random.default_rng(0)
    shapes = [(300, 300), (300, 300), (96, 96), (64, 200), (333, 77), (40, 40)]
    drawn = [rng.integers(0, 256, (*shape, 3), np.uint8) for shape in shapes]
    assert images.can_replace(processor)
    made, wanted = images.process(drawn, processor), processor(images=drawn, return_tensors="pt")
    assert torch.equal(made["image_grid_thw"], wanted["image_grid_thw"])
    assert made["pixel_values"].dtype == wanted["pixel_values"].dtype
    assert torch.equal(made["pixel_values"], wanted["pixel_values"])


def test_another_processor_is_left_alone():
    processor = AutoImageProcessor.from_pretrained(weights_folder())
    processor.do_normalize = False
    assert not images.can_replace(processor) and not images.can_replace(object())


def test_a_query_shrunk_beforehand_gets_the_same_answer():
    judge: Any = build_judge(JudgeConfig(device="cpu"))
    frames = np.random.default_rng(1).integers(0, 256, (6, 2, 1, 300, 300, 3), np.uint8)
    queries = [Query(goal="open the drawer", left=left, right=right) for left, right in frames]
    small = [judge.shrink(query) for query in queries]
    assert small[0].left.shape == (1, 96, 96, 3)
    for one, other in zip(judge.compare(queries), judge.compare(small), strict=True):
        assert (one.label, one.probabilities) == (other.label, other.probabilities)
    bad = Query(goal="", left=frames[0, 0], right=frames[0, 1])
    assert judge.shrink(bad) is bad and np.array_equal(judge.shrink(small[0]).left, small[0].left)


class TinyPatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv3d(1, 2, kernel_size=(1, 2, 2), stride=(1, 2, 2), bias=True)


def test_a_patch_product_by_hand():
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


def test_the_patches_of_every_family_are_unchanged(tiny_vlms):
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
