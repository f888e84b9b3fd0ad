"""Starts, finds and stops Serve apps: a run's judge or policy, or all of an app file. Ray must be running."""

import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from rlvlm.core.console.signals import StoppedEarly
from rlvlm.core.errors import JudgeUnavailable, MachineError, UsageError
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.policies.vlm.vllm import check_policy
from rlvlm.serving.app_file import AppFile
from rlvlm.serving.client import IN_FLIGHT, ServedJudge
from rlvlm.serving.config import (
    JUDGE_ROLE,
    JUDGE_SETTING,
    PlacementConfig,
    Role,
    check_engine,
    check_environment,
)
from rlvlm.serving.deployments import bind_judge, bind_policy
from rlvlm.serving.gpu_leases import gpu_leases
from rlvlm.serving.ingress import bind_gateway
from rlvlm.serving.judge_replica import Builder
from rlvlm.serving.places import ANYWHERE, Placing, cluster_nodes, place, reserve_places
from rlvlm.serving.policy_replica import PolicyBuilder
from rlvlm.serving.replica import START_TIMEOUT_S, cause_of
from rlvlm.vlms.config import EngineConfig

logger = logging.getLogger(__name__)

ACT_BATCH = 16
"""Number of turns that a served policy's model processes together."""
_REPORT_S = 15.0
_POLL_S = 0.5
_QUIET = {"log_level": "WARNING", "enable_access_log": False}


@contextmanager
def start_judge(
    judge: JudgeConfig,
    placement: PlacementConfig,
    name: str,
    build: Builder = build_judge,
    app: str = "",
    placing: Placing = ANYWHERE,
) -> Iterator[ServedJudge]:
    """Yields a judge while the context is open: the running app `placement.app`, or one started now and deleted at the
    end.

    Serve runs without an HTTP proxy; the judge is only reached through its handle.

    Args:
        judge: which judge to load, and how to ask it.
        placement: its resources; `app` names a running app to use instead.
        name: name of the run, from which a unique app name is made, so that runs on one cluster never collide.
        build: makes the judge inside each replica, for a judge of your own; it must pickle.
        app: name for the app to start, if others must find it; an app of that name is replaced.
        placing: where its replicas go, and how long to wait for that.

    Raises:
        JudgeUnavailable: there is no such app, or the judge cannot be loaded or placed; the message says why.
    """
    if not placement.app:
        check_environment(judge, placement)
        app = app or _unique("judge", name)
        bound = bind_judge(judge, placement, build, placing.node_ids)
        _start(bound, app, placement.role(JUDGE_ROLE, JUDGE_SETTING), placing)
    # an app that runs already may have any number of replicas, whatever this run's settings say
    copies = max(placement.num_replicas, placement.max_replicas, _num_running(placement.app))
    client = ServedJudge(
        placement.app or app,
        timeout_s=placement.timeout_s,
        retries=placement.retries,
        # one by one where each answer is paid for: it is kept as soon as it comes
        batch_size=1 if judge.is_remote else judge.batch_size,
        in_flight=max(judge.api.concurrency if judge.is_remote else IN_FLIGHT, 2 * copies),
        run=_unique("", name),
    )
    try:
        stamp = client.stamp  # asks the app, so that a missing one ends the run now
        logger.info("judge %s, prompt %s, answers in Serve app %s", stamp.judge, stamp.prompt, client.app)
        yield client
    finally:
        client.close()  # an app that ran before is left running, but not asked any more
        if not placement.app and ray.is_initialized():
            serve.delete(app, _blocking=True)


