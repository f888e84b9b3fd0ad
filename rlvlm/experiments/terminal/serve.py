"""`rlvlm serve`: its words, the list of what can be started, and finding an app file by name. Starts no Ray itself."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

import rlvlm
from rlvlm.errors import EXIT_DONE, UsageError
from rlvlm.serving.http.app_file import AppFile, list_app_files, read_app_file

FOLDER = "serve_apps"


@dataclass(frozen=True)
class ServeArguments:
    """Put judges behind HTTP, with a token, until Ctrl-C. On a private Ray, or on the one that RAY_ADDRESS names."""

    name: tyro.conf.Positional[str] = ""
    """An app of the list, or the path of an app file (YAML)."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the apps that there are, and stop."""
    host: str = ""
    """Address to listen on; empty keeps the file's, which is this machine alone."""
    port: int = 0
    """Port to listen on; 0 keeps the file's."""
    token_file: str = ""
    """File with the bearer token (mode 0600); made with a random one if absent. Empty keeps the file's."""
    media_root: str = ""
    """Folder that `video_path` may name videos of; empty keeps the file's, which is none."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which callers may call; empty keeps the file's, which are those of this machine."""


def serve_command(words: Sequence[str], prog: str) -> int:
    """`serve NAME [options]` and `serve --list`."""
    arguments = tyro.cli(ServeArguments, args=words, prog=prog)
    if arguments.list:
        _show_list(Console())
        return EXIT_DONE
    if not arguments.name:
        raise UsageError(f"name an app first: {prog} NAME; apps: {', '.join(_names())}", f"{prog} --list")
    file = find_app(arguments.name).with_options(
        host=arguments.host, port=arguments.port, hosts=arguments.allowed_hosts, token_file=arguments.token_file,
        media_root=str(Path(arguments.media_root).expanduser().absolute()) if arguments.media_root else "",
    )  # fmt: skip
    from rlvlm.experiments.serve import serve_apps  # imports ray

    return serve_apps(file)


def find_app(name: str) -> AppFile:
    """The app file of that name in the folder of app files, or at that path.

    Raises:
        UsageError: there is none, or what it says breaks a rule.
    """
    if name.endswith((".yaml", ".yml")):
        return read_app_file(Path(name))
    path = app_folder() / f"{name}.yaml"
    if path.parent != app_folder() or not path.is_file():
        near = difflib.get_close_matches(name, _names(), n=1)
        hint = f"did you mean rlvlm serve {near[0]}?" if near else "rlvlm serve --list"
        raise UsageError(f"there is no app {name!r}; apps: {', '.join(_names())}", hint)
    return read_app_file(path)


def app_folder() -> Path:
    """Where app files are: `serve_apps` here, else in the checkout, else in the installed package.

    Raises:
        UsageError: in none of them.
    """
    package = Path(rlvlm.__file__).parent
    for folder in (Path.cwd() / FOLDER, package.parent / FOLDER, package / FOLDER):
        if folder.is_dir():
            return folder
    raise UsageError(f"there is no folder {FOLDER} here", "give the path of an app file: rlvlm serve FILE.yaml")


def _names() -> list[str]:
    return [path.stem for path in list_app_files(app_folder())]


def _show_list(console: Console) -> None:
    """One line per judge, and below them what each app is for."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("app", "backend", "model", "takes"):
        table.add_column(heading, no_wrap=True)
    files = [read_app_file(path) for path in list_app_files(app_folder())]
    for file in files:
        for number, entry in enumerate(file.judges):
            model = entry.judge.model.rpartition("/")[2] or "its own"
            table.add_row("" if number else file.name, entry.judge.backend, model, entry.resources)
    console.print(table)
    console.print()
    for file in files:
        console.print(Text(f"{file.name}: {file.about}"), soft_wrap=True)
