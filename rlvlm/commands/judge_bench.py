"""`rlvlm judge-bench SUITE` and `rlvlm judge-bench compare A.json B.json`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from rlvlm.commands.arguments import parse
from rlvlm.demonstrations.trajectory import SuccessRule
from rlvlm.judges.config import JudgeConfig
from rlvlm.runs.folder import check_trust


@dataclass(frozen=True, kw_only=True)
class JudgeBenchArguments:
    """How far can this judge be trusted, before anything is trained? Figures here; a page and a row in a folder."""

    suite: tyro.conf.Positional[str] = "tiny"
    """tiny, paper7, metaworld50, libero, minigrid, gym_cards; or tasks, with commas between them; or the folder of a
    LeRobot data set with `next.success`, `is_success` or `success`."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    reference: Literal["none", "oracle", "random", "left"] = "none"
    """Answers in place of the judge: the truth, chance, or always the first image (and 0.5)."""
    out: Path = Path("judge_bench")
    """Folder of bench.json, answers.jsonl and bench.html."""
    frames: int | None = None
    """Images shown of an episode, >= 1; by default 8, and 1 of a judge that was trained on single images."""
    pairs: int | None = None
    """Pairs of each task; by default the suite's."""
    episodes: int | None = None
    """Episodes played of each task, >= 4; the judge scores a third as many of each case: success, near miss, failure,
    cut short. By default the suite's."""
    success: SuccessRule | None = None
    """What recorded episodes are taken for, where the data do not say which succeeded. assumed: all did; none: none
    did."""
    curve: Path | None = None
    """Runs of simulated judges that the success of training is predicted from (`benchmarks/judge_quality.py`); by
    default those that ship."""
    goal: str = ""
    """What the judge is asked about, in a few words, in place of the task's own goal; an env of yours may have none."""
    goal_image: Path | None = None
    """File with an image of the goal of the one task, which the judge is shown with every question."""
    player: Path | None = None
    """Folder of a run of the task, or a checkpoint in it: its policy plays in place of the env's script. Without either
    the env is played at random."""
    trust: bool = False
    """Import the task that the folder of --player names as MODULE:NAME, which runs its code."""
    seed: int = 0
    """Seed of items and of the order of asking; rows of different seeds are of different items."""

    def __post_init__(self) -> None:
        if min(1 if self.frames is None else self.frames, 1 if self.pairs is None else self.pairs) < 1:
            raise ValueError(f"--frames and --pairs must be >= 1, got {self.frames} and {self.pairs}")
        if self.episodes is not None and self.episodes < 4:
            raise ValueError(f"--episodes must be >= 4, one of each way of playing, got {self.episodes}")


@dataclass(frozen=True)
class CompareArguments:
    """Several judges side by side, on the tasks that all were asked about."""

    rows: tyro.conf.Positional[tuple[Path, ...]]
    """Files bench.json, or folders with one."""


def command(words: Sequence[str], prog: str) -> int:
    """`judge-bench [SUITE] [--judge.* ...] [--out DIR]` and `judge-bench compare A.json B.json`."""
    if words and words[0] == "compare":
        arguments = parse(CompareArguments, words[1:], f"{prog} compare")
        from rlvlm.reports.judge_bench import compare_benches

        return compare_benches(arguments.rows)
    bench = parse(JudgeBenchArguments, words, prog)
    if bench.player is not None:
        check_trust([bench.player], trust=bench.trust)
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
    )
