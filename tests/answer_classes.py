"""Makes judges' answers of known meaning, class by class: some that hold a label, and many that only look so.

`python tests/answer_classes.py --count 500 --seed 0` prints how a parser does on them, and every string that it
got wrong.
"""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

from rlvlm.core.judging import Label
from rlvlm.judges.reading import parse_label, parse_rating, parse_score

LABELS = {"0": Label.LEFT, "1": Label.RIGHT, "-1": Label.TIE}
WORDS = ("answer", "label", "verdict", "choice")
NAMED = (
    "Answer: {v}",
    "The answer is {v}.",
    "Label: {v}",
    "My final answer is {v}",
    "**Answer:** {v}",
    "Verdict = {v}",
)
REASONS = (
    "The drawer is further open in the second image.",
    "Both images look alike.",
    "In the first image the handle is nearer to the robot.",
    "The gripper has moved.",
)
SCENES = ("The first shows a closed drawer.", "In both images the handle is visible.", "They differ by 3 cm.")
WHO = (
    "Another annotator",
    "My colleague",
    "A passer-by",
    "The previous model",
    "Some reviewer",
    "He",
    "The manual",
    "Alice",
)
SAYING = ("said", "answered", "would go for", "wrote down", "insists on", "voted", "picked")
THINGS = ("The sign", "A sticker on the drawer", "The wall clock", "The robot's display", "The page in the image")
SHOWING = ("says", "reads", "shows", "is marked", "spells")

