"""What the pocket policy is taught: moments of each env, what can be read in their images, and replies.

A reply names rightly what its image shows, but its action is drawn evenly from the legal ones, and so are the words
that give the reason for it. The model learns to see and to write, not to play.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from minigrid.core.constants import OBJECT_TO_IDX
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray
from rlvlm.envs.registry import make_env, task_env
from rlvlm.envs.turn_env import TurnEnv


@dataclass(frozen=True, kw_only=True, slots=True)
class TaughtTask:
    """One task the pocket policy is taught."""

    name: str
    """Of an env in turns."""
    plan: str
    """Regular expression whose group is the part of an expert's thought that gives the action away."""
    plans: Callable[[NDArray[np.int64]], list[str]] | None = None
    """Gives plans that are right about the image with this key but choose nothing; None: plans are borrowed from
    moments whose expert does what is drawn."""
    phrases: tuple[str, ...] = ()
    """Pieces of thoughts that become one token each: shorter replies are sampled faster."""
    share: float = 1.0
    """Of the training's moments, compared with the other tasks."""


def visible_things(key: NDArray[np.int64]) -> list[str]:
    """Each key, door and goal square in a square MiniGrid, and its cell: `key at 1,3`. `key` as of its env."""
    side = math.isqrt((len(key) - _AGENT) // _PER_CELL)
    kinds = key[:-_AGENT].reshape(side, side, _PER_CELL)[..., 0]
    named = {OBJECT_TO_IDX[name]: name for name in ("key", "door", "goal")}
    return [f"{named[kinds[x, y]]} at {x},{y}" for x in range(side) for y in range(side) if kinds[x, y] in named]


_EXPERT_SHARE = 0.6
"""Chance that a turn is played by the expert; by chance otherwise."""
_P_LEAVE = 0.06
"""Chance of leaving an episode early, so that long ones do not crowd out other beginnings."""
_AGENT, _PER_CELL = 3, 3
"""Entries of a MiniGrid's key that tell of the agent, and of each cell."""
_THOUGHTS = r'"thoughts": "(.*)"$'
_FORMULAS = (
    " + ",
    " - ",
    " * ",
    " / ",
    "( ",
    " )",
    " next.",
    "No formula that makes 24 can follow, so I end it.",
) + tuple(
    f" makes {target}{rest}"
    for target in (12, 24)
    for rest in (", so I append ", " and every card is used, so the formula is complete.")
)
_GRID = (
    "I stand at ",
    *(f" and face {side}. Next is the " for side in ("right", "down", "left", "up")),
    *(f"{thing} at " for thing in ("key", "door", "goal")),
)

TAUGHT_TASKS: tuple[TaughtTask, ...] = (
    TaughtTask(
        name="number_line",
        plan=_THOUGHTS,
        phrases=("The target is larger", "The target is smaller", ", so I add one.", ", so I subtract one."),
        share=0.3,
    ),
    TaughtTask(
        name="blackjack",
        plan=r", so I (.*)\"$",
        phrases=("I have ", "a soft ", " and the dealer shows ", "an ace", ", so I ", "stand.", "hit."),
        share=1.5,
    ),
    TaughtTask(name="ez_points", plan=_THOUGHTS, phrases=_FORMULAS),
    TaughtTask(name="points24", plan=_THOUGHTS, phrases=_FORMULAS, share=1.5),
    *(
        TaughtTask(name=name, plan=r"Next is the (.*)\.\"$", plans=visible_things, phrases=_GRID, share=share)
        for name, share in (
            ("empty_random_6x6", 0.5),
            ("doorkey_6x6", 1.0),
        )
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A turn of an episode, and what an expert knows about it."""

    task: str
    snapshot: FloatArray
    """[S]."""
    key: NDArray[np.int64]
    """[P] equal for equal images; its entries are what there is to read."""
    prompt: str
    thought: str
    """The expert's."""
    action: int
    """The expert's."""
    legal: tuple[int, ...]

    @property
    def image(self) -> bytes:
        """Key of the image, for a policy that has seen it."""
        return self.task.encode() + self.key.tobytes()


def collect_moments(task: TaughtTask, count: int, seed: int) -> tuple[TurnEnv, list[Moment]]:
    """An env of the task, and `count` moments of episodes played partly by its expert, partly by chance.

    Args:
        task: what to play.
        count: moments.
        seed: of episodes and play.
    """
    env: TurnEnv = make_env(task.name, task_env(task.name), seed)
    rng = np.random.default_rng(seed)
    turn, info = env.reset(seed=seed)
    moments = []
    while len(moments) < count:
        action = env.expert_action()
        moments.append(
            Moment(
                task=task.name,
                snapshot=turn.snapshot,
                key=env.image_key(turn.snapshot[None])[0],
                prompt=turn.prompt,
                thought=env.expert_thought(),
                action=action,
                legal=info["legal"],
            )
        )
        chosen = action if rng.random() < _EXPERT_SHARE else int(rng.choice(info["legal"]))
        turn, _, terminated, truncated, info = env.step(env.action_text(chosen))
        if terminated or truncated or rng.random() < _P_LEAVE:
            turn, info = env.reset()
    return env, moments


class Replies:
    """Draws replies to moments: what they read is right, what they plan and do is chance.

    Args:
        tasks: say where a thought gives the action away.
        moments: whose plans are borrowed, of all tasks.
    """

    def __init__(self, tasks: Sequence[TaughtTask], moments: Sequence[Moment]) -> None:
        self._tasks = {task.name: task for task in tasks}
        self._pool: dict[tuple[str, int], list[str]] = defaultdict(list)
        self._any: dict[str, list[str]] = defaultdict(list)
        for moment in moments:
            plan = self._find(moment)[1]
            self._pool[moment.task, moment.action].append(plan)
            self._any[moment.task].append(plan)

    def draw(self, moment: Moment, env: TurnEnv, rng: np.random.Generator) -> str:
        """One reply: a legal action, each as likely, with a plan that says nothing about what is wise here."""
        action = int(rng.choice(moment.legal))
        before, _, after = self._find(moment)
        make = self._tasks[moment.task].plans
        plans = make(moment.key) if make else self._pool.get((moment.task, action)) or self._any[moment.task]
        return env.action_text(action, f"{before}{plans[rng.integers(len(plans))]}{after}")

    def reading(self, moment: Moment) -> str:
        """What every right reply to `moment` begins with, up to its plan."""
        return self._find(moment)[0]

    def _find(self, moment: Moment) -> tuple[str, str, str]:
        match = re.search(self._tasks[moment.task].plan, moment.thought)
        if match is None:
            raise ValueError(f"{moment.task}: no plan to be found in {moment.thought!r}")
        begin, end = match.span(1)
        return moment.thought[:begin], match[1], moment.thought[end:]


def readable(moments: Sequence[Moment]) -> tuple[NDArray[np.int64], list[int]]:
    """Columns of the images' keys that differ among `moments` of one task, and how many values each may take."""
    keys = np.stack([moment.key for moment in moments])
    columns = np.flatnonzero((keys != keys[0]).any(0))
    return columns, [int(keys[:, column].max()) + 1 for column in columns]


def prompt_phrases(moments: Sequence[Moment]) -> Iterator[str]:
    """Sentences and half sentences that all prompts of a task share, each to become one token."""
    prompts: dict[str, set[str]] = defaultdict(set)
    for moment in moments:
        prompts[moment.task].add(moment.prompt)
    for alike in prompts.values():
        pieces = [set(re.findall(r".+?(?:[.;:] |$)", prompt)) for prompt in alike]
        yield from sorted(set.intersection(*pieces))


def key_phrases(replies: Sequence[str]) -> Iterator[str]:
    """What stands between the values of the JSON objects `replies`, each to become one token."""
    pieces = {piece for reply in replies for piece in re.findall(r'(?:^\{|"?\]?, )"[a-z ]+": ["\[]?', reply)}
    yield from sorted(pieces)
    yield '"}'
