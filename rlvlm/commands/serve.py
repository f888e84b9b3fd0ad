"""`rlvlm serve`: finds an app file by name, or a run's policy, and has it served; imports nothing heavy to say no."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.text import Text

from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.core.console.arguments import parse
from rlvlm.core.console.screen import QuietConsole
from rlvlm.core.console.tables import plain_table
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.runs.files.folder import check_trust, choose_checkpoint, find_folder
from rlvlm.runs.start.preflight import check_before_play
from rlvlm.serving.app_file import AppFile, PolicyEntry, app_files, find_app, read_app_file
from rlvlm.serving.config import ActConfig, HttpConfig, PlacementConfig

_POLICY_APP = "policy"


@dataclass(frozen=True)
class ServeArguments:
    """Serve judges or a run's policy over HTTP, with a token, until Ctrl-C; on a private Ray or that of RAY_ADDRESS."""

    name: tyro.conf.Positional[str] = ""
    """Name of an app, path of an app file (YAML), or folder of a run whose policy answers in text."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """List the apps, and stop."""
    host: str = ""
    """Address to listen on; empty keeps the file's, which is this machine alone."""
    port: int = 0
    """Port to listen on; 0 keeps the file's."""
    token_file: str = ""
    """File with the bearer token (mode 0600); created with a random one if missing. Empty keeps the file's."""
    media_root: str = ""
    """Folder below which `video_path` may name videos; empty keeps the file's, which is none."""
    max_images: int = 0
    """Images that a request may have; 0 keeps the file's, 16."""
    replicas: int = 1
    """Copies of a run's policy; app files set their own number."""
    num_gpus: float = 0.0
    """Share of a GPU for each of these copies."""
    metrics: bool = False
    """Open Ray's metrics port for Prometheus, without a token and on all interfaces of this machine."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that callers may use; empty keeps the file's, which are those of this machine."""


def command(words: Sequence[str], prog: str) -> int:
    """Runs `serve NAME [options]` or `serve --list`: serves until Ctrl-C."""
    arguments = parse(ServeArguments, words, prog)
    if arguments.list:
        show_list(QuietConsole())
        return EXIT_DONE
    names = list(app_files())
    if not arguments.name:
        raise UsageError(f"name an app: {prog} NAME; apps: {', '.join(names)}", f"{prog} --list")
    # the app's name wins: `judge-bench --out pocket` leaves a folder that is not a run
    if arguments.name not in names and Path(arguments.name).is_dir():
        found = run_app(Path(arguments.name), arguments.replicas, arguments.num_gpus, arguments.trust)
    elif (arguments.replicas, arguments.num_gpus, arguments.trust) != (1, 0.0, False):
        raise UsageError("--replicas, --num-gpus and --trust go with the folder of a run", f"{prog} --help")
    else:
        found = find_app(arguments.name)
    file = found.with_options(
        host=arguments.host,
        port=arguments.port,
        hosts=arguments.allowed_hosts,
        token_file=arguments.token_file,
        max_images=arguments.max_images,
        media_root=str(Path(arguments.media_root).expanduser().absolute()) if arguments.media_root else "",
    )
    from rlvlm.commands.served_apps import serve_apps  # Ray and torch: seconds, after all that a user may get wrong

    return serve_apps(file, exports_metrics=arguments.metrics)


def show_list(console: Console) -> None:
    """Prints one line per judge, and below them the purpose of each app and how a run attaches to it."""
    heads, rows = ("app", "backend", "model", "takes"), []
    files = [read_app_file(path) for path in app_files().values()]
    for file in files:
        for number, entry in enumerate(file.judges):
            model = entry.judge.model.rpartition("/")[2] or "its own"
            # an app's name is shown only at its first judge
            rows.append(("" if number else file.name, entry.judge.backend, model, entry.resources))
    console.print(plain_table(heads, rows, words=heads))
    console.print()
    for file in files:
        apps = " or ".join(entry.app for entry in file.judges)
        console.print(Text(f"{file.name} (runs: --serve.app {apps}): {file.about}"), soft_wrap=True)


def run_app(path: Path, replicas: int, num_gpus: float, trust: bool) -> AppFile:
    """Returns the app of the policy in `path`.

    Args:
        path: a run's folder, or a checkpoint in it; without a checkpoint the best is used.
        replicas: number of copies of the policy.
        num_gpus: share of a GPU for each copy.
        trust: whether code named in the folder may be imported.

    Raises:
        UsageError: there is no run or no checkpoint, or its policy does not act in text or by a head.
    """
    check_trust([path], trust=trust)
    folder = find_folder(path)
    config = folder.config()
    policy, algo = config.section(PolicyConfig), config.section(PolicyGradientConfig)
    if policy is None or algo is None:
        raise UsageError(
            f"{folder.path} has no policy that looks at an image and answers: its env is in {config.kind.name}",
            "serve a run such as number_line's; others are played by rlvlm eval",
        )
    if policy.is_own:
        raise UsageError(
            f"{folder.path} has a policy of its own, {policy.head}, and replicas hold chat VLMs",
            "play it with rlvlm eval, or from Python (docs/python.md)",
        )
    if policy.history > 1:
        raise UsageError(
            f"{folder.path} has a policy that sees {policy.history} images in a prompt, and a request has one",
            "play it with rlvlm eval, or from Python (docs/python.md)",
        )
    from rlvlm.envs.slots import make_slot
    from rlvlm.vlms.stills import to_png

    checkpoint = choose_checkpoint(folder, path, print).algorithm.absolute()
    if not os.environ.get("RAY_ADDRESS"):  # else replicas may see what this machine does not
        check_before_play(config)
    # an env is needed once: for the names of its actions, and a first turn to show how to ask
    slot = make_slot(config.task, config.env.for_evaluation())
    names = slot.env.action_names
    slot.begin(0)
    turn = to_png(slot.env.draw(slot.turn.snapshot[None])[0], is_small=True), slot.turn.prompt
    slot.env.close()
    entry = PolicyEntry(
        app=_POLICY_APP,
        policy=policy,
        num_actions=len(names),
        placement=PlacementConfig(num_replicas=replicas, num_gpus=num_gpus),
        build=partial(trained_policy, checkpoint=checkpoint),  # called in each replica
    )
    act = ActConfig(
        app=_POLICY_APP,
        action_names=names,
        max_reply_tokens=algo.max_reply_tokens,
        temperature=algo.temperature,
    )
    return AppFile(
        name=folder.path.name,
        about=f"the policy of {config.title}",
        policies=(entry,),
        turn=turn,
        http=HttpConfig(judges=(), policies=(act,)),
    )


def trained_policy(config: PolicyConfig, num_actions: int, *, checkpoint: Path) -> Any:
    """Returns the policy with the weights of `checkpoint`."""
    from rlvlm.algorithms.policy_gradient.player import load_vlm
    from rlvlm.policies.vlm.loading import load_policy

    policy = load_policy(config, num_actions)
    load_vlm(policy, checkpoint)
    return policy
