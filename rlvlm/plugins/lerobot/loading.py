"""Loads a folder in LeRobot's layout (SmolVLA, pi0, pi0.5) to a network in memory, and saves it in that layout."""

import logging
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GemmaConfig, SiglipVisionConfig, SmolVLMConfig
from transformers.utils.logging import disable_progress_bar

from rlvlm.core.disk import replace_folder
from rlvlm.core.errors import ModelUnavailable, first_line
from rlvlm.core.foreign import read_bytes, read_json
from rlvlm.envs.env import ChunkEnv
from rlvlm.plugins.lerobot.checkpoint import LAYOUTS, WEIGHTS, Checkpoint, read_checkpoint, write_files
from rlvlm.plugins.lerobot.config import BLANK, LORA_TARGETS, LeRobotConfig
from rlvlm.plugins.lerobot.network import EXPERT_PARTS, NO_CAMERA, LeRobotNetwork
from rlvlm.plugins.lerobot.pi0 import GEMMA, HEADS, VISION, Pi0Network, Pi0NetworkConfig
from rlvlm.plugins.lerobot.prompts import Prompts, StatePrompts
from rlvlm.plugins.lerobot.smolvla import SmolVLANetwork, SmolVLANetworkConfig
from rlvlm.plugins.lerobot.units import in_env_units
from rlvlm.vlms.blocks import recompute_blocks
from rlvlm.vlms.files import fetched, locate
from rlvlm.vlms.loading import network_and_names, pick_device, pick_dtype
from rlvlm.vlms.lora import LoraConfig, add_adapter, load_adapter, merged_weights
from rlvlm.vlms.skeleton import device_of

logger = logging.getLogger(__name__)

_AGAIN = "download the checkpoint again, or give --policy.model another one"
_OTHER = "choose a checkpoint that was trained on this robot and these units"
_MAX_TOKENIZER_BYTES = 64 * 2**20
_MAX_LAYERS = 1_024
_BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError)
"""Errors of transformers about invalid sizes and names in a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedLeRobot:
    """A loaded checkpoint."""

    network: LeRobotNetwork
    """Network in training mode, including an adapter's layers."""
    adapter: Any
    """PEFT's wrapper around the network, which saves its adapter; None without one. Its `prefix` method is PEFT's
    own."""
    checkpoint: Checkpoint
    """Statistics and files that are written back with the weights."""
    revision: str
    """Hub commit, or digest of a local folder."""


def load_lerobot(model: str, revision: str, wants: LeRobotConfig, env: ChunkEnv) -> LoadedLeRobot:
    """Loads the checkpoint `model` on its device.

    Args:
        model: folder or hub name.
        revision: commit of a hub model; empty takes the newest.
        wants: how the env is shown to it, and which weights are trained.
        env: env that it acts in; its proprioception is the state, and its chunks are the steps executed.

    Raises:
        ModelUnavailable: files are missing or broken, belong to no supported policy, or do not match the env.
    """
    folder, found = locate(model, revision, "policy")
    checkpoint, config, prompts = fitted(folder, wants, env)
    network = _network(checkpoint, config, wants)
    network.prompts = prompts
    adapter = _teach(network, wants)
    logger.info("policy %s loaded on %s, revision %s", model, device_of(network), found[:12])
    return LoadedLeRobot(network=network.train(), adapter=adapter, checkpoint=checkpoint, revision=found)


