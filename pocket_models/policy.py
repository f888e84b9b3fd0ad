"""Training data of the pocket policy: it learns to read the images of tasks in turns, and to write replies.

A reply names rightly what its image shows, but its action is drawn evenly from the legal ones, and so are the words
that give the reason for it. The model learns to see and to write, not to play.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from minigrid.core.constants import OBJECT_TO_IDX
from numpy.typing import NDArray

from pocket_models.dataset import FINE_PATCH_PX, ImageGroup, ReadingHeads, Rows, readable_columns
from pocket_models.network import IMAGE, TOKENS_PER_IMAGE, build_image_processor, build_tokenizer
from rlvlm.core.steps import FloatArray
from rlvlm.envs.env import TurnEnv
from rlvlm.envs.registry import make_env, task_env
from rlvlm.vlms.chats import Chat
from rlvlm.vlms.images import resize
from rlvlm.vlms.supervised import DialogueBuilder, Dialogues

# chances that a turn is played by the expert, and that an episode is left early, so that long ones do not crowd out
# other beginnings
_EXPERT_SHARE, _P_LEAVE = 0.6, 0.06
_HELD_OUT_SEED = 1_000_000
_AGENT, _PER_CELL = 3, 3  # entries of a MiniGrid's key that say where the agent is, and what is in each cell


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTask:
    """One task that the pocket policy learns to read."""

    name: str
    """Name of a task in turns."""
    plan: str
    """Regular expression whose group is the part of an expert's thought that gives the action away."""
    plans: Callable[[NDArray[np.int64]], list[str]] | None = None
    """Gives plans that are right about the image with this key but choose nothing; None: plans are borrowed from
    moments whose expert does what is drawn."""
    phrases: tuple[str, ...] = ()
    """Pieces of thoughts that become one token each: shorter replies are sampled faster."""
    share: float = 1.0
    """Share of the training's moments, compared with the other tasks."""


