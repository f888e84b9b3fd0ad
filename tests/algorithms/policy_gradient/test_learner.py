"""One update of GRPO on real episodes: where it starts, where it moves, and what it remembers."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from rlvlm.algorithms.checkpoint import write_parts
from rlvlm.algorithms.policy_gradient.chunks import ChunkRunner
from rlvlm.algorithms.policy_gradient.config import AdvantageConfig, LossConfig, chunk_defaults
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.policy_gradient.losses import POLICY_LOSSES, PolicyLoss, clipped
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.policies.vla.tokens import ActionScale
from tests.algorithms.policy_gradient.tiny_runs import chunk_config, learner_of

SCALE = ActionScale(low=(-1.0,) * 6 + (0.0,), high=(1.0,) * 7, scaled=(True,) * 6 + (False,))


def make(seed: int = 0, **algo: Any) -> tuple[TokenLearner, ChunkRunner]:
    settings = {"warm_up": 0, "groups": 2, "group_size": 4, **algo}
    settings.setdefault("advantage", AdvantageConfig(estimator="grpo", divide_by_std=False))
    return learner_of(chunk_config(episode_steps=16, seed=seed, **settings))


def sample(learner: TokenLearner, runner: ChunkRunner, scale: ActionScale = SCALE) -> list[TokenEpisode]:
    """Two groups of four whose advantages are 1, -1, 0.5 and -0.5."""
    policy: Any = learner.policy
    runner.policy, policy.scale = policy, scale
    episodes, _ = runner.sample(num_groups=2)
    return [paid(one, score) for one, score in zip(episodes, [1, -1, 0.5, -0.5] * 2, strict=True)]


def paid(episode: TokenEpisode, score: float) -> TokenEpisode:
    rewards = np.zeros(len(episode), np.float32)
    rewards[-1] = score
    return replace(episode, rewards=rewards)


def log_prob_of_good_tokens(learner: TokenLearner, episodes: list[TokenEpisode]) -> float:
    batch = learner.batches.make(episodes)
    found = learner.policy.log_probs(batch.obs, batch.answers).log_probs * batch.weights * batch.advantages[:, None]
    return found.sum().item()


def _extra(value: Callable[[int, int], Any]) -> PolicyLoss:
    """A loss that asks for `own`: `value` of the numbers of turns and of an answer's elements."""
    return PolicyLoss(clipped, lambda episode: {"own": value(len(episode), len(episode.log_probs[0]))})


@pytest.mark.slow
def test_a_tensor_of_an_own_loss_has_a_number_for_each_turn_or_each_element(monkeypatch):
    learner, runner = make(loss=LossConfig(policy="own"))
    update = sample(learner, runner)
    turns, size = sum(map(len, update)), len(update[0].log_probs[0])
    for value, shape in (
        (lambda turns, size: np.arange(turns), [turns]),
        (lambda turns, size: [np.arange(size)] * turns, [turns, size]),
    ):
        monkeypatch.setitem(POLICY_LOSSES, "own", _extra(value))
        assert list(learner.batches.make(update).extras["own"].shape) == shape
    for value, error, said in (
        (lambda turns, size: np.arange(turns + 1), UsageError, "one number for each turn, as episode.turn_rewards"),
        (
            lambda turns, size: [np.arange(size - 1)] * turns,
            UsageError,
            "one number for each turn, as episode.turn_rewards",
        ),
        (lambda turns, size: np.full(turns, np.nan), NumericsError, "own of algo.loss.policy own are not finite"),
    ):
        monkeypatch.setitem(POLICY_LOSSES, "own", _extra(value))
        with pytest.raises(error) as caught:
            learner.batches.make(update)
        assert said in f"{caught.value} {caught.value.fix}"


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_named_and_its_metrics_are_means(monkeypatch):
    learner, runner = make(loss=LossConfig(policy="own"))
    update = sample(learner, runner)
    monkeypatch.setitem(POLICY_LOSSES, "own", PolicyLoss(lambda batch, config: (batch.log_probs / 0, {})))
    with pytest.raises(NumericsError, match=r"algo.loss.policy own\) .* is not finite"):
        learner.learn(update, 0.0)
    half = PolicyLoss(lambda batch, config: (clipped(batch, config)[0], {"half": batch.weights.new_tensor(0.5)}))
    monkeypatch.setitem(POLICY_LOSSES, "own", half)
    learner, runner = make(loss=LossConfig(policy="own"))
    learner.learn(sample(learner, runner), 0.0)
    assert learner.report()["loss/half"] == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
def test_episodes_may_lie_in_read_only_memory():
    """As those that came through Ray's object store."""
    learner, runner = make()
    update = sample(learner, runner)
    for episode in update:
        columns = (getattr(episode, field.name) for field in fields(episode))
        for array in (one for column in columns for one in (column if isinstance(column, tuple) else (column,))):
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
    torch.set_warn_always(True)  # not only where it is the first of the process
    try:
        learner.learn(update, 0.0)
    finally:
        torch.set_warn_always(False)


@pytest.mark.slow
def test_an_update_makes_good_replies_more_likely():
    learner, runner = make(lr=1e-3)
    update = sample(learner, runner)
    before = log_prob_of_good_tokens(learner, update)
    learner.learn(update, 0.0)
    assert log_prob_of_good_tokens(learner, update) > before


