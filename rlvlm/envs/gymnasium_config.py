"""Settings of Gymnasium's envs."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlvlm.core.checks import check_interval
from rlvlm.envs.config import StepEnvConfig


@dataclass(frozen=True, kw_only=True)
class GymnasiumConfig(StepEnvConfig):
    """Settings of any registered Gymnasium env."""

    drawing: ClassVar[tuple[str, ...]] = ("view_px",)
    start: Literal["fixed", "near", "random"] = "random"  # the env draws its own starts
    view_px: int = 300
    """Longest side of stored images, pixels, in [32, 1024], for envs that cannot draw their past again; smaller images
    are stored as they are. No effect on MuJoCo envs, which are drawn at any size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval(self, "env", "[32, 1024]", "view_px")
