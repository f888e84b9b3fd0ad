"""A judge on vLLM, for real: a Serve replica in vLLM's own environment, beside the same weights in transformers."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from chaos import replica_pids, wait_until

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.core.judging import Clip, Label, Query, Status
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.pocket.models import weights_folder
from rlvlm.serving.apps import start_judge
from rlvlm.serving.client import ServedJudge
from rlvlm.serving.config import PlacementConfig
from rlvlm.testing import check_judge
from rlvlm.vlms.config import EngineConfig

PYTHON = Path(__file__).parents[2] / ".envs/vllm/bin/python"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM environment here; make vllm builds it"),
]
GOAL = "open the drawer"
POCKET = JudgeConfig(backend="transformers", model=str(weights_folder()), dtype="float32", max_new_tokens=64)
ON_VLLM = replace(POCKET, backend="vllm", engine=EngineConfig(python=str(PYTHON), eager=True, max_tokens=2048))


def make_pairs(count: int) -> list[Query]:
    """Noise with one plain band of another colour per side: different images, different answers."""
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (count, 2, 1, 200, 200, 3), np.uint8)
    frames[:, :, :, 60:140] = rng.integers(0, 256, (count, 2, 1, 1, 1, 3))
    return [Query(goal=GOAL, left=left, right=right) for left, right in frames]


@contextmanager
def served(config: JudgeConfig) -> Iterator[ServedJudge]:
    with start_judge(config, PlacementConfig(), "test-vllm") as running:
        yield running


@pytest.fixture(scope="module")
def judge(local_ray):
    with served(ON_VLLM) as judge:
        yield judge


def test_the_same_pairs_get_the_same_verdicts_as_from_transformers(judge):
    pairs = make_pairs(12)
    here, there = build_judge(POCKET).compare(pairs), judge.compare(pairs)
    assert [verdict.label for verdict in there] == [verdict.label for verdict in here]
    for one, other in zip(here, there, strict=True):
        assert other.probabilities == pytest.approx(one.probabilities, abs=1e-4)
    assert len({verdict.probabilities[0] for verdict in there}) == 12  # the images matter
    assert there[0].stamp.revision == here[0].stamp.revision and there[0].stamp.judge.startswith("vllm:")


def test_scores_and_writing_agree_too(judge):
    local = build_judge(POCKET)
    clips = [Clip(goal=GOAL, frames=pair.left) for pair in make_pairs(4)]
    assert [score.text for score in judge.score(clips)] == [score.text for score in local.score(clips)]
    picture = {"type": "image", "image": clips[0].frames[0]}
    chat = [{"role": "user", "content": [{"type": "text", "text": GOAL}, picture]}]
    assert judge.generate([chat], max_new_tokens=6, temperature=0.0) == local.generate(
        [chat], max_new_tokens=6, temperature=0.0
    )
    with pytest.raises(UnsupportedQuestion):
        judge.generate([[]], max_new_tokens=6, temperature=0.0)


def test_it_keeps_the_contract(judge):
    check_judge(judge)


def test_a_disconnected_caller_cancels_its_request(tmp_path):
    """In vLLM's own Python: a reply that would go on for ever ends with who awaits it, and the next one is quick."""
    script = tmp_path / "leave.py"
    script.write_text(LEAVING)
    ended = subprocess.run(
        [str(PYTHON), str(script), str(weights_folder())], capture_output=True, text=True, check=False
    )
    assert "left 0\nwhole" in ended.stdout, ended.stderr[-2000:]


LEAVING = """
import asyncio, sys
from rlvlm.vlms.config import EngineConfig, VLMConfig
from rlvlm.vlms.engines.vllm import VllmCore

async def leave(core):
    endless = {"max_tokens": 4000, "ignore_eos": True}
    asked = [asyncio.ensure_future(core.ask([5, 6, 7], [], endless)) for _ in range(8)]
    while core._engine.get_num_unfinished_requests() < 8:
        await asyncio.sleep(0.05)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    while core._engine.get_num_unfinished_requests():
        await asyncio.sleep(0.05)
    print("left", core._engine.get_num_unfinished_requests())
    output = await core.ask([5, 6, 7], [], {"max_tokens": 3, "ignore_eos": True})
    print("whole" if len(output.outputs[0].token_ids) == 3 else output)

if __name__ == "__main__":
    core = VllmCore(
        VLMConfig(model=sys.argv[1], dtype="float32"), EngineConfig(eager=True), max_requests=4, max_images=1
    )
    asyncio.run(asyncio.wait_for(leave(core), 60))
    core.shutdown()
"""


