"""LoRA adapters: small trainable matrices beside a chat VLM's frozen weights, added, loaded and saved through PEFT.

Source: Hu et al. 2021, arXiv:2106.09685. An adapter is stored in a folder of its own, `adapter_config.json` and
`adapter_model.safetensors`, so a run's checkpoint holds megabytes where the model holds gigabytes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from rlvlm.core.checks import PositiveFloat, PositiveInt, check_bounds
from rlvlm.core.errors import ModelUnavailable, first_line
from rlvlm.core.foreign import read_json
from rlvlm.vlms.files import folder_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

if TYPE_CHECKING:  # imported where needed: vLLM's environment, which only checks adapters, has no PEFT
    import peft

_PREFIX = "base_model.model."
"""Prefix of parameter names in an adapter's file."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Shape of a new adapter."""

    rank: PositiveInt = 32
    """Inner size of the two matrices of each adapted layer, >= 1."""
    alpha: PositiveFloat = 64.0
    """Scale of the adapter's output, which is multiplied by alpha / rank."""
    targets: str = "all-linear"
    """Layers to adapt: `all-linear`, or a regular expression on their full names."""

    def __post_init__(self) -> None:
        check_bounds(self, "")


def add_adapter(model: "PreTrainedModel", config: LoraConfig) -> "peft.PeftModel":
    """Adds a fresh adapter, which changes no output yet, to `model`; only the adapter's weights are trainable.

    Args:
        model: model of transformers, changed in place; the result wraps it and has its methods.
        config: shape of the adapter. Its first matrices are drawn from torch's global generator.
    """
    import peft

    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType] - PEFT divides it, any number will do
        target_modules=config.targets,
    )
    return _wrapped(model, settings)


def load_adapter(model: "PreTrainedModel", folder: Path, *, trainable: bool = False) -> "peft.PeftModel":
    """Loads the adapter in `folder` onto `model`.

    Args:
        model: model of transformers for which the adapter was made; changed in place.
        folder: folder as written by `save_adapter` or PEFT's `save_pretrained`.
        trainable: whether the adapter's weights are trained; all others are frozen.

    Raises:
        ModelUnavailable: the folder contains no LoRA adapter, or one for another model.
    """
    import peft
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_adapter(folder)
    fix = "give the adapter the model that it was trained on"
    try:
        settings = peft.LoraConfig.from_pretrained(str(folder))
        # PEFT silently freezes an adapter that was saved for inference
        settings.inference_mode = not trainable
        wrapped = _wrapped(model, settings)
        weights = _renamed(load_file(folder / ADAPTER_WEIGHTS), wrapped.get_base_model())
        result = peft.set_peft_model_state_dict(wrapped, weights)
    except (ValueError, RuntimeError, KeyError, TypeError, OSError, SafetensorError) as error:
        raise ModelUnavailable(f"the adapter in {folder} does not fit: {first_line(error)}", fix) from error
    # PEFT would continue without missing weights: with random ones, or none
    odd = [*result.unexpected_keys, *(key for key in result.missing_keys if "lora_" in key)]
    if odd:
        raise ModelUnavailable(f"the adapter in {folder} does not fit this model, as at {odd[0]}", fix)
    return wrapped


