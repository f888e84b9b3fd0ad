"""What is asked of Ray before anything is loaded, on two nodes with a GPU each in name."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray

from rlvlm.core.errors import MachineError
from rlvlm.serving import places
from rlvlm.serving.config import Role
from rlvlm.serving.places import Placing, bounded_start, cluster_nodes, place, preferring, reserve_places

pytestmark = [pytest.mark.ray, pytest.mark.slow]

JUDGE = Role(name="the judge", count=2, cpus=1.0, gpus=0.5, setting="--judge.fewer")
LEARNER = Role(name="learners", gpus=1.0, setting="--learners.fewer")


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_nodes: Any) -> Iterator[None]:
    kinds = [{"num_cpus": 4, "num_gpus": 1, "labels": {"ray.io/accelerator-type": kind}} for kind in ("L4", "H200")]
    with ray_nodes(*kinds) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()


class Process:
    """Any process of a run."""

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


def start(**options: Any) -> Any:
    return ray.remote(Process).options(**options).remote()


def fits(*roles: Role) -> Any:
    return lambda: place(roles, cluster_nodes())


def test_a_judge_that_serve_spreads_leaves_a_whole_gpu_for_the_learner() -> None:
    with reserve_places([LEARNER, JUDGE], fits(LEARNER, JUDGE), Placing()) as found:
        (judge, *_), (learner,) = found["the judge"][0], found["learners"][0]
        assert judge != learner and found["the judge"][0] == (judge, judge)
        ray.util.remove_placement_group(found["the judge"][1])
        asked = {"num_cpus": 1, "num_gpus": 0.5, "scheduling_strategy": "SPREAD"}  # as Serve asks
        halves = [start(**asked, **preferring(found["the judge"][0])) for _ in range(2)]
        assert ray.get([half.node.remote() for half in halves]) == [judge, judge]
        late = start(num_cpus=0, num_gpus=1, placement_group=found["learners"][1])
        assert ray.get(late.node.remote()) == learner
        for process in (*halves, late):
            ray.kill(process)


def test_a_kind_of_gpu_is_what_ray_is_asked_for() -> None:
    kinds = {node.node_id: node.gpu_type for node in cluster_nodes()}
    for kind in ("L4", "H200"):
        judge = replace(JUDGE, gpu_type=kind)
        with reserve_places([judge, LEARNER], fits(judge, LEARNER), Placing()) as found:
            assert {kinds[node] for node in found["the judge"][0]} == {kind} != {kinds[found["learners"][0][0]]}
        process = start(num_gpus=1, **preferring((), kind))  # as an app's replica, whose place nobody holds
        assert kinds[ray.get(process.node.remote())] == kind
        late = start(num_gpus=1, **preferring([*kinds], kind))  # the other kind is free, and will not do
        answer = late.node.remote()
        assert not ray.wait([answer], timeout=2)[0]
        ray.kill(process)
        assert kinds[ray.get(answer)] == kind
        ray.kill(late)
    other = replace(JUDGE, gpu_type="B200")
    with pytest.raises(MachineError, match=r"0.5 GPU \(B200\), and has no place"):
        with reserve_places([other], fits(other), Placing()):
            pass


def test_what_others_hold_is_named_and_waited_for() -> None:
    other, said = start(num_gpus=1), []
    ray.get(other.node.remote())
    for roles in ([LEARNER, JUDGE], [JUDGE, LEARNER]):
        with (
            pytest.raises(MachineError, match="others hold the places of .*0 GPU free beside 1 Process") as caught,
            reserve_places(roles, fits(*roles), Placing(timeout_s=1.0, setting="--longer", log=said.append)),
        ):
            pass
        assert "--longer" in caught.value.fix and "--learners.fewer" in caught.value.fix
    assert len(said) == 2, "it is said once at the beginning, and then every ten seconds"
    with reserve_places([LEARNER], fits(LEARNER), Placing(timeout_s=1.0)):
        pass  # what was waited for in vain is not held
    threading.Timer(2.0, ray.kill, [other]).start()
    began = time.monotonic()
    with reserve_places([LEARNER, JUDGE], fits(LEARNER, JUDGE), Placing(timeout_s=60.0)) as found:
        assert time.monotonic() - began > 1 and found.keys() == {"learners", "the judge"}


def test_what_no_machine_has_is_refused_at_once() -> None:
    many = Role(name="learners", count=3, gpus=1.0, setting="--learners.fewer")
    began = time.monotonic()
    with (
        pytest.raises(MachineError, match="learners 3 of 3 .* has no place"),
        reserve_places([many], fits(many), Placing()),
    ):
        pass
    assert time.monotonic() - began < 10


def test_an_actor_that_finds_no_place_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_REPORT_S", 1.0)
    others, said = [start(num_gpus=1) for _ in range(2)], []
    ray.get([other.node.remote() for other in others])
    placing = Placing(timeout_s=3.0, setting="--longer", log=said.append)
    with (
        pytest.raises(MachineError, match="others still hold the places of 1 Process: .* 0 GPU"),
        bounded_start(placing),
    ):
        ray.get(start(num_gpus=1).node.remote())
    assert "waiting for a place: 1 Process; " in said[0]
    for other in others:
        ray.kill(other)
