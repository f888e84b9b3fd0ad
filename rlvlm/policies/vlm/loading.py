"""Loads a policy from a `PolicyConfig`.

Code that only places policies imports this too, so the slow import of transformers is deferred until one is loaded.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlvlm.envs.env import TurnEnv
from rlvlm.pocket.models import weights_folder
from rlvlm.policies.own import make_own
from rlvlm.policies.protocol import SeenImages
from rlvlm.policies.reply_policy import ReplyPolicy
from rlvlm.policies.vlm.config import PolicyConfig, check_family
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.vlms.devices import pick_device
from rlvlm.vlms.files import fetched
from rlvlm.vlms.lora import LoraConfig, add_adapter


def build_policy(config: PolicyConfig, env: TurnEnv) -> ReplyPolicy:
    """Builds a policy for the prompts and actions of `env`: the chat VLM of `config`, or the user's own.

    Raises:
        ModelUnavailable: see `load_policy`.
        UsageError: see `load_policy`; or `policy.head` names no such policy.
    """
    if not config.is_own:
        return load_policy(config, len(env.action_names))
    # its weights are drawn from the run's seed, as a VLM's heads are
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = make_own(config, env, ReplyPolicy)
    policy.config, policy.images = config, SeenImages(config.cache_mib << 20)
    return policy.to(pick_device(config.device, config.section))


def load_policy(config: PolicyConfig, num_actions: int = 0) -> VLMPolicy:
    """Loads the policy described by `config`: its model, with an adapter if one is trained, and fresh heads.

    Args:
        config: config of the policy.
        num_actions: number of actions of an action head; not needed for text.

    Raises:
        ModelUnavailable: the model or the adapter cannot be loaded, or the model's family is not supported.
        UsageError: its vision encoder is to be trained, but the adapter has no part there.
    """
    from rlvlm.vlms.loading import load_vlm

    named = config.named(str(weights_folder("policy")))
    folder = Path(named.model).expanduser()
    check_family(folder if folder.is_dir() else fetched(named.model, named.revision, ("config.json",), named.section))
    if config.dtype == "auto" and not config.has_adapter:
        named = dataclasses.replace(named, dtype="float32")  # PEFT itself keeps an adapter in float32
    loaded = load_vlm(named, trainable=True)
    model = loaded.model
    # heads and adapter are drawn from the run's seed, without effect on the run's own random numbers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.has_adapter and not config.adapter:
            shape = LoraConfig(rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets)
            model = add_adapter(model, shape)
        if not config.has_adapter:
            _add_words(model, loaded.processor.tokenizer, config.new_words)
        return VLMPolicy(model, loaded.processor, config, num_actions)


@torch.no_grad()
def _add_words(model: Any, tokenizer: Any, words: Sequence[str]) -> None:
    """Makes each new one of `words` a token; its vectors begin as the mean of those of its former tokens."""
    from transformers import AddedToken

    parts = {word: tokenizer(word, add_special_tokens=False)["input_ids"] for word in dict.fromkeys(words)}
    new = {word: ids for word, ids in parts.items() if len(ids) > 1}
    if not new:
        return
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in new])
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
        for word, ids in new.items():
            table[tokenizer.convert_tokens_to_ids(word)] = table[ids].mean(0)
