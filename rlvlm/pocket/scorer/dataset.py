"""What the pocket scorer is taught: images with what there is to read in them, and questions with their answers.

A question is about the utility of a turn, or about the success of a clip; its words are those of `judges.prompts`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlvlm.core.judging import Clip
from rlvlm.core.steps import Frames
from rlvlm.envs.push_block import table
from rlvlm.envs.registry import task_goal
from rlvlm.judges import prompts
from rlvlm.judges.config import ScoreMode
from rlvlm.pocket.judge.batches import NUM_VISUAL_TOKENS, Dialogues, padded, rope_positions
from rlvlm.pocket.judge.tokenizer import IMAGE, STOP
from rlvlm.pocket.policy.model import PICTURE_PX, build_image_processor
from rlvlm.pocket.scenes.clips import READABLE_SIZES, Push, collect_pushes, readable
from rlvlm.pocket.scenes.pairs import Split
from rlvlm.pocket.scenes.turns import AWAY, NEARER, REACHED, SAME, PlayedTurn, collect_turns
from rlvlm.vlms.images import resize

_BACKWARDS = {AWAY: NEARER, SAME: SAME, NEARER: AWAY, REACHED: AWAY}
"""The rating of a turn whose two images are exchanged."""
_P_BACKWARDS, _P_OTHER_GOAL = 0.15, 0.15
_P_OTHER_INSTRUCTION = 0.3
_MOMENTS = 8
"""Images kept of an episode of push_block."""
_BLANK = np.zeros((2, 2, 2, 3), np.uint8)
_SLOT, _ACTION_SLOT = "GOALSLOT", "ACTIONSLOT"


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTask:
    """An env in turns that the scorer is taught."""

    name: str
    splits_starts: bool
    """Whether it has starts enough that some are kept from the training."""
    share: float
    """Of the turns that are played."""


TURN_TASKS = (
    TurnTask(name="number_line", splits_starts=False, share=0.2),
    TurnTask(name="empty_random_6x6", splits_starts=False, share=0.3),
    TurnTask(name="doorkey_6x6", splits_starts=True, share=2.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvImages:
    """Images of one env, each different one once, at the size that the model sees."""

    task: str
    frames: Frames
    """[N, 144, 144, 3]."""
    values: NDArray[np.int64]
    """[N, V] what there is to read in each."""
    sizes: tuple[int, ...]
    """[V] how many values each column may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked about some images, and the right answer."""

    mode: ScoreMode
    goal: str
    pictures: tuple[int, ...]
    """In order of time, counted through all envs."""
    answer: str
    action: str = ""


class QuestionDataset:
    """Images and questions of one split.

    Args:
        split: of episodes.
        turns: turns per task of share 1.
        pushes: episodes of push_block.
        seed: of both.
    """

    def __init__(self, split: Split, turns: int, pushes: int, seed: int) -> None:
        self.envs: list[EnvImages] = []
        self.turns: list[tuple[PlayedTurn, tuple[int, int]]] = []
        self.pushes: list[tuple[Push, int]] = []
        """Each with the place of its first image; the others follow in order of time."""
        self._first = 0
        processor = build_image_processor()
        for task in TURN_TASKS:
            self._add_turns(task, split, round(turns * task.share), seed, processor)
        if pushes:
            self._add_pushes(collect_pushes(pushes, split, seed))
        ratings = [(turn.task, turn.rating) for turn, _ in self.turns]
        kinds = sorted(set(ratings))
        counts = {kind: ratings.count(kind) for kind in kinds}
        weights = np.array([_WEIGHTS[rating] / counts[task, rating] for task, rating in ratings])
        self._weights = weights / weights.sum()
        self._goals = tuple({turn.goal for turn, _ in self.turns})

    def __len__(self) -> int:
        return self._first

    def turn(self, rng: np.random.Generator) -> Question:
        """A question about a turn: all tasks and ratings about equally often; some turned round, some off the goal."""
        turn, pictures = self.turns[rng.choice(len(self.turns), p=self._weights)]
        chance = rng.random()
        if chance < _P_BACKWARDS:
            return backwards(turn, pictures)
        if chance < _P_BACKWARDS + _P_OTHER_GOAL:
            others = [goal for goal in (*self._goals, prompts.OTHER_GOAL, prompts.OTHER_GOAL) if goal != turn.goal]
            return replace(question_of(turn, pictures), goal=str(rng.choice(others)), answer=str(SAME))
        return question_of(turn, pictures)

    def clip(self, num_frames: int, rng: np.random.Generator) -> Question:
        """A question about `num_frames` moments of an episode, or of its beginning; some turned round, some about
        another colour.
        """
        push, first = self.pushes[rng.integers(len(self.pushes))]
        last = len(push.snapshots) - 1 if rng.random() < 0.8 else int(rng.integers(1, len(push.snapshots)))
        moments = np.linspace(0, last, num_frames).round().astype(int)
        if rng.random() < _P_BACKWARDS:
            moments = moments[::-1]
        goal = push.instruction
        if rng.random() < _P_OTHER_INSTRUCTION:
            goal = str(rng.choice(push.other_instructions))
        return clip_question(push, first, moments, goal)

    def _add_turns(self, task: TurnTask, split: Split, count: int, seed: int, processor: Any) -> None:
        env, turns = collect_turns(task.name, count, split, seed, splits_starts=task.splits_starts)
        shown = {
            key: snapshot for turn in turns for key, snapshot in zip(turn.keys, (turn.before, turn.after), strict=True)
        }
        places = {key: self._first + place for place, key in enumerate(shown)}
        keys = env.image_key(np.stack(list(shown.values())))
        columns = np.flatnonzero((keys != keys[0]).any(0))
        frames = [resize(env.draw(snapshot[None])[0], processor) for snapshot in shown.values()]
        sizes = tuple(int(keys[:, column].max()) + 1 for column in columns)
        self.envs.append(EnvImages(task=task.name, frames=np.stack(frames), values=keys[:, columns], sizes=sizes))
        self.turns += [(turn, (places[turn.keys[0]], places[turn.keys[1]])) for turn in turns]
        self._first += len(shown)
        env.close()

    def _add_pushes(self, played: Sequence[Push]) -> None:
        pushes = [push.thinned(_MOMENTS) for push in played]
        snapshots = np.concatenate([push.snapshots for push in pushes])
        places = np.cumsum([0, *(len(push.snapshots) for push in pushes[:-1])])
        frames = np.concatenate(
            [table.draw(part, PICTURE_PX) for part in np.array_split(snapshots, len(snapshots) // 200 + 1)]
        )
        self.pushes += [(push, self._first + place) for push, place in zip(pushes, places.tolist(), strict=True)]
        self.envs.append(EnvImages(task="push_block", frames=frames, values=readable(snapshots), sizes=READABLE_SIZES))
        self._first += len(snapshots)


_WEIGHTS = {AWAY: 1.0, SAME: 1.0, NEARER: 1.0, REACHED: 0.7}
"""How often each rating is asked about."""


def question_of(turn: PlayedTurn, pictures: tuple[int, int]) -> Question:
    """The question about a turn as a run asks it."""
    return Question(mode="utility", goal=turn.goal, action=turn.action, pictures=pictures, answer=str(turn.rating))


def backwards(turn: PlayedTurn, pictures: tuple[int, int]) -> Question:
    """The same with its images exchanged."""
    before, after = pictures
    return replace(question_of(turn, (after, before)), answer=str(_BACKWARDS[turn.rating]))


def clip_question(push: Push, first: int, moments: NDArray[np.int64], goal: str) -> Question:
    """The question whether `goal` is reached at the last of `moments`."""
    answer = "yes" if push.is_reached(goal, push.snapshots[moments[-1]]) else "no"
    return Question(mode="success", goal=goal, pictures=tuple((first + moments).tolist()), answer=answer)


def chat_of(question: Question, num_frames: int) -> Any:
    """The turns that a judge is asked with; their images are blanks that hold the place."""
    blank = np.repeat(_BLANK[:1], num_frames, axis=0)
    return prompts.score_messages(question.mode, Clip(goal=question.goal, frames=blank, action=question.action))


def dialogues_of(questions: Sequence[Question], tokenizer: Any) -> Dialogues:
    """Questions about equally many images, as token ids."""
    told = []
    for question in questions:
        chat = chat_of(question, len(question.pictures))
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = prompt.replace(IMAGE, IMAGE * NUM_VISUAL_TOKENS)
        told.append((tokenizer(prompt).input_ids, tokenizer(question.answer + STOP).input_ids))
    ids, targets = padded(told, tokenizer.pad_token_id)
    pictures = torch.tensor([question.pictures for question in questions])
    is_visual = ids == tokenizer.convert_tokens_to_ids(IMAGE)
    return Dialogues(ids=ids, targets=targets, positions=rope_positions(is_visual), pictures=pictures)


def phrases() -> list[str]:
    """The fixed pieces of the questions, longest first: one token each."""
    pieces = {"user\n", "assistant\n", *prompts.RATING_TEXTS, *prompts.ANSWERS_YES, *prompts.ANSWERS_NO}
    for mode in ("utility", "success"):
        slots = Question(mode=mode, goal=_SLOT, action=_ACTION_SLOT, pictures=(0, 1), answer="")
        for text in _texts(slots):
            pieces.update(piece for half in text.split(_SLOT) for piece in half.split(_ACTION_SLOT))
    return sorted((piece for piece in pieces if piece), key=lambda piece: (-len(piece), piece))


def corpus(words: Sequence[str]) -> list[str]:
    """What the tokenizer learns its merges from: all goals, and `words`."""
    goals = [task_goal(task.name) for task in TURN_TASKS]
    asked = [f"push the {name} block onto the pad" for name in table.COLOUR_NAMES]
    return [*goals, *asked, prompts.OTHER_GOAL, prompts.NO_ACTION, *words] * 3


def _texts(question: Question) -> Iterator[str]:
    for message in chat_of(question, len(question.pictures)):
        yield from (part["text"] for part in message["content"] if part["type"] == "text")
