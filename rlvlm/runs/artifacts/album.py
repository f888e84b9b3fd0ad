"""Everything a run leaves to look at, written together at its end or where a signal stopped it."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from rlvlm.algorithms.evaluation import EvaluationEpisode
from rlvlm.disk import write_whole
from rlvlm.judges.prompts import compare_messages
from rlvlm.runs.artifacts.card import run_card
from rlvlm.runs.artifacts.page import judge_page
from rlvlm.runs.artifacts.plots import outcome, write_plots
from rlvlm.runs.artifacts.summary import summarise
from rlvlm.runs.artifacts.video import write_video
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.checkpoints import RunState
from rlvlm.runs.folder.run_folder import RunFolder
from rlvlm.types.judging import Query
from rlvlm.types.steps import FloatArray, Frames

NUM_VIDEOS = 2
"""Episodes of the last evaluation that are filmed."""
VIDEO_PX = 300

Draw = Callable[[FloatArray], Frames]


def write_artifacts(
    folder: RunFolder,
    config: RunConfig,
    state: RunState,
    exit_reason: str,
    episodes: Sequence[EvaluationEpisode],
    draw: Draw,
) -> None:
    """Writes summary, plots, videos, the judge's page and the run card.

    Args:
        folder: of the run.
        config: of the run.
        state: where it stopped.
        exit_reason: `done`, or why it stopped earlier.
        episodes: to be filmed; empty when there is no time for it.
        draw: makes pictures [N, H, W, 3] of snapshots [N, S], with even H and W.
    """
    summary = summarise(folder, config, state, exit_reason)
    folder.write_summary(summary)
    write_plots(folder, config.title)
    write_videos(folder, episodes[:NUM_VIDEOS], state.env_steps, draw)
    _write_page(folder, config)
    files = sorted(str(file.relative_to(folder.path)) for file in folder.path.rglob("*") if file.is_file())
    card = run_card(config, summary, folder.environment(), folder.command(), files)
    write_whole(folder.card, card)


def write_videos(folder: RunFolder, episodes: Sequence[EvaluationEpisode], env_steps: int, draw: Draw) -> list[str]:
    """Films episodes of the policy after `env_steps`, and returns the files' names."""
    names = []
    for number, episode in enumerate(episodes, start=1):
        is_learned = bool(np.isfinite(episode.learned_rewards).all())
        rewards = episode.learned_rewards if is_learned else episode.trajectory.env_rewards
        end = "success" if episode.is_success else "no success"
        title = f"step {env_steps:,}, {end}, {'learned' if is_learned else 'true'} reward"
        file = folder.videos / f"step_{env_steps:08d}_episode_{number}.mp4"
        write_video(file, draw(episode.trajectory.snapshots), rewards, title)
        names.append(file.name)
    return names


def _write_page(folder: RunFolder, config: RunConfig) -> None:
    rows = folder.queries.read()
    if rows:
        counts = Counter(map(outcome, rows))
        prompt = _prompt_text(config) if config.asks_judge else ""
        write_whole(folder.panel, judge_page(folder.samples.read(), counts, config.title, prompt))


def _prompt_text(config: RunConfig) -> str:
    """The first turn that is put to the judge, with the pictures' places marked."""
    blank = np.zeros((config.feedback.segment_steps, 1, 1, 3), np.uint8)
    query = Query(goal=config.judge_goal, left=blank, right=blank)
    messages = compare_messages(config.judge.prompt, query)
    parts = [part for message in messages for part in message["content"]]
    return "\n".join(part["text"] if part["type"] == "text" else "[picture]" for part in parts)
