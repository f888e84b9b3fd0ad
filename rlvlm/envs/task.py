"""What is known of a task before anything of it is loaded."""

from dataclasses import dataclass
from typing import Literal

from rlvlm.envs.config import EnvConfig

Kind = Literal["steps", "turns", "chunks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A name that envs can be made of."""

    name: str
    """What users type, e.g. `drawer_open`."""
    goal: str
    """Fills the slot of the prompt, e.g. `open the drawer`; empty where only the user can say it."""
    maker: str
    """`module:function` or `module:Class`, called with (config: EnvConfig, seed: int), giving an env."""
    arguments: tuple[str, ...] = ()
    """What the maker is called with besides, for one that makes several tasks."""
    env: EnvConfig = EnvConfig()
    """How a run sets the env up, unless told otherwise: start, robot, episode length."""
    used_settings: tuple[str, ...] | None = None
    """Fields of `EnvConfig` that change its envs, besides `episode_steps`; others are refused. None: nobody said."""
    most_steps: int | None = None
    """Env steps after which its own rules end every episode, so that a greater `episode_steps` is refused; None: only
    `episode_steps` limits an episode, or nobody knows."""
    goal_state: str = ""
    """The goal as a sentence that is true once it is reached, e.g. `the drawer is open`, for judges that compare a
    image with words; empty takes the goal phrase."""
    return_range: tuple[float, float] | None = None
    """True episode returns that count as 0 (random play) and 1 (solved) where runs are compared; None: the task is
    compared by its success rate."""
    recipe: str = ""
    """`module:function` that returns the config a run starts from, e.g. a `RunConfig`; empty takes the
    general defaults."""
    kind: Kind = "steps"
    """What its envs are: stepped with numbers (`StepEnv`), talked to in turns (`TurnEnv`), or driven by chunks of
    actions (`ChunkEnv`)."""
