from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlvlm.algorithms.sft import Imitator, grouped_by_length, rows_by_weight
from rlvlm.algorithms.sft_config import ReplySFTConfig
from rlvlm.algorithms.sft_replies import demonstrate, held_out_loss, split, validate, warn_of_length
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.weighting import Weights
from rlvlm.envs.registry import make_env, task_env
from rlvlm.envs.slots import EnvSlot
from rlvlm.policies.protocol import Imitation
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.imitation import examples_of, imitation_loss, observations_of
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.vlms.devices import gradient_settings
from tests.tiny_policy import tiny_policy


def slot() -> EnvSlot:
    return EnvSlot(make_env("number_line", task_env("number_line"), 0), "number_line")


def learn(
    policy: VLMPolicy, place: EnvSlot, episodes: list[TokenEpisode], config: ReplySFTConfig, **more: Any
) -> float:
    imitator = Imitator(policy, place.env, episodes, config, np.random.default_rng(0), lambda line: None, **more)
    return imitator.train(config.updates)


def check(policy: VLMPolicy, place: EnvSlot, episodes: list[TokenEpisode], most: int) -> dict[str, float]:
    return validate(PolicyEngine(policy, 8), place.env, episodes, ReplySFTConfig(batch_size=3), most)


def test_the_loss_of_one_turn_is_minus_the_log_prob_of_its_reply(tmp_path):
    policy, place = tiny_policy(tmp_path), slot()
    (example, *_) = examples_of(policy, place.env, demonstrate(place, ReplySFTConfig(turns=1), 0))
    with torch.no_grad():
        loss = imitation_loss(policy, [example])
        log_probs = policy.read(observations_of([example]), [example.ids]).log_probs
    assert loss.item() == pytest.approx(-log_probs.sum().item())
    assert policy.text_of(example.ids).endswith('"}')


def test_a_head_may_learn_from_replies_too(tmp_path):
    policy, place = tiny_policy(tmp_path, config=PolicyConfig(learns="all", head="actions"), num_actions=2), slot()
    examples = examples_of(policy, place.env, demonstrate(place, ReplySFTConfig(turns=6), 0))
    with torch.no_grad():
        both, alone = (imitation_loss(policy, examples, weight) for weight in (0.5, 0.0))
        said = -policy.read(observations_of(examples), [example.ids for example in examples]).log_probs.sum(-1).mean()
    assert both.item() == pytest.approx(alone.item() + 0.5 * said.item(), rel=1e-4)


def test_repeatable_kernels_are_asked_for_in_both_passes(tmp_path, monkeypatch):
    # recomputed activations must come from the kernels that the first ones came from; a CPU has one of each
    cuda = torch.device("cuda")
    monkeypatch.setattr("rlvlm.algorithms.sft.gradient_settings", lambda _, on: gradient_settings(cuda, on))
    policy, place, asked = tiny_policy(tmp_path), slot(), []
    plain = policy.imitation_loss

    def spy(*args: Any) -> torch.Tensor:
        asked.append(torch.are_deterministic_algorithms_enabled())
        loss = plain(*args)
        loss.register_hook(lambda grad: asked.append(torch.are_deterministic_algorithms_enabled()))
        return loss

    monkeypatch.setattr(policy, "imitation_loss", spy)
    sft = ReplySFTConfig(turns=2, updates=1)
    imitator = Imitator(policy, place.env, demonstrate(place, sft, 0), sft, np.random.default_rng(0), print)
    imitator.is_deterministic = True
    imitator.train(1)
    assert asked == [True, True] and not torch.are_deterministic_algorithms_enabled()


def test_a_perturbed_expert_demonstrates_recoveries():
    perturbed = demonstrate(slot(), ReplySFTConfig(turns=100, p_perturb=0.5), 1)
    assert any((episode.env_rewards < 0).any() for episode in perturbed), "wrong moves were really made"
    for episode in perturbed:
        for (current, target), reply in zip(episode.snapshots[:-1, :2], episode.replies, strict=True):
            assert ("smaller" in reply.thought, reply.action) in ((True, 0), (False, 1)), reply.text
            assert current != target


def test_without_an_expert_a_hint_says_how_to_begin():
    place = slot()
    place.env.has_expert = False
    with pytest.raises(UsageError, match="no scripted expert") as caught:
        demonstrate(place, ReplySFTConfig(turns=4), 0)
    assert "--sft.turns 0" in caught.value.fix


