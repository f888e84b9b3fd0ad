"""Every process of a run has a place of its own before anything starts. The nodes are real, their GPUs are in name."""

import time
from collections.abc import Iterator
from io import StringIO

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from rich.console import Console

from rlvlm.core.errors import MachineError
from rlvlm.runs.placement import Node, Role, book_gpu, check_placed, nodes, own_gpu, place, plan_table, roles_of
from rlvlm.runs.recipes import recipe
from rlvlm.runs.settings import override
from rlvlm.vlms.devices import pick_device


def role(name: str, count: int = 1, cpus: float = 0.0, gpus: float = 0.0, is_own: bool = False) -> Role:
    return Role(name=name, count=count, cpus=cpus, gpus=gpus, setting=f"--{name}.fewer", is_own=is_own)


def test_places_by_hand() -> None:
    head, cards = Node(name="head", cpus=4, gpus=[1.0], is_own=True), Node(name="cards", cpus=2, gpus=[1.0, 1.0])
    roles = [role("learners", 2, gpus=1), role("judge", 2, cpus=1, gpus=0.5), role("own", gpus=1, is_own=True)]
    with pytest.raises(MachineError, match="judge 1 of 2 asks for 1 CPU and 0.5 GPU, and has no place") as caught:
        place(roles, [head, cards])
    assert "--judge.fewer" in caught.value.fix and "head 4 CPU, 0 GPU" in str(caught.value)
    head, cards = Node(name="head", cpus=4, gpus=[1.0], is_own=True), Node(name="cards", cpus=2, gpus=[1.0] * 3)
    assert place(roles, [cards, head]) == {
        "own": ["head"], "learners": ["cards", "cards"], "judge": ["cards", "cards"]
    }  # fmt: skip
    assert cards.gpus == [0.0, 0.0, 0.0] and cards.cpus == 0, "two halves share the third card"


def test_a_share_of_a_card_does_not_come_from_two() -> None:
    halves = [role("judge", 2, gpus=0.6)]
    with pytest.raises(MachineError, match="judge 2 of 2"):
        place(halves, [Node(name="one", cpus=1, gpus=[1.0])])
    assert place(halves, [Node(name="two", cpus=1, gpus=[1.0, 1.0])])["judge"] == ["two", "two"]


def test_what_has_no_place_is_refused_before_it_starts_and_a_plan_says_where_the_rest_goes() -> None:
    config = override(recipe("push_block"), {"algo.num_learners": 2, "algo.env_runners": 3})
    check_placed(config)  # cores of a private Ray are shared
    shown = Console(width=160, file=StringIO())
    shown.print(plan_table(config))
    text = shown.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "3 on this machine" in text and "learners" in text and "the run's own process" in text
    for wanted in ({"algo.gpus_per_learner": 1.0}, {"reward.source": "judged", "serve.num_gpus": 0.5}):
        with pytest.raises(MachineError, match="has no place"):
            check_placed(override(config, wanted))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=2, num_gpus=2)
    cluster.wait_for_nodes()
    ray.shutdown()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.ray
@pytest.mark.slow
def test_all_roles_have_cards_of_their_own(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own process too, which Ray gives none: what it computes on is nobody else's."""

    @ray.remote
    class Worker:
        def card(self) -> tuple[str, str]:
            (card,) = ray.get_gpu_ids()
            return ray.get_runtime_context().get_node_id(), str(card)

    here = ray.get_runtime_context().get_node_id()
    config = override(recipe("push_block"), {"algo.num_learners": 3, "algo.gpus_per_learner": 1.0})
    vlm = override(recipe("number_line"), {"algo.num_learners": 2, "algo.gpus_per_learner": 1.0})
    check_placed(config)
    with pytest.raises(MachineError, match="learners 5 of 5"):
        check_placed(override(config, {"algo.num_learners": 5}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert pick_device("auto").type == "cpu", "nobody has booked one"
    with own_gpu(vlm):
        own = pick_device("auto")
        assert own.type == "cuda" and own == pick_device("cuda")
        workers = [Worker.options(num_gpus=1, num_cpus=0).remote() for _ in range(3)]
        found = ray.get([worker.card.remote() for worker in workers])  # pyright: ignore
        assert len({*found, (here, str(own.index))}) == 4
        with pytest.raises(MachineError, match="Ray has given to others"):
            book_gpu(1.0)
        for worker in workers:
            ray.kill(worker)
    deadline = time.monotonic() + 30
    while ray.available_resources().get("GPU") != 4:
        assert time.monotonic() < deadline, "what was booked is given back"
        time.sleep(0.1)
    (own_role,) = [one for one in roles_of(vlm) if one.is_own]
    where = place(roles_of(vlm), nodes())
    assert own_role.gpus == 1 and where[own_role.name] == [one.name for one in nodes() if one.is_own]


@pytest.mark.ray
@pytest.mark.slow
def test_a_process_that_was_given_a_card_keeps_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `ray job submit --entrypoint-num-gpus 1` it sees one of the node's cards, which is in Ray's books."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    before = ray.available_resources().get("GPU")
    with own_gpu(recipe("number_line")):
        assert pick_device("auto") == torch.device("cuda", 0)
        assert ray.available_resources().get("GPU") == before
