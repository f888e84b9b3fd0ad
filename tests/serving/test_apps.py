"""The judge on a real local Serve."""

import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace

import httpx
import numpy as np
import pytest
import ray
from chaos import wait_until
from ray import serve
from stub_judge import stub, stub_queries

from rlvlm.core import metrics
from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.judging import Clip, Query, Status
from rlvlm.judges.build import build_judge
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.store import LabelStore
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.runs.start.placement import HeldPlaces
from rlvlm.runs.start.preflight import check_before_run
from rlvlm.runs.train import judge_session
from rlvlm.serving import monitoring
from rlvlm.serving.apps import start_judge
from rlvlm.serving.client import ServedJudge
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.monitoring import ClientMetrics, show_cache, show_figures
from rlvlm.serving.places import ANYWHERE, Placing
from rlvlm.testing import FakeJudge, check_judge

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster(local_ray) -> Iterator[None]:
    """A Ray that believes in one GPU, and whatever of Serve the tests start."""
    yield
    serve.shutdown()


@pytest.fixture(scope="module")
def config(tiny_vlms) -> JudgeConfig:
    return JudgeConfig(backend="transformers", model=str(tiny_vlms["qwen3_vl"]), batch_size=4)


@pytest.fixture(scope="module")
def running(cluster, config) -> Iterator[ServedJudge]:
    """Two replicas that share a card."""
    placement = PlacementConfig(num_replicas=2, num_cpus=0.5, num_gpus=0.5, timeout_s=60.0)
    with start_judge(config, placement, "runs/two replicas") as running:
        yield running


def make_queries(count: int, seed: int) -> list[Query]:
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (count, 2, 1, 40, 40, 3), np.uint8)
    return [Query(goal="open the drawer", left=left, right=right) for left, right in frames]


def replica_names(app: str) -> list[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["name"].startswith(f"SERVE_REPLICA::{app}#")]


def test_a_served_judge_answers_as_the_local_one_does(running, config):
    queries = make_queries(11, seed=0)
    local = build_judge(replace(config, device="cpu"))
    served = running.compare(queries)
    assert running.stamp == local.stamp
    for one, other in zip(served, local.compare(queries), strict=True):
        assert (one.status, one.label) == (other.status, other.label)
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_the_served_judge_keeps_the_contract(running):
    check_judge(running)


def test_two_replicas_share_one_card(running):
    assert len(replica_names(running.app)) == 2
    assert ray.available_resources().get("GPU", 0.0) == 0.0
    assert set(running.app) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


def test_the_client_travels_to_a_task(running):
    client = pickle.loads(pickle.dumps(running))
    queries = make_queries(5, seed=1)

    @ray.remote(num_cpus=0)
    def ask(judge: ServedJudge):
        return judge.compare(queries)

    assert [v.label for v in ray.get(ask.remote(client))] == [v.label for v in running.compare(queries)]


def test_images_beyond_the_grpc_limit_pass(running):
    pictures = np.zeros((4, 2, 1, 600, 600, 3), np.uint8)  # 8.6 MB in one request
    queries = [Query(goal="open the drawer", left=left, right=right) for left, right in pictures]
    assert all(verdict.status is not Status.FAILED for verdict in running.compare(queries))


def test_attaching_by_name_leaves_the_app_alone(running, config):
    with start_judge(config, PlacementConfig(app=running.app), "other") as attached:
        assert attached.stamp == running.stamp
    assert running.app in serve.status().applications


def test_an_app_that_is_not_there_is_named(running, config):
    with pytest.raises(JudgeUnavailable, match="no Serve app 'nobody'") as caught:
        start_judge(config, PlacementConfig(app="nobody"), "other").__enter__()
    assert "serve deploy" in caught.value.fix


def test_a_judge_that_never_answers_in_time_is_unavailable(running):
    client = ServedJudge(running.app, timeout_s=1e-4, retries=1, batch_size=4)
    with pytest.raises(JudgeUnavailable, match="gave no answer in 2 tries"):
        client.compare(make_queries(1, seed=3))


def test_a_judge_that_cannot_load_says_why_and_leaves_nothing(cluster, config, tmp_path):
    with pytest.raises(JudgeUnavailable, match="holds no model") as caught:
        start_judge(replace(config, model=str(tmp_path)), PlacementConfig(num_cpus=0.1), "broken").__enter__()
    assert str(tmp_path) in str(caught.value) and "chat VLM" in caught.value.fix
    assert not [app for app in serve.status().applications if "broken" in app]


