"""Options of `rlvlm judge-bench`, `judge-bench freeze` and `rlvlm score`, as parsed from the command line."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from rlvlm.core.checks import Bound, NonNegativeInt, PositiveInt, check_bounds
from rlvlm.core.console.arguments import parse, value_of
from rlvlm.core.leads import FilePath
from rlvlm.demonstrations.trajectory import SuccessRule
from rlvlm.judge_bench.archive import MAX_FRAMES
from rlvlm.judges.config import JudgeConfig


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measure how far a judge can be trusted before training: figures here, a page and a row in a folder."""

    suite: tyro.conf.Positional[FilePath] = "tiny"
    """tiny, paper7, metaworld50, libero, minigrid, gym_cards; hacked_push_block, hacked_minigrid,
    hacked_drawer_open, episodes with which policies fooled judges; or comma-separated tasks; or the folder of a
    LeRobot data set with `next.success`, `is_success` or `success`; or a file of `harvest` or `freeze`."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    preset: Annotated[str, tyro.conf.arg(name="judge.preset")] = ""
    """App of `rlvlm serve --list` whose judge is asked, as it is published; other --judge.* change it. Its commit and
    files are noted at the first download, and others refused later."""
    reference: Literal["none", "oracle", "random", "left"] = "none"
    """Baseline that answers instead of the judge: the truth, chance, or always the first image (and 0.5)."""
    out: Path = Path("judge_bench")
    """Folder for bench.json, answers.parquet and bench.html."""
    frames: PositiveInt | None = None
    """Images shown per episode, >= 1; by default 8, or 1 for a judge that was trained on single images."""
    pairs: PositiveInt | None = None
    """Pairs per task; by default the suite's number."""
    episodes: Annotated[int, Bound(">= 4")] | None = None
    """Episodes played per task, >= 4; the judge scores a third as many of each case: success, near miss, failure,
    cut short. By default the suite's number."""
    success: SuccessRule | None = None
    """Rule for recorded episodes whose data do not state their success. assumed: all succeeded; none: none did."""
    curve: Path | None = None
    """Table of runs with simulated judges, from which the success of training is predicted
    (`benchmarks/judge_quality.py`); by default the one that ships."""
    goal: str = ""
    """Goal to ask about, in a few words, instead of the task's own; an env of yours may have none."""
    goal_image: Path | None = None
    """File with an image of the only task's goal, which the judge is shown with every question."""
    player: Path | None = None
    """Folder of a run of the task, or a checkpoint in it: its policy plays instead of the env's script. Without
    either the env is played at random."""
    name: str = ""
    """Name in a table of judges, for the entry that is written for a frozen suite; by default the judge's stamp."""
    draw_path: bool = False
    """Draw the hand's path on the last image of each side, as --env.draw-path does in a run; for tasks that are
    played and whose env knows the hand's position."""
    rehearse: Annotated[int, Bound(">= 100")] | None = None
    """Questions for finding out what this judge would teach, >= 100 (some hundred are good), asked in addition about
    each task: attempts that a policy can play, states along the way to the goal and beyond it, and the ends of a search
    that follows the judge. None asks nothing."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""
    dry_run: bool = False
    """Only say what the bench would take, in questions, images, seconds and, where the judge reports it, USD; for that
    it is asked about two items of each kind."""
    seed: int = 0
    """Seed of items and of the order of asking; rows of different seeds have different items."""

    def __post_init__(self) -> None:
        check_bounds(self, "--")


@dataclass(frozen=True, kw_only=True)
class FreezeOptions:
    """Write a suite to one file: pixels, questions and truth, with a hash of them. `judge-bench FILE` asks about it."""

    suite: tyro.conf.Positional[FilePath]
    """Suite as for `judge-bench`."""
    out: Path
    """File to write, with a name that ends in .zip."""
    frames: Annotated[int, Bound(f"[1, {MAX_FRAMES}]")] = 8
    """Maximum number of images per episode, 1 to 64."""
    pairs: PositiveInt | None = None
    """Pairs per task; by default the suite's number."""
    episodes: Annotated[int, Bound(">= 4")] | None = None
    """Episodes played per task, >= 4; by default the suite's number."""
    image_px: Annotated[int, Bound(">= 16")] = 300
    """Side length of the images in pixels; envs in turns have their own."""
    turns: bool = False
    """Score single turns instead of episodes, as --judge.score utility does."""
    questions_only: bool = False
    """Leave the images out: only the questions, with the same hash. A frozen suite's file is allowed too."""
    success: SuccessRule | None = None
    """Rule for recorded episodes whose data do not state their success."""
    goal: str = ""
    """Goal to ask about, instead of the only task's own."""
    seed: int = 0
    """Seed of the items."""

    def __post_init__(self) -> None:
        check_bounds(self, "--")


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Let a judge label recorded episodes: writes a table of labels, and a page with advice on which to drop. The data
    are only read.
    """

    data: tyro.conf.Positional[Path]
    """LeRobot data set, LIBERO's HDF5 files, a folder of `rlvlm collect`, a folder of MP4 videos with sentences
    (clip.txt beside clip.mp4, or metadata.csv or .jsonl with file_name, goal and success), or one video."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    preset: Annotated[str, tyro.conf.arg(name="judge.preset")] = ""
    """App of `rlvlm serve --list` whose judge is asked, as it is published; other --judge.* change it. Its commit and
    files are noted at the first download, and others refused later."""
    app: str = ""
    """Name of a running Serve app on the cluster of RAY_ADDRESS that judges instead of --judge.*."""
    readers: NonNegativeInt = 0
    """Tasks on the nodes of that cluster that each read a part of the episodes and ask the app, side by side; the data
    and --out lie on a disk that all nodes share. 0: this process reads all."""
    goal: str = ""
    """Goal in the questions, instead of the episodes' own sentences."""
    camera: str = ""
    """Camera to show; by default the first that is not a wrist's."""
    ask: tuple[Literal["progress", "success", "pairs"], ...] = ("progress", "success")
    """Questions to ask. progress: of frames; success: of whole episodes; pairs: which of two frames of an episode is
    nearer to the goal, and which of two episodes' ends."""
    every: PositiveInt = 10
    """Frames from one question to the next, >= 1; the last frame is always included."""
    clips: Literal["growing", "single"] = "growing"
    """Images shown for progress. growing: the clip up to the frame; single: the frame alone."""
    pairs: PositiveInt = 4
    """Pairs of frames per episode, >= 1, each asked in both orders; for --ask pairs."""
    frames: PositiveInt | None = None
    """Images shown per clip, >= 1; by default 8, or 1 for a judge that was trained on single images."""
    success: SuccessRule | None = None
    """Rule for episodes whose data do not state their success. assumed: all succeeded; none: none did. By default it
    is unknown."""
    form: Literal["", "frame_signals"] = ""
    """Further file for a LeRobot data set, besides the one by which LeRobot weights. frame_signals:
    frame_signals.parquet in LeRobot's form lerobot.frame_signals, version 1, a proposal that may still change."""
    against: Path | None = None
    """File labels.parquet of another judge on the same data: episodes about which the two disagree are suspicious."""
    value: bool = False
    """Whether to learn from the labels the probability of success at each frame, for `sft.weighting` advantage,
    condition and iql; needs rlvlm[train]."""
    preflight: NonNegativeInt = 20
    """Number of known items that are asked first; a judge with meaningless answers is refused. 0 asks none."""
    out: Path | None = None
    """Folder for labels.parquet, score.html, score.json and answers; by default DATA.labels beside the data, or
    DATA.people if people answer. One judge's labels are not replaced by another's."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""
    dry_run: bool = False
    """Only say what labelling would take, in questions, images, seconds and, where the judge reports it, USD; for that
    it is asked about the first and the last frame of one episode."""
    seed: int = 0
    """Seed of the order of asking, and of pairs."""

    def __post_init__(self) -> None:
        check_bounds(self, "--")
        if not self.ask:
            raise ValueError("--ask needs progress, success or pairs, got nothing")
        if self.readers and (not self.app or "pairs" in self.ask):
            raise ValueError("--readers ask a running --app, and no pairs, which are of episodes of two parts too")


Options = TypeVar("Options", BenchOptions, ScoreOptions)


def parse_judged(kind: type[Options], words: Sequence[str], prog: str) -> Options:
    """Parses the options of a command that asks a judge, beginning with the judge of `--judge.preset`; raises as
    `parse`, and UsageError if there is no such preset.
    """
    if not (name := value_of("--judge.preset", words)):
        return parse(kind, words, prog)
    from rlvlm.serving.app_file import preset_judge

    # what has no default of its own must still be given
    needed = {each.name: tyro.MISSING for each in fields(kind) if each.default is each.default_factory is MISSING}
    return parse(kind, words, prog, default=kind(**needed, judge=preset_judge(name)))


def pin_judge(options: Options, log: Callable[[str], None]) -> Options:
    """Returns the options with the commit of a preset's weights, which are on disk then.

    Raises:
        MachineError: a package or room on the disk is missing.
        JudgeUnavailable: the weights cannot be had, or are others than at the first download.
    """
    config = options.judge
    is_hub_model = config.wants_weights and not config.is_random and not Path(config.model).expanduser().is_dir()
    if not options.preset or not is_hub_model:
        return options
    from rlvlm.judges.build import check_installed

    check_installed(config)
    from rlvlm.vlms.files import pinned  # the hub's client, which the judge's kit does not have

    return replace(options, judge=replace(config, revision=pinned(config, log)))
