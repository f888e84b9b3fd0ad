"""A judge that scores episodes, while its replicas are killed and after it is gone for good."""

import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer, Call, Response, error
from chaos import Killer, replica_pids
from ray import serve
from stub_judge import StubJudge, stub
from tiny_run import table

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core import metrics
from rlvlm.core.judging import Clip
from rlvlm.judges.config import JudgeConfig
from rlvlm.rewards.config import ChunkRewardConfig, MonitorConfig
from rlvlm.serving.apps import start_judge
from rlvlm.serving.client import ServedJudge
from rlvlm.serving.config import PlacementConfig
from tests.algorithms.policy_gradient.tiny_runs import chunk_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SEED = 2026
FRAME_PX = 16
PLACEMENT = PlacementConfig(num_replicas=2, num_cpus=0.1, timeout_s=30.0, stall_s=3.0)


def build(app: str) -> PolicyGradient:
    untested = MonitorConfig(preflight=0, controls=0)
    algorithm = chunk_config(
        sft=ChunkSFTConfig(episodes=8, updates=10),
        reward=ChunkRewardConfig(source="judged", frame_px=FRAME_PX, num_frames=3, monitor=untested),
        make_judge=partial(ServedJudge, app, timeout_s=30.0, retries=6, batch_size=4, in_flight=8),
        groups=8,
        group_size=4,
        rounds=1,
    ).build_algo()
    assert isinstance(algorithm, PolicyGradient)
    return algorithm


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.full)])
def test_replicas_killed_while_they_score_leave_every_episode_one_score(local_ray: None, kills: int) -> None:
    """The stub's score follows from the images alone, so that a lost, doubled or swapped one would be seen."""
    with start_judge(JudgeConfig(batch_size=4, device="cpu"), PLACEMENT, "rollouts", stub(per_item_s=0.03)) as running:
        algorithm, told = build(running.app), []
        algorithm.prepare(lambda line: None)
        with Killer(SEED, lambda: replica_pids(running.app), 1.5, at_most=kills) as killer:
            while len(killer.killed) < kills or len(told) < 64:
                algorithm.train()
                told += algorithm.drain_records()
        episodes = algorithm.report()[metrics.EPISODES]
        clips = [Clip(goal=one.item.goal, frames=algorithm.draw(one.item.snapshots, FRAME_PX)) for one in told]
        algorithm.stop()
    serve.shutdown()
    assert len(told) == episodes, "one score an episode"
    expected = [score.value for score in StubJudge().score(clips)]
    assert [one.score.value for one in told] == expected and len(set(expected)) > 20


WORDS = (
    "push_block --steps 4000 --sft.episodes 8 --sft.updates 20 --algo.groups 4 --algo.group-size 4 --algo.rounds 1 "
    "--policy.pocket.hidden 32 --policy.pocket.image-px 16 --eval.every-steps 2000 --eval.episodes 2 "
    "--track.checkpoint-every-steps 500 --track.log-every-steps 500 --reward.source judged --reward.num-frames 2 "
    "--reward.frame-px 16 --reward.monitor.preflight 0 --reward.monitor.controls 0 --judge.backend openai "
    "--judge.model m --judge.score progress --judge.api.retries 1 --judge.api.deadline-s 5"
).split()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.full
def test_a_judge_that_is_gone_for_good_ends_the_run_which_goes_on_when_it_is_back(tmp_path: Path) -> None:
    gone, back, server = threading.Event(), threading.Event(), ApiServer()
    truth = server.truth

    def answer(call: Call) -> Response:
        if len(server.calls) > 80:
            gone.set()
        return error(503, "out of order") if gone.is_set() and not back.is_set() else truth(call)

    server.truth = answer
    out = tmp_path / "run"
    with server.running() as url:
        ended = run("rlvlm.run", *WORDS, "--judge.api.base-url", url, "--out", str(out))
        assert ended.returncode == 5, ended.stdout + ended.stderr
        assert "503" in ended.stderr and f"resume with: rlvlm resume {out}" in ended.stdout
        rows = table(out / "vlm_score_log.csv")
        assert rows and all(row["vlm_score"] for row in rows), "no score was made up"
        back.set()
        resumed = run("rlvlm.cli", "resume", str(out))
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    assert (summary["exit_reason"], summary["env_steps"] >= 4_000) == ("done", True)
    steps = [json.loads(line)["env_steps"] for line in open(out / "metrics.jsonl")]
    assert steps == sorted(set(steps)), "each step stands in the log once"
