import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from oracles import bradley_terry
from tiny_episodes import (
    one_step,
    score,
    some_steps,
    steps_of,
    tiny_episode,
    tiny_episodes,
    transitions_of,
    truth,
    verdict,
)

from rlvlm.core import metrics
from rlvlm.core.errors import NumericsError
from rlvlm.core.judging import Label
from rlvlm.core.steps import Pair, Segment
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Examples, Steps, decided, scored
from rlvlm.preferences.losses import PREFERENCE, SCORE
from rlvlm.preferences.networks import BOUND, ImageInput, ImageNetwork, RewardInput, StateInput
from rlvlm.preferences.queries import draw_pairs, look_alike
from rlvlm.preferences.reward_model import Evidence, LearnedReward, RewardModel, log_odds
from rlvlm.rewards.source import Labelling
from rlvlm.testing import TinyEnv

FRAMES = FrameStore(TinyEnv(), 16)
CONFIG = RewardModelConfig(image_px=16)
EPISODES = tiny_episodes(12)


def build_input(sees: str) -> RewardInput:
    return ImageInput(FRAMES, partial(ImageNetwork, 16)) if sees == "image" else StateInput(4, 2)


def telling_pairs(num: int, segment_steps: int = 1, seed: int = 0) -> list[Pair]:
    pairs = draw_pairs(EPISODES, 4 * num, segment_steps, np.random.default_rng(seed))
    kept = [pair for pair, same in zip(pairs, look_alike(pairs, FRAMES), strict=True) if not same]
    return kept[:num]


def comparisons_of(pairs: list[Pair]) -> Examples:
    comparisons = Examples(num_sides=2)
    comparisons.add(decided(pairs, truth(pairs), "drop"))
    return comparisons


def telling_frames(num: int) -> list[Segment]:
    """Steps of which no two look alike."""
    every = [episode.segment(step, 1) for episode in tiny_episodes(60) for step in range(len(episode))]
    first, _ = FRAMES.distinct(np.concatenate([frame.snapshots for frame in every]))
    return [every[place] for place in np.random.default_rng(0).permutation(first)[:num]]


def scores_of(frames: list[Segment]) -> Examples:
    examples = Examples(num_sides=1)
    examples.add(scored(frames, [score(float(frame.progress[0])) for frame in frames]))
    return examples


