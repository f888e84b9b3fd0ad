"""`rlvlm judge-bench SUITE`, and `rlvlm judge-bench compare`, `freeze` and `harvest`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from rlvlm.commands.arguments import parse
from rlvlm.core.trust import check_folder, foreign_code
from rlvlm.demonstrations.trajectory import SuccessRule
from rlvlm.judge_bench.archive import MAX_FRAMES
from rlvlm.judges.config import JudgeConfig
from rlvlm.runs.folder import check_trust


@dataclass(frozen=True, kw_only=True)
class JudgeBenchArguments:
    """Measure how far a judge can be trusted before training: figures here, a page and a row in a folder."""

    suite: tyro.conf.Positional[str] = "tiny"
    """tiny, paper7, metaworld50, libero, minigrid, gym_cards; hacked_push_block, hacked_minigrid,
    hacked_drawer_open, episodes with which policies fooled judges; or comma-separated tasks; or the folder of a
    LeRobot data set with `next.success`, `is_success` or `success`; or a file of `harvest` or `freeze`."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    reference: Literal["none", "oracle", "random", "left"] = "none"
    """Baseline that answers instead of the judge: the truth, chance, or always the first image (and 0.5)."""
    out: Path = Path("judge_bench")
    """Folder for bench.json, answers.jsonl and bench.html."""
    frames: int | None = None
    """Images shown per episode, >= 1; by default 8, or 1 for a judge that was trained on single images."""
    pairs: int | None = None
    """Pairs per task; by default the suite's number."""
    episodes: int | None = None
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
    trust: bool = False
    """Import the task that the folder of --player, or the suite's file, names as MODULE:NAME, which runs its code."""
    seed: int = 0
    """Seed of items and of the order of asking; rows of different seeds have different items."""

    def __post_init__(self) -> None:
        check_counts(self.pairs, self.episodes)
        if self.frames is not None and self.frames < 1:
            raise ValueError(f"--frames must be >= 1, got {self.frames}")


@dataclass(frozen=True, kw_only=True)
class FreezeArguments:
    """Write a suite to one file: pixels, questions and truth, with a hash of them. `judge-bench FILE` asks about it."""

    suite: tyro.conf.Positional[str]
    """Suite as for `judge-bench`."""
    out: Path
    """File to write, with a name that ends in .zip."""
    frames: int = 8
    """Maximum number of images per episode, 1 to 64."""
    pairs: int | None = None
    """Pairs per task; by default the suite's number."""
    episodes: int | None = None
    """Episodes played per task, >= 4; by default the suite's number."""
    image_px: int = 300
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
        check_counts(self.pairs, self.episodes)
        if not (1 <= self.frames <= MAX_FRAMES and self.image_px >= 16):
            raise ValueError(
                f"--frames is 1 to {MAX_FRAMES} and --image-px >= 16, got {self.frames} and {self.image_px}"
            )


def check_counts(pairs: int | None, episodes: int | None) -> None:
    """Raises ValueError if the number of pairs or episodes is too small."""
    if pairs is not None and pairs < 1:
        raise ValueError(f"--pairs must be >= 1, got {pairs}")
    if episodes is not None and episodes < 4:
        raise ValueError(f"--episodes must be >= 4, one of each way of playing, got {episodes}")


@dataclass(frozen=True)
class CompareArguments:
    """Compare several judges on the tasks that all were asked about; or, with --out, write a page of entries."""

    rows: tyro.conf.Positional[tuple[Path, ...]]
    """Files bench.json, or folders with one; with --out files of entries (entry.json)."""
    out: Path | None = None
    """File for a page with a sortable table, one entry per row."""
    items: Path | None = None
    """File of the frozen suite that the entries are about, at least its questions; by default the only .zip beside
    the first entry."""


@dataclass(frozen=True)
class HarvestArguments:
    """Make a suite of the episodes that judged runs kept: successes for the judge, but not for the simulator."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs of one task, or folders that contain such runs."""
    out: Path = Path("hacked")
    """Folder for TASK.hacked.json and tricks.png."""
    episodes: int = 150
    """Maximum number of episodes in the suite, 1 to 150."""
    frames: int = 8
    """Maximum number of images per episode, evenly spread, >= 2."""
    trust: bool = False
    """Import the task that the runs name as MODULE:NAME, which runs its code."""

    def __post_init__(self) -> None:
        if not 1 <= self.episodes <= 150 or self.frames < 2:
            got = f"{self.episodes} and {self.frames}"
            raise ValueError(f"need --episodes from 1 to 150 and --frames >= 2, got {got}")


def command(words: Sequence[str], prog: str) -> int:
    """Runs `judge-bench [SUITE] [--judge.* ...] [--out DIR]`, `judge-bench compare`, `freeze` or `harvest`."""
    if words and words[0] == "compare":
        arguments = parse(CompareArguments, words[1:], f"{prog} compare")
        if arguments.out is not None:
            from rlvlm.reports.judges_page import compare_entries

            return compare_entries(arguments.rows, arguments.items, arguments.out)
        from rlvlm.reports.bench_row import compare_benches

        return compare_benches(arguments.rows)
    if words and words[0] == "harvest":
        harvested = parse(HarvestArguments, words[1:], f"{prog} harvest")
        check_trust(harvested.runs, trust=harvested.trust)
        from rlvlm.reports.harvest import harvest

        return harvest(harvested.runs, harvested.out, harvested.episodes, harvested.frames)
    if words and words[0] == "freeze":
        frozen = parse(FreezeArguments, words[1:], f"{prog} freeze")
        _check_suite(frozen.suite, trust=False)
        from rlvlm.reports.judge_bench import freeze_bench

        return freeze_bench(
            frozen.suite,
            frozen.out,
            num_frames=frozen.frames,
            num_pairs=frozen.pairs,
            num_episodes=frozen.episodes,
            size_px=frozen.image_px,
            turns=frozen.turns,
            questions_only=frozen.questions_only,
            success=frozen.success,
            goal=frozen.goal,
            seed=frozen.seed,
        )
    bench = parse(JudgeBenchArguments, words, prog)
    if bench.player is not None:
        check_trust([bench.player], trust=bench.trust)
    _check_suite(bench.suite, trust=bench.trust)
    from rlvlm.reports.judge_bench import bench_judge

    return bench_judge(
        bench.suite,
        bench.judge,
        bench.out,
        reference=bench.reference,
        num_frames=bench.frames,
        num_pairs=bench.pairs,
        num_episodes=bench.episodes,
        seed=bench.seed,
        curve=bench.curve,
        success=bench.success,
        goal=bench.goal,
        goal_image=bench.goal_image,
        player=bench.player,
        name=bench.name,
        draw_path=bench.draw_path,
    )


def _check_suite(suite: str, *, trust: bool) -> None:
    """Raises UsageError if a file of hacked episodes names code that is not trusted."""
    if suite.endswith(".json"):
        from rlvlm.judge_bench.hacked import read_suite  # numpy

        task, _ = read_suite(Path(suite))
        check_folder(Path(suite), "", foreign_code([task]), {}, trust=trust)
