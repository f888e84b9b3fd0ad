"""Estimate of a learner's GPU memory from the shapes of its model: no weight is loaded. `runs.start.preflight` uses it.

P parameters are trained and F are frozen. N learners share them out; N is 1 where each holds all. All the time, the
process holds:

    context    CUDA and its libraries, outside of torch
    weights    (w P + f F) / N        w 4 in float32; f 2 beside an adapter, 4 in float32, 0.52 of layers in NF4
    Adam       8 P / N                with `algo.offload`, it and the initial weights only during updates
    images     the cache of encoded images, when full

While it learns, also:

    gradients  4 P / N
    copies     4 P / N                for each copy: the weights before an update that may be taken back; the initial
                                      weights and the ones they are swapped with, if divergence from them is penalised
    passing    sharded: the gathered embeddings and two blocks, and their gradient; several learners that each hold all
               weights: the vector in which gradients are summed, twice

One of these at a time, so that only the largest counts:

    start      a step of the supervised start
    sampling   keys and values of all rows, and what reading the prompts takes; also in evaluations
    update     a step of an update: activations and log-probs, or Adam's temporary values of the largest parameter

`reserve` is what the allocator holds beyond that. Loading takes no more: a learner reads only its own slices of what is
shared out.

Activations of a chat VLM are counted (`policies.vlm.activations`). A VLA with L layers of the widths I and H takes, per
token, a (L H + 4 I + 8.3 H) bytes with gradient checkpointing and a L (4 I + 8.3 H) without; a is 4 or 2, the bytes of
a number. This is within 1 % of what `benchmarks/update_memory.py` counts for blocks as wide as those of Qwen2.5-VL-3B
and 7B.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.core.guests import load
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.activations import Activations, activations_of
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.policy import is_vision
from rlvlm.vlms.blocks import LARGE, blocks_of, recompute_blocks
from rlvlm.vlms.loading import takes_nf4
from rlvlm.vlms.lora import LoraConfig, add_adapter

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MARGIN = 0.05
"""Share of a GPU that a plan leaves free."""
_CONTEXT = 0.7 * 2**30
"""Bytes of CUDA's context and libraries that a process holds beside what torch has reserved."""
_RESERVE = 0.1
"""Share added to temporary memory, for gaps between tensors of different sizes. With segments that grow
(`vlms.devices.use_expandable_segments`) a tensor wastes less than a page of 2 MiB; without them 25 to 35 % was lost."""
_NF4_BYTES = 0.52
"""Bytes of a weight of 4 bits, with its part of the doubly quantised constants."""
_SLICES_BYTES = 3 * 2**27
"""Bytes of the logits of a slice of a VLA's tokens, their log-softmax and its gradient."""
_MIN_CACHE_MIB = 128
"""MiB for encoded images that are advised if memory is short."""
_LEARNERS = (2, 4, 8, 16)
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Numbers of trained and frozen parameters of a model, and sizes of its activations."""

    learned: int
    """Weights that are trained."""
    frozen: int
    """Weights that are not trained."""
    frozen_nf4: int
    """Frozen weights that NF4 holds in 4 bits."""
    block: int
    """Weights of the largest block."""
    outside: int
    """Weights outside of all blocks: embeddings and the output head."""
    largest: int
    """Weights of the largest parameter that is trained."""
    activations: Callable[[str, str], Activations]
    """Function from the types that the model and its adapter compute in, `float32` or `bfloat16`, to activations."""

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.learned + self.frozen


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Uses of the policy in a learner's process besides updates."""

    prompt_tokens: int = 0
    """Tokens of one prompt with its image. 0: unknown; then only `algo.microbatch_tokens` says how many tokens are
    learned from at once, and sampling is left out."""
    sft_rows: int = 0
    """Answers in a step of the supervised start. 0: there is no such start."""
    is_sampled: bool = False
    """Whether this process also samples and evaluates."""
    eval_envs: int = 0
    """Number of envs that evaluations play at once. 0: as many as rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """GPU memory of one learner's process, in bytes by purpose; see the module."""

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
        """Maximum at one time: the start, sampling and updates take turns."""
        learning = self.gradients + self.copies + self.passing + max(self.start, self.update)
        held = self.context + self.weights + self.images + self.reserve
        if self.is_offloaded:
            return held + max(learning + self.adam, self.sampling)
        return held + self.adam + max(learning, self.sampling)


def size_of(policy: PolicyConfig | VLAConfig, folder: Path) -> ModelSize:
    """Returns the size of the model in `folder`, trained as `policy` says; reads only its `config.json`."""
    with torch.device("meta"):  # shapes without memory: the model's weights are never read
        network, text = _NETWORKS[type(policy)](policy, folder)
        size = measured(network, text)
    recomputes = policy.loading.recompute
    recomputes = size.total >= LARGE if recomputes is None else recomputes
    rule = size.activations if recomputes else _rule(text, recomputes=False)
    return replace(size, activations=_counted(network, recomputes) if isinstance(policy, PolicyConfig) else rule)


