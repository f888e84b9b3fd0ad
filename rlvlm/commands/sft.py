"""`rlvlm sft TASK --from DATA`: fine-tunes a policy on demonstrations."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from rlvlm.algorithms.sft_config import JobConfig, SFTConfig
from rlvlm.core.checks import PositiveFloat
from rlvlm.core.console.arguments import parse, print_progress, value_of
from rlvlm.core.console.signals import StoppedEarly, StopRequest
from rlvlm.core.errors import EXIT_DONE, EXIT_PREEMPTED, RunError, UsageError
from rlvlm.envs.registry import check_env_settings
from rlvlm.runs.settings.arguments import task_first
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import differences, flat
from rlvlm.runs.start.preflight import check_before_run
from rlvlm.serving.config import PLACE_TIMEOUT_S

Env = TypeVar("Env")
Policy = TypeVar("Policy")
SFT = TypeVar("SFT")

_OF_JOB = {
    "--algo.num-learners": "--job.num-workers",
    "--algo.gpus-per-learner": "--job.gpus-per-worker",
    "--algo.microbatch-tokens": "--job.microbatch-tokens",
    "--algo.shard": "--job.shard",
    "`rlvlm resume`": "the same command again",
}
"""Words of a run's advice, and what they are called here."""


@dataclass(frozen=True, kw_only=True)
class SFTArguments(Generic[Env, Policy, SFT]):
    """Fine-tune a policy on the demonstrations in a folder; with the same --out again, continue where it stopped."""

    source: Annotated[Path, tyro.conf.arg(name="from")]
    """Folder made by `rlvlm collect` or `rlvlm data import`."""
    out: Path
    """Folder for the trained policy; by default `sft/TASK`."""
    env: Env
    policy: Policy
    sft: SFT
    seed: int = 0
    """Seed of the policy's new parts and the order of the demonstrations."""
    job: JobConfig = field(default_factory=JobConfig)
    place_timeout_s: PositiveFloat = PLACE_TIMEOUT_S
    """Maximum wait for places of the learners on a cluster, seconds."""


def command(words: Sequence[str], prog: str) -> int:
    """Runs `sft TASK --from DATA [options]`: trains the start of a run of TASK into a folder that a run can use."""
    task, options = task_first(words, prog, "number_line", "--from DATA")
    own: Any = recipe(task)
    if own.section(SFTConfig) is None:
        raise UsageError(f"{task} is an env in steps", f"it needs no demonstrations: rlvlm run {task}")
    # the rules of `sft` depend on --from, so it is read before the other options
    source = value_of("--from", options) or ""
    default = SFTArguments(
        source=Path(source), out=Path("sft") / task.replace("/", "-"), env=own.env, policy=own.policy,
        sft=replace(own.sft, demonstrations=source), job=JobConfig(max_reply_tokens=own.algo.max_reply_tokens),
    )  # fmt: skip
    kind: Any = SFTArguments[type(own.env), type(own.policy), type(own.sft)]
    arguments: SFTArguments[Any, Any, Any] = parse(kind, options, f"{prog} {task}", default)
    try:
        check_env_settings(task, arguments.env)
    except ValueError as error:
        raise UsageError(str(error), f"{prog} {task} --help") from error
    if arguments.sft.demonstrations != source:
        raise UsageError("--sft.demonstrations has no effect here: --from names the demonstrations", "leave it out")
    if arguments.source == Path():
        fix = f"rlvlm collect {task} --out DIR, then {prog} {task} --from DIR"
        raise UsageError("name a folder of demonstrations with --from", fix)
    run = _as_run(own, arguments, f"{prog} {task}")
    from rlvlm.demonstrations.folder import open_folder

    open_folder(arguments.source).check_task(task)  # a wrong name is reported before anything heavy is imported
    check_before_run(run)
    from rlvlm.algorithms.sft_job import run_sft
    from rlvlm.runs.start.build import algorithm_settings
    from rlvlm.runs.start.placement import placed
    from rlvlm.runs.start.ray_session import ray_session

    print_progress(f"{run.sft.updates:,} updates into {arguments.out}")
    with _advice_of_job(), StopRequest() as stop, ExitStack() as stack:

        def log(line: str) -> None:
            print_progress(line)
            if stop:
                raise StoppedEarly

        stop.log = print_progress
        settings: Any = algorithm_settings(run, make_judge=None)
        try:
            if run.algo.num_learners:
                stack.enter_context(ray_session(None, num_workers=run.algo.num_learners, log=print_progress))
                stop.take_over()
                settings.learner_places = stack.enter_context(placed(run, log)).of_learners
            measured = run_sft(settings, arguments.job.save_every, arguments.out, log)
        except StoppedEarly:
            print_progress(f"{stop.signal_name}: stopped; the same command goes on")
            return EXIT_PREEMPTED
    numbers = ", ".join(f"{name.partition('/')[2].replace('_', ' ')} {value:.3f}" for name, value in measured.items())
    sys.stdout.write(f"{arguments.out}: {numbers}\n")
    sys.stdout.write(f"train on from it: rlvlm run {task} --sft.start-from {shlex.quote(str(arguments.out))}\n")
    return EXIT_DONE


@contextmanager
def _advice_of_job() -> Iterator[None]:
    """Makes the advice of an error name the job's settings."""
    try:
        yield
    except RunError as error:
        for word, own_word in _OF_JOB.items():
            error.fix = error.fix.replace(word, own_word)
        raise


def _as_run(own: Any, arguments: SFTArguments[Any, Any, Any], prog: str) -> Any:
    """Returns the run that begins as the job does, so that its settings obey the same rules, or raises UsageError."""
    try:
        run = replace(
            own, seed=arguments.seed, env=arguments.env, policy=arguments.policy,
            place_timeout_s=arguments.place_timeout_s,
            sft=replace(arguments.sft, demonstrations=str(arguments.source.absolute())),
            algo=replace(own.algo, **arguments.job.learners()),
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error), f"{prog} --help") from error
    set_here = [name for name in differences(flat(own), flat(run)) if name.startswith("sft.")]
    idle = {name: why for name in set_here if (why := run.why_unused(name)) is not None}
    if idle:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        whys = " and ".join(dict.fromkeys(why.replace("sft.demonstrations", "--from") for why in idle.values()))
        raise UsageError(
            f"{names}: no effect with {whys}",
            "leave it out; rlvlm collect plays more episodes, with mistakes by --wrong-actions",
        )
    return run
