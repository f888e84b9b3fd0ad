"""A judge's score as verl's custom reward function."""

import asyncio
import sys

import pytest
from frameworks import needs, run, served, snippet

from rlvlm.core.errors import UsageError
from rlvlm.plugins.verl.reward import compute_score

SHOW = """
import numpy as np
def show(reply, ground_truth, extra_info):
    return np.full((2, 8, 8, 3), 51 * len(reply), np.uint8)
"""


@pytest.fixture
def show(tmp_path, monkeypatch):
    (tmp_path / "show_of_verl.py").write_text(SHOW)
    yield f"{tmp_path}/show_of_verl.py:show"
    sys.modules.pop("show_of_verl", None)


def test_rows_are_scored_together_by_their_own_goals(tmp_path, show):
    with served(tmp_path) as (url, home):
        token = (home / ".rlvlm" / "token").read_text()
        asked = [
            compute_score("toy", "a" * letters, "", {"goal": "bright"}, url=url, token=token, show=show)
            for letters in range(6)
        ]

        async def all_of_them():
            return await asyncio.gather(*asked)

        found = asyncio.run(all_of_them())
    # by hand: n letters make a grey of 51 n, of 255
    assert [row["score"] for row in found] == [pytest.approx(n / 5) for n in range(6)]
    assert {row["judge_answered"] for row in found} == {1.0}


def test_a_killed_server_is_worth_what_the_settings_say(show, monkeypatch):
    monkeypatch.setattr("rlvlm.judges.http.CONNECT_S", 0.1)
    dead = {"url": "http://127.0.0.1:9", "token": "t", "show": show, "goal": "bright", "without_answer": 0.5}
    assert asyncio.run(compute_score("toy", "a", "", **dead)) == {"score": 0.5, "judge_answered": 0.0}


def test_a_row_without_a_goal_says_where_it_is_missing(show):
    with pytest.raises(UsageError, match="a row of toy has no extra_info.goal; extra_info has index"):
        asyncio.run(compute_score("toy", "a", "", {"index": 3}, url="http://127.0.0.1:9", token="t", show=show))


@needs("verl")
@pytest.mark.slow
def test_verls_own_loader_and_reward_manager_call_it_as_the_page_says(tmp_path):
    (tmp_path / "my_file.py").write_text(snippet("verl"))
    program = (
        f"PAGE = {snippet('verl', 'yaml')!r}"
        + """
import asyncio
import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.trainer.ppo.reward import get_custom_reward_fn

config = OmegaConf.create(PAGE)
function = get_custom_reward_fn(config)


class Letters:
    def decode(self, ids, skip_special_tokens):
        return "a" * len(ids)


async def main():
    manager = NaiveRewardManager(config, Letters(), function)
    rows = [
        DataProto.from_dict(
            tensors={"responses": torch.ones(1, 5), "attention_mask": (torch.arange(8) < 3 + letters)[None]},
            non_tensors={
                "data_source": np.array(["toy"], object),
                "reward_model": np.array([{"ground_truth": ""}], object),
                "extra_info": np.array([{"goal": "bright"}], object),
            },
        )
        for letters in range(6)
    ]
    found = await asyncio.gather(*(manager.run_single(row) for row in rows))
    answered = {row["reward_extra_info"]["judge_answered"] for row in found}
    print([round(row["reward_score"], 2) for row in found], answered)


asyncio.run(main())
"""
    )
    said = run("verl", program, tmp_path)
    # by hand: n letters make a grey of 51 n, of 255
    assert "[0.0, 0.2, 0.4, 0.6, 0.8, 1.0] {1.0}" in said