def fitted(folder: Path, wants: LeRobotConfig, env: ChunkEnv) -> tuple[Checkpoint, Any, Prompts]:
    """Returns the checkpoint in `folder`, its network's config for `env` and its prompts, without reading weights.

    Raises:
        ModelUnavailable: see `load_lerobot`, except for errors in the weights.
    """
    checkpoint = read_checkpoint(folder)
    config = _network_config(checkpoint, wants, _cameras(checkpoint, wants, env.cameras))
    numbers = {
        "the state": (len(checkpoint.state.first), env.proprio_size),
        "an action": (len(checkpoint.action.first), len(env.action_low)),
    }
    for what, (takes, gives) in numbers.items():
        if takes != gives:
            raise ModelUnavailable(
                f"{what} of the checkpoint has {takes} numbers, the env's has {gives}",
                _OTHER,
            )
    if env.chunk_steps > (makes := config.sizes["chunk_steps"]):
        raise ModelUnavailable(
            f"chunks of {env.chunk_steps} steps are to be run, the checkpoint makes {makes}",
            f"give the env's chunk_steps at most {makes}",
        )
    checkpoint = in_env_units(checkpoint, wants.gripper, env)
    # a typical action by the statistics; far outside the env's range it has other units
    relative, typical = np.flatnonzero(checkpoint.relative), checkpoint.action_scale.centre
    typical[relative] += checkpoint.state.scale.centre[relative]
    middle, width = (env.action_low + env.action_high) / 2, env.action_high - env.action_low
    if (off := np.abs(typical - middle) / width).max() > 1:
        worst = int(off.argmax())
        raise ModelUnavailable(
            f"dimension {worst} of the checkpoint's actions{', added to the state,' if worst in relative else ''} is "
            f"typically {typical[worst]:.3g} by its statistics, and the env takes {env.action_low[worst]:.3g} to "
            f"{env.action_high[worst]:.3g}: other units, such as positions for movements",
            _OTHER,
        )
    return checkpoint, config, _prompts(checkpoint, wants)


def outline(folder: Path, wants: LeRobotConfig) -> LeRobotNetwork:
    """Returns the network in `folder` without weights (on `meta`), with `requires_grad` set, for counting parameters.

    Raises:
        ModelUnavailable: see `load_lerobot`.
    """
    checkpoint = read_checkpoint(folder)
    config = _network_config(checkpoint, wants, list(range(len(checkpoint.cameras))))
    with torch.device("meta"):
        network = _NETWORKS[type(config)](config)
        _teach(network, wants)
    return network


def outline_with_text(folder: Path, wants: LeRobotConfig) -> tuple[LeRobotNetwork, Any]:
    """Returns the network of `outline`, and the config of its language model."""
    network = outline(folder, wants)
    return network, network.config.body


def save_lerobot(network: LeRobotNetwork, checkpoint: Checkpoint, folder: Path) -> None:
    """Writes a folder that LeRobot loads: weights (with an adapter merged in), settings and statistics.

    Args:
        network: network with whole weights, not slices of them.
        checkpoint: checkpoint that it was loaded from; its scales of states and actions are written, and weights that
            the network does not use are read from its folder again.
        folder: folder to write; replaced atomically if it exists.

    Raises:
        ModelUnavailable: the checkpoint's folder is gone, and unused weights are needed.
    """
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_files(checkpoint, fresh)
    # LeRobot has no value head
    weights = {name: weight for name, weight in merged_weights(network).items() if name.startswith("model.")}
    for name, other in network.tied.items():
        weights[name] = weights[other].clone()  # a file cannot store the same memory under two names
    save_file({**_unread(network, checkpoint), **weights}, fresh / WEIGHTS, metadata={"format": "pt"})
    (fresh / WEIGHTS).chmod(0o644)  # safetensors makes its file readable only by its owner
    replace_folder(fresh, folder)


def _prompts(checkpoint: Checkpoint, wants: LeRobotConfig) -> Prompts:
    """Returns prompts with the tokenizer of the checkpoint's VLM."""
    file = _body_folder(checkpoint.tokenizer, wants) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(read_bytes(file, _MAX_TOKENIZER_BYTES))
    except Exception as error:  # the library raises nothing narrower
        raise ModelUnavailable(f"{file} cannot be read: {first_line(error)}", _AGAIN) from error
    if checkpoint.kind == "pi05":
        min_numbers = checkpoint.sizes.state_dims if "padded_state" in wants.faults else 0
        return StatePrompts(tokenizer, checkpoint.max_tokens, min_numbers)
    return Prompts(tokenizer, checkpoint.max_tokens)


def _cameras(checkpoint: Checkpoint, wants: LeRobotConfig, present: Sequence[str]) -> list[int]:
    """Returns the index of the env's camera for each image feature, `NO_CAMERA` for one that is to be masked."""
    features = [name.rpartition(".")[2] for name in checkpoint.sources]
    names = list(wants.cameras)
    if not names and all(feature in present for feature in features):
        names = features
    if not names and len(features) <= len(present):
        names = list(present[: len(features)])
        logger.warning(
            "no camera of the env is called as the checkpoint's %s; %s feed them: --%s.cameras NAME ... says otherwise",
            *(", ".join(features), ", ".join(names), wants.section),
        )
    absent = [name for name in names if name not in (*present, BLANK)]
    if absent or len(names) != len(features) or set(names) <= {BLANK}:
        raise ModelUnavailable(
            f"the checkpoint sees through {len(features)} cameras ({', '.join(features)}), the env has "
            f"{', '.join(present)}" + (f", and {', '.join(names)} were named" if names else ""),
            f"--{wants.section}.cameras NAME ..., one of the env's for each or {BLANK}, or another checkpoint",
        )
    return [NO_CAMERA if name == BLANK else present.index(name) for name in names]


