"""The policy as an RLlib module: everything that is trained, and nothing else."""

from typing import Any

from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import nn


class VLAModule(TorchRLModule):
    """A VLA.

    `model_config` holds `make_policy`, which is called without arguments and gives a `VLAPolicy`.
    """

    policy: nn.Module

    def setup(self) -> None:
        """Builds the policy; RLlib calls it once."""
        self.policy = self.model_config["make_policy"]()

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """RLlib's tools give snapshots, which are no images: they are told so.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"a VLA needs images and words, not {Columns.OBS}; play it with grpo.player")
