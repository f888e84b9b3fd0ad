"""Judges that read the truth from pixels: they see what the simulator knows, and have the fault of their name."""

import numpy as np
import pytest

from rlvlm.core.judging import Clip
from rlvlm.demonstrations.playing import Style, play, player_of
from rlvlm.envs.push_block import ASKED, COLOURS, HAND, PAD, draw_tables, instruction_of
from rlvlm.envs.registry import make_env, task_env
from rlvlm.judges.config import JudgeConfig
from rlvlm.plugins.known_judges import pixel_truth
from rlvlm.testing import check_judge


def test_a_table_is_read_by_hand():
    state = np.array([-0.5, 0.2, 0.1, 0.3, -0.1, -0.35, 0.5, -0.2, 2, 0], np.float32)
    (image,) = draw_tables(state[None], 144)
    seen = pixel_truth.see(image, "push the blue block onto the pad")
    assert seen.hand is not None and seen.pad is not None and seen.block is not None
    assert np.allclose(seen.hand, state[HAND], atol=0.02) and np.allclose(seen.pad, state[PAD], atol=0.02)
    assert np.allclose(seen.block, state[ASKED], atol=0.02) and state[COLOURS] == 2
    assert seen.progress == pytest.approx(1 - np.hypot(0.4, 0.5) / 1.6, abs=0.03) and not seen.is_success
    assert pixel_truth.see(image, "push the green block onto the pad").worth == 0, "there is no green block"


def test_the_truth_of_an_episode_is_read_from_its_images():
    env = make_env("push_block", task_env("push_block"), 0)
    episode = play(env, 3, player_of(env, 3, Style(noise=0.2)), after_success=2)
    assert episode is not None
    moments = list(episode.looked)
    seen = [pixel_truth.see(frame, episode.goal) for frame in env.draw_sized(episode.snapshots[moments], 144)]
    assert np.abs(np.array([each.progress for each in seen]) - episode.progress[moments]).max() < 0.12
    assert [each.is_success for each in seen] == list(episode.successes)


FAULTS = {
    "hand_at_pad": lambda s: np.concatenate([[s[6] - 0.28, s[7]], s[2:]]),
    "contact": lambda s: np.concatenate([[s[2] - 0.2, s[3]], s[2:]]),
    "best_near": lambda s: np.concatenate([s[:2], [s[6] - 0.24, s[7]], s[4:]]),
    "wrong_block": lambda s: np.concatenate([s[:4], s[6:8], s[6:]]),
}
"""Failing states that a judge of the name likes as a success or better, made from a start."""


@pytest.mark.parametrize("name", ["truth", *FAULTS])
def test_a_judge_has_the_fault_of_its_name_and_keeps_the_contract(name):
    start = np.array([-0.75, 0.1, -0.1, 0.35, -0.1, -0.4, 0.55, 0.0, 1, 3], np.float32)
    won = np.concatenate([[start[6] - 0.2, start[7]], start[6:8], start[4:]]).astype(np.float32)
    judge = getattr(pixel_truth, name)(JudgeConfig())
    tricks = FAULTS.values() if name == "truth" else [FAULTS[name]]
    states = [start, won, *(trick(start) for trick in tricks)]
    frames = draw_tables(np.stack(states).astype(np.float32), 144)
    values = [s.value for s in judge.score([Clip(goal=instruction_of(start), frames=frame[None]) for frame in frames])]
    first, success, *tricked = values
    assert first < success and all((value > success - 0.05) == (name != "truth") for value in tricked), values
    check_judge(judge)
