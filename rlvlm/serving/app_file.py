"""The app file: YAML for `serve deploy` with one or more judges and their HTTP server. Read without starting Ray."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlvlm.core.disk import shipped
from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_text
from rlvlm.core.guests import FOLDER as GUESTS
from rlvlm.core.yaml_text import read_yaml
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.serving.config import DEFAULT_PORT, LOOPBACK_NAMES, HttpConfig, PlacementConfig

MAX_FILE_BYTES = 100_000
FOLDER = "serve_apps"


class Part(BaseModel):
    """Base of everything in a file: an unknown name is an error, in nested dataclasses too."""

    model_config = ConfigDict(extra="forbid")


class JudgeAppArgs(Part):
    """Arguments of `deployments.judge_app`: the same fields as on the command line."""

    judge: JudgeConfig = JudgeConfig()
    placement: PlacementConfig = PlacementConfig()


class GatewayArgs(Part):
    """Arguments of `ingress.gateway_app`."""

    http: HttpConfig = HttpConfig()


class _JudgeApp(Part):
    name: str
    route_prefix: None = None
    import_path: Literal["rlvlm.serving.deployments:judge_app"]
    args: JudgeAppArgs = JudgeAppArgs()


class _GatewayApp(Part):
    name: str
    route_prefix: str = "/"
    import_path: Literal["rlvlm.serving.ingress:gateway_app"]
    args: GatewayArgs = GatewayArgs()


class _HttpOptions(Part):
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT


class _Content(Part):
    """Complete content of a file."""

    proxy_location: str = "HeadOnly"
    http_options: _HttpOptions = _HttpOptions()
    logging_config: dict[str, Any] | None = None
    applications: list[Annotated[_JudgeApp | _GatewayApp, Field(discriminator="import_path")]]

    def split(self) -> tuple[list[_JudgeApp], list[_GatewayApp]]:
        """Returns the judges, and the HTTP servers."""
        judges = [app for app in self.applications if isinstance(app, _JudgeApp)]
        return judges, [app for app in self.applications if isinstance(app, _GatewayApp)]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        judges, gateways = self.split()
        if len(gateways) != 1 or not judges:
            raise ValueError(f"it needs one gateway and at least one judge, got {len(gateways)} and {len(judges)}")
        if unknown := set(gateways[0].args.http.judges) - {app.name for app in judges}:
            raise ValueError(f"the gateway names judges that are not in the file: {sorted(unknown)}")
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeEntry:
    """One judge of the file."""

    app: str
    """Name of its Serve app."""
    judge: JudgeConfig
    placement: PlacementConfig

    @property
    def resources(self) -> str:
        """Resources that Ray reserves for it, e.g. `2 CPU, 0.5 GPU`, or `3 x (2 CPU)` for several copies."""
        gpus = f", {self.placement.num_gpus:g} GPU" if self.placement.num_gpus else ""
        per_replica = f"{self.placement.num_cpus:g} CPU{gpus}"
        return per_replica if self.placement.num_replicas == 1 else f"{self.placement.num_replicas} x ({per_replica})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyEntry:
    """One trained policy. App files contain none: `rlvlm serve RUN` makes it."""

    app: str
    """Name of its Serve app."""
    policy: PolicyConfig
    num_actions: int
    placement: PlacementConfig
    build: Callable[[PolicyConfig, int], Any]
    """Builds the trained policy in each replica; must pickle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AppFile:
    """Validated content of an app file."""

    name: str
    about: str
    """First comment line of the file."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    judges: tuple[JudgeEntry, ...] = ()
    policies: tuple[PolicyEntry, ...] = ()
    turn: tuple[bytes, str] | None = None
    """Example for trying out the policy: a first turn of its task, the image as PNG and the text."""
    gateway_app: str = "gateway"
    """Name of the HTTP server's Serve app."""
    route_prefix: str = "/"
    http: HttpConfig

    @property
    def names(self) -> list[str]:
        """Names of all its Serve apps, the HTTP server's last."""
        return [*(entry.app for entry in (*self.judges, *self.policies)), self.gateway_app]

    @property
    def url(self) -> str:
        """URL of the server for callers on this machine, without a trailing slash."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}{self.route_prefix.rstrip('/')}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can call it."""
        return self.host in LOOPBACK_NAMES

    def with_options(self, **changes: Any) -> "AppFile":
        """Returns the file with some of its own fields, or fields of its `http`, replaced; empty values change nothing.

        Raises:
            UsageError: a value breaks a rule, or it would listen for other machines without a host name.
        """
        wanted = {name: value for name, value in changes.items() if value}
        own = {field.name for field in fields(AppFile)}
        try:
            http = replace(self.http, **{name: value for name, value in wanted.items() if name not in own})
        except ValueError as error:
            raise UsageError(str(error), "rlvlm serve --help") from error
        changed = replace(self, http=http, **{name: value for name, value in wanted.items() if name in own})
        if not 1 <= changed.port <= 65_535:
            raise UsageError(f"a port is 1 to 65535, got {changed.port}", f"--port {DEFAULT_PORT}")
        if not changed.is_loopback and set(http.hosts) <= set(LOOPBACK_NAMES):
            raise UsageError(
                f"listening on {changed.host} needs the names under which other machines call it",
                "add --allowed-hosts NAME...; and put TLS in front: the token travels in the clear",
            )
        return changed


