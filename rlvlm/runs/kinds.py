"""The three kinds of run, after those of envs, one file each: everything that differs between steps, turns and chunks.

Each is a `RunConfig` with its sections, and implements its checks, shortening, placement and display; `RunConfig`
documents the methods. `build` turns a kind's config into torch and RLlib objects. The files of kinds import neither, so
that `rlvlm --help` starts at once.
"""

from rlvlm.runs.answers_run import AnswersRun as AnswersRun
from rlvlm.runs.chunks_run import ChunksRun as ChunksRun
from rlvlm.runs.config import RunConfig
from rlvlm.runs.steps_run import StepsRun as StepsRun
from rlvlm.runs.turns_run import TurnsRun as TurnsRun

KINDS: dict[str, type[RunConfig]] = {made.kind: made for made in (StepsRun, TurnsRun, ChunksRun)}
"""Classes by `Task.kind`, which comes first in `config.yaml`."""
