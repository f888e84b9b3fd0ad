"""`rlvlm export DIR --out NEW`: writes a run's policy in the layout of the model that it was made from."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.core.console.arguments import parse
from rlvlm.core.console.tables import plain_console
from rlvlm.core.disk import make_output_folder, replace_folder
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.foreign import visible
from rlvlm.runs.files.folder import RunFolder, check_trust, choose_checkpoint, find_folder


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Write the policy of a run as other projects load it: LeRobot, transformers and PEFT, OpenVLA-OFT."""

    path: tyro.conf.Positional[Path]
    """The run's folder, for its best policy; or a checkpoint in it."""
    out: Path
    """Folder to write; new or empty."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""


def command(words: Sequence[str], prog: str) -> int:
    """Runs `export DIR --out NEW`: writes weights, settings and a README that says where they come from."""
    arguments = parse(ExportArguments, words, prog)
    out: Path = arguments.out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already, and not empty", "name a new folder with --out")
    check_trust([arguments.path], trust=arguments.trust)
    folder = find_folder(arguments.path)
    console = plain_console(soft_wrap=True)
    checkpoint = choose_checkpoint(folder, arguments.path, console.print)
    from rlvlm.runs.in_python import StepPolicy, load_policy  # torch, after what can be said without it

    policy = load_policy(checkpoint.path, trust=arguments.trust)
    if isinstance(policy, StepPolicy):
        raise UsageError(
            f"{folder.path} trained a network on an env's own numbers, and other projects have no layout for it",
            "load it with rlvlm.load_policy",
        )
    make_output_folder(out.parent)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        layout = policy.model.export(partial)
        (partial / "README.md").write_text(_readme(folder, checkpoint.step, layout))
        replace_folder(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    console.print(f"the policy after {checkpoint.step:,} steps is in {out}; its layout is {layout}")
    return EXIT_DONE


def _readme(folder: RunFolder, step: int, layout: str) -> str:
    """Returns the text of the README: the run, its checkpoint, its software and its figures."""
    config, about, figures = folder.config(), folder.environment(), folder.summary()
    versions = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    began = config.large_policy
    rows = {
        "task": config.task,
        "command": f"`{folder.command()}`",
        "reward": config.reward_name,
        "env steps": f"{step:,}",
        "began as": " ".join(filter(None, (began.model, began.revision))) if began else "a pocket model",
        "made with": f"{versions}; commit {about['commit'] or 'unknown'}",
        "layout": layout,
    }
    rows |= {name: value for name, value in figures.items() if isinstance(value, float | int) and "success" in name}
    lines = [f"| {name} | {visible(str(value)).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join(["# A policy trained by rlvlm", "", "| | |", "|---|---|", *lines, ""])
