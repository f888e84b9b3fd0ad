"""GPU memory of a learner's process, by the shapes of a model alone: no weight is loaded. `runs.preflight` asks.

What it holds all the time, with P parameters that learn, F that are frozen, N learners that share them out (1 where
each holds all):

    context    of CUDA and its libraries, outside of torch
    weights    (w P + f F) / N        w 4 in float32; f 2 beside an adapter, 4 in float32, 0.52 of layers in NF4
    Adam       8 P / N                only in updates with `algo.offload`, and so is the start
    images     the cache of encoded images, full

While it learns:

    gradients  4 P / N
    copies     4 P / N                each of: before an update that may be taken back; the start and the weights it
                                      changes places with, where divergence from it is charged for
    passing    what is gathered of a sharded policy at once, its embeddings and two blocks, and its gradient; of whole
               learners that are several, the vector in which gradients are summed, twice

What comes and goes, by turns, so that only the most at one time counts:

    start      a step of the supervised start
    sampling   keys and values of all rows, beside what reading the prompts takes; in evaluations too
    update     a step of an update: activations and log-probs, or Adam's own of the largest parameter

and `reserve`, what the allocator holds beside that. While it loads, a learner takes no more: of what is shared out it
reads its own slices alone.

Activations of a chat VLM are counted (`policies.vlm.activations`). Of a VLA, with I and H a layer's widths, L layers,
they are a (L H + 4 I + 8.3 H) for each token with gradient checkpointing and a L (4 I + 8.3 H) without, a 4 or 2: the
numbers of a block that `benchmarks/update_memory.py` counts at the widths of Qwen2.5-VL-3B and 7B, within 1 %.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.lerobot.loading import outline
from rlvlm.policies.vla.openvla.network import CheckpointConfig, OpenVLANetwork
from rlvlm.policies.vlm.activations import Activations, activations_of
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.policy import is_vision
from rlvlm.vlms.blocks import LARGE, blocks_of, recompute_blocks
from rlvlm.vlms.loading import takes_nf4
from rlvlm.vlms.lora import LoraConfig, add_adapter

MARGIN = 0.05
"""Share of a GPU that a plan leaves free."""
_CONTEXT = 0.7 * 2**30
"""Bytes of CUDA's context and libraries that a process holds beside what torch has reserved."""
_RESERVE = 0.1
"""Allowance for what lies unused between tensors of unlike sizes, of what comes and goes. With segments that grow
(`vlms.devices.use_expandable_segments`) no more than pages of 2 MiB is lost to one; without them it was 25 to 35 %."""
_NF4_BYTES = 0.52
"""A weight of 4 bits, with its part of doubly quantised constants."""
_SLICES_BYTES = 3 * 2**27
"""Logits of a slice of a VLA's tokens, their log-softmax and its gradient."""
_MIN_CACHE_MIB = 128
"""Room for encoded images that is advised where memory is short."""
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
    largest: int
    """Weights of the largest parameter that learns."""
    activations: Callable[[str, str], Activations]
    """By the type of what the model computes in, `float32` or `bfloat16`, and of an adapter beside it."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.learned + self.frozen


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What goes through the policy of a learner's process beside updates."""

    prompt_tokens: int = 0
    """Of one prompt with its image; 0 where that is not known: then rows count by `algo.microbatch_tokens` alone, and
    sampling is left out."""
    sft_rows: int = 0
    """Answers of a step of the supervised start; 0 without one."""
    is_sampled: bool = False
    """Whether this process samples and evaluates, too."""
    eval_envs: int = 0
    """Envs that evaluations play at once; 0: as many as rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes on the GPU of one learner's process, by what they are for; see the module."""

    context: float
    weights: float
    gradients: float
    adam: float
    copies: float
    passing: float
    images: float
    start: float
    sampling: float
    update: float
    reserve: float
    is_offloaded: bool = False
    """Whether `adam` is on the GPU only while it learns."""

    @property
    def total(self) -> float:
        """The most at one time: the start, sampling and updates take turns."""
        learning = self.gradients + self.copies + self.passing + max(self.start, self.update)
        held = self.context + self.weights + self.images + self.reserve
        if self.is_offloaded:
            return held + max(learning + self.adam, self.sampling)
        return held + self.adam + max(learning, self.sampling)