@contextmanager
def running_policy(  # noqa: PLR0913 - what a deployment has
    policy: PolicyConfig,
    num_actions: int,
    placement: PlacementConfig,
    name: str,
    batch_size: int,
    build: PolicyBuilder = load_policy,
    vllm: EngineConfig | None = None,
    shares_gpus: bool = False,
    placing: Placing = ANYWHERE,
) -> Iterator[str]:
    """Yields the name of a Serve app whose replicas hold `policy`, while the context is open.

    It is made from the run's `name` and is unique; `placing` says where the replicas go, and how long to wait for that;
    for the other arguments see `deployments.bind_policy`.

    Raises:
        UsageError: vLLM cannot be given the weights that the policy trains.
        ModelUnavailable: the policy cannot be loaded or placed; the message says why.
    """
    if vllm is not None:
        check_policy(policy)
        check_engine(vllm, placement, "engine", "engine.backend vllm")
    app = _unique("policy", name)
    application = bind_policy(policy, num_actions, placement, batch_size, build, vllm, shares_gpus, placing.node_ids)
    with gpu_leases(app, placement.num_replicas) if shares_gpus else nullcontext():
        _start(application, app, placement.role("the policy", "--engine.num-replicas, --engine.num-gpus"), placing)
        logger.info("the policy answers in app %s, %d replicas", app, placement.num_replicas)
        try:
            yield app
        finally:
            if ray.is_initialized():
                serve.delete(app, _blocking=True)


@contextmanager
def running_apps(file: AppFile, report: Callable[[str, float], None], is_stopped: Callable[[], bool]) -> Iterator[None]:
    """Runs the file's judges, policies and HTTP server while the context is open, which it enters once all answer.

    Args:
        file: what to start.
        report: called with a description of what is loading and for how many seconds: first with everything, then about
            twice a second with the rest.
        is_stopped: ends the wait early, without an error.

    Raises:
        UsageError: an app of the same name already runs on this cluster.
        MachineError: the HTTP proxy of this cluster's Serve listens on another address.
        JudgeUnavailable: an app cannot be loaded or placed; the message says why.
    """
    for entry in file.judges:
        check_environment(entry.judge, entry.placement)
    names, options = file.names, HTTPOptions(host=file.host, port=file.port)
    serve.start(proxy_location="HeadOnly", http_options=options, logging_config=_QUIET)
    client = _get_global_client()
    assert client is not None, "serve.start has connected"
    found = client.http_config  # set if Serve already ran; its settings cannot be changed
    if (found.host, found.port) != (file.host, file.port):
        raise MachineError(
            f"Serve of this cluster listens on {found.host}:{found.port}, not on {file.host}:{file.port}",
            f"--host {found.host} --port {found.port}",
        )
    if taken := sorted(set(names) & serve.status().applications.keys()):
        raise UsageError(f"this cluster runs apps of the same names: {taken}", "stop them, or rename these in the file")
    bound = {entry.app: bind_judge(entry.judge, entry.placement) for entry in file.judges}
    bound |= {
        entry.app: bind_policy(entry.policy, entry.num_actions, entry.placement, ACT_BATCH, entry.build)
        for entry in file.policies
    }
    # judges have no route of their own: no request reaches them without passing the guard
    targets = [serve.RunTarget(application, name=app, route_prefix=None) for app, application in bound.items()]
    targets.append(serve.RunTarget(bind_gateway(file.http), name=file.gateway_app, route_prefix=file.route_prefix))
    report(f"loading {', '.join(names)}", 0.0)

    def look(loading: Sequence[str], waited_s: float) -> None:
        report(f"loading {', '.join(loading)}", waited_s)

    def log(what: str) -> None:
        report(what, 0.0)
        if is_stopped():
            raise StoppedEarly

    lower = "lower num_replicas, num_cpus or num_gpus in the app file"
    roles = [entry.placement.role(entry.app, lower) for entry in (*file.judges, *file.policies)]
    roles.append(Role(name=file.gateway_app, count=file.http.num_replicas, cpus=file.http.num_cpus, setting=lower))
    try:
        with suppress(StoppedEarly):
            await_places(roles, Placing(log=log))
            serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
            _wait_until_running(names, look, is_stopped)
        yield
    finally:
        if ray.is_initialized():
            for name in names:  # all at once: one after the other each would have its own grace period
                serve.delete(name, _blocking=False)
            deadline = time.monotonic() + 10  # remaining apps end with Ray
            while time.monotonic() < deadline and set(names) & _statuses().keys():
                time.sleep(0.1)


