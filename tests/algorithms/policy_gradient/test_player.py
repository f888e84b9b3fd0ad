import dataclasses

import numpy as np
import pytest

from rlvlm.algorithms.evaluation import FIRST_SEED
from rlvlm.algorithms.policy_gradient.player import is_strict_success, script_player, stands_still, turn_player
from rlvlm.algorithms.policy_gradient.turns import Actor, play_turns
from rlvlm.algorithms.sft_config import ReplySFTConfig
from rlvlm.algorithms.sft_replies import demonstrate
from rlvlm.core import metrics
from rlvlm.core.episodes import Observations, TokenEpisode
from rlvlm.demonstrations.collect import RandomPlayer, ScriptedExpert
from rlvlm.envs.registry import make_env, task_env
from rlvlm.envs.slots import EnvSlot
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.engine import PolicyEngine
from tests.tiny_policy import tiny_policy


def make_slot() -> EnvSlot:
    return EnvSlot(make_env("number_line", task_env("number_line"), 0), "number_line")


def test_one_wrong_step_fails_the_strict_test_and_reaches_the_goal_all_the_same():
    slot = make_slot()
    for seed in range(20):
        slot.begin(seed)
        legal = slot.env.expert_action()
        slot.play(slot.env.action_text(1 - legal))
        while not slot.is_over:
            slot.play(slot.env.action_text(slot.env.expert_action()))
        assert slot.episode().success.any() and not is_strict_success(slot.episode())
    assert all(is_strict_success(episode) for episode in demonstrate(slot, ReplySFTConfig(turns=20), 0))


def test_an_evaluation_is_compared_with_the_expert_and_with_random_actions():
    expert, random = (
        script_player(script, make_slot()).play(range(6)) for script in (ScriptedExpert(), RandomPlayer())
    )
    assert all(episode.ends_in_success for episode in expert)
    assert sum(len(episode.env_rewards) for episode in random) > sum(len(episode.env_rewards) for episode in expert)


@pytest.mark.slow
def test_an_episode_does_not_depend_on_its_neighbours(tmp_path):
    actor = Actor(PolicyEngine(tiny_policy(tmp_path)), ReplySampling(max_new_tokens=6))
    together = play_turns(actor, make_slot, [5, 6, 7], 3, greedy=False)
    alone = play_turns(actor, make_slot, [7], 1, greedy=False)
    texts = [[reply.text for reply in episode.replies] for episode in (together[2], alone[0])]
    assert texts[0] == texts[1]
    assert [episode.seed for episode in together] == [5, 6, 7]
    assert len(together[0].answers) == len(together[0])


@pytest.mark.slow
def test_an_evaluation_counts_both_decodings(tmp_path):
    actor = Actor(PolicyEngine(tiny_policy(tmp_path)), ReplySampling(max_new_tokens=4))
    evaluation, played = turn_player(actor, make_slot, 2).evaluate(2)
    assert len(evaluation.episodes) == len(played) == 2
    assert evaluation.metrics[metrics.EVAL_INVALID] == 1  # four random tokens are no reply
    assert evaluation.metrics[metrics.EVAL_SAMPLED_INVALID] == 1
    assert evaluation.metrics[metrics.EVAL_STANDS_STILL] == 1, "so nothing ever changes, nor does the reply"
    assert evaluation.metrics[metrics.EVAL_SAMPLED_STRICT_SUCCESS] == 0
    assert evaluation.metrics[metrics.EVAL_SAMPLED_STRICT_HIGH] == pytest.approx(0.6576, abs=1e-3)
    assert evaluation.metrics[metrics.EVAL_REPLY_TOKENS] == 4


def test_standing_still_by_hand(tmp_path):
    """On the line from 0 to 5 a minus at 0 changes nothing: who goes on with it stands still, who goes up does not."""

    actor = Actor(PolicyEngine(tiny_policy(tmp_path)), ReplySampling(max_new_tokens=2))
    (whole,) = play_turns(actor, make_slot, [5], 1, greedy=True)

    def cut(images: list[bytes], texts: list[str], terminated: bool = False) -> TokenEpisode:
        seen = Observations(
            images=(*images, b"after"), texts=(*texts, ""), proprio=np.zeros((len(images) + 1, 0), np.float32),
            snapshots=np.zeros((len(images) + 1, 1), np.float32),
        )  # fmt: skip
        return dataclasses.replace(whole, obs=seen, steps=np.ones(len(images), np.int64), terminated=terminated)

    assert stands_still(cut([b"1", b"0", b"0"], ["a"] * 3))
    assert not stands_still(cut([b"1", b"0", b"0"], ["a"] * 3, terminated=True)), "the env ended it"
    assert not stands_still(cut([b"0", b"0", b"1"], ["a"] * 3)), "it got out"
    assert not stands_still(cut([b"0", b"0"], ["a", "b"])), "it is told something else"
    assert not stands_still(cut([b"0"], ["a"]))


@pytest.mark.slow
def test_an_evaluation_counts_milestones_of_any_turn(tmp_path):
    actor = Actor(PolicyEngine(tiny_policy(tmp_path)), ReplySampling(max_new_tokens=4))
    slot = make_slot()
    begun = [0.0] * 4
    for place in range(4):  # replies that cannot be read leave everything where it was
        slot.begin(FIRST_SEED + place)
        begun[place] = slot.env.progress()
    half = sorted(begun)[2]
    player = turn_player(actor, make_slot, 2, milestones={"half": half, "all": 1.0})
    measured = player.evaluate(4)[0].metrics
    assert measured[metrics.EVAL_REACHED + "half"] == sum(one >= half for one in begun) / 4
    assert measured[metrics.EVAL_REACHED + "all"] == measured[metrics.EVAL_SAMPLED_REACHED + "all"] == 0
