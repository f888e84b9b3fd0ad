"""Training data of the pocket scorer: usefulness of turns, and whether a clip of `push_block` ends with success.

What a turn was worth follows from the expert's turns to success before and after it; the judge is shown images and the
action's name alone. Pushes are a script's: of one of the two blocks, towards the pad or beside it, with more or less
noise, some stopped half way. So there are successes, near misses, and wrong blocks brought to the pad.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pocket_models.dataset import (
    FINE_PATCH_PX,
    ImageGroup,
    LabelledQuestion,
    ReadingHeads,
    Rows,
    build_dialogues,
    question_phrases,
    readable_columns,
)
from pocket_models.network import PATCHES, build_image_processor, build_tokenizer
from pocket_models.scenes import Split
from rlvlm.core.steps import FloatArray
from rlvlm.envs import push_block as table
from rlvlm.envs.env import TurnEnv
from rlvlm.envs.push_block import instruction_of
from rlvlm.envs.registry import make_env, task_env, task_goal
from rlvlm.judges import prompts
from rlvlm.vlms.images import resize
from rlvlm.vlms.supervised import Dialogues

AWAY, SAME, NEARER, REACHED = RATINGS = (1, 2, 4, 5)
"""Ratings of a turn, as the prompt of a step's utility has them."""
# the rating of a turn whose two images are exchanged
_BACKWARDS = {AWAY: NEARER, SAME: SAME, NEARER: AWAY, REACHED: AWAY}
_WEIGHTS = {AWAY: 1.0, SAME: 1.0, NEARER: 1.0, REACHED: 0.7}  # how often each rating is asked about
_P_BACKWARDS, _P_OTHER_GOAL, _P_OTHER_COLOUR = 0.15, 0.15, 0.3
# chances that a turn is the expert's, that it is a reply that cannot be read and changes nothing, and that its
# episode is left early, so that long ones do not crowd out other beginnings
_EXPERT_SHARE, _P_UNREADABLE, _P_LEAVE = 0.5, 0.05, 0.08
_HELD_OUT_SEED = 50_000_000

PUSH_STEPS, _PUSH_FRAMES = 32, 8
"""Longest episode of push_block, as the task has it, and the moments kept of one."""
_CLIP_FRAMES = (2, 2, 3, 4, 6, 8)  # frames of the clips of a step, one of these
_P_OTHER_BLOCK, _P_BESIDE, _P_STOP, _MAX_NOISE = 0.25, 0.5, 0.4, 0.5
# standard deviation of where a push beside the pad ends, per axis: around the largest distance that succeeds
_BESIDE = 0.16
_BINS, _REACH = 31, 0.62  # offsets from the pad are read in so many bins between plus and minus this


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTask:
    """A task in turns that the scorer learns."""

    name: str
    splits_starts: bool
    """Whether it has starts enough that some are kept from the training."""
    share: float
    """Share of the turns that are played."""


