"""OpenVLA-OFT in our own modules: names, the forward pass, what it is shown and told, loading, and what it refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.update_memory import saved_bytes
from rlvlm.core.errors import ModelUnavailable
from rlvlm.plugins.openvla import images as image_paths
from rlvlm.plugins.openvla.config import OpenVLAConfig
from rlvlm.plugins.openvla.images import to_pixels
from rlvlm.plugins.openvla.loading import load_openvla
from rlvlm.plugins.openvla.network import CheckpointConfig, OpenVLANetwork
from rlvlm.plugins.openvla.policy import EMPTY_ID, PROJECTOR, START_ID, OpenVLAPolicy
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.tokens import log_probs_of
from rlvlm.vlms.lora import save_adapter
from tests.oracles import openvla_oft as oracle
from tests.plugins.openvla.tiny_openvla import SMALL, STATISTICS, write_openvla

TOKENS = 2 * 7


def load(
    folder: Path, proprio_size: int = 3, chunk_steps: int = 2, action_size: int = 7, **settings: object
) -> OpenVLAPolicy:
    config = VLAConfig(model=str(folder), openvla=OpenVLAConfig(**settings))  # pyright: ignore[reportArgumentType]
    sizes = {"proprio_size": proprio_size, "chunk_steps": chunk_steps, "action_low": np.zeros(action_size)}
    env: Any = SimpleNamespace(cameras=("above", "wrist"), **sizes)
    policy = load_openvla(config, env)
    policy.config = config
    return policy


def seen(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num, 2, 40, 40, 3), dtype=torch.uint8, generator=generator)
    return images, torch.randn(num, 3, generator=generator)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_openvla(tmp_path_factory.mktemp("openvla"))


def test_names_and_shapes_are_the_published_checkpoints():
    """Without allocating 15 GB; the total is what the published index says, 15,082,474,368 bytes in bfloat16."""
    text = {"model_type": "llama", "pad_token_id": 32_000, "vocab_size": 32_064}
    with torch.device("meta"):
        network = OpenVLANetwork(CheckpointConfig(text_config=text))
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert 2 * sum(value.numel() for value in network.state_dict().values()) == 15_082_474_368
    assert shapes == published_shapes()


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Written down from the checkpoints' index and timm 0.9."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (width,), (width,)

    for tower, width, depth, hidden in (("featurizer", 1024, 24, 4096), ("fused_featurizer", 1152, 27, 4304)):
        name = f"vision_backbone.{tower}"
        shapes[f"{name}.pos_embed"] = (1, 256, width)
        shapes[f"{name}.patch_embed.proj.weight"] = (width, 3, 14, 14)
        shapes[f"{name}.patch_embed.proj.bias"] = (width,)
        for number in range(depth):
            block = f"{name}.blocks.{number}"
            norm(f"{block}.norm1", width)
            norm(f"{block}.norm2", width)
            linear(f"{block}.attn.qkv", 3 * width, width)
            linear(f"{block}.attn.proj", width, width)
            linear(f"{block}.mlp.fc1", hidden, width)
            linear(f"{block}.mlp.fc2", width, hidden)
            if tower == "featurizer":
                shapes[f"{block}.ls1.scale_factor"] = shapes[f"{block}.ls2.scale_factor"] = (width,)
        norm(f"{name}.norm", width)
    shapes["vision_backbone.featurizer.cls_token"] = (1, 1, 1024)
    shapes["vision_backbone.featurizer.reg_token"] = (1, 4, 1024)
    pool = "vision_backbone.fused_featurizer.attn_pool"
    shapes[f"{pool}.latent"] = (1, 1, 1152)
    norm(f"{pool}.norm", 1152)
    for part, outputs, inputs in (
        ("q", 1152, 1152), ("kv", 2304, 1152), ("proj", 1152, 1152), ("mlp.fc1", 4304, 1152), ("mlp.fc2", 1152, 4304),
    ):  # fmt: skip
        linear(f"{pool}.{part}", outputs, inputs)
    linear("projector.fc1", 8704, 2176)
    linear("projector.fc2", 4096, 8704)
    linear("projector.fc3", 4096, 4096)
    for number in range(32):
        layer = f"language_model.model.layers.{number}"
        for part, outputs, inputs in (
            *((f"self_attn.{one}_proj", 4096, 4096) for one in "qkvo"),
            ("mlp.gate_proj", 11008, 4096), ("mlp.up_proj", 11008, 4096), ("mlp.down_proj", 4096, 11008),
        ):  # fmt: skip
            shapes[f"{layer}.{part}.weight"] = (outputs, inputs)
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (4096,)
    shapes["language_model.model.norm.weight"] = (4096,)
    shapes["language_model.model.embed_tokens.weight"] = shapes["language_model.lm_head.weight"] = (32_064, 4096)
    return shapes


@pytest.mark.parametrize(("proprio_size", "cameras", "has_stop"), [(0, 1, True), (3, 2, True), (0, 2, False)])
def test_the_pass_is_that_of_a_plain_program(tmp_path, proprio_size, cameras, has_stop):
    write_openvla(tmp_path, proprio_size=proprio_size, seed=cameras)
    policy = load(tmp_path, cameras=cameras, has_stop=has_stop, images="whole")
    images, proprio = seen(2)
    words = policy.read(["push the red block onto the pad", "push"])
    found = policy(images, words, proprio).detach().double().numpy()
    weights = {name: value for file in tmp_path.glob("*.safetensors") for name, value in load_file(file).items()}
    for file in tmp_path.glob("*.pt"):
        weights |= {
            name.replace("module", "proprio_projector"): value
            for name, value in torch.load(file, weights_only=True).items()
        }
    pixels = to_pixels(images, "whole", 28).double().numpy()
    low, high = np.array(STATISTICS["proprio"]["q01"]), np.array(STATISTICS["proprio"]["q99"])
    for row in range(2):
        felt = np.clip(2 * (proprio[row].double().numpy() - low) / (high - low) - 1, -1, 1)
        expected = oracle.logits(
            {name: value.double().numpy() for name, value in weights.items()},
            [(pixels[row, camera, 0], pixels[row, camera, 1]) for camera in range(cameras)],
            [one for one in words[row].tolist() if one >= 0],
            felt if proprio_size else None,
            heads=(2, 3),
            language_heads=2,
            num_tokens=TOKENS,
            has_stop=has_stop,
            epsilon=1e-6,
        )
        actions = expected[:, 31_999:31_743:-1]  # bin 0 is the last word of the vocabulary
        np.testing.assert_allclose(found[row], actions, atol=2e-5)


def test_prompts_begin_and_end_as_in_training_and_short_ones_are_filled_up(folder):
    policy = load(folder)
    words = policy.read(["Push the RED block", "push"])
    assert words[0].tolist() == [START_ID, *range(100, 109), 111, 105, 112, 116, 109, 110, 101, EMPTY_ID]
    assert words[1].tolist() == [START_ID, -1, -1, -1, *range(100, 109), 111, 109, 110, 101, EMPTY_ID]


def test_images_are_made_as_either_stack_does():
    plain = torch.full((1, 1, 40, 40, 3), 128, dtype=torch.uint8)
    for path in ("whole", "cropped"):
        dino, siglip = to_pixels(plain, path, 28)[0, 0]
        assert dino.shape == (3, 28, 28)
        torch.testing.assert_close(siglip, torch.full_like(siglip, 128 / 127.5 - 1))
        torch.testing.assert_close(dino[2], torch.full_like(dino[2], (128 / 255 - 0.406) / 0.225))
    ramp = torch.arange(224).repeat_interleave(3).view(1, 224, 3).expand(224, -1, -1)[None].to(torch.uint8)
    row = (to_pixels(ramp, "cropped", 224)[0, 1, 0, 112] * 0.5 + 0.5) * 255
    margin = 223 * (1 - 0.9**0.5) / 2  # the middle nine tenths of the area
    assert abs(row[0] - margin) <= 2 and abs(row[-1] - (223 - margin)) <= 2
    whole = (to_pixels(ramp, "whole", 224)[0, 1, 0, 112] * 0.5 + 0.5) * 255
    torch.testing.assert_close(whole, torch.arange(224.0), atol=1e-3, rtol=0)


def test_bytes_are_made_of_numbers_as_tensorflow_makes_them(monkeypatch):
    """It multiplies shares of 1 by 255.5 and cuts: 100.6 becomes 100, and 201.6 becomes 201."""
    monkeypatch.setattr(image_paths, "_through_jpeg", lambda image, size_px: image)
    ramp = torch.arange(224).repeat_interleave(3).view(1, 224, 3).expand(224, -1, -1)[None].to(torch.uint8)
    found = ((to_pixels(ramp, "cropped", 224)[0, 1, 0, 112] * 0.5 + 0.5) * 255).round()
    margin = 223 * (1 - 0.9**0.5) / 2
    exact = torch.linspace(margin, 223 - margin, 224)
    assert (found == (exact / 255 * 255.5).floor()).float().mean() > 0.98  # a rounding error decides where it is close
    assert (found == exact.round()).float().mean() < 0.8


def test_few_go_through_at_once_where_nothing_is_learned(folder):
    images, proprio = seen(5)
    whole, small = load(folder), load(folder, at_once=2)
    sizes: list[int] = []
    small.network.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    words = whole.read(["push the red block", "push", "lift it", "push", "push"])
    with torch.no_grad():
        torch.testing.assert_close(small(images, words, proprio), whole(images, words, proprio), atol=1e-5, rtol=1e-5)
    assert sizes == [2, 2, 1]
    small(images, words, proprio)
    assert sizes[3:] == [5]


def test_an_adapter_learns_goes_on_and_leaves_the_weights_alone(folder, tmp_path):
    policy = load(folder, lora_rank=2)
    learns = policy.trained_state()
    assert learns and all("lora_" in name for name in learns)
    assert not any("attn_pool.q" in name or "lm_head" in name for name in learns)
    before = {name: value.clone() for name, value in policy.named_parameters()}
    images, proprio = seen(2)
    words = policy.read(["push"] * 2)
    start = policy(images, words, proprio).detach()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        (-log_probs_of(policy(images, words, proprio), torch.zeros(2, TOKENS, dtype=torch.long), 1.0)).mean().backward()
        optimizer.step()
    moved = policy(images, words, proprio).detach()
    assert (moved - start).abs().max() > 1e-3
    changed = {name for name, value in policy.named_parameters() if not torch.equal(value, before[name])}
    assert changed and changed <= set(learns)
    other = load(folder, lora_rank=2)
    other.load_trained_state({name: value.numpy() for name, value in policy.trained_state().items()})
    torch.testing.assert_close(other(images, words, proprio), moved)
    save_adapter(policy.network, tmp_path / "adapter")
    torch.testing.assert_close(load(folder, adapter=str(tmp_path / "adapter"))(images, words, proprio), moved)
    with pytest.raises(ValueError, match="of another policy"):
        other.load_trained_state({"nothing": 1})


@pytest.mark.parametrize("proprio_size", [0, 3])
def test_an_exported_folder_has_the_trained_weights_and_all_files_of_the_first(proprio_size, tmp_path):
    first = write_openvla(tmp_path / "first", proprio_size=proprio_size)
    (first / "modeling_prismatic.py").touch()  # as published ones have it
    policy, (images, proprio) = load(first, lora_rank=2), seen(2)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if weight.requires_grad or PROJECTOR in name:
                weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        (tmp_path / "out").mkdir()
        policy.export(tmp_path / "out")
        other = load(tmp_path / "out")
        words = policy.read(["push"] * 2)
        torch.testing.assert_close(other(images, words, proprio), policy(images, words, proprio), atol=1e-4, rtol=1e-4)
        assert (load(first)(images, words, proprio) - policy(images, words, proprio)).abs().max() > 1e-2
    weights = {path.name for path in first.glob("model[.-]*")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.safetensors",
        *({path.name for path in first.iterdir()} - weights),
    }


def test_all_weights_learn_in_full_precision(folder):
    policy = load(folder, learns="all", recompute=True)
    images, proprio = seen(1)
    policy(images, policy.read(["push"]), proprio).sum().backward()
    idle = {name for name, value in policy.named_parameters() if value.grad is None}
    assert idle and all(re.search(r"blocks\.2\.|featurizer\.norm\.|attn_pool\.", name) for name in idle)
    assert {value.dtype for value in policy.parameters()} == {torch.float32}


def test_missing_extra_and_misshapen_weights_are_named(tmp_path):
    write_openvla(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = tmp_path / index["projector.fc2.bias"]
    whole = load_file(shard)
    for broken, words in (
        (
            {name: value for name, value in whole.items() if name != "projector.fc2.bias"},
            "lacks 1 weights: projector.fc2.bias",
        ),
        ({**whole, "projector.fc9.bias": torch.zeros(1)}, "has besides 1 weights: projector.fc9.bias"),
        ({**whole, "projector.fc2.bias": torch.zeros(3)}, "cannot be loaded"),
    ):
        save_file(broken, shard, metadata={"format": "pt"})
        with pytest.raises(ModelUnavailable, match=words):
            load(tmp_path)


def test_incompatible_settings_are_refused_with_their_fix(folder, tmp_path, caplog):
    cases: list[tuple[str, dict[str, object]]] = [
        ("have 7 dimensions, the env's 14", {"action_size": 14}), ("3 cameras, the env has 2", {"cameras": 3}),
        ("none is 'bridge'", {"unnorm_key": "bridge"}),
    ]  # fmt: skip
    for words, settings in cases:
        with pytest.raises(ModelUnavailable, match=words):
            load(folder, **settings)  # pyright: ignore[reportArgumentType]
    caplog.clear()
    assert load(folder, unnorm_key="libero_10").scale.high[0] == 0.8
    assert not caplog.records
    load(folder)
    assert "scales actions as data set libero_10_no_noops, the only one" in caplog.text
    with_head = write_openvla(tmp_path / "head", proprio_size=3)
    with pytest.raises(ModelUnavailable, match="takes 3 numbers of proprioception, the env gives 8"):
        load(with_head, proprio_size=8)
    (with_head / "action_head--150000_checkpoint.pt").touch()
    with pytest.raises(ModelUnavailable, match="regression head"):
        load(with_head)
    other = write_openvla(tmp_path / "other")
    (other / "dataset_statistics.json").write_text(json.dumps({"one": STATISTICS, "two": STATISTICS}))
    with pytest.raises(ModelUnavailable, match="one, two; one must be named"):
        load(other)
    for settings in (
        {"timm_model_ids": ["resnet18", "vit"], "vision_towers": None},
        {"model_type": "llama"},
        {"image_sizes": [28, 42]},
    ):
        (other / "config.json").write_text(json.dumps({**SMALL, **settings}))
        with pytest.raises(ModelUnavailable, match="no OpenVLA"):
            load(other)


def test_a_projector_file_that_would_run_code_is_not_let_in(tmp_path):
    write_openvla(tmp_path, proprio_size=3)
    ran = tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (ran,)  # pyright: ignore[reportReturnType]

    torch.save({"fc1.weight": Attack()}, tmp_path / "proprio_projector--150000_checkpoint.pt")
    with pytest.raises(ModelUnavailable, match="holds no proprioception projector"):
        load(tmp_path)
    assert not ran.exists()


def test_settings_without_effect_are_errors():
    with pytest.raises(ValueError, match="policy.openvla has no effect with policy.head flow"):
        VLAConfig(model="somewhere", head="flow", openvla=OpenVLAConfig(cameras=2))
    with pytest.raises(ValueError, match="without policy.model"):
        VLAConfig(openvla=OpenVLAConfig(cameras=2))
    with pytest.raises(ValueError, match="adapter has no effect"):
        OpenVLAConfig(learns="all", adapter="somewhere")
    with pytest.raises(ValueError, match="too coarse"):
        replace(OpenVLAConfig(learns="all"), dtype="bfloat16")


def test_gradient_checkpointing_changes_no_gradient(tmp_path):
    folder = write_openvla(tmp_path)
    images, proprio = seen(2)
    found, kept = [], []
    for recompute in (False, True):
        policy = load(folder, learns="all", recompute=recompute)
        words = policy.read(["push", "red block onto"])
        policy(images, words, proprio).square().mean().backward()
        found.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
        kept.append(
            saved_bytes(lambda p=policy, w=words: p.network.vision_backbone(torch.rand(2, 2, 2, 3, 28, 28)), policy)
        )
    assert found[0].keys() == found[1].keys() and kept[1] < 0.6 * kept[0], kept
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-5)
