"""A policy as an RLlib module, for RLlib's learners."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ray.rllib.core.rl_module.torch import TorchRLModule

from rlvlm.algorithms.sharding import gathered
from rlvlm.vlms.skeleton import skeletons


class PolicyModule(TorchRLModule):
    """A `Policy` as an RLlib module: trained weights are sent and saved, a frozen base is not.

    `model_config` contains `make_policy`, and `is_sharded`: whether learners shard the policy, which then has no
    weights until they have.
    """

    policy: Any

    def setup(self) -> None:
        """Builds the policy; RLlib calls it once."""
        with skeletons(self.model_config.get("is_sharded", False)):
            self.policy = self.model_config["make_policy"]()

    def get_state(self, *args: Any, **unused: Any) -> dict[str, Any]:
        """Returns the trained weights, as float32 arrays by name; RLlib's own method would copy a frozen base too.

        If sharded, it only works when all learners are asked at once, which RLlib does not do once they play; before
        that it returns nothing.
        """
        state = {} if any(parameter.is_meta for parameter in self.policy.parameters()) else self.policy.trained_state()
        return {name: gathered(value).float().numpy().copy() for name, value in state.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned.

        Raises:
            ValueError: the weights are of another policy.
        """
        self.policy.load_trained_state({name: torch.tensor(np.asarray(value)) for name, value in state.items()})
