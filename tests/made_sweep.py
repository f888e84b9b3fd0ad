"""A sweep of two sources, and the success rates of their runs, made by hand."""

from collections.abc import Mapping, Sequence

from rlvlm.sweeps.config import SourceConfig, SweepConfig

Curves = Mapping[str, Sequence[Sequence[float]]]
SWEEP = SweepConfig(
    title="a <made> sweep",
    tasks=("drawer_open", "rlvlm.testing:TINY"),
    seeds=(0, 1, 2),
    settings={"steps": 4_000, "eval.every_steps": 1_000},
    sources={
        "good": SourceConfig(title="good & dear", settings={"reward.teacher": "judge"}),
        "bad": SourceConfig(title="bad", settings={"reward.teacher": "random"}),
    },
)
GOOD = ((0, 0.5, 1, 1), (0, 1, 1, 1), (0, 0, 0.7, 1))
BAD = ((0, 0, 0, 0), (0, 0.2, 0, 0), (0, 0, 0.1, 0))