def save_adapter(model: "PreTrainedModel", folder: Path) -> None:
    """Writes the adapter of `model` into `folder`, without the model's own weights."""
    model.save_pretrained(str(folder), safe_serialization=True, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty template of a model card


def merged_weights(network: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the weights by their names without an adapter, on the CPU; where there is one, it is added in float32.

    Args:
        network: network with whole weights, not slices of them; not PEFT's wrapper, but what it wraps.
    """
    merged = {
        name.replace(".base_layer.", "."): value.detach().cpu().contiguous()
        for name, value in network.state_dict().items()
        if ".lora_" not in name
    }
    from peft.tuners.lora import LoraLayer

    for name, layer in network.named_modules():
        if isinstance(layer, LoraLayer):
            adapted: Any = layer
            delta = sum(adapted.get_delta_weight(adapter).float() for adapter in adapted.active_adapters)
            weight = adapted.get_base_layer().weight.float() + delta
            merged[f"{name}.weight"] = weight.detach().cpu().contiguous()
    return merged


@contextmanager
def cast_adapters(model: "PreTrainedModel") -> Iterator[None]:
    """Computes float32 adapters of 16-bit or 4-bit layers in the layers' precision while the context is open, from
    copies made now: for sampling, where PEFT's casts in each layer and for each token cost more than the arithmetic.
    Adapters in their layers' precision, and other kinds than plain LoRA, are left as they are. Without gradients; later
    changes of the weights have no effect.

    Args:
        model: model with or without an adapter.
    """
    if not hasattr(model, "peft_config"):
        yield
        return
    from peft.tuners.lora import LoraLayer

    adapted: list[Any] = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    changed = []
    try:
        for layer in adapted:
            if (forward := _cast_forward(layer)) is not None:
                layer.forward = forward  # on the instance, where it overrides the class's method
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def _cast_forward(layer: Any) -> Callable[..., Tensor] | None:
    """Returns a PEFT `layer` as a function of its input, with copies of the adapter in the layer's precision; None if
    that saves nothing or would change the layer's computation.
    """
    base, names = layer.get_base_layer(), layer.active_adapters
    precision = getattr(base, "compute_dtype", None) or getattr(base, "weight", torch.empty(0)).dtype
    is_plain = len(names) == 1 and names[0] in layer.lora_A and not getattr(layer, "lora_variant", {})
    # an instance with its own forward belongs to another library, e.g. to accelerate's hooks
    if not is_plain or layer.merged or layer.disable_adapters or "forward" in vars(layer):
        return None
    down, up, scaling = layer.lora_A[names[0]], layer.lora_B[names[0]], layer.scaling[names[0]]
    is_linear = isinstance(base, torch.nn.Linear) and isinstance(down, torch.nn.Linear) and up.bias is None
    if not is_linear or precision not in (torch.bfloat16, torch.float16) or down.weight.dtype != torch.float32:
        return None
    # scaled before rounding, so that each layer's output is rounded once, in the sum
    inner, outer = down.weight.detach().to(precision), (up.weight.detach() * scaling).to(precision).T

    def forward(x: Tensor, *arguments: Any, **settings: Any) -> Tensor:
        plain = base(x, *arguments, **settings)
        narrow = functional.linear(x.to(precision), inner).flatten(0, -2)
        return torch.addmm(plain.to(precision).flatten(0, -2), narrow, outer).view_as(plain).to(plain.dtype)

    return forward


def check_adapter(folder: Path) -> int:
    """Returns the rank of the LoRA adapter that `folder` contains as safetensors.

    Raises:
        ModelUnavailable: it contains none.
    """
    fix = "save the adapter with PEFT's save_pretrained, or leave the adapter out"
    try:
        settings = read_json(folder / ADAPTER_CONFIG)
        kind = settings["peft_type"]
        rank = int(settings.get("r", 8))  # PEFT's default
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelUnavailable(f"{folder} holds no LoRA adapter: no {ADAPTER_CONFIG} that can be read", fix) from error
    if kind != "LORA":
        raise ModelUnavailable(f"{folder} holds an adapter of kind {kind}, not LoRA", fix)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelUnavailable(f"{folder} holds no LoRA adapter: no {ADAPTER_WEIGHTS}", fix)
    return rank


def adapter_mark(folder: str) -> str:
    """Returns the digest of an adapter, for stamps, which distinguish answers by it; empty without a folder."""
    return f" lora={folder_digest(Path(folder).expanduser())[:16]}" if folder else ""


def _renamed(weights: dict[str, Any], model: Any) -> dict[str, Any]:
    """Returns the adapter's `weights` under the layers' present names: transformers 4.52 moved language models.

    PEFT does this for most families, but not for Qwen2-VL and Qwen2.5-VL.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    layers = {name for name, _ in model.named_modules()}
    renamings = [renaming for renaming in get_model_conversion_mapping(model) if isinstance(renaming, WeightRenaming)]
    renamed = {}
    for name, value in weights.items():
        own = name.removeprefix(_PREFIX)
        if own.partition(".lora_")[0] not in layers:
            newer, _ = rename_source_key(own, renamings, [])
            own = newer if newer.partition(".lora_")[0] in layers else own
        renamed[_PREFIX + own] = value
    return renamed


def _wrapped(model: "PreTrainedModel", settings: "peft.PeftConfig") -> "peft.PeftModel":
    import peft

    wrapped = peft.get_peft_model(model, settings)
    assert isinstance(wrapped, peft.PeftModel)
    return wrapped
