"""Training data of the judge that has read English: the questions of a run, about goals in words of several kinds.

A scene is shown under its own goal, under the goal of the task that undoes it, and under goals of other scenes, to
which nothing that is seen comes nearer. Each goal is said in many ways. Used by `smollm`, for training and for trial.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pocket_models.scenes import TIE_GAP, Scenes, label_of
from pocket_models.smollm_network import IMAGE, IMAGE_PX, IMAGE_TEXT
from pocket_models.words import FRAMES, WORDS, Share
from rlvlm.core.judging import Clip, Query
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.judge_bench.items import draw_gap_pairs
from rlvlm.judges import prompts
from rlvlm.vlms.supervised import DialogueBuilder, Dialogues

Form = Literal["pair", "success", "progress"]
Case = Literal["own", "undoing", "other", "noise"]
"""Whose goal a scene is shown under: its own, that of the task that undoes it, or another scene's; or noise under a
goal."""
_CASES: dict[Form, dict[Case, float]] = {
    "pair": {"own": 0.74, "undoing": 0.06, "other": 0.18, "noise": 0.02},
    "success": {"own": 0.66, "undoing": 0.08, "other": 0.22, "noise": 0.04},
    "progress": {"own": 0.7, "undoing": 0.08, "other": 0.2, "noise": 0.02},
}
"""How often each is asked about in training."""
_LENGTHS = {"pair": (2,), "success": (1, 2, 4, 6, 8), "progress": (1, 1, 2, 8)}
_NOISES = 64
_BLANK = np.zeros((1, 2, 2, 3), np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question with its right answer."""

    form: Form
    case: Case
    task: str
    """Whose scene is shown."""
    goal: str
    rows: tuple[int, ...]
    """The images that are shown, in order."""
    answer: str
    kind: str = ""
    """Of a clip under its own goal, `success`, `failure` or `reversed`."""

    def chat(self) -> Any:
        """What a judge is asked in a run, with blanks in the place of the images."""
        if self.form == "pair":
            return prompts.compare_messages("direct", Query(goal=self.goal, left=_BLANK, right=_BLANK))
        frames = np.broadcast_to(_BLANK, (len(self.rows), 2, 2, 3))
        return prompts.score_messages(self.form, Clip(goal=self.goal, frames=frames))


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Images of one set-up of one task."""

    task: str
    start: int
    """Where they begin among all images."""
    progress: FloatArray
    success: NDArray[np.bool_]
    share: float


@dataclass(kw_only=True, slots=True)
class Questions:
    """Draws questions about scenes.

    Args:
        scenes: of one split.
        words: which goals are said.
    """

    scenes: Sequence[Scenes]
    words: Share
    frames: Frames = field(init=False)
    """[N, H, W, 3] all images; the last ones are noise."""
    settings: list[Setting] = field(init=False)

    def __post_init__(self) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (_NOISES, IMAGE_PX, IMAGE_PX, 3), np.uint8)
        # noise that is drawn larger is smoother by the time that the model sees it
        noise[::2] = (127.5 + 0.45 * (noise[::2].astype(np.float32) - 127.5)).astype(np.uint8)
        self.frames = np.concatenate([*(each.images for each in self.scenes), noise])
        starts = np.cumsum([0, *(len(each.images) for each in self.scenes)])
        self.settings = [
            Setting(task=each.task, start=start, progress=each.progress, success=each.success, share=each.share)
            for each, start in zip(self.scenes, starts.tolist(), strict=False)
        ]

    def say(self, task: str, rng: np.random.Generator) -> str:
        """The goal of a task, in some words."""
        goals, frames = getattr(WORDS[task], self.words), FRAMES[self.words]
        return frames[rng.integers(len(frames))].format(goal=goals[rng.integers(len(goals))])

    def draw(self, form: Form, count: int, rng: np.random.Generator, case: Case | None = None) -> list[Question]:
        """`count` questions with equally many images each.

        Args:
            form: how is asked.
            count: how many.
            rng: draws them.
            case: the only case that is asked about; None: all, as often as in training. A case that a scene does not
                have, such as that nothing undoes it, becomes `other`.
        """
        shares = np.array([setting.share for setting in self.settings])
        drawn = rng.choice(len(shares), size=count, p=shares / shares.sum())
        cases: list[Case] = list(_CASES[form])
        weights = np.array(list(_CASES[form].values()))
        length = int(rng.choice(_LENGTHS[form]))
        asked: list[Case] = [
            case or cases[place] for place in rng.choice(len(cases), size=count, p=weights / weights.sum())
        ]
        return [
            self._question(form, self.settings[place], asked_case, length, rng)
            for place, asked_case in zip(drawn.tolist(), asked, strict=True)
        ]

    def _question(self, form: Form, setting: Setting, case: Case, length: int, rng: np.random.Generator) -> Question:
        own = WORDS[setting.task]
        if case == "undoing" and not own.undone_by:
            case = "other"
        if case == "noise":
            rows = tuple((len(self.frames) - _NOISES + rng.integers(_NOISES, size=length)).tolist())
            answer = {"pair": "-1", "success": "no", "progress": "0"}[form]
            return Question(
                form=form, case=case, task=setting.task, goal=self.say(setting.task, rng), rows=rows, answer=answer
            )
        task = own.undone_by if case == "undoing" else setting.task if case == "own" else self._other(setting, rng)
        goal = self.say(task, rng)
        progress = 1 - setting.progress if case == "undoing" else setting.progress
        if form == "pair":
            return self._pair(setting, case, goal, progress, rng)
        # what is undone has no flag of its own: where nothing of the other task is left
        success = progress >= 1 - TIE_GAP if case == "undoing" else setting.success
        last, kind = self._last(form, case, progress, success, rng)
        rows = self._path(progress, last, kind, length, rng)
        is_met = case != "other"
        if form == "success":
            answer = "yes" if is_met and success[last] else "no"
        else:
            answer = str(round(100 * float(progress[last]))) if is_met else "0"
        shown = tuple(setting.start + row for row in rows)
        return Question(form=form, case=case, task=setting.task, goal=goal, rows=shown, answer=answer, kind=kind)

    def _pair(
        self, setting: Setting, case: Case, goal: str, progress: FloatArray, rng: np.random.Generator
    ) -> Question:
        # half of the gaps are small, as for the pocket judge
        size = rng.random() if rng.random() < 0.5 else 0.4 * rng.random() ** 2
        gaps = np.array([size * rng.choice([-1, 1])], np.float32)
        left, right = draw_gap_pairs(progress, gaps, rng)[0].tolist()
        label = -1 if case == "other" else label_of(float(progress[left]), float(progress[right]), TIE_GAP)
        rows = (setting.start + left, setting.start + right)
        return Question(form="pair", case=case, task=setting.task, goal=goal, rows=rows, answer=str(label))

    def _other(self, setting: Setting, rng: np.random.Generator) -> str:
        """A task to which nothing in the scenes of `setting` comes nearer."""
        family = setting.task.partition("/")[0] if setting.task.startswith("push_block") else setting.task
        near = {setting.task, WORDS[setting.task].undone_by}
        # a table of push_block has two colours, and both may be moved; like things are called alike elsewhere too
        others = [name for name in WORDS if name not in near and not (family == "push_block" and family in name)]
        return "nothing" if rng.random() < 0.2 else others[rng.integers(len(others))]

    def _last(
        self,
        form: Form,
        case: Case,
        progress: FloatArray,
        success: NDArray[np.bool_],
        rng: np.random.Generator,
    ) -> tuple[int, str]:
        """The last image of a clip, and what kind of clip it is."""
        won, lost = np.flatnonzero(success), np.flatnonzero(~success)
        # under another goal mostly successes, which a judge that ignores the goal would accept
        p_won = 0.8 if case == "other" else 0.5
        if form == "success" and len(won) and (rng.random() < p_won or not len(lost)):
            return int(rng.choice(won)), "success"
        if form == "success":
            near = lost[progress[lost] > 0.5]
            chosen = near if len(near) and rng.random() < 0.5 else lost
            return int(rng.choice(chosen)), "reversed" if rng.random() < 0.35 else "failure"
        target = rng.random()
        return int(np.abs(progress - target + 0.01 * rng.standard_normal(len(progress))).argmin()), "success"

    def _path(self, progress: FloatArray, last: int, kind: str, length: int, rng: np.random.Generator) -> list[int]:
        """`length` images that end with `last`: progress rises to it, falls to it, or stands still."""
        if length == 1:
            return [last]
        if kind == "failure" and rng.random() < 0.2:
            return [last] * length
        drawn = rng.integers(len(progress), size=8 * length)
        falls = kind == "reversed"
        fitting = drawn[progress[drawn] >= progress[last] if falls else progress[drawn] <= progress[last]]
        chosen = np.append(fitting, np.full(length, last))[: length - 1]
        order = np.argsort(progress[chosen], kind="stable")
        return [*chosen[order[::-1] if falls else order].tolist(), last]


def build(questions: Sequence[Question], builder: DialogueBuilder) -> Dialogues:
    """Questions about equally many images, as token ids."""
    images = np.array([question.rows for question in questions])
    return builder.build([(question.chat(), question.answer) for question in questions], images)


def dialogue_builder(tokenizer: Any) -> DialogueBuilder:
    """Builds what the model's processor would."""
    return DialogueBuilder(tokenizer, IMAGE, IMAGE_TEXT)
