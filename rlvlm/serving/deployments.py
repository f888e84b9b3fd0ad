"""The judge as a Ray Serve deployment. `apps` starts it for a run, `serve deploy` from the YAML in serve_apps/."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, get_type_hints

import numpy as np
import ray
from pydantic import BaseModel, ConfigDict, field_validator
from ray import serve

from rlvlm.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Generator
from rlvlm.judges.prompts import Chat
from rlvlm.serving.config import PlacementConfig
from rlvlm.types import Clip, Query, Score, Stamp, Status, Verdict

DEPLOYMENT = "judge"
CAUSE = "judge-cause: "
"""Marks, in Serve's status message, the line that holds what is wrong and how to mend it."""
BATCH_WAIT_S = 0.005
"""How long a request waits for others to share its batch."""
MAX_QUEUED_REQUESTS = 256
"""Requests one caller may have waiting; beyond it gets a BackPressureError and tries again later."""
CONSTRUCTOR_TRIES = 3
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 10.0, 30.0
PROBE_DEADLINE_S = 20.0
"""An idle judge must answer a probe within this."""

Item = TypeVar("Item", Query, Clip, Chat)
Answer = TypeVar("Answer", Verdict, Score, str)
Outcome = list[Verdict] | list[Score] | JudgeUnavailable
"""What one request gets. An error travels as a value: raised, it would hit every request of the batch."""


class JudgeReplica:
    """One copy of a judge. Requests are lists of questions; small ones are merged, and one thread runs the model."""

    def __init__(self, config: JudgeConfig, placement: PlacementConfig) -> None:
        """Loads the judge.

        Raises:
            RuntimeError: the judge cannot be loaded; its one line carries the cause and the fix to `apps.start_judge`.
        """
        self._batch_size = config.batch_size
        self._deadline_s = placement.timeout_s
        self._busy_since: float | None = None
        self._num_answered = self._num_answered_at_check = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")
        try:
            config = dataclasses.replace(config, device=assigned_device(config.device))
            self._judge = self._thread.submit(_build, config, placement.num_cpus).result()
        except (JudgeUnavailable, UnsupportedQuestion) as error:
            raise RuntimeError(CAUSE + json.dumps([str(error), error.fix])) from error
        for merged in (self._compare_merged, self._score_merged):
            merged.set_max_batch_size(config.batch_size)  # pyright: ignore[reportAttributeAccessIssue] by @serve.batch

    def __repr__(self) -> str:
        return f"JudgeReplica({self._judge.stamp.judge}, {self._judge.stamp.prompt})"

    async def stamp(self) -> Stamp:
        """Where the answers come from."""
        return self._judge.stamp

    async def compare(self, queries: list[Query]) -> Outcome:
        """One verdict per query, in order, or the error that hit them all."""
        return _joined(await asyncio.gather(*map(self._compare_merged, self._parts(queries))))

    async def score(self, clips: list[Clip]) -> Outcome:
        """One score per clip, in order, or the error that hit them all."""
        return _joined(await asyncio.gather(*map(self._score_merged, self._parts(clips))))

    async def generate(
        self, chats: list[Chat], max_new_tokens: int, temperature: float
    ) -> list[str] | JudgeUnavailable | UnsupportedQuestion:
        """The model's reply to each chat, in order, or the error that hit them all."""
        if not isinstance(self._judge, Generator):
            return UnsupportedQuestion(f"{self._judge.stamp.judge} cannot write text", "choose a chat model")
        write = partial(self._judge.generate, max_new_tokens=max_new_tokens, temperature=temperature)
        replies: list[str] = []
        try:
            for part in self._parts(chats):
                replies += await self._run(write, part)
        except (JudgeUnavailable, UnsupportedQuestion) as error:
            return error
        return replies

    async def check_health(self) -> None:
        """Passes when the judge has judged since the last check, is judging, or answers a probe now.

        Raises:
            RuntimeError: one batch has taken longer than the callers wait, or the probe failed; Serve then replaces
                the replica.
        """
        if self._busy_since is not None:
            busy_s = time.monotonic() - self._busy_since
            if busy_s > self._deadline_s:
                raise RuntimeError(f"one batch has taken {busy_s:.0f} s, callers wait {self._deadline_s:.0f} s")
            return
        if self._num_answered == self._num_answered_at_check:
            answers = await asyncio.wait_for(self._run(self._judge.compare, [_probe()]), PROBE_DEADLINE_S)
            if answers[0].status is Status.FAILED:
                raise RuntimeError(f"the judge failed on a probe: {answers[0].text}")
        self._num_answered_at_check = self._num_answered

    @serve.batch(batch_wait_timeout_s=BATCH_WAIT_S, batch_size_fn=lambda requests: sum(map(len, requests)))
    async def _compare_merged(self, requests: list[list[Query]]) -> list[Outcome]:
        return await self._answer(requests, self._judge.compare)

    @serve.batch(batch_wait_timeout_s=BATCH_WAIT_S, batch_size_fn=lambda requests: sum(map(len, requests)))
    async def _score_merged(self, requests: list[list[Clip]]) -> list[Outcome]:
        return await self._answer(requests, self._judge.score)

    async def _answer(self, requests: list[list[Item]], ask: Callable[[Sequence[Item]], list[Answer]]) -> list[Any]:
        """Asks all requests at once and deals the answers out again."""
        try:
            answers = await self._run(ask, [item for request in requests for item in request])
        except JudgeUnavailable as error:
            return [error] * len(requests)
        in_order = iter(answers)
        return [[next(in_order) for _ in request] for request in requests]

    async def _run(self, ask: Callable[[Sequence[Item]], list[Answer]], items: list[Item]) -> list[Answer]:
        """Runs the model in its one thread, so that the event loop stays free for health checks."""
        answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, ask, items)
        self._num_answered += len(answers)
        return answers

    def _timed(self, ask: Callable[[Sequence[Item]], list[Answer]], items: list[Item]) -> list[Answer]:
        self._busy_since = time.monotonic()
        try:
            return ask(items)
        finally:
            self._busy_since = None

    def _parts(self, items: list[Item]) -> list[list[Item]]:
        return [items[start : start + self._batch_size] for start in range(0, len(items), self._batch_size)]


