"""Settings of envs: what all have, and what each of the three kinds has. A family adds its own beside its code.

A `Task` says by its `env` which class its envs take; that class's fields are the `--env` options of its runs. Imports
nothing heavy, so that the command line starts at once.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self

from rlvlm.core.checks import check_least


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The env of the task."""

    drawing: ClassVar[tuple[str, ...]] = ()
    """Fields that decide how images are drawn, and nothing else."""
    episode_steps: int = 250
    """Env steps per episode, >= 1; the limit is a truncation, not an end."""
    draw_path: bool = False
    """Whether the last image that a judge sees has the path of the hand, or of what moves in its place, drawn on it.
    The policy and a learned reward see images without."""

    def __post_init__(self) -> None:
        check_least(self, "env", 1, "episode_steps")

    def for_demonstrations(self) -> Self:
        """The same, without what only makes training faster or its judge blind."""
        return self

    def play_settings(self) -> dict[str, Any]:
        """Settings that demonstrations depend on, by name, however they are drawn."""
        settings = asdict(self.for_demonstrations())
        return {name: value for name, value in settings.items() if name not in (*self.drawing, "draw_path")}

    def for_evaluation(self) -> Self:
        """The same as evaluations play it."""
        return self.for_demonstrations()

    def for_model(self, is_pocket: bool) -> Self:  # noqa: ARG002 - for families that draw differently for some
        """The same, drawn as a model wants it that is a pocket model or comes trained."""
        return self

    def for_people(self) -> Self:
        """The same, drawn as people want to see it."""
        return self

    def without_effect(self) -> Mapping[str, str]:
        """Settings that have no effect beside the others: name to what is why."""
        return {}

    @property
    def start_words(self) -> str:
        """How episodes start and what is drawn, for a run's card, e.g. `start fixed, `; empty where nothing differs."""
        return ""


@dataclass(frozen=True, kw_only=True)
class StepEnvConfig(EnvConfig):
    """An env in steps."""

    start: Literal["fixed", "near", "random"] = "fixed"
    """fixed: the paper's start, near the object; random: the stock start positions, drawn anew each episode; near: so
    drawn too, but in the paper's MetaWorld tasks the hand begins as near to the object as in the paper."""
    num_envs: int = 1
    """Envs stepped in parallel, >= 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, "env", 1, "num_envs")

    @property
    def start_words(self) -> str:
        return f"start {self.start}, "


@dataclass(frozen=True, kw_only=True)
class TurnEnvConfig(EnvConfig):
    """An env in turns."""

    has_split: ClassVar[bool] = True
    """Whether starts can be held out; where they lie anywhere, none is met twice, and there is nothing to hold out."""
    rules: Literal["strict", "legacy"] = "strict"
    """strict: replies are read strictly, and one that cannot be read does nothing and costs a penalty; legacy: the
    reference's rules with their loopholes, and a random action for such a reply."""
    split: Literal["all", "training", "held_out"] = "all"
    """Which starts (hands of cards, layouts of grids) episodes may have. A fifth of them is held out, always the same
    ones. A run of training plays the others, and its evaluations those that were held out."""
    prompt: str = ""
    """File with the words of the prompt, for instance a reference's; empty: the env's own. In it $prompt stands for the
    env's own, $actions for the legal words, $goal for the goal and, in games of points, $formula for the formula so
    far; $$ is a dollar sign."""

    def for_evaluation(self) -> Self:
        """See `EnvConfig`: with the held-out starts where training leaves some out."""
        same = super().for_evaluation()
        return replace(same, split="held_out") if self.split == "training" else same


@dataclass(frozen=True, kw_only=True)
class ChunkEnvConfig(EnvConfig):
    """An env in chunks."""

    continue_after_success: bool = False
    """While training: whether an episode goes on to its time limit after its success, which counts all the same. Where
    a judge rewards, an end at success shows the truth in the episode's length. Evaluations and demonstrations always
    end at success."""

    def for_demonstrations(self) -> Self:
        """See `EnvConfig`: with an end at success."""
        return replace(super().for_demonstrations(), continue_after_success=False)


KIND_CONFIGS: Mapping[str, type[EnvConfig]] = {
    "steps": StepEnvConfig,
    "turns": TurnEnvConfig,
    "chunks": ChunkEnvConfig,
}
"""By `Task.kind`: what an env has that brings no settings of its own."""


_RENAMED = {"plays_on": "continue_after_success", "shows_last": "prompt_last_action"}


def current_settings(env: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an env that an older file names, under the names and values of today; others as they are."""
    settings = {_RENAMED.get(name, name): value for name, value in env.items()}
    if settings.get("look") in ("auto", "benchmark", "light"):  # LIBERO's; a setting of one's own may have that name
        settings["render_style"] = settings.pop("look")
    # LIBERO's too, which is known by its own settings, or by those of all families that files of before kinds have
    if "moved" in settings and settings.keys() & {"mesh_cell", "deals"}:
        settings["start_jitter_m"] = settings.pop("moved")
    return settings | ({"rules": "strict"} if settings.get("rules") == "mended" else {})
