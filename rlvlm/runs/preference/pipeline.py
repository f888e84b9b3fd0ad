"""How a run of SAC and PEBBLE is built, written down and shown."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from rlvlm.algorithms.sac_pebble.algorithm import SACPebble, SACPebbleConfig
from rlvlm.algorithms.sac_pebble.panel import ROWS
from rlvlm.algorithms.sac_pebble.player import StepsPlayer, load_policy
from rlvlm.core.disk import write_whole
from rlvlm.core.judging import Query
from rlvlm.envs.images import FrameStore
from rlvlm.envs.registry import make_env
from rlvlm.judges.judge import Judge
from rlvlm.judges.prompts import compare_messages
from rlvlm.runs.artifacts.page import judge_page
from rlvlm.runs.artifacts.plots import outcome
from rlvlm.runs.artifacts.scored import write_score_page
from rlvlm.runs.folder.label_store import label_store
from rlvlm.runs.folder.run_folder import RunFolder
from rlvlm.runs.pipeline import Draw, Players
from rlvlm.runs.preference.config import PreferenceRunConfig
from rlvlm.runs.preference.recorder import PreferenceRecorder
from rlvlm.runs.session import built


class PreferencePipeline:
    """SAC with a reward that is learned, judged or the env's own."""

    rows = ROWS

    @contextmanager
    def open_algorithm(
        self, config: PreferenceRunConfig, make_judge: Callable[[], Judge] | None
    ) -> Iterator[SACPebble]:
        """The algorithm, until the context closes."""
        torch.set_num_threads(1)  # batches of 256 are too small to share: two threads are slower than one
        settings = SACPebbleConfig().envs(task=config.task, env_settings=config.env).learning(sac=config.algo)
        settings.rewards(
            reward=config.reward,
            feedback=config.feedback,
            reward_model=config.reward_model,
            judge=config.judge,
            goal=config.judge_goal,
            make_judge=make_judge,
            total_steps=config.steps,
        )
        settings.debugging(seed=config.seed)
        with built(settings) as algorithm:
            assert isinstance(algorithm, SACPebble), "what its config builds"
            yield algorithm

    def open_recorder(self, folder: RunFolder, config: PreferenceRunConfig, draw: Draw) -> PreferenceRecorder:
        """Takes the records of queries and scores."""
        return PreferenceRecorder(folder, label_store(folder, config), draw, config.judge_goal)

    def write_pages(self, folder: RunFolder, config: PreferenceRunConfig) -> None:
        """The judge's page, where anybody was asked."""
        rows = folder.queries.read()
        if not rows:
            write_score_page(folder, config)
            return
        prompt = ""
        if config.asks_judge:  # the first turn that is put to it, with the images' places marked
            blank = np.zeros((config.feedback.segment_steps, 1, 1, 3), np.uint8)
            messages = compare_messages(config.judge.prompt, Query(goal=config.judge_goal, left=blank, right=blank))
            parts = [part for message in messages for part in message["content"]]
            prompt = "\n".join(part["text"] if part["type"] == "text" else "[picture]" for part in parts)
        page = judge_page(folder.samples.read(), Counter(map(outcome, rows)), config.title, prompt)
        write_whole(folder.panel, page)

    def open_players(self, config: PreferenceRunConfig, checkpoint: Path) -> Players:
        """Plays the deterministic policy in an env of its own."""
        world = make_env(config.task, config.env, config.seed)
        player = StepsPlayer(load_policy(checkpoint), world)
        return Players(own=player, draw=lambda snapshots, size_px: FrameStore(world, size_px).frames(snapshots))
