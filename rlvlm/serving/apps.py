"""Starting, finding and stopping a run's Serve apps: its judge, its policy. Called by runs, with Ray already up."""

import logging
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.policies.vlm.vllm import check_policy
from rlvlm.serving.client import IN_FLIGHT, ServedJudge
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.deployments import bind_judge, bind_policy, bind_tokens, check_environment, check_vllm
from rlvlm.serving.replicas.policy import PolicyBuilder
from rlvlm.serving.replicas.replica import Builder
from rlvlm.serving.startup import NO_RESOURCES_S, POLL_S, START_TIMEOUT_S, cause_of, check_cluster
from rlvlm.vlms.config import EngineConfig

logger = logging.getLogger(__name__)

ALL_TAKEN_S = 120.0
"""How long it may ask for what the cluster has but others hold: they may soon be done."""
REPORT_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningJudge:
    """A judge on Serve that this run may use; leaving its `with` block stops it if the run started it."""

    judge: ServedJudge
    app: str
    """Name of the Serve application."""
    is_ours: bool
    """Whether this run started it."""

    def stop(self) -> None:
        """Deletes the app if this run started it; an app that was there before is left alone, and not asked on."""
        self.judge.hang_up()
        if self.is_ours:
            _stop(self.app)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_judge(
    judge: JudgeConfig, placement: PlacementConfig, name: str, build: Builder = build_judge, app: str = ""
) -> RunningJudge:
    """A judge that answers: the running app `placement.app`, or one started now under a name of its own.

    Serve runs without an HTTP proxy; the judge is reached through its handle alone.

    Args:
        judge: what to load, and how it is asked.
        placement: where, with which resources; `app` attaches instead.
        name: of the run; the app's name is made from it and is unique, so runs on one cluster never meet.
        build: makes the judge inside each replica, for a judge of your own; it must pickle.
        app: name of the app that is started, for those who are to find it; an app of that name is replaced.

    Raises:
        JudgeUnavailable: the app to attach to is not running, or the judge cannot be loaded or placed; says why.
    """
    if placement.app:
        client = _client(placement.app, judge, placement, name)
        stamp = client.stamp  # asks, so that an app that is not there ends the run now
        logger.info("attached to Serve app %s: %s, prompt %s", placement.app, stamp.judge, stamp.prompt)
        return RunningJudge(judge=client, app=placement.app, is_ours=False)
    check_environment(judge, placement)
    app = app or f"judge-{_plain(name)}-{uuid.uuid4().hex[:8]}"
    _start(bind_judge(judge, placement, build), app, placement, "judge", "serve")
    running = RunningJudge(judge=_client(app, judge, placement, name), app=app, is_ours=True)
    logger.info("judge %s answers in app %s", running.judge.stamp.judge, app)
    return running


@contextmanager
def running_policy(
    policy: PolicyConfig,
    num_actions: int,
    placement: PlacementConfig,
    name: str,
    batch_size: int,
    build: PolicyBuilder = load_policy,
    vllm: EngineConfig | None = None,
) -> Iterator[str]:
    """The name of a Serve app whose replicas hold `policy`, while the context is open.

    Args:
        policy: what to load.
        num_actions: that an action head chooses from.
        placement: where, with which resources.
        name: of the run; the app's name is made from it and is unique.
        batch_size: turns that go through the model together.
        build: makes the policy inside each replica; it must pickle. Not used on vLLM.
        vllm: settings of vLLM, where the replicas are to run it.

    Raises:
        UsageError: vLLM cannot be given what learns of the policy.
        ModelUnavailable: the policy cannot be loaded or placed; says why.
    """
    app = f"policy-{_plain(name)}-{uuid.uuid4().hex[:8]}"
    if vllm is None:
        application = bind_policy(policy, num_actions, placement, batch_size, build)
    else:
        check_policy(policy)
        check_vllm(vllm, placement, "engine.backend vllm", "engine")
        application = bind_tokens(policy, vllm, placement, batch_size)
    _start(application, app, placement, "policy", "engine")
    logger.info("the policy answers in app %s, %d replicas", app, placement.num_replicas)
    try:
        yield app
    finally:
        _stop(app)


