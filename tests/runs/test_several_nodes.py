"""A run on a Ray of several nodes: its judge goes to the node with the GPU. The nodes are real, the GPU is a word."""

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
