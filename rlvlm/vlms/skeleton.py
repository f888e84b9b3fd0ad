"""Networks whose weights are read later, and only the slices that a process keeps: for learners that shard a policy.

`skeletons` requests such networks, `loading` builds them, and `algorithms.sharding` fills in the slices. In between a
network has its config, its buffers and the shapes of its weights, and takes next to no memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

_wanted = False


@contextmanager
def skeletons(wanted: bool = True) -> Iterator[None]:
    """Makes networks be built without their weights while the context is open, if `wanted`."""
    global _wanted  # noqa: PLW0603 - what builds a policy is handed in from outside, and knows nothing of sharding
    before, _wanted = _wanted, wanted
    try:
        yield
    finally:
        _wanted = before


def are_wanted() -> bool:
    """Returns whether networks are to be built without their weights."""
    return _wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Location of a weight in a file."""

    file: Path
    """A safetensors file."""
    key: str
    """Name of the weight in the file."""
    shape: tuple[int, ...]
    """Shape of the whole weight."""

    def read(self, begin: int, count: int) -> Tensor:
        """Reads [count, ...] rows of the weight from `begin` on, and no others."""
        with safe_open(self.file, "pt") as opened:
            return opened.get_slice(self.key)[begin : begin + count]


@dataclass(frozen=True, kw_only=True, slots=True)
class Skeleton:
    """Attribute `skeleton` of a network that was built here."""

    device: torch.device
    """Device to which its weights are to be loaded."""
    sources: dict[nn.Parameter, Source]
    """Source of each of its weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """A weight that is still to be read."""

    owners: list[tuple[nn.Module, str]]
    """Modules that have it, with its name there: several if weights are tied."""
    source: Source | None
    """None if no file has it, as for a fresh adapter, or it has grown since, as a vocabulary does by new words."""


def build_skeleton(
    network_class: Any, folder: Path, config: Any, device: torch.device, *, key_mapping: Any = None, **settings: Any
) -> tuple[Any, set[str], set[str]]:
    """Builds a network in eval mode without weights; returns it with the names of missing and superfluous weights.

    Args:
        network_class: class of transformers, or one of its auto classes.
        folder: folder with safetensors.
        config: config of the network.
        device: future device of its weights.
        key_mapping: regular expressions of names in the files, and the network's names for them, as in
            `from_pretrained`.
        settings: further arguments, such as dtype.

    Raises:
        ValueError: a weight consists of several of the folder's, or has another shape there.
    """
    # takes 1.5 s to import, and every learner and env runner imports this module for `pending`
    from transformers import GenerationConfig
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    # auto classes have the public method, the networks themselves the private one
    make = getattr(network_class, "from_config", None) or network_class._from_config
    with _parameters_on_meta():
        network = make(config, **settings).eval()
    # from_pretrained reads it too: without it a model would not know where to stop
    if (folder / "generation_config.json").is_file():
        network.generation_config = GenerationConfig.from_pretrained(folder)
    transforms = get_model_conversion_mapping(network, key_mapping)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters: list[Any] = [transform for transform in transforms if not isinstance(transform, WeightRenaming)]
    state = network.state_dict(keep_vars=True)
    sources: dict[nn.Parameter, Source] = {}
    found, surplus = set(), set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                name, made_of = rename_source_key(key, renamings, converters, network.base_model_prefix, state)
                if made_of is not None:
                    raise ValueError(f"{name} is made of several weights such as {key}, and cannot be read in part")
                if name not in state:
                    surplus.add(name)
                elif isinstance(state[name], nn.Parameter):
                    shape = tuple(opened.get_slice(key).get_shape())
                    if shape != tuple(state[name].shape):
                        raise ValueError(f"{key} has shape {shape}, the model's is {tuple(state[name].shape)}")
                    sources.setdefault(state[name], Source(file=file, key=key, shape=shape))
                else:  # a buffer, which is small
                    state[name].copy_(opened.get_tensor(key))
                found.add(name)
    missing = {
        name for name, value in state.items()
        if name not in found and not (isinstance(value, nn.Parameter) and value in sources)
    }  # fmt: skip
    network.skeleton = Skeleton(device=device, sources=sources)
    return network, missing, surplus


def skeleton_of(network: nn.Module) -> Skeleton | None:
    """Returns the `Skeleton` in `network` or one of its modules; None if all weights are loaded."""
    found = (getattr(module, "skeleton", None) for module in network.modules())
    return next((skeleton for skeleton in found if isinstance(skeleton, Skeleton)), None)


def device_of(network: nn.Module) -> torch.device:
    """Returns the device of the weights of `network`, present or future."""
    skeleton = skeleton_of(network) if next(network.parameters()).is_meta else None
    return next(network.parameters()).device if skeleton is None else skeleton.device


def pending(network: nn.Module) -> list[Pending]:
    """Returns the weights of `network` still to be read; call it before sharding, which replaces them."""
    skeleton = skeleton_of(network)
    if skeleton is None:
        return []
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                owners.setdefault(parameter, []).append((module, name))
    waiting = []
    for parameter, those in owners.items():
        source = skeleton.sources.get(parameter)
        is_whole = source is not None and source.shape == tuple(parameter.shape)
        waiting.append(Pending(owners=those, source=source if is_whole else None))
    return waiting


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Makes modules keep only the shapes of their parameters, but compute their buffers, while the context is open.

    Under `torch.device("meta")` buffers would be empty too, and no file has the tables of rotary frequencies.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    fills = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    nn.Module.register_parameter = register_on_meta  # pyright: ignore[reportAttributeAccessIssue]
    # RLlib requests determinism from torch, which writes NaN to fresh memory, and so would allocate each weight
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = register
        torch.utils.deterministic.fill_uninitialized_memory = fills  # pyright: ignore[reportAttributeAccessIssue]
