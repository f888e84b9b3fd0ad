"""Everything a run leaves to look at, written together at its end or where a signal stopped it."""

from collections.abc import Callable, Sequence

import numpy as np

from rlvlm.algorithms.evaluation import PlayedEpisode
from rlvlm.core.disk import write_whole
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.runs.artifacts.card import run_card
from rlvlm.runs.artifacts.plots import write_plots
from rlvlm.runs.artifacts.summary import summarise
from rlvlm.runs.artifacts.video import write_video
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.checkpoints import RunState
from rlvlm.runs.folder.run_folder import RunFolder

NUM_VIDEOS = 2
"""Episodes of the last evaluation that are filmed."""
VIDEO_PX = 300

Draw = Callable[[FloatArray], Frames]


def write_artifacts(
    folder: RunFolder,
    config: RunConfig,
    state: RunState,
    exit_reason: str,
    films: Sequence[PlayedEpisode],
    draw: Draw,
    write_pages: Callable[[], None],
) -> None:
    """Writes summary, plots, videos, the pipeline's own pages and the run card.

    Args:
        folder: of the run.
        config: of the run.
        state: where it stopped.
        exit_reason: `done`, or why it stopped earlier.
        films: episodes to be filmed; empty when there is no time for it.
        draw: makes images [N, H, W, 3] of snapshots [N, S], with even H and W.
        write_pages: writes what only this kind of run has.
    """
    summary = summarise(folder, config, state, exit_reason)
    folder.write_summary(summary)
    write_plots(folder, config.title)
    write_videos(folder, films, state.env_steps, draw)
    write_pages()
    files = sorted(str(file.relative_to(folder.path)) for file in folder.path.rglob("*") if file.is_file())
    card = run_card(config, summary, folder.environment(), folder.command(), files)
    write_whole(folder.card, card)


def write_videos(folder: RunFolder, episodes: Sequence[PlayedEpisode], env_steps: int, draw: Draw) -> list[str]:
    """Films episodes of the policy after `env_steps`, and returns the files' names."""
    names = []
    for number, episode in enumerate(episodes, start=1):
        is_learned = bool(np.isfinite(episode.learned_rewards).all())
        rewards = episode.learned_rewards if is_learned else episode.env_rewards
        lost = "success, undone at the end" if episode.is_success else "no success"
        end = "success" if episode.ends_in_success else lost
        title = f"step {env_steps:,}, {end}, {episode.reward_name if is_learned else 'true reward'}"
        file = folder.videos / f"step_{env_steps:08d}_episode_{number}.mp4"
        bounds = episode.reward_range if is_learned else None
        write_video(file, draw(episode.snapshots), rewards, title, episode.progress, bounds)
        names.append(file.name)
    return names
