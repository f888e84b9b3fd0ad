"""Every backend that can be built here keeps the promises of a judge; a new one adds its line to `JUDGES`.

Those that need a server are held to the same in test_remote_judge.py.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_vlm import save_tiny_gemma3, save_tiny_internvl, save_tiny_llava, save_tiny_llava_next, save_tiny_smolvlm

from rlvlm.core.judging import Clip, Query, Status
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Generator, Judge
from rlvlm.testing import FakeJudge, check_judge

Make = Callable[[dict[str, Path], Path], Judge]
"""Builds a judge from the tiny VLMs' folders and a folder of its own."""


def chat(folder: Path, **changes) -> Judge:
    config = JudgeConfig(backend="transformers", model=str(folder), max_new_tokens=4, batch_size=4)
    return build_judge(replace(config, **changes))


JUDGES: dict[str, Make] = {
    "fake": lambda vlms, folder: FakeJudge(),
    "pocket": lambda vlms, folder: build_judge(JudgeConfig()),
    "qwen2_vl": lambda vlms, folder: chat(vlms["qwen2_vl"]),
    "qwen2_5_vl": lambda vlms, folder: chat(vlms["qwen2_5_vl"], prompt="single_stage", score="rating"),
    "qwen3_vl": lambda vlms, folder: chat(vlms["qwen3_vl"], prompt="two_stage", score="success"),
    "qwen3_vl_video": lambda vlms, folder: chat(vlms["qwen3_vl"], score="video"),
    "llava": lambda vlms, folder: chat(save_tiny_llava(folder / "vlm"), score="success"),
    "llava_next": lambda vlms, folder: chat(save_tiny_llava_next(folder / "vlm"), prompt="two_stage", score="rating"),
    "gemma3": lambda vlms, folder: chat(save_tiny_gemma3(folder / "vlm"), score="success"),
    "internvl": lambda vlms, folder: chat(save_tiny_internvl(folder / "vlm"), prompt="two_stage", score="rating"),
    "smolvlm": lambda vlms, folder: chat(save_tiny_smolvlm(folder / "vlm"), score="success"),
    "both_orders": lambda vlms, folder: build_judge(JudgeConfig(both_orders=True)),
    "statement": lambda vlms, folder: chat(vlms["qwen3_vl"], score="statement"),
    "statement_raw": lambda vlms, folder: chat(vlms["qwen3_vl"], score="statement_raw"),
    "rubric": lambda vlms, folder: chat(vlms["qwen2_5_vl"], score="rubric"),
    "delta": lambda vlms, folder: chat(vlms["qwen3_vl"], score="delta"),
}


FRAMES_SHOWN = {**{"fake": None, "qwen3_vl_video": 20, "statement": 16, "statement_raw": 16, "rubric": 16}}
"""Of a clip of 20; of the others 8."""


@pytest.mark.slow
@pytest.mark.parametrize("name", JUDGES)
def test_every_judge_keeps_the_contract(tiny_vlms, tmp_path, name):
    judge = JUDGES[name](tiny_vlms, tmp_path)
    check_judge(judge)
    frames = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), np.uint8)
    [score] = judge.score([Clip(goal="open the drawer", frames=frames)])
    assert score.num_frames == (0 if score.status is Status.FAILED else FRAMES_SHOWN.get(name, 8)), score
    if isinstance(judge, Generator) and name != "both_orders":
        image = {"type": "image", "image": np.zeros((32, 32, 3), np.uint8)}
        turn = {"role": "user", "content": [{"type": "text", "text": "open the drawer"}, image]}
        replies = judge.generate([[turn], [turn]], max_new_tokens=3, temperature=0.0)
        assert len(replies) == 2 and replies[0] == replies[1]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_video", "llava_next"])
def test_a_goal_image_changes_nothing_in_the_contract(tiny_vlms, tmp_path, name):
    judge = JUDGES[name](tiny_vlms, tmp_path)
    goal, *frames = np.random.default_rng(0).integers(0, 256, (4, 1, 32, 32, 3), np.uint8)
    verdicts = judge.compare([Query(goal="open it", left=frames[0], right=frames[1], goal_picture=goal)])
    scores = judge.score([Clip(goal="open it", frames=frames[2], goal_picture=goal)])
    assert verdicts[0].status is not Status.FAILED and scores[0].status is not Status.FAILED