class JudgeAppArgs(BaseModel):
    """Arguments of `judge_app` in a Serve YAML file: the same fields as on the command line."""

    model_config = ConfigDict(extra="forbid")
    judge: JudgeConfig = JudgeConfig()
    placement: PlacementConfig = PlacementConfig()

    @field_validator("judge", "placement", mode="before")
    @classmethod
    def _no_unknown_keys(cls, value: Any, info: Any) -> Any:
        config = {"judge": JudgeConfig, "placement": PlacementConfig}[info.field_name]
        _refuse_unknown_keys(config, value, info.field_name)
        return value


def _refuse_unknown_keys(config: Any, value: Any, place: str) -> None:
    """Raises ValueError where `value`, or a mapping inside it, has a key that the config class does not know."""
    if not isinstance(value, dict):
        return
    hints = get_type_hints(config)
    known = {field.name for field in dataclasses.fields(config)}
    if unknown := sorted(set(value) - known):
        raise ValueError(f"unknown {place} keys {unknown}; known are {sorted(known)}")
    for name, inner in value.items():
        if dataclasses.is_dataclass(hints[name]):
            _refuse_unknown_keys(hints[name], inner, f"{place}.{name}")


def judge_app(args: JudgeAppArgs) -> serve.Application:
    """The Serve application of one judge, with the resources that `args.placement` asks for."""
    return bind_judge(args.judge, args.placement)


def bind_judge(judge: JudgeConfig, placement: PlacementConfig) -> serve.Application:
    """The deployment of `judge`, bound and ready for `serve.run`."""
    make_deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=placement.num_replicas,
        ray_actor_options={"num_cpus": placement.num_cpus, "num_gpus": placement.num_gpus},
        max_ongoing_requests=max(8, 2 * judge.batch_size),
        max_queued_requests=MAX_QUEUED_REQUESTS,
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=5.0,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    return make_deployment(JudgeReplica).bind(judge, placement)


def assigned_device(device: str) -> str:
    """What `auto` means inside Ray: the GPU that Ray assigned to this process, else the CPU.

    Ray leaves every GPU visible to a process that asked for none (ray#54868), so visibility decides nothing.
    """
    if device != "auto":
        return device
    import torch  # the client imports this file too and needs no torch

    has_gpu = bool(ray.get_runtime_context().get_accelerator_ids().get("GPU"))
    return "cuda" if has_gpu and torch.cuda.is_available() else "cpu"


def _build(config: JudgeConfig, num_cpus: float) -> Any:
    """The judge, in a process whose torch uses as many threads as the replica has cores."""
    import torch

    torch.set_num_threads(max(1, int(num_cpus)))
    return build_judge(config)


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The parts of one request put together; an error of one part is the error of all."""
    joined: list[Any] = []
    for outcome in outcomes:
        if isinstance(outcome, JudgeUnavailable):
            return outcome
        joined += outcome
    return joined


def _probe() -> Query:
    grey = np.full((1, 32, 32, 3), 128, np.uint8)
    return Query(goal="open the drawer", left=grey, right=grey)
