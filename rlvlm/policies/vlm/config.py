"""Which chat VLM acts, how, and what of it learns; imports nothing heavy so that the command line starts at once."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

from rlvlm.core.checks import check_least
from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.foreign import read_json
from rlvlm.core.plugins import is_reference
from rlvlm.policies.own import check_head
from rlvlm.vlms.config import VLMConfig

FAMILIES = {
    "qwen2_vl": "Qwen2-VL", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL", "llava": "LLaVA-1.5",
    "llava_next": "LLaVA-NeXT", "internvl": "InternVL 3 (-hf)", "gemma3": "Gemma 3", "idefics3": "SmolVLM",
    "smolvlm": "SmolVLM2",
}  # fmt: skip
"""Chat VLMs whose log-probs, taken apart as `backbone` does, are those of their own forward pass: by `model_type`."""

HEADS = ("text", "actions")
"""How a chat VLM may answer."""
OWN_SETTINGS = frozenset({"head", "settings", "device", "seed", "history", "cache_mib"})
"""Settings that a network of the user's own has, too."""
HEAD_OF_ACTS = {"text": "text", "head": "actions"}
"""`policy.head` by `policy.acts`, its name in an earlier 0.2."""
LANGUAGE_LAYERS = r".*(language|text)_model.*_proj"
"""The linear layers of the language model's blocks, in every family: q, k, v, o, gate, up, down."""
BUCKET_MIB = 256
"""Size of a bucket of weights, MiB, unless a setting says otherwise; see `policies.buckets`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig(VLMConfig):
    """A chat VLM as a policy."""

    section: ClassVar[str] = "policy"
    """Where its options stand on the command line."""

    model: str = ""
    """Hub name or local folder of a Qwen-VL, LLaVA, InternVL 3, Gemma 3 or SmolVLM; empty for the pocket policy."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: float32 on a CPU and wherever all weights learn, for bfloat16 rounds most of Adam's steps away; bfloat16 on
    a GPU beside an adapter, which is float32 itself."""
    head: str = "text"
    """How it answers. text: the action is read in the reply; actions: a categorical head picks it and nothing is
    written; or a network of your own in place of a chat VLM as `module:NAME`, a class or function that is called with
    the env and `settings`."""
    settings: dict[str, str] = field(default_factory=dict)
    """Settings of a network of your own: names and values by turns, e.g. `--policy.settings width 64`."""
    pooling: Literal["mean", "last"] = "last"
    """Input of an action head: the mean over all tokens of the prompt, or its last token."""
    head_width: int = 256
    """Hidden units of the value head and of the action head."""
    learns: Literal["auto", "all", "lora"] = "auto"
    """all: every weight of the language model; lora: an adapter beside it; auto: all for the pocket policy, lora for
    any other model."""
    lora_rank: int = 32
    """Inner size of a new adapter, where one learns and `adapter` names none, >= 1."""
    lora_alpha: float = 64.0
    """A new adapter's part is scaled by lora_alpha / lora_rank."""
    lora_targets: str = LANGUAGE_LAYERS
    """Regular expression on the full names of the layers that a new adapter is put beside."""
    train_vision: bool = False
    """Whether the vision encoder learns too. It then looks again at every image of every batch; frozen, it looks once
    and its features are cached."""
    new_words: tuple[str, ...] = ()
    """Words and sentences that become one token each, whose vectors begin as the mean of what they were before. Prompts
    and replies that say the same over and over are then read and written several times as fast. Refused where an
    adapter learns: the vectors belong to the model, which then stays as it is."""
    conditioned: bool = False
    """Whether the policy is asked for what is better than expected, as one that has learned with `sft.weighting
    condition` has to be; see `policies.advantage_prompt`."""
    history: int = 1
    """Images in a prompt, >= 1: that of the turn and, before it, those of the turns before it, the oldest first. At an
    episode's start the first image stands for those that there are not yet."""
    cache_mib: int = 1_024
    """Room for cached features of images, MiB."""
    recompute: bool | None = None
    """Gradient checkpointing: compute every block of the language model and the vision encoder a second time in the
    update, and the log-probs of replies in slices, to keep less in memory. None: from 500 million parameters on."""

    def __post_init__(self) -> None:
        VLMConfig.__post_init__(self)
        check_least(self, "policy", 1, "head_width", "cache_mib", "history")
        check_head(self, HEADS)
        if self.lora_rank < 1 or self.lora_alpha <= 0:
            raise ValueError(
                f"need policy.lora_rank >= 1 and lora_alpha > 0, got {self.lora_rank} and {self.lora_alpha}"
            )
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
        """This policy in a run with `seed`: what is drawn of it, heads and a new adapter, is another in each run."""
        return replace(self, seed=self.seed + seed)

    def named(self, pocket: str) -> Self:
        """This policy with its weights named, the folder `pocket` where none are; what learns stays what it was."""
        return replace(self, model=self.model or pocket, learns="lora" if self.has_adapter else "all")

    @property
    def is_own(self) -> bool:
        """Whether a network of the user's own answers."""
        return is_reference(self.head)

    @property
    def loading(self) -> Self:
        """How its weights are held and computed."""
        return self

    @property
    def smaller(self) -> str:
        """The setting with which it takes less memory."""
        return "--policy.quantization nf4" if self.has_adapter else "--policy.learns lora"

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter learns, and not the model's own weights."""
        return bool(self.adapter) or self.learns == "lora" or (self.learns == "auto" and bool(self.model))


def check_family(folder: Path) -> None:
    """Raises unless the model in `folder` belongs to a family that can be trained; reads its `config.json` alone.

    Raises:
        ModelUnavailable: it belongs to another, whose log-probs have not been verified.
    """
    try:
        found = read_json(folder / "config.json")["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # what loads it says what is wrong with the file
    if found not in FAMILIES:
        raise ModelUnavailable(
            f"{folder} holds a {found} model, which cannot be trained here as a policy",
            f"choose a {', '.join(FAMILIES.values())}; as a judge any chat VLM of transformers will do",
        )
