"""The three kinds of runs, after those of envs, one file each: everything that differs between steps, turns and chunks.

Each has a `RunConfig` with its sections, which is data, and a `Kind`, which says what follows from it: checks,
shortening, placement, display, its algorithm and its players. Torch and RLlib are imported where these are built, so
that `rlvlm --help` starts at once.
"""

from collections.abc import Mapping
from typing import Any

from rlvlm.runs.settings.chunks_run import CHUNKS
from rlvlm.runs.settings.chunks_run import ChunksRun as ChunksRun
from rlvlm.runs.settings.config import Kind
from rlvlm.runs.settings.steps_run import STEPS
from rlvlm.runs.settings.steps_run import StepsRun as StepsRun
from rlvlm.runs.settings.turns_run import TURNS
from rlvlm.runs.settings.turns_run import TurnsRun as TurnsRun

KINDS: Mapping[str, Kind[Any]] = {kind.name: kind for kind in (STEPS, TURNS, CHUNKS)}
"""Kinds by name, which comes first in `config.yaml`."""
