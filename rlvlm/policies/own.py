"""A policy of the user's own, named by `policy.head` as `module:NAME`, for any kind of env. Imports nothing heavy,
because configs use it for validation.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from rlvlm.core.errors import UsageError
from rlvlm.core.references import check_call, is_reference, load_object

T = TypeVar("T")


def check_head(config: Any, heads: Sequence[str]) -> None:
    """Raises unless a policy's config names one of the built-in `heads`, or the user's own with valid settings.

    Raises:
        ValueError: it does not, or has a setting without effect.
    """
    is_own = config.head not in heads and is_reference(config.head, "policy.head")
    if config.head not in heads and not is_own:
        raise ValueError(
            f"policy.head must be one of {', '.join(heads)}, or one of your own as my_file:NAME, got {config.head!r}"
        )
    if config.model and is_own:
        raise ValueError(f"policy.head {config.head} has no effect with policy.model {config.model}; leave one out")
    if config.conditioned and is_own:
        raise ValueError(
            "policy.conditioned has no effect on a policy of your own, which reads its prompts itself; leave it out"
        )
    if config.settings and not is_own:
        raise ValueError("policy.settings has no effect without a policy.head of your own, as my_file:NAME")


def find_own(config: Any) -> Any:
    """Returns the user's class or function that makes a policy.

    Raises:
        UsageError: there is no such function, or it takes other arguments.
    """
    make = load_object(config.head, "policy.head")
    check_call(make, f"policy.head {config.head}", "env", by_name=tuple(config.settings))
    return make


def make_own(config: Any, env: Any, base: type[T]) -> T:
    """Makes the user's own policy for `env`.

    Raises:
        UsageError: see `find_own`; or the result does not derive from `base`.
    """
    policy = find_own(config)(env, **config.settings)
    if not isinstance(policy, base):
        raise UsageError(
            f"policy.head {config.head} gave a {type(policy).__name__}, and no {base.__name__}",
            f"derive it from {base.__module__}.{base.__name__}",
        )
    return policy
