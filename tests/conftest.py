"""Fixtures that several rooms' tests share."""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small matrices: a second thread costs more than it gives

import atexit
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rlvlm-state-")  # what tests trust, the user has not
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_vlms(tmp_path_factory):
    """Folders of random-weight chat VLMs of real architectures: `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl`."""
    from tiny_vlm import save_tiny_vlm

    root = tmp_path_factory.mktemp("tiny_vlms")
    return {family: save_tiny_vlm(root / family, family) for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}


SLOWEST = (
    "test_served_engine", "test_notebooks", "test_served_judges", "test_runner_group", "test_several_learners",
    "test_run_and_resume", "test_apps", "test_one_judge", "test_sft_job", "test_sharding", "test_policy_run",
    "test_live_server", "test_several_chunk_learners", "test_vla_run",
)  # fmt: skip
"""Files of a minute or more, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests go first, whole, and the slowest before all: what is left for the end is short, so that all
    workers end together.
    """
    long_files = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("ray")}
    ranks = {name: rank for rank, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: (item.path not in long_files, ranks.get(item.path.stem, len(ranks))))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):  # noqa: ARG001 - as pytest calls it
    """Skips what asks for a guest that was taken out, as `make without` does; in a whole tree no guest is missing."""
    report = yield
    said = " ".join(str(call.excinfo.value).replace("\\n", " ").split()) if call.excinfo else ""  # boxes are folded
    if report.failed and "which is not installed here" in said:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, said)
    return report


@pytest.fixture(scope="session")
def ray_address():
    """A Ray of this test process alone, started once: to connect to it takes no time, to start one takes seconds.

    It believes in eight CPUs and a GPU, so that whatever a test places finds room.
    """
    from ray._common.utils import get_default_ray_temp_dir
    from ray.cluster_utils import Cluster

    os.makedirs(get_default_ray_temp_dir(), exist_ok=True)  # Ray notes the address there, and expects the folder
    folder = tempfile.mkdtemp(prefix="rlvlm-", dir="/tmp")  # short: Ray's sockets lie below, and paths end at 107 bytes
    head = {
        "num_cpus": 8,
        "num_gpus": 1,
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,
        "object_store_memory": 200 * 2**20,
        "temp_dir": folder,
        "_system_config": {"prestart_worker_first_driver": False, "worker_register_timeout_seconds": 300},
    }
    with pytest.MonkeyPatch.context() as patch:  # workers find what test files and examples define
        tests = Path(__file__).parent
        folders = [str(tests.parent), str(tests), str(tests.parent / "examples"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        for tries_left in (3, 2, 1, 0):
            try:
                cluster = Cluster(initialize_head=True, head_node_args=head)
                break
            except Exception:  # Ray waits 15 seconds for a process of its own, which a machine full of tests takes
                if not tries_left:
                    raise
    cluster.head_node.kill_dashboard(check_alive=False)  # it is started all the same, and looked at by no test
    yield cluster.address
    cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def local_ray(ray_address):
    """This process on its Ray, for one file."""
    import ray

    ray.init(address=ray_address, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()
