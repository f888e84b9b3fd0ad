"""The two installs: `pip install rlvlm` is the judge's kit, `pip install "rlvlm[train]"` trains and serves too.

The kit has neither torch nor Ray nor a simulator. What needs one says so before it does anything else.
"""

import importlib.util

from rlvlm.core.errors import MachineError

TRAIN_FIX = 'pip install "rlvlm[train]"'
_TRAIN = (
    "torch ray transformers tokenizers huggingface_hub peft accelerate bitsandbytes qwen_vl_utils metaworld mujoco "
    "minigrid tensorboard wandb google fastapi"
).split()
"""Modules of the train extra, and of packages that come with it, that are imported; `google` is protobuf."""


def is_missing(module: str) -> bool:
    """Returns whether a module cannot be found; it is not imported, as torch takes seconds."""
    return importlib.util.find_spec(module) is None


def is_kit() -> bool:
    """Returns whether this is the judge's kit alone; with half of the train extra it is a broken install."""
    return is_missing("torch") and is_missing("ray")


def check_train(what: str) -> None:
    """Checks that the train extra is installed.

    Args:
        what: what needs it, for the message: `rlvlm run`.

    Raises:
        MachineError: it is not.
    """
    if missing := [name for name in ("torch", "ray") if is_missing(name)]:
        raise MachineError(f"{what} needs {' and '.join(missing)}, and this install is the judge's kit", TRAIN_FIX)


def missing_train(error: ImportError) -> MachineError | None:
    """Returns what a user of the judge's kit is told about a module of the train extra; None for any other error."""
    module = (error.name or "").partition(".")[0]
    if not (isinstance(error, ModuleNotFoundError) and module in _TRAIN and is_kit()):
        return None
    return MachineError(f"this needs the package {module}, and this install is the judge's kit", TRAIN_FIX)