def _body_folder(name: str, wants: LeRobotConfig) -> Path:
    """Returns the folder with config and tokenizer of the VLM; its weights are in the checkpoint."""
    name = wants.body or name
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        return fetched(name, "", ("config.json", "tokenizer.json"), "policy")
    except ModelUnavailable as error:
        raise ModelUnavailable(
            f"the checkpoint's VLM is not here: {error}",
            f"--{wants.section}.body DIR, a folder with its config.json and tokenizer.json",
        ) from error


def _network_config(checkpoint: Checkpoint, wants: LeRobotConfig, cameras: list[int]) -> Any:
    if idle := [fault for fault in wants.faults if fault not in LAYOUTS[checkpoint.kind].faults]:
        raise ModelUnavailable(
            f"{wants.section}.faults {idle[0]} has no effect on a policy of type {checkpoint.kind}", "leave it out"
        )
    return (_smolvla_config if checkpoint.kind == "smolvla" else _pi0_config)(checkpoint, wants, cameras)


def _smolvla_config(checkpoint: Checkpoint, wants: LeRobotConfig, cameras: list[int]) -> SmolVLANetworkConfig:
    folder = _body_folder(str(checkpoint.config.get("vlm_model_name")), wants)
    try:
        values = read_json(folder / "config.json")
        kinds = values["model_type"], values["text_config"]["model_type"]
        if kinds != ("smolvlm", "llama"):
            raise ValueError(f"it is a {kinds[0]} above a {kinds[1]}, not a smolvlm above a llama")
        vlm = SmolVLMConfig.from_dict(values)
        text: Any = vlm.text_config
        vision: Any = vlm.vision_config
        sizes, expert_sizes = checkpoint.sizes, checkpoint.expert_sizes(text.num_hidden_layers)
        if not (1 <= vision.num_hidden_layers <= _MAX_LAYERS and 1 <= vlm.scale_factor <= sizes.image_px):
            raise ValueError(f"its image encoder has {vision.num_hidden_layers} layers, scale {vlm.scale_factor}")
        # an image encoder's patches are joined in squares of scale_factor x scale_factor
        if sizes.image_px % (vision.patch_size * vlm.scale_factor):
            raise ValueError(f"images of {sizes.image_px} pixels do not hold whole squares of its patches")
    except _BROKEN as error:
        raise ModelUnavailable(
            f"{folder} holds no SmolVLM that can be read: {first_line(error)}",
            f"--{wants.section}.body DIR, a folder with the config.json and tokenizer.json of the checkpoint's VLM",
        ) from error
    return SmolVLANetworkConfig(
        vlm=vlm,
        sizes=asdict(sizes),
        expert_sizes=asdict(expert_sizes),
        cameras=cameras,
        has_shifted_patches="shifted_patches" in wants.faults,
    )


def _pi0_config(checkpoint: Checkpoint, wants: LeRobotConfig, cameras: list[int]) -> Pi0NetworkConfig:
    sizes, gemmas = checkpoint.sizes, []
    for setting in ("paligemma_variant", "action_expert_variant"):
        variant = checkpoint.config.get(setting)
        if not isinstance(variant, str) or variant not in GEMMA:
            raise ModelUnavailable(
                f"the checkpoint's {setting} is {str(variant)[:80]!r}; known are {', '.join(GEMMA)}", _AGAIN
            )
        gemmas.append(GemmaConfig(**HEADS, **GEMMA[variant]))
    if sizes.image_px % VISION["patch_size"]:
        raise ModelUnavailable(f"images of {sizes.image_px} pixels do not hold whole patches of SigLIP", _AGAIN)
    vision = SiglipVisionConfig(
        **VISION, image_size=sizes.image_px, hidden_act="gelu_pytorch_tanh", vision_use_head=False
    )  # pyright: ignore[reportCallIssue] - it reads what it does not declare
    return Pi0NetworkConfig(
        vision=vision,
        body=gemmas[0],
        expert=gemmas[1],
        sizes=asdict(sizes),
        cameras=cameras,
        is_adaptive=checkpoint.kind == "pi05",
        border=-3.0 if "dark_borders" in wants.faults else -1.0,
    )