def _start(application: serve.Application, app: str, placement: PlacementConfig, what: str, section: str) -> None:
    """Returns when the app is running; without an HTTP proxy.

    Args:
        application: bound.
        app: its name.
        placement: what was asked for.
        what: is in it, for messages.
        section: of the options that place it.
    """
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING", "enable_access_log": False})
    serve.run_many(
        [serve.RunTarget(application, name=app, route_prefix=None)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    try:
        _wait_until_running(app, placement, what, section)
    except BaseException:  # also on Ctrl-C: nothing of ours may stay behind
        _stop(app)
        raise


def _stop(app: str) -> None:
    if ray.is_initialized():
        serve.delete(app, _blocking=True)


def _client(app: str, judge: JudgeConfig, placement: PlacementConfig, name: str) -> ServedJudge:
    return ServedJudge(
        app,
        timeout_s=placement.timeout_s,
        retries=placement.retries,
        batch_size=judge.batch_size,
        in_flight=max(IN_FLIGHT, 2 * placement.num_replicas, 2 * placement.max_replicas),
        run=f"{_plain(name)}-{uuid.uuid4().hex[:8]}",
    )


def _plain(name: str) -> str:
    return re.sub("[^A-Za-z0-9_-]+", "-", name)


def _wait_until_running(app: str, placement: PlacementConfig, what: str, section: str) -> None:
    """Returns when the app is running; reports while it is not.

    Raises:
        JudgeUnavailable: its constructor failed, the cluster cannot hold it, or it takes too long.
    """
    start = last_report = time.monotonic()
    while (status := serve.status().applications.get(app)) is None or status.status is not ApplicationStatus.RUNNING:
        waited_s = time.monotonic() - start
        if status is not None and (cause := cause_of(status)):
            raise cause
        if waited_s > NO_RESOURCES_S:
            copies, several = placement.num_replicas, f" for {placement.num_replicas} replicas"
            wanted = {"CPU": placement.num_cpus * copies, "GPU": placement.num_gpus * copies}
            who = f"the {what}{several if copies > 1 else ''}"
            check_cluster(wanted, who, f"lower --{section}.num-{{resource}}s, or use a cluster that has them")
        if waited_s > ALL_TAKEN_S and status is not None:
            _check_free(app, placement, what, section)
        if waited_s > START_TIMEOUT_S:
            raise JudgeUnavailable(
                f"the {what} did not load within {START_TIMEOUT_S:.0f} s",
                "look at `serve status` and at the replica's log in Ray's session folder",
            )
        if time.monotonic() - last_report > REPORT_S:
            last_report = time.monotonic()
            logger.info("waiting for the %s to load (%.0f s)", what, waited_s)
        time.sleep(POLL_S)


def _check_free(app: str, placement: PlacementConfig, what: str, section: str) -> None:
    """Raises JudgeUnavailable where no replica of ours is placed because others hold what it asks for."""
    client = _get_global_client()
    details = client.get_serve_details() if client else {}
    deployments = details.get("applications", {}).get(app, {}).get("deployments", {})
    if any(replica.get("node_id") for deployment in deployments.values() for replica in deployment["replicas"]):
        return  # a node has taken one, which may still be loading
    free, total = ray.available_resources(), ray.cluster_resources()
    for resource, each in (("GPU", placement.num_gpus), ("CPU", placement.num_cpus)):
        if each > free.get(resource, 0.0):
            others = sorted(name for name in serve.status().applications if name != app)
            holders = f", the Serve apps {', '.join(others)} among those who hold the rest" if others else ""
            raise JudgeUnavailable(
                f"the {what} asks for {each:g} {resource}; of the cluster's {total.get(resource, 0.0):g} only "
                f"{free.get(resource, 0.0):g} is free{holders}",
                f"stop one of them, lower --{section}.num-{resource.lower()}s, or use a running judge with --serve.app",
            )
