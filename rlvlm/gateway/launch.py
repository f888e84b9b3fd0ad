"""Starting and stopping the apps of one app file on a Ray that is up. Called by `rlvlm serve`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus

from rlvlm.core.errors import JudgeUnavailable, MachineError, UsageError
from rlvlm.gateway.app_file import AppFile
from rlvlm.gateway.gateway import bind_gateway
from rlvlm.serving.deployments import bind_judge, bind_policy, check_environment
from rlvlm.serving.startup import NO_RESOURCES_S, POLL_S, START_TIMEOUT_S, cause_of, check_cluster

ACT_BATCH = 16
"""Turns of a served policy that go through its model together."""
_LOWER = "lower num_{resource}s in the app file, or use a cluster that has them: RAY_ADDRESS=..."


@contextmanager
def running_apps(file: AppFile, report: Callable[[str, float], None], is_stopped: Callable[[], bool]) -> Iterator[None]:
    """The file's judges, policies and gateway while the context is open, all of them answering.

    Args:
        file: what to start.
        report: is told what is loading, and for how many seconds: all of it at first, then about twice a second what
            is left.
        is_stopped: ends the wait early, without an error.

    Raises:
        UsageError: an app of the same name runs on this cluster already.
        MachineError: Serve's HTTP proxy of this cluster listens elsewhere.
        JudgeUnavailable: something cannot be loaded or placed; says why.
    """
    for entry in file.judges:
        check_environment(entry.judge, entry.placement)
    names = file.names
    serve.start(
        proxy_location="HeadOnly",
        http_options=HTTPOptions(host=file.host, port=file.port),
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    _check_address(file)
    taken = sorted(set(names) & serve.status().applications.keys())
    if taken:
        raise UsageError(f"this cluster runs apps of the same names: {taken}", "stop them, or rename these in the file")
    targets = [
        serve.RunTarget(bind_judge(entry.judge, entry.placement), name=entry.app, route_prefix=None)
        for entry in file.judges
    ]
    targets += [
        serve.RunTarget(
            bind_policy(entry.policy, entry.num_actions, entry.placement, ACT_BATCH, entry.build),
            name=entry.app,
            route_prefix=None,
        )
        for entry in file.policies
    ]
    targets.append(serve.RunTarget(bind_gateway(file.http), name=file.gateway_app, route_prefix=file.route_prefix))
    report(f"loading {', '.join(names)}", 0.0)
    try:
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        _wait(file, names, report, is_stopped)
        yield
    finally:
        if ray.is_initialized():
            for name in names:
                serve.delete(name, _blocking=False)
            deadline = time.monotonic() + 10  # what is left then ends with Ray
            while time.monotonic() < deadline and set(names) & serve.status().applications.keys():
                time.sleep(0.1)


def unhealthy(file: AppFile) -> list[str]:
    """Names of the file's apps that do not answer now."""
    running = serve.status().applications
    return [name for name in file.names if name not in running or running[name].status is not ApplicationStatus.RUNNING]


def _check_address(file: AppFile) -> None:
    """Raises MachineError where Serve ran already and listens elsewhere: what it was started with cannot be changed."""
    client = _get_global_client()
    assert client is not None, "serve.start has connected"
    options = client.http_config
    if (options.host, options.port) != (file.host, file.port):
        raise MachineError(
            f"Serve of this cluster listens on {options.host}:{options.port}, not on {file.host}:{file.port}",
            f"--host {options.host} --port {options.port}",
        )


def _wait(
    file: AppFile, names: list[str], report: Callable[[str, float], None], is_stopped: Callable[[], bool]
) -> None:
    """Returns when all apps run, or the wait is ended."""
    start = time.monotonic()
    while not is_stopped():
        statuses = serve.status().applications
        for name in names:
            if name in statuses and (cause := cause_of(statuses[name])):
                raise type(cause)(f"{name}: {cause}", cause.fix)
        loading = [
            name for name in names if name not in statuses or statuses[name].status is not ApplicationStatus.RUNNING
        ]
        if not loading:
            return
        waited_s = time.monotonic() - start
        report(f"loading {', '.join(loading)}", waited_s)
        if waited_s > NO_RESOURCES_S:
            check_cluster(_wanted(file), file.name, _LOWER)
        if waited_s > START_TIMEOUT_S:
            raise JudgeUnavailable(
                f"{', '.join(loading)} did not load within {START_TIMEOUT_S:.0f} s",
                "look at the replica's log in Ray's session folder",
            )
        time.sleep(POLL_S)


def _wanted(file: AppFile) -> dict[str, float]:
    """What the file's apps ask for together."""
    placements = [entry.placement for entry in (*file.judges, *file.policies)]
    return {
        "CPU": sum(p.num_replicas * p.num_cpus for p in placements) + file.http.num_replicas * file.http.num_cpus,
        "GPU": sum(p.num_replicas * p.num_gpus for p in placements),
    }
