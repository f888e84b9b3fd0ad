"""A small Qwen3-VL that ships with rlvlm, and everything that made it. The backend `pocket` loads its folder.

Light to import: the model, the tokenizer and the training load nothing until they are asked for.
"""

from pathlib import Path


def weights_folder() -> Path:
    """Returns the folder of the shipped weights: config, tokenizer, picture processor and safetensors of a Qwen3-VL."""
    return Path(__file__).parent / "weights"
