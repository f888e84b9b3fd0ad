"""Prompts of the judges, as versioned data: one template with one slot for the goal, for every task and model.

`dialogues` sends these messages, and the pocket judge is trained on exactly them. After any change of wording `VERSION`
must rise: it is part of every stamp, so that old answers are never mistaken for new ones.

Sources, for the order of the parts and the scales; the wording is our own. Comparisons: RL-VLM-F, arXiv:2402.03681.
Rating: RoboReward, arXiv:2601.00675 (1 to 5 on the final state). Success: TOPReward, arXiv:2602.19313, as a yes-no
question. Video: PRIMO-R1, arXiv:2603.15600 (first image, clip, current image; think, then answer). Departure: the
clip's images are sent as images, not as a video file. Utility: the scorer of the VLM_PPO repository (image before,
action, image after, with a rubric). Departure: a scale of 1 to 5, each one token, in place of 0 to 10. Statement:
TOPReward in its own order: clip, statement, answer; without the chat template, as the paper's main setting,
`statement_raw`. Rubric: RoboReward with the clip first and a rubric. Delta: VLAC,
arXiv:2509.15937.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlvlm.core.errors import UsageError, first_line
from rlvlm.core.foreign import read_json
from rlvlm.core.judging import Clip, Query
from rlvlm.core.steps import Frames, spread
from rlvlm.judges.config import Abilities, JudgeConfig, Mode, ScoreMode, backends
from rlvlm.vlms.chats import RAW, Chat, image_parts, tame, text_part

VERSION = 1
_LATER_VERSIONS: dict[str, int] = {"video": 2, "delta": 2}
"""Versions of the forms that have changed since."""

LABEL_TEXTS = ("0", "1", "-1")
"""Texts of left, right and tie in an answer."""
MAX_FRAMES = 8
"""Images shown per side; longer clips are thinned evenly, with first and last image kept: the last one decides."""
MAX_FRAMES_OF: dict[ScoreMode, int] = {"statement": 16, "statement_raw": 16, "rubric": 16, "video": 22}
"""Images shown by the forms of published reward models that take more."""
MAX_IMAGES = max(2 * MAX_FRAMES + 1, max(MAX_FRAMES_OF.values()) + 3)
"""Maximum number of images in one chat: two clips, or a clip with start and present, and the goal."""
MAX_GOAL_CHARS = 200
MAX_REPORT_CHARS = 4_000
"""Length, in characters, to which a stage-1 answer is cut before it is pasted into stage 2."""

# `picture`, not `image`, here and in the prompts of the card games: small models were trained on these very words
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
RATING_REQUEST = (
    "Rate how much of the goal is reached at the end: 1 for nothing, 2 for a start, 3 for about half, "
    "4 for nearly all, 5 for all of it. Write one line with only the number."
)
SUCCESS_REQUEST = "Is the goal reached at the end? Answer with one word, yes or no."
TAG_GOAL = "Picture of the goal reached:"
TAG_SCENE = "The scene:"
TAG_BEFORE = "Before:"
TAG_AFTER = "The action: {action}. After it:"
NO_ACTION = "none that could be read"
"""Text in place of an action that could not be read."""
UTILITY_REQUEST = (
    "How useful was this step? 1: it leads away from the goal, 2: it changes nothing, 3: hard to say, "
    "4: it comes nearer to the goal, 5: the goal is reached by it. Write one line with only the number."
)
OTHER_GOAL = "leave everything as it is"
"""Goal that no task has, so that no action comes nearer to it; a test for judges."""
RATING_TEXTS = ("1", "2", "3", "4", "5")
"""Texts of the ratings of a step in an answer."""
ANSWERS_YES, ANSWERS_NO = ("yes", "Yes", "YES"), ("no", "No", "NO")
"""Texts of yes and no in an answer."""

_STATEMENT = (
    "The pictures above show a robot that does this task to its end: {goal}. Is this statement True or not? "
    "The answer is:"
)
SENTENCES = {
    "statement": _STATEMENT,
    "statement_raw": _STATEMENT,
    "rubric": "Give the robot in the clip one score for how far the task has come. Only the final state counts, not "
    "the time it took. Answer in the form ANSWER: score. 1: nothing that matters for the task has changed. 2: a small "
    "change in its direction, by far not enough. 3: a good part, with a large fault or several. 4: nearly all, with "
    "one small fault. 5: everything that the task asks for.\nTask: {goal}",
    "video_system": "You watch a robot at work and say how far it has come. First think between <think> and "
    "</think>, in three parts: <planning>, which steps the task needs; <observation>, what the pictures show; "
    "<reasoning>, which steps are done. Then give the result alone between <answer> and </answer>.",
    "video": "The robot's task: {goal}. The first picture shows the start, then comes the clip, and the last picture "
    "shows the present. How much of the task is done now? The answer is a whole number of percent, from 0 to 100.",
    "delta": "How much nearer to the end of the task is the second picture than the first? Answer with one number of "
    "percent, above 0 where the second is nearer, below 0 where the first is. The task: {goal}",
}
"""Our sentences for published reward models; `judge.wording` names a file with the published ones, also for those of
guests."""

_FORBIDDEN = frozenset("<>|{}[]`\\")


def version(mode: Mode | ScoreMode) -> str:
    """Returns the name and version of a prompt as in `Stamp.prompt`, e.g. `two_stage/1`."""
    return f"{mode}/{_LATER_VERSIONS.get(mode, VERSION)}"


def sentences_of(config: JudgeConfig) -> dict[str, str]:
    """Returns `SENTENCES` and those of guests, overridden by those of the file `judge.wording`.

    Raises:
        UsageError: the file cannot be read, has an unknown name, or a sentence without the goal where ours names it.
    """
    ours = dict(SENTENCES)
    for backend in backends().values():
        ours |= backend.sentences
    if not config.wording:
        return ours
    fix = "see docs/reward_models.md"
    try:
        given = read_json(Path(config.wording).expanduser())
        if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values()):
            raise ValueError("it must map names to sentences")
    except (OSError, ValueError) as error:
        raise UsageError(f"judge.wording {config.wording} cannot be read: {first_line(error)}", fix) from error
    for name, text in given.items():
        if name not in ours:
            raise UsageError(f"judge.wording has {name!r}, known are {', '.join(ours)}", fix)
        # a sentence without the goal would score every task alike, and nothing else would show it
        if text.count("{goal}") != ours[name].count("{goal}"):
            raise UsageError(f"judge.wording's {name!r} must have {{goal}} {ours[name].count('{goal}')} times", fix)
    return {**ours, **given}


def wording_mark(config: JudgeConfig) -> str:
    """Returns a mark for stamps that separates answers to other sentences from answers to ours; empty for ours."""
    if not config.wording:
        return ""
    # hash of the sentences and not of the file: another order of the same sentences is the same wording
    text = json.dumps(sentences_of(config), sort_keys=True)
    return f" wording={hashlib.sha256(text.encode()).hexdigest()[:16]}"


def check_goal(goal: str) -> str:
    """Returns the goal, stripped, after checking that it is plain text.

    Raises:
        ValueError: the goal is empty, longer than `MAX_GOAL_CHARS`, or has control characters or brackets, which could
            end a turn of the chat or open another slot.
    """
    goal = goal.strip().rstrip(".")
    if not 0 < len(goal) <= MAX_GOAL_CHARS:
        raise ValueError(f"a goal needs 1 to {MAX_GOAL_CHARS} characters, got {len(goal)}; say it in a few words")
    # brackets and backslashes open slots and special tokens of some chat templates
    bad = sorted({char for char in goal if char in _FORBIDDEN or not char.isprintable()})
    if bad:
        raise ValueError(f"a goal is one line of plain words, got {bad!r} in it; write it without these characters")
    return goal


def check_action(action: str) -> str:
    """Returns the action's text, stripped; `NO_ACTION` if it is empty.

    Raises:
        ValueError: the text is longer than a goal may be, or no line of plain words.
    """
    try:
        return check_goal(action) if action.strip() else NO_ACTION
    except ValueError as error:
        raise ValueError(f"an action is worded like a goal: {error}") from error


def problem_of(item: Query | Clip, abilities: Abilities) -> str | None:
    """Returns why a model with these abilities cannot be asked about an item; None if it can."""
    if item.goal_picture is not None and not abilities.goal_pictures:
        return "this judge was never shown an image of the goal in its training; leave out goal_picture"
    shown = [item.left, item.right] if isinstance(item, Query) else [item.frames]
    for frames in shown if item.goal_picture is None else [*shown, item.goal_picture]:
        if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != "uint8" or 0 in frames.shape:
            return f"images must be [L, H, W, 3] uint8, got {frames.shape} {frames.dtype}"
    try:
        check_goal(item.goal)
        if isinstance(item, Clip):
            check_action(item.action)
    except ValueError as error:
        return str(error)
    return None


def compare_messages(mode: Mode, query: Query) -> Chat:
    """Returns the first turn, to the VLM: intro, goal image, tag, left images, tag, right images, questions."""
    goal = check_goal(query.goal)
    # single images must not be described as a sequence: the pocket judge was trained on these very words
    is_clip = max(len(query.left), len(query.right)) > 1
    intro = (INTRO_CLIPS if is_clip else INTRO_PICTURES).format(goal=goal)
    request = {
        "two_stage": QUESTIONS,
        "single_stage": f"{QUESTIONS} {END_WITH_LABEL}{LABEL_REQUEST}",
        "direct": LABEL_REQUEST,
    }[mode]
    opening = _opening(intro, query.goal_picture, TAG_LEFT)
    left, right = (image_parts(spread(side, MAX_FRAMES)) for side in (query.left, query.right))
    return [{"role": "user", "content": [*opening, *left, text_part(TAG_RIGHT), *right, text_part(request)]}]


def label_messages(goal: str, report: str) -> Chat:
    """Returns stage 2 of `two_stage`: text only, with the stage-1 answer pasted in.

    Args:
        goal: the query's goal.
        report: the stage-1 answer, untrusted: cut to `MAX_REPORT_CHARS` and cleaned of tokens that could end the turn.
    """
    # the report is the model's own text, written about images that may hold text
    clean = tame(report[:MAX_REPORT_CHARS]).strip()
    text = REPORT.format(goal=check_goal(goal), questions=QUESTIONS, report=clean)
    return [{"role": "user", "content": [text_part(text + LABEL_REQUEST)]}]


def score_messages(mode: ScoreMode, clip: Clip, sentences: Mapping[str, str] = SENTENCES) -> Chat:
    """Returns the turns that ask for one clip's score.

    Published reward models have their own order: `statement`, `statement_raw` and `rubric` show the clip, then the
    sentence; `delta` two numbered images; `video` first image, clip and current image, then the question. `utility`
    shows the first and the last image with the action between them; the others show the clip once and differ only in
    their last line.
    """
    goal = check_goal(clip.goal)
    # forms of published models, each in its own order: deviations from their training cost accuracy
    if mode in sentences:
        request = text_part(sentences[mode].replace("{goal}", goal))
        shown = image_parts(spread(clip.frames, MAX_FRAMES_OF.get(mode, MAX_FRAMES)))
        if mode == "delta":
            first, second = shown[0], shown[-1]
            content = [text_part("Image-1: "), first, text_part("\nImage-2: "), second, text_part("\n"), request]
            return [{"role": "user", "content": content}]
        if mode == "video":  # start, clip, present
            goal_parts = [] if clip.goal_picture is None else [text_part(TAG_GOAL), *image_parts(clip.goal_picture[:1])]
            content = [*goal_parts, *image_parts(clip.frames[:1]), *shown, *image_parts(clip.frames[-1:]), request]
            system = text_part(sentences["video_system"])
            return [{"role": "system", "content": [system]}, {"role": "user", "content": content}]
        return [{"role": RAW if mode == "statement_raw" else "user", "content": [*shown, request]}]
    if mode == "utility":
        content = [
            *_opening(f"One step in a task. Goal: {goal}.", clip.goal_picture, TAG_BEFORE),
            *image_parts(clip.frames[:1]),
            text_part(TAG_AFTER.format(action=check_action(clip.action))),
            *image_parts(clip.frames[-1:]),
            text_part(UTILITY_REQUEST),
        ]
        return [{"role": "user", "content": content}]
    request = {"progress": SCORE_REQUEST, "rating": RATING_REQUEST, "success": SUCCESS_REQUEST}[mode]
    opening = _opening(
        INTRO_SCORE.format(goal=goal), clip.goal_picture, TAG_SCENE if clip.goal_picture is not None else ""
    )
    return [{"role": "user", "content": [*opening, *image_parts(spread(clip.frames, MAX_FRAMES)), text_part(request)]}]


def num_shown(mode: ScoreMode, clip: Clip) -> int:
    """Returns the number of a clip's frames that `score_messages` shows."""
    return min(len(clip.frames), 2 if mode == "utility" else MAX_FRAMES_OF.get(mode, MAX_FRAMES))


def _opening(intro: str, goal_picture: Frames | None, tag: str) -> list[dict[str, Any]]:
    """Returns intro and tag as one text, or as two with the goal image between them."""
    if goal_picture is None:
        return [text_part(f"{intro}\n{tag}" if tag else intro)]
    return [text_part(f"{intro}\n{TAG_GOAL}"), *image_parts(goal_picture[:1]), text_part(tag)]
