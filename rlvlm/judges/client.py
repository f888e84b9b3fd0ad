"""`rlvlm.Judge`: a judge for somebody else's trainer, behind a server of `rlvlm serve` or in this process.

judge = rlvlm.Judge("http://127.0.0.1:8123")
values, statuses = judge.score(frames_of_each_episode, goal="open the drawer")
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Clip, Query, Score, Verdict
from rlvlm.core.steps import Frames
from rlvlm.judges.batching import Batches, Item, Kind
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.http import HttpJudge
from rlvlm.judges.judge import Judge as JudgeProtocol
from rlvlm.judges.prompts import check_goal

LOCAL_IMAGES = 256
"""Maximum images of a batch that a judge in this process is asked at once."""
ClipImages = Frames | Sequence[ArrayLike | Image.Image]
"""Images of a clip: [L, H, W, 3] or [H, W, 3] of uint8, or a list of images."""
Clips = Sequence[Clip | ClipImages]
Pairs = Sequence[Query | tuple[ClipImages, ClipImages]]


class Scores(NamedTuple):
    """Answers about clips, in order."""

    values: list[float | None]
    """[N] scores in [0, 1]; None unless the status is ok, never a made-up 0."""
    statuses: list[str]
    """[N] ok, invalid (an answer that cannot be read) or failed (no answer)."""

    @classmethod
    def of(cls, answers: Sequence[Score]) -> "Scores":
        """Returns values and statuses of whole answers."""
        return cls([answer.value for answer in answers], [str(answer.status) for answer in answers])


class Choices(NamedTuple):
    """Answers about pairs, in order."""

    labels: list[str | None]
    """[N] left, right or tie; None if there is no answer that can be read."""
    statuses: list[str]
    """[N] ok, no_preference, invalid or failed."""


class Judge:
    """A judge to ask from any thread, coroutine, fork or spawned process.

    What several callers ask at the same time goes out in one request, split by the server's limits; answers keep the
    order of the questions. While a server is overloaded (429) or a replica is replaced the judge waits and asks again.

    Args:
        url: address of a server of `rlvlm serve`, e.g. `http://127.0.0.1:8123`.
        token: its bearer token, or the file with it; empty reads `~/.rlvlm/token` for a server on this machine.
        name: name of the judge there; empty takes the server's first.
        timeout_s: maximum wait for one request's answer, seconds.
        deadline_s: maximum time for one request with all pauses and tries, seconds.
    """

    def __init__(
        self, url: str, token: str | Path = "", *, name: str = "", timeout_s: float = 120.0, deadline_s: float = 300.0
    ) -> None:
        judge = HttpJudge(url, token=token, name=name, timeout_s=timeout_s, deadline_s=deadline_s)
        self.protocol: JudgeProtocol = judge
        """The judge as the rest of rlvlm knows it: whole answers with texts and stamps."""
        self._batches = judge.batches

    @classmethod
    def local(cls, judge: JudgeProtocol | JudgeConfig | str, **settings: Any) -> Self:
        """Returns a judge that answers in this process.

        Args:
            judge: a judge, the config of one, or its backend, e.g. `openai`, `pocket` or `my_file:NAME`.
            settings: further fields of `JudgeConfig`, if `judge` is a backend.

        Raises:
            JudgeUnavailable: it cannot be loaded.
            MachineError: its backend needs the train extra, which is not installed.
        """
        if isinstance(judge, str):
            judge = JudgeConfig(backend=judge, **settings)
        asked = build_judge(judge) if isinstance(judge, JudgeConfig) else judge

        async def ask(kind: Kind, items: list[Item]) -> Sequence[Verdict | Score]:
            return await asyncio.to_thread(getattr(asked, kind), items)

        async def limit() -> int:
            return LOCAL_IMAGES

        self = cls.__new__(cls)
        self.protocol = asked
        self._batches = Batches(ask, limit, in_flight=1)  # few judges can be asked from two threads
        return self

    def score(self, clips: Clips, goal: str | Sequence[str] = "") -> Scores:
        """Returns how much of its goal each clip reaches by its end.

        Args:
            clips: [N] clips: `rlvlm.Clip`s, arrays [L, H, W, 3] or [H, W, 3] of uint8, or lists of images.
            goal: goal of all clips, or of each; not needed for `rlvlm.Clip`s.

        Raises:
            UsageError: a goal is missing, images have several sizes, or are no images.
            JudgeUnavailable: nothing was answered.
            UnsupportedQuestion: the judge cannot be asked this.
        """
        return Scores.of(self.ask_clips(clips, goal)[1])

    async def score_async(self, clips: Clips, goal: str | Sequence[str] = "") -> Scores:
        """Returns what `score` does, without blocking the caller's event loop."""
        return Scores.of(await self._batches.on_loop("score", _clips(clips, goal)))

    def ask_clips(self, clips: Clips, goal: str | Sequence[str] = "") -> tuple[list[Clip], list[Score]]:
        """Returns the clips as they were asked about, and the whole answers; see `score`."""
        asked = _clips(clips, goal)
        return asked, self._batches.run("score", asked)

    def compare(self, pairs: Pairs, goal: str | Sequence[str] = "") -> Choices:
        """Returns which side of each pair is nearer to its goal; raises as `score`.

        Args:
            pairs: [N] pairs: `rlvlm.Query`s, or (left, right) of what `score` takes as a clip.
            goal: goal of all pairs, or of each; not needed for `rlvlm.Query`s.
        """
        return _choices(self._batches.run("compare", _queries(pairs, goal)))


