"""How many runs of a sweep have room at once, worked by hand; and runs with engines of their own."""

import pytest
import yaml
from ray import serve
from tiny_run import run_here, table

from rlvlm.core.errors import MachineError, UsageError
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.runs.start.placement import Node
from rlvlm.sweeps.config import ResourceConfig
from rlvlm.sweeps.room import max_places, num_at_once, num_slots, roles_of_a_run, roles_of_judges

PLAIN = recipe("number_line")
SERVED = override(PLAIN, {"engine.num_replicas": 2, "algo.num_learners": 1})


def test_places_by_hand():
    core, card = {"CPU": 1.0}, {"GPU": 1.0}
    assert max_places([[core, core], [core, card], [card, card]]) == [core, core, card, card]
    assert max_places([[], []]) == []


def test_a_run_takes_its_reservation_and_engines_beside_it():
    """A core each for the run, its learner and two replicas: five cores hold one run, eight hold two."""
    run = roles_of_a_run(ResourceConfig(), [PLAIN, SERVED])
    assert [(role.count, role.cpus, role.is_served) for role in run] == [
        (1, 1.0, False), (1, 1.0, False), (2, 1.0, True),
    ]  # fmt: skip
    for cores, at_once in ((4, 1), (7, 1), (8, 2), (12, 3), (99, 3)):
        assert num_at_once([], run, 3, [Node(name="one", cpus=float(cores))]) == at_once
    two = [Node(name="one", cpus=4.0), Node(name="two", cpus=4.0)]
    assert num_at_once([], run, 9, two) == 2
    with pytest.raises(MachineError, match="the policy's replicas 2 of 2 asks for 1 CPU .* has no place"):
        num_at_once([], run, 3, [Node(name="one", cpus=3.0)])


def test_a_kind_of_gpu_that_a_sweep_cannot_hold_is_refused():
    learns = {"algo.num_learners": 1, "algo.gpus_per_learner": 1.0, "algo.gpu_type": "L4"}
    with pytest.raises(UsageError, match="algo.gpu_type L4 is for a run by itself"):
        roles_of_a_run(ResourceConfig(), [override(PLAIN, learns)])
    engines = {"engine.num_replicas": 1, "engine.num_gpus": 1.0, "engine.gpu_type": "L4"}
    *_, engine = roles_of_a_run(ResourceConfig(), [override(PLAIN, engines)])
    assert engine.gpu_type == "L4"


def test_a_run_that_never_has_room_beside_the_judges_is_an_error():
    asking = override(recipe("drawer_open"), {"serve.num_cpus": 1.0})
    judges, run = roles_of_judges([asking]), roles_of_a_run(ResourceConfig(cpus=2.0), [asking])
    assert num_slots(judges, run) == 3 and num_at_once(judges, run, 5, [Node(name="one", cpus=5.0)]) == 2
    with pytest.raises(MachineError) as caught:
        num_at_once(judges, run, 5, [Node(name="one", cpus=2.0)])
    assert "asks for" in str(caught.value) and "or use a cluster that has them" in caught.value.fix


@pytest.mark.ray
@pytest.mark.slow
def test_runs_of_a_sweep_have_engines_of_their_own(local_ray, tmp_path):
    """No judge has started Serve before them, and in their reservations there is no place for it."""
    settings = {
        "engine.num_replicas": 1, "algo.num_envs": 4, "algo.rollout_turns": 8, "algo.epochs": 1, "sft.turns": 0,
        "algo.minibatch_turns": 8, "algo.max_reply_tokens": 8, "eval.episodes": 1, "eval.every_steps": 100,
    }  # fmt: skip
    tree = {
        "title": "engines", "tasks": ["number_line"], "seeds": [0, 1], "settings": settings, "budget": {"steps": 8},
        "sources": {"true": {"title": "true reward", "settings": {"reward.source": "environment"}}},
        "resources": {"retries": 0},
    }  # fmt: skip
    file, out = tmp_path / "engines.yaml", tmp_path / "sweep"
    file.write_text(yaml.safe_dump(tree))
    run_here("sweep", str(file), "--out", str(out))
    serve.shutdown()
    assert [row["state"] for row in table(out / "trials.csv")] == ["done", "done"]
