import numpy as np

from rlvlm.envs.gym_cards.config import CardsConfig
from rlvlm.envs.gym_cards.number_line import NumberLine
from rlvlm.envs.registry import make_env

MINUS, PLUS = '{"action": "-"}', '{"action": "+"}'


def at(current: int, target: int, **fields) -> NumberLine:
    env = make_env("number_line", CardsConfig(**fields), 0)
    state = env.get_state()
    env.set_state(state | {"numbers": np.array([current, target, abs(target - current), 0])})
    return env


def test_a_game_worked_by_hand():
    """From 1 to 3: a wrong move costs 1, a nearer one nothing, and the last one earns 1."""
    env = at(1, 3)
    outcomes = [env.step(text) for text in (MINUS, PLUS, PLUS, PLUS)]
    assert [outcome[1] for outcome in outcomes] == [-1.0, 0.0, 0.0, 1.0]
    assert [outcome[2] for outcome in outcomes] == [False, False, False, True]
    assert [outcome[4]["progress"] for outcome in outcomes] == [0.0, 0.0, 0.5, 1.0]
    assert outcomes[-1][4]["success"] and outcomes[-1][0].snapshot.tolist() == [3.0, 3.0]


def test_a_move_against_the_end_and_an_unreadable_reply_cost_one_and_ten_turns_are_all():
    env = at(0, 1)
    assert env.step(MINUS)[1] == -1.0 and env.snapshot().tolist() == [0.0, 1.0]
    *rest, (_, reward, terminated, truncated, info) = [env.step("no idea") for _ in range(9)]
    assert reward == -1.0 and info["is_invalid"] and truncated and not terminated
    assert not any(outcome[3] for outcome in rest)


def test_the_expert_never_wastes_a_move():
    env = make_env("number_line", CardsConfig(), 0)
    for seed in range(100):
        env.reset(seed=seed)
        total, terminated, turns = 0.0, False, 0
        distance = abs(float(np.diff(env.snapshot())[0]))
        while not terminated:
            _, reward, terminated, _, _ = env.step(env.action_text(env.expert_action(), env.expert_thought()))
            total, turns = total + reward, turns + 1
        assert total == 1.0 and turns == distance


def test_the_numbers_stand_where_the_reference_writes_them():
    env = make_env("number_line", CardsConfig(), 0)
    frames = env.draw(np.array([[0, 0], [5, 0], [0, 5]], np.float32))
    changed = [np.argwhere((frames[0] != frame).any(-1)) for frame in frames[1:]]
    assert 180 <= changed[0][:, 0].min() < changed[0][:, 0].max() < 220, "the current number, in the lower line"
    assert 60 <= changed[1][:, 0].min() < changed[1][:, 0].max() < 100, "the target, in the upper line"
    assert (frames[:, :60] == 255).all() and (frames[:, :, :30] == 255).all()


def test_legacy_rules_answer_an_unreadable_reply_with_a_random_action():
    moves = set()
    for seed in range(20):
        env = at(2, 5, rules="legacy")
        env.np_random.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        _, _, _, _, info = env.step("no idea")
        assert info["is_invalid"]
        moves.add(info["action"])
    assert moves == {0, 1}
