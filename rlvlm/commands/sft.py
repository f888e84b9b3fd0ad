"""`rlvlm sft TASK --from DATA`."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from rlvlm.algorithms.sft_config import JobConfig, ReplySFTConfig
from rlvlm.commands.arguments import parse, print_progress, task_first
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import check_env_settings, find_task, make_env
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.runs.kinds import TurnsRun
from rlvlm.runs.preflight import check_network
from rlvlm.runs.recipes import recipe

_OF_RUNS = ("turns", "demonstrations", "start_from", "p_wrong", "p_perturb")
"""Settings of `ReplySFTConfig` that say what a run's supervised start learns from."""


@dataclass(frozen=True, kw_only=True)
class SFTArguments:
    """Fine-tune a policy on the demonstrations in a folder; again with the same --out: goes on where it stopped."""

    source: Annotated[Path, tyro.conf.arg(name="from")]
    """Folder that `rlvlm collect` made."""
    out: Path = Path()
    """Folder of what is trained; by default `sft/TASK`."""
    seed: int = 0
    """Seed of the policy's new parts and the order of the demonstrations."""
    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    sft: ReplySFTConfig = field(default_factory=ReplySFTConfig)
    job: JobConfig = field(default_factory=JobConfig)


def command(words: Sequence[str], prog: str) -> int:
    """`sft TASK --from DATA [options]`: what the held-out episodes say of the result."""
    task, options = task_first(words, prog, "number_line", "--from DATA")
    if (kind := find_task(task).kind) != "turns":
        fixes = {"steps": f"it needs no demonstrations: rlvlm run {task}"}
        fixes |= {"chunks": f"a VLA learns in its run: rlvlm run {task} --sft.demonstrations DIR"}
        raise UsageError(f"{task} is an env in {kind}, not in turns", fixes[kind])
    own = recipe(task)
    assert isinstance(own, TurnsRun), "that is its env's kind"
    default = SFTArguments(
        source=Path(), out=Path("sft") / task.replace("/", "-"), env=own.env, policy=own.policy, sft=own.sft,
        job=JobConfig(max_reply_tokens=own.algo.max_reply_tokens),
    )  # fmt: skip
    arguments = parse(SFTArguments, options, f"{prog} {task}", default)
    try:
        check_env_settings(task, arguments.env)
    except ValueError as error:
        raise UsageError(str(error), f"{prog} {task} --help") from error
    if arguments.source == Path():
        fix = f"rlvlm collect {task} --out DIR, then {prog} {task} --from DIR"
        raise UsageError("name a folder of demonstrations with --from", fix)
    if idle := [name for name in _OF_RUNS if getattr(arguments.sft, name) != getattr(default.sft, name)]:
        raise UsageError(
            f"sft.{', sft.'.join(idle)} would have no effect: the policy learns from the episodes of --from",
            "leave it out; rlvlm collect plays more episodes, with mistakes by --wrong-actions",
        )
    from rlvlm.demonstrations.folder import open_folder

    folder = open_folder(arguments.source)  # a wrong name is reported before anything heavy is imported
    folder.check_task(task)
    where = arguments.policy.device if not os.environ.get("RAY_ADDRESS") else "auto"  # else a worker may be elsewhere
    check_network("policy", where, arguments.policy.model, arguments.policy.revision)
    from rlvlm.algorithms.policy_gradient.slots import make_slot
    from rlvlm.algorithms.sft_folders import read_sft_manifest, sft_manifest_of, write_sft_manifest
    from rlvlm.algorithms.sft_job import TrainLoopConfig, run_sft
    from rlvlm.algorithms.sft_replies import split
    from rlvlm.policies.vlm.imitation import check_actions
    from rlvlm.policies.vlm.loading import load_policy
    from rlvlm.runs.ray_session import ray_session

    # pickles: each worker of Ray Train reads the demonstrations itself
    load = partial(_load, arguments.source.absolute(), task, arguments.env)
    manifest = sft_manifest_of(task, arguments.env, arguments.policy, folder.action_names)
    if (before := read_sft_manifest(arguments.out)) is not None and (
        odd := before.lacks(manifest) + before.differs(manifest)
    ):
        raise UsageError(
            f"{arguments.out} holds a policy trained with other settings: {'; '.join(odd)}", "--out another"
        )
    episodes = load()  # what cannot be learned from is reported here: a worker's error comes with all of Ray's frames
    if arguments.policy.acts == "head":
        check_actions(split(episodes, arguments.sft.held_out)[0])
    # before the training: what is found there after a kill says what it was to become
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_sft_manifest(arguments.out, manifest)
    loop_config = TrainLoopConfig(
        make_policy=partial(load_policy, arguments.policy.in_run(arguments.seed), len(folder.action_names)),
        make_slot=partial(make_slot, task, arguments.env),
        load_episodes=load,
        sft=arguments.sft,
        job=arguments.job,
        seed=arguments.seed,
    )
    turns, updates = sum(len(episode) for episode in episodes), arguments.sft.updates
    print_progress(f"{len(episodes):,} episodes with {turns:,} turns, {updates:,} updates, into {arguments.out}")
    with ray_session(None, num_workers=arguments.job.num_workers, log=print_progress):
        measured = run_sft(loop_config, arguments.out)
    numbers = ", ".join(f"{name.partition('/')[2].replace('_', ' ')} {value:.3f}" for name, value in measured.items())
    sys.stdout.write(f"{arguments.out}: {numbers}\n")
    sys.stdout.write(f"train on from it: rlvlm run {task} --sft.start-from {shlex.quote(str(arguments.out))}\n")
    return EXIT_DONE


def _load(source: Path, task: str, env: EnvConfig) -> list[TokenEpisode]:
    """What a worker learns from."""
    from rlvlm.algorithms.sft_folders import load_demonstrations

    return load_demonstrations(source, make_env(task, env, 0), env)