def start_serve() -> None:
    """Starts Serve, unless it runs already, without HTTP: a run's judge is reached through its handle, and a port would
    be open to everybody.
    """
    serve.start(proxy_location="Disabled", logging_config=_QUIET)


def unhealthy(file: AppFile) -> list[str]:
    """Returns the names of the file's apps that do not answer now; all of them if Serve itself does not."""
    return _not_running(file.names, _statuses())


def _unique(kind: str, name: str) -> str:
    plain = re.sub("[^A-Za-z0-9_-]+", "-", name)
    return "-".join(part for part in (kind, plain, uuid.uuid4().hex[:8]) if part)


def _start(application: serve.Application, app: str, role: Role, placing: Placing) -> None:
    """Starts an app without an HTTP proxy, whose replicas are `role`, and returns when it runs.

    Raises:
        JudgeUnavailable: it cannot be loaded or placed; it was deleted again.
    """
    last_report = time.monotonic()

    def look(_: Sequence[str], waited_s: float) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > _REPORT_S:
            last_report = time.monotonic()
            placing.log(f"waiting for {role.name} to load ({waited_s:.0f} s)")

    await_places([role], placing)
    start_serve()
    target = serve.RunTarget(application, name=app, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    try:
        _wait_until_running([app], look)
    except BaseException:  # also on Ctrl-C: no app of ours may stay behind
        if ray.is_initialized():
            serve.delete(app, _blocking=True)
        raise


def await_places(roles: Sequence[Role], placing: Placing) -> None:
    """Returns once the cluster has free places for the replicas of apps, or others that ask a judge: Ray would wait for
    them silently.

    Raises:
        JudgeUnavailable: it has none, or others hold them for too long.
    """
    try:
        with reserve_places(roles, lambda: place(roles, cluster_nodes()), placing):
            pass
    except MachineError as error:
        raise JudgeUnavailable(str(error), error.fix) from error


def _wait_until_running(
    names: Sequence[str], look: Callable[[Sequence[str], float], None], is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """Returns when all apps run, or `is_stopped` returns True. Between two polls `look` is called with the apps that
    are still loading and the seconds elapsed; it raises to end the wait.

    Raises:
        JudgeUnavailable: one of them cannot be loaded, or takes too long.
    """
    start = time.monotonic()
    while not is_stopped():
        statuses = _statuses()
        for name in names:
            # an error with a named cause is final: further restarts would only repeat it
            if name in statuses and (cause := cause_of(statuses[name])):
                raise type(cause)(f"{name}: {cause}" if len(names) > 1 else str(cause), cause.fix)
        if not (loading := _not_running(names, statuses)):
            return
        waited_s = time.monotonic() - start
        look(loading, waited_s)
        if waited_s > START_TIMEOUT_S:
            raise JudgeUnavailable(
                f"{', '.join(loading)} did not load within {START_TIMEOUT_S:.0f} s",
                "look at `serve status` and at the replica's log in Ray's session folder",
            )
        time.sleep(_POLL_S)


def _statuses() -> Mapping[str, ApplicationStatusOverview]:
    """Returns Serve's status of each app; empty if it does not answer, as its controller may be slow under load."""
    try:
        return serve.status().applications
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("Serve does not say what runs: %s", type(error).__name__)
        return {}


def _num_running(app: str) -> int:
    """Returns the number of replicas that answer for an app; 0 if there is none of that name."""
    status = _statuses().get(app)
    deployments = status.deployments.values() if status else ()
    states = [pair for deployment in deployments for pair in deployment.replica_states.items()]
    return sum(count for state, count in states if state == "RUNNING")


def _not_running(names: Sequence[str], statuses: Mapping[str, ApplicationStatusOverview]) -> list[str]:
    return [name for name in names if name not in statuses or statuses[name].status is not ApplicationStatus.RUNNING]