_NETWORKS: dict[type, Callable[[Any], LeRobotNetwork]] = {
    SmolVLANetworkConfig: SmolVLANetwork,
    Pi0NetworkConfig: Pi0Network,
}
"""Network class of each config."""


def _network(checkpoint: Checkpoint, config: Any, wants: LeRobotConfig) -> LeRobotNetwork:
    """Loads the weights to their device; reports missing or superfluous ones by name."""
    folder = checkpoint.folder
    network_class: Any = _NETWORKS[type(config)]
    device = pick_device(wants.device, wants.section)
    # in bfloat16 most of Adam's steps would be lost to rounding
    dtype = torch.float32 if wants.learns == "all" else pick_dtype(wants.dtype, device)
    disable_progress_bar()  # it would break the run's live panel
    try:
        settings = {"config": config, "key_mapping": _renamed(folder, network_class)}
        network, values = network_and_names(network_class, folder, dtype, device, settings)
    except (*_BROKEN, RuntimeError, SafetensorError) as error:
        raise ModelUnavailable(f"the weights in {folder} cannot be loaded: {first_line(error)}", _AGAIN) from error
    # a skeleton reads every file, and those with statistics have the same suffix
    statistics = {key for name, content in checkpoint.files.items() if name.endswith(".safetensors") for key in content}
    idle = {*network_class.unread, *network_class.tied}
    surplus = {name for name in values["unexpected_keys"] if _full(name) not in idle} - statistics
    for names, what in ((values["missing_keys"], "lacks"), (surplus, "has besides")):
        if names:
            some = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
            raise ModelUnavailable(f"{folder} {what} {len(names)} weights: {some}", _AGAIN)
    network.at_once = wants.at_once
    recompute_blocks(network, wants.recompute)
    return network


def _renamed(folder: Path, network_class: type[LeRobotNetwork]) -> dict[str, str]:
    """Returns names, here and in the file, of weights stored only under a tied weight's name, as pi0's makers do."""
    with safe_open(folder / WEIGHTS, "pt") as opened:
        names = {_full(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    tied = network_class.tied.items()
    return {
        re.escape(name.removeprefix("model.")): other.removeprefix("model.")
        for name, other in tied
        if other not in names
    }


def _teach(network: LeRobotNetwork, wants: LeRobotConfig) -> Any:
    """Enables gradients of the weights that `wants` selects, and no others; returns PEFT's wrapper of an adapter."""
    adapter = None
    if wants.adapter:
        adapter = load_adapter(network, Path(wants.adapter).expanduser(), trainable=True)
    elif wants.learns in LORA_TARGETS:
        shape = LoraConfig(rank=wants.lora_rank, alpha=wants.lora_alpha, targets=LORA_TARGETS[wants.learns])
        adapter = add_adapter(network, shape)
    if adapter is None:
        for name, parameter in network.named_parameters():
            is_head = name == "model.vlm_with_expert.vlm.lm_head.weight"  # not used in any computation
            is_expert = any(f".{part}." in name for part in EXPERT_PARTS)
            parameter.requires_grad_(is_expert or (wants.learns == "all" and not is_head))
    if wants.has_values:
        network.add_values()
    return adapter


def _full(name: str) -> str:
    """Returns LeRobot's name of a weight; the makers of pi0 leave out the first component."""
    return name if name.startswith("model.") else f"model.{name}"


def _unread(network: LeRobotNetwork, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns the checkpoint's unused weights, by LeRobot's names."""
    if not network.unread:
        return {}
    try:
        with safe_open(checkpoint.folder / WEIGHTS, "pt") as opened:
            named = {_full(name): name for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {name: opened.get_tensor(named[name]) for name in network.unread if name in named}
    except (OSError, SafetensorError) as error:
        raise ModelUnavailable(
            f"{checkpoint.folder} is needed to write a whole checkpoint, and cannot be read: {first_line(error)}",
            "leave the folder where it is while what it holds is trained",
        ) from error
