"""Fixtures that several rooms' tests share."""

import os

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # to compile all of it again costs each process a second
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small matrices: a second thread costs more than it gives

import atexit
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.dont_write_bytecode = False
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rlvlm-state-")  # what tests trust, the user has not
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_vlms(tmp_path_factory):
    """Folders of random-weight chat VLMs of real architectures: `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl`."""
    from tiny_vlm import save_tiny_vlm

    root = tmp_path_factory.mktemp("tiny_vlms")
    return {family: save_tiny_vlm(root / family, family) for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}


SLOWEST = (
    "test_served_engine", "test_life_cycle", "test_notebooks", "test_served_judges", "test_runner_group",
    "test_several_learners", "test_run_and_resume", "test_apps", "test_one_judge", "test_sft_job", "test_sharding",
    "test_live_server", "test_several_chunk_learners",
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
    words = str(call.excinfo.value).replace("\\n", " ").replace("│", " ") if call.excinfo else ""
    said = " ".join(words.split())  # boxes are folded
    if report.failed and "which is not installed here" in said:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, said)
    return report


@pytest.fixture(scope="session")
def ray_nodes():
    """A context manager that starts a Ray of a head and other nodes with the resources named: `{"num_cpus": 4}`.

    It has no dashboard, its workers are forked, and they find what test files and examples define.
    """
    from forked_workers import forked_workers
    from ray._common.utils import get_default_ray_temp_dir
    from ray._private.node import Node
    from ray.cluster_utils import Cluster

    os.makedirs(get_default_ray_temp_dir(), exist_ok=True)  # Ray notes the address there, and expects the folder
    tests = Path(__file__).parent
    paths = [str(tests.parent), str(tests), str(tests.parent / "examples"), os.environ.get("PYTHONPATH", "")]

    @contextmanager
    def nodes(head, *others):
        every = {"include_dashboard": False, "include_log_monitor": False, "object_store_memory": 200 * 2**20, **forked}
        system = {"prestart_worker_first_driver": False, "worker_niceness": 0, "worker_register_timeout_seconds": 120}
        of_the_head = {"no_monitor": True, "_system_config": system}
        cluster = Cluster()
        folder = tempfile.mkdtemp(prefix="rlvlm-", dir="/tmp")  # short: paths of Ray's sockets end at 107 bytes
        try:
            with pytest.MonkeyPatch.context() as own:
                own.setattr(Node, "start_api_server", lambda *_, **__: None)  # even a Ray without a dashboard starts it
                for tries_left in (3, 2, 1, 0):
                    try:
                        cluster.add_node(**every | of_the_head | head, temp_dir=folder)
                        break
                    except Exception:  # Ray waits for a process of its own for 15 seconds: too few while tests run
                        if not tries_left:
                            raise
            for other in others:
                cluster.add_node(**every | other)
            cluster.wait_for_nodes()
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        with forked_workers() as forked:
            yield nodes


@pytest.fixture(scope="session")
def ray_address(ray_nodes):
    """A Ray of this test process alone, started once: to connect to it takes no time, to start one takes seconds.

    It believes in eight CPUs and a GPU, so that whatever a test places finds room.
    """
    with ray_nodes({"num_cpus": 8, "num_gpus": 1}) as cluster:
        yield cluster.address


@pytest.fixture(scope="module")
def local_ray(ray_address):
    """This process on its Ray, for one file."""
    import ray

    ray.init(address=ray_address, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()
