"""How a run of a VLA is built, written down and shown."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rlvlm.algorithms.grpo.algorithm import VLAGRPO, VLAGRPOConfig
from rlvlm.algorithms.grpo.panel import ROWS
from rlvlm.algorithms.grpo.player import ChunkPlayer, load_policy
from rlvlm.algorithms.grpo.reward.scoring import shown_frames
from rlvlm.core.chunks import ChunkEpisode
from rlvlm.core.disk import write_whole
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.registry import make_env
from rlvlm.judges.agreement import wilson_interval
from rlvlm.judges.judge import Judge
from rlvlm.runs.artifacts.episodes import Caption, ShownEpisode, episodes_page
from rlvlm.runs.artifacts.scored import ScoreRecorder, write_score_page
from rlvlm.runs.folder.run_folder import RunFolder
from rlvlm.runs.folder.tables import CsvTable
from rlvlm.runs.pipeline import Draw, Players
from rlvlm.runs.session import built, fallback_judge
from rlvlm.runs.vla.config import VLARunConfig

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
            .envs(task=config.task, env_settings=config.env)
            .learning(policy=config.policy, sft=config.sft, grpo=config.algo, total_steps=config.steps)
            .rewards(
                scores=config.reward,
                make_judge=make_judge,
                make_fallback_judge=fallback_judge(config.reward.fallback_judge),
            )
            .debugging(seed=config.seed)
        )
        with built(settings) as algorithm:
            assert isinstance(algorithm, VLAGRPO), "what its config builds"
            self._algorithm = algorithm
            yield algorithm
            self._algorithm = None

    def open_recorder(self, folder: RunFolder, config: VLARunConfig, draw: Draw) -> ScoreRecorder:
        """Takes what was said of each episode; examples are kept as the judge saw them."""

        def drawn(snapshots: FloatArray, size_px: int) -> Frames:
            return shown_frames(draw(snapshots, size_px), config.reward)

        return ScoreRecorder(folder, drawn)

    def write_pages(self, folder: RunFolder, config: VLARunConfig) -> None:
        """`episodes.html`: the last evaluation's episodes, one image for each chunk and one for the end;
        `success_by_instruction.csv`; and the judge's page, where anybody scored.
        """
        write_score_page(folder, config)
        if self._algorithm is None or not self._algorithm.last_played:
            return
        played, rows = self._algorithm.last_played, success_by_instruction(self._algorithm.last_played)
        CsvTable(folder.path / "success_by_instruction.csv", list(rows[0]), "").write(rows)
        shown = [shown_episode(episode, self._algorithm.draw_all) for episode in played[:_PAGE_EPISODES]]
        note = (
            f"The first {len(shown)} of {len(played)} greedy episodes of the last evaluation, from initial states that "
            "training never saw. The table counts all of them, with intervals of 95 %."
        )
        write_whole(folder.path / "episodes.html", episodes_page(shown, config.title, note, rows))

    def open_players(self, config: VLARunConfig, checkpoint: Path) -> Players:
        """The policy, greedy and sampled as in training, in envs of its own."""
        torch.set_num_threads(config.algo.threads)
        world = make_env(config.task, config.env.for_evaluation(), config.seed)
        policy, scale = load_policy(checkpoint, world)
        sampled = ChunkPlayer(policy, world, scale, config.algo.temperature, config.algo.least_range)
        own = ChunkPlayer(policy, world, scale)
        return Players(own=own, name="policy, greedy", draw=world.draw, others={"policy, sampled": sampled})


def success_by_instruction(episodes: Sequence[ChunkEpisode]) -> list[dict[str, str | int]]:
    """Of each instruction: how many of its episodes succeed, and Wilson's interval of the rate at 95 %."""
    rows = []
    for instruction in sorted({episode.instruction for episode in episodes}):
        outcomes = [episode.success for episode in episodes if episode.instruction == instruction]
        low, high = wilson_interval(sum(outcomes), len(outcomes))
        rate = sum(outcomes) / len(outcomes)
        rows.append(
            {
                "instruction": instruction,
                "episodes": len(outcomes),
                "successes": sum(outcomes),
                "rate": f"{rate:.2f}",
                "low": f"{low:.2f}",
                "high": f"{high:.2f}",
            }
        )
    return rows


def shown_episode(episode: ChunkEpisode, draw: Draw) -> ShownEpisode:
    """An episode for people: what the policy saw before each chunk, by all cameras, and how it ended."""
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
        steps=int(episode.steps.sum()),
        seed=episode.state_id,
    )
