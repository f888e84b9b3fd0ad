"""Two learner actors of RLlib against the one in this process, on one rollout."""

from typing import Any

import pytest
import ray
import torch
from ray.rllib.core.learner import learner_group
from ray.train.torch import TorchConfig

from rlvlm.algorithms.sft_config import ReplySFTConfig
from rlvlm.algorithms.sharding import fetch_bucket
from rlvlm.core import metrics
from rlvlm.core.errors import MachineError, NumericsError
from rlvlm.policies.buckets import read_bucket
from tests.algorithms.policy_gradient.tiny_runs import KL_AND_ENTROPY, build

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# 9 turns, so shares are 5 and 4; the bound on the norm is never met
UNEVEN: dict[str, Any] = {"num_envs": 3, "rollout_turns": 9, "minibatch_turns": 9, "epochs": 1, "max_grad_norm": 1e9}


@pytest.fixture(scope="module")
def make(local_ray, tmp_path_factory):
    built, folder = [], tmp_path_factory.mktemp("model")

    def one(**settings: Any) -> Any:
        built.append(build(folder, KL_AND_ENTROPY, **(UNEVEN | settings)))
        return built[-1]

    yield one
    for algorithm in built:
        algorithm.stop()


@pytest.fixture(scope="module")
def two(make):
    """Two learners; the tests of this file go on with it in their order."""
    return make(num_learners=2)


def of_all(algorithm: Any, what: Any) -> list[Any]:
    return [answer.get() for answer in algorithm.learner_group.foreach_learner(what)]


def gradients(learner: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in learner.policy.named_parameters() if p.grad is not None}


def test_two_learners_have_the_gradient_of_one(make, two):
    one = make()
    for algorithm in (one, two):
        algorithm.prepare(lambda line: None)
    one.source.begin()
    rollout = one.source.labelled(one.source.ended())
    one.learners.call_all("learn", rollout, 0.0)
    two.learners.call_all("learn", rollout, 0.0)
    (alone,), both = of_all(one, gradients), of_all(two, gradients)
    assert len(both) == 2 and max(gradient.abs().max() for gradient in alone.values()) > 1e-3
    for name, gradient in alone.items():
        for other in both:
            assert (other[name] - gradient).abs().max() <= 1e-5 * max(1.0, float(gradient.abs().max())), name
    left, right = of_all(two, lambda learner: learner.policy.trained_state())
    assert all(torch.equal(value, right[name]) for name, value in left.items()), "they take the same step"
    reports = one.learners.call("report"), two.learners.call("report")
    for name, value in reports[0].items():
        assert reports[1][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_learners_that_share_out_the_weights_play_save_and_go_on(make, tmp_path):
    first = make(num_learners=2, shard=True)
    first.train()
    assert first.report()[metrics.UPDATE_FIRST_RATIO] <= 1e-4, "the learners must see what was sampled here"
    sizes = of_all(first, lambda learner: sum(p.to_local().nbytes for p in learner.policy.value_head.parameters()))
    whole = sum(parameter.nbytes for parameter in first.policy.value_head.parameters())
    assert sum(sizes) == whole and max(sizes) < 0.6 * whole
    buckets, nothing = first.learners.call_all("put_weights", 1 << 16)
    assert nothing == [] and len(buckets) > 2, "weights travel once, however many learners there are"
    weights = {name: value for bucket in buckets for name, value in read_bucket(bucket, fetch_bucket(bucket))}
    for name, value in first.policy.trained_state().items():
        assert torch.equal(value.cpu(), weights[name]), name
    first.save_checkpoint(str(tmp_path / "saved"))
    alone, ends = make(), []
    for algorithm in (first, first, alone):  # the second time back from where the first one led
        algorithm.load_checkpoint(str(tmp_path / "saved"))
        algorithm.train()
        ends.append({name: value.clone() for name, value in algorithm.policy.trained_state().items()})
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value), name
        torch.testing.assert_close(ends[2][name], value, atol=1e-4, rtol=1e-4, msg=name)


def test_the_learners_with_gpus_do_the_supervised_start_within_its_bounds(make, monkeypatch):
    """A card in name: what counts is that Ray gave it to the learner, and that the run's own process only waits."""
    monkeypatch.setattr(learner_group, "_get_backend_config", lambda _: TorchConfig(backend="gloo"))
    sft = ReplySFTConfig(turns=8, updates=2, batch_size=8)
    bounds = {"microbatch_turns": 3}
    here, there = (make(sft=sft, **bounds, **algo) for algo in ({}, {"num_learners": 1, "gpus_per_learner": 1.0}))
    assert there.learner is None and ray.available_resources().get("GPU", 0) == 0
    for algorithm in (here, there):
        algorithm.prepare(lambda line: None)
    assert of_all(there, lambda learner: len(ray.get_gpu_ids())) == [1]
    taught = there.policy.trained_state()
    for name, value in here.policy.trained_state().items():
        torch.testing.assert_close(taught[name], value, atol=1e-6, rtol=1e-6, msg=name)
    for name in (metrics.SFT_LOSS, metrics.SFT_HELD_OUT_LOSS):
        assert there.report()[name] == pytest.approx(here.report()[name], rel=1e-6), name


def test_an_error_of_one_learner_is_reported_and_ends_them_all(two):
    def poison(learner: Any) -> None:
        if torch.distributed.get_rank() == 1:  # only its share of the loss is not finite
            learner.policy.value_head[-1].bias.data.fill_(torch.nan)

    of_all(two, poison)
    with pytest.raises(NumericsError, match="not finite"):
        two.learners.call_all("learn", two.source.next(), 0.0)


def test_learners_without_a_place_are_refused(make):
    with pytest.raises(MachineError, match="100 learners ask for 100 CPU"):
        make(num_learners=100, minibatch_turns=100)
    with pytest.raises(MachineError, match="2 learners ask for 2 GPU"):
        make(num_learners=2, gpus_per_learner=1.0)
