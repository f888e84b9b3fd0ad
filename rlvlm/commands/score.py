"""`rlvlm score DATA`: labels recorded episodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from rlvlm.commands.arguments import parse
from rlvlm.core.checks import check_least
from rlvlm.demonstrations.trajectory import SuccessRule
from rlvlm.envs.registry import make_env, own_settings, task_env
from rlvlm.judges.config import JudgeConfig
from rlvlm.runs.settings import read_settings
from rlvlm.serving.config import PageConfig


@dataclass(frozen=True, kw_only=True)
class ScoreArguments:
    """Let a judge label recorded episodes: writes a table of labels, and a page with advice on which to drop. The data
    are only read.
    """

    data: tyro.conf.Positional[Path]
    """LeRobot data set, LIBERO's HDF5 files, a folder of `rlvlm collect`, a folder of MP4 videos with sentences
    (clip.txt beside clip.mp4, or metadata.csv or .jsonl with file_name, goal and success), or one video."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    app: str = ""
    """Name of a running Serve app on the cluster of RAY_ADDRESS that judges instead of --judge.*."""
    goal: str = ""
    """Goal in the questions, instead of the episodes' own sentences."""
    camera: str = ""
    """Camera to show; by default the first that is not a wrist's."""
    ask: tuple[Literal["progress", "success", "pairs"], ...] = ("progress", "success")
    """Questions to ask. progress: of frames; success: of whole episodes; pairs: which of two frames of an episode is
    nearer to the goal, and which of two episodes' ends."""
    every: int = 10
    """Frames from one question to the next, >= 1; the last frame is always included."""
    clips: Literal["growing", "single"] = "growing"
    """Images shown for progress. growing: the clip up to the frame; single: the frame alone."""
    pairs: int = 4
    """Pairs of frames per episode, >= 1, each asked in both orders; for --ask pairs."""
    frames: int | None = None
    """Images shown per clip, >= 1; by default 8, or 1 for a judge that was trained on single images."""
    success: SuccessRule | None = None
    """Rule for episodes whose data do not state their success. assumed: all succeeded; none: none did. By default it
    is unknown."""
    against: Path | None = None
    """File labels.parquet of another judge on the same data: episodes about which the two disagree are suspicious."""
    preflight: int = 20
    """Number of known items that are asked first; a judge with meaningless answers is refused. 0 asks none."""
    out: Path | None = None
    """Folder for labels.parquet, score.html, score.json and answers; by default DATA.labels beside the data."""
    trust: bool = False
    """Import the task that a folder of demonstrations names as MODULE:NAME, which runs its code."""
    seed: int = 0
    """Seed of the order of asking, and of pairs."""

    def __post_init__(self) -> None:
        check_least(self, "--", 1, "every", "pairs")
        check_least(self, "--", 0, "preflight")
        if self.frames is not None and self.frames < 1:
            raise ValueError(f"--frames must be >= 1, got {self.frames}")
        if not self.ask:
            raise ValueError("--ask needs progress, success or pairs, got nothing")


def command(words: Sequence[str], prog: str) -> int:
    """Runs `score DATA [--judge.* ...] [--out DIR]`."""
    return score(parse(ScoreArguments, words, prog))


def score(arguments: ScoreArguments, page: PageConfig | None = None) -> int:
    """Labels the data and returns the exit code; `page` is the page for people, if they judge."""
    from rlvlm.demonstrations.recordings import Recordings, find_form
    from rlvlm.judge_bench.scoring import Asked
    from rlvlm.reports.score import score_data

    judge, path = arguments.judge, arguments.data.absolute()

    def make_draw(folder: Any) -> Any:
        # drawn as it was collected; the folder has the settings
        task = folder.trusted_task(trust=arguments.trust)
        kind = type(task_env(task))
        env = make_env(task, read_settings(kind, own_settings(kind, folder.env)), 0)
        size = None if folder.kind == "turns" else judge.image_px  # turns are drawn as their policies see them
        return lambda snapshots, camera: env.draw_sized(snapshots, size, camera)

    recordings = Recordings(
        path=path, form=find_form(path), camera=arguments.camera, goal=arguments.goal, make_draw=make_draw
    )
    asked = Asked(
        questions=frozenset(arguments.ask),
        every=arguments.every,
        grows=arguments.clips == "growing",
        pairs=arguments.pairs,
        # the shipped judge was trained on single images
        num_frames=arguments.frames or (1 if judge.knows_few_tasks else 8),
        size_px=judge.image_px,
        success=arguments.success,
        seed=arguments.seed,
    )
    out = arguments.out or path.with_name(f"{path.name}.labels")
    return score_data(
        recordings, judge, asked, out,
        app=arguments.app, against=arguments.against, num_preflight=arguments.preflight, page=page or PageConfig(),
    )  # fmt: skip