def test_a_split_keeps_episodes_whole():
    episodes = demonstrate(slot(), ReplySFTConfig(turns=100), 1)
    learned, held_out = split(episodes, 0.2)
    assert len(learned) + len(held_out) == len(episodes)
    assert len(held_out) == pytest.approx(len(episodes) / 5, abs=1)
    assert split(episodes, 0.0)[1] == []
    assert split(episodes[:1], 0.5) == (episodes[:1], [])
    for share in (0.3, 0.7, 0.95):  # with nothing left to learn from, the batches would never come
        learned, held_out = split(episodes[:10], share)
        assert (len(learned), len(held_out)) == (10 - int(10 * share), int(10 * share))
    assert [len(side) for side in split(episodes[:2], 0.1)] == [1, 1]


@pytest.mark.slow
def test_fine_tuning_makes_demonstrations_likelier_and_leaves_the_critic_alone(tmp_path):
    policy, place = tiny_policy(tmp_path), slot()
    episodes = demonstrate(place, ReplySFTConfig(turns=24), 0)
    examples = examples_of(policy, place.env, episodes)
    critic = [parameter.clone() for parameter in policy.value_head.parameters()]
    with torch.no_grad():
        before = imitation_loss(policy, examples[:8]).item()
    learn(policy, place, episodes, ReplySFTConfig(updates=8, batch_size=8, lr=3e-3))
    with torch.no_grad():
        assert imitation_loss(policy, examples[:8]).item() < 0.7 * before
    assert all(torch.equal(*pair) for pair in zip(critic, policy.value_head.parameters(), strict=True))


@pytest.mark.slow
def test_an_action_head_is_taught_the_action(tmp_path):
    policy = tiny_policy(tmp_path, config=PolicyConfig(learns="all", head="actions"), num_actions=2)
    assert policy.action_head is not None
    last = policy.action_head[-1]
    assert isinstance(last, torch.nn.Linear)
    torch.nn.init.zeros_(last.weight)
    place = slot()
    config = ReplySFTConfig(updates=12, batch_size=16, lr=1e-3, held_out=0.0)
    episodes = demonstrate(place, ReplySFTConfig(turns=8), 0)
    before, loss = check(policy, place, episodes, 8), held_out_loss(policy, place.env, episodes, config)
    learn(policy, place, episodes, config)
    after = check(policy, place, episodes, 8)
    assert held_out_loss(policy, place.env, episodes, config) < loss
    assert after[metrics.SFT_VALID] == 1
    assert before[metrics.SFT_SAMPLED_EXACT_ACTION] < 1, "a head that starts even draws wrong actions, greedy or not"


def illegible(episodes: list[TokenEpisode], keeps: int) -> list[TokenEpisode]:
    """Of all turns but the first `keeps` of each episode nobody can read the action."""
    return [
        replace(
            episode,
            replies=tuple(
                reply if turn < keeps else replace(reply, action=None) for turn, reply in enumerate(episode.replies)
            ),
        )
        for episode in episodes
    ]


@pytest.mark.parametrize("reply_weight", [0.0, 0.5])
def test_a_head_is_taught_the_turns_whose_action_can_be_read_and_no_others(tmp_path, reply_weight):
    policy, place = tiny_policy(tmp_path, config=PolicyConfig(learns="all", head="actions"), num_actions=2), slot()
    episodes = demonstrate(place, ReplySFTConfig(turns=12), 0)
    readable = illegible(episodes, keeps=1)
    assert len(examples_of(policy, place.env, readable)) == len(episodes) < sum(map(len, episodes))
    config = ReplySFTConfig(
        updates=2, batch_size=1, held_out=0.5, reply_weight=reply_weight
    )  # a turn alone: its own mean
    assert np.isfinite(learn(policy, place, readable, config))
    with pytest.raises(UsageError, match="a use for none of the demonstrated answers"):
        learn(policy, place, illegible(episodes, keeps=0), config)


def test_held_out_episodes_are_evaluated_in_batches(tmp_path):
    policy, place, sft = tiny_policy(tmp_path), slot(), ReplySFTConfig(turns=12, batch_size=100)
    episodes = demonstrate(place, sft, 0)
    seen: list[list[int]] = []

    def in_fours(units: torch.Tensor, prepared: Imitation) -> list[torch.Tensor]:
        seen.append([len(prepared), len(units), *prepared.lengths])
        return list(units.split(4))

    whole = held_out_loss(policy, place.env, episodes, sft)
    assert held_out_loss(policy, place.env, episodes, sft, in_fours) == pytest.approx(whole, rel=1e-6)
    ((num, at_once, *lengths),) = seen
    assert num == at_once == len(lengths) == sum(len(episode.replies) for episode in episodes) and min(lengths) > 0


