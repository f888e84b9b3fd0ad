"""Sampling of a policy's replies on vLLM: token ids and an image in, sampled ids and their log-probs out.

Used in vLLM's environment by `serving.policy_replica`. The trainer encodes prompts, parses replies and computes values:
this module has neither text nor heads.

Sampling matches the trainer's recomputation: top-p 1, no top-k, log-probs of the processed distribution, that is
without banned tokens and at the sampling temperature (vllm#42259: with truncation they would be those of another
distribution). Each version of a LoRA adapter has its own name and number, and the prefix cache is emptied (vllm#42125:
blocks of another version of the same name are reused).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.core.episodes import IntArray, SampledReply
from rlvlm.core.errors import ModelUnavailable, UsageError, first_line
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.pocket.models import weights_folder
from rlvlm.policies.buckets import Bucket
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.vllm_worker import described
from rlvlm.vlms.config import EngineConfig
from rlvlm.vlms.engines.vllm import VllmCore, lora_request
from rlvlm.vlms.lora import check_adapter

KEPT_VERSIONS = 2
"""Number of adapters loaded at once: a request ends with the adapter it began with."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of the maximum rank that vLLM accepts."""
_BANNED_BIAS = -100.0
"""Bias on the logits of banned tokens; the strongest that vLLM accepts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRules:
    """The trainer tokenizer's rules for replies, so that both sides sample from the same distribution."""

    stop_id: int
    """Token id that ends a reply."""
    banned_ids: tuple[int, ...]
    """Token ids that must not be sampled."""
    image_id: int
    """Token id of a visual token's placeholder."""


