"""What a learner takes of its GPU: by hand, against models in memory, and what is said where it does not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory_plan import write_config
from benchmarks.update_memory import WIDTHS, bytes_per_token_and_layer
from rlvlm.algorithms.policy_gradient.config import LossConfig, PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.memory_plan import ModelSize, fix_of, plan, size_of, words_of
from rlvlm.core.errors import MachineError
from rlvlm.policies.vla.config import OpenVLAConfig, VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.runs import preflight
from rlvlm.runs.recipes import recipe
from rlvlm.runs.settings import override
from rlvlm.vlms import devices
from tests.policies.vla.openvla.test_openvla import load as load_openvla
from tests.tiny_openvla import write_openvla
from tests.tiny_vlm import save_tiny_vlm

SIZE = ModelSize(
    learned=1_000, frozen=0, frozen_nf4=0, block=200, outside=400, layers=3, width=10, inner_width=20
)  # fmt: skip
FULL = PolicyConfig(model="x/y", learns="all", recompute=False)


def test_a_small_model_by_hand() -> None:
    one = plan(SIZE, FULL, PolicyGradientConfig(shrinkage=False), on_gpu=True)
    assert (one.weights, one.gradients, one.adam, one.copies, one.passing) == (4_000, 4_000, 8_000, 0, 0)
    assert one.activations == 0 and one.total == 16_000
    several = plan(
        SIZE,
        FULL,
        PolicyGradientConfig(num_learners=4, shard=True, compute_dtype="bfloat16", loss=LossConfig(kl_weight=0.1)),
        on_gpu=True,
    )
    assert (several.weights, several.gradients, several.adam) == (1_000, 1_000, 2_000)
    assert several.copies == 1_000 + 2_000 and several.passing == 2 * 800 + 6 * 600
    tokens = plan(SIZE, FULL, PolicyGradientConfig(microbatch_tokens=7), on_gpu=True)
    assert tokens.activations == 7 * 4 * 3 * (80 + 83)


@pytest.mark.parametrize("learns", ["all", "lora"])
def test_weights_are_those_of_models_in_memory(tmp_path: Path, learns: Any) -> None:
    algo = PolicyGradientConfig(shrinkage=False)
    save_tiny_vlm(tmp_path / "vlm", "qwen2_5_vl")
    config = PolicyConfig(model=str(tmp_path / "vlm"), learns=learns, device="cpu")
    vlm = load_policy(config).model
    write_openvla(tmp_path / "vla")
    vla = load_openvla(tmp_path / "vla", learns=learns, lora_rank=2).network
    others = VLAConfig(model="x/y", openvla=OpenVLAConfig(learns=learns, lora_rank=2))
    for network, policy, folder in ((vlm, config, "vlm"), (vla, others, "vla")):
        found = plan(size_of(policy, tmp_path / folder), policy, algo, on_gpu=False)
        assert found.weights == sum(parameter.nbytes for parameter in network.parameters())
        assert found.gradients == sum(parameter.nbytes for parameter in network.parameters() if parameter.requires_grad)


@pytest.mark.slow
def test_a_block_keeps_what_the_rule_says() -> None:
    width = WIDTHS["qwen2.5-vl-3b"]
    rule = 4 * (4 * width["intermediate_size"] + 8.3 * width["hidden_size"])
    assert bytes_per_token_and_layer("qwen2.5-vl-3b", recompute=False, tokens=64) == pytest.approx(rule, rel=0.02)


@pytest.mark.slow
def test_what_does_not_fit_is_told_what_to_change(tmp_path: Path) -> None:
    folder = write_config("qwen2.5-vl-7b", tmp_path / "7b")
    policy = PolicyConfig(model=str(folder), learns="all")
    size = size_of(policy, folder)
    assert size.total == pytest.approx(8.29e9, rel=0.01) and size.layers == 28
    card, algo = 80 * 2**30, PolicyGradientConfig(compute_dtype="same")
    assert fix_of(size, policy, algo, card) == "--algo.shard --algo.num-learners 4 --algo.gpus-per-learner 1"
    four = replace(algo, num_learners=4, shard=True)
    assert fix_of(size, policy, four, card) is None
    assert fix_of(size, policy, replace(four, microbatch_tokens=65_536), card) == "--algo.microbatch-tokens 16384"
    assert "--policy.learns lora" in (fix_of(size, policy, algo, 16 * 2**30) or "")
    lora = replace(policy, learns="lora")
    assert fix_of(size_of(lora, folder), lora, algo, 24 * 2**30) is None


def test_a_run_that_cannot_fit_its_card_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_vlm(tmp_path, "qwen2_5_vl")
    config = override(recipe("number_line"), {"policy.model": str(tmp_path), "policy.learns": "all"})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight, "gpu_names", lambda: ["a card"])
    # a workstation, where nothing says which process has the card
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for card, is_enough in ((2**30, True), (2**21, False)):
        monkeypatch.setattr(devices, "card_bytes", lambda card=card: card)
        if is_enough:
            preflight._check_memory(config)
        else:
            with pytest.raises(MachineError, match="a learner of .* takes .* GiB") as caught:
                preflight._check_memory(config)
            assert caught.value.fix.startswith("--policy.learns lora")
    assert not caplog.records, "nothing is said of a GPU that is the run's to take"
    preflight._check_memory(override(config, {"policy.device": "cpu"}))
    assert words_of(plan(SIZE, FULL, PolicyGradientConfig(), on_gpu=True)).startswith("0.0 GiB")
