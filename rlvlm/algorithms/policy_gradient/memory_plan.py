"""GPU memory of a learner, by the shapes of a model alone: no weight is loaded. `runs.preflight` asks.

With P parameters that learn, F that are frozen, N learners that share them out (1 where each holds all), H and I a
layer's widths, L layers and T tokens at once:

    weights    (w P + f F) / N        w 4 in float32; f 2 beside an adapter, 4 in float32, 0.52 of layers in NF4
    gradients  4 P / N
    Adam       8 P / N
    copies     4 P / N                each of: before an update that may be taken back; the start and the weights it
                                      changes places with, where divergence from it is charged for
    passing    what is gathered of a sharded policy at once, its embeddings and two blocks, and its gradient; of whole
               learners that are several, the vector in which gradients are summed, twice
    activations  T a (L H + 4 I + 8.3 H) with gradient checkpointing, T a L (4 I + 8.3 H) without; a 4 or 2
               and three slices of log-probs

While it loads, a learner takes no more: of what is shared out it reads its own slices alone.

The bytes of a block, 4 I + 8.3 H numbers a token, are those that `benchmarks/update_memory.py` counts at the widths of
Qwen2.5-VL-3B and 7B, within 1 %. What the allocator loses and CUDA takes for itself is `MARGIN`.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.lerobot.loading import outline
from rlvlm.policies.vla.openvla.network import CheckpointConfig, OpenVLANetwork
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.policy import is_vision
from rlvlm.vlms.blocks import LARGE, blocks_of
from rlvlm.vlms.loading import takes_nf4
from rlvlm.vlms.lora import LoraConfig, add_adapter

MARGIN = 0.1
"""Share of a card that a plan leaves free."""
_NF4_BYTES = 0.52
"""A weight of 4 bits, with its part of doubly quantised constants."""
_SLICES_BYTES = 3 * 2**27
"""Logits of a slice of tokens, their log-softmax and its gradient."""
_LEARNERS = (2, 4, 8, 16)
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Parameters of a model by whether they learn, and sizes of its activations."""

    learned: int
    """Weights that learn."""
    frozen: int
    """Weights that do not."""
    frozen_nf4: int
    """Frozen weights that NF4 holds in 4 bits."""
    block: int
    """Weights of the largest block."""
    outside: int
    """Weights outside of all blocks: embeddings and the output head."""
    layers: int
    """Layers of the language model."""
    width: int
    """H of a layer."""
    inner_width: int
    """I of a layer."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.learned + self.frozen


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes on the GPU of one learner."""

    weights: float
    gradients: float
    adam: float
    copies: float
    passing: float
    activations: float

    @property
    def total(self) -> float:
        """The most at one time."""
        return sum(asdict(self).values())


def size_of(policy: PolicyConfig | VLAConfig, folder: Path) -> ModelSize:
    """The size of the model in `folder`, with what `policy` has learn of it; reads its `config.json` alone."""
    with torch.device("meta"):  # shapes without memory: the model's weights are never read
        return measured(*_NETWORKS[type(policy)](policy, folder))


def _vla_network(policy: VLAConfig, folder: Path) -> tuple[nn.Module, Any]:
    if policy.head == "flow":
        flow = outline(folder, policy.lerobot)
        return flow, flow.config.body
    settings, wants = CheckpointConfig.from_pretrained(folder), policy.openvla
    assert isinstance(settings, CheckpointConfig)
    shape = LoraConfig(rank=wants.lora_rank, alpha=wants.lora_alpha, targets=wants.lora_targets)
    network = OpenVLANetwork(settings)
    return add_adapter(network, shape) if policy.has_adapter else network, settings.text_config


def _vlm_network(policy: PolicyConfig, folder: Path) -> tuple[nn.Module, Any]:
    from transformers import AutoConfig, AutoModelForImageTextToText

    settings = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    shape = LoraConfig(rank=policy.lora_rank, alpha=policy.lora_alpha, targets=policy.lora_targets)
    network = AutoModelForImageTextToText.from_config(settings)
    network = add_adapter(network, shape) if policy.has_adapter else network
    for name, parameter in network.named_parameters():
        if not policy.train_vision and is_vision(name):
            parameter.requires_grad_(False)
    return network, settings.get_text_config()


_NETWORKS: Mapping[type, Callable[[Any, Path], tuple[nn.Module, Any]]] = {
    VLAConfig: _vla_network,
    PolicyConfig: _vlm_network,
}
"""By policy config: builds the network, and the config of its language model."""