class VllmSampler:
    """A policy's chat VLM on vLLM.

    Args:
        config: config of the policy: a chat VLM with an adapter, or one with all weights trained.
        settings: settings of the engine.
        max_requests: maximum number of concurrent replies.
        sleeps: whether it must be able to release its GPU.

    Raises:
        UsageError: the policy has trained parts that vLLM cannot be given.
        ModelUnavailable: vLLM is not installed here, or the weights cannot be loaded.
    """

    def __init__(
        self, config: PolicyConfig, settings: EngineConfig, *, max_requests: int, sleeps: bool = False
    ) -> None:
        check_policy(config)
        self._has_adapter = config.has_adapter
        import torch

        dtype = config.dtype
        if dtype == "auto":  # the trainer's: vLLM would use that of the folder
            dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        self._sleeps = sleeps and torch.cuda.is_available()  # vLLM cannot sleep on a CPU, and need not
        # its kernels support few ranks; an adapter of another rank uses those of the next larger one
        rank = next((rank for rank in _RANKS if rank >= _rank_of(config)), None)
        if rank is None:
            raise UsageError(f"vLLM takes adapters up to rank {_RANKS[-1]}", "lower --policy.lora-rank")
        options = dict(
            enable_lora=self._has_adapter,
            max_loras=KEPT_VERSIONS,
            max_cpu_loras=KEPT_VERSIONS,
            max_lora_rank=rank,
            # after banning and temperature, as the trainer computes them
            logprobs_mode="processed_logprobs",
            enable_sleep_mode=self._sleeps,
            worker_extension_cls="rlvlm.policies.vlm.vllm_worker.BucketLoader",
        )
        self._core = VllmCore(
            replace(config.named(str(weights_folder("policy"))), dtype=dtype, adapter=""),
            settings,
            max_requests=max_requests,
            max_images=config.history,
            **options,
        )
        self.dtype = self._core.dtype
        """Dtype in which it computes, such as `bfloat16`."""
        self._section = settings.section
        self._adapters: OrderedDict[int, Any] = OrderedDict()
        self._is_mixed = False
        self.num_workers = settings.tensor_parallel
        """Number of processes that hold a part of the model each."""
        self.version: int | None = None
        """Version of the newest weights; None before the first."""

    @property
    def window(self) -> int:
        """Maximum tokens of prompt and reply."""
        return self._core.window

    @property
    def is_dead(self) -> bool:
        """Whether the engine cannot answer any more."""
        return self._core.is_dead or self._is_mixed

    def sleep(self) -> None:
        """Releases the GPU: weights move to main memory, and the key-value cache is freed."""
        if self._sleeps:
            self._core.run(self._core.sleep())

    def wake(self) -> None:
        """Moves its weights back to the GPU."""
        if self._sleeps:
            self._core.run(self._core.wake())

    def holds(self, version: int) -> bool:
        """Returns whether the engine can sample with the weights of `version` now."""
        return version in self._adapters if self._has_adapter else version == self.version

    async def load_adapter(self, version: int, folder: Path) -> None:
        """Loads the adapter in `folder`, in PEFT's format, beside the earlier ones.

        Raises:
            ModelUnavailable: vLLM cannot load it.
        """
        # from 1 on, because 0 means no adapter in vLLM
        adapter = lora_request(f"version-{version}", version + 1, folder)
        try:
            await self._core.add_lora(adapter)
            self._adapters[version] = adapter
            self._adapters.move_to_end(version)
            # the previous one stays for the replies that began with it
            while len(self._adapters) > KEPT_VERSIONS:
                _, oldest = self._adapters.popitem(last=False)
                await self._core.remove_lora(oldest)
        except Exception as error:  # noqa: BLE001 - the engine raises whatever its many parts raise
            raise _not_loaded(version, error) from error
        await self._core.forget_prefixes()
        self.version = version

    async def load_buckets(self, version: int, folder: Path, buckets: Sequence[Bucket]) -> None:
        """Replaces the model's weights by those in `buckets`, as their bytes arrive in `folder`.

        Raises:
            ModelUnavailable: they are truncated, not finite, or incomplete; the model is then a mixture, which this
                engine refuses to use.
        """
        # a mixture of weights belongs to no version, and must not be sampled with
        self.version = None
        try:
            await self._core.replace_weights("load_buckets", folder=str(folder), buckets=described(buckets))
        except BaseException as error:  # a cancelled load too
            self._is_mixed = True  # vLLM cannot begin another load in the middle of one
            if not isinstance(error, Exception):
                raise
            raise _not_loaded(version, error) from error
        # keys and values computed with the previous weights
        await self._core.forget_prefixes()
        self.version = version

    async def forget(self, refused: int) -> None:
        """Stops sampling with the weights of version `refused`."""
        if adapter := self._adapters.pop(refused, None):
            await self._core.remove_lora(adapter)
        if self._has_adapter:
            self.version = next(reversed(self._adapters), None)
        elif self.version == refused:
            self.version = None

    async def sample(
        self, prompt_ids: IntArray, frame: Frames, rules: TokenRules, sampling: ReplySampling, *,
        seed: int, version: int,
    ) -> SampledReply:  # fmt: skip
        """Samples one reply, whose ids include the end-of-turn token if it was reached; it has neither text nor value.

        Args:
            prompt_ids: [P] the whole prompt, image tokens expanded.
            frame: [H, W, 3] the image, or [k, H, W, 3] of k images.
            rules: rules of the trainer's tokenizer.
            sampling: settings of sampling.
            seed: seed of this reply.
            version: version of the weights.

        Raises:
            UsageError: prompt and reply do not fit into the engine's window.
            ModelUnavailable: the engine is dead, or encodes the prompt differently from the trainer.
        """
        params = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "seed": seed,
            # log-prob of the sampled token alone
            "logprobs": 0,
            "stop_token_ids": [rules.stop_id],
        }
        written = (await self._ask(prompt_ids, frame, rules, params, version)).outputs[0]
        ids = np.array(written.token_ids, np.int64)
        if np.isin(ids, rules.banned_ids).any():
            raise ModelUnavailable("vLLM wrote a token that is none of a reply's", "report this: it must not happen")
        log_probs = [row[token].logprob for row, token in zip(written.logprobs, ids.tolist(), strict=True)]
        is_complete = bool(len(ids)) and int(ids[-1]) == rules.stop_id
        return SampledReply(answer={"ids": ids}, log_probs=np.array(log_probs, np.float32), is_complete=is_complete)

    async def read(
        self, prompt_ids: IntArray, reply_ids: IntArray, frame: Frames, rules: TokenRules, version: int
    ) -> FloatArray:
        """Returns [N] log-probs of a stored reply's tokens at temperature 1, by one request each, as in sampling.

        Raises as `sample` does.
        """

        async def log_prob(index: int) -> float:
            token = int(reply_ids[index])
            # not as log-probs of a prompt, which vLLM computes without banning and temperature
            begun = np.concatenate([prompt_ids, reply_ids[:index]])
            wanted = {"max_tokens": 1, "temperature": 1.0, "seed": 0, "logprob_token_ids": [token]}
            output = await self._ask(begun, frame, rules, wanted, version)
            return output.outputs[0].logprobs[0][token].logprob

        return np.array(await asyncio.gather(*map(log_prob, range(len(reply_ids)))), np.float32)

    async def _ask(
        self, ids: IntArray, frame: Frames, rules: TokenRules, sampling: dict[str, Any], version: int
    ) -> Any:
        """Returns the engine's output for one prompt, after checking that it was encoded as by the trainer."""
        expected = ids.tolist()
        if len(expected) + sampling["max_tokens"] > self.window:
            raise UsageError(
                f"a prompt has {len(expected):,} tokens and its reply may have {sampling['max_tokens']}; the engine's "
                f"window holds {self.window:,}",
                f"raise --{self._section}.max-tokens, or lower --policy.max-pixels or --algo.max-reply-tokens",
            )
        lora = self._adapters[version] if self._has_adapter else None
        # leaves e^-100 of a token's probability, which is 0 in float32
        bias = dict.fromkeys(rules.banned_ids, _BANNED_BIAS)
        frames = list(frame.reshape(-1, *frame.shape[-3:]))
        try:
            output = await self._core.ask(
                collapsed(expected, rules.image_id, len(frames)),
                frames,
                sampling | {"logit_bias": bias, "detokenize": False},
                lora,
            )
        except (ValueError, RuntimeError) as error:
            raise ModelUnavailable(f"vLLM did not answer a prompt: {error}", "look at the replica's log") from error
        # otherwise log-probs would silently be those of another prompt
        if list(output.prompt_token_ids) != expected:
            raise ModelUnavailable(
                f"vLLM reads a prompt of {len(expected)} tokens as {len(output.prompt_token_ids)}: it makes other "
                "visual tokens of the image than the trainer",
                "set --policy.min-pixels and --policy.max-pixels, or leave out --engine.backend vllm",
            )
        return output


