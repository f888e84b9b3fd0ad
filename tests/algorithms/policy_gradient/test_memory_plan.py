"""What a learner takes of its GPU: by hand, against models in memory, and what is said where it does not fit."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.memory_plan import write_config
from benchmarks.update_memory import WIDTHS, bytes_per_token_and_layer, saved_bytes
from rlvlm.algorithms.policy_gradient.config import LossConfig, PolicyGradientConfig
from rlvlm.core.errors import MachineError
from rlvlm.policies.vlm.activations import Activations
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.runs.start import preflight
from rlvlm.runs.start.memory_plan import MARGIN, ModelSize, Workload, fix_of, plan, size_of, words_of
from rlvlm.runs.start.networks import workload_of
from rlvlm.vlms import devices
from tests.tiny_vlm import save_tiny_vlm

TAKEN = Activations(update=70, kept=50, logits=9, slice_tokens=4, cast=13, prefill=11, cache=6, drawing=100)
SIZE = ModelSize(
    learned=1_000, frozen=0, frozen_nf4=0, block=200, outside=400, largest=100, activations=lambda *_: TAKEN
)  # fmt: skip
FULL = PolicyConfig(model="x/y", learns="all", recompute=False)


def test_a_small_model_by_hand():
    one = plan(SIZE, FULL, PolicyGradientConfig(shrinkage=False), on_gpu=False)
    assert (one.weights, one.gradients, one.adam, one.copies, one.passing) == (4_000, 4_000, 8_000, 0, 0)
    # Adam's root and quotient of the largest parameter; how many tokens there are is not known
    assert (one.update, one.start, one.sampling) == (800, 0, 0)
    assert one.total == 16_800 + FULL.cache_mib * 2**20
    several = plan(
        SIZE,
        FULL,
        PolicyGradientConfig(num_learners=4, shard=True, compute_dtype="bfloat16", loss=LossConfig(kl_weight=0.1)),
        on_gpu=True,
    )
    assert (several.weights, several.gradients, several.adam) == (1_000, 1_000, 2_000)
    assert several.copies == 1_000 + 2_000 and several.passing == 2 * 800 + 6 * 600
    by_tokens = plan(SIZE, FULL, PolicyGradientConfig(microbatch_tokens=700), on_gpu=True)
    assert by_tokens.update == 700 * 70


def test_temporary_memory_by_hand():
    algo = PolicyGradientConfig(num_envs=4, minibatch_turns=8, microbatch_turns=2, max_reply_tokens=10)
    work = Workload(prompt_tokens=30, sft_rows=5, is_sampled=True)
    found = plan(SIZE, FULL, algo, on_gpu=True, workload=work)
    assert found.update == 2 * 40 * 70 and found.start == 5 * 40 * 70
    # copies of an adapter, keys and values of four rows, and reading the prompts, which takes more than a draw
    assert found.sampling == 13 + 4 * 40 * 6 + 4 * 30 * 5
    assert found.reserve == pytest.approx(0.1 * found.start)
    evaluated = plan(SIZE, FULL, algo, on_gpu=True, workload=replace(work, eval_envs=12))
    assert evaluated.sampling == 13 + 12 * 40 * 6 + 12 * 30 * 5
    held = found.context + found.weights + found.adam + found.images + found.reserve
    assert found.total == pytest.approx(held + found.gradients + found.copies + found.start)
    # with a long prompt sampling takes more than learning, and Adam's averages make room for it
    many = replace(algo, num_envs=512)
    both = [plan(SIZE, FULL, replace(many, offload=away), on_gpu=True, workload=work) for away in (False, True)]
    assert both[0].total - both[1].total == pytest.approx(found.adam)
    bounded = plan(SIZE, FULL, replace(algo, microbatch_tokens=100), on_gpu=True, workload=work)
    assert bounded.start == bounded.update == 100 * 70
    # where little is computed in a block, log-probs of a slice count beside what is kept
    little = replace(SIZE, activations=lambda *_: replace(TAKEN, update=50, logits=900))
    assert plan(little, FULL, algo, on_gpu=True, workload=work).update == 2 * 40 * 50 + 900 * 4


@pytest.mark.parametrize("learns", ["all", "lora"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_dry_count_is_the_memory_of_a_real_pass(tmp_path, learns, recomputes):
    save_tiny_vlm(tmp_path, "qwen2_5_vl")
    policy = PolicyConfig(model=str(tmp_path), learns=learns, device="cpu", recompute=recomputes)
    counted = size_of(policy, tmp_path).activations("float32", "float32")
    model = load_policy(policy).model
    base = model.get_base_model() if learns == "lora" else model
    width = base.config.get_text_config().hidden_size

    def read() -> Tensor:
        inputs = torch.randn(8, 512, width, requires_grad=True)
        return base.model.language_model(inputs_embeds=inputs, use_cache=False).last_hidden_state

    kept = saved_bytes(read, model)
    # live memory has what somebody else holds, too: the inputs are not of it, the result is
    assert counted.kept * 8 * 512 == pytest.approx(kept, rel=0.1)
    assert counted.update >= counted.kept > 0 and counted.prefill > counted.cache > 0
    cache: Any = DynamicCache(config=base.config.get_text_config())
    base.model.language_model(inputs_embeds=torch.randn(1, 8, width), past_key_values=cache, use_cache=True)
    assert counted.cache * 8 == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.parametrize("learns", ["all", "lora"])
def test_weights_are_those_of_models_in_memory(tmp_path, learns):
    save_tiny_vlm(tmp_path / "vlm", "qwen2_5_vl")
    config = PolicyConfig(model=str(tmp_path / "vlm"), learns=learns, device="cpu")
    assert_planned(load_policy(config).model, config, tmp_path / "vlm")


def assert_planned(network: torch.nn.Module, policy: Any, folder: Path) -> None:
    """The plan of a learner of `policy` has the weights and gradients of the `network` in memory."""
    found = plan(size_of(policy, folder), policy, PolicyGradientConfig(shrinkage=False), on_gpu=False)
    assert found.weights == sum(parameter.nbytes for parameter in network.parameters())
    assert found.gradients == sum(parameter.nbytes for parameter in network.parameters() if parameter.requires_grad)


@pytest.mark.slow
def test_a_block_keeps_the_tensors_of_the_rule():
    width = WIDTHS["qwen2.5-vl-3b"]
    rule = 4 * (4 * width["intermediate_size"] + 8.3 * width["hidden_size"])
    assert bytes_per_token_and_layer("qwen2.5-vl-3b", recompute=False, tokens=64) == pytest.approx(rule, rel=0.02)


@pytest.mark.slow
def test_a_plan_that_does_not_fit_names_the_settings_to_change(tmp_path):
    folder = write_config("qwen2.5-vl-7b", tmp_path / "7b")
    policy = PolicyConfig(model=str(folder), learns="all")
    size = size_of(policy, folder)
    assert size.total == pytest.approx(8.29e9, rel=0.01)
    card, algo = 80 * 2**30, PolicyGradientConfig(compute_dtype="same")
    assert fix_of(size, policy, algo, card) == "--algo.shard --algo.num-learners 4 --algo.gpus-per-learner 1"
    four = replace(algo, num_learners=4, shard=True)
    assert fix_of(size, policy, four, card) is None
    assert fix_of(size, policy, replace(four, microbatch_tokens=65_536), card) == "--algo.microbatch-tokens 16384"
    assert "--policy.learns lora" in (fix_of(size, policy, algo, 16 * 2**30) or "")
    lora = replace(policy, learns="lora")
    assert fix_of(size_of(lora, folder), lora, algo, 24 * 2**30) is None


def test_a_run_that_cannot_fit_its_card_is_refused_before_it_starts(tmp_path, monkeypatch, caplog):
    save_tiny_vlm(tmp_path, "qwen2_5_vl")
    config = override(recipe("number_line"), {"policy.model": str(tmp_path), "policy.learns": "all"})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight, "gpu_names", lambda: ["a card"])
    # a workstation, where nothing says which process has the card
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for card, is_enough in ((2**32, True), (2**21, False)):
        monkeypatch.setattr(devices, "gpu_memory", lambda card=card: card)
        if is_enough:
            preflight._check_memory(config)
        else:
            with pytest.raises(MachineError, match="a learner of .* takes .* GiB .*, start 0") as caught:
                preflight._check_memory(config)
            assert caught.value.fix.startswith("--policy.learns lora")
    assert not caplog.records, "nothing is said of a GPU that is the run's to take"
    preflight._check_memory(override(config, {"policy.device": "cpu"}))
    # learners that have the card do the supervised start on it, whose bound is that of updates
    learners = override(config, {"algo.num_learners": 1, "algo.gpus_per_learner": 1.0, "sft.batch_size": 512})
    bounded = override(learners, {"algo.microbatch_tokens": 1024})
    size = size_of(config.large_policy, tmp_path)
    whole, parts = (
        plan(size, run.large_policy, run.algo, on_gpu=True, workload=workload_of(run)) for run in (learners, bounded)
    )
    assert whole.start > 2 * parts.start > 0 and whole.start > whole.update
    monkeypatch.setattr(devices, "gpu_memory", lambda: (whole.total + parts.total) / 2 / (1 - MARGIN))
    with pytest.raises(MachineError, match="a learner of .* takes .* GiB"):
        preflight.check_before_run(learners)
    preflight._check_memory(bounded)
    assert words_of(plan(SIZE, FULL, PolicyGradientConfig(), on_gpu=True)) == "1.7 GiB (context 0.7, images 1.0)"


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ("--engine.num-replicas 2 --engine.num-gpus 0.1", "the policy's replicas takes 0.7 GiB .* 0.1 is", "gpus 0.25"),
        ("--engine.num-replicas 1 --engine.num-gpus 0.25", "", ""),
        ("--reward.source judged --judge.model MODEL --judge.backend transformers --serve.num-gpus 0.0001",
         "the judge .* takes 0.0 GiB at least, and --serve.num-gpus 0.0001 is 0.0 GiB of the smallest", "0.05"),
    ],
)  # fmt: skip
def test_a_share_of_a_gpu_that_is_too_small_is_refused_before_anything_is_loaded(
    words, what, fix, tmp_path, monkeypatch
):
    save_tiny_vlm(tmp_path, "qwen2_5_vl")
    words = f"number_line --policy.model {tmp_path} --policy.learns all {words.replace('MODEL', str(tmp_path))}"
    config = parse_run(words.split(), "run").config
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight, "gpu_names", lambda: ["a card"])
    # unlike GPUs: the smallest decides, whichever a process is given
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    sizes = 40 * 2**30, int(3.5 * 2**30)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=sizes[int(number)])
    )
    if not what:
        return preflight._check_memory(config)
    with pytest.raises(MachineError, match=what) as caught:
        preflight._check_memory(config)
    assert caught.value.fix.endswith(fix)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card, alone")
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_the_plan_is_what_the_driver_says_of_the_process(tmp_path, quantization):
    out = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.real_sizes",
        "policy",
        "--quantization",
        quantization,
        "--updates",
        "2",
    ]
    subprocess.run([*command, "--folder", str(tmp_path), "--out", str(out)], check=True, timeout=500)
    found = json.loads(out.read_text())
    # of the cache of images only what was shown is taken
    planned = found["planned_gib"] - found["planned"]["images"] + found["images_gib"]
    assert 0.8 * planned <= found["process_gib"] <= planned, found
