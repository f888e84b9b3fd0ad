"""Loads a folder with an OpenVLA-OFT checkpoint to a policy in memory, without running any code of the folder.

Weights are safetensors, with one exception: the published proprioception projectors are torch files, which are read by
torch's weights-only loader; it creates nothing but tensors.
"""

import json
import logging
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from rlvlm.core.errors import ModelUnavailable, first_line
from rlvlm.core.foreign import read_json
from rlvlm.core.guests import section_of
from rlvlm.envs.env import ChunkEnv
from rlvlm.plugins.openvla.config import OpenVLAConfig
from rlvlm.plugins.openvla.network import CheckpointConfig, OpenVLANetwork
from rlvlm.plugins.openvla.policy import PROJECTOR, OpenVLAPolicy
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.tokens import ActionScale
from rlvlm.vlms.blocks import recompute_blocks
from rlvlm.vlms.files import locate
from rlvlm.vlms.loading import check_shards, network_and_names, pick_device, pick_dtype
from rlvlm.vlms.lora import LoraConfig, add_adapter, load_adapter

logger = logging.getLogger(__name__)

_SECTION = "policy"
_AGAIN = "download the checkpoint again, or give --policy.model another one"
_OTHER = "choose a checkpoint that was trained on this env"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Content of a checkpoint's folder besides the weights of its network."""

    settings: CheckpointConfig
    projector: dict[str, Tensor]
    """Weights of the proprioception projector; empty if they are among the others, or there is none."""
    tokenizer: Tokenizer
    scale: ActionScale
    """Scale of actions."""
    proprio_scale: ActionScale | None
    """Scale of proprioception; None if the checkpoint takes none."""


def load_openvla(config: VLAConfig, env: ChunkEnv) -> OpenVLAPolicy:
    """Loads the policy named by `config.model`, on its device.

    Args:
        config: settings with the checkpoint, its inputs, and its trained weights.
        env: env that it is to act in.

    Raises:
        ModelUnavailable: the files are missing or broken, are no OpenVLA-OFT, do not match the env, or contain a model
            whose actions have no probabilities.
    """
    folder, revision = locate(config.model, config.revision, _SECTION)
    wants = section_of(config, OpenVLAConfig)
    found = fitted(folder, wants, env)
    policy = OpenVLAPolicy(
        _network(folder, found.settings, wants, found.projector),
        found.tokenizer,
        wants,
        scale=found.scale,
        proprio_scale=found.proprio_scale,
        encoder_px=found.settings.image_sizes[0],
        num_tokens=env.chunk_steps * len(env.action_low),
    )
    logger.info("policy %s loaded on %s, revision %s", config.model, policy.device, revision[:12])
    return policy


def fitted(folder: Path, wants: OpenVLAConfig, env: ChunkEnv) -> Fitted:
    """Reads the settings, statistics and tokenizer in `folder`, for `env`, but not the network's weights.

    Raises:
        ModelUnavailable: see `load_openvla`, except for errors in the weights.
    """
    if len(env.cameras) < wants.cameras:
        raise ModelUnavailable(
            f"the checkpoint is to see {wants.cameras} cameras, the env has {len(env.cameras)}",
            f"lower --{wants.section}.cameras",
        )
    # recognised by file names, before 15 GB are read
    if heads := sorted(path.name for path in folder.glob("action_head--*")):
        raise ModelUnavailable(
            f"{folder} has {heads[0]}: its actions come from a regression head and have no probabilities to learn from",
            "choose a checkpoint whose actions are tokens, such as those of SimpleVLA-RL and RLinf",
        )
    check_shards(folder)
    settings = _settings(folder)
    projector = _projector(folder)
    takes = projector["fc1.weight"].shape[1] if projector else settings.proprio_size
    if takes not in (0, env.proprio_size):
        raise ModelUnavailable(
            f"the checkpoint takes {takes} numbers of proprioception, the env gives {env.proprio_size}", _OTHER
        )
    statistics, key = _statistics(folder, settings, wants)
    scale = _scale(statistics, key, "action")
    if len(scale.low) != len(env.action_low):
        raise ModelUnavailable(
            f"the checkpoint's actions have {len(scale.low)} dimensions, the env's {len(env.action_low)}", _OTHER
        )
    return Fitted(
        settings=settings,
        projector=projector,
        tokenizer=_tokenizer(folder),
        scale=scale,
        proprio_scale=_scale(statistics, key, "proprio") if takes else None,
    )


def outline(folder: Path, wants: OpenVLAConfig) -> tuple[nn.Module, Any]:
    """Returns the network in `folder` without weights, for counting parameters, with an adapter if one is trained; and
    the config of its language model.
    """
    settings = CheckpointConfig.from_pretrained(folder)
    assert isinstance(settings, CheckpointConfig)
    with torch.device("meta"):
        network = OpenVLANetwork(settings)
        if wants.learns == "lora":
            shape = LoraConfig(rank=wants.lora_rank, alpha=wants.lora_alpha, targets=wants.lora_targets)
            return add_adapter(network, shape), settings.text_config
    return network, settings.text_config