def visible_things(key: NDArray[np.int64]) -> list[str]:
    """Each key, door and goal square in a square MiniGrid, and its cell: `key at 1,3`. `key` as of its env."""
    side = math.isqrt((len(key) - _AGENT) // _PER_CELL)
    kinds = key[:-_AGENT].reshape(side, side, _PER_CELL)[..., 0]
    named = {OBJECT_TO_IDX[name]: name for name in ("key", "door", "goal")}
    return [f"{named[kinds[x, y]]} at {x},{y}" for x in range(side) for y in range(side) if kinds[x, y] in named]


_THOUGHTS = r'"thoughts": "(.*)"$'
_FORMULAS = (
    *(" + ", " - ", " * ", " / ", "( ", " )", " next.", "No formula that makes 24 can follow, so I end it."),
    *(
        f" makes {target}{rest}"
        for target in (12, 24)
        for rest in (", so I append ", " and every card is used, so the formula is complete.")
    ),
)
_GRID = (
    "I stand at ",
    *(f" and face {side}. Next is the " for side in ("right", "down", "left", "up")),
    *(f"{thing} at " for thing in ("key", "door", "goal")),
)
POLICY_TASKS: tuple[PolicyTask, ...] = (
    PolicyTask(
        name="number_line",
        plan=_THOUGHTS,
        phrases=("The target is larger", "The target is smaller", ", so I add one.", ", so I subtract one."),
        share=0.3,
    ),
    PolicyTask(
        name="blackjack",
        plan=r", so I (.*)\"$",
        phrases=("I have ", "a soft ", " and the dealer shows ", "an ace", ", so I ", "stand.", "hit."),
        share=1.5,
    ),
    PolicyTask(name="ez_points", plan=_THOUGHTS, phrases=_FORMULAS),
    PolicyTask(name="points24", plan=_THOUGHTS, phrases=_FORMULAS, share=1.5),
    *(
        PolicyTask(name=name, plan=r"Next is the (.*)\.\"$", plans=visible_things, phrases=_GRID, share=share)
        for name, share in (("empty_random_6x6", 0.5), ("doorkey_6x6", 1.0))
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

    @property
    def chat(self) -> Chat:
        """What the policy is asked in a run."""
        content = [{"type": "image"}, {"type": "text", "text": self.prompt}]
        return [{"role": "user", "content": content}]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyData:
    """The pocket policy: moments of gym-cards and MiniGrid."""

    tasks: tuple[str, ...] = ()
    """Those to learn; none means all."""
    moments: int = 3_000
    """Moments of play per task of share 1."""
    held_out: int = 300
    """Moments per task of share 1, of other episodes, that reading is checked on."""

    def __post_init__(self) -> None:
        if min(self.moments, self.held_out) < 1:
            raise ValueError(f"moments and held_out must be >= 1, got {self.moments} and {self.held_out}")
        if unknown := set(self.tasks) - {task.name for task in POLICY_TASKS}:
            raise ValueError(f"no such tasks: {', '.join(sorted(unknown))}")

    def load(self, seed: int, rng: np.random.Generator, tokenizer: Any = None) -> "PolicyDataset":
        """Plays; a tokenizer is built unless given."""
        return PolicyDataset(self, seed, rng, tokenizer)


class PolicyDataset:
    """Images of several tasks with what there is to read in them, and replies.

    Args:
        config: what to play.
        seed: of the play.
        rng: draws replies for the tokenizer to learn from.
        tokenizer: of a model to go on from; None builds one.
    """

    patch_px = FINE_PATCH_PX
    jitters_training = jitters_encoding = False

    def __init__(self, config: PolicyData, seed: int, rng: np.random.Generator, tokenizer: Any = None) -> None:
        self.abilities: dict[str, Any] = {}
        self.held_out: dict[str, Rows] = {}
        self._tasks = [task for task in POLICY_TASKS if not config.tasks or task.name in config.tasks]
        self._groups: list[ImageGroup] = []
        self._rows: list[Rows] = []  # of each task, the image of each moment
        self._envs: dict[str, TurnEnv] = {}
        self._moments: list[Moment] = []
        frames: list[NDArray[np.uint8]] = []
        image_processor = build_image_processor(FINE_PATCH_PX)
        for task in self._tasks:
            env, moments = collect_moments(task, round(config.moments * task.share), seed)
            _, unseen = collect_moments(task, round(config.held_out * task.share), seed + _HELD_OUT_SEED)
            # each image is drawn and encoded once, however many moments look alike
            distinct = {moment.image: moment for moment in [*moments, *unseen]}
            row_of = {image: len(frames) + place for place, image in enumerate(distinct)}
            keys = np.stack([moment.key for moment in distinct.values()])
            columns, sizes = readable_columns(keys)
            group = ImageGroup(task=task.name, start=len(frames), values=keys[:, columns], sizes=sizes)
            frames += [resize(env.draw(moment.snapshot[None])[0], image_processor) for moment in distinct.values()]
            self._groups.append(group)
            self._rows.append(np.array([row_of[moment.image] for moment in moments]))
            self.held_out[task.name] = np.array([row_of[moment.image] for moment in unseen])
            self._envs[task.name] = env
            self._moments += moments
        self.frames = np.stack(frames)
        self._image_of_moment = np.concatenate(self._rows)
        self._replies = Replies(self._tasks, self._moments)
        self.tokenizer = tokenizer or self._build_tokenizer(rng)
        self._dialogues = DialogueBuilder(self.tokenizer, IMAGE, IMAGE * TOKENS_PER_IMAGE)

    def _build_tokenizer(self, rng: np.random.Generator) -> Any:
        replies = [self._replies.draw(moment, self._envs[moment.task], rng) for moment in self._moments]
        prompts = dict.fromkeys(moment.prompt for moment in self._moments)
        names = (name for env in self._envs.values() for name in env.action_names if len(name) > 2)
        words = ["user\n", "assistant\n", *map(str, range(10, 32)), *names]
        phrases = [*prompt_phrases(self._moments), *key_phrases(replies), *(p for t in self._tasks for p in t.phrases)]
        return build_tokenizer([*replies, *prompts], dict.fromkeys([*words, *phrases]), 700)

    def build_heads(self, width: int) -> ReadingHeads:
        """One per task."""
        return ReadingHeads(self._groups, width)

    def draw_images(self, num: int, rng: np.random.Generator) -> Rows:
        """Images of moments, tasks by their share."""
        shares = np.array([task.share for task in self._tasks])
        counts = np.maximum(1, np.round(num * shares / shares.sum()).astype(int))
        return np.concatenate(
            [rows[rng.integers(len(rows), size=count)] for rows, count in zip(self._rows, counts, strict=True)]
        )

    def draw_dialogues(self, num: int, rng: np.random.Generator, errors: NDArray[np.float32]) -> dict[str, Dialogues]:
        """Freshly drawn replies to `num` moments."""
        rows = rng.integers(len(self._moments), size=num)
        moments = [self._moments[row] for row in rows]
        turns = [(moment.chat, self._replies.draw(moment, self._envs[moment.task], rng)) for moment in moments]
        return {"replies": self._dialogues.build(turns, self._image_of_moment[rows][:, None])}


def collect_moments(task: PolicyTask, count: int, seed: int) -> tuple[TurnEnv, list[Moment]]:
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
    # the expert alone would show few mistakes, and chance alone hardly an episode's end
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

    def __init__(self, tasks: Sequence[PolicyTask], moments: Sequence[Moment]) -> None:
        self._tasks = {task.name: task for task in tasks}
        self._by_action: dict[tuple[str, int], list[str]] = defaultdict(list)
        self._by_task: dict[str, list[str]] = defaultdict(list)
        for moment in moments:
            plan = self._split(moment)[1]
            self._by_action[moment.task, moment.action].append(plan)
            self._by_task[moment.task].append(plan)

    def draw(self, moment: Moment, env: TurnEnv, rng: np.random.Generator) -> str:
        """One reply: a legal action, each as likely, with a plan that says nothing about what is wise here."""
        action = int(rng.choice(moment.legal))  # by chance: it is to learn by trial, and nothing is to be unlearnt
        before, _, after = self._split(moment)
        # borrowed plans must fit the drawn action, or thought and action would contradict each other
        make = self._tasks[moment.task].plans
        plans = make(moment.key) if make else self._by_action.get((moment.task, action)) or self._by_task[moment.task]
        return env.action_text(action, f"{before}{plans[rng.integers(len(plans))]}{after}")

    def reading(self, moment: Moment) -> str:
        """What every right reply to `moment` begins with, up to its plan."""
        return self._split(moment)[0]

    def _split(self, moment: Moment) -> tuple[str, str, str]:
        """The expert's thought before its plan, the plan, and the rest."""
        match = re.search(self._tasks[moment.task].plan, moment.thought)
        if match is None:
            raise ValueError(f"{moment.task}: no plan to be found in {moment.thought!r}")
        begin, end = match.span(1)
        return moment.thought[:begin], match[1], moment.thought[end:]


def prompt_phrases(moments: Sequence[Moment]) -> Iterator[str]:
    """Sentences and half sentences that all prompts of a task share, each to become one token."""
    prompts: dict[str, set[str]] = defaultdict(set)
    for moment in moments:
        prompts[moment.task].add(moment.prompt)
    for alike in prompts.values():  # what differs from turn to turn, such as a formula, is in no intersection
        pieces = [set(re.findall(r".+?(?:[.;:] |$)", prompt)) for prompt in alike]
        yield from sorted(set.intersection(*pieces))


def key_phrases(replies: Sequence[str]) -> Iterator[str]:
    """What stands between the values of the JSON objects `replies`, each to become one token."""
    pieces = {piece for reply in replies for piece in re.findall(r'(?:^\{|"?\]?, )"[a-z ]+": ["\[]?', reply)}
    yield from sorted(pieces)
    yield '"}'
