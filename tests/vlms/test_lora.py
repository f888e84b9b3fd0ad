import json

import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch.utils._python_dispatch import TorchDispatchMode

from rlvlm.core.errors import ModelUnavailable
from rlvlm.vlms.config import VLMConfig
from rlvlm.vlms.loading import load_vlm
from rlvlm.vlms.lora import LoraConfig, adapter_mark, add_adapter, cast_adapters, load_adapter, save_adapter


def logits(vlm, model):
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how near?"}]}]
    chat = vlm.processor.apply_chat_template(turn)
    image = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
    with torch.no_grad():
        return model(**vlm.processor([chat], [[image]])).logits[0, -1]


@pytest.fixture(scope="module")
def taught(tiny_vlms, tmp_path_factory):
    """A tiny model's adapter after one step of training, in a folder, and what the model then says."""
    vlm = load_vlm(VLMConfig(model=str(tiny_vlms["qwen3_vl"])))
    before = logits(vlm, vlm.model)
    torch.manual_seed(0)
    model = add_adapter(vlm.model, LoraConfig(rank=4, alpha=8.0))
    torch.testing.assert_close(logits(vlm, model), before)  # a fresh adapter changes nothing
    for name, weight in model.named_parameters():
        assert weight.requires_grad == ("lora_" in name)
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    save_adapter(model, folder)
    return folder, before, logits(vlm, model)


def test_an_adapter_comes_back_as_it_was_saved(tiny_vlms, taught):
    folder, before, after = taught
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    vlm = load_vlm(VLMConfig(model=str(tiny_vlms["qwen3_vl"]), adapter=str(folder)))
    assert not vlm.model.training and not any(weight.requires_grad for weight in vlm.model.parameters())
    torch.testing.assert_close(logits(vlm, vlm.model), after)
    assert (after - before).abs().max() > 0.01


def test_training_goes_on_with_the_adapter_alone(tiny_vlms, taught):
    vlm = load_vlm(VLMConfig(model=str(tiny_vlms["qwen3_vl"]), adapter=str(taught[0])), trainable=True)
    learned = [name for name, weight in vlm.model.named_parameters() if weight.requires_grad]
    assert learned and all("lora_" in name for name in learned)


def test_four_bit_weights_take_an_adapter(tiny_vlms, taught):
    vlm = load_vlm(VLMConfig(model=str(tiny_vlms["qwen3_vl"]), adapter=str(taught[0]), quantization="nf4"))
    assert torch.isfinite(logits(vlm, vlm.model)).all()


class CountCasts(TorchDispatchMode):
    """Counts changes of precision."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation is torch.ops.aten._to_copy.default
        return operation(*args, **(kwargs or {}))


def outputs(model):
    """Of each layer with an adapter alone: a random model as a whole makes much of a last bit."""
    draw = torch.Generator().manual_seed(0)
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    with torch.no_grad():
        return [layer(torch.randn(2, 3, layer.in_features, generator=draw).bfloat16()) for layer in layers]


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_adapters_beside_16_bit_layers_are_cast_once(tiny_vlms, taught, quantization):
    settings = {"dtype": "bfloat16", "adapter": str(taught[0]), "quantization": quantization}
    model = load_vlm(VLMConfig(model=str(tiny_vlms["qwen3_vl"]), **settings)).model
    for sign in (1, -1):  # copies are of the weights as they are when the context opens
        with CountCasts() as by_peft:
            exact = outputs(model)
        with cast_adapters(model), CountCasts() as casts:
            near = outputs(model)
        assert len(exact) > 5 and casts.count <= by_peft.count - 2 * len(exact)
        for one, other in zip(near, exact, strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.01 * float(other.abs().max()))
            assert one.dtype == torch.bfloat16
        for one, other in zip(outputs(model), exact, strict=True):
            assert torch.equal(one, other), "afterwards all is as it was"
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.mul_(-sign)


def test_adapters_in_the_precision_of_their_layers_stay_as_they_are(tiny_vlms, taught):
    vlm = load_vlm(VLMConfig(model=str(tiny_vlms["qwen3_vl"]), adapter=str(taught[0])))
    with cast_adapters(vlm.model):
        inside = logits(vlm, vlm.model)
    assert torch.equal(inside, logits(vlm, vlm.model))


def test_an_adapter_of_another_model_is_refused(tiny_vlms, taught):
    with pytest.raises(ModelUnavailable, match="does not fit"):
        load_adapter(load_vlm(VLMConfig(model=str(tiny_vlms["qwen2_vl"]))).model, taught[0])


def test_a_folder_without_an_adapter_is_named(tmp_path):
    with pytest.raises(ModelUnavailable, match="holds no LoRA adapter"):
        load_adapter(torch.nn.Linear(1, 1), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(ModelUnavailable, match="kind IA3"):
        load_adapter(torch.nn.Linear(1, 1), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (tmp_path / "adapter_model.bin").write_bytes(b"a pickle, which is never read")
    with pytest.raises(ModelUnavailable, match="no adapter_model.safetensors"):
        load_adapter(torch.nn.Linear(1, 1), tmp_path)


def test_the_mark_of_an_adapter_moves_with_its_weights(taught, tmp_path):
    assert adapter_mark("") == ""
    mark = adapter_mark(str(taught[0]))
    for file in taught[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[:-1] + b" ")
    assert mark.startswith(" lora=") and adapter_mark(str(tmp_path)) != mark


@pytest.mark.parametrize(
    ("changes", "why"), [({"rank": 0}, "rank must be >= 1, got 0"), ({"alpha": 0.0}, "alpha must be > 0")]
)
def test_impossible_shapes_are_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        LoraConfig(**changes)
