"""A few queries of every session kept with their images while the run still has them: rows of `judge_panel.jsonl`."""

import base64
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core.metrics import ENV_STEPS
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.preferences.records import QueryRecord

PER_SESSION = 4
"""Queries kept of each session, evenly spread over it."""


def sample_rows(records: Sequence[QueryRecord], draw: Callable[[FloatArray], Frames]) -> list[dict[str, Any]]:
    """What the judge's page needs of a session's sampled queries; which are taken depends on their order alone.

    Args:
        records: the queries of one session.
        draw: makes images [N, H, W, 3] of snapshots [N, S].
    """
    rows = []
    for place in sorted(set(np.linspace(0, len(records) - 1, PER_SESSION).astype(int))) if records else []:
        record, verdict = records[place], records[place].verdict
        # Where segments are longer than a step, their last image stands for them.
        left, right = draw(np.stack([side.snapshots[-1] for side in (record.pair.left, record.pair.right)]))
        rows.append(
            {
                ENV_STEPS: record.env_step,
                "session": record.session,
                "index": record.index,
                "left": encode_png(left),
                "right": encode_png(right),
                "progress": [round(float(record.progress_left), 4), round(float(record.progress_right), 4)],
                "status": str(verdict.status),
                "label": None if verdict.label is None else str(verdict.label),
                "probabilities": None
                if verdict.probabilities is None
                else [round(p, 4) for p in verdict.probabilities],
                "text": verdict.text,
                "correct": record.correct,
                "judge": verdict.stamp.judge,
                "prompt": verdict.stamp.prompt,
            }
        )
    return rows


def encode_png(image: NDArray[np.uint8]) -> str:
    """An image [H, W, 3] as base64 of a PNG."""
    data = BytesIO()
    Image.fromarray(image).save(data, format="png", optimize=True)
    return base64.b64encode(data.getvalue()).decode()
