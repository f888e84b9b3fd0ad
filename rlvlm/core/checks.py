"""Checks of settings for `__post_init__` of configs: an error names the setting, the rule and the given value.

`section` is where a user finds the settings: `judge.api` for `judge.api.retries`, `--` for a command's options, and
empty for settings outside of sections.
"""

from rlvlm.core.errors import UsageError

# every rule is written so that NaN, which compares false with everything, is refused too


def check_interval(owner: object, section: str, interval: str, *names: str) -> None:
    """Raises ValueError unless every named field of `owner` lies in `interval`.

    The interval is written as in mathematics: `(0, 1]` includes 1 but not 0.
    """
    low, high = map(float, interval[1:-1].split(","))
    for name in names:
        value = getattr(owner, name)
        is_above = value >= low if interval.startswith("[") else value > low
        is_below = value <= high if interval.endswith("]") else value < high
        if not (is_above and is_below):
            raise ValueError(f"{_place(section, name)} must be in {interval}, got {value}")


def check_shares(owner: object, section: str, *names: str) -> None:
    """Raises ValueError unless every named field of `owner` lies in [0, 1]."""
    check_interval(owner, section, "[0, 1]", *names)


def check_least(owner: object, section: str, least: float, *names: str) -> None:
    """Raises ValueError unless every named field is at least `least`, or None where it need not be given."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value >= least:
            raise ValueError(f"{_place(section, name)} must be >= {least:g}, got {value}")


def check_positive(owner: object, section: str, *names: str) -> None:
    """Raises ValueError unless every named field is above 0."""
    for name in names:
        if not getattr(owner, name) > 0:
            raise ValueError(f"{_place(section, name)} must be > 0, got {getattr(owner, name)}")


def _place(section: str, name: str) -> str:
    """Returns the user's name of the field: `judge.api.retries`, or `--ask-swapped`."""
    if section == "--":
        return f"--{name.replace('_', '-')}"
    return f"{section}.{name}" if section else name


def check_asserts() -> None:
    """Raises UsageError if Python leaves out `assert`, of which contract checks consist: they would pass anything."""
    if not __debug__:
        raise UsageError(
            "this Python leaves out the assert statements of which the contract check consists (-O, PYTHONOPTIMIZE)",
            "start it without -O, and unset PYTHONOPTIMIZE",
        )
