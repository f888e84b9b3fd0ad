"""Settings of Gymnasium's envs."""

import ast
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from rlvlm.core.checks import Bound
from rlvlm.core.leads import OwnSetting
from rlvlm.envs.config import StepEnvConfig


@dataclass(frozen=True, kw_only=True)
class GymnasiumConfig(StepEnvConfig):
    """Settings of any registered Gymnasium env."""

    drawing: ClassVar[tuple[str, ...]] = ("view_px",)
    start: Literal["fixed", "near", "random"] = "random"  # the env draws its own starts
    view_px: Annotated[int, Bound("[32, 1024]")] = 300
    """Longest side of stored images, pixels, in [32, 1024], for envs that cannot draw their past again; smaller images
    are stored as they are. No effect on MuJoCo envs, which are drawn at any size."""

    make: dict[str, OwnSetting] = field(default_factory=dict)
    """Keywords of gymnasium.make, names and values alternating, e.g. `--env.make size 8 is_slippery False`."""

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of gymnasium.make, with numbers, truth values, None and lists as Python has them."""
        return {name: _value(text) for name, text in self.make.items()}


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