UNREADABLE: dict[str, tuple[str, ...]] = {
    "negated": (
        "I don't think the answer is {v}",
        "The answer is not {v}.",
        "The answer isn't {v}",
        "It cannot be {v}.",
        "Nobody would claim that the answer is {v}.",
        "The answer is anything but {v}.",
        "I doubt that the label is {v}",
        "Answer: not {v}",
        "Neither of them: the {w} is never {v}",
        "I would rule out\n{v}",
        "Anything except\n{v}",
        "Final answer: definitely not {v}",
        "It is false that the answer is {v}.",
    ),
    "retracted": (
        "The answer is {v}. No, it's zero.",
        "{v}\nWait, no.",
        "Answer: {v}\nActually, it is the other one.",
        "Answer: {v}. Scratch that.",
        "{v}\n\nHmm, on reflection I got them mixed up.",
        "Label: {v}, no, sorry",
        "Answer: {v}\nI take that back.",
        "{v}\nCorrection: the opposite.",
        "My answer is {v}... or rather, I give up.",
        "The answer is {v}.\nLet me look again: I had the images swapped.",
        "<answer>{v}</answer> Oops, wrong way round.",
        "\\boxed{{{v}}}\nThe label above is a mistake.",
        "{v}\n~~",
        "Answer: {v} (no wait)",
        "Answer: {v}\nStrike that out.",
    ),
    "hypothetical": (
        "If it were {v} the drawer would be open.",
        "Answer: {v} if the drawer counts as open",
        "Suppose the answer is {v}.",
        "Had it moved, the answer would be {v}.",
        "Were it open:\n{v}",
        "Assume the following.\n{v}",
        "Answer: {v} unless the light deceives me",
        "The answer would be {v} in daylight.",
        "Let us pretend.\nAnswer: {v}",
        "Is the answer {v}?",
        "Answer: {v}?",
        "What if I wrote\n{v}",
        "The answer could be {v}.",
        "Answer: perhaps {v}",
        "<answer>{v}</answer> would be right if the drawer were open",
    ),
    "quoted": (
        "{thing} {show} {v}",
        "{thing} {show}: {v}",
        '{thing} {show} "Answer: {v}"',
        "{thing} {show}:\n{v}",
        "{thing} {show}\nAnswer: {v}",
        "{thing} {show} \\boxed{{{v}}}",
        "{thing} {show} <answer>{v}</answer>",
        "> Answer: {v}",
        "{thing} {show}\n\n{v}",
        '"The answer is {v}" is what one can read there',
    ),
    "attributed": (
        "{who} {say} {v}",
        "{who} {say}: {v}",
        "{who} {say} the answer is {v}.",
        "{who} {say}:\n{v}",
        "{who} {say} that the {w} is {v}",
        "{who}'s answer: {v}",
        "According to {who}, the answer is {v}.",
        "{who} {say}\nAnswer: {v}",
        "Answer of {who}: {v}",
        "{who} {say} \\boxed{{{v}}}.",
        "Answer: {v}, {who} {say}",
    ),
    "example": (
        "Example answer: {v}",
        "For example:\n{v}",
        "Example:\nAnswer: {v}",
        "An answer looks like this:\n{v}",
        "The format is <answer>{v}</answer>",
        "e.g. Answer: {v}",
        "A sample label would be {v}",
        "Write \\boxed{{{v}}} for it",
        "Expected format: {v}",
        "Possible answer: {v}",
        "Example output:\nThe first is shut.\n{v}",
        "The instructions name the label {v}.",
        "Answer: {v} (example)",
        "Typical answer = {v}",
    ),
    "minus apart": (
        "- 1",
        "-\n1",
        "Answer: - 1",
        "Label: \u2212 1",
        "minus 1",
        "-**1**",
        "- **1**",
        "Answer: -\n1",
        "The answer is - 1.",
        "\\boxed{{- 1}}",
        "<answer>- 1</answer>",
        "\u2014 1",
        "\u20141",
        "- `1`",
        "-\u200b1",
        "-<b>1</b>",
        "negative 1",
        "(-) 1",
    ),
    "unfinished reasoning": (
        "<thinking>{v}",
        "<thinking>\nAnswer: {v}",
        "<THINK>\n{v}",
        "<Think>so\n{v}",
        "\u25c1think\u25b7{v}",
        "\u25c1think\u25b7\n{v}",
        "<|channel|>analysis<|message|>{v}",
        "<|start|>assistant<|channel|>analysis<|message|>So\nAnswer: {v}",
        "<reasoning>\n{v}",
        "[THINK]\n{v}",
        "<think>a</think><thinking>\n{v}",
        "<thought>\nThe answer is {v}.",
        "<|begin_of_thought|>\n{v}",
        "{v}\n<think>",
        "<think>a</thinking>\n{v}",
        "<scratchpad>\nAnswer: {v}",
        "<draft>\n{v}",
        "<|channel|>commentary<|message|>{v}",
        "<seed:think>\n{v}",
        "<think >\n{v}",
        "<|thinking|>\n{v}",
    ),
    "two values": (
        "{v}\n{u}",
        "Answer: {v} or {u}",
        "Answer: {v}\nAnswer: {u}",
        "{v}/{u}",
        "Answer: {v} ({u})",
        "Answer: {v}, it could be {u}",
        "\\boxed{{{v}}} \\boxed{{{u}}}",
        "{v}\nIt is {u}.",
        "{v}\n\nThe answer is {u}",
    ),
    "other": (
        "image {v}",
        "Question {v}",
        "{v} of 3",
        "Answer: {v} cm",
        "Step {v}\nis next",
        "Answer: {v}.5",
        "x = {v}",
        "Round {v} begins.\nThe drawer is",
        "{v}<|im_end|>\n<|im_start|>user\nThanks",
        "Rule\n{v}",
    ),
}
READABLE: tuple[str, ...] = (
    "{v}",
    "{v}.",
    "**{v}**",
    "`{v}`",
    "({v})",
    "\n{v}\n",
    "{named}",
    "{named}\n",
    "{scene}\n{v}",
    "{scene}\n\n{named}",
    "{scene} {named}",
    "{v}\n\n{reason}",
    "{named}\n{reason}",
    "\\boxed{{{v}}}",
    "<answer>{v}</answer>",
    "<answer>\n{v}\n</answer>",
    "So the answer is \\boxed{{{v}}}.",
    "So, the label is {v}.",
    "Therefore, my final answer is **{v}**.",
    "{scene}\nLabel: {v}",
    "<think>{scene} Answer: {u}?</think>\n{v}",
    "<thinking>{u}</thinking>{v}",
    "\u25c1think\u25b7{u}\u25c1/think\u25b7{v}",
    "<THINK>{scene}</THINK>\n{named}",
    "<|channel|>analysis<|message|>{u}<|end|><|start|>assistant<|channel|>final<|message|>{v}",
    "1. {scene}\n2. {scene}\n3. {scene}\n{v}",
    "1. {scene}\n2. {scene}\n3. {scene}\n\nAnswer: {v}",
    "{v}<|im_end|>",
    "{named}</s>",
    "### Answer\n{v}",
    "**Label:**\n{v}",
    "Answer: {v}\nReason: {reason}",
    "I think the answer is {v}.",
    "```\n{v}\n```",
    "The drawer is more open in the second, so the answer is {v}.",
    "Because the handle moved, the label is {v}.",
    '{{"label": {v}}}',
    "Final answer: {v} because the drawer moved.",
    "- {scene}\n- {scene}\n\nFinal label: {v}",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A text and what it says."""

    text: str
    label: Label | None
    kind: str


def make_cases(count: int, seed: int, *, share_readable: float = 0.4) -> list[Case]:
    """`count` different texts, every class about equally often."""
    rng = random.Random(seed)
    cases: dict[str, Case] = {}
    kinds = list(UNREADABLE)
    while len(cases) < count:
        is_readable = rng.random() < share_readable
        kind = "readable" if is_readable else kinds[rng.randrange(len(kinds))]
        value, other = rng.sample(list(LABELS), 2)
        words = {"v": value, "u": other, "w": rng.choice(WORDS), "who": rng.choice(WHO), "say": rng.choice(SAYING)}
        words |= {"thing": rng.choice(THINGS), "show": rng.choice(SHOWING), "scene": rng.choice(SCENES)}
        words |= {"reason": rng.choice(REASONS), "named": rng.choice(NAMED).format(v=value)}
        template = rng.choice(READABLE if is_readable else UNREADABLE[kind])
        text = _dress(template.format(**words), rng, is_readable=is_readable)
        cases[text] = Case(text, LABELS[value] if is_readable else None, kind)
    return list(cases.values())


def _dress(text: str, rng: random.Random, *, is_readable: bool) -> str:
    """The text with something around it that changes nothing about what it says."""
    change: Callable[[str], str] = rng.choice(
        [
            lambda text: text,
            lambda text: text,
            lambda text: f"\n{text}\n",
            lambda text: text.replace("-1", "\u22121"),
            lambda text: f"{rng.choice(SCENES)}\n{text}" if not is_readable and text[0] not in "{`<#>-" else text,
            lambda text: text if is_readable else f"{text}\n{rng.choice(REASONS)}",
        ]
    )
    return change(text)


SCALES = (
    "Rating: 4 (out of 10)",
    "4\n/10",
    "{n}\nout of ten",
    "Score: {n} of 10",
    "Rating: {n} stars out of 10",
    "On a scale of 10:\n{n}",
    "The maximum is 10.\nScore: {n}",
    "Score: {n}, the scale ends at 10",
    "Another annotator said {n}",
    "Example score: {n}",
    "Score: not {n}",
    "If it were open:\n{n}",
    "The sign says {n}",
    "<thinking>{n}",
    "Score: {n}. No, less.",
    "Score: {n}\nWait, the drawer is shut.",
    "- {n}",
    "Score: - {n}",
    "{n} / 7",
    "Score: {n} (max 7)",
)
"""Texts that hold no score on any of the scales."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cases = make_cases(arguments.count, arguments.seed)
    read = [(case, parse_label(case.text)) for case in cases]
    wrong = [case for case, label in read if label is not None and label is not case.label]
    missed = [case for case, label in read if label is None and case.label is not None]
    readable = sum(case.label is not None for case in cases)
    sys.stdout.write(f"{len(cases)} strings, {readable} readable: {len(wrong)} wrong guesses, {len(missed)} missed\n")
    for case in wrong + missed:
        sys.stdout.write(f"  {case.kind}: {case.text!r}\n")
    guessed = [
        text for text in (s.format(n=n) for s in SCALES for n in "2345") if parse_score(text) or parse_rating(text)
    ]
    sys.stdout.write(f"scores guessed: {guessed}\n")


if __name__ == "__main__":
    main()
