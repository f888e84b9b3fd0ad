"""A random Llama of two layers as a GGUF file, with one kind of block per kind that is read."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

WIDTH, INNER, HEADS, KEY_HEADS, LAYERS = 64, 96, 4, 2, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "the"]
MERGES = ["h e", "t he"]
F32, Q4_1, Q8_0 = 0, 3, 8
_TEXT, _ARRAY, _U32, _I32, _F32 = 8, 9, 4, 5, 6


def write_tiny_gguf(file: Path, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Writes it, and gives its tensors as they can be read back."""
    rng = np.random.default_rng(seed)
    about = [
        ("general.architecture", _TEXT, "llama"),
        ("llama.block_count", _U32, LAYERS),
        ("llama.context_length", _U32, 512),
        ("llama.embedding_length", _U32, WIDTH),
        ("llama.feed_forward_length", _U32, INNER),
        ("llama.attention.head_count", _U32, HEADS),
        ("llama.attention.head_count_kv", _U32, KEY_HEADS),
        ("llama.rope.freq_base", _F32, 10_000.0),
        ("llama.attention.layer_norm_rms_epsilon", _F32, 1e-5),
        ("tokenizer.ggml.tokens", _ARRAY, (_TEXT, TOKENS)),
        ("tokenizer.ggml.token_type", _ARRAY, (_I32, [3, 3, 3] + [1] * (len(TOKENS) - 3))),
        ("tokenizer.ggml.merges", _ARRAY, (_TEXT, MERGES)),
    ]
    shapes = {"token_embd": ((len(TOKENS), WIDTH), Q8_0), "output_norm": ((WIDTH,), F32)}
    for layer in range(LAYERS):
        keys = KEY_HEADS * WIDTH // HEADS
        own = {
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (keys, WIDTH),
            "attn_v": (keys, WIDTH),
            "attn_output": (WIDTH, WIDTH),
        }
        own |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
        shapes |= {f"blk.{layer}.{name}": (shape, Q4_1) for name, shape in own.items()}
        shapes |= {f"blk.{layer}.{name}": ((WIDTH,), F32) for name in ("attn_norm", "ffn_norm")}
    infos, data, tensors = b"", b"", {}
    for name, (shape, kind) in shapes.items():
        tensors[f"{name}.weight"], packed = _packed(rng.normal(0, 0.1, shape).astype(np.float32), kind)
        infos += _string(f"{name}.weight") + struct.pack("<I", len(shape))
        infos += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", kind, len(data))
        data += packed + bytes(-len(packed) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(about))
    head += b"".join(_string(name) + struct.pack("<I", kind) + _value(kind, value) for name, kind, value in about)
    head += infos
    file.write_bytes(head + bytes(-len(head) % 32) + data)
    return tensors


def _packed(values: NDArray[np.float32], kind: int) -> tuple[NDArray[np.float32], bytes]:
    if kind == F32:
        return values, values.tobytes()
    blocks = values.reshape(-1, 32)
    if kind == Q8_0:
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype("<f2")
        whole = np.clip(np.rint(blocks / scale.astype(np.float32)), -127, 127).astype(np.int8)
        packed = np.concatenate([scale.view(np.uint8), whole.view(np.uint8)], axis=1)
        return (scale.astype(np.float32) * whole).reshape(values.shape), packed.tobytes()
    least = blocks.min(1, keepdims=True).astype("<f2")
    scale = ((blocks.max(1, keepdims=True) - least) / 15).astype("<f2")
    whole = np.clip(np.rint((blocks - least) / scale.astype(np.float32)), 0, 15).astype(np.uint8)
    packed = np.concatenate([scale.view(np.uint8), least.view(np.uint8), whole[:, :16] | whole[:, 16:] << 4], axis=1)
    return (scale.astype(np.float32) * whole + least.astype(np.float32)).reshape(values.shape), packed.tobytes()


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(kind: int, value: Any) -> bytes:
    if kind == _TEXT:
        return _string(value)
    if kind == _ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    return struct.pack({_U32: "<I", _I32: "<i", _F32: "<f"}[kind], value)
