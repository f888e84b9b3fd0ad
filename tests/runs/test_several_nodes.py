"""A run on a Ray of several nodes: its judge goes to the node with the GPU, and it goes on where nodes are lost. The
nodes are real, the GPU is a word.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from tiny_run import WORDS

from rlvlm.core.errors import EXIT_PREEMPTED

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]


def judge_nodes() -> set[str]:
    """The nodes with a running replica of a run's judge."""
    client = _get_global_client(raise_if_no_controller_running=False)
    apps = client.get_serve_details()["applications"] if client else {}
    return {
        replica["node_id"]
        for name, app in apps.items()
        if name.startswith("judge-")
        for deployment in app["deployments"].values()
        for replica in deployment["replicas"]
        if replica["state"] == "RUNNING"
    }


def test_the_judge_of_a_run_goes_where_the_gpu_is(tmp_path: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
    try:
        card = cluster.add_node(num_cpus=1, num_gpus=1)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False, logging_level="error")
        out = tmp_path / "run"
        words = [*WORDS, "--steps", "160", "--reward.teacher", "judge", "--serve.num-gpus", "1", "--out", str(out)]
        known = os.environ | {"RAY_ADDRESS": cluster.address, "MUJOCO_GL": "egl"}
        with subprocess.Popen([sys.executable, "-m", "rlvlm.run", *words], env=known, stdout=subprocess.DEVNULL) as run:
            end = time.monotonic() + 300
            while not (found := judge_nodes()):
                assert run.poll() is None and time.monotonic() < end
                time.sleep(0.2)
            assert run.wait(300) == 0
        assert found == {card.node_id}
        assert json.loads((out / "summary.json").read_text())["queries"] > 0
        assert len(ray.nodes()) == 2  # the run has left the cluster as it was
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_run_goes_on_when_the_nodes_of_its_envs_and_of_its_judge_are_lost(tmp_path: Path) -> None:
    """The learner is on the head; env workers begin on all nodes, and the judge's replica finds the spare card."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):  # env workers that are placed anew must leave a core for the judge
            cluster.add_node(num_cpus=4, num_gpus=1)
        envs = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False, logging_level="error")
        out = tmp_path / "run"
        words = [
            *("push_block", "--steps", "60000", "--reward.source", "judged", "--serve.num-gpus", "1"),
            *("--algo.env-workers", "3", "--algo.groups", "8", "--algo.rounds", "1", "--eval.episodes", "8"),
            *("--sft.episodes", "40", "--sft.updates", "100", "--reward.monitor.preflight", "8"),
            *("--eval.every-steps", "60000", "--track.log-every-steps", "2000", "--out", str(out)),
        ]
        known = os.environ | {"RAY_ADDRESS": cluster.address}
        log = (tmp_path / "log").open("w")
        with subprocess.Popen([sys.executable, "-m", "rlvlm.run", *words], env=known, stdout=log, stderr=log) as run:
            lines = out / "metrics.jsonl"

            def progressed(lost: int) -> None:
                """Returns when it has learned on since `lost` lines."""
                end = time.monotonic() + 600
                while not lines.exists() or len(lines.read_text().splitlines()) < lost + 2:
                    assert run.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()[-2000:]
                    time.sleep(0.5)

            progressed(0)
            (judge,) = judge_nodes()
            cluster.remove_node(envs, allow_graceful=False)
            progressed(len(lines.read_text().splitlines()))
            cluster.remove_node(
                next(one for one in cluster.list_all_nodes() if one.node_id == judge), allow_graceful=False
            )
            progressed(len(lines.read_text().splitlines()))
            assert judge_nodes().isdisjoint({judge, envs.node_id})
            run.terminate()
            assert run.wait(300) == EXIT_PREEMPTED, "it saves and ends as a job that was asked to"
    finally:
        ray.shutdown()
        cluster.shutdown()