def size_of(policy: PolicyConfig | VLAConfig, folder: Path) -> ModelSize:
    """The size of the model in `folder`, with what `policy` has learn of it; reads its `config.json` alone."""
    with torch.device("meta"):  # shapes without memory: the model's weights are never read
        network, text = _NETWORKS[type(policy)](policy, folder)
        size = measured(network, text)
    recomputes = policy.loading.recompute
    recomputes = size.total >= LARGE if recomputes is None else recomputes
    rule = size.activations if recomputes else _rule(text, recomputes=False)
    return replace(size, activations=_counted(network, recomputes) if isinstance(policy, PolicyConfig) else rule)


def _rule(text: Any, *, recomputes: bool) -> Callable[[str, str], Activations]:
    """Activations of a network whose language model has the config `text`, see the module."""
    block = 4 * text.intermediate_size + 8.3 * text.hidden_size
    # with checkpointing each layer's input and one block's activations are kept, without it those of all blocks
    inputs = text.num_hidden_layers * text.hidden_size
    kept, most = (inputs, inputs + block) if recomputes else 2 * (text.num_hidden_layers * block,)

    def activations(dtype: str, _: str) -> Activations:
        size = 2 if dtype == "bfloat16" else 4
        return Activations(update=size * most, kept=size * kept)

    return activations


def _counted(network: nn.Module, recomputes: bool) -> Callable[[str, str], Activations]:
    """Activations of a chat VLM on the meta device, counted once for each precision."""
    recompute_blocks(network, recomputes)

    @cache
    def activations(dtype: str, adapter_dtype: str) -> Activations:
        for name, parameter in network.named_parameters():
            wanted = adapter_dtype if "lora_" in name else dtype
            parameter.grad, parameter.data = None, parameter.data.to(getattr(torch, wanted))
        return activations_of(network, recomputes=recomputes)

    return activations


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
        largest=max((param.numel() for param in network.parameters() if param.requires_grad), default=0),
        activations=_rule(text, recomputes=True),
    )


