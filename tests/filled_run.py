"""A run's folder as a small run would leave it, made of real records on TinyEnv."""

from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from rlvlm.core.judging import Label, Score, Stamp, Status, Verdict
from rlvlm.core.steps import Pair, Segment
from rlvlm.envs.env import StepEnv
from rlvlm.preferences.records import QueryRecord, record_answers
from rlvlm.rewards.scoring_items import ScoredItem
from rlvlm.runs.files.folder import create_folder
from rlvlm.runs.files.records import compared_examples, query_row
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.testing import TinyEnv

STAMP = Stamp(judge="transformers:tiny", revision="", prompt="direct/1", decoding="temperature=0")


def make_segment(env: StepEnv, progress: float) -> Segment:
    """One step, taken at the env's start, whose true progress is said to be `progress`."""
    obs, info = env.reset(seed=0)
    row = np.zeros((1, 1), np.float32)
    return Segment(
        obs=obs[None],
        actions=row,
        next_obs=obs[None],
        snapshots=info["snapshot"][None],
        env_rewards=np.array([progress], np.float32),
        progress=np.array([progress], np.float32),
    )


@pytest.fixture
def make_records():
    """Makes the records of a session: right, wrong, undecided, unreadable, unanswered, and one whose truth ties."""

    def make(env_step: int, session: int, text: str = "0") -> list[QueryRecord]:
        env = TinyEnv()
        sides = ((0.9, 0.1), (0.1, 0.9), (0.5, 0.4), (0.3, 0.2), (0.2, 0.7), (0.4, 0.4))
        pairs = [Pair(left=make_segment(env, left), right=make_segment(env, right)) for left, right in sides]
        ends = [
            (Status.OK, Label.LEFT),
            (Status.OK, Label.LEFT),
            (Status.NO_PREFERENCE, Label.TIE),
            (Status.INVALID, None),
            (Status.FAILED, None),
            (Status.OK, Label.RIGHT),
        ]
        verdicts = [
            Verdict(status=status, label=label, stamp=STAMP, text=text, probabilities=(0.6, 0.3, 0.1))
            for status, label in ends
        ]
        records = record_answers(pairs, verdicts, env_step=env_step, session=session, timestamp=1_700_000_000.5)
        return [replace(record, used_step=env_step) for record in records]

    return make


@pytest.fixture
def make_scores():
    """Makes the records of a session of scoring: three scores, one unreadable, one unanswered."""

    def make(env_step: int) -> list[ScoredItem]:
        env = TinyEnv()
        segments = [make_segment(env, progress) for progress in (0.0, 0.5, 0.9, 0.3, 0.4)]
        said = [(Status.OK, 0.1), (Status.OK, 0.8), (Status.OK, 0.7), (Status.INVALID, None), (Status.FAILED, None)]
        scores = [Score(status=status, value=value, stamp=STAMP, text="10") for status, value in said]
        return record_answers(segments, scores, env_step=env_step, session=0, timestamp=1_700_000_000.5)

    return make


@pytest.fixture
def config(tmp_path):
    return StepsRun(task="drawer_open", seed=3, out=tmp_path / "run")


@pytest.fixture
def folder(config):
    return create_folder(config, ["rlvlm", "run", "drawer_open", "--seed", "3"], datetime(2026, 1, 2, 3, 4, 5))


@pytest.fixture
def filled(folder, make_records):
    """Four evaluations and two sessions of six queries each."""
    env = TinyEnv()
    for number, success in enumerate((0.0, 0.2, 1.0, 0.9), start=1):
        folder.evaluations.append(
            [
                {
                    "step": 1_000 * number,
                    "success_rate": success,
                    "episode_return": 10.0 * number,
                    "learned_return": None if number == 1 else float(number),
                    "final_progress": success,
                    "episodes": 5,
                    "wall_s": 60.0 * number,
                }
            ]
        )
        folder.metrics.append([{"env_steps": 1_000 * number, "eval/success_rate": success}])
    for session, step in enumerate((1_500, 2_500)):
        records = make_records(step, session, "<script>alert(1)</script>\nnothing, or 0")
        folder.queries.append(map(query_row, records))
        folder.samples.append(compared_examples(records, lambda snapshots, _: env.draw(snapshots, 32)))
    return folder
