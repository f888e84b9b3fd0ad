"""The small models that ship with rlvlm: their folders, and the tasks that each knows. Importing it loads nothing.

Cards and figures lie beside the weights. `pocket_models` in the repository made them.
"""

import json
from pathlib import Path

VIDEO_TASKS = (
    *(f"libero_spatial/{number}" for number in range(10)),
    *(f"libero_object/{number}" for number in range(10)),
    *(f"libero_goal/{number}" for number in (1, 2, 4, 5, 6, 8, 9)),
)
"""Tasks on which the video judge was trained: its answers about anything else mean nothing."""
VIDEO_NUM_FRAMES, VIDEO_FRAME_PX = 2, 144
"""Best input of the video judge: the first and the last frame, mirrored as LIBERO draws them, with this side length."""


def weights_folder(model: str = "judge") -> Path:
    """Returns the folder of a shipped model, saved by transformers: config, tokenizer, image processor, safetensors.

    Args:
        model: judge, scorer, video or policy.
    """
    return Path(__file__).parent / model / "weights"


def shipped_folder(model: str) -> Path | None:
    """Returns the folder of the shipped model of that name; None if there is none."""
    is_name = bool(model) and model == Path(model).name and model not in (".", "..")
    folder = weights_folder(model) if is_name else None
    return folder if folder is not None and folder.is_dir() else None


TURN_TASKS = ("number_line", "empty_random_6x6", "doorkey_6x6")
"""Tasks on whose turns the shipped scorer was trained."""


def known_tasks(model: str = "judge") -> tuple[str, ...]:
    """Returns the tasks of a run that a shipped judge was trained and evaluated on, including suites of them.

    Args:
        model: judge (pairs of images), scorer (clips) or video; anything else knows none.
    """
    if model == "judge":
        rows = json.loads((Path(__file__).parent / "judge" / "evaluation.json").read_bytes())
        return tuple(sorted({row["task"] for row in rows}))
    return {"scorer": ("push_block",), "video": (*VIDEO_TASKS, "libero_spatial", "libero_object")}.get(model, ())
