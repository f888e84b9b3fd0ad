"""Judge and policy as Ray Serve deployments. `apps` starts them for a run, `serve deploy` judges from a YAML file."""

import re
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
from rlvlm.serving.policy_replica import PolicyBuilder, PolicyReplica, VllmPolicyReplica
from rlvlm.serving.refusal import RETRY_AFTER_S
from rlvlm.serving.replica import HEALTH_PERIOD_S, HEALTH_TIMEOUT_S
from rlvlm.serving.router import FewestRequestsRouter
from rlvlm.vlms.config import EngineConfig

MAX_ONGOING_REQUESTS = 16
"""Requests that a replica holds at once. Inside a replica runs get even shares (`fair_queue`); before it, first come is
first served, so it lets in all that a few busy runs send, and a request is at most a batch of images."""
MAX_QUEUED_REQUESTS = 8
"""Requests one caller may have waiting; beyond it gets a BackPressureError and tries again later."""
GRACE_S = 2.0
"""What a replica gets to finish before it is killed. Short, because a stuck one never will and Serve waits for it
before it starts the next; what is cut off is sent again by its client."""


def judge_app(args: JudgeAppArgs) -> serve.Application:
    """The Serve application of one judge, with the resources that `args.placement` asks for."""
    return bind_judge(args.judge, args.placement)


def bind_judge(judge: JudgeConfig, placement: PlacementConfig, build: Builder = build_judge) -> serve.Application:
    """The deployment of `judge`, bound and ready for `serve.run`.

    Args:
        judge: what to load, and how it is asked.
        placement: with which resources, in how many copies.
        build: makes the judge inside each replica; your own judges come in here. It must pickle.
    """
    # what the Ray dashboard and all metrics call it, e.g. `judge-Qwen3-VL-8B-Instruct-nf4-two_stage`
    model = judge.model.rstrip("/").rpartition("/")[2] or judge.backend
    parts = ["judge", model, *([judge.quantization] if judge.quantization != "none" else []), judge.prompt]
    # single questions must be able to fill the next batch while one is computed
    ongoing = max(MAX_ONGOING_REQUESTS, 2 * judge.batch_size)
    options = _options("-".join(parts), placement, judge.python, ongoing)
    if placement.max_replicas:
        options |= {
            "num_replicas": "auto",
            "autoscaling_config": AutoscalingConfig(
                min_replicas=placement.num_replicas,
                max_replicas=placement.max_replicas,
                target_ongoing_requests=placement.target_ongoing_requests,
                upscale_delay_s=placement.upscale_delay_s,
                downscale_delay_s=placement.downscale_delay_s,
                # Serve averages over this period: a longer one than the delay would hold up what the delay allows
                look_back_period_s=max(2.0, placement.upscale_delay_s),
            ),
        }
    return serve.deployment(**options)(JudgeReplica).bind(judge, placement, build)


def bind_policy(
    policy: PolicyConfig,
    num_actions: int,
    placement: PlacementConfig,
    batch_size: int,
    build: PolicyBuilder = load_policy,
    vllm: EngineConfig | None = None,
    shares_gpus: bool = False,
) -> serve.Application:
    """The deployment of a policy, bound and ready for `serve.run`.

    Args:
        policy: what to load.
        num_actions: that an action head chooses from.
        placement: with which resources, in how many copies.
        batch_size: turns that go through the model together.
        build: makes the policy inside each replica. It must pickle. Not used on vLLM.
        vllm: its settings, where the policy's chat VLM is to run on it.
        shares_gpus: on the learners' GPUs, see `gpu_leases`.
    """
    name = f"policy-{policy.model.rstrip('/').rpartition('/')[2] or 'pocket'}"
    ongoing = max(MAX_ONGOING_REQUESTS, 2 * batch_size)  # an asynchronous rollout asks for its replies one by one
    if vllm is not None:
        options = _options(name, placement, vllm.interpreter, ongoing)
        on_vllm = serve.deployment(**options)(VllmPolicyReplica)
        return on_vllm.bind(policy, vllm, placement, batch_size, shares_gpus)
    in_torch = serve.deployment(**_options(name, placement, "", ongoing))(PolicyReplica)
    return in_torch.bind(policy, num_actions, placement, batch_size, build, shares_gpus)


def _options(
    name: str, placement: PlacementConfig, python: str = "", max_ongoing_requests: int = MAX_ONGOING_REQUESTS
) -> dict[str, Any]:
    """What all our deployments ask of Serve; `python` is another interpreter to run them with."""
    # Ray starts the replica with that interpreter: the same Python and Ray, and rlvlm, must be there. The path is not
    # resolved: a virtual environment's interpreter is a link.
    environment = {"py_executable": str(Path(python).expanduser().absolute())} if python else {}
    return dict(
        name=re.sub(r"[^A-Za-z0-9_.-]+", "-", name),
        num_replicas=placement.num_replicas,
        ray_actor_options={
            "num_cpus": placement.num_cpus,
            "num_gpus": placement.num_gpus,
            "runtime_env": environment,
        },
        max_ongoing_requests=max_ongoing_requests,
        max_queued_requests=MAX_QUEUED_REQUESTS,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        request_router_config=RequestRouterConfig(request_router_class=FewestRequestsRouter),  # pyright: ignore[reportArgumentType]
        # more tries would only repeat a missing file or a GPU that is too small
        max_constructor_retry_count=3,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=GRACE_S,
        graceful_shutdown_wait_loop_s=GRACE_S / 4,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