def test_garbage_counts_as_neither_valid_nor_exact(tmp_path):
    policy, place = tiny_policy(tmp_path), slot()
    episodes = demonstrate(place, ReplySFTConfig(turns=4), 0)
    measured = check(policy, place, episodes, 6)
    assert measured[metrics.SFT_VALID] == measured[metrics.SFT_EXACT_ACTION] == 0
    assert measured[metrics.SFT_SAMPLED_VALID] == measured[metrics.SFT_SAMPLED_EXACT_ACTION] == 0
    assert np.isfinite(held_out_loss(policy, place.env, episodes, ReplySFTConfig(batch_size=3)))
    assert check(policy, place, [], 6) == {}


class Recorder:
    """A policy of one number, which notes the rows that it is asked to imitate."""

    device = torch.device("cpu")

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.number, self.lengths, self.rows = torch.nn.Parameter(torch.zeros(())), lengths, list[int]()

    def imitation(self, *given: Any) -> Imitation:
        return Imitation(loss=self.loss, shown=np.array([4, 3, 2, 1]), lengths=self.lengths)

    def loss(self, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        self.rows += rows.tolist()
        return self.number * 0

    def acting_parameters(self) -> list[torch.nn.Parameter]:
        return [self.number]

    def forget_stale_images(self) -> None: ...


@pytest.mark.parametrize("lengths", [(), (5, 6, 5, 6)])
def test_answers_are_drawn_as_often_as_they_count(lengths):
    # of five shown answers the policy has no use for the first: rows 0 to 3 are the answers 4, 3, 2, 1
    counts = np.array([9, 0, 3, 0, 1], np.float32)
    policy: Any = Recorder(lengths)
    config, rng = ReplySFTConfig(updates=250, batch_size=4), np.random.default_rng(0)
    Imitator(policy, None, None, config, rng, print, weights=Weights(values=counts)).train(250)
    assert np.bincount(policy.rows, minlength=4) / len(policy.rows) == pytest.approx([0.25, 0, 0.75, 0], abs=0.05)
    with pytest.raises(UsageError, match="none of the 4 answers that are learned from counts"):
        Imitator(policy, None, None, config, rng, print, weights=Weights(values=np.eye(5, dtype=np.float32)[0]))


def test_rows_of_an_epoch_by_hand():
    # sums of the weights .5, 2.25, 0, 1.25 are .5, 2.75, 2.75, 4; with an offset u a row is there once for each whole
    # number that is passed: for u = .64 (the first draw of seed 0) 1.14, 3.39, 3.39, 4.64
    assert rows_by_weight(np.array([0.5, 2.25, 0, 1.25]), np.random.default_rng(0)).tolist() == [0, 1, 1, 3]
    assert rows_by_weight(np.ones(5), np.random.default_rng(1)).tolist() == [0, 1, 2, 3, 4]
    many = [rows_by_weight(np.array([0.5, 1.5]), np.random.default_rng(seed)) for seed in range(400)]
    assert np.bincount(np.concatenate(many)) / 400 == pytest.approx([0.5, 1.5], abs=0.08)


@pytest.mark.slow
def test_demonstrated_replies_beyond_the_limit_are_reported(tmp_path):
    policy, place = tiny_policy(tmp_path), slot()
    episodes, lines = demonstrate(place, ReplySFTConfig(turns=4), 0), list[str]()
    warn_of_length(policy, episodes, 8, lines.append)
    assert lines[0].startswith("100% of the demonstrated replies are longer than algo.max_reply_tokens 8")
    warn_of_length(policy, episodes, 2_000, lines.append)
    assert len(lines) == 1


def test_four_examples_by_hand():
    batches = list(grouped_by_length([5, 1, 6, 2], 2, np.random.default_rng(0), np.arange(4)))
    assert sorted(sorted(batch) for batch in batches) == [[0, 2], [1, 3]]


def test_little_of_a_batch_is_padding():
    lengths = np.random.default_rng(1).integers(1, 100, 256).tolist()

    def padding(batches: list[list[int]]) -> int:
        return sum(max(lengths[i] for i in batch) - lengths[j] for batch in batches for j in batch)

    grouped = list(grouped_by_length(lengths, 8, np.random.default_rng(3), np.arange(256)))
    plain = np.random.default_rng(3).permutation(256).reshape(-1, 8).tolist()
    assert sorted(place for batch in grouped for place in batch) == list(range(256)), "every example once"
    assert padding(grouped) < padding(plain) / 3
