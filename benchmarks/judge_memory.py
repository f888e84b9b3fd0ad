"""GPU memory of one judge, and the share of the card to ask for: `python benchmarks/judge_memory.py --judge.model ...`.

Loads the judge, asks full batches of full-size images in the way it will be asked, and prints what torch reserved at
most, after loading and at work, with the smallest `--serve.num-gpus` that holds it. Needs a GPU.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import tyro

from rlvlm.core.judging import Query
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.serving.replica import measured

MARGIN = 0.05
"""Share of the GPU's memory for the CUDA context and what fragments."""


@dataclass(frozen=True, kw_only=True)
class Config:
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    batches: int = 3
    """Full batches asked."""
    out: Path | None = None


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    if not torch.cuda.is_available():
        sys.exit("judge_memory needs a GPU; torch sees none here")
    judge = build_judge(replace(config.judge, device="cuda"))
    loaded, _ = memory()
    frames = np.random.default_rng(0).integers(
        0, 256, (config.judge.batch_size, 2, 1, config.judge.image_px, config.judge.image_px, 3), np.uint8
    )
    queries = [Query(goal="open the drawer", left=left, right=right) for left, right in frames]
    for _ in range(config.batches):
        judge.compare(queries)
    busy, card = memory()
    report = {
        "judge": judge.stamp.judge,
        "decoding": judge.stamp.decoding,
        "batch_size": config.judge.batch_size,
        "card": torch.cuda.get_device_name(0),
        "loaded_gib": round(loaded / 2**30, 2),
        "busy_gib": round(busy / 2**30, 2),
        "card_gib": round(card / 2**30, 2),
        "num_gpus": share(busy, card),
    }
    print(json.dumps(report, indent=2))
    if config.out:
        config.out.write_text(json.dumps(report, indent=2) + "\n")


def memory() -> tuple[int, int]:
    """The most that torch has reserved so far, and the card's, in bytes."""
    found = measured("cuda")
    assert found is not None
    return found


def share(busy: int, card: int) -> float:
    """The smallest share in steps of 0.05 that holds the peak and the margin."""
    return min(1.0, float(np.ceil((busy / card + MARGIN) * 20) / 20))


if __name__ == "__main__":
    main()