def _settings(folder: Path) -> CheckpointConfig:
    fix = "choose a folder or hub name of an OpenVLA-OFT checkpoint"
    try:
        values = read_json(folder / "config.json")
        if values.get("model_type") != CheckpointConfig.model_type:
            raise ValueError(f"its model_type is {values.get('model_type')!r}, not 'openvla'")
        if values.get("use_fused_vision_backbone") is False:
            raise ValueError("it has one image encoder, not two")
        settings = CheckpointConfig.from_dict(values)
        settings.towers  # noqa: B018 - says what is wrong with them
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelUnavailable(f"{folder} holds no OpenVLA that can be read: {first_line(error)}", fix) from error
    assert isinstance(settings, CheckpointConfig)
    return settings


def _projector(folder: Path) -> dict[str, Tensor]:
    """Returns the weights of the proprioception projector if they are in a file of their own; else none."""
    files = sorted(folder.glob(f"{PROJECTOR}--*_checkpoint.pt"))
    if not files:
        return {}
    if len(files) > 1:
        raise ModelUnavailable(f"{folder} has {len(files)} proprioception projectors", "keep the one of the last step")
    try:
        # a torch file is a pickle: only this loader, which creates nothing but tensors, may open it
        weights = torch.load(files[0], map_location="cpu", weights_only=True)
        # saved from a model that was distributed over several GPUs
        named = {name.removeprefix("module."): value for name, value in weights.items()}
        if set(named) != {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}:
            raise ValueError(f"it holds {', '.join(sorted(named))[:100]}")
    except (OSError, ValueError, RuntimeError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        raise ModelUnavailable(f"{files[0]} holds no proprioception projector: {first_line(error)}", _AGAIN) from error
    return named


def _network(folder: Path, settings: CheckpointConfig, wants: OpenVLAConfig, projector: dict[str, Tensor]) -> Any:
    """Loads the weights to their device, with an adapter if one is trained; names missing or superfluous ones."""
    device = pick_device(wants.device, wants.section)
    # in bfloat16 most of Adam's steps would be lost to rounding
    dtype = torch.float32 if wants.learns == "all" else pick_dtype(wants.dtype, device)
    disable_progress_bar()  # it would break the run's live panel
    try:
        network, values = network_and_names(OpenVLANetwork, folder, dtype, device, {"config": settings})
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelUnavailable(f"the weights in {folder} cannot be loaded: {first_line(error)}", _AGAIN) from error
    for names, what in ((values["missing_keys"], "lacks"), (values["unexpected_keys"], "has besides")):
        if names:
            raise ModelUnavailable(
                f"{folder} {what} {len(names)} weights: {', '.join(sorted(names)[:4])}"
                + (", ..." if len(names) > 4 else ""),
                _AGAIN,
            )
    if projector:
        network.add_proprio(projector)
    recompute_blocks(network, wants.recompute)
    if wants.adapter:
        network = load_adapter(network, Path(wants.adapter).expanduser(), trainable=True)
    elif wants.learns == "lora":
        shape = LoraConfig(rank=wants.lora_rank, alpha=wants.lora_alpha, targets=wants.lora_targets)
        network = add_adapter(network, shape)
    return network.train()


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelUnavailable(f"{folder / 'tokenizer.json'} cannot be read: {first_line(error)}", _AGAIN) from error


def _statistics(folder: Path, settings: CheckpointConfig, wants: OpenVLAConfig) -> tuple[str, str]:
    """Returns the text of the checkpoint's statistics, and the name of the data set in them."""
    file = folder / "dataset_statistics.json"
    try:
        entries = read_json(file) if file.exists() else getattr(settings, "norm_stats", None) or {}
        text, keys = json.dumps(entries), sorted(entries)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelUnavailable(f"{file} cannot be read: {first_line(error)}", _AGAIN) from error
    # LIBERO's published checkpoints were trained on data without idle steps, as the statistics' name says
    fits = [key for key in keys if not wants.unnorm_key or key in (wants.unnorm_key, f"{wants.unnorm_key}_no_noops")]
    fits = [wants.unnorm_key] if wants.unnorm_key in keys else fits
    if len(fits) != 1:
        raise ModelUnavailable(
            f"{folder} scales actions for {', '.join(keys)[:300] or 'no data set'}; "
            + (f"none is {wants.unnorm_key!r}" if wants.unnorm_key else "one must be named"),
            f"--{wants.section}.unnorm-key NAME" if keys else _AGAIN,
        )
    if not wants.unnorm_key:  # they may be of another robot or other units
        logger.warning(
            "%s scales actions as data set %s, the only one in its statistics; where that is not this task's, the "
            "actions are wrong: --%s.unnorm-key NAME",
            *(folder, fits[0], wants.section),
        )
    return text, fits[0]


def _scale(statistics: str, key: str, part: str) -> ActionScale:
    try:
        return ActionScale.read(statistics, key, part)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnavailable(f"the checkpoint's statistics cannot be used: {first_line(error)}", _AGAIN) from error
