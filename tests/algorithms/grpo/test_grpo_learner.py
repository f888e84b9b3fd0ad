"""One update of GRPO on real episodes: where it starts, where it moves, and what it remembers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rlvlm.algorithms.grpo.algorithm import VLAGRPOConfig
from rlvlm.algorithms.grpo.config import GRPOConfig, LossConfig
from rlvlm.algorithms.grpo.credit.groups import UpdateBatch
from rlvlm.algorithms.grpo.learner import GRPOLearner
from rlvlm.algorithms.grpo.rollouts import ObsProcessor
from rlvlm.algorithms.grpo.runner import GroupRunner
from rlvlm.core import metrics
from rlvlm.core.errors import NumericsError
from rlvlm.envs.config import EnvConfig
from rlvlm.policies.vla.config import PocketVLAConfig, VLAConfig
from rlvlm.policies.vla.sampling import log_probs_of
from rlvlm.policies.vla.tokens import ActionScale

SCALE = ActionScale(low=(-1.0,) * 6 + (0.0,), high=(1.0,) * 7, scaled=(True,) * 6 + (False,))


def make(seed: int = 0, **grpo: object) -> tuple[GRPOLearner, GroupRunner]:
    config = (
        VLAGRPOConfig()
        .envs(task="push_block", env_settings=EnvConfig(episode_steps=16))
        .learning(
            policy=VLAConfig(pocket=PocketVLAConfig(image_px=16, hidden=32)),
            grpo=GRPOConfig(**{"warm_up": 0, "groups": 2, "group_size": 4, **grpo}),
        )  # pyright: ignore[reportArgumentType]
        .debugging(seed=seed)
    )
    runner = GroupRunner(config=config)
    torch.manual_seed(seed)
    learner = GRPOLearner(config=config, module_spec=config.get_multi_rl_module_spec(spaces=runner.get_spaces()))
    learner.build()
    learner.watch(ObsProcessor(learner.policy, runner.chunk_env), runner.chunk_env)  # pyright: ignore[reportArgumentType]
    assert learner.module is not None and DEFAULT_MODULE_ID in learner.module
    return learner, runner


def sample(learner: GRPOLearner, runner: GroupRunner, scale: ActionScale = SCALE) -> UpdateBatch:
    runner.policy, runner.obs_processor = learner.policy, learner.obs_processor
    episodes = runner.sample(num_groups=2, scale=scale).episodes
    advantages = np.array([1, -1, 0.5, -0.5] * 2, np.float32)
    return UpdateBatch(episodes=episodes, advantages=advantages.repeat([len(episode.steps) for episode in episodes]))


def log_prob_of_good_tokens(learner: GRPOLearner, update: UpdateBatch) -> float:
    train_batch = learner._train_batch(update)
    logits = learner.policy(train_batch.images, train_batch.words, train_batch.proprio)
    found = log_probs_of(logits, train_batch.bins, 1.0) * train_batch.weights * train_batch.advantages[:, None]
    return found.sum().item()


def test_the_first_minibatch_has_ratios_of_one() -> None:
    learner, runner = make()
    learner.learn(sample(learner, runner), 0.0)
    assert learner.report()[metrics.GRPO_FIRST_RATIO] <= 1e-5
    assert learner.report()[metrics.GRPO_UPDATES] == 1


def test_an_update_makes_what_did_well_more_likely() -> None:
    learner, runner = make(lr=1e-3)
    update = sample(learner, runner)
    before = log_prob_of_good_tokens(learner, update)
    learner.learn(update, 0.0)
    assert log_prob_of_good_tokens(learner, update) > before


def test_chunks_that_are_not_chosen_teach_nothing() -> None:
    weights = []
    for odd in (0.0, np.nan):
        learner, runner = make(lr=1e-3)
        update = sample(learner, runner)
        chosen = np.arange(0, len(update.advantages), 3)
        advantages = np.full_like(update.advantages, odd)
        advantages[chosen] = update.advantages[chosen]
        learner.learn(replace(update, advantages=advantages, chosen=chosen), 0.0)
        assert learner.report()[metrics.GRPO_CHUNKS] == len(chosen)
        weights.append(learner.weights())
    for name, value in weights[0].items():
        np.testing.assert_array_equal(weights[1][name], value, err_msg=name)


def test_dimensions_that_demonstrations_hardly_use_are_not_explored_and_teach_nothing() -> None:
    still = ActionScale(
        low=(-1.0, -1.0, -0.1, -0.2, -0.2, -0.2, 0.0), high=(1.0, 0.0, 0.1, 0.19, 0.21, 0.0, 1.0), scaled=SCALE.scaled
    )
    is_explored = np.tile([True, True, False, False, True, False, True], 8)
    assert still.share_used(-np.ones(7), np.ones(7)).tolist() == pytest.approx([1, 0.5, 0.1, 0.195, 0.205, 0.1, 1])
    learner, runner = make(least_range=0.2)
    update = sample(learner, runner, still)
    drawn = np.concatenate([episode.log_probs for episode in update.episodes])
    assert (drawn[:, is_explored] < 0).all() and (drawn[:, ~is_explored] == 0).all()
    weights = learner._train_batch(update).weights
    assert (weights[:, ~is_explored] == 0).all() and (weights[:, is_explored] > 0).any()
    learner.learn(update, 0.0)
    assert learner.report()[metrics.GRPO_FIRST_RATIO] <= 1e-5

    other, _ = make(least_range=0.2)  # whatever was taken in the other dimensions: the gradient is of what was drawn
    bins = [np.where(is_explored, one.bins, 7).astype(np.int16) for one in update.episodes]
    episodes = [replace(one, bins=own) for one, own in zip(update.episodes, bins, strict=True)]
    other.learn(replace(update, episodes=episodes), 0.0)
    for name, value in learner.weights().items():
        np.testing.assert_array_equal(other.weights()[name], value, err_msg=name)


@pytest.mark.slow
def test_the_step_size_follows_how_far_the_policy_moves() -> None:
    learner, runner = make(lr=1e-2, kl_target=1e-3)
    update = sample(learner, runner)
    rates = []
    for _ in range(3):
        learner.learn(update, 0.0)
        rates.append(learner.report()[metrics.GRPO_LR])
    assert rates[0] > rates[1] > rates[2]
    timid, runner = make(lr=1e-7, kl_target=1.0)
    update = sample(timid, runner)
    for _ in range(2):
        timid.learn(update, 0.0)
    assert timid.report()[metrics.GRPO_LR] == pytest.approx(1.3e-7)


def test_an_update_that_has_moved_the_policy_too_far_takes_no_further_step(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, runner = make(lr=1e-2, kl_target=1e-3)
    update, taken, step = sample(learner, runner), [], learner._optimizer.step
    monkeypatch.setattr(learner._optimizer, "step", lambda: (taken.append(1), step())[1])
    learner.learn(update, 0.0)
    assert learner.report()[metrics.GRPO_KL] > 2e-3 and len(taken) == 1, "the first is taken before any is measured"


def test_one_gradient_step_says_nothing_of_how_far_the_policy_moves() -> None:
    with pytest.raises(ValueError, match="kl_target needs updates of two gradient steps"):
        GRPOConfig(minibatches=1)
    GRPOConfig(minibatches=1, kl_target=None)
    learner, runner = make(lr=1e-4)
    update = replace(sample(learner, runner), chosen=np.array([0]))  # a single chunk: one step, however many are wanted
    for _ in range(3):
        learner.learn(update, 0.0)
    assert learner.report()[metrics.GRPO_LR] == pytest.approx(1e-4)


@pytest.mark.slow
def test_an_update_of_few_groups_moves_the_policy_less() -> None:
    rates = []
    for wanted, target in ((2, 0.3), (8, 0.3), (8, None)):
        learner, runner = make(groups=wanted, kl_target=target, lr=1e-4)
        learner.learn(sample(learner, runner), 0.0)
        rates.append(learner.report()[metrics.GRPO_LR])
    assert rates == pytest.approx([1e-4, 0.5e-4, 1e-4])


@pytest.mark.slow
def test_the_step_size_falls_over_the_run_and_what_it_aims_at_with_its_square() -> None:
    rates = []
    for progress in (0.0, 0.5, 1.0, 2.0):
        learner, runner = make(lr=1e-4, final_lr=0.2)
        learner.learn(sample(learner, runner), progress)
        rates.append(learner.report()[metrics.GRPO_LR])
    assert rates == pytest.approx([1e-4, 0.6e-4, 0.2e-4, 0.2e-4])
    late, runner = make(lr=2e-3, final_lr=0.5, kl_target=4e-3)
    small, _ = make(lr=1e-3, kl_target=1e-3)
    update = sample(late, runner)
    for _ in range(3):
        late.learn(update, 1.0)
        small.learn(update, 0.0)
    assert late.report()[metrics.GRPO_LR] == pytest.approx(small.report()[metrics.GRPO_LR])
    assert late.report()[metrics.GRPO_LR] != pytest.approx(1e-3), "it was adapted"


def test_an_update_that_moved_the_policy_too_far_stops() -> None:
    learner, runner = make(lr=0.05, kl_target=1e-4, epochs=5)
    taken: list[int] = []
    step = learner._optimizer.step
    learner._optimizer.step = lambda *a, **k: (taken.append(1), step(*a, **k))[1]  # pyright: ignore[reportAttributeAccessIssue]
    learner.learn(sample(learner, runner), 0.0)
    assert len(taken) < 5


@pytest.mark.slow
def test_a_weight_on_kl_pulls_back_to_the_start() -> None:
    learner, runner = make(loss=LossConfig(kl_weight=50.0), kl_target=None, lr=3e-3)
    free, _ = make(kl_target=None, lr=3e-3)
    update = sample(learner, runner)
    start = {name: value.clone() for name, value in learner.policy.state_dict().items()}
    for _ in range(4):
        learner.learn(update, 0.0)
        free.learn(update, 0.0)

    def moved(one: GRPOLearner) -> float:
        train_batch = one._train_batch(update)
        now = log_probs_of(
            one.policy(train_batch.images, train_batch.words, train_batch.proprio), train_batch.bins, 1.0
        )
        return (now - train_batch.old_log_probs).abs().mean().item()

    assert moved(learner) < moved(free)
    assert any(not torch.equal(value, start[name]) for name, value in learner.policy.state_dict().items())


@pytest.mark.slow
def test_a_saved_learner_goes_on_to_the_bit() -> None:
    learner, runner = make(loss=LossConfig(kl_weight=0.1))
    first, second = sample(learner, runner), sample(learner, runner)
    learner.learn(first, 0.0)
    tree, runner_tree = learner.save_tree(), runner.save_tree()
    tree = {**tree, "policy": {name: value.copy() for name, value in tree["policy"].items()}}
    tree["adam"] = {name: {key: v.copy() for key, v in moments.items()} for name, moments in tree["adam"].items()}
    learner.learn(second, 0.0)
    third = sample(learner, runner)
    other, other_runner = make(seed=1, loss=LossConfig(kl_weight=0.1))
    other.load_tree(tree)
    other_runner.load_tree(runner_tree)
    other.learn(second, 0.0)
    for name, value in learner.policy.state_dict().items():
        assert torch.equal(value, other.policy.state_dict()[name]), name
    assert other.report() == learner.report()
    again = sample(other, other_runner)
    assert all(np.array_equal(one.bins, two.bins) for one, two in zip(third.episodes, again.episodes, strict=True))


def test_numbers_that_are_not_finite_stop_the_run() -> None:
    learner, runner = make()
    update = sample(learner, runner)
    spoiled = UpdateBatch(episodes=update.episodes, advantages=np.full_like(update.advantages, np.nan))
    with pytest.raises(NumericsError, match="is not finite"):
        learner.learn(spoiled, 0.0)
