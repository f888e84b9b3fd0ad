"""Limits of settings, for `__post_init__` of configs: each says which setting is wrong, the rule and what was given."""


def check_shares(owner: object, section: str, *names: str) -> None:
    """Raises ValueError unless every named field of `owner` lies in [0, 1]; `section` is where a user finds them."""
    for name in names:
        if not 0 <= getattr(owner, name) <= 1:
            raise ValueError(f"{section}.{name} must be in [0, 1], got {getattr(owner, name)}")


def check_least(owner: object, section: str, least: float, *names: str) -> None:
    """Raises ValueError unless every named field is `least` or above."""
    for name in names:
        # written so that NaN, which compares false with everything, is refused too
        if not getattr(owner, name) >= least:
            raise ValueError(f"{section}.{name} must be >= {least:g}, got {getattr(owner, name)}")


def check_positive(owner: object, section: str, *names: str) -> None:
    """Raises ValueError unless every named field is above 0."""
    for name in names:
        if not getattr(owner, name) > 0:
            raise ValueError(f"{section}.{name} must be > 0, got {getattr(owner, name)}")