def _choices(answers: Sequence[Verdict]) -> Choices:
    labels = [None if answer.label is None else str(answer.label) for answer in answers]
    return Choices(labels, [str(answer.status) for answer in answers])


def _clips(clips: Clips, goal: str | Sequence[str]) -> list[Clip]:
    goals = _goals(goal, len(clips))
    return [
        clip if isinstance(clip, Clip) else Clip(goal=_checked(goal), frames=as_frames(clip))
        for clip, goal in zip(clips, goals, strict=True)
    ]


def _queries(pairs: Pairs, goal: str | Sequence[str]) -> list[Query]:
    goals = _goals(goal, len(pairs))
    return [
        pair
        if isinstance(pair, Query)
        else Query(goal=_checked(goal), left=as_frames(pair[0]), right=as_frames(pair[1]))
        for pair, goal in zip(pairs, goals, strict=True)
    ]


def _goals(goal: str | Sequence[str], count: int) -> Sequence[str]:
    if isinstance(goal, str):
        return [goal] * count
    if len(goal) != count:
        raise UsageError(f"{count} questions need as many goals, got {len(goal)}", "give one goal, or one of each")
    return goal


def _checked(goal: str) -> str:
    try:
        return check_goal(goal)
    except ValueError as error:
        raise UsageError(f"the judge needs a goal: {error}", 'say it: goal="open the drawer"') from error


def as_frames(clip: ClipImages) -> Frames:
    """Returns a clip as [L, H, W, 3] uint8.

    Args:
        clip: such an array, one image [H, W, 3], or a sequence of images.

    Raises:
        UsageError: it is none of these, or its images have several sizes.
    """
    images = clip if isinstance(clip, np.ndarray) else [np.asarray(image) for image in clip]
    if isinstance(images, list) and len(sizes := {image.shape for image in images}) > 1:
        raise UsageError(f"the images of a clip share one size, got {sorted(sizes)}", "resize them, or send two clips")
    frames = np.asarray(images)
    frames = frames[None] if frames.ndim == 3 else frames
    if frames.ndim != 4 or not len(frames) or frames.shape[-1] != 3 or frames.dtype != np.uint8:
        what = f"a clip is an array [L, H, W, 3] of uint8, got {list(frames.shape)} of {frames.dtype}"
        raise UsageError(what, "for floats in [0, 1]: (255 * frames).astype(np.uint8)")
    return frames