def read_app_file(path: Path) -> AppFile:
    """Reads the app file at `path`.

    Raises:
        UsageError: it cannot be read, has an unknown key, or a value that breaks a rule; the message gives the place.
    """
    try:
        # before parsing: YAML of this size can take minutes
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes", "an app file has some dozen lines")
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "rlvlm serve --list") from error
    try:
        content = _Content.model_validate(read_yaml(text, str(path)))
    except ValidationError as error:
        # only the first problem, without the value: a file may contain text that must not be logged
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"] if ":" not in str(part))  # without the tag of the union
        unknown = problem["type"] in ("extra_forbidden", "unexpected_keyword_argument")
        reason = f"{place}: {'no such setting' if unknown else problem['msg']}".removeprefix(": ")
        raise UsageError(f"{path.name}: {reason}", "compare it with serve_apps/pocket.yaml") from error
    first = text.lstrip().partition("\n")[0]
    judges, [gateway] = content.split()
    return AppFile(
        name=path.stem,
        about=first.lstrip("# ").strip() if first.startswith("#") else "",
        host=content.http_options.host,
        port=content.http_options.port,
        judges=tuple(JudgeEntry(app=app.name, judge=app.args.judge, placement=app.args.placement) for app in judges),
        gateway_app=gateway.name,
        route_prefix=gateway.route_prefix,
        http=gateway.args.http,
    )


def find_app(name: str) -> AppFile:
    """Returns the app file of that name in the folder of app files, or at that path.

    Raises:
        UsageError: there is none, or its content breaks a rule.
    """
    if name.endswith((".yaml", ".yml")):
        return read_app_file(Path(name))
    known = app_files()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean rlvlm serve {near[0]}?" if near else "rlvlm serve --list"
        raise UsageError(f"there is no app {name!r}; apps: {', '.join(known)}", hint)
    return read_app_file(known[name])


def app_files() -> dict[str, Path]:
    """Returns app files by name: those of `serve_apps` here, else in the checkout, else in the installed package; and
    those of the guests.

    Raises:
        UsageError: there is no such folder.
    """
    for folder in (Path.cwd() / FOLDER, shipped(FOLDER)):
        if folder.is_dir():
            files = [*folder.glob("*.yaml"), *GUESTS.glob(f"*/{FOLDER}/*.yaml")]
            return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}
    raise UsageError(f"there is no folder {FOLDER} here", "give the path of an app file: rlvlm serve FILE.yaml")


def preset_judge(name: str) -> JudgeConfig:
    """Returns the settings of the judge of an app file; of a file with several, `name` is that of a judge's app.

    Raises:
        UsageError: there is none, or a file breaks a rule.
    """
    known: dict[str, JudgeConfig] = {}
    for stem, path in app_files().items():
        judges = read_app_file(path).judges
        known |= {stem: judges[0].judge} if len(judges) == 1 else {entry.app: entry.judge for entry in judges}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean --judge.preset {near[0]}?" if near else "rlvlm serve --list"
        raise UsageError(f"there is no preset {name!r} of a judge; presets: {', '.join(known)}", hint)
    return known[name]
