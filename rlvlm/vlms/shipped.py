"""Where the weights of the small models lie that ship with rlvlm. Importing it loads nothing."""

from pathlib import Path

import rlvlm


def weights_folder(model: str = "judge") -> Path:
    """The folder of a shipped model: config, tokenizer, image processor and safetensors, as transformers saves them.

    Args:
        model: its folder in `rlvlm/pocket`.
    """
    return Path(rlvlm.__file__).parent / "pocket" / model / "weights"


def shipped_folder(model: str) -> Path | None:
    """The folder of the shipped model of that name; None where none is called so."""
    is_name = bool(model) and model == Path(model).name and model not in (".", "..")
    folder = weights_folder(model) if is_name else None
    return folder if folder is not None and folder.is_dir() else None
