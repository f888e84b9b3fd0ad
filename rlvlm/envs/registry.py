"""Tasks by name. Importing it loads no simulator: a task's env is imported only when it is made.

`package.module:NAME`, where NAME is a `Task`, works wherever a task's name is expected: your own task needs no
registration, and every process finds it. So do `gym:ID` for Gymnasium's envs, and `FAMILY/words` for the only task of a
family whose goal contains these words: `libero_object/alphabet soup` is `libero_object/0`.
"""

import difflib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Literal, overload

from rlvlm.core.errors import UsageError, first_line
from rlvlm.core.foreign import read_text
from rlvlm.core.guests import guest_of, guests, load
from rlvlm.core.leads import CodeRef
from rlvlm.core.own_code import import_own
from rlvlm.core.references import GYMNASIUM
from rlvlm.envs.config import KIND_CONFIGS, ChunkEnvConfig, EnvConfig, StepEnvConfig, TurnEnvConfig
from rlvlm.envs.deformables.goals import DEFORMABLE_ENVS, DEFORMABLE_GOALS, RETURN_RANGES
from rlvlm.envs.gym_cards.config import CardsConfig
from rlvlm.envs.gym_cards.games import GAMES
from rlvlm.envs.gymnasium_config import GymnasiumConfig
from rlvlm.envs.libero.config import LiberoConfig
from rlvlm.envs.libero.tasks import EPISODE_STEPS, SUITES, instruction_of
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.envs.metaworld.goals import PAPER_GOALS, STOCK_GOALS
from rlvlm.envs.minigrid.config import MiniGridConfig
from rlvlm.envs.minigrid.ids import IDS, SHORT_NAMES, WITHOUT_EXPERT, family
from rlvlm.envs.robosuite.config import PickPlaceConfig
from rlvlm.envs.robosuite.words import GOAL as CAN_GOAL

if TYPE_CHECKING:
    import gymnasium as gym

    from rlvlm.envs.env import ChunkEnv, StepEnv, TurnEnv


