"""How a run of a VLA is built, written down and shown."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rlvlm.algorithms.grpo.algorithm import VLAGRPO, VLAGRPOConfig
from rlvlm.algorithms.grpo.panel import ROWS
from rlvlm.algorithms.grpo.player import ChunkPlayer, load_policy
from rlvlm.algorithms.grpo.scoring import JudgedEpisode
from rlvlm.disk import write_whole
from rlvlm.envs.registry import make_world
from rlvlm.judges.judge import Judge
from rlvlm.runs.artifacts.episodes import Caption, ShownEpisode, episodes_page
from rlvlm.runs.folder.run_folder import RunFolder
from rlvlm.runs.pipeline import Draw, Players
from rlvlm.runs.session import built
from rlvlm.runs.vla.config import VLARunConfig
from rlvlm.types.chunks import ChunkEpisode

_PAGE_EPISODES, _PAGE_PX = 24, 128
"""Episodes on the page, at most, and the side of their images."""


class VLAPipeline:
    """GRPO of a policy that acts in chunks."""

    rows = ROWS

    def __init__(self) -> None:
        self._algorithm: VLAGRPO | None = None

    @contextmanager
    def open_algorithm(self, config: VLARunConfig, make_judge: Callable[[], Judge] | None) -> Iterator[VLAGRPO]:
        """The algorithm, until the context closes."""
        torch.set_num_threads(config.algo.threads)
        settings = (
            VLAGRPOConfig()
            .worlds(task=config.task, world=config.env)
            .learning(policy=config.policy, sft=config.sft, grpo=config.algo)
            .rewards(scores=config.reward, make_judge=make_judge)
            .debugging(seed=config.seed)
        )
        with built(settings) as algorithm:
            assert isinstance(algorithm, VLAGRPO), "what its config builds"
            self._algorithm = algorithm
            yield algorithm
            self._algorithm = None

    def open_recorder(self, folder: RunFolder, config: VLARunConfig, draw: Draw) -> "ScoreRecorder":
        """Takes what the judge said of each episode."""
        return ScoreRecorder(folder)

    def write_pages(self, folder: RunFolder, config: VLARunConfig) -> None:
        """`episodes.html`: the last evaluation's episodes, one image for each chunk and one for the end."""
        if self._algorithm is None or not self._algorithm.last_played:
            return
        shown = [shown_episode(episode, self._algorithm.draw) for episode in self._algorithm.last_played]
        note = "Greedy episodes of the last evaluation, from initial states that training never saw."
        write_whole(folder.path / "episodes.html", episodes_page(shown[:_PAGE_EPISODES], config.title, note))

    def open_players(self, config: VLARunConfig, checkpoint: Path) -> Players:
        """Plays the policy's likeliest chunks in worlds of its own."""
        torch.set_num_threads(config.algo.threads)
        world = make_world(config.task, replace(config.env, physics="exact"), config.seed)
        policy, scale = load_policy(checkpoint, world)
        return Players(own=ChunkPlayer(policy, world, scale), draw=world.draw)


class ScoreRecorder:
    """Rows of the score log: a judge's word on each episode, with the truth beside it.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def keep(self, records: Iterable[JudgedEpisode]) -> None:
        """Writes down what the algorithm's `drain_records` gave."""
        rows = [judged_row(record, index) for index, record in enumerate(records)]
        if rows:
            self._folder.scores.append(rows)


def judged_row(record: JudgedEpisode, index: int) -> dict[str, Any]:
    """A row of `vlm_score_log.csv`; a session is a group."""
    score = record.score
    return {
        "ground_truth_score": record.episode.progress,
        "vlm_score": score.value,
        "timestamp": datetime.fromtimestamp(record.timestamp, UTC).isoformat(timespec="milliseconds"),
        "status": str(score.status),
        "session": record.episode.group,
        "env_step": record.env_step,
        "index": index,
        "return": float(record.episode.env_rewards.sum()),
        "latency_s": score.latency_s,
        "text": score.text,
        "question": score.question,
    }


def shown_episode(episode: ChunkEpisode, draw: Draw) -> ShownEpisode:
    """An episode for people: what the policy saw before each chunk, and how it ended."""
    ends = episode.steps.cumsum()
    rewards = [
        float(episode.env_rewards[end - steps : end].sum()) for end, steps in zip(ends, episode.steps, strict=True)
    ]
    captions = [
        Caption(action=f"chunk {number}: {steps} steps", reward=reward)
        for number, (steps, reward) in enumerate(zip(episode.steps.tolist(), rewards, strict=True), start=1)
    ]
    return ShownEpisode(
        title=episode.instruction,
        frames=draw(episode.snapshots[[0, *ends]], _PAGE_PX),
        captions=[*captions, Caption(action="the end")],
        is_success=episode.success,
        episode_return=float(episode.env_rewards.sum()),
        seed=episode.state_id,
    )
