"""A cluster that begins with no worker and grows as it is asked to: Ray's own autoscaler, which starts nodes here."""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from chaos import PATIENCE_S, wait_until
from ray._private.services import get_node_ip_address
from ray.autoscaler._private.autoscaler import AutoscalerSummary
from ray.autoscaler._private.monitor import BASE_READONLY_CONFIG

from rlvlm.core.errors import MachineError
from rlvlm.serving import places
from rlvlm.serving.config import Role
from rlvlm.serving.places import Placing, cluster_nodes, place, reserve_places

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
"""Id that Ray's fake provider expects of the head."""
KINDS = {
    "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
    "judge": {"resources": {"CPU": 2, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 1},
    "learner": {"resources": {"CPU": 2, "GPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 1},
}


@pytest.fixture(scope="module", autouse=True)
def growing(ray_nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file: Path = tmp_path_factory.mktemp("cluster") / "grows.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_FAKE_CLUSTER", "1")
        patch.setenv("AUTOSCALER_UPDATE_INTERVAL_S", "1")
        patch.setenv("RAY_OVERRIDE_NODE_ID_FOR_TESTING", HEAD_ID)
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        changes = {
            "max_workers": 2,
            "idle_timeout_minutes": 5,
            "provider": {
                "type": "fake_multinode",
                "use_node_id_as_ip": True,
                "gcs_address": f"{get_node_ip_address()}:{port}",
            },
            "available_node_types": KINDS,
        }
        file.write_text(json.dumps(BASE_READONLY_CONFIG | changes))
        head = {"num_cpus": 2, "num_gpus": 0, "gcs_server_port": port, "no_monitor": False}
        with ray_nodes(head | {"autoscaling_config": str(file)}) as cluster:
            patch.undo()
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            patch.setenv("RAY_ADDRESS", cluster.address)
            wait_until(lambda: places._autoscaler()[0], "a first look of the autoscaler")  # it has only one thread
            yield
            ray.shutdown()
            # the nodes that the autoscaler started are its children
            monitors = [psutil.Process(info.process.pid) for info in cluster.head_node.all_processes["monitor"]]
            started = [child for monitor in monitors for child in monitor.children(recursive=True)]
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_cluster_without_workers_is_asked_for_all_places_at_once() -> None:
    judge = Role(name="the judge", cpus=1.0, gpus=1.0, setting="--judge.fewer")
    learners = Role(name="learners", count=2, gpus=1.0, setting="--learners.fewer")
    many = Role(name="learners", count=9, gpus=1.0, setting="--learners.fewer")
    said: list[str] = []
    placing = Placing(timeout_s=PATIENCE_S, log=said.append)
    with reserve_places([judge, learners], lambda: place([judge, learners], cluster_nodes()), placing) as found:
        assert len(ray.nodes()) == 3
        assert len({*found["the judge"][0], *found["learners"][0]}) == 2
    assert "the cluster is asked for the judge (1 x 1 CPU + 1 GPU), learners (2 x 1 GPU)" in said[0]
    with (
        pytest.raises(MachineError, match="after .* s the cluster is asked for learners .*coming: none"),
        reserve_places([many], lambda: place([many], cluster_nodes()), Placing(timeout_s=3.0)),
    ):
        pass


def test_machines_that_are_launched_and_set_up_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = AutoscalerSummary({"head": 1}, None, [("10.0.0.2", "judge", "setting-up")], {"learner": 2}, [])
    status = json.dumps({"autoscaler_report": asdict(summary)})
    monkeypatch.setattr(places, "_internal_kv_get", lambda key: status)
    assert places._autoscaler() == (True, "2 x learner, 1 x judge")
