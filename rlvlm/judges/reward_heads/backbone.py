"""Bringing a reward model into memory, and turning its conversations into a network's inputs. `robometer`, `rynnvalue`.

Only safetensors are read and no code of a model's folder is run: the networks are classes of ours on transformers'
Qwen3-VL, with the published weight names.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import Qwen3VLConfig

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion, first_line
from rlvlm.judges import prompts
from rlvlm.judges.config import JudgeConfig
from rlvlm.vlms.chats import Chat, images_of
from rlvlm.vlms.devices import pick_device
from rlvlm.vlms.files import locate
from rlvlm.vlms.loading import check_weights, load_weights
from rlvlm.vlms.processors import load_processor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadModel:
    """A reward model ready to look."""

    network: Any
    """In eval mode, on its device."""
    processor: Any
    """Of `rlvlm.vlms.processors`; knows the model's own tokens."""
    revision: str
    """Hub commit, or a digest of a local folder."""

    @property
    def dtype(self) -> str:
        """Precision of the weights, e.g. `float32`."""
        return str(self.network.dtype).removeprefix("torch.")

    def token_id(self, token: str) -> int:
        """The id of one of the model's own tokens."""
        return self.processor.tokenizer.convert_tokens_to_ids(token)

    def inputs(self, chats: Sequence[Chat], *, are_counted: bool) -> dict[str, Tensor]:
        """The network's inputs [B, N], left-padded, on its device; the chats end where the model's turn would begin.

        Args:
            chats: with images.
            are_counted: whether `Image 1:` and so on stands before each image, as Qwen's template can write.
        """
        texts = [
            self.processor.apply_chat_template(chat, add_generation_prompt=False, add_vision_id=are_counted)
            for chat in chats
        ]
        inputs = self.processor(texts, [images_of(chat) for chat in chats])
        network = self.network
        return {
            name: tensor.to(network.device, network.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in inputs.items()
        }


def load_head_model(
    config: JudgeConfig, network_class: Any, *, tokens: Sequence[str], renamed: Mapping[str, str]
) -> HeadModel:
    """The reward model that `config.model` names.

    Args:
        config: names model, revision, device and precision.
        network_class: of ours; has `settings(folder, raw)`, which makes a `Qwen3VLConfig` of what config.json says.
        tokens: the model's own tokens, in the order in which its authors added them.
        renamed: regular expressions on the checkpoint's weight names, and what they become here.

    Raises:
        JudgeUnavailable: the files are missing, broken, or another model's; says which weight.
        UnsupportedQuestion: 4-bit weights are wanted.
    """
    if config.quantization != "none" or config.adapter:
        raise UnsupportedQuestion(
            f"backend {config.backend} takes neither 4-bit weights nor an adapter",
            "leave out --judge.quantization and --judge.adapter",
        )
    folder, revision = locate(config.model, config.revision, config.section)
    settings = _settings(folder, network_class)
    check_weights(folder)
    device = pick_device(config.device, config.section)
    processor = load_processor(folder, settings, config)
    _add_tokens(processor.tokenizer, tokens, settings.get_text_config().vocab_size, folder)
    network = load_weights(
        network_class,
        folder,
        config,
        device,
        is_exact=True,
        config=settings,
        attn_implementation=network_class.attention or (None if config.attention == "auto" else config.attention),
        key_mapping=dict(renamed),
    )
    return HeadModel(network=network, processor=processor, revision=revision)


def _settings(folder: Path, network_class: Any) -> Qwen3VLConfig:
    try:
        raw = json.loads((folder / "config.json").read_text())
        return network_class.settings(folder, raw)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise JudgeUnavailable(
            f"{folder} holds no {network_class.__name__} that can be read: {first_line(error)}",
            "choose the model that the backend is named after",
        ) from error


def _add_tokens(tokenizer: Any, tokens: Sequence[str], num_rows: int, folder: Path) -> None:
    """Gives the tokenizer the model's own tokens where it does not have them, as its authors did before training."""
    missing = [token for token in tokens if token not in tokenizer.get_vocab()]
    if missing:
        tokenizer.add_special_tokens({"additional_special_tokens": missing}, replace_extra_special_tokens=False)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    if max(ids) >= num_rows:
        raise JudgeUnavailable(
            f"the tokenizer in {folder} puts {tokens[ids.index(max(ids))]} at {max(ids)}, the weights have {num_rows}",
            "put the tokenizer of the model's own repository, or of the Qwen3-VL that it was trained from, beside them",
        )


def stamp_parts(config: JudgeConfig, model: HeadModel) -> tuple[str, str]:
    """Prompt and decoding, as they stand in the stamp of a judge with heads."""
    prompt = f"{config.backend}_{prompts.version(config.score)}{prompts.wording_mark(config)}"
    return prompt, f"min_pixels={config.min_pixels} max_pixels={config.max_pixels} dtype={model.dtype}"


def rows_where(hidden: Tensor, ids: Tensor, token_id: int) -> list[Tensor]:
    """Hidden states [n, D] at each sequence's places of `token_id`, of `hidden` [B, N, D] and `ids` [B, N].

    Raises:
        ValueError: a sequence has none.
    """
    rows = [hidden[row, ids[row] == token_id] for row in range(len(ids))]
    if not all(map(len, rows)):
        raise ValueError("a conversation lost the tokens at which the model answers; see min_pixels and max_pixels")
    return rows
