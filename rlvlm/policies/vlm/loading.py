"""From a `PolicyConfig` to a policy in memory."""

import dataclasses

import torch

from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.vlms.loading import load_vlm
from rlvlm.vlms.lora import LoraConfig, add_adapter
from rlvlm.vlms.shipped import weights_folder


def load_policy(config: PolicyConfig, num_actions: int = 0) -> VLMPolicy:
    """The policy that `config` describes: its model with an adapter where one learns, and fresh heads.

    Args:
        config: of the policy.
        num_actions: that an action head chooses from; not needed for one that acts by text.

    Raises:
        ModelUnavailable: the model or the adapter cannot be loaded.
    """
    named = config if config.model else dataclasses.replace(config, model=str(weights_folder("policy")))
    loaded = load_vlm(named, trainable=True)
    model = loaded.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.has_adapter and not config.adapter:
            shape = LoraConfig(rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets)
            model = add_adapter(model, shape)
        return VLMPolicy(model, loaded.processor, config, num_actions)
