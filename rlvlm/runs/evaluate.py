"""`rlvlm eval DIR`: plays a run's policy on the true task. Needs neither Ray nor the judge."""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rlvlm.algorithms.evaluation import PlayedEpisode, evaluate
from rlvlm.disk import write_json
from rlvlm.errors import EXIT_DONE, UsageError
from rlvlm.runs.artifacts.album import VIDEO_PX, write_videos
from rlvlm.runs.folder.checkpoints import Checkpoint
from rlvlm.runs.folder.rows import evaluation_row
from rlvlm.runs.folder.run_folder import RunFolder
from rlvlm.runs.pipelines import pipeline_of


def evaluate_run(folder: RunFolder, path: Path, episodes: int, with_video: bool) -> int:
    """Plays episodes with the deterministic policy and prints what came of them.

    Args:
        folder: of the run; `evaluation.json` and the videos are put there.
        path: what the user named: where it lies in a checkpoint, that one is played, otherwise the best.
        episodes: >= 1.
        with_video: whether each episode is filmed.

    Raises:
        UsageError: fewer than one episode, or the run has no checkpoint yet.
        CorruptCheckpoint: the policy's file is damaged.
    """
    if episodes < 1:
        raise UsageError(f"--episodes must be >= 1, got {episodes}", "leave it out for 10")
    checkpoint = choose_checkpoint(folder, path)
    config = folder.config()
    player, draw = pipeline_of(config).open_player(config, checkpoint.algorithm)
    played = evaluate(player, episodes)
    row = evaluation_row(played, checkpoint.state.env_steps, 0.0)
    result = {key: value for key, value in row.items() if key not in ("learned_return", "wall_s")}
    write_json(folder.path / "evaluation.json", result | {"each": _each(played)})
    videos = (
        write_videos(folder, played, checkpoint.state.env_steps, lambda snapshots: draw(snapshots, VIDEO_PX))
        if with_video
        else []
    )
    _show(checkpoint, played, videos, folder)
    return EXIT_DONE


def choose_checkpoint(folder: RunFolder, path: Path) -> Checkpoint:
    """The checkpoint that `path` lies in, otherwise the best of the run.

    Raises:
        UsageError: there is none yet.
    """
    here = path.resolve()
    for checkpoint in folder.checkpoints.all():
        if here.is_relative_to(checkpoint.path.resolve()):
            return checkpoint
    best = folder.checkpoints.best()
    if best is None:
        raise UsageError(f"{folder.path} has no checkpoint yet", f"let it run on: {folder.resume_command}")
    return best


def _each(played: list[PlayedEpisode]) -> list[dict[str, float | bool]]:
    return [
        {
            "success": episode.is_success,
            "return": round(episode.env_return, 3),
            "final_progress": round(float(episode.progress[-1]), 4),
        }
        for episode in played
    ]


def _show(checkpoint: Checkpoint, played: list[PlayedEpisode], videos: list[str], folder: RunFolder) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table("episode", "success", "true return", "progress at the end", box=None, padding=(0, 2))
    for number, each in enumerate(_each(played), start=1):
        success = "yes" if each["success"] else "no"
        table.add_row(str(number), success, f"{each['return']:.1f}", f"{each['final_progress']:.0%}")
    console.print(f"policy of step {checkpoint.state.env_steps:,} of {folder.path}")
    console.print(table)
    rate = np.mean([episode.is_success for episode in played])
    console.print(f"success {rate:.0%} of {len(played)} episodes")
    for name in videos:
        console.print(f"video {folder.videos / name}")
