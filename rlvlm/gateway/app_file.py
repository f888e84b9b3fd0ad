"""An app file: the YAML of `serve deploy` with one or more judges and their gateway. Read without starting Ray."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rlvlm.core.errors import UsageError
from rlvlm.core.yaml_text import read_yaml
from rlvlm.gateway.config import DEFAULT_PORT, LOOPBACK_NAMES, HttpConfig
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.serving.config import PlacementConfig, refuse_unknown_keys

JUDGE_APP = "rlvlm.serving.deployments:judge_app"
GATEWAY_APP = "rlvlm.gateway.gateway:gateway_app"
MAX_FILE_BYTES = 100_000
_APP_KEYS = {"name", "route_prefix", "import_path", "args"}
_FILE_KEYS = {"proxy_location", "http_options", "logging_config", "applications"}

Config = TypeVar("Config")
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeEntry:
    """One judge of the file."""

    app: str
    """Name of its Serve app."""
    judge: JudgeConfig
    placement: PlacementConfig

    @property
    def resources(self) -> str:
        """What Ray sets aside for it, e.g. `2 CPU, 0.5 GPU`, or `3 x (2 CPU)` where there are several copies."""
        gpus = f", {self.placement.num_gpus:g} GPU" if self.placement.num_gpus else ""
        one = f"{self.placement.num_cpus:g} CPU{gpus}"
        return one if self.placement.num_replicas == 1 else f"{self.placement.num_replicas} x ({one})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyEntry:
    """One trained policy; files have none, `rlvlm serve RUN` makes it."""

    app: str
    """Name of its Serve app."""
    policy: PolicyConfig
    num_actions: int
    placement: PlacementConfig
    build: Callable[[PolicyConfig, int], Any]
    """Makes the policy, trained, in each replica; it must pickle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AppFile:
    """What a file says, checked."""

    name: str
    about: str
    """The file's first comment line."""
    host: str
    port: int
    judges: tuple[JudgeEntry, ...]
    policies: tuple[PolicyEntry, ...] = ()
    turn: tuple[bytes, str] | None = None
    """What the policy can be tried on: a first turn of its task, the image as PNG and the words."""
    gateway_app: str
    """Name of the gateway's Serve app."""
    route_prefix: str
    http: HttpConfig

    @property
    def names(self) -> list[str]:
        """Names of all its Serve apps, the gateway's last."""
        return [*(entry.app for entry in (*self.judges, *self.policies)), self.gateway_app]

    @property
    def url(self) -> str:
        """Where callers on this machine reach the gateway, without a slash at the end."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}{self.route_prefix.rstrip('/')}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can call it."""
        return self.host in LOOPBACK_NAMES

    def with_options(self, **changes: Any) -> "AppFile":
        """The same file with some of its own fields, or fields of its `http`, set anew; empty values change nothing.

        Raises:
            UsageError: a value breaks a rule, or it would listen for other machines under no name.
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
    """The app file at `path`.

    Raises:
        UsageError: it cannot be read, has a key that is not known, or a value that breaks a rule; names the place.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes", "an app file has some dozen lines")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "rlvlm serve --list") from error
    content = read_yaml(text, str(path))
    try:
        first = text.lstrip().partition("\n")[0]
        return _file(path.stem, first.lstrip("# ").strip() if first.startswith("#") else "", content)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path.name}: {_first_reason(error)}", "compare it with serve_apps/pocket.yaml") from error


def list_app_files(folder: Path) -> list[Path]:
    """The app files of a folder, by name."""
    return sorted(folder.glob("*.yaml"))


def _file(name: str, about: str, content: Any) -> AppFile:
    _check_keys(content, _FILE_KEYS, "the file")
    options = content.get("http_options") or {}
    _check_keys(options, {"host", "port"}, "http_options")
    applications = _typed(content["applications"], list, "applications")
    judges, gateways = [], []
    for application in applications:
        _check_keys(application, _APP_KEYS, "an application")
        place, args = _typed(application["name"], str, "name"), application.get("args") or {}
        if application["import_path"] == JUDGE_APP:
            _check_keys(args, {"judge", "placement"}, f"{place}.args")
            judges.append(
                JudgeEntry(
                    app=place,
                    judge=_build(JudgeConfig, args.get("judge"), f"{place}.judge"),
                    placement=_build(PlacementConfig, args.get("placement"), f"{place}.placement"),
                )
            )
        elif application["import_path"] == GATEWAY_APP:
            _check_keys(args, {"http"}, f"{place}.args")
            gateways.append((application, _build(HttpConfig, args.get("http"), f"{place}.http")))
        else:
            raise ValueError(f"import_path must be {JUDGE_APP} or {GATEWAY_APP}, got {application['import_path']!r}")
    if len(gateways) != 1 or not judges:
        raise ValueError(f"it needs one gateway and at least one judge, got {len(gateways)} and {len(judges)}")
    [(gateway, http)] = gateways
    strangers = set(http.judges) - {entry.app for entry in judges}
    if strangers:
        raise ValueError(f"the gateway names judges that are not in the file: {sorted(strangers)}")
    return AppFile(
        name=name,
        about=about,
        host=_typed(options.get("host", "127.0.0.1"), str, "http_options.host"),
        port=_typed(options.get("port", DEFAULT_PORT), int, "http_options.port"),
        judges=tuple(judges),
        gateway_app=gateway["name"],
        route_prefix=_typed(gateway.get("route_prefix", "/"), str, "route_prefix"),
        http=http,
    )


def _build(config: type[Config], values: Any, place: str) -> Config:
    """The config that `values` describe, nested ones too.

    Raises:
        ValueError: an unknown key, a value of the wrong type, or one that breaks a rule.
    """
    given = {} if values is None else values
    refuse_unknown_keys(config, given, place)
    try:
        return TypeAdapter(config).validate_python(given)
    except ValidationError as error:
        raise ValueError(f"{place}: {_first_reason(error)}") from error


def _check_keys(content: Any, known: set[str], place: str) -> None:
    if not isinstance(content, Mapping):
        raise ValueError(f"{place} must be a mapping of names to values, got {type(content).__name__}")
    unknown = sorted(str(key) for key in content if key not in known)
    if unknown:
        raise ValueError(f"{place} has unknown keys {unknown}; known are {sorted(known)}")


def _typed(value: Any, kind: type[Value], place: str) -> Value:
    if type(value) is not kind:
        raise ValueError(f"{place} must be of type {kind.__name__}, got {value!r:.60}")
    return value


def _first_reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")
    return f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