def _rule(text: "PretrainedConfig", *, recomputes: bool) -> Callable[[str, str], Activations]:
    """Returns the activations, by formula, of a VLA whose language model has the config `text`; see the module."""
    block = 4 * text.intermediate_size + 8.3 * text.hidden_size
    # with checkpointing each layer's input and one block's activations are kept, without it those of all blocks
    inputs = text.num_hidden_layers * text.hidden_size
    kept, most = (inputs, inputs + block) if recomputes else 2 * (text.num_hidden_layers * block,)

    def activations(dtype: str, _: str) -> Activations:
        size = 2 if dtype == "bfloat16" else 4
        return Activations(update=size * most, kept=size * kept)

    return activations


def _counted(network: nn.Module, recomputes: bool) -> Callable[[str, str], Activations]:
    """Returns the activations of a chat VLM on the meta device, counted once for each precision."""
    recompute_blocks(network, recomputes)

    @cache
    def activations(dtype: str, adapter_dtype: str) -> Activations:
        for name, parameter in network.named_parameters():
            wanted = adapter_dtype if "lora_" in name else dtype
            parameter.grad, parameter.data = None, parameter.data.to(getattr(torch, wanted))
        return activations_of(network, recomputes=recomputes)

    return activations


def _vla_network(policy: VLAConfig, folder: Path) -> "tuple[nn.Module, PretrainedConfig]":
    return load(policy.checkpoint.outline)(folder, policy.loading)


def _vlm_network(policy: PolicyConfig, folder: Path) -> "tuple[nn.Module, PretrainedConfig]":
    from transformers import AutoConfig, AutoModelForImageTextToText

    settings = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    shape = LoraConfig(rank=policy.lora_rank, alpha=policy.lora_alpha, targets=policy.lora_targets)
    network = AutoModelForImageTextToText.from_config(settings)
    network = add_adapter(network, shape) if policy.has_adapter else network
    for name, parameter in network.named_parameters():
        if not policy.train_vision and is_vision(name):
            parameter.requires_grad_(False)
    return network, settings.get_text_config()


_NETWORKS: "Mapping[type, Callable[[Any, Path], tuple[nn.Module, PretrainedConfig]]]" = {
    VLAConfig: _vla_network,
    PolicyConfig: _vlm_network,
}
"""Functions that build the network and the config of its language model, by the type of the policy's config."""


def measured(network: nn.Module, text: "PretrainedConfig") -> ModelSize:
    """Returns the size of `network`, whose language model has the config `text`."""
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
    """Estimates the maximum memory of one learner's process.

    Temporary memory is included if `algo.microbatch_tokens` or `workload` gives the number of tokens at once. Otherwise
    it is left out, and the plan is a lower bound.

    Args:
        size: of the policy's model.
        policy: settings by which the model is loaded.
        algo: settings by which it learns.
        on_gpu: whether frozen weights beside an adapter or an action expert are bfloat16 by default.
        workload: its other uses.
    """
    wants = policy.loading
    # bytes of a number: adapters and the action experts of LeRobot are always float32; on a GPU, the weights beside
    # them are bfloat16
    is_partial = policy.has_adapter or wants.learns == "expert"
    is_coarse = wants.dtype == "bfloat16" or (wants.dtype == "auto" and is_partial and on_gpu)
    base = 2 if is_coarse else 4
    learned_bytes = 4 if is_partial else base
    spread = algo.num_learners if algo.shard else 1
    in_common = learned_bytes * size.learned + base * size.frozen
    if getattr(policy, "quantization", "none") == "nf4":
        in_common -= (base - _NF4_BYTES) * size.frozen_nf4
    own = size.learned / spread
    # a copy of the weights before an update that may be taken back, which only those with the policy's own critic may
    copies = 4 * own * (algo.shrinkage and algo.advantage.values == "policy")
    if algo.loss.kl_weight:
        copies += 4 * own * (2 if algo.shard else 1)  # whole initial weights lie in main memory, slices do not
    casts = algo.compute_dtype == "bfloat16"  # of the adapter, too
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
        """Returns the bytes of a step with `rows` rows at once, or fewer where `microbatch_tokens` limits them."""
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
    """Returns the setting to change so that a learner fits a GPU of `gpu_memory`. None: it fits as it is."""

    def fits(policy: PolicyConfig | VLAConfig, algo: PolicyGradientConfig, eval_envs: int = workload.eval_envs) -> bool:
        # learners in other processes do not sample
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
    """Yields settings that only save memory, the cheapest first, each with the configs that result."""
    # fewer tokens at once take longer
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
    """Returns the plan as one line, in GiB."""
    named = {name: value / _GIB for name, value in asdict(plan).items()}
    parts = ", ".join(f"{name} {value:.1f}" for name, value in named.items() if value >= 0.05)
    return f"{plan.total / _GIB:.1f} GiB ({parts})"
