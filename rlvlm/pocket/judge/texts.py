"""The dialogues the pocket judge is trained on: the prompts of `judges.prompts` and the answers it should give."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlvlm.core.judging import Clip, Query
from rlvlm.judges import prompts
from rlvlm.vlms.chats import Chat

Task = Literal["direct", "single_stage", "two_stage", "label", "score"]
TASKS: tuple[Task, ...] = ("direct", "single_stage", "two_stage", "label", "score")
"""The prompts' modes, stage 2 of two_stage (`label`), and the score of one image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """What a dialogue is about."""

    goal: str
    """Fills the slot of the prompt."""
    phrase: str
    """What an image shows, with the slot `{percent}`."""


CONCLUSIONS = {
    0: "The first is nearer to the goal.",
    1: "The second is nearer to the goal.",
    -1: "There is no clear difference.",
}
_SEPARATORS = ("First: ", ". Second: ", ". ")
_BLANK = np.zeros((1, 2, 2, 3), np.uint8)
_SLOT = "GOALSLOT"
_REPORT_SLOT = "REPORTSLOT"


def report(phrase: str, left: float, right: float, label: int) -> str:
    """Returns a stage-1 answer.

    Args:
        phrase: what an image shows, with the slot `{percent}`.
        left: progress of the first image, 0 to 1.
        right: likewise of the second.
        label: 0, 1 or -1.
    """
    shown = [phrase.format(percent=round(100 * progress)) for progress in (left, right)]
    first, second, end = _SEPARATORS
    return f"{first}{shown[0]}{second}{shown[1]}{end}{CONCLUSIONS[label]}"


def answer(task: Task, phrase: str, left: float, right: float, label: int) -> str:
    """Returns what the judge should answer; `right` and `label` do not matter for a score."""
    if task == "score":
        return str(round(100 * left))
    if task == "two_stage":
        return report(phrase, left, right, label)
    if task == "single_stage":
        return f"{report(phrase, left, right, label)}\n{label}"
    return str(label)


def messages(task: Task, goal: str, report_text: str = "") -> Chat:
    """Returns the turn the judge is asked with; its images are blanks that hold the place."""
    if task == "label":
        return prompts.label_messages(goal, report_text)
    if task == "score":
        return prompts.score_messages("progress", Clip(goal=goal, frames=_BLANK))
    return prompts.compare_messages(task, Query(goal=goal, left=_BLANK, right=_BLANK))


def phrases(described: Sequence[str]) -> list[str]:
    """Returns the fixed pieces of all prompts and answers, longest first: one token each.

    Args:
        described: the phrases of all tasks, each with the slot `{percent}`.
    """
    pieces = {"user\n", "assistant\n", *CONCLUSIONS.values()}
    for task in TASKS:
        for message in messages(task, _SLOT, _REPORT_SLOT):
            for part in message["content"]:
                halves = part.get("text", "").split(_SLOT)
                pieces.update(piece for half in halves for piece in half.split(_REPORT_SLOT))
    for phrase in described:
        before, _, after = phrase.partition("{percent}")
        pieces.update({_SEPARATORS[0] + before, after + _SEPARATORS[1] + before, after + _SEPARATORS[2]})
    return sorted((piece for piece in pieces if len(piece) > 1), key=lambda piece: (-len(piece), piece))


def corpus(topics: Sequence[Topic]) -> list[str]:
    """Returns dialogues with all amounts and labels, as plain text: what the tokenizer learns its merges from."""
    dialogues = []
    for topic in topics:
        for percent in range(101):
            left, right = percent / 100, 1 - percent / 100
            label = int(right > left)
            for task in TASKS:
                asked = messages(task, topic.goal, report(topic.phrase, left, right, label))
                told = [part.get("text", "") for message in asked for part in message["content"]]
                dialogues.append("\n".join([*told, answer(task, topic.phrase, left, right, label)]))
    return dialogues
