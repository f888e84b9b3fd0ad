"""What a judge is asked, as versioned data: one template, one slot for the goal, the same for every task and model.

`chat.ChatJudge` renders these messages, and the pocket judge is trained on exactly them. Change any wording here and
`VERSION` must rise: it is part of every stamp, so that old answers are never mistaken for new ones.

Source: RL-VLM-F, arXiv:2402.03681, for the order of the parts and the labels 0, 1 and -1; the wording is our own.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlvlm.types import Clip, Frames, Query

VERSION = 1

Mode = Literal["two_stage", "single_stage", "direct"]
Message = dict[str, Any]
"""One turn in the Qwen chat format: `{"role": str, "content": [{"type": "text" | "image", ...}]}`."""
Chat = list[Message]

LABEL_TEXTS = ("0", "1", "-1")
"""How left, right and tie are written in an answer."""
MAX_FRAMES = 8
"""Pictures shown per side; longer clips are thinned evenly, first and last picture kept."""
MAX_GOAL_CHARS = 200
MAX_REPORT_CHARS = 4_000
"""A stage-1 answer is cut to this length before it is pasted into stage 2."""

INTRO_PICTURES = "Two pictures of one scene. Goal: {goal}."
INTRO_CLIPS = "Two clips of one scene, pictures in order of time. Goal: {goal}."
TAG_LEFT = "First:"
TAG_RIGHT = "Second:"
QUESTIONS = (
    "1. What does the first show? 2. What does the second show? "
    "3. Do they differ in how near they are to the goal, and how?"
)
LABEL_REQUEST = (
    "Which is nearer to the goal? Write one line with only the label: "
    "0 for the first, 1 for the second, -1 if there is no difference or you are not sure."
)
END_WITH_LABEL = "Answer the questions, then end with the label. "
REPORT = "Two pictures of one scene were compared. Goal: {goal}. Questions: {questions}\nReport:\n{report}\n"
INTRO_SCORE = "One scene, pictures in order of time. Goal: {goal}."
SCORE_REQUEST = (
    "How much of the goal is reached at the end? Write one line with only a whole number: "
    "0 for nothing, 100 for all of it."
)

_FORBIDDEN = frozenset("<>|{}[]`\\")


def version(mode: Mode | Literal["score"]) -> str:
    """Name and version of a prompt as it stands in `Stamp.prompt`, e.g. `two_stage/1`."""
    return f"{mode}/{VERSION}"


def check_goal(goal: str) -> str:
    """The goal, stripped, once it is known to be plain text.

    Raises:
        ValueError: the goal is empty, longer than `MAX_GOAL_CHARS`, or has control characters or brackets,
            which could end a turn of the chat or open another slot.
    """
    goal = goal.strip().rstrip(".")
    if not 0 < len(goal) <= MAX_GOAL_CHARS:
        raise ValueError(f"a goal needs 1 to {MAX_GOAL_CHARS} characters, got {len(goal)}; say it in a few words")
    bad = sorted({char for char in goal if char in _FORBIDDEN or not char.isprintable()})
    if bad:
        raise ValueError(f"a goal is one line of plain words, got {bad!r} in it; write it without these characters")
    return goal


def compare_messages(mode: Mode, query: Query) -> list[Message]:
    """The first turn put to the vision model: intro, tag, left pictures, tag, right pictures, questions."""
    goal = check_goal(query.goal)
    is_clip = max(len(query.left), len(query.right)) > 1
    intro = (INTRO_CLIPS if is_clip else INTRO_PICTURES).format(goal=goal)
    request = {
        "two_stage": QUESTIONS,
        "single_stage": f"{QUESTIONS} {END_WITH_LABEL}{LABEL_REQUEST}",
        "direct": LABEL_REQUEST,
    }[mode]
    content = [_text(f"{intro}\n{TAG_LEFT}"), *_images(query.left), _text(TAG_RIGHT), *_images(query.right)]
    return [{"role": "user", "content": [*content, _text(request)]}]


def label_messages(goal: str, report: str) -> list[Message]:
    """Stage 2 of `two_stage`: text only, with the stage-1 answer pasted in.

    Args:
        goal: the query's goal.
        report: the stage-1 answer, untrusted: cut to `MAX_REPORT_CHARS` and freed of marks that could end the turn.
    """
    clean = report[:MAX_REPORT_CHARS].replace("<|", "< ").replace("|>", " >").strip()
    text = REPORT.format(goal=check_goal(goal), questions=QUESTIONS, report=clean)
    return [{"role": "user", "content": [_text(text + LABEL_REQUEST)]}]


def score_messages(clip: Clip) -> list[Message]:
    """The turn that asks for one clip's progress, in percent."""
    intro = INTRO_SCORE.format(goal=check_goal(clip.goal))
    return [{"role": "user", "content": [_text(intro), *_images(clip.frames), _text(SCORE_REQUEST)]}]


def pictures(messages: Sequence[Message]) -> list[NDArray[np.uint8]]:
    """Every picture of the messages, each `[H, W, 3]`, in the order in which the processor will meet them."""
    parts = [part for message in messages for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def thin(frames: Frames) -> Frames:
    """At most `MAX_FRAMES` of the frames `[L, H, W, 3]`, evenly spread, the first and the last among them."""
    if len(frames) <= MAX_FRAMES:
        return frames
    return frames[np.linspace(0, len(frames) - 1, MAX_FRAMES).round().astype(int)]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _images(frames: Frames) -> list[dict[str, Any]]:
    return [{"type": "image", "image": frame} for frame in thin(frames)]
