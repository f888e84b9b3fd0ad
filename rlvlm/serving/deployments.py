"""Judge and policy as Ray Serve deployments. `apps` starts them for a run, `serve deploy` starts judges from YAML."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig, RequestRouterConfig

from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.serving.app_file import JudgeAppArgs
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.judge_replica import Builder, JudgeReplica
from rlvlm.serving.places import preferring
from rlvlm.serving.policy_replica import PolicyBuilder, PolicyReplica, VllmPolicyReplica
from rlvlm.serving.refusal import RETRY_AFTER_S
from rlvlm.serving.replica import FAILED_CHECKS, HEALTH_PERIOD_S, HEALTH_TIMEOUT_S
from rlvlm.serving.router import FewestRequestsRouter
from rlvlm.vlms.config import EngineConfig

MAX_ONGOING_REQUESTS = 16
"""Number of requests that a replica holds at once. Inside, runs get even shares (`fair_queue`); outside, first come is
first served, so it admits all requests of a few busy runs; a request is at most a batch of images."""
MAX_QUEUED_REQUESTS = 8
"""Maximum number of waiting requests of one caller, which then gets a BackPressureError and retries later."""
GRACE_S = 2.0
"""Time that a replica gets to finish before it is killed, seconds. Short, because a stuck one never finishes and Serve
waits for it before starting the next; clients send interrupted requests again."""


def judge_app(args: JudgeAppArgs) -> serve.Application:
    """Returns the Serve application of one judge, with the resources of `args.placement`."""
    return bind_judge(args.judge, args.placement)


def bind_judge(
    judge: JudgeConfig, placement: PlacementConfig, build: Builder = build_judge, node_ids: Sequence[str] = ()
) -> serve.Application:
    """Returns the deployment of `judge`, bound and ready for `serve.run`.

    Args:
        judge: which judge to load, and how to ask it.
        placement: resources and number of copies.
        build: makes the judge inside each replica, for judges of your own. It must pickle.
        node_ids: nodes that the replicas prefer; empty: any.
    """
    # name in the Ray dashboard and all metrics, e.g. `judge-Qwen3-VL-8B-Instruct-nf4-two_stage`
    model = judge.model.rstrip("/").rpartition("/")[2] or judge.backend
    parts = ["judge", model, *([judge.quantization] if judge.quantization != "none" else []), judge.prompt]
    # single questions must be able to fill the next batch while one is computed
    ongoing = max(MAX_ONGOING_REQUESTS, 2 * judge.batch_size, judge.max_at_once)
    options = _options("-".join(parts), placement, judge.python, ongoing, node_ids)
    if placement.max_replicas:
        options |= {
            "num_replicas": "auto",
            "autoscaling_config": AutoscalingConfig(
                min_replicas=placement.num_replicas,
                max_replicas=placement.max_replicas,
                target_ongoing_requests=placement.target_ongoing_requests,
                upscale_delay_s=placement.upscale_delay_s,
                downscale_delay_s=placement.downscale_delay_s,
                # Serve averages over this period: one longer than the delay would prolong the delay
                look_back_period_s=max(2.0, placement.upscale_delay_s),
            ),
        }
    return serve.deployment(**options)(JudgeReplica).bind(judge, placement, build)


def bind_policy(  # noqa: PLR0913 - what a deployment has
    policy: PolicyConfig,
    num_actions: int,
    placement: PlacementConfig,
    batch_size: int,
    build: PolicyBuilder = load_policy,
    vllm: EngineConfig | None = None,
    shares_gpus: bool = False,
    node_ids: Sequence[str] = (),
) -> serve.Application:
    """Returns the deployment of a policy, bound and ready for `serve.run`.

    Args:
        policy: which policy to load.
        num_actions: number of actions, for an action head.
        placement: resources and number of copies.
        batch_size: number of turns that the model processes together.
        build: makes the policy inside each replica. It must pickle. Not used with vLLM.
        vllm: settings of vLLM, if the policy's chat VLM is to run on it.
        shares_gpus: whether it shares the learners' GPUs, see `gpu_leases`.
        node_ids: nodes that the replicas prefer; empty: any.
    """
    name = f"policy-{policy.model.rstrip('/').rpartition('/')[2] or 'pocket'}"
    # an asynchronous rollout may request its replies one by one, and a replica that seems full is passed over for
    # seconds: so twice as many as its share in two batches
    ongoing = 4 * max(MAX_ONGOING_REQUESTS, batch_size)
    options = _options(name, placement, vllm.interpreter if vllm else "", ongoing, node_ids)
    # a refusal would only have a run pause, which asks for no more than it has envs; the gateway has bounds of its own
    options["max_queued_requests"] = ongoing
    if vllm is not None:
        on_vllm = serve.deployment(**options)(VllmPolicyReplica)
        return on_vllm.bind(policy, vllm, placement, batch_size, shares_gpus)
    in_torch = serve.deployment(**options)(PolicyReplica)
    return in_torch.bind(policy, num_actions, placement, batch_size, build, shares_gpus)


def _options(
    name: str, placement: PlacementConfig, python: str, max_ongoing_requests: int, node_ids: Sequence[str]
) -> dict[str, Any]:
    """Returns the Serve options common to all our deployments; `python` is another interpreter to run them with."""
    # Ray starts the replica with that interpreter: it must have the same Python and Ray, and rlvlm. The path is not
    # resolved, because a virtual environment's interpreter is a link.
    environment = {"py_executable": str(Path(python).expanduser().absolute())} if python else {}
    return dict(
        name=re.sub(r"[^A-Za-z0-9_.-]+", "-", name),
        num_replicas=placement.num_replicas,
        ray_actor_options={
            "num_cpus": placement.num_cpus,
            "num_gpus": placement.num_gpus,
            "runtime_env": environment,
            **preferring(node_ids, placement.gpu_type),
        },
        max_ongoing_requests=max_ongoing_requests,
        max_queued_requests=MAX_QUEUED_REQUESTS,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        request_router_config=RequestRouterConfig(request_router_class=FewestRequestsRouter),  # pyright: ignore[reportArgumentType]
        # more tries would only repeat the error of a missing file or a GPU that is too small
        max_constructor_retry_count=3,
        health_check_period_s=HEALTH_PERIOD_S,
        # a check that gets no answer in time is silence too, of the event loop or of a starved machine
        health_check_timeout_s=max(HEALTH_TIMEOUT_S, placement.stall_s / FAILED_CHECKS),
        graceful_shutdown_timeout_s=GRACE_S,
        graceful_shutdown_wait_loop_s=GRACE_S / 4,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