def _not_loaded(version: int, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(
        f"vLLM cannot load weights of version {version}: {first_line(error)}", "look at the replica's log"
    )


def check_policy(config: PolicyConfig) -> None:
    """Raises unless every trained part of the policy can be given to vLLM.

    Raises:
        UsageError: one cannot; the message says which, and the setting to change.
    """
    if config.head != "text":
        raise UsageError("vLLM samples text, an action head picks no token", "leave out --engine.backend vllm")
    if config.train_vision:
        raise UsageError(
            "vLLM cannot be given a vision encoder that learns",
            "leave out --policy.train-vision or --engine.backend vllm",
        )
    if config.quantization != "none" and not config.has_adapter:
        raise UsageError("4-bit weights cannot learn themselves", "set --policy.learns lora")


def collapsed(ids: Sequence[int], image_id: int, num_images: int = 1) -> list[int]:
    """Returns the ids with a single visual token per image, which the engine expands to as many as needed.

    Images have equal sizes; without text between two of them, their tokens are one run.
    """
    own = max(1, list(ids).count(image_id) // num_images)
    return [
        token
        for key, run in groupby(ids)
        for token in ([key] * max(1, len(list(run)) // own) if key == image_id else run)
    ]


def _rank_of(config: PolicyConfig) -> int:
    """Returns the LoRA rank of the adapter to be sent; an adapter from a folder has its own."""
    if not config.adapter:
        return config.lora_rank
    return check_adapter(Path(config.adapter).expanduser())