Kind = Literal["steps", "turns", "chunks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A named task, from which envs are made."""

    name: str
    """Name that users type, e.g. `drawer_open`."""
    goal: str
    """Goal phrase for the prompt, e.g. `open the drawer`; empty if only the user can state it."""
    maker: CodeRef
    """`module:function` or `module:Class`, called with (config: EnvConfig, seed: int), giving an env."""
    arguments: tuple[str, ...] = ()
    """Further arguments for a maker that makes several tasks."""
    env: EnvConfig = EnvConfig()
    """Default env settings of a run. Their class decides which settings the env has: a class of your own or, for a
    plain `EnvConfig`, that of its kind."""
    max_steps: int | None = None
    """Env steps after which the env's own rules end every episode, so that a greater `episode_steps` is refused; None:
    only `episode_steps` limits an episode, or the number is unknown."""
    goal_state: str = ""
    """The goal as a sentence that is true once it is reached, e.g. `the drawer is open`, for judges that compare an
    image with a text; empty takes the goal phrase."""
    return_range: tuple[float, float] | None = None
    """True episode returns that count as 0 (random play) and 1 (solved) when runs are compared; None: the task is
    compared by success rate."""
    recipe: CodeRef = ""
    """`module:function` that returns a run's default config, e.g. a `RunConfig`; empty takes the general defaults."""
    kind: Kind = "steps"
    """Kind of its envs: stepped with numbers (`StepEnv`), played in turns (`TurnEnv`), or driven by chunks of actions
    (`ChunkEnv`)."""
    has_expert: bool = True
    """Whether a script can play it for demonstrations; for envs in turns."""
    needs_renderer: bool = True
    """Whether its images are drawn by OpenGL, which a run then tries before it starts."""

    def __post_init__(self) -> None:
        if type(self.env) is EnvConfig:
            object.__setattr__(self, "env", KIND_CONFIGS[self.kind](episode_steps=self.env.episode_steps))
        if not isinstance(self.env, KIND_CONFIGS[self.kind]):
            wanted = KIND_CONFIGS[self.kind].__name__
            raise ValueError(
                f"{self.name} is an env in {self.kind}, whose settings are a {wanted} or a class derived from it, got "
                f"a {type(self.env).__name__}"
            )

    def load_maker(self) -> Callable[..., Any]:
        """Imports and returns the function that makes the env."""
        module, _, function = self.maker.partition(":")
        return getattr(import_own(module), function)


def shipped_tasks() -> Iterator[Task]:
    """Yields each task of the core once."""
    named: list[tuple[str, Mapping[str, tuple[str, str]], str, EnvConfig]] = [
        ("", PAPER_GOALS, "metaworld.env:make_paper", MetaWorldConfig()),
        ("metaworld/", STOCK_GOALS, "metaworld.env:make_stock", MetaWorldConfig(robot="visible")),
    ]
    for prefix, goals, maker, env in named:
        for name, (goal, goal_state) in goals.items():
            yield Task(
                name=f"{prefix}{name}",
                goal=goal,
                goal_state=goal_state,
                arguments=(name,),
                maker=f"rlvlm.envs.{maker}",
                env=env,
            )
    yield Task(
        name="cartpole",
        goal="balance the brown pole on the black cart to be upright",
        goal_state="the brown pole on the black cart is upright",
        maker="rlvlm.envs.cartpole:CartPole",
        env=StepEnvConfig(episode_steps=100),
        return_range=(-2_640.0, 0.0),
        needs_renderer=False,
    )
    for name, (goal, goal_state) in DEFORMABLE_GOALS.items():
        yield Task(
            name=name,
            goal=goal,
            goal_state=goal_state,
            return_range=RETURN_RANGES[name],
            maker=f"rlvlm.envs.deformables.{name}:make_{name}",
            env=DEFORMABLE_ENVS[name],
        )
    for name, (goal, goal_state, maker, turns) in GAMES.items():
        yield Task(
            name=name,
            goal=goal,
            goal_state=goal_state,
            maker=f"rlvlm.envs.gym_cards.{maker}",
            env=CardsConfig(episode_steps=turns),
            max_steps=turns,
            kind="turns",
            needs_renderer=False,
        )
    yield Task(
        name="push_block",
        goal="push the block of the named colour onto the pad",
        goal_state="the block of the named colour lies on the pad",
        maker="rlvlm.envs.push_block:PushBlock",
        env=ChunkEnvConfig(episode_steps=32),
        kind="chunks",
        needs_renderer=False,
    )
    yield Task(
        name="pick_place_can",
        goal=CAN_GOAL,
        goal_state="the red can lies in its bin",
        maker="rlvlm.envs.robosuite.pick_place_can:PickPlaceCan",
        env=PickPlaceConfig(episode_steps=120),
        kind="turns",
    )
    for suite, files in SUITES.items():
        yield Task(
            name=suite,
            goal="do what the instruction says",
            maker="rlvlm.envs.libero.suite:LiberoSuite",
            arguments=(suite,),
            env=LiberoConfig(episode_steps=EPISODE_STEPS[suite]),
            kind="chunks",
        )
        for number, file in enumerate(files):
            yield Task(
                name=f"{suite}/{number}",
                goal=instruction_of(file),
                maker="rlvlm.envs.libero.env:LiberoEnv",
                arguments=(suite, str(number)),
                env=LiberoConfig(episode_steps=EPISODE_STEPS[suite]),
                kind="chunks",
            )
    for name, env_id, turns in [(short, *entry) for short, entry in SHORT_NAMES.items()] + [
        (f"minigrid/{env_id}", env_id, 1_000) for env_id in IDS
    ]:
        goal, goal_state, _ = family(env_id)
        yield Task(
            name=name,
            goal=goal,
            goal_state=goal_state,
            arguments=(env_id,),
            maker="rlvlm.envs.minigrid.env:MiniGridTurnEnv",
            env=MiniGridConfig(episode_steps=turns),
            max_steps=IDS[env_id],
            kind="turns",
            has_expert=env_id not in WITHOUT_EXPERT,
            needs_renderer=False,
        )


_LOGGER = logging.getLogger(__name__)
_GYMNASIUM_ENV = GymnasiumConfig()
_TASKS: dict[str, Task] = {}


def register(task: Task) -> None:
    """Adds a task; a plugin calls this when it is imported.

    Raises:
        ValueError: the name is taken by another task, or `maker` is not of the form `module:function`.
    """
    if _TASKS.get(task.name, task) != task:  # a plugin imported twice registers the same task again
        raise ValueError(f"the task {task.name!r} is already registered as {_TASKS[task.name]}; choose another name")
    if not all(task.maker.partition(":")):
        raise ValueError(f"maker must look like package.module:function, got {task.maker!r}")
    if task.return_range is not None and not task.return_range[0] < task.return_range[1]:
        raise ValueError(f"return_range must be two rising returns, got {task.return_range}")
    _TASKS[task.name] = task


def task_names() -> list[str]:
    """Returns all names, sorted; those of a family, e.g. `metaworld/door-open-v3`, come last."""
    return sorted(_tasks(), key=lambda name: ("/" in name, name))


def task_summary() -> str:
    """Returns all names in one line, with families as counts: `cartpole, drawer_open, ..., metaworld/NAME (50)`.

    A family that is also a task, as LIBERO's suites are, is written `libero_10[/NAME] (10)`.
    """
    families = task_families()
    singles = [name for name in task_names() if "/" not in name and name not in families]
    members = {family: f"{family}[/NAME]" if family in _tasks() else f"{family}/NAME" for family in families}
    return ", ".join(singles + [f"{members[family]} ({len(names)})" for family, names in families.items()])


def task_families() -> dict[str, list[str]]:
    """Returns the task names of each family, both sorted, e.g. `metaworld/door-open-v3` under `metaworld`."""
    families: dict[str, list[str]] = {}
    for name in task_names():
        if "/" in name:
            families.setdefault(name.partition("/")[0], []).append(name)
    return families


def find_task(name: str) -> Task:
    """Returns the registered task, the task of `gym:ID`, or the `Task` that `package.module:NAME` refers to.

    Raises:
        UsageError: there is no such task; the message proposes one with a similar name.
    """
    if not isinstance(name, str):  # from Python
        raise UsageError(f"a task is named by a text such as 'drawer_open', got {name!r}", f"tasks: {task_summary()}")
    # registered names come first, then references to import; no registered name contains a colon
    if name in _tasks():
        return _tasks()[name]
    if name.startswith(GYMNASIUM):
        return _gymnasium_task(name)
    if ":" in name:
        return _load(name)
    if "/" in name and (alike := _of_family(name)):
        if len(alike) == 1:
            return alike[0]
        shown = "; ".join(f"{task.name} {task.goal!r}" for task in alike)
        raise UsageError(f"{name!r} fits {len(alike)} tasks: {shown}", "say more of it, or take its number")
    if name.endswith(".py"):
        module = name.removesuffix(".py").replace("/", ".").lstrip(".")
        what = f"{name!r} is a file; a task of your own is named by its module and the Task in it"
        raise UsageError(what, f"{module}:NAME, e.g. {module}:{module.rpartition('.')[2].upper()}")
    own = task_families().get(name.partition("/")[0]) if "/" in name else None
    known = f"{name.partition('/')[0]} has {len(own)}, {own[0]} to {own[-1]}" if own else f"tasks: {task_summary()}"
    missing = guest_of("tasks", name.partition("/")[0])
    raise UsageError(f"there is no task {name!r}{missing}; {known}", _near(name))


def full_name(name: str) -> str:
    """Returns the registered name that `name` stands for; `gym:ID` and `package.module:NAME` unchanged."""
    found = find_task(name)
    return name if ":" in name else found.name


def task_goal(name: str) -> str:
    """Returns the goal phrase of a task, e.g. `open the drawer`; raises as `find_task` does."""
    return find_task(name).goal


def task_env(name: str) -> Any:
    """Returns a task's default env settings, an `EnvConfig` of the class that its envs take; raises as `find_task`."""
    return find_task(name).env


def own_settings(kind: type[EnvConfig], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `settings` without those that only other families' envs have, which files of older versions contain."""
    shipped = {field.name for task in _tasks().values() for field in fields(task.env)}
    others = shipped - {field.name for field in fields(kind)}
    return {name: value for name, value in settings.items() if name not in others}


def check_env_settings(name: str, config: EnvConfig) -> None:
    """Raises unless the settings have the class that the task takes, and its episodes can be as long as configured.
    Imports nothing, so a user's own task is not checked.

    Raises:
        ValueError: names the class, or the longest episode.
    """
    task = _tasks().get(name)
    wanted = _GYMNASIUM_ENV if name.startswith(GYMNASIUM) else task.env if task else config
    # a base of the task's class is fine too: `make_env` fills in the rest
    if not (isinstance(config, type(wanted)) or isinstance(wanted, type(config))):
        got = type(config).__name__
        raise ValueError(f"the settings of {name}'s env are a {type(wanted).__name__}, got a {got}")
    if task is None or task.max_steps is None or config.episode_steps == task.env.episode_steps:
        return
    if config.episode_steps > task.max_steps:
        raise ValueError(
            f"env.episode_steps must be <= {task.max_steps}, got {config.episode_steps}: the rules of {task.name} end "
            "every episode by then"
        )


@overload
def make_env(task: str, config: StepEnvConfig, seed: int) -> "StepEnv": ...
@overload
def make_env(task: str, config: TurnEnvConfig, seed: int) -> "TurnEnv": ...
@overload
def make_env(task: str, config: ChunkEnvConfig, seed: int) -> "ChunkEnv": ...
@overload
def make_env(task: str, config: EnvConfig, seed: int) -> Any: ...
def make_env(task: str, config: EnvConfig, seed: int) -> Any:
    """Makes one env, seeded; `config.num_envs` is ignored.

    Its class follows from `Task.kind`: a `StepEnv`, a `TurnEnv` or a `ChunkEnv`.

    Raises:
        UsageError: there is no such task, or `config.prompt` cannot be read or contains unknown names.
        MachineError: this machine cannot draw it.
    """
    found = find_task(task)
    if type(config) is not type(found.env) and isinstance(found.env, type(config)):  # the other settings as in the task
        config = replace(found.env, **{field.name: getattr(config, field.name) for field in fields(config)})
    env = found.load_maker()(config, seed, *found.arguments)
    if lacking := [name for name in getattr(env, "promised", ()) if not hasattr(env, name)]:
        what = f"the env {type(env).__name__} of {task} ({found.maker}) has no {', '.join(lacking)}"
        raise UsageError(what, "set it in the class, or in __init__: rlvlm/envs/env.py says what it is")
    if config.draw_path:
        env.hand_path(env.snapshot()[None])  # raises, with the env's name, if the env knows no hand
        env.draws_path = True
    if isinstance(config, TurnEnvConfig) and config.prompt:
        try:
            env.template = Template(read_text(Path(config.prompt).expanduser()))
            env.turn()  # fills the prompt once, so that unknown names raise here and not during a run
        except OSError as error:
            what = f"env.prompt {config.prompt} cannot be read: {first_line(error)}"
            raise UsageError(what, "name a text file") from error
        except (KeyError, ValueError) as error:
            what = f"env.prompt {config.prompt} names what there is not: {error}"
            raise UsageError(what, f"known: {', '.join(f'${name}' for name in env.prompt_fields())}, $$") from error
    if isinstance(config, TurnEnvConfig) and config.split != "all" and (few := few_starts(task)) is not None:
        warn_once(f"{task} has {few} different starts; --env.split holds out about a fifth of them, {few / 5:.0f}")
    return env


_SEEDS = 40  # seeds whose starts are counted, for envs that do not count them
_REPEATED = 0.8  # with a smaller share of distinct starts, ten times as many seeds are counted
_FEW = 200  # fewer starts than this count as few: recipes evaluate on this many episodes


@cache
def few_starts(task: str) -> int | None:
    """Returns the number of starts of an env in turns if evaluations would repeat them, else None.

    The env's own count is used, or the starts of some seeds are counted.
    """
    known = _tasks().get(task)
    if known is None or not isinstance(known.env, TurnEnvConfig) or not known.env.has_split:
        return None
    env = make_env(task, known.env, 0)
    count = env.num_starts
    # a few seeds show whether starts repeat at all; only then is it worth playing ten times as many
    if count is None and env.count_starts(_SEEDS) < _REPEATED * _SEEDS:
        count = env.count_starts(10 * _SEEDS)
    env.close()
    return count if count is not None and count < _FEW else None


@cache
def warn_once(text: str) -> None:
    """Logs a warning once per process."""
    _LOGGER.warning(text)


def make_vector(task: str, config: StepEnvConfig, seed: int) -> "gym.vector.SyncVectorEnv":
    """Makes `config.num_envs` envs stepped side by side, each with its own seed drawn from `seed`.

    An env whose episode ends is reset within the same step: its `obs` are the first of the new episode, and the last
    of the old one are in `infos["final_obs"]` and `infos["final_info"]`.

    Raises:
        UsageError: there is no such task.
        MachineError: this machine cannot draw it.
    """
    import numpy as np
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    find_task(task)  # an unknown name raises here rather than inside Gymnasium
    seeds = np.random.SeedSequence(seed).generate_state(config.num_envs)
    makers = [partial(make_env, task, config, int(own)) for own in seeds]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def _near(name: str) -> str:
    """Returns the tasks that `name` may have meant; for a name with a family, only tasks of that family."""
    if re.fullmatch(r"[\w./-]+-v\d+", name):
        import gymnasium as gym  # only if the name looks like one of its envs

        if name in gym.registry:
            ours = name.rpartition("-")[0].lower()
            return (
                f"did you mean {ours}, or Gymnasium's gym:{name}?" if ours in _tasks() else f"did you mean gym:{name}?"
            )
    families = task_families()
    family, _, member = name.rpartition("/")
    # the family first: the nearest one if misspelt, so that the member is sought among few names
    closest = difflib.get_close_matches(family or name, families, n=1)
    if family or name in families:
        known = {full.partition("/")[2]: full for full in families[closest[0]]} if closest else {}
    else:
        known = {full.rpartition("/")[2]: full for full in _tasks()} | {full: full for full in _tasks()}
    # long names must agree in more characters; a number resembles others without meaning them
    near = difflib.get_close_matches(member, known, n=1, cutoff=0.7 if family else 0.6)
    if near and (not near[0].isdigit() or (family and member == near[0])):
        return f"did you mean {known[near[0]]}?"
    which = f" {closest[0]}" if closest and (family or name in families) else ""
    return f"rlvlm check-task{which} --list  shows those that there are"


def _of_family(name: str) -> list[Task]:
    """Returns the tasks of the family before the slash whose goal contains the words after it."""
    family, _, piece = name.partition("/")
    text = piece.replace("_", " ").strip("\"' ").lower()
    return [task for full, task in _tasks().items() if text and full.startswith(f"{family}/") and text in task.goal]


def _gymnasium_task(name: str) -> Task:
    """Returns a Gymnasium env's task; as in Gymnasium, `gym:MODULE:ID` first imports a module with envs."""
    import gymnasium as gym  # only if one of its envs is asked for

    env_id = name.removeprefix(GYMNASIUM)
    module, _, registered = env_id.rpartition(":")
    try:
        if module:
            import_own(module)
        episode_steps = gym.spec(registered).max_episode_steps
    except ImportError as error:
        raise UsageError(f"Gymnasium cannot find {env_id!r}: {error}", _where(module)) from error
    except gym.error.Error as error:
        fix = "python -c 'import gymnasium; gymnasium.pprint_registry()'  shows those that there are"
        raise UsageError(f"Gymnasium cannot find {env_id!r}: {error}", fix) from error
    return Task(
        name=name,
        goal="",
        maker="rlvlm.envs.gymnasium_env:WrappedGymEnv",
        arguments=(env_id,),
        env=replace(_GYMNASIUM_ENV, episode_steps=episode_steps or _GYMNASIUM_ENV.episode_steps),
    )


def _load(reference: str) -> Task:
    module, _, attribute = reference.partition(":")
    try:
        task = getattr(import_own(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        # a path in place of a module's name is a likely mistake, and shows which folder to put on the path
        folder, _, file = module.removesuffix(".py").rpartition("/")
        fix = f"PYTHONPATH={folder} and {file}:{attribute}" if folder else _where(module)
        if isinstance(error, AttributeError):
            fix = f"give it as {module}:NAME, NAME being a Task in that file"
        raise UsageError(f"cannot load the task {reference!r}: {error}", fix) from error
    if not isinstance(task, Task):
        import gymnasium as gym  # only if the name is wrong

        fix = f"docs/tasks.md: {attribute} = Task(name=..., goal=..., maker=...)"
        if isinstance(task, type) and issubclass(task, gym.Env):
            fix = (
                f'register it: gymnasium.register("{attribute}-v0", entry_point={attribute}) in {module}.py, and name '
            )
            fix += f"gym:{module}:{attribute}-v0; a Gymnasium env needs no Task"
        what = f"the class {attribute}" if isinstance(task, type) else f"{type(task).__name__}"
        raise UsageError(f"{reference!r} must be a {Task.__module__}.Task, got {what}", fix)
    return task


def _where(module: str) -> str:
    """Explains how to make a user's module importable."""
    file = f"{module.replace('.', '/')}.py"
    return f"{file} must lie in this folder ({Path.cwd()}): cd to where it is, or set PYTHONPATH=THAT_FOLDER"


@cache
def _add_guests_tasks() -> None:
    """Registers the guests' tasks: at the first question and not at import, which their own modules may begin."""
    for name, guest in guests().items():
        try:
            for task in load(guest.tasks)() if guest.tasks else ():
                register(task)
        except (UsageError, ValueError) as error:
            _LOGGER.warning("the tasks of the guest %s are left out: %s", name, error)


def _tasks() -> Mapping[str, Task]:
    """Returns every registered task by name."""
    _add_guests_tasks()
    return _TASKS


for _task in shipped_tasks():
    register(_task)