@pytest.mark.slow
def test_dimensions_that_demonstrations_hardly_use_are_not_explored_and_teach_nothing():
    still = ActionScale(
        low=(-1.0, -1.0, -0.1, -0.2, -0.2, -0.2, 0.0), high=(1.0, 0.0, 0.1, 0.19, 0.21, 0.0, 1.0), scaled=SCALE.scaled
    )
    is_explored = np.tile([True, True, False, False, True, False, True], 8)
    assert still.share_used(-np.ones(7), np.ones(7)).tolist() == pytest.approx([1, 0.5, 0.1, 0.195, 0.205, 0.1, 1])
    learner, runner = make(min_range=0.2)
    update = sample(learner, runner, still)
    drawn = np.concatenate([episode.log_probs for episode in update])
    assert (drawn[:, is_explored] < 0).all() and (drawn[:, ~is_explored] == 0).all()
    weights = learner.batches.make(update).weights
    assert (weights[:, ~is_explored] == 0).all() and (weights[:, is_explored] > 0).any()
    learner.learn(update, 0.0)
    assert learner.report()[metrics.UPDATE_FIRST_RATIO] <= 1e-5

    other, _ = make(min_range=0.2)  # whatever was taken in the other dimensions: the gradient is of what was drawn
    taken = [
        tuple({"bins": np.where(is_explored, answer["bins"], 7).astype(np.int16)} for answer in one.answers)
        for one in update
    ]
    other.learn([replace(one, answers=own) for one, own in zip(update, taken, strict=True)], 0.0)
    for name, value in learner.policy.trained_state().items():
        np.testing.assert_array_equal(other.policy.trained_state()[name], value, err_msg=name)


@pytest.mark.slow
def test_the_step_size_follows_how_far_the_policy_moves():
    learner, runner = make(lr=1e-2, kl_target=1e-3)
    update = sample(learner, runner)
    rates = []
    for _ in range(3):
        learner.learn(update, 0.0)
        rates.append(learner.report()[metrics.UPDATE_LR])
    assert rates[0] > rates[1] > rates[2]
    timid, runner = make(lr=1e-7, kl_target=1.0)
    update = sample(timid, runner)
    for _ in range(2):
        timid.learn(update, 0.0)
    assert timid.report()[metrics.UPDATE_LR] == pytest.approx(1.3e-7)


@pytest.mark.slow
def test_an_update_that_has_moved_the_policy_too_far_takes_no_further_step(monkeypatch):
    learner, runner = make(lr=1e-2, kl_target=1e-3)
    update, taken, step = sample(learner, runner), [], learner._optimizer.step
    monkeypatch.setattr(learner._optimizer, "step", lambda: (taken.append(1), step())[1])
    learner.learn(update, 0.0)
    assert learner.report()[metrics.UPDATE_KL] > 2e-3 and len(taken) == 1, "the first is taken before any is measured"


def test_one_gradient_step_says_nothing_of_how_far_the_policy_moves():
    with pytest.raises(ValueError, match="kl_target needs updates of two gradient steps"):
        chunk_defaults(minibatches=1)
    chunk_defaults(minibatches=1, kl_target=None)


@pytest.mark.slow
def test_an_update_of_few_groups_moves_the_policy_less():
    rates = []
    for wanted, target in ((2, 0.3), (8, 0.3), (8, None)):
        learner, runner = make(groups=wanted, kl_target=target, lr=1e-4)
        learner.learn(sample(learner, runner), 0.0)
        rates.append(learner.report()[metrics.UPDATE_LR])
    assert rates == pytest.approx([1e-4, 0.5e-4, 1e-4])


@pytest.mark.slow
def test_the_step_size_falls_over_the_run_and_its_target_with_its_square():
    rates = []
    for progress in (0.0, 0.5, 1.0, 2.0):
        learner, runner = make(lr=1e-4, min_lr_ratio=0.2)
        learner.learn(sample(learner, runner), progress)
        rates.append(learner.report()[metrics.UPDATE_LR])
    assert rates == pytest.approx([1e-4, 0.6e-4, 0.2e-4, 0.2e-4])
    late, runner = make(lr=2e-3, min_lr_ratio=0.5, kl_target=4e-3)
    small, _ = make(lr=1e-3, kl_target=1e-3)
    update = sample(late, runner)
    for _ in range(3):
        late.learn(update, 1.0)
        small.learn(update, 0.0)
    assert late.report()[metrics.UPDATE_LR] == pytest.approx(small.report()[metrics.UPDATE_LR])
    assert late.report()[metrics.UPDATE_LR] != pytest.approx(1e-3), "it was adapted"


def test_a_learner_that_does_not_see_the_checkpoints_disk_hands_its_part_over(tmp_path):
    learner, _ = make()
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    learner.begin_writing(str(here), has_start=False)
    own = learner.written(str(here), waits=True)
    assert sorted(own.digests) == sorted(file.name for file in here.iterdir())
    learner.begin_writing(str(elsewhere), has_start=False)
    handed = learner.written(str(elsewhere), waits=False)
    assert not handed.digests and not elsewhere.exists()
    assert write_parts(tmp_path, handed.unwritten) == own.digests
    assert learner.written(str(here), waits=True).error, "what was begun since has taken its place"