def test_a_third_half_finds_no_room_on_the_card_and_hears_why(running):
    # by hand: the two replicas of the running app hold 0.5 each of the one GPU
    wanted = PlacementConfig(num_cpus=0.1, num_gpus=0.5)
    with pytest.raises(
        JudgeUnavailable, match=r"others hold the places of the judge .*0\.5 GPU.* 0 GPU free"
    ) as caught:
        start_judge(JudgeConfig(), wanted, "third", stub(), placing=Placing(timeout_s=0.5)).__enter__()
    assert running.app in str(caught.value) and "--serve.num-gpus" in caught.value.fix
    assert not [app for app in serve.status().applications if "third" in app]


@pytest.mark.full
def test_a_judge_grows_with_its_load(cluster):
    placement = PlacementConfig(
        num_cpus=0.1, max_replicas=2, target_ongoing_requests=1, upscale_delay_s=0.0, downscale_delay_s=1.0
    )
    config = JudgeConfig(batch_size=2)
    with start_judge(config, placement, "growing", stub(latency_s=0.2)) as growing:
        assert len(replica_names(growing.app)) == 1
        over = threading.Event()
        load = threading.Thread(target=_ask_until, args=(growing, over))
        load.start()
        wait_until(lambda: len(replica_names(growing.app)) == 2, "a second copy")
        over.set()
        load.join()


def _ask_until(judge: ServedJudge, over: threading.Event) -> None:
    while not over.is_set():
        judge.compare(stub_queries(16, 0))


def test_the_figures_reach_rays_prometheus_endpoint(running, tmp_path):
    """Scrapes for real, after questions of which one fails."""
    bad = Query(goal="", left=make_queries(1, 0)[0].left, right=make_queries(1, 0)[0].right)
    running.compare([*make_queries(7, seed=5), bad])
    running.score([Clip(goal="open the drawer", frames=query.left) for query in make_queries(2, seed=6)])
    ClientMetrics().retries.inc(1, {"run": "a-run", "reason": "ActorDiedError"})
    show_figures("a-run")({metrics.LABEL_ACCURACY: 0.9, "sac/alpha": 1.0})
    cache = CachedJudge(FakeJudge(), LabelStore(tmp_path / "store"), show_cache("a-run"))
    assert cache.compare(stub_queries(3, 0)) == cache.compare(stub_queries(3, 0))
    port = ray.nodes()[0]["MetricsExportPort"]
    wanted = [
        f"ray_{monitoring.ANSWERS}_total{{",
        'status="failed"',
        'kind="score"',
        'run="a-run"',
        running.app,
        f"ray_{monitoring.BATCH_SIZE}_bucket",
        f"ray_{monitoring.LATENCY_S}_count",
        f"ray_{monitoring.QUEUE}{{",
        f"ray_{monitoring.RETRIES}_total",
        f"ray_{monitoring.RUN_FIGURE}{{",
        f'figure="{metrics.LABEL_ACCURACY}"',
        f"ray_{monitoring.CACHE_HITS}{{",
        f"ray_{monitoring.CACHE_MISSES}{{",
        "judge-qwen3_vl-direct",
    ]
    text = ""

    def is_there() -> bool:
        nonlocal text
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
        return all(word in text for word in wanted)

    try:
        wait_until(is_there, "every figure")
    except TimeoutError as error:
        raise AssertionError([word for word in wanted if word not in text]) from error
    assert "ray_rlvlm_judge_crossed_total" not in text, "nothing crossed, nothing counted"


def test_more_than_the_cluster_has_is_refused(cluster, config):
    with pytest.raises(JudgeUnavailable, match="the judge asks for 1 CPU and 3 GPU, and has no place") as caught:
        start_judge(config, PlacementConfig(num_gpus=3), "greedy").__enter__()
    assert "--serve.num-gpus" in caught.value.fix


def test_a_run_holds_an_attached_pocket_judge_to_the_tasks_it_knows(cluster, tmp_path):
    with start_judge(JudgeConfig(), PlacementConfig(num_cpus=0.1), "known", stub(name="pocket:video")) as running:

        def attach(task: str) -> None:
            config = override(recipe(task), {"reward.source": "judged", "serve.app": running.app})
            check_before_run(config)  # who the app is cannot be known yet
            with judge_session(
                config, lambda: LabelStore(tmp_path), tmp_path / "ledger", HeldPlaces({}, ANYWHERE)
            ) as make:
                assert make is not None

        attach("libero_object/8")
        with pytest.raises(UsageError, match=r"27 others; about libero_10/5"):
            attach("libero_10/5")
