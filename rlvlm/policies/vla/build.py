"""Builds a policy in memory from a `VLAConfig`: the choice of the policy is made only here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.own import make_own
from rlvlm.policies.protocol import SeenImages
from rlvlm.policies.vla.config import OpenVLAConfig, PocketVLAConfig, VLAConfig
from rlvlm.policies.vla.flow.config import FlowConfig
from rlvlm.policies.vla.flow.pocket import PocketFlowNetwork
from rlvlm.policies.vla.flow.policy import FlowPolicy
from rlvlm.policies.vla.lerobot.config import LeRobotConfig, current_lerobot
from rlvlm.policies.vla.pocket import PocketVLA
from rlvlm.policies.vla.policy import VLAPolicy


def build_policy(config: VLAConfig, env: ChunkEnv) -> VLAPolicy:
    """Builds a policy for the cameras, proprioception and actions of `env`: a checkpoint, your own, or a pocket VLA.

    Raises:
        ModelUnavailable: the checkpoint cannot be loaded, or does not match the env.
        UsageError: `policy.head` names no VLA.
    """
    if config.model and config.head == "flow":
        from rlvlm.policies.vla.lerobot.policy import LeRobotPolicy  # transformers and peft are slow to import

        policy: Any = LeRobotPolicy(config, env)
    elif config.model:
        from rlvlm.policies.vla.openvla.loading import load_openvla  # transformers and peft are slow to import

        policy = load_openvla(config, env)
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
    folder = Path(config.model).expanduser()
    if config.head == "flow":  # transformers is slow to import
        from rlvlm.policies.vla.lerobot.loading import fitted

        fitted(folder, config.lerobot, env)
    else:
        from rlvlm.policies.vla.openvla.loading import fitted

        fitted(folder, config.openvla, env)


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
    openvla, flow = OpenVLAConfig(**config["openvla"]), FlowConfig(**config.get("flow", {}))
    parts = {"pocket": pocket, "openvla": openvla, "flow": flow}
    lerobot = current_lerobot(config.pop("smolvla", config.get("lerobot", {})))  # its name before pi0
    parts["lerobot"] = LeRobotConfig(
        **{**lerobot, **{name: tuple(lerobot.get(name, ())) for name in ("cameras", "faults")}}
    )
    return VLAConfig(**{**config, **parts})
