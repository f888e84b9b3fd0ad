"""The policy as an RLlib module: what is trained travels and is saved, a frozen base does not."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ray.rllib.core.rl_module.torch import TorchRLModule

from rlvlm.policies.vlm.policy import VLMPolicy


class VLMModule(TorchRLModule):
    """A `VLMPolicy`.

    `model_config` holds `make_policy`, which is called with the number of actions.
    """

    policy: VLMPolicy

    def setup(self) -> None:
        """Builds the policy; RLlib calls it once, after the spaces and `model_config` are known."""
        self.policy = self.model_config["make_policy"](int(self.action_space.n))

    def get_state(self, *args: Any, **unused: Any) -> dict[str, Any]:
        """What is trained, as float32 arrays by name; RLlib's own way would copy a frozen base too."""
        return {name: value.cpu().float().numpy().copy() for name, value in self.policy.trained_state().items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned.

        Raises:
            ValueError: the weights are of another policy.
        """
        own = self.policy.trained_state()
        self.policy.load_trained_state(
            {
                name: torch.as_tensor(np.asarray(value)).to(own[name]) if name in own else torch.as_tensor(value)
                for name, value in state.items()
            }
        )
