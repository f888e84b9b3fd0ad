"""Settings shared by all envs and by each of the three kinds. An env family adds its own settings beside its code.

`Task.env` names the settings class of the task's envs; the fields of that class are the `--env` options of a run. This
module imports nothing heavy, so that the command line starts at once.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self

from rlvlm.core.checks import PositiveInt, check_bounds
from rlvlm.core.leads import FilePath


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Settings of the task's env."""

    drawing: ClassVar[tuple[str, ...]] = ()
    """Fields that only decide how images are drawn."""
    episode_steps: PositiveInt = 250
    """Env steps per episode, >= 1; at the limit an episode is truncated, not terminated."""
    draw_path: bool = False
    """Whether the path of the hand (or of the moving object) is drawn on the last image that a judge sees. The policy
    and a learned reward see images without it."""

    def __post_init__(self) -> None:
        check_bounds(self, "env")

    def for_demonstrations(self) -> Self:
        """Returns these settings without those that only make training faster or its judge blind."""
        return self

    def play_settings(self) -> dict[str, Any]:
        """Returns, by name, the settings that demonstrations depend on, however the images are drawn."""
        settings = asdict(self.for_demonstrations())
        return {name: value for name, value in settings.items() if name not in (*self.drawing, "draw_path")}

    def for_evaluation(self) -> Self:
        """Returns these settings as evaluations use them."""
        return self.for_demonstrations()

    def for_model(self, is_pocket: bool) -> Self:  # noqa: ARG002 - for families that draw differently for some
        """Returns these settings, drawn as the model expects; `is_pocket`: it is a pocket model or arrives trained."""
        return self

    def for_people(self) -> Self:
        """Returns these settings, drawn for people to look at."""
        return self

    def without_effect(self) -> Mapping[str, str]:
        """Returns the settings that have no effect beside the others: name to the reason."""
        return {}

    @property
    def start_words(self) -> str:
        """Returns how episodes start and what is drawn, for a model card, e.g. `start fixed, `; empty if usual."""
        return ""


@dataclass(frozen=True, kw_only=True)
class StepEnvConfig(EnvConfig):
    """Settings of an env in steps."""

    start: Literal["fixed", "near", "random"] = "fixed"
    """fixed: the paper's start, near the object; random: the stock start positions, drawn anew each episode; near: also
    drawn anew, but in the paper's MetaWorld tasks the hand begins as close to the object as in the paper."""
    num_envs: PositiveInt = 1
    """Envs stepped in parallel, >= 1."""

    @property
    def start_words(self) -> str:
        return f"start {self.start}, "


@dataclass(frozen=True, kw_only=True)
class TurnEnvConfig(EnvConfig):
    """Settings of an env in turns."""

    has_split: ClassVar[bool] = True
    """Whether starts can be held out; an env with continuous starts never meets one twice, so it holds none out."""
    rules: Literal["strict", "legacy"] = "strict"
    """strict: replies are parsed strictly, and an unreadable one does nothing and costs a penalty; legacy: the
    reference's rules with their loopholes, which answer an unreadable reply with a random action."""
    split: Literal["all", "training", "held_out"] = "all"
    """Starts (hands of cards, layouts of grids) that episodes may have. A fifth of all, always the same, is held out: a
    training run plays the others, and its evaluations play the held-out ones."""
    prompt: FilePath = ""
    """File with a prompt of your own, for instance a reference's; empty: the env's prompt. In the file $prompt stands
    for the env's prompt, $actions for the legal actions, $goal for the goal and, in games of points, $formula for the
    formula so far; $$ is a dollar sign."""

    def for_evaluation(self) -> Self:
        """See `EnvConfig`; uses the held-out starts if training leaves some out."""
        same = super().for_evaluation()
        return replace(same, split="held_out") if self.split == "training" else same


@dataclass(frozen=True, kw_only=True)
class ChunkEnvConfig(EnvConfig):
    """Settings of an env in chunks."""

    continue_after_success: bool = False
    """Whether a training episode goes on to its time limit after success, which still counts. With a judge's reward,
    ending at success would reveal the truth through the episode's length. Evaluations and demonstrations always end at
    success."""

    def for_demonstrations(self) -> Self:
        """See `EnvConfig`; episodes end at success."""
        return replace(super().for_demonstrations(), continue_after_success=False)


KIND_CONFIGS: Mapping[str, type[EnvConfig]] = {
    "steps": StepEnvConfig,
    "turns": TurnEnvConfig,
    "chunks": ChunkEnvConfig,
}
"""Settings class by `Task.kind`, for envs that bring no settings of their own."""


_RENAMED = {"plays_on": "continue_after_success", "shows_last": "prompt_last_action"}


def current_settings(env: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the env settings of an older file under today's names and values; the others unchanged."""
    settings = {_RENAMED.get(name, name): value for name, value in env.items()}
    if settings.get("look") in ("auto", "benchmark", "light"):  # LIBERO's; users' envs may have one of that name
        settings["render_style"] = settings.pop("look")
    # LIBERO's too, which is known by its own settings, or by those of all families that files of before kinds have
    if "moved" in settings and settings.keys() & {"mesh_cell", "deals"}:
        settings["start_jitter_m"] = settings.pop("moved")
    return settings | ({"rules": "strict"} if settings.get("rules") == "mended" else {})