@pytest.mark.parametrize(
    ("sees", "segment_steps", "objective"),
    [
        pytest.param("image", 1, PREFERENCE, marks=pytest.mark.slow),
        pytest.param("state", 3, PREFERENCE, marks=pytest.mark.slow),
        ("image", 1, SCORE),
        ("state", 1, SCORE),
    ],
)
def test_the_ensemble_equals_the_plain_oracle(sees, segment_steps, objective):
    is_scored = objective is SCORE
    examples = scores_of(telling_frames(10)) if is_scored else comparisons_of(telling_pairs(10, segment_steps))
    num = len(examples)
    config = RewardModelConfig(
        image_px=16, batch_size=4, max_epochs=1, min_updates=0, stop_accuracy=1.0, lr=3e-4, hold_out_every=0
    )
    model = RewardModel(build_input(sees), config, 5, objective)
    start, rng = model.get_state(), torch.Generator()
    rng.set_state(torch.tensor(start["rng"]))
    orders = [[torch.randperm(num, generator=rng).tolist() for _ in range(3)] for _ in range(6)]  # epoch, member
    found = [model.fit(examples)[metrics.REWARD_LOSS] for _ in range(6)]

    inputs, steps = build_input(sees), examples.steps()
    rows = inputs.rows(steps, np.arange(len(steps))).float()
    rows = rows.reshape(num, examples.num_sides, segment_steps, *rows.shape[1:])
    losses = []
    for member in range(3):
        weights = {name: torch.tensor(value) for name, value in start["members"][member].items()}
        if sees == "state":
            weights["centre"] = rows.flatten(0, 2).mean(0)
            weights["scale"] = ((rows.flatten(0, 2) - weights["centre"]) ** 2).mean(0).sqrt().clamp(min=0.1)
        reward = bradley_terry.picture_reward if sees == "image" else bradley_terry.state_reward
        orders_of_member = [epoch[member] for epoch in orders]
        loss = (bradley_terry.score_loss,) if is_scored else ()
        losses.append(bradley_terry.train(reward, weights, rows, examples.targets, orders_of_member, 4, 3e-4, *loss))
    np.testing.assert_allclose(found, np.mean(losses, axis=0), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sees", ["image", "state"])
def test_a_planted_preference_is_learned(sees):
    model = RewardModel(build_input(sees), CONFIG, seed=0)
    found = model.fit(comparisons_of(telling_pairs(60)))
    steps, progress = steps_of(*EPISODES), np.concatenate([episode.progress for episode in EPISODES])
    rewards = model.ensemble.predict(steps)
    assert rewards.shape == (3, len(progress)) and np.abs(rewards).max() <= BOUND
    pairs = telling_pairs(200, seed=9)
    held_out = comparisons_of(pairs)
    returns = model.ensemble.predict(held_out.steps()).mean(axis=0).reshape(-1, 2)
    right = (returns[:, 1] > returns[:, 0]) == (held_out.targets > 0.5)
    assert right.mean() > 0.9
    assert found[metrics.REWARD_LOSS] < math.log(2)
    assert not np.allclose(rewards[0], rewards[1]), "members differ"


@pytest.mark.slow
def test_a_fit_stops_early_once_it_is_right_and_in_any_case_after_its_updates():
    comparisons = comparisons_of(telling_pairs(40))
    patient = RewardModelConfig(image_px=16, stop_accuracy=0.9, max_epochs=200, max_updates=10_000)
    found = RewardModel(build_input("image"), patient, seed=0).fit(comparisons)
    assert found[metrics.REWARD_ACCURACY] > 0.9 and found[metrics.REWARD_EPOCHS] < 200
    hasty = RewardModelConfig(
        image_px=16, batch_size=8, stop_accuracy=1.0, min_updates=0, max_updates=6, hold_out_every=0
    )
    model = RewardModel(build_input("image"), hasty, seed=0)
    assert model.fit(comparisons)[metrics.REWARD_EPOCHS] == 2  # 40 train: 5 updates, then 1
    assert model.get_state()["adam"]["0"]["step"] == 6


@pytest.mark.slow
def test_a_fit_goes_on_for_its_least_updates_although_it_is_right():
    """Labels that are in order after a step or two would else leave a reward that nobody can see."""
    comparisons = comparisons_of(telling_pairs(40))
    steps = steps_of(*EPISODES)
    spreads = []
    for least in (0, 60):
        config = RewardModelConfig(image_px=16, stop_accuracy=0.6, min_updates=least)
        model = RewardModel(build_input("image"), config, seed=0)
        model.fit(comparisons)
        assert model.get_state()["adam"]["0"]["step"] >= least
        spreads.append(model.ensemble.predict(steps).mean(axis=0).std())
    assert spreads[1] > 3 * spreads[0]


@pytest.mark.slow
def test_rewards_count_only_where_they_tell_labels_they_were_not_trained_on():
    steps = steps_of(*EPISODES)
    pairs = telling_pairs(150)
    good = RewardModel(build_input("image"), CONFIG, seed=0)
    found = good.fit(comparisons_of(pairs))
    assert found[metrics.REWARD_IS_TRUSTED] == 1 and found[metrics.REWARD_PREDICTED] > 0.8
    assert good.is_trusted and good.evidence.num == 75, "half of them"
    coin = Examples(num_sides=2)
    tosses = np.random.default_rng(0).integers(2, size=len(pairs))
    coin.add(decided(pairs, [verdict([Label.LEFT, Label.RIGHT][toss]) for toss in tosses], "drop"))
    fooled = RewardModel(build_input("image"), CONFIG, seed=0)
    found = fooled.fit(coin)
    assert found[metrics.REWARD_IS_TRUSTED] == 0 and found[metrics.REWARD_PREDICTED] < 0.7 and not fooled.is_trusted
    assert fooled.ensemble.predict(steps).std() > 0
    blind = RewardModel(build_input("image"), RewardModelConfig(image_px=16, hold_out_every=0), seed=0)
    assert not blind.is_trusted
    assert blind.fit(coin)[metrics.REWARD_IS_TRUSTED] == 1 and blind.is_trusted


@pytest.mark.slow
def test_every_answer_is_predicted_once_by_a_model_that_has_not_seen_it():
    pairs, predicted = telling_pairs(30), []
    for flip in (False, True):
        model, comparisons = RewardModel(build_input("state"), CONFIG, seed=0), Examples(num_sides=2)
        sides = [Label.LEFT, Label.RIGHT]
        first = [sides[(at % 3 == 0) != (flip and at % 2 == 1)] for at in range(10)]
        comparisons.add(decided(pairs[:10], [verdict(label) for label in first], "drop"))
        model.fit(comparisons)
        assert model.evidence.num == 5
        predicted.append([model.evidence.num_right])
        comparisons.add(decided(pairs[10:], [verdict(sides[flip])] * 20, "drop"))
        model.fit(comparisons)
        assert model.evidence.num == 25
        model.fit(comparisons)
        assert model.evidence.num == 25
    assert predicted[0][0] + predicted[1][0] == 5, "the same guesses, whatever those labels are"


@pytest.mark.slow
def test_a_judge_with_a_position_bias_is_never_trusted():
    model = RewardModel(build_input("image"), RewardModelConfig(image_px=16), seed=0)
    comparisons = Examples(num_sides=2)
    for seed in range(4):
        pairs = telling_pairs(100, seed=seed)
        comparisons.add(decided(pairs, [verdict(Label.LEFT)] * len(pairs), "drop"))
        model.fit(comparisons)
    assert model.evidence.num == 50 + 300 and not model.is_trusted


@pytest.mark.slow
def test_scores_are_learned_until_held_out_ones_are_met():
    config = RewardModelConfig(image_px=16, max_epochs=500, max_updates=2_000, stop_error=0.1)
    model = RewardModel(build_input("image"), config, 0, SCORE)
    found = model.fit(scores_of(telling_frames(100)))
    assert found[metrics.REWARD_HELD_OUT_ERROR] < 0.1 and found[metrics.REWARD_IS_TRUSTED] == 1
    assert 20 <= found[metrics.REWARD_EPOCHS] < 500, "60 updates at least, and no more than it takes"
    steps, progress = steps_of(*EPISODES), np.concatenate([episode.progress for episode in EPISODES])
    np.testing.assert_allclose(model.ensemble.rewards(steps), 2 * progress - 1, atol=0.5)
    assert np.abs(model.ensemble.rewards(steps) - (2 * progress - 1)).mean() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("say", [lambda rng: 0.3, lambda rng: rng.random()], ids=["always the same", "a die"])
def test_scores_that_say_nothing_give_no_reward(say):
    frames, rng = telling_frames(100), np.random.default_rng(3)
    model = RewardModel(build_input("image"), RewardModelConfig(image_px=16), 0, SCORE)
    examples = Examples(num_sides=1)
    examples.add(scored(frames, [score(say(rng)) for _ in frames]))
    assert model.fit(examples)[metrics.REWARD_IS_TRUSTED] == 0 and not model.is_trusted


def test_features_are_the_input_of_the_first_members_last_layer():
    model = RewardModel(build_input("image"), CONFIG, seed=0)
    steps = steps_of(*EPISODES)
    features = model.ensemble.features(steps)
    weights = model.get_state()["members"][0]
    values = features @ weights["layers.9.weight"][0] + weights["layers.9.bias"][0]
    np.testing.assert_allclose(BOUND * np.tanh(values / BOUND), model.ensemble.predict(steps)[0], atol=1e-5)


@pytest.mark.parametrize("output", ["bounded", "normalised"])
def test_inputs_are_scaled_by_the_first_fit_alone_or_normalised_by_each(output):
    model = RewardModel(build_input("state"), RewardModelConfig(max_epochs=1, min_updates=0, output=output), seed=0)
    scales, means = [], []
    for num in (8, 40):
        examples = comparisons_of(telling_pairs(num))
        model.fit(examples)
        steps = examples.steps()
        scales.append(model.get_state()["members"][0]["scale"])
        rows = np.concatenate([steps.next_obs, steps.actions], axis=1)
        means.append(np.maximum(rows.std(axis=0), 0.1))
    np.testing.assert_allclose(scales[0], means[0], rtol=1e-5)
    np.testing.assert_allclose(scales[1], means[output == "normalised"], rtol=1e-5)
    assert not np.allclose(*means)


def test_ties_alone_can_be_fitted():
    comparisons = Examples(num_sides=2)
    comparisons.add(decided(telling_pairs(8), [verdict(Label.TIE)] * 8, "equal"))
    short = RewardModelConfig(image_px=16, max_epochs=2, min_updates=0)
    found = RewardModel(build_input("image"), short, seed=0).fit(comparisons)
    assert found[metrics.REWARD_ACCURACY] == 0 and found[metrics.REWARD_LOSS] == pytest.approx(math.log(2), abs=1e-3)


@pytest.mark.slow
def test_an_image_is_read_once_per_fit(monkeypatch):
    num_read, forward = [], ImageNetwork.forward

    def counted(network: ImageNetwork, pictures: torch.Tensor) -> torch.Tensor:
        num_read.append(len(pictures))
        return forward(network, pictures)

    monkeypatch.setattr(ImageNetwork, "forward", counted)
    model, steps = RewardModel(build_input("image"), CONFIG, seed=0), steps_of(*EPISODES)
    num_kinds = len(FRAMES.distinct(steps.snapshots)[0])
    before = model.ensemble.predict(steps)
    assert num_kinds < 32 and num_read == [32] * 3, "one pass of each member, filled up"
    num_read.clear()
    model.ensemble.rewards(steps)
    model.ensemble.predict(some_steps(steps, slice(7, 30)))
    assert not num_read
    state = model.get_state()
    model.fit(comparisons_of(telling_pairs(8)))
    num_read.clear()
    assert (model.ensemble.predict(steps) != before).any() and num_read == [32] * 3
    model.set_state(state)
    np.testing.assert_array_equal(model.ensemble.predict(steps), before)
    monkeypatch.setattr("rlvlm.preferences.ensemble.MAX_KNOWN", num_kinds // 2)
    model.ensemble.forget()
    few = model.ensemble.predict(some_steps(steps, slice(5)))
    np.testing.assert_array_equal(model.ensemble.predict(steps), before, "more than fit are right all the same")
    np.testing.assert_array_equal(few, before[:, :5])


def test_the_leading_rewards_end_where_too_many_images_differ():
    inputs = ImageInput(FRAMES, partial(ImageNetwork, 16), affordable_kinds=5)
    short = RewardModelConfig(image_px=16, hold_out_every=0, max_epochs=2, min_updates=0)
    model = RewardModel(inputs, short, seed=0)
    model.fit(comparisons_of(telling_pairs(8)))
    steps = steps_of(*EPISODES)
    whole, sixth = model.ensemble.rewards(steps), int(FRAMES.distinct(steps.snapshots)[0][5])
    assert len(np.unique(whole)) > 5 and sixth > 5
    np.testing.assert_array_equal(model.ensemble.leading_rewards(steps), whole[:sixth])
    np.testing.assert_array_equal(model.ensemble.leading_rewards(some_steps(steps, slice(sixth))), whole[:sixth])


def test_a_loss_that_is_not_finite_ends_the_run():
    comparisons = comparisons_of(telling_pairs(8))
    comparisons.steps().next_obs[0] = np.nan
    with pytest.raises(NumericsError, match="loss is nan"):
        RewardModel(build_input("state"), CONFIG, seed=0).fit(comparisons)


def test_the_odds_by_hand():
    # All n right: 2^n * 2 * the integral of p^n over (1/2, 1].
    assert math.exp(log_odds(8, 8)) == pytest.approx(2**9 * (1 - 0.5**9) / 9)
    assert log_odds(0, 0) == pytest.approx(0) and log_odds(10, 20) < 0 and log_odds(0, 3_000) == -math.inf


@pytest.mark.slow
def test_a_fair_coin_passes_in_fewer_runs_than_one_in_a_hundred_however_often_one_looks():
    rng, passed = random.Random(0), 0
    for _ in range(1_000):
        evidence = Evidence()
        evidence.add(rng.random() < 0.5 for _ in range(300))
        passed += evidence.is_enough
    assert passed <= 20, "10 are expected at most, with a standard deviation of 3"


def test_a_good_teacher_passes_at_once_a_poor_one_in_time_and_trust_stays():
    good, poor, rng = Evidence(), Evidence(), random.Random(0)
    good.add([True] * 9)
    assert good.is_enough
    good.add([False] * 50)
    assert good.is_enough and (good.num_right, good.num) == (9, 59)
    poor.add(rng.random() < 0.6 for _ in range(50))
    assert not poor.is_enough
    poor.add(rng.random() < 0.6 for _ in range(950))
    assert poor.is_enough


def test_the_reward_is_the_mean_of_the_members_and_its_version_counts_fits():
    model = RewardModel(StateInput(4, 2), RewardModelConfig(max_epochs=2, hold_out_every=0), seed=0)
    source = LearnedReward(model)
    batch = transitions_of(tiny_episode(0))
    assert not source.is_trusted, "nothing has been fitted"
    assert (source.labelling, source.version) == (Labelling.ON_CHANGE, 0)
    pairs = draw_pairs(tiny_episodes(4), 12, 1, np.random.default_rng(0))
    comparisons = Examples(num_sides=2)
    comparisons.add(decided(pairs, truth(pairs), "equal"))
    model.fit(comparisons)
    one, two, three = model.ensemble.predict(Steps.of(batch))
    rewards = source.label(batch)
    np.testing.assert_allclose(rewards, (one + two + three) / 3, rtol=1e-6)
    assert rewards.shape == (20,) and rewards.dtype == np.float32 and rewards.any()
    assert source.version == 1 and source.is_trusted


def mark_labels(width: float, num: int) -> Examples:
    """Perfect labels of pairs of steps, the block within `width` of the mark at .6: nearer is better."""
    blocks = 0.6 + width * np.random.default_rng(0).uniform(-1, 1, (num, 2))
    pairs = [Pair(left=one_step(-abs(a - 0.6), a), right=one_step(-abs(b - 0.6), b)) for a, b in blocks]
    examples = Examples(num_sides=2)
    examples.add(decided(pairs, truth(pairs), "drop"))
    return examples


@pytest.mark.slow
def test_normalised_rewards_tell_near_from_nearer():
    labels, near = mark_labels(0.6, 800), mark_labels(0.06, 400)
    right, models = {}, {}
    for output in ("bounded", "normalised"):
        config = RewardModelConfig(
            ensemble=1, lr=1e-3, batch_size=64, stop_accuracy=1.0, hold_out_every=0, output=output
        )
        model = models[output] = RewardModel(StateInput(4, 2), config, seed=0)
        for _ in range(7):
            model.fit(labels)
        returns = model.agent_rewards(model.ensemble.rewards(near.steps())).reshape(-1, 2)
        right[output] = ((returns[:, 1] > returns[:, 0]) == (near.targets > 0.5)).mean()
    assert right["normalised"] > 0.95 > right["bounded"], right

    model = models["normalised"]
    rewards = model.agent_rewards(model.ensemble.rewards(labels.steps()))
    assert abs(rewards.mean()) < 0.1 and 0.8 < rewards.std() <= 1 and np.abs(rewards).max() <= BOUND
