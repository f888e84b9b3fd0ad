"""Settings of LIBERO's envs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from rlvlm.core.checks import Bound
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.robosuite.config import PhysicsConfig


@dataclass(frozen=True, kw_only=True)
class LiberoConfig(ChunkEnvConfig, PhysicsConfig):
    """Settings of LIBERO."""

    drawing: ClassVar[tuple[str, ...]] = ("render_style", "mesh_cell")
    start_jitter_m: Annotated[float, Bound("[0, 0.1]")] = 0.0
    """Things are moved by up to so much, metres, along both sides of the table, from where the benchmark's saved starts
    have them; there many of them never move, so a policy need not look."""
    perturbation: Literal["none", "swap", "object", "lan", "task", "env"] = "none"
    """LIBERO-PRO's change of the task, not in libero_90. swap: two things change places; object: things look otherwise;
    lan: the instruction is worded otherwise; task: another goal in the same scene; env: on another table."""
    render_style: Literal["auto", "benchmark", "light"] = "auto"
    """Rendering of images. benchmark: as in the benchmark, with full meshes, shadows, reflections and smooth edges,
    which published checkpoints were trained on; light: without these, 3 to 20 times as fast on a CPU. auto: light for
    pocket models, which were trained on it, and benchmark for all others; policy and judge each see their own."""
    mesh_cell: Annotated[float, Bound("(0, 0.1]")] = 0.005
    """For light images: mesh points closer together than this, metres, are merged. 0.012 halves the time and differs by
    less than a pixel at 64 pixels."""

    def for_model(self, is_pocket: bool) -> Self:
        """See `EnvConfig`; also decides `render_style`."""
        return (
            self if self.render_style != "auto" else replace(self, render_style="light" if is_pocket else "benchmark")
        )

    def without_effect(self) -> Mapping[str, str]:
        return (
            {"mesh_cell": "env.render_style benchmark, as the benchmark draws"}
            if self.render_style == "benchmark"
            else {}
        )
