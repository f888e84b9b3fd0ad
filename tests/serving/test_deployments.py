import asyncio
import importlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from rlvlm.errors import JudgeUnavailable
from rlvlm.judges.config import JudgeConfig
from rlvlm.serving import deployments
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.deployments import JudgeAppArgs, JudgeReplica, judge_app
from rlvlm.testing import FakeJudge
from rlvlm.types import Clip, Query

SERVE_APPS = Path(__file__).parents[2] / "serve_apps"


def make_queries(count: int) -> list[Query]:
    """Query i's right side is brighter when i is odd."""
    grey, dark, light = (np.full((1, 4, 4, 3), level, np.uint8) for level in (100, 50, 150))
    return [Query(goal="open it", left=grey, right=light if index % 2 else dark) for index in range(count)]


class SlowJudge(FakeJudge):
    """Notes the size of each batch, and waits when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.error: Exception | None = None

    def compare(self, queries):
        self.sizes.append(len(queries))
        self.may_answer.wait(30)
        if self.error:
            raise self.error
        return super().compare(queries)


@pytest.fixture
def judge(monkeypatch) -> SlowJudge:
    judge = SlowJudge()
    context = SimpleNamespace(_deployment_config=SimpleNamespace(max_ongoing_requests=100))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)  # batches without a Serve around them
    monkeypatch.setattr(deployments, "build_judge", lambda config: judge)
    return judge


@pytest.fixture(scope="module")
def run() -> Iterator[Callable]:
    """Runs a coroutine; all in one event loop, because Serve keeps one batch queue per process."""
    with asyncio.Runner() as runner:
        yield runner.run


def make_replica(**placement) -> JudgeReplica:
    return JudgeReplica(JudgeConfig(device="cpu", batch_size=8), PlacementConfig(**placement))


def test_small_requests_share_batches_and_each_gets_its_own_answers(judge, run):
    # by hand: 12 requests of 2 are 24 questions, three batches of 8
    async def ask():
        replica = make_replica()
        queries = make_queries(24)
        return await asyncio.gather(*(replica.compare(queries[start : start + 2]) for start in range(0, 24, 2)))

    outcomes = run(ask())
    assert judge.sizes == [8, 8, 8]
    assert [verdict for outcome in outcomes for verdict in outcome] == FakeJudge().compare(make_queries(24))


def test_a_large_request_is_cut_to_batches(judge, run):
    async def ask():
        replica = make_replica()
        clip = Clip(goal="open it", frames=make_queries(1)[0].left)
        return await replica.compare(make_queries(20)), await replica.score([clip] * 20), await replica.compare([])

    verdicts, scores, nothing = run(ask())
    assert verdicts == FakeJudge().compare(make_queries(20)) and sorted(judge.sizes) == [4, 8, 8]
    assert len(scores) == 20 and nothing == []


def test_an_outage_travels_as_a_value(judge, run):
    judge.error = JudgeUnavailable("the card fell off the bus", "restart it")
    outcome = run(_compare(make_replica(), 3))
    assert isinstance(outcome, JudgeUnavailable) and outcome.fix == "restart it"


async def _compare(replica: JudgeReplica, count: int):
    return await replica.compare(make_queries(count))


def test_health_is_a_real_judgement_and_a_recent_one_counts(judge, run):
    async def check():
        replica = make_replica()
        await replica.check_health()
        assert judge.sizes == [1]
        await replica.compare(make_queries(2))
        await replica.check_health()
        assert judge.sizes == [1, 2]
        await replica.check_health()
        assert judge.sizes == [1, 2, 1]

    run(check())


def test_a_judge_that_fails_the_probe_is_unhealthy(judge, run):
    judge.error = JudgeUnavailable("device-side assert")
    with pytest.raises(JudgeUnavailable, match="assert"):
        run(make_replica().check_health())


def test_a_busy_judge_is_healthy_until_callers_give_up(judge, run):
    async def check(timeout_s: float):
        replica = make_replica(timeout_s=timeout_s)
        judge.may_answer.clear()
        request = asyncio.create_task(replica.compare(make_queries(1)))
        while not judge.sizes:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        try:
            await replica.check_health()
        finally:
            judge.may_answer.set()
            judge.sizes.clear()
            await request

    run(check(timeout_s=60.0))
    with pytest.raises(RuntimeError, match="one batch has taken"):
        run(check(timeout_s=0.01))


def test_an_unloadable_judge_says_why_in_one_line():
    with pytest.raises(RuntimeError, match="judge-cause.*no/such/folder.*pocket.train"):
        JudgeReplica(JudgeConfig(model="/no/such/folder", device="cpu"), PlacementConfig())


@pytest.mark.parametrize("path", sorted(SERVE_APPS.glob("*.yaml")), ids=lambda path: path.name)
def test_serve_deploy_accepts_the_yaml_and_the_app_its_arguments(path):
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    for application in schema.applications:
        module, name = application.import_path.split(":")
        assert getattr(importlib.import_module(module), name) is judge_app
        args = JudgeAppArgs.model_validate(application.args)
        assert application.args["judge"].items() <= {
            field: getattr(args.judge, field) for field in JudgeConfig.__dataclass_fields__
        }.items()
        options = judge_app(args)._bound_deployment.ray_actor_options
        assert options["num_gpus"] == application.args["placement"]["num_gpus"]


@pytest.mark.parametrize("args", [
    {"judge": {"modle": "x"}}, {"placement": {"gpus": 1}}, {"juge": {}}, {"judge": {"prompt": "poem"}},
    {"judge": {"batch_size": 0}}, {"placement": {"num_gpus": 1.5}},
])
def test_a_wrong_argument_in_the_yaml_is_an_error(args):
    with pytest.raises(ValidationError):
        JudgeAppArgs.model_validate(args)
