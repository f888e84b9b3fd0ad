import logging
from dataclasses import replace

import pytest

from rlvlm.core.errors import UsageError
from rlvlm.envs.gym_cards.config import CardsConfig
from rlvlm.envs.minigrid.config import MiniGridConfig
from rlvlm.envs.registry import few_starts, make_env, task_env, warn_once


def starts(task: str, split, count: int = 120) -> list[bytes]:
    env = make_env(task, replace(task_env(task), split=split, episode_steps=250), 0)
    keys = []
    for seed in range(count):
        env.reset(seed=seed)
        keys.append(env.start_key(env.snapshot()))
    return keys


@pytest.mark.slow
@pytest.mark.parametrize("task", ["number_line", "blackjack", "points24", "doorkey_6x6"])
def test_no_start_is_on_both_sides_and_all_of_them_are_on_one(task):
    learned, held_out = set(starts(task, "training")), set(starts(task, "held_out"))
    assert learned and held_out and not learned & held_out
    everything = starts(task, "all")
    share = sum(key in held_out or (key not in learned) for key in everything) / len(everything)
    assert 0.02 < share < 0.6, "about a fifth is held out, and rare starts may be unknown here"


def test_a_hand_is_the_same_in_any_order_and_suits():
    env = make_env("points24", CardsConfig(split="held_out"), 0)
    env.reset(seed=1)
    state, key = env.get_state(), env.start_key(env.snapshot())
    env.set_state(state | {"cards": state["cards"][::-1].copy()})
    assert env.start_key(env.snapshot()) == key


def test_an_env_with_one_start_says_so():
    sides = []
    for split in ("training", "held_out"):
        try:
            make_env("minigrid/MiniGrid-Empty-6x6-v0", MiniGridConfig(split=split), 0)
            sides.append(split)
        except UsageError as error:
            assert "--env.split all" in error.fix
    assert len(sides) == 1


@pytest.mark.slow
def test_rooms_that_look_alike_are_split_by_where_the_agent_starts():
    learned, held_out = (set(starts("empty_random_5x5", split, 60)) for split in ("training", "held_out"))
    assert learned and held_out and not learned & held_out
    assert few_starts("empty_random_5x5") == 8 * 4, "eight cells but the goal's, four directions"
    assert few_starts("minigrid/MiniGrid-Empty-5x5-v0") == 1, "always the same"
    assert few_starts("lava_gap") == 3, "the gap is in one of three cells"
    assert few_starts("unlock") is few_starts("points24") is few_starts("drawer_open") is None


@pytest.mark.parametrize(("task", "count"), [("number_line", 30), ("ez_points", 7)])
def test_games_with_few_starts_say_how_many(task, count, caplog):
    env = make_env(task, task_env(task), 0)
    assert env.count_starts(600) == count == env.num_starts == few_starts(task)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        make_env(task, replace(task_env(task), split="training"), 0)
    assert f"{task} has {count} different starts" in caplog.text
