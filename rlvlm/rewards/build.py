"""Builds sources of step rewards by name: those that ship, and `my_file:NAME`. Called by the algorithm."""

from typing import Any

from rlvlm.core.errors import UsageError
from rlvlm.core.references import load_object, needed_parameters
from rlvlm.rewards.judged import FunctionReward, JudgedReward
from rlvlm.rewards.novelty import NoveltyReward
from rlvlm.rewards.source import EnvironmentReward, RewardSource, SourceContext, SuccessReward

_SHIPPED: dict[str, type[RewardSource]] = {
    "judged": JudgedReward,
    "environment": EnvironmentReward,
    "success": SuccessReward,
    "novelty": NoveltyReward,
}
"""Sources by name, as in `rewards.config.SOURCES`; those learned from a teacher's answers have a feedback loop
instead."""


_PARTS = ("label", "labelling", "version", "get_state", "set_state")
"""Members of a source; all but the first may be set when it is built."""


def load_source(name: str) -> Any:
    """Returns the source class that ships under `name`, or the object that `my_file:NAME` refers to.

    Checks what can be checked before the source is built.

    Raises:
        UsageError: there is no such object, or it neither is nor makes a source.
    """
    if name in _SHIPPED:
        return _SHIPPED[name]
    found = load_object(name, "reward.source")
    fix = "derive it from rlvlm.rewards.source.RewardSource, or give a function (images, goal) -> scores"
    is_derived = isinstance(found, type) and issubclass(found, RewardSource)
    # objects and classes are sources by their members; the base class has a `label` that only raises
    if isinstance(found, type) or not callable(found):
        if getattr(found, "label", RewardSource.label) is RewardSource.label:
            missing = ["label", *(part for part in _PARTS[1:] if not hasattr(found, part))]
            raise UsageError(f"reward.source {name} lacks {', '.join(missing)}", fix)
    if callable(found) and not is_derived:
        needed = needed_parameters(found)
        if isinstance(found, type) and needed:
            raise UsageError(f"reward.source {name} is a class that needs {', '.join(needed)} to be made", fix)
        if not isinstance(found, type) and len(needed) not in (1, 2):
            what = f"reward.source {name} takes {', '.join(needed) or 'nothing'}, not images and a goal"
            raise UsageError(what, fix)
    return found


def build_source(name: str, context: SourceContext) -> RewardSource:
    """Builds the source that ships under `name`, or the one that `my_file:NAME` refers to.

    Args:
        name: name of a class like `RewardSource`, of a function of `(images, goal)` that returns scores, or of a
            function of a `SourceContext` that makes a source.
        context: everything that the source may need.

    Raises:
        UsageError: there is no such object, or it is none of these.
    """
    source: Any
    found = load_source(name)
    if isinstance(found, type):
        # a user's class may need nothing of the context, and then no base class either
        source = found.build(context) if issubclass(found, RewardSource) else found()
    # two parameters: a function of images and a goal; one: it makes a source
    elif callable(found) and len(needed_parameters(found)) == 2:
        source = FunctionReward(found, context.frames, context.goal)
    else:
        source = found(context) if callable(found) else found
    missing = [part for part in _PARTS if not hasattr(source, part)]
    if missing:
        raise UsageError(
            f"reward.source {name} lacks {', '.join(missing)}",
            "derive it from rlvlm.rewards.source.RewardSource, or give a function (images, goal) -> scores",
        )
    return source
