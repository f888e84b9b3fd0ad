"""Judges that need another Python than everybody else: which one, and whether it is there. Used by `deployments`."""

from pathlib import Path
from typing import Any

from rlvlm.errors import JudgeUnavailable, UsageError
from rlvlm.judges.config import JudgeConfig
from rlvlm.serving.config import PlacementConfig


def judge_environment(judge: JudgeConfig) -> dict[str, Any]:
    """The `runtime_env` of the judge's replicas; empty where they run in everybody's environment.

    Ray starts the replica's process with this interpreter. It needs the same versions of Python and Ray, and rlvlm.
    """
    python = _python(judge)
    return {"py_executable": str(python)} if python else {}


def check_environment(judge: JudgeConfig, placement: PlacementConfig) -> None:
    """Passes when the judge's environment is on this machine and it has a GPU for each of its parts.

    Raises:
        JudgeUnavailable: the interpreter is missing; Ray would wait for it without a word.
        UsageError: the model is to be spread over more GPUs than its replica gets.
    """
    python = _python(judge)
    if python and not python.is_file():
        raise JudgeUnavailable(
            f"judge.backend {judge.backend} needs an environment of its own; {python} is missing",
            "build it with make vllm, or name another with --judge.engine.python",
        )
    parts = judge.engine.tensor_parallel
    if parts > 1 and placement.num_gpus < parts:
        raise UsageError(
            f"judge.engine.tensor_parallel {parts} needs {parts} GPUs a replica, got {placement.num_gpus:g}",
            f"add --serve.num-gpus {parts}",
        )


def _python(judge: JudgeConfig) -> Path | None:
    """The interpreter that the judge's backend needs; None where any will do."""
    wanted = judge.python
    return Path(wanted).expanduser().absolute() if wanted else None  # not resolved: a venv's python is a link