def test_engine_or_replica_killed_both_are_replaced_and_nothing_is_left(local_ray):
    def engines() -> set[int]:
        parents = replica_pids(app)
        return {process.pid for process in psutil.process_iter() if is_engine_of(process, parents)}

    with start_judge(ON_VLLM, PlacementConfig(retries=12), "test-vllm-dies") as running:
        app, judge, pairs = running.app, running, make_pairs(2)
        expected = [verdict.label for verdict in judge.compare(pairs)]
        for victim in ("engine", "replica"):
            (engine,), (replica,) = engines(), replica_pids(app)
            os.kill(engine if victim == "engine" else replica, signal.SIGKILL)
            assert [verdict.label for verdict in judge.compare(pairs)] == expected, f"after the {victim} was killed"
            assert not psutil.pid_exists(engine) and replica not in replica_pids(app)
            wait_until(lambda: len(engines()) == 1, "one engine")


def is_engine_of(process: psutil.Process, parents: list[int]) -> bool:
    try:
        return process.ppid() in parents and "VLLM" in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.full
def test_two_stage_is_held_to_the_labels_and_agrees(local_ray):
    pairs = make_pairs(8)
    here = build_judge(replace(POCKET, prompt="two_stage")).compare(pairs)
    with served(replace(ON_VLLM, prompt="two_stage")) as judge:
        there = judge.compare(pairs)
    assert [verdict.text for verdict in there] == [verdict.text for verdict in here]
    with served(replace(ON_VLLM, prompt="two_stage", max_new_tokens=3)) as judge:  # reports are torn, labels are not
        assert {verdict.status for verdict in judge.compare(pairs)} <= {Status.OK, Status.NO_PREFERENCE}


@pytest.mark.full
def test_an_adapter_changes_the_answers_as_peft_says(local_ray, tmp_path):
    merged = save_adapter(tmp_path)
    pairs = make_pairs(8)
    plain = build_judge(POCKET).compare(pairs)
    expected = build_judge(replace(POCKET, model=str(merged))).compare(pairs)
    with served(replace(ON_VLLM, adapter=str(tmp_path / "adapter"))) as judge:
        answered = judge.compare(pairs)
    for one, other in zip(expected, answered, strict=True):
        assert other.probabilities == pytest.approx(one.probabilities, abs=1e-2)
    assert (
        max(abs(one.probabilities[0] - other.probabilities[0]) for one, other in zip(plain, answered, strict=True))
        > 0.05
    )
    assert "lora=" in answered[0].stamp.decoding and set(Label) >= {verdict.label for verdict in answered}


@pytest.mark.full
def test_an_adapter_for_another_model_is_refused(local_ray, tmp_path):
    """Of the same layers with other numbers, which vLLM itself leaves out without a word."""
    from safetensors.torch import load_file, save_file

    save_adapter(tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name.replace(".layers.", ".layers.7"): value for name, value in load_file(file).items()}, file)
    with pytest.raises(JudgeUnavailable, match=r"does not fit this model on vLLM, as at .*layers\.7"):
        with served(replace(ON_VLLM, adapter=str(tmp_path / "adapter"))):
            pass


def save_adapter(folder: Path) -> Path:
    """A random adapter in folder/adapter, and the pocket judge with it merged in: the folder that is returned."""
    import shutil

    import torch
    from peft import LoraConfig, get_peft_model

    from rlvlm.vlms.loading import load_vlm

    torch.manual_seed(0)
    model = load_vlm(POCKET).model
    targets = r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj)"
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    shutil.copytree(weights_folder(), folder / "merged")
    adapted.merge_and_unload().save_pretrained(folder / "merged")
    return folder / "merged"
