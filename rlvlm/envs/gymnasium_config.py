"""Settings of Gymnasium's envs."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlvlm.core.checks import check_interval
from rlvlm.envs.config import StepEnvConfig


@dataclass(frozen=True, kw_only=True)
class GymnasiumConfig(StepEnvConfig):
    """Any registered Gymnasium env."""

    drawing: ClassVar[tuple[str, ...]] = ("view_px",)
    start: Literal["fixed", "near", "random"] = "random"  # it draws its own starts
    view_px: int = 300
    """Longest side of the images that are kept of an env which cannot draw its past again, pixels, in [32, 1024];
    smaller ones are kept as the env gives them. Without effect on MuJoCo envs, which are drawn at any size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval(self, "env", "[32, 1024]", "view_px")