def plan(
    size: ModelSize,
    policy: PolicyConfig | VLAConfig,
    algo: PolicyGradientConfig,
    *,
    on_gpu: bool,
    workload: Workload = Workload(),
) -> MemoryPlan:
    """Maximum memory of one learner's process.

    What comes and goes counts where the number of tokens at once is known, by `algo.microbatch_tokens` or by
    `workload`; else it is left out, and the plan is a lower bound.

    Args:
        size: of the policy's model.
        policy: how it is loaded.
        algo: how it learns.
        on_gpu: whether weights beside an adapter or an action expert are bfloat16 where nothing else is said.
        workload: what else it is used for.
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
    casts = algo.compute_dtype == "bfloat16"  # and the adapter, too
    compute = 2 if casts or is_coarse else 4
    passing = 0.0
    if algo.shard:
        learns = size.learned / max(1, size.learned + size.frozen)
        passing = compute * (size.outside + 2 * size.block) + (compute + 4) * learns * (size.outside + size.block)
    elif algo.num_learners > 1:
        passing = 8 * own
    taken = size.activations("bfloat16" if compute == 2 else "float32", "bfloat16" if casts else "float32")
    recomputes = size.total >= LARGE if wants.recompute is None else wants.recompute
    longest = workload.prompt_tokens + algo.max_reply_tokens if workload.prompt_tokens else 0

    def learning(rows: int) -> float:
        """Bytes of a step of so many rows that go through the policy at once, or of fewer by `microbatch_tokens`."""
        tokens = min(filter(None, (algo.microbatch_tokens, rows * longest)), default=0)
        replies = tokens * (algo.max_reply_tokens / longest if longest else 1.0)
        logits = taken.logits * min(replies, taken.slice_tokens or replies)
        if tokens and recomputes and not taken.logits:
            logits = _SLICES_BYTES
        return max(taken.update * tokens, taken.kept * tokens + logits)

    rows = min(algo.minibatch_turns, algo.microbatch_turns or algo.minibatch_turns)
    # Adam's root and quotient of one parameter at a time
    update = max(learning(algo.minibatch_turns if algo.microbatch_tokens else rows), 8 * size.largest / spread)
    sampling = 0.0
    if workload.is_sampled and longest:
        envs = max(algo.num_envs, workload.eval_envs)
        drawing = taken.drawing * envs
        reading = (taken.prefill - taken.cache) * envs * workload.prompt_tokens
        sampling = taken.cast + taken.cache * envs * longest + max(reading, drawing)
    start = learning(workload.sft_rows) if workload.sft_rows else 0.0
    images = getattr(policy, "cache_mib", 0) * 2**20
    return MemoryPlan(
        context=_CONTEXT * on_gpu,
        weights=in_common / spread,
        gradients=4 * own,
        adam=8 * own,
        copies=copies,
        passing=passing,
        images=images,
        start=start,
        sampling=sampling,
        update=update,
        reserve=_RESERVE * max(start, sampling, update) * on_gpu,
        is_offloaded=algo.offload,
    )


def fix_of(
    size: ModelSize,
    policy: PolicyConfig | VLAConfig,
    algo: PolicyGradientConfig,
    gpu_memory: float,
    workload: Workload = Workload(),
) -> str | None:
    """The setting to change so that a learner fits a GPU of `gpu_memory`; None where it fits as it is."""

    def fits(policy: PolicyConfig | VLAConfig, algo: PolicyGradientConfig, eval_envs: int = workload.eval_envs) -> bool:
        # learners elsewhere do not sample
        work = replace(workload, is_sampled=workload.is_sampled and not algo.num_learners, eval_envs=eval_envs)
        return plan(size, policy, algo, on_gpu=True, workload=work).total <= (1 - MARGIN) * gpu_memory

    if fits(policy, algo):
        return None
    if fits(policy, algo, eval_envs=0):
        return f"--eval.num-envs {algo.num_envs}"
    for setting, smaller, other in _changes(policy, algo, workload):
        if fits(smaller, other):
            return setting
    otherwise = "a smaller --policy.model, or a larger GPU"
    is_smallest = getattr(policy, "quantization", "") == "nf4" or not policy.smaller
    return otherwise if is_smallest else f"{policy.smaller}, {otherwise}"


def _changes(
    policy: PolicyConfig | VLAConfig, algo: PolicyGradientConfig, workload: Workload
) -> Iterator[tuple[str, PolicyConfig | VLAConfig, PolicyGradientConfig]]:
    """Settings that take less memory and change nothing else, the cheapest first, and what is configured then."""
    # fewer at once take longer
    tokens = algo.microbatch_tokens // 2
    while tokens >= 512:
        yield f"--algo.microbatch-tokens {tokens}", policy, replace(algo, microbatch_tokens=tokens)
        tokens //= 2
    if isinstance(policy, PolicyConfig) and policy.cache_mib > _MIN_CACHE_MIB:
        yield f"--policy.cache-mib {_MIN_CACHE_MIB}", replace(policy, cache_mib=_MIN_CACHE_MIB), algo
    if workload.is_sampled:
        yield "--algo.offload", policy, replace(algo, offload=True)
    if workload.is_sampled and not algo.num_envs % 4:
        yield f"--algo.num-envs {algo.num_envs // 4}", policy, replace(algo, num_envs=algo.num_envs // 4)
    # then more GPUs, of which each holds a share; 4-bit weights are not shared out
    for count in () if getattr(policy, "quantization", "") == "nf4" else _LEARNERS:
        if count > algo.num_learners * algo.shard and count <= algo.minibatch_turns:
            wider = replace(algo, num_learners=count, shard=True, gpus_per_learner=1.0)
            yield f"--algo.shard --algo.num-learners {count} --algo.gpus-per-learner 1", policy, wider


def words_of(plan: MemoryPlan) -> str:
    """The plan in one line, GiB."""
    named = {name: value / _GIB for name, value in asdict(plan).items()}
    parts = ", ".join(f"{name} {value:.1f}" for name, value in named.items() if value >= 0.05)
    return f"{plan.total / _GIB:.1f} GiB ({parts})"
