"""Configuration of an env; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from rlvlm.core.checks import check_interval, check_least


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig:
    """The env of the task."""

    start: Literal["fixed", "near", "random"] = "fixed"
    """fixed: the paper's start, near the object; random: the stock start positions, drawn anew each episode; near: so
    drawn too, but in the paper's MetaWorld tasks the hand begins as near to the object as in the paper."""
    robot: Literal["hidden", "visible"] = "hidden"
    """Whether images show the robot; the paper hides it because the arm covers the object."""
    episode_steps: int = 250
    """Env steps per episode, >= 1; the limit is a truncation, not an end."""
    num_envs: int = 1
    """Envs stepped in parallel, >= 1."""
    rules: Literal["mended", "legacy"] = "mended"
    """Of envs in turns. mended: strict reading of replies, a reply that cannot be read does nothing and costs a
    penalty; legacy: the reference's rules with their loopholes, and a random action for such a reply."""
    deals: Literal["any", "solvable"] = "any"
    """Of card games that may be impossible to win: any hand, as the reference deals, or solvable ones only."""
    split: Literal["all", "training", "held_out"] = "all"
    """Of envs in turns: which starts (hands of cards, layouts of grids) episodes may have. A fifth of them is held
    out, always the same ones. A run of training plays the others, and its evaluations those that were held out."""
    prompt: str = ""
    """Of envs in turns: file with the words of the prompt, for instance a reference's; empty: the env's own. In it
    $prompt stands for the env's own, $actions for the legal words, $goal for the goal and, in games of points, $formula
    for the formula so far; $$ is a dollar sign."""
    shows_text: bool = False
    """Of MiniGrid: whether the prompt states the mission, the direction and what is carried, which no image shows. Of
    robosuite: where the hand is."""
    shows_last: bool = False
    """Of MiniGrid: whether the prompt states the last action, and whether it changed anything. A greedy policy that is
    not given it repeats forever what changes nothing."""
    move_ticks: int = 4
    """Of robosuite's envs in turns: control ticks, of 50 ms, that a move of the hand goes on for, >= 1. The reference
    has 1, and episodes of hundreds of turns."""
    second_view: bool = False
    """Of robosuite's envs in turns: whether the image shows, to the right of what the wrist sees, the bin from the
    robot's base. From the start the wrist does not see four cans in ten."""
    view_px: int = 256
    """Of robosuite's envs in turns: side of each view, pixels, in [32, 1024]. The reference has 256; half of that
    takes two thirds of the time to draw."""
    plays_on: bool = False
    """Of envs in chunks, while training: whether an episode goes on to its time limit after its success, which counts
    all the same. Where a judge rewards, an end at success shows the truth in the episode's length. Evaluations and
    demonstrations always end at success."""
    moved: float = 0.0
    """Of LIBERO's envs: things are moved by up to so much, metres, along both sides of the table, from where the
    benchmark's saved starts have them; there many of them never move, so a policy need not look."""
    look: Literal["auto", "benchmark", "light"] = "auto"
    """Of LIBERO's images. benchmark: as the benchmark itself draws them, with every point of its meshes, shadows,
    reflections and smooth edges, which is what published checkpoints were trained on; light: without, 3 to 20 times
    as fast on a CPU. auto: light for pocket models, which were trained so, and benchmark for all others; policy and
    judge each see their own."""
    mesh_cell: float = 0.005
    """Of LIBERO's light images: points of a mesh that are nearer to each other than this, metres, are drawn as
    one. 0.012 takes half the time and differs by less than a pixel at 64 pixels."""
    physics: Literal["exact", "fast"] = "exact"
    """Of envs on robosuite, LIBERO's too, while training. exact: the benchmark's 2 ms steps; fast: 5 ms, twice the
    speed and slightly other movements. Evaluations and demonstrations are always exact."""

    def __post_init__(self) -> None:
        check_least(self, "env", 1, "episode_steps", "num_envs", "move_ticks")
        check_interval(self, "env", "[32, 1024]", "view_px")
        check_interval(self, "env", "[0, 0.1]", "moved")
        check_interval(self, "env", "(0, 0.1]", "mesh_cell")

    def drawn_for(self, is_pocket: bool) -> Self:
        """The same with `look` decided, for a model that is a pocket model or not."""
        return self if self.look != "auto" else replace(self, look="light" if is_pocket else "benchmark")

    def for_evaluation(self) -> Self:
        """The same with exact physics, an end at success, and the held-out starts where training leaves some out."""
        split = "held_out" if self.split == "training" else self.split
        return replace(self, physics="exact", plays_on=False, split=split)
