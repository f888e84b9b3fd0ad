"""Builds a policy in memory from a `VLAConfig`: the choice of the policy is made only here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from rlvlm.core.guests import current_section, guest_of, load
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.own import make_own
from rlvlm.policies.protocol import SeenImages
from rlvlm.policies.vla.config import PocketVLAConfig, VLAConfig
from rlvlm.policies.vla.flow.config import FlowConfig
from rlvlm.policies.vla.flow.pocket import PocketFlowNetwork
from rlvlm.policies.vla.flow.policy import FlowPolicy
from rlvlm.policies.vla.pocket import PocketVLA
from rlvlm.policies.vla.policy import VLAPolicy

_RENAMED = {"smolvla": "lerobot"}
"""Sections of an earlier 0.2, with today's names."""


def build_policy(config: VLAConfig, env: ChunkEnv) -> VLAPolicy:
    """Builds a policy for the cameras, proprioception and actions of `env`: a checkpoint, your own, or a pocket VLA.

    Raises:
        ModelUnavailable: the checkpoint cannot be loaded, or does not match the env.
        UsageError: `policy.head` names no VLA.
    """
    if config.model:
        policy: VLAPolicy = load(config.checkpoint.build)(config, env)  # transformers and peft are slow to import
    elif config.is_own:
        policy = make_own(config, env, VLAPolicy)
    else:
        shown = {"num_cameras": len(env.cameras), "proprio_size": env.proprio_size, "num_offsets": env.num_offsets}
        if config.head == "flow":
            chunk = {"horizon": env.chunk_steps, "action_width": len(env.action_low)}
            network = PocketFlowNetwork(config.pocket, **shown, **chunk, has_noise=config.flow.kernel == "learned")
            policy = FlowPolicy(network, config.flow, chunk_steps=env.chunk_steps, action_size=len(env.action_low))
            policy.image_px = config.pocket.image_px
        else:
            policy = PocketVLA(config.pocket, num_tokens=env.chunk_steps * len(env.action_low), **shown)
    policy.config, policy.images = config, SeenImages(config.cache_mib << 20)
    return policy


def check_checkpoint(config: VLAConfig, env: ChunkEnv) -> None:
    """Raises ModelUnavailable unless the checkpoint in the folder `config.model` matches `env`, as far as can be said
    without reading its weights.
    """
    load(config.checkpoint.check)(Path(config.model).expanduser(), config.loading, env)


def read_policy(meta: Mapping[str, Any], env: ChunkEnv) -> VLAPolicy:
    """Rebuilds the policy described by another one's `meta()`, with its statistics but without trained weights.

    Raises:
        ValueError, TypeError, KeyError: the description is corrupt.
    """
    policy = build_policy(read_config(meta), env)
    if meta["statistics"]:
        policy.load_statistics(meta["statistics"])
    return policy


def read_config(meta: Mapping[str, Any]) -> VLAConfig:
    """Returns the config in a `VLAPolicy.meta`: JSON has lists for tuples, and dicts for nested configs."""
    config = dict(meta["config"])
    pocket = PocketVLAConfig(**{**config["pocket"], "channels": tuple(config["pocket"]["channels"])})
    parts: dict[str, Any] = {"pocket": pocket, "flow": FlowConfig(**config.get("flow", {}))}
    for old, new in _RENAMED.items():
        if old in config:
            config[new] = config.pop(old)
    kinds = get_type_hints(VLAConfig)  # not the fields' own types, which a help text replaces
    for name, value in [*config.items()]:
        if isinstance(value, dict) and name not in (*parts, "settings"):
            kind = kinds.get(name)
            if kind is None and guest_of("settings", f"policy.{name}"):  # without its guest it has no effect
                del config[name]
                continue
            assert isinstance(kind, type), f"policy.{name} is a section"
            saved = current_section(f"policy.{name}", value)
            parts[name] = kind(**{key: tuple(item) if isinstance(item, list) else item for key, item in saved.items()})
    return VLAConfig(**{**config, **parts})
