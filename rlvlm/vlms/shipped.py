"""Where the weights of the small models lie that ship with rlvlm. Importing it loads nothing."""

from pathlib import Path

import rlvlm


def weights_folder(model: str = "judge") -> Path:
    """The folder of a shipped model: config, tokenizer, image processor and safetensors, as transformers saves them.

    Args:
        model: its folder in `rlvlm/pocket`.
    """
    return Path(rlvlm.__file__).parent / "pocket" / model / "weights"