def measured(network: nn.Module, text: Any) -> ModelSize:
    """The size of `network`, whose language model has the config `text`."""
    counts = {True: 0, False: 0}
    for parameter in network.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    blocks = [[*block.parameters()] for block in blocks_of(network)]
    inside = [sum(weight.numel() for weight in block) for block in blocks]
    return ModelSize(
        learned=counts[True],
        frozen=counts[False],
        frozen_nf4=sum(
            module.weight.numel()
            for block in blocks_of(network)
            for module in block.modules()
            if takes_nf4(module) and not module.weight.requires_grad
        ),
        block=max(inside, default=0),
        outside=counts[True] + counts[False] - sum(inside),
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        inner_width=text.intermediate_size,
    )


def plan(size: ModelSize, policy: PolicyConfig | VLAConfig, algo: PolicyGradientConfig, *, on_gpu: bool) -> MemoryPlan:
    """Maximum memory of one learner.

    Activations count where `algo.microbatch_tokens` bounds the tokens at once; else they are left out, and the plan is
    a lower bound.

    Args:
        size: of the policy's model.
        policy: how it is loaded.
        algo: how it learns.
        on_gpu: whether weights beside an adapter or an action expert are bfloat16 where nothing else is said.
    """
    wants = policy.loading
    # bytes of a number: adapters and the action experts of LeRobot are always float32, and what they stand beside is
    # bfloat16 where a GPU computes
    is_partial = policy.has_adapter or wants.learns == "expert"
    is_coarse = wants.dtype == "bfloat16" or (wants.dtype == "auto" and is_partial and on_gpu)
    base = 2 if is_coarse else 4
    learned_bytes = 4 if is_partial else base
    spread = algo.num_learners if algo.shard else 1
    in_common = learned_bytes * size.learned + base * size.frozen
    if getattr(policy, "quantization", "none") == "nf4":
        in_common -= (base - _NF4_BYTES) * size.frozen_nf4
    own = size.learned / spread
    # the weights before an update that may be taken back; only updates with the policy's own critic are
    copies = 4 * own * (algo.shrinkage and algo.advantage.values == "policy")
    if algo.loss.kl_weight:
        copies += 4 * own * (2 if algo.shard else 1)  # the start lies in main memory where it is no slice
    compute = 2 if algo.compute_dtype == "bfloat16" or is_coarse else 4
    passing = 0.0
    if algo.shard:
        learns = size.learned / max(1, size.learned + size.frozen)
        passing = compute * (size.outside + 2 * size.block) + (compute + 4) * learns * (size.outside + size.block)
    elif algo.num_learners > 1:
        passing = 8 * own
    # with checkpointing each layer's input and one block's activations are kept, without it those of all blocks
    recomputes = size.total >= LARGE if wants.recompute is None else wants.recompute
    block = 4 * size.inner_width + 8.3 * size.width
    kept = size.layers * size.width + block if recomputes else size.layers * block
    activations = algo.microbatch_tokens * compute * kept + (_SLICES_BYTES if recomputes else 0)
    return MemoryPlan(
        weights=in_common / spread,
        gradients=4 * own,
        adam=8 * own,
        copies=copies,
        passing=passing,
        activations=activations,
    )


def fix_of(
    size: ModelSize, policy: PolicyConfig | VLAConfig, algo: PolicyGradientConfig, card_bytes: float
) -> str | None:
    """The setting to change so that a learner fits a card of `card_bytes`; None where it fits as it is."""

    def fits(policy: PolicyConfig | VLAConfig, algo: PolicyGradientConfig) -> bool:
        return plan(size, policy, algo, on_gpu=True).total <= (1 - MARGIN) * card_bytes

    if fits(policy, algo):
        return None
    # the cheapest change first: smaller micro-batches take longer and change nothing else
    fewer = algo.microbatch_tokens // 2
    while fewer >= 512:
        if fits(policy, replace(algo, microbatch_tokens=fewer)):
            return f"--algo.microbatch-tokens {fewer}"
        fewer //= 2
    otherwise = "a smaller --policy.model, or a larger card"
    if getattr(policy, "quantization", "") == "nf4":  # which is not shared out
        return otherwise
    # then more GPUs, of which each holds a share
    for count in _LEARNERS:
        if count > algo.num_learners * algo.shard and count <= algo.minibatch_turns:
            wider = replace(algo, num_learners=count, shard=True, gpus_per_learner=1.0)
            if fits(policy, wider):
                return f"--algo.shard --algo.num-learners {count} --algo.gpus-per-learner 1"
    return f"{policy.smaller}, {otherwise}" if policy.smaller else otherwise


def words_of(plan: MemoryPlan) -> str:
    """The plan in one line, GiB."""
    named = {name: value / _GIB for name, value in asdict(plan).items()}
    parts = ", ".join(f"{name} {value:.1f}" for name, value in named.items() if value >= 0.05)
    return f"{plan.total / _GIB:.1f} GiB ({parts})"
