"""Two learner actors of RLlib against the one in this process, on one update of GRPO; and two runners that play."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from chaos import wait_until

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient
from rlvlm.algorithms.policy_gradient.chunks import ChunkSampler, play_held_out
from rlvlm.algorithms.policy_gradient.config import LossConfig
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from tests.algorithms.policy_gradient.tiny_runs import chunk_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def build(head: str = "tokens", **algo: Any) -> PolicyGradient:
    settings = {"groups": 3, "group_size": 3, "rounds": 1, "minibatches": 1, "kl_target": None} | algo
    settings |= {"max_grad_norm": 1e9}
    sft = ChunkSFTConfig(episodes=8, updates=10)
    algorithm = chunk_config(head=head, episode_steps=16, sft=sft, **settings).build_algo()
    assert isinstance(algorithm, PolicyGradient)
    return algorithm


@pytest.fixture(scope="module")
def several(local_ray):
    """Two runners and two learners; the tests of runners go on with them in their order."""
    algorithm = build(env_runners=2, num_learners=2, groups=5)
    algorithm.prepare(lambda line: None)
    yield algorithm
    algorithm.stop()


def gradients(learner: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in learner.policy.named_parameters() if p.grad is not None}


def update_of(algorithm: PolicyGradient, seed: int) -> list[TokenEpisode]:
    """Episodes of the policy as it is now, and scores that are no matter."""
    algorithm.rollouts.group.start({"num_groups": 3})
    episodes, _ = algorithm.rollouts.group.collect()
    return paid(episodes, seed)


def paid(episodes: list[TokenEpisode], seed: int) -> list[TokenEpisode]:
    rng = np.random.default_rng(seed)
    return [replace(episode, rewards=rng.normal(size=len(episode)).astype(np.float32)) for episode in episodes]


def blind(learner: Any) -> None:
    """From now on `learner` sees what it is shown and cannot draw."""
    learner._env.draw_cameras = None


def test_runners_play_evaluations_too_and_learners_draw_nothing_again(several):
    algorithm: Any = several
    algorithm.policy.images.clear()
    algorithm.learner_group.foreach_learner(blind)
    algorithm.train()
    assert not len(algorithm.policy.images), "images went to a process that does not learn"
    sampler = ChunkSampler(policy=algorithm.policy, env=algorithm._viewer)
    here = play_held_out(sampler, algorithm._viewer.many(), np.arange(1_000_000, 1_000_005), greedy=True)
    algorithm.policy.sample = None  # this process plays nothing
    evaluation = algorithm.evaluate_policy(5)
    assert len(evaluation.episodes) == 5 and metrics.EVAL_SAMPLED_SUCCESS in evaluation.metrics
    for own, other in zip(here, algorithm.last_played, strict=True):
        assert own.seed == other.seed
        np.testing.assert_allclose(own.snapshots, other.snapshots, atol=1e-4)
    turn = {"num_groups": 3, "statistics": algorithm.policy.statistics, "players": algorithm.rollouts.group.alive()}
    algorithm.rollouts.group.start(turn)
    episodes, stored = algorithm.rollouts.group.collect()
    packed = [entry for images in ray.get(stored) for entry in images]
    # nobody has looked at what an episode ended in
    assert {key for key, _, _ in packed} == {key for episode in episodes for key in episode.obs.images[:-1]}
    raw = sum(int(np.prod(shape)) for _, shape, _ in packed)
    sent = sum(len(content) for _, _, content in packed)
    assert sent < raw / 2
    algorithm.learner_group.foreach_learner(lambda learner: delattr(learner._env, "draw_cameras"))


def test_runners_play_side_by_side_and_one_that_is_lost_comes_back(several, tmp_path, monkeypatch):
    algorithm = several
    algorithm.rollouts.group.start(
        {"num_groups": 5, "statistics": algorithm.rollouts.policy.statistics, "players": (1, 2)}
    )
    episodes, images = algorithm.rollouts.group.collect()
    groups = [episode.group for episode in episodes]
    assert [groups.count(group) for group in dict.fromkeys(groups)] == [3] * 5 and max(groups) >= 1_000_000_000_000_000
    assert images  # drawn there, and not again here
    algorithm.learners.call_all("learn", paid(episodes, 0), 0.0, images)
    assert algorithm.report()[metrics.UPDATE_FIRST_RATIO] <= 1e-5  # they played the learner's own policy
    before = algorithm.report()[metrics.EPISODES]
    algorithm.train()
    assert algorithm.report()[metrics.EPISODES] - before == 15
    algorithm.save_checkpoint(str(tmp_path / "half"))
    reports = []
    for _ in range(2):  # the second time from the checkpoint, back from where the first one led
        algorithm.train()
        reports.append(algorithm.report())
        for clock in (metrics.ROLLOUT_S, metrics.ROLLOUT_WAIT_S):
            assert reports[-1].pop(clock) > 0
        reports[-1].pop(metrics.UPDATE_S, None)
        algorithm.load_checkpoint(str(tmp_path / "half"))
    assert reports[0] == reports[1]
    group = algorithm.rollouts.group

    def alive_after_a_whole_turn() -> tuple[int, ...]:
        before = algorithm.report()[metrics.EPISODES]
        algorithm.train()
        assert algorithm.report()[metrics.EPISODES] - before == 15
        return group.alive()

    ray.kill(algorithm.env_runner_group._worker_manager.actors()[1], no_restart=False)
    with monkeypatch.context() as slow_start:
        slow_start.setattr(group, "revive", list)
        wait_until(lambda: alive_after_a_whole_turn() == (2,), "the other one plays its groups")
    wait_until(lambda: alive_after_a_whole_turn() == (1, 2), "it is back")


@pytest.mark.parametrize("head", ["tokens", "flow"])
def test_two_learners_have_the_gradient_of_one_and_go_on_to_the_bit(local_ray, tmp_path, head):
    loss = LossConfig(average="trajectory", kl_weight=0.05)
    one, two = build(head, loss=loss), build(head, loss=loss, num_learners=2)
    for algorithm in (one, two):
        algorithm.prepare(lambda line: None)
    # the supervised start, too: ten updates, whose gradients are summed in another order; a flow's noise is each
    # learner's own, so there the losses are alike and no more
    started = [algorithm.policy.trained_state() for algorithm in (one, two)]
    for name, value in started[0].items() if head == "tokens" else ():
        torch.testing.assert_close(started[1][name], value, atol=2e-3, rtol=0, msg=name)
    alike = 1e-4 if head == "tokens" else 0.2
    assert two.report()[metrics.SFT_LOSS] == pytest.approx(one.report()[metrics.SFT_LOSS], rel=alike)
    two.policy.load_trained_state(started[0])  # alike to the last digit from here on
    two.learners.begin_as(two.policy, two.rollouts.bucket_bytes)
    two.learners.call_all("begin")
    update = update_of(one, 0)
    for algorithm in (one, two):
        algorithm.learners.call_all("learn", update, 0.0)
    alone, *both = (
        answer.get() for algorithm in (one, two) for answer in algorithm.learner_group.foreach_learner(gradients)
    )
    assert len(both) == 2 and max(float(gradient.abs().max()) for gradient in alone.values()) > 1e-3
    for name, gradient in alone.items():
        for other in both:
            assert (other[name] - gradient).abs().max() <= 1e-5 * max(1.0, float(gradient.abs().max())), name

    def weights():
        return [got.get() for got in two.learner_group.foreach_learner(lambda one: one.policy.trained_state())]

    left, right = weights()
    assert all(torch.equal(value, right[name]) for name, value in left.items()), "they take the same step"
    reports = one.learners.call("report"), two.learners.call("report")
    for name, value in reports[0].items():
        assert reports[1][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name

    # a checkpoint of the two
    two._sync_weights()
    assert two.report()[metrics.UPDATE_FIRST_RATIO] <= 1e-5, "the learners must see what was sampled here"
    two.save_checkpoint(str(tmp_path / "saved"))
    ends = []
    for _ in range(2):  # the second time from the checkpoint, back from where the first one led
        two.learners.call_all("learn", update_of(two, 1), 0.0)
        ends.append(weights()[0])
        two.load_checkpoint(str(tmp_path / "saved"))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    for algorithm in (one, two):
        algorithm.stop()
