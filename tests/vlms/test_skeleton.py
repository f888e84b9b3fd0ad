"""Networks without weights: what is read of them later, row by row, is what a whole network has."""

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlvlm.core.errors import ModelUnavailable
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.vlms.skeleton import Source, pending, skeletons


def test_rows_of_a_weight_by_hand(tmp_path):
    save_file({"a": torch.arange(12).view(4, 3)}, tmp_path / "w.safetensors")
    source = Source(file=tmp_path / "w.safetensors", key="a", shape=(4, 3))
    assert source.read(1, 2).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert source.read(3, 2).tolist() == [[9, 10, 11]], "the last part may be shorter"


@pytest.mark.parametrize(
    "settings", [{"learns": "all"}, {"learns": "lora"}, {"learns": "all", "new_words": ("to the right",)}]
)
def test_a_skeleton_is_a_policy_but_for_its_weights(tiny_vlms, settings):
    config = PolicyConfig(model=str(tiny_vlms["qwen2_5_vl"]), device="cpu", **settings)
    whole = load_policy(config)
    with skeletons():
        skeleton = load_policy(config)

    def shapes(policy: torch.nn.Module) -> dict[str, Any]:
        return {name: (one.shape, one.dtype, one.requires_grad) for name, one in policy.named_parameters()}

    assert shapes(skeleton) == shapes(whole) and skeleton.device == whole.device
    assert all(param.is_meta for param in skeleton.model.parameters())
    own = dict(skeleton.named_buffers())
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(own[name], buffer, msg=name)
    weights = dict(whole.named_parameters(remove_duplicate=False))
    names = {(module, key): f"{path}.{key}" for path, module in skeleton.named_modules() for key in module._parameters}
    waiting = pending(skeleton)
    for one in waiting:
        value = weights[names[one.owners[0]]]
        if one.source is None:
            assert value.requires_grad, "what is in no file comes from the run's own policy"
        else:
            assert torch.equal(one.source.read(0, len(value)), value)
    assert sum(one.source is not None for one in waiting) > 30


def test_a_weight_that_the_folder_lacks_is_named_before_any_is_read(tiny_vlms, tmp_path):
    folder = shutil.copytree(tiny_vlms["qwen3_vl"], tmp_path / "lacking")
    weights = load_file(folder / "model.safetensors")
    del weights["model.language_model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with skeletons(), pytest.raises(ModelUnavailable, match="lacks 1 weights of a Qwen3VL.* such as .*up_proj"):
        load_policy(PolicyConfig(model=str(folder), device="cpu"))
