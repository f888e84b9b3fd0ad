"""What a run of a sweep reserves for its workers: what RLlib asks for, or they wait without end."""

import pytest
from ray.rllib.algorithms.utils import _get_learner_bundles

from rlvlm.algorithms.policy_gradient.algorithm import PPOAlgorithmConfig
from rlvlm.core.errors import UsageError
from rlvlm.runs.preflight import networks_of
from rlvlm.runs.recipes import recipe
from rlvlm.runs.settings import override
from rlvlm.sweeps.sweep import largest_places


def test_places_by_hand() -> None:
    core, card = {"CPU": 1.0}, {"GPU": 1.0}
    assert largest_places([[core, core], [core, card], [card, card]]) == [core, core, card, card]
    assert largest_places([[], []]) == []


@pytest.mark.parametrize("task", ["number_line", "push_block"])
def test_a_gpu_by_number_is_refused_where_ray_assigns_them(task: str) -> None:
    device = "policy.device" if task == "number_line" else "policy.openvla.device"
    named = {device: "cuda:7", "policy.model": "owner/name"}
    for where in ({"algo.num_learners": 2}, {"engine.num_replicas": 1}):
        if task == "number_line" or "algo.num_learners" in where:
            with pytest.raises(UsageError, match="cuda:7 is a GPU as the run's own process counts them"):
                override(recipe(task), named | where)
    assert networks_of(override(recipe(task), named))


def test_learners_have_the_place_that_rllib_asks_for() -> None:
    for gpus in (0.0, 1.0):
        run = override(recipe("number_line"), {"algo.num_learners": 2, "algo.gpus_per_learner": gpus})
        config = PPOAlgorithmConfig().learners(num_learners=2, num_gpus_per_learner=gpus)
        asked = [{name: float(count) for name, count in one.items() if count} for one in _get_learner_bundles(config)]
        assert list(run.worker_places) == asked
        assert run.wanted_gpus == ({"the learners": 2.0} if gpus else {})
    runners = override(recipe("push_block"), {"algo.env_runners": 3})
    assert runners.worker_places == ({"CPU": 1.0},) * 3
