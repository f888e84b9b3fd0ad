"""Sources of steps' rewards by name: those that ship, and `my_file:NAME`. Called by the algorithm."""

import inspect
from typing import Any

from rlvlm.core.errors import UsageError
from rlvlm.core.plugins import load_object
from rlvlm.rewards.environment import EnvironmentReward, SuccessReward
from rlvlm.rewards.judged import FunctionReward, JudgedReward
from rlvlm.rewards.novelty import NoveltyReward
from rlvlm.rewards.source import RewardSource, SourceContext

_SHIPPED: dict[str, type[RewardSource]] = {
    "judged": JudgedReward,
    "environment": EnvironmentReward,
    "success": SuccessReward,
    "novelty": NoveltyReward,
}
"""Names as in `rewards.config.SOURCES`; those learned from a teacher's answers have a feedback loop instead."""


def build_source(name: str, context: SourceContext) -> RewardSource:
    """The source that ships under `name`, or the one that `my_file:NAME` refers to.

    Args:
        name: of a class like `RewardSource`, of a function of `(images, goal)` that gives scores, or of a function of a
            `SourceContext` that makes a source.
        context: what it may need.

    Raises:
        UsageError: there is no such thing, or it is none of these.
    """
    source: Any
    found: Any = _SHIPPED[name] if name in _SHIPPED else load_object(name, "reward.source")
    if isinstance(found, type):
        # a class of one's own may need nothing of the context, and then no base class either
        source = found.build(context) if issubclass(found, RewardSource) else found()
    # two parameters: a function of images and a goal; one: it makes a source
    elif callable(found) and len(inspect.signature(found).parameters) == 2:
        source = FunctionReward(found, context.frames, context.goal)
    else:
        source = found(context) if callable(found) else found
    missing = [
        part for part in ("label", "labelling", "version", "get_state", "set_state") if not hasattr(source, part)
    ]
    # the base has a `label`, which only raises
    if getattr(type(source), "label", None) is RewardSource.label:
        missing = ["label"]
    if missing:
        raise UsageError(
            f"reward.source {name} lacks {', '.join(missing)}",
            "derive it from rlvlm.rewards.source.RewardSource, or give a function (images, goal) -> scores",
        )
    return source
