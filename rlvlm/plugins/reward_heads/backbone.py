"""Loads reward models and turns their conversations into a network's inputs, for `robometer` and `rynnvalue`.

Only safetensors are read, and no code from a model's folder is run: the networks are our classes on transformers'
Qwen3-VL, with the published weight names.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion, first_line
from rlvlm.core.foreign import read_json
from rlvlm.judges import prompts
from rlvlm.judges.config import JudgeConfig
from rlvlm.vlms.chats import Chat
from rlvlm.vlms.files import locate
from rlvlm.vlms.loading import LoadedVLM, load_weights
from rlvlm.vlms.processors import load_processor


def load_head_model(
    config: JudgeConfig, network_class: Any, *, tokens: Sequence[str], renamed: Mapping[str, str]
) -> LoadedVLM:
    """Loads the reward model that `config.model` names.

    Args:
        config: names model, revision, device and precision.
        network_class: our class; its `settings(folder, raw)` makes a `Qwen3VLConfig` of the contents of config.json.
        tokens: the model's own tokens, in the order in which its authors added them.
        renamed: regular expressions on the checkpoint's weight names, and their replacements.

    Raises:
        JudgeUnavailable: the files are missing, damaged, or another model's; says which weight.
        UnsupportedQuestion: 4-bit weights or an adapter are wanted.
    """
    if config.quantization != "none" or config.adapter:
        raise UnsupportedQuestion(
            f"backend {config.backend} takes neither 4-bit weights nor an adapter",
            "leave out --judge.quantization and --judge.adapter",
        )
    folder, revision = locate(config.model, config.revision, config.section)
    try:
        settings = network_class.settings(folder, read_json(folder / "config.json"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise JudgeUnavailable(
            f"{folder} holds no {network_class.__name__} that can be read: {first_line(error)}",
            "choose the model that the backend is named after",
        ) from error
    processor = load_processor(folder, settings, config)
    _add_tokens(processor.tokenizer, tokens, settings.get_text_config().vocab_size, folder)
    network = load_weights(
        network_class,
        folder,
        config,
        is_exact=True,
        config=settings,
        key_mapping=dict(renamed),
        **({"attn_implementation": network_class.attention} if network_class.attention else {}),
    )
    return LoadedVLM(model=network, processor=processor, revision=revision)


def _add_tokens(tokenizer: Any, tokens: Sequence[str], num_rows: int, folder: Path) -> None:
    """Adds the model's own tokens to the tokenizer if they are missing, as its authors did before training."""
    # Qwen's own tokenizer lacks them: their ids follow from the order in which they are added
    missing = [token for token in tokens if token not in tokenizer.get_vocab()]
    if missing:
        tokenizer.add_special_tokens({"additional_special_tokens": missing}, replace_extra_special_tokens=False)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    # an id beyond the embedding would be an index error on a GPU, without a reason
    if max(ids) >= num_rows:
        raise JudgeUnavailable(
            f"the tokenizer in {folder} puts {tokens[ids.index(max(ids))]} at {max(ids)}, the weights have {num_rows}",
            "put the tokenizer of the model's own repository, or of the Qwen3-VL that it was trained from, beside them",
        )


def stamp_parts(config: JudgeConfig, model: LoadedVLM) -> tuple[str, str]:
    """Returns prompt and decoding for the stamp of a judge with heads."""
    prompt = f"{config.backend}_{prompts.version(config.score)}{prompts.wording_mark(config)}"
    return prompt, f"min_pixels={config.min_pixels} max_pixels={config.max_pixels} dtype={model.dtype}"


def chat_inputs(model: LoadedVLM, chats: Sequence[Chat], *, are_counted: bool) -> dict[str, Tensor]:
    """Returns the network's inputs [B, N] for chats that end where the model's turn would begin.

    If `are_counted`, Qwen's template writes `Image 1:` and so on before each image. See `LoadedVLM.inputs`.
    """
    # heads read tokens in the user's turn: a prompt for the model's turn would only be noise
    render = model.processor.apply_chat_template
    return model.inputs([render(chat, add_generation_prompt=False, add_vision_id=are_counted) for chat in chats], chats)


def rows_where(hidden: Tensor, ids: Tensor, token_id: int) -> list[Tensor]:
    """Returns [n, D] states of `hidden` [B, N, D] where `ids` [B, N] equals `token_id`, a tensor per sequence.

    Raises:
        ValueError: a sequence has no such token.
    """
    rows = [hidden[row, ids[row] == token_id] for row in range(len(ids))]
    if not all(map(len, rows)):
        raise ValueError("a conversation lost the tokens at which the model answers; see min_pixels and max_pixels")
    return rows
