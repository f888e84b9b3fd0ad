"""The example of a policy of one's own for envs in turns: small convolutions that pick actions; and what such a policy
may not give.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlvlm.algorithms.sft import Imitator
from rlvlm.algorithms.sft_config import ReplySFTConfig
from rlvlm.algorithms.sft_replies import demonstrate, held_out_loss, warn_of_length
from rlvlm.core.episodes import Observations, SampledReply
from rlvlm.core.errors import UsageError
from rlvlm.envs.config import TurnEnvConfig
from rlvlm.envs.slots import make_slot
from rlvlm.policies.protocol import Reading
from rlvlm.policies.reply_policy import ReplySampling, check_replies
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import build_policy

OWN = str(Path(__file__).parents[2] / "examples" / "own_turn_policy.py") + ":SmallNet"
CONFIG = PolicyConfig(head=OWN, settings={"width": "32"})
LAMP = "press_button:TASK"


def lamp() -> Any:
    return make_slot(LAMP, TurnEnvConfig(episode_steps=4))


def shown(policy: Any, place: Any, num: int) -> Observations:
    """`num` first turns, whose images `policy` was shown."""
    obs = []
    for seed in range(num):
        place.begin(seed)
        obs.append(place.obs)
    joined = Observations.joined(obs)
    policy.show(joined.images, policy.draw(place.env, joined.snapshots))
    return joined


def test_an_action_that_a_policy_picks_is_the_one_that_is_played():
    place = lamp()
    for action, name in enumerate(place.env.action_names):
        place.begin(0)
        place.play(SampledReply(answer={}, log_probs=np.zeros(1, np.float32), action=action))
        assert place.infos[-1]["action"] == action and place.episode().action_names == (name,)


def test_an_answer_has_the_log_prob_it_was_drawn_with_whatever_else_is_in_its_batch():
    place = lamp()
    policy = build_policy(CONFIG, place.env)
    obs = shown(policy, place, 6)
    engine = PolicyEngine(policy, max_batch=4)
    engine.use(3)
    replies = engine.reply(obs, range(6), ReplySampling(temperature=0.5))
    [alone] = engine.reply(obs.at([5]), [5], ReplySampling(temperature=0.5))
    assert alone.action == replies[5].action and {reply.version for reply in replies} == {3}
    assert len({reply.action for reply in replies}) > 1 and [reply.image for reply in replies] == list(obs.images)
    found = policy.log_probs(obs, [reply.answer for reply in replies], Reading(temperature=0.5, with_entropies=True))
    stored = np.stack([reply.log_probs for reply in replies])
    np.testing.assert_allclose(found.log_probs.detach().numpy(), stored, atol=1e-5)
    assert found.entropies is not None and found.entropies.shape == (6, 1)
    greedy = ReplySampling(greedy=True)
    likeliest = [engine.reply(obs, range(first, first + 6), greedy) for first in (0, 50)]
    assert [reply.action for reply in likeliest[0]] == [reply.action for reply in likeliest[1]]


@pytest.mark.slow
def test_it_learns_from_the_readable_part_of_demonstrations():
    place, lines = lamp(), []
    torch.manual_seed(0)
    policy = build_policy(CONFIG, place.env)
    sft = ReplySFTConfig(turns=60, updates=60, batch_size=16, lr=3e-3)
    episodes = demonstrate(place, sft, seed=0)
    first, *others = episodes
    unread = replace(first, replies=tuple(replace(reply, action=None) for reply in first.replies))
    warn_of_length(policy, episodes, 1, lines.append)
    before = held_out_loss(policy, place.env, episodes, sft)
    Imitator(policy, place.env, [unread, *others], sft, np.random.default_rng(0), lines.append).train(sft.updates)
    assert held_out_loss(policy, place.env, episodes, sft) < 0.2 * before
    assert np.isnan(held_out_loss(policy, place.env, [unread], sft)) and "longer" not in "".join(lines)
    with pytest.raises(UsageError, match="a use for none of the demonstrated answers"):
        Imitator(policy, place.env, [unread], sft, np.random.default_rng(0), lines.append)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": np.zeros((1, 1), np.float32)}, r"log_probs \[1, 1\], not \[N\]"),
        ({"log_probs": np.zeros(0, np.float32)}, r"log_probs \[0\]"),
        ({"action": None, "text": 3}, "neither an action nor a text, but 3"),
        (None, "1 replies to 2 observations"),
    ],
)
def test_replies_of_another_form_are_refused_by_name(change, message):
    right = SampledReply(answer={}, log_probs=np.zeros(1, np.float32), action=0)
    policy = build_policy(CONFIG, lamp().env)
    check_replies([right, right], 2, policy)
    with pytest.raises(UsageError, match="the policy SmallNet sampled " + message):
        check_replies([right] if change is None else [right, replace(right, **change)], 2, policy)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "wide"}, "policy.head must be one of text, actions, or one of your own"),
        ({"head": OWN, "settings": {"depth": "3"}}, "unexpected keyword argument 'depth'"),
        ({"head": OWN.replace("SmallNet", "zlib")}, "policy.head"),
        ({"head": "builtins:id"}, "gave a int, and no ReplyPolicy"),
        ({"head": OWN, "model": "model"}, "no effect with policy.model"),
        ({"head": OWN, "conditioned": True}, "policy.conditioned has no effect"),
        ({"settings": {"width": "3"}}, "policy.settings has no effect"),
    ],
)
def test_an_unusable_policy_is_refused(settings, message):
    with pytest.raises((UsageError, ValueError), match=message):
        build_policy(PolicyConfig(**settings), lamp().env)


def test_sampling_repeats_by_seed_and_takes_the_likeliest_without_one():
    table = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(400, 3)
    drawn = ReplySampling().pick(table, range(400))
    assert torch.equal(drawn, ReplySampling().pick(table, range(400)))
    # 400 draws: the share of the likeliest has a standard deviation of 2.5 %
    assert abs((drawn == 1).float().mean().item() - 0.5) < 0.1
    assert ReplySampling(greedy=True).pick(table, range(400)).unique().tolist() == [1]
