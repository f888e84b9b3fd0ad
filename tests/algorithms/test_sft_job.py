import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvlm.algorithms.policy_gradient.slots import EnvSlot
from rlvlm.algorithms.sft_config import JobConfig, ReplySFTConfig
from rlvlm.algorithms.sft_folders import BODY_FILE, HEADS_FILE, load_trained
from rlvlm.algorithms.sft_replies import demonstrate
from rlvlm.core import metrics
from rlvlm.core.errors import UsageError
from rlvlm.envs.registry import make_env, task_env
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.policies.vlm.policy import VLMPolicy

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def make_policy(folder: str, learns: Any = "all") -> VLMPolicy:
    return load_policy(PolicyConfig(model=folder, device="cpu", learns=learns, lora_rank=4, seed=1))


def make_slot() -> EnvSlot:
    return EnvSlot(make_env("number_line", task_env("number_line"), 0), "number_line")


def load_episodes() -> Any:
    return demonstrate(make_slot(), ReplySFTConfig(turns=24), 0)


# what `all` learns and saves is held without a job, in test_sft.py and test_sft_folders.py
@pytest.mark.parametrize("learns", ["lora", pytest.param("all", marks=pytest.mark.full)])
def test_a_job_learns_saves_apart_and_goes_on_where_it_stopped(
    local_ray: Any, tmp_path: Path, learns: Any, monkeypatch: pytest.MonkeyPatch
):
    # imported here: they take seconds, and every test process and the job's own actors read this file
    from rlvlm.algorithms.sft_job import TrainLoopConfig, run_sft
    from tests.tiny_vlm import save_tiny_vlm

    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # the job ends at such a look: 2 s by default
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # an actor more
    folder = str(save_tiny_vlm(tmp_path / "model", "qwen3_vl"))
    out = tmp_path / "out"

    arguments = {"logging_steps": "1"}

    def job(updates: int) -> dict[str, float]:
        return run_sft(
            TrainLoopConfig(
                make_policy=functools.partial(make_policy, folder, learns),
                make_slot=make_slot,
                load_episodes=load_episodes,
                sft=ReplySFTConfig(updates=updates, batch_size=8, lr=3e-3, held_out=0.2),
                job=JobConfig(save_every=4, max_reply_tokens=4, arguments=arguments),
                seed=0,
            ),
            out,
        )

    first, second = job(4), job(8)
    assert second[metrics.SFT_HELD_OUT_LOSS] < first[metrics.SFT_HELD_OUT_LOSS]
    states = [json.loads(file.read_text()) for file in out.glob("job/*/checkpoint/trainer_state.json")]
    assert sorted(state["global_step"] for state in states) == [4, 8], "the second job went on from the first's fourth"
    assert {state["logging_steps"] for state in states} == {1}, "as job.arguments says"
    arguments = {"learning_rat": "1"}
    with pytest.raises(UsageError, match="has no arguments learning_rat"):
        job(9)
    fresh = make_policy(folder, learns)
    before = {name: value.clone() for name, value in fresh.trained_state().items()}
    load_trained(fresh, out)
    assert any(not torch.equal(value, before[name]) for name, value in fresh.trained_state().items())
    assert (out / HEADS_FILE).exists() and (out / BODY_FILE).exists()
    assert all(torch.equal(value, before[name]) for name, value in fresh.trained_state().items() if "value_" in name)
