"""References to users' own objects in settings: `package.module:NAME`, `file:NAME` or `path/file.py:NAME`."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlvlm.core.errors import UsageError
from rlvlm.core.guests import short_names
from rlvlm.core.own_code import import_file, import_own

Registered = TypeVar("Registered")
GYMNASIUM = "gym:"
"""Prefix of the id of an env in Gymnasium's registry."""


def is_reference(name: str, setting: str = "") -> bool:
    """Returns whether `name` refers to a user's own object, and is not a name that ships.

    Args:
        name: value of a setting, of which it is known that it does not ship.
        setting: the setting, e.g. `reward.teacher`, for which guests may have short names.
    """
    return ":" in name or name in short_names(setting)


def find_registered(
    name: str, registry: Mapping[str, Registered], setting: str, decorator: str,
    function_of: Callable[[Registered], object] = lambda registered: registered, takes: tuple[str, ...] = (),
) -> Registered:  # fmt: skip
    """Returns the entry of `registry` under `name`, or for `module:FUNCTION` the entry that its decorator registered.

    Args:
        name: value of the setting.
        registry: entries that ship, and those of imported modules.
        setting: name of the setting for messages, e.g. `algo.loss.policy`.
        decorator: name of the decorator for messages, e.g. `policy_loss`.
        function_of: returns an entry's decorated function; by default the entry itself.
        takes: names of its positional arguments.

    Raises:
        UsageError: there is none, or it cannot be called with these arguments.
    """
    # by the registered function and not by its name: FUNCTION may be registered under any name
    if name not in registry and is_reference(name, setting):
        function = load_object(name, setting)  # importing its module runs the decorator
        for registered in registry.values():
            if function_of(registered) is function:
                check_call(function, f"{setting} {name}", *takes)
                return registered
        raise UsageError(
            f"{setting} {name}: nothing has registered it", f"put @{decorator}(NAME) above the function {name}"
        )
    if name not in registry:
        raise UsageError(
            f"there is no {setting} {name!r}",
            f"--{setting.replace('_', '-')} {', '.join(registry)}; one of your own is my_file:FUNCTION",
        )
    return registry[name]


def needed_parameters(function: Callable[..., object]) -> list[str]:
    """Returns the names of a function's positional parameters without defaults."""
    parameters = inspect.signature(function).parameters.values()
    by_position = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind in by_position
    ]


def check_call(function: Callable[..., object], what: str, *by_position: str, by_name: tuple[str, ...] = ()) -> None:
    """Raises unless a function accepts these arguments, an error that would otherwise occur hours later or elsewhere.

    Args:
        function: user's own function.
        what: description of the function for the message.
        by_position: names of its positional arguments.
        by_name: names of its keyword arguments.

    Raises:
        UsageError: it does not accept them.
    """
    if not callable(function):
        raise UsageError(f"{what} is a {type(function).__name__}, which cannot be called", "name a function or a class")
    try:
        signature = inspect.signature(function)
    except ValueError:  # compiled functions may have no signature
        return
    try:
        signature.bind(*by_position, **dict.fromkeys(by_name))
    except TypeError as error:
        given = ", ".join([*by_position, *(f"{name}=" for name in by_name)])
        raise UsageError(f"{what} is called with ({given}), and takes {signature}: {error}", "give it these") from error


def load_object(reference: str, setting: str) -> Any:
    """Imports the object of `reference`. Modules in the working directory are found, whatever started this process.

    Args:
        reference: `module:NAME`, where the module may be a path that ends in `.py`; or a guest's short name.
        setting: name of the setting for messages, e.g. `reward.source`.

    Raises:
        UsageError: the module or the name in it does not exist, or the module itself raises; says where.
    """
    module_name, _, name = short_names(setting).get(reference, reference).partition(":")
    try:
        if module_name.endswith(".py"):
            module = import_file(Path(module_name).expanduser().resolve())
        else:
            module = import_own(module_name)
        return getattr(module, name)
    except Exception as error:  # a user's own file may fail in any way
        raise UsageError(
            f"{setting} {reference}: {type(error).__name__}: {error}",
            "give it as my_file:NAME, of a file in this folder or a module that can be imported; mend the file if the "
            "message is about its code",
        ) from error
