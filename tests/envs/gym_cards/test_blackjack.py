from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlvlm.envs.gym_cards.blackjack import Blackjack, total
from rlvlm.envs.gym_cards.config import CardsConfig
from rlvlm.envs.registry import make_env

STAND, HIT = '{"action": "stand"}', '{"action": "hit"}'


def cards(*ranks: int) -> np.ndarray:
    return np.array([[rank, 0] for rank in ranks])


def dealt(dealer: np.ndarray, player: np.ndarray) -> Blackjack:
    env = make_env("blackjack", CardsConfig(), 0)
    env.set_state(env.get_state() | {"dealer": dealer, "player": player})
    return env


def test_hands_worked_by_hand():
    totals = {(1, 13): (21, True), (1, 1, 9): (21, True), (1, 12, 5): (16, False), (9, 7): (16, False)}
    assert {ranks: total(cards(*ranks)) for ranks in totals} == totals
    for dealers, own, reward in (((13, 7), (10, 8), 1.0), ((1, 6), (9, 8), 0.0), ((12, 9), (9, 9), -1.0)):
        _, earned, terminated, _, info = dealt(cards(*dealers), cards(*own)).step(STAND)
        assert (earned, terminated, info["success"]) == (reward, True, reward == 1.0), "a soft 17 is not drawn to"
    _, earned, terminated, _, _ = dealt(cards(2, 3), cards(13, 12, 11)).step(HIT)
    assert (earned, terminated) == (-1.0, True), "21 and a card is too much, or 20 and an ace not, but here it is 30"


def test_a_hit_that_is_survived_earns_nothing_and_an_unreadable_reply_costs_a_tenth():
    env = dealt(cards(2, 3), cards(2, 3))
    turn, earned, terminated, _, _ = env.step(HIT)
    assert earned == 0.0 and not terminated and (turn.snapshot[2:8:2] > 0).all()
    _, earned, terminated, truncated, info = env.step("hit or stand")
    assert (earned, terminated, truncated, info["is_invalid"]) == (-0.1, False, False, True)
    assert any(env.step("?")[3] for _ in range(18))


def win_rate(choose, hands: int) -> float:
    env = make_env("blackjack", CardsConfig(), 0)
    wins = 0
    for seed in range(hands):
        env.reset(seed=seed)
        is_over = False
        while not is_over:
            _, reward, is_over, _, _ = env.step(env.action_text(choose(env)))
        wins += reward == 1.0
    return wins / hands


@pytest.mark.slow
def test_win_rates_are_those_of_the_reference():
    """Simulated there: basic strategy 0.429, always stand 0.381. The standard error here is 0.007 and 0.011."""
    assert win_rate(lambda env: env.expert_action(), 5_000) == pytest.approx(0.429, abs=0.021)
    assert win_rate(lambda env: 0, 2_000) == pytest.approx(0.381, abs=0.033)


def test_the_cards_lie_where_the_reference_draws_them():
    env = make_env("blackjack", CardsConfig(), 0)
    snapshot = np.zeros((1, 44), np.float32)
    snapshot[0, :6] = [5, 0, 7, 1, 12, 3]
    frame = env.draw(snapshot)[0]
    is_card = (frame != frame[-1, -1]).any(-1)
    for y, xs in ((25, (5, 78)), (150, (5, 79))):
        for x in xs:
            assert is_card[y + 49, x : x + 70].all() and not is_card[y + 49, x - 1]
            assert is_card[y : y + 98, x + 35].all() and not is_card[y - 1, x + 35]


def test_the_fifth_card_shows():
    """The reference draws it outside the image."""
    hands = np.zeros((2, 44), np.float32)
    hands[:, :14] = [5, 0, 2, 0, 2, 1, 2, 2, 2, 3, 3, 0, 0, 0]
    hands[1, 10] = 4
    looks = {rules: make_env("blackjack", CardsConfig(rules=rules), 0).draw(hands) for rules in ("strict", "legacy")}
    assert (looks["strict"][0] != looks["strict"][1]).any()
    assert (looks["legacy"][0] == looks["legacy"][1]).all()


@pytest.mark.parametrize("name", ["NumberLine", "Blackjack", "EZPoints", "Points24"])
def test_gymnasium_knows_the_games_by_the_references_ids_and_by_ours(name):
    from gymnasium.utils.env_checker import check_env

    env = gym.make(f"rlvlm.envs.gym_cards.card_images:rlvlm/{name}-v0", render_mode="rgb_array")
    assert type(gym.make(f"gym_cards/{name}-v0").unwrapped) is type(env.unwrapped)
    for action in (-1, 17):
        with pytest.raises(ValueError, match="an action must be one of 0 "):
            env.unwrapped.step(action)
    check_env(env.unwrapped, skip_render_check=False)
    one, two = env.reset(seed=4)[0], env.reset(seed=4)[0]
    assert one.shape == (300, 300, 3) and np.array_equal(one, two)
    assert isinstance(env.action_space, gym.spaces.Discrete)
    assert env.action_space.n == len(env.unwrapped.action_names)  # pyright: ignore[reportAttributeAccessIssue]


def test_infos_have_the_references_keys():
    """As its envs give them: NumberLine's two numbers, cards as (value, face, suit), names such as HK and ST."""
    envs = {name: gym.make(f"rlvlm.envs.gym_cards.card_images:rlvlm/{name}-v0").unwrapped for name in KEYS}
    infos: dict[str, Any] = {name: env.reset(seed=3)[1] for name, env in envs.items()}
    for name, keys in KEYS.items():
        assert keys <= infos[name].keys()
    value, face, suit = infos["Blackjack"]["Player Card"][0]
    assert 1 <= value <= 10 and face in (*"A23456789", "10", *"JQK") and suit in "CDHS"
    numbers = infos["EZPoints"]["Numbers"]
    _, _, _, _, info = envs["EZPoints"].step(numbers[0] - 1)
    assert info["Formula"] == [numbers[0]] and len(info["Cards"]) == 2 and all(len(card) == 2 for card in info["Cards"])


KEYS = {
    "NumberLine": {"Target", "Current"},
    "Blackjack": {"Dealer Card", "Player Card"},
    "EZPoints": {"Cards", "Numbers", "Formula"},
    "Points24": {"Cards", "Numbers", "Formula"},
}
