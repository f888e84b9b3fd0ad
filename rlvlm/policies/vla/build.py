"""From a `VLAConfig` to a policy in memory. Algorithms and players start here."""

from typing import TYPE_CHECKING, Union

from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.pocket import PocketVLA

if TYPE_CHECKING:
    from rlvlm.policies.vla.openvla.policy import OpenVLAPolicy


def build_policy(config: VLAConfig, env: ChunkEnv) -> Union[PocketVLA, "OpenVLAPolicy"]:
    """A policy for the cameras, proprioception and actions of `env`: a checkpoint's, or a fresh pocket VLA.

    Raises:
        ModelUnavailable: the checkpoint cannot be loaded, or is not for such an env.
    """
    num_tokens = env.chunk_steps * len(env.action_low)
    if config.model:
        from rlvlm.policies.vla.openvla.loading import load_openvla  # transformers and peft are slow to import

        return load_openvla(config, num_cameras=len(env.cameras), proprio_size=env.proprio_size, num_tokens=num_tokens)
    return PocketVLA(
        config.pocket,
        num_cameras=len(env.cameras),
        proprio_size=env.proprio_size,
        num_tokens=num_tokens,
        num_offsets=env.num_offsets,
    )
