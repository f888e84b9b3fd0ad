"""Why something on Serve does not start. Written by replicas and gateway, read by those who wait for them.

Serve shows a constructor's error only as text in its status, so cause and mending travel as one marked line of it.
"""

import json
import re
from collections.abc import Mapping

import ray
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from rlvlm.core.errors import JudgeUnavailable, MachineError, ModelUnavailable, RunError

START_TIMEOUT_S = 1_800.0
"""Longest wait: a big model is read from a slow disk in some minutes."""
NO_RESOURCES_S = 30.0
"""How long an app may ask for more than the whole cluster has: an autoscaler may add nodes."""
POLL_S = 0.5
_MARK = "rlvlm-cause: "
_KINDS = {kind.__name__: kind for kind in (JudgeUnavailable, ModelUnavailable, MachineError)}
_ENDED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)


def marked(cause: ModelUnavailable | MachineError) -> RuntimeError:
    """An error for Serve to show, with `cause` in its one line."""
    return RuntimeError(_MARK + json.dumps([type(cause).__name__, str(cause), cause.fix]))


def cause_of(status: ApplicationStatusOverview) -> RunError | None:
    """What the app itself says is wrong, or what Serve says once it gave up; None while there is still hope.

    A cause that the app itself names is final, so Serve's further tries are not waited for.
    """
    messages = [deployment.message for deployment in status.deployments.values()] + [status.message]
    for message in messages:
        if found := re.search(re.escape(_MARK) + r"(\[.*\])", message):
            kind, what, fix = json.loads(found[1])
            return _KINDS[kind](what, fix)
    if status.status not in _ENDED:
        return None
    lines = [line for message in messages for line in message.strip().splitlines() if line.strip()]
    return JudgeUnavailable(
        f"it could not start: {lines[-1] if lines else status.status.value}",
        "look at the replica's log in Ray's session folder",
    )


def check_cluster(wanted: Mapping[str, float], who: str, fix: str) -> None:
    """Passes where the whole cluster has what is asked for, whoever holds it now.

    Args:
        wanted: amount of each resource, by Ray's name.
        who: asks, for the message.
        fix: what to do, with the slot `{resource}` in lower case.

    Raises:
        JudgeUnavailable: it has less.
    """
    total = ray.cluster_resources()
    for resource, amount in wanted.items():
        if amount > total.get(resource, 0.0):
            raise JudgeUnavailable(
                f"{who} asks for {amount:g} {resource}, the Ray cluster has {total.get(resource, 0.0):g}",
                fix.format(resource=resource.lower()),
            )
