"""Settings of a chat VLM as policy; imports nothing heavy so that the command line starts at once."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

from rlvlm.core.checks import PositiveFloat, PositiveInt
from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.foreign import read_json
from rlvlm.core.leads import CodeRef, ModelName, OwnSetting
from rlvlm.core.references import is_reference
from rlvlm.policies.own import check_head
from rlvlm.vlms.config import VLMConfig

FAMILIES = {
    "qwen2_vl": "Qwen2-VL", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL", "llava": "LLaVA-1.5",
    "llava_next": "LLaVA-NeXT", "internvl": "InternVL 3 (-hf)", "gemma3": "Gemma 3", "idefics3": "SmolVLM",
    "smolvlm": "SmolVLM2",
}  # fmt: skip
"""Families, by `model_type`, whose log-probs through `backbone` equal those of their own forward pass."""

HEADS = ("text", "actions")
"""Heads of a chat VLM."""
OWN_SETTINGS = frozenset({"head", "settings", "device", "seed", "history", "cache_mib"})
"""Settings that also apply to a network of the user's own."""
HEAD_OF_ACTS = {"text": "text", "head": "actions"}
"""`policy.head` by `policy.acts`, its name in an earlier 0.2."""
LANGUAGE_LAYERS = r".*(language|text)_model.*_proj"
"""Linear layers of the language model's blocks, in every family: q, k, v, o, gate, up, down."""
BUCKET_MIB = 256
"""Default size of a bucket of weights, MiB; see `policies.buckets`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig(VLMConfig):
    """Settings of a chat VLM as a policy."""

    section: ClassVar[str] = "policy"
    """Prefix of these fields on the command line."""

    model: ModelName = ""
    """Hub name or local folder of a Qwen-VL, LLaVA, InternVL 3, Gemma 3 or SmolVLM; empty for the pocket policy."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the weights. auto: float32 on a CPU and if all weights are trained, because bfloat16 loses most of
    Adam's steps to rounding; bfloat16 on a GPU with an adapter, which is float32 itself."""
    head: CodeRef = "text"
    """Form of its answers. text: the action is read from the reply; actions: a categorical head picks it and no text is
    generated; or a network of your own instead of a chat VLM as `module:NAME`, a class or function that is called with
    the env and `settings`."""
    settings: dict[str, OwnSetting] = field(default_factory=dict)
    """Settings of a network of your own, names and values alternating, e.g. `--policy.settings width 64`."""
    head_width: PositiveInt = 256
    """Hidden units of the value head and of the action head."""
    learns: Literal["auto", "all", "lora"] = "auto"
    """Trained weights. all: every weight of the language model; lora: an adapter; auto: all for the pocket policy, lora
    for any other model."""
    lora_rank: PositiveInt = 32
    """Inner size of a new adapter, if one is trained and `adapter` is empty, >= 1."""
    lora_alpha: PositiveFloat = 64.0
    """Scale of a new adapter's output, which is multiplied by lora_alpha / lora_rank."""
    lora_targets: str = LANGUAGE_LAYERS
    """Regular expression on the full names of the layers that get a new adapter."""
    train_vision: bool = False
    """Whether the vision encoder is trained too. It then encodes every image of every batch; frozen, it encodes each
    once and the features are cached."""
    new_words: tuple[str, ...] = ()
    """Words and sentences that become one token each, whose vectors begin as the mean of their former tokens'. Prompts
    and replies that repeat them are then read and written several times as fast. Refused if an adapter is trained: the
    vectors belong to the model, which then stays unchanged."""
    conditioned: bool = False
    """Whether the prompt asks for an answer better than expected, as needed after training with `sft.weighting
    condition`; see `policies.advantage_prompt`."""
    history: PositiveInt = 1
    """Number of images in a prompt, >= 1: the present one after those of previous turns, the oldest first. At an
    episode's start the first image is repeated."""
    cache_mib: PositiveInt = 1_024
    """Memory for cached features of images, MiB."""
    recompute: bool | None = None
    """Whether to use gradient checkpointing, which computes every block of the language model and the vision encoder a
    second time in the update, and log-probs of replies in slices, to save memory. None: from 500 million parameters
    on."""

    def __post_init__(self) -> None:
        VLMConfig.__post_init__(self)
        check_head(self, HEADS)
        if self.new_words and self.has_adapter:
            raise ValueError(
                f"policy.new_words has no effect where an adapter learns, got {len(self.new_words)} of them: set "
                "policy.learns all, or leave none with --policy.new-words and no words"
            )
        try:
            re.compile(self.lora_targets)
        except re.error as error:
            raise ValueError(
                f"policy.lora_targets must be a regular expression, got {self.lora_targets!r}: {error}"
            ) from error

    def in_run(self, seed: int) -> Self:
        """Returns this policy for a run with `seed`, from which heads and a new adapter are drawn."""
        return replace(self, seed=self.seed + seed)

    def named(self, pocket: str) -> Self:
        """Returns this policy with its weights named, the folder `pocket` by default; trained weights stay the same."""
        return replace(self, model=self.model or pocket, learns="lora" if self.has_adapter else "all")

    @property
    def is_own(self) -> bool:
        """Whether the policy is a network of the user's own."""
        return self.head not in HEADS and is_reference(self.head, "policy.head")

    @property
    def loading(self) -> Self:
        """Loading settings of its weights."""
        return self

    @property
    def smaller(self) -> str:
        """Setting that reduces its memory."""
        return "--policy.quantization nf4" if self.has_adapter else "--policy.learns lora"

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained, rather than the model's own weights."""
        return bool(self.adapter) or self.learns == "lora" or (self.learns == "auto" and bool(self.model))


def check_family(folder: Path) -> None:
    """Raises unless the model in `folder` belongs to a trainable family; only reads its `config.json`.

    Raises:
        ModelUnavailable: it belongs to another family, whose log-probs have not been verified.
    """
    try:
        found = read_json(folder / "config.json")["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # its loader reports errors in the file
    if found not in FAMILIES:
        raise ModelUnavailable(
            f"{folder} holds a {found} model, which cannot be trained here as a policy",
            f"choose a {', '.join(FAMILIES.values())}; as a judge any chat VLM of transformers will do",
        )