TURN_TASKS = (
    TurnTask(name="number_line", splits_starts=False, share=0.2),
    TurnTask(name="empty_random_6x6", splits_starts=False, share=0.3),
    TurnTask(name="doorkey_6x6", splits_starts=True, share=2.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedTurn:
    """One turn, as it can be judged."""

    task: str
    goal: str
    action: str
    """Its name; empty where the reply could not be read."""
    snapshots: FloatArray
    """[2, S] before and after it."""
    keys: NDArray[np.int64]
    """[2, V] of both images: equal keys look the same."""
    rating: int
    """1, 2, 4 or 5."""

    def question(self, images: tuple[int, int], *, backwards: bool = False) -> LabelledQuestion:
        """What a run asks about it, given its images; or with these exchanged, and the answer that this deserves."""
        rating = _BACKWARDS[self.rating] if backwards else self.rating
        shown = images[::-1] if backwards else images
        return LabelledQuestion(mode="utility", goal=self.goal, action=self.action, images=shown, answer=str(rating))


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """One episode of push_block."""

    snapshots: FloatArray
    """[T + 1, 10] before the first step and after each; it ends with success or the time limit."""

    @property
    def is_success(self) -> bool:
        """Whether the block asked for lies on the pad at the end."""
        return bool(table.is_solved(self.snapshots[-1:])[0])

    @property
    def instruction(self) -> str:
        """What was asked."""
        return instruction_of(self.snapshots[0])

    @property
    def other_instructions(self) -> list[str]:
        """The same for every other colour, of a block on the table or not."""
        asked = table.COLOUR_NAMES[int(self.snapshots[0, table.COLOURS])]
        return [self.instruction.replace(asked, name) for name in table.COLOUR_NAMES if name != asked]

    def thinned(self, most: int) -> "Push":
        """The same episode in at most `most` moments, evenly spread, the first and the last among them."""
        count = min(most, len(self.snapshots))
        return Push(snapshots=self.snapshots[np.linspace(0, len(self.snapshots) - 1, count).round().astype(int)])

    def is_reached(self, instruction: str, snapshot: FloatArray) -> bool:
        """Whether `instruction` would be fulfilled at `snapshot` [10]."""
        seen = snapshot[None].copy()
        if instruction == instruction_of(snapshot):
            return bool(table.is_solved(seen)[0])
        # as if the other block had been asked for: places and colours of the two exchanged
        seen[:, table.ASKED], seen[:, table.OTHER] = snapshot[table.OTHER], snapshot[table.ASKED]
        seen[:, table.COLOURS : table.COLOURS + 2] = snapshot[[table.COLOURS + 1, table.COLOURS]]
        # a colour that is not on the table is never reached
        return instruction == instruction_of(seen[0]) and bool(table.is_solved(seen)[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerData:
    """The pocket scorer: turns of number_line and MiniGrid, clips of push_block."""

    moves: int = 8_000
    """Turns played per task of share 1."""
    pushes: int = 2_500
    """Episodes of push_block; 0 leaves clips out."""

    def __post_init__(self) -> None:
        if self.moves < 1 or self.pushes < 0:
            raise ValueError(f"need moves >= 1 and pushes >= 0, got {self.moves} and {self.pushes}")

    def load(self, seed: int, rng: np.random.Generator, tokenizer: Any = None) -> "ScorerDataset":
        """Plays; a tokenizer is built unless given."""
        return ScorerDataset(self.moves, self.pushes, seed, tokenizer)


class ScorerDataset:
    """Images, and questions about them.

    Args:
        moves: turns per task of share 1.
        pushes: episodes of push_block.
        seed: of both.
        tokenizer: of a model to go on from; None builds one.
    """

    patch_px = FINE_PATCH_PX
    jitters_training = jitters_encoding = False
    abilities: dict[str, Any] = {"compare": [], "score": ["success", "utility"], "goal_pictures": False}

    def __init__(self, moves: int, pushes: int, seed: int, tokenizer: Any = None) -> None:
        self.held_out: dict[str, Rows] = {}
        self.groups: list[ImageGroup] = []
        self.turns: list[tuple[PlayedTurn, tuple[int, int]]] = []
        """Each with its images."""
        self.pushes: list[tuple[Push, int]] = []
        """Each with its first image; the others follow in order of time."""
        frames: list[NDArray[np.uint8]] = []
        action_names: set[str] = set()
        image_processor = build_image_processor(FINE_PATCH_PX)
        for task in TURN_TASKS:
            env, turns = collect_turns(task, round(moves * task.share), "train", seed)
            start, rows = len(frames), dict[bytes, int]()
            snapshots: dict[bytes, FloatArray] = {}
            for turn in turns:
                for key, snapshot in zip(turn.keys, turn.snapshots, strict=True):
                    rows.setdefault(key.tobytes(), start + len(rows))
                    snapshots[key.tobytes()] = snapshot
                self.turns.append((turn, (rows[turn.keys[0].tobytes()], rows[turn.keys[1].tobytes()])))
            frames += [resize(env.draw(snapshot[None])[0], image_processor) for snapshot in snapshots.values()]
            keys = env.image_key(np.stack(list(snapshots.values())))
            columns, sizes = readable_columns(keys)
            self.groups.append(ImageGroup(task=task.name, start=start, values=keys[:, columns], sizes=sizes))
            action_names |= set(env.action_names)
            env.close()
        if pushes:
            thinned = [push.thinned(_PUSH_FRAMES) for push in collect_pushes(pushes, "train", seed)]
            snapshots_of_all = np.concatenate([push.snapshots for push in thinned])
            lengths = [len(push.snapshots) for push in thinned]
            firsts = len(frames) + np.cumsum([0, *lengths[:-1]])
            self.pushes = list(zip(thinned, firsts.tolist(), strict=True))
            values, sizes = readable_pushes(snapshots_of_all)
            self.groups.append(ImageGroup(task="push_block", start=len(frames), values=values, sizes=sizes))
            # some hundred at a time: all of them as floats would be gigabytes
            for part in np.array_split(snapshots_of_all, len(snapshots_of_all) // 200 + 1):
                frames += list(table.draw_tables(part, PATCHES * FINE_PATCH_PX))
        self.frames = np.stack(frames)
        kinds = [(turn.task, turn.rating) for turn, _ in self.turns]
        counts = Counter(kinds)
        # by the inverse of how often a rating occurs: most turns by chance change nothing
        weights = np.array([_WEIGHTS[rating] / counts[task, rating] for task, rating in kinds])
        self._weights = weights / weights.sum()
        self._goals = tuple(dict.fromkeys(turn.goal for turn, _ in self.turns))
        if tokenizer is None:
            goals = [task_goal(task.name) for task in TURN_TASKS]
            asked = [f"push the {name} block onto the pad" for name in table.COLOUR_NAMES]
            corpus = [*goals, *asked, prompts.OTHER_GOAL, prompts.NO_ACTION, *sorted(action_names)] * 3
            tokenizer = build_tokenizer(corpus, question_phrases(), 500)
        self.tokenizer = tokenizer

    def build_heads(self, width: int) -> ReadingHeads:
        """One per env."""
        return ReadingHeads(self.groups, width)

    def draw_images(self, num: int, rng: np.random.Generator) -> Rows:
        """Half of the images are of push_block, the rest by the root of their task's share."""
        shares = np.array([*(task.share**0.5 for task in TURN_TASKS), 4.0])[: len(self.groups)]
        counts = np.maximum(2, np.round(num * shares / shares.sum()).astype(int))
        return np.concatenate(
            [
                group.start + rng.integers(len(group.values), size=count)
                for group, count in zip(self.groups, counts, strict=True)
            ]
        )

    def draw_dialogues(self, num: int, rng: np.random.Generator, errors: NDArray[np.float32]) -> dict[str, Dialogues]:
        """`num` questions about turns, and half as many about clips of equally many frames."""
        turns = [self.draw_turn(rng) for _ in range(num)]
        batches = {"turns": build_dialogues(turns, self.tokenizer)}
        if self.pushes:
            num_frames = int(rng.choice(_CLIP_FRAMES))
            clips = [self.draw_clip(num_frames, rng) for _ in range(num // 2)]
            batches["clips"] = build_dialogues(clips, self.tokenizer)
        return batches

    def draw_turn(self, rng: np.random.Generator) -> LabelledQuestion:
        """A question about a turn: all tasks and ratings about equally often; some backwards, some off the goal."""
        turn, images = self.turns[rng.choice(len(self.turns), p=self._weights)]
        # backwards and off the goal the same images deserve another answer: it has to look at both, and read the goal
        chance = rng.random()
        if _P_BACKWARDS <= chance < _P_BACKWARDS + _P_OTHER_GOAL:
            others = [goal for goal in (*self._goals, prompts.OTHER_GOAL, prompts.OTHER_GOAL) if goal != turn.goal]
            return replace(turn.question(images), goal=str(rng.choice(others)), answer=str(SAME))
        return turn.question(images, backwards=chance < _P_BACKWARDS)

    def draw_clip(self, num_frames: int, rng: np.random.Generator) -> LabelledQuestion:
        """A question about `num_frames` moments of an episode, or of its beginning; some backwards, some about another
        colour.
        """
        push, first = self.pushes[rng.integers(len(self.pushes))]
        last = len(push.snapshots) - 1 if rng.random() < 0.8 else int(rng.integers(1, len(push.snapshots)))
        moments = np.linspace(0, last, num_frames).round().astype(int)
        if rng.random() < _P_BACKWARDS:
            moments = moments[::-1]  # what counts is the last image, and not that one of them shows success
        goal = push.instruction
        if rng.random() < _P_OTHER_COLOUR:
            goal = str(rng.choice(push.other_instructions))
        is_reached = push.is_reached(goal, push.snapshots[moments[-1]])
        images = tuple((first + moments).tolist())
        return LabelledQuestion(mode="success", goal=goal, images=images, answer="yes" if is_reached else "no")


def rating_of(left_before: int, left_after: int) -> int:
    """The rating of a turn, from the expert's turns to success before and after it."""
    if left_after == 0:
        return REACHED
    return NEARER if left_after < left_before else AWAY if left_after > left_before else SAME


def collect_turns(task: TurnTask, count: int, split: Split, seed: int) -> tuple[TurnEnv, list[PlayedTurn]]:
    """The env of a task, and `count` turns of episodes played half by its expert and half by chance.

    Args:
        task: knows its `turns_left`.
        count: turns.
        split: held out are other seeds and, where the task splits its starts, also other starts.
        seed: of episodes and play.
    """
    seed += _HELD_OUT_SEED if split == "held_out" else 0
    side: Literal["training", "held_out"] = "training" if split == "train" else "held_out"
    config = task_env(task.name)
    env: TurnEnv = make_env(task.name, replace(config, split=side) if task.splits_starts else config, seed)
    rng = np.random.default_rng(seed)
    turns = []
    turn, info = env.reset(seed=seed)
    for _ in range(count):
        left = env.turns_left()
        action: int | None = int(rng.choice(info["legal"]))
        if rng.random() < _P_UNREADABLE:
            action = None
        elif rng.random() < _EXPERT_SHARE:
            action = env.expert_action()
        before = turn.snapshot
        turn, _, terminated, truncated, info = env.step("" if action is None else env.action_text(action))
        after = env.turns_left()
        assert left is not None and after is not None, f"the expert of {task.name} does not know its turns to success"
        snapshots = np.stack([before, turn.snapshot])
        turns.append(
            PlayedTurn(
                task=task.name,
                goal=task_goal(task.name),
                action="" if action is None else env.action_names[action],
                snapshots=snapshots,
                keys=np.ascontiguousarray(env.image_key(snapshots), np.int64),
                rating=rating_of(left, after),
            )
        )
        if terminated or truncated or rng.random() < _P_LEAVE:
            turn, info = env.reset()
    return env, turns


def collect_pushes(count: int, split: Split, seed: int) -> list[Push]:
    """`count` episodes, the splits' from different seeds."""
    rng = np.random.default_rng(seed + (_HELD_OUT_SEED if split == "held_out" else 0))
    states = np.stack([table.random_table(rng) for _ in range(count)])
    pushes_other = rng.random(count) < _P_OTHER_BLOCK
    beside = np.where(rng.random((count, 1)) < _P_BESIDE, rng.normal(0, _BESIDE, (count, 2)), 0.0)
    noise = rng.uniform(0, _MAX_NOISE, (count, 1))
    stops = np.where(rng.random(count) < _P_STOP, rng.integers(1, PUSH_STEPS, count), PUSH_STEPS)
    history, ends = [states], np.full(count, PUSH_STEPS)
    for step in range(PUSH_STEPS):
        seen = states.copy()  # what the script is shown: the blocks exchanged, the pad moved
        seen[pushes_other, table.ASKED] = states[pushes_other, table.OTHER]
        seen[pushes_other, table.OTHER] = states[pushes_other, table.ASKED]
        seen[:, table.PAD] += beside.astype(np.float32)
        moves = table.scripted_moves(seen) + noise * rng.standard_normal((count, 2))
        moves[stops <= step] = 0.0  # stopped half way: the block was on its course, and yet it is no success
        states = table.moved(states, (np.clip(moves, -1, 1) * table.MAX_STEP).astype(np.float32))
        history.append(states)
        ends = np.where(table.is_solved(states), np.minimum(ends, step + 1), ends)
    episodes = np.stack(history, axis=1)
    return [Push(snapshots=episodes[row, : end + 1]) for row, end in enumerate(ends.tolist())]


def readable_pushes(snapshots: FloatArray) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """What there is to read in images of `snapshots` [N, 10], and how many values each column may take.

    Returns:
        [N, 12], for each colour in turn: the offset of its block from the pad in x and in y, as a bin (0: there is no
        such block), and whether it lies on the pad (0: no such block, 1: no, 2: yes).
    """
    values = np.zeros((len(snapshots), len(table.COLOUR_NAMES), 3), np.int64)
    rows = np.arange(len(snapshots))
    for place, block in enumerate((table.ASKED, table.OTHER)):
        colour = np.rint(snapshots[:, table.COLOURS + place]).astype(int)
        offset = snapshots[:, block] - snapshots[:, table.PAD]
        values[rows, colour, :2] = 1 + np.clip((offset + _REACH) / (2 * _REACH) * _BINS, 0, _BINS - 1).astype(int)
        values[rows, colour, 2] = 1 + (np.abs(offset).max(axis=1) < table.PAD_TOLERANCE)
    return values.reshape(len(snapshots), -1), (_BINS + 1, _BINS + 1, 3) * len(table.COLOUR_NAMES)
