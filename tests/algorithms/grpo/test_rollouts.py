"""Whole episodes of a policy in real worlds, and the supervised start."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rlvlm.algorithms.grpo.config import SFTConfig
from rlvlm.algorithms.grpo.imitation import demonstrate, imitate, imitation_loss, soft_targets
from rlvlm.algorithms.grpo.player import ChunkPlayer
from rlvlm.algorithms.grpo.reward.scoring import item_of
from rlvlm.algorithms.grpo.rollouts import (
    Choice,
    InitialStates,
    ObsProcessor,
    Sampler,
    decoded_by,
    roll_out,
    seen_at_chunks,
)
from rlvlm.core.chunks import ChunkObs
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.chunks import Perturbation, scripted_episodes
from rlvlm.envs.chunk_env import FIRST_HELD_OUT_STATE
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.push_block.env import PushBlock, PushBlocks, observed
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import PocketVLAConfig, VLAConfig
from rlvlm.policies.vla.pocket import PocketVLA
from rlvlm.policies.vla.sampling import log_probs_of
from rlvlm.policies.vla.tokens import ActionScale, encode

SCALE = ActionScale(low=(-1.0,) * 6 + (0.0,), high=(1.0,) * 7, scaled=(True,) * 6 + (False,))


def world(episode_steps: int = 20) -> PushBlock:
    return PushBlock(EnvConfig(episode_steps=episode_steps), seed=0)


def policy() -> PocketVLA:
    torch.manual_seed(0)
    policy = build_policy(VLAConfig(pocket=PocketVLAConfig(image_px=16, hidden=32)), world())
    assert isinstance(policy, PocketVLA)
    return policy


def starts(*state_ids: int) -> InitialStates:
    return InitialStates(task="push_block", state_ids=np.array(state_ids), groups=np.array(state_ids))


def test_an_episode_has_its_own_chunks_and_stops_at_its_end() -> None:
    one = world()
    calls: list[int] = []

    def stay(obs: ChunkObs) -> Choice:
        calls.append(len(obs))
        still = encode(SCALE.from_env(np.zeros((len(obs), 8, 7), np.float32))).reshape(len(obs), -1)
        return still, np.zeros(still.shape, np.float32)

    episodes = roll_out(one.many(), starts(3, 4), stay, decoded_by(SCALE, 8))
    assert calls == [2, 2, 2]  # 8 + 8 + 4 of 20 steps
    assert [episode.steps.tolist() for episode in episodes] == [[8, 8, 4]] * 2
    assert not any(episode.success or episode.terminated for episode in episodes)
    one.reset(options={"state_id": 4})
    assert np.array_equal(episodes[1].snapshots[0], one.snapshot())


def test_a_success_that_is_undone_is_one_and_is_none_at_the_end() -> None:
    class Ready(PushBlocks):
        """The block lies beside the pad, and the hand behind the block."""

        def begin(self, state_ids: NDArray[np.int64]) -> ChunkObs:
            super().begin(state_ids)
            self.states[:] = np.array([0.2, 0.0, 0.42, 0.0, 0.0, 0.5, 0.6, 0.0, 0, 2], np.float32)
            return observed(self.states)

    def push(obs: ChunkObs) -> Choice:
        actions = np.zeros((len(obs), 8, 7), np.float32)
        actions[..., 0] = 1.0  # on the pad after one step, and pushed over it and away
        bins = encode(SCALE.from_env(actions)).reshape(len(obs), -1)
        return bins, np.zeros(bins.shape, np.float32)

    seen = {}
    for plays_on in (False, True):
        (episode,) = roll_out(Ready(16, plays_on), starts(3), push, decoded_by(SCALE, 8))
        seen[plays_on] = (episode.success, episode.success_at_end, len(episode), item_of(episode, 4).is_undone)
    assert seen == {False: (True, True, 1, False), True: (True, False, 16, True)}


def test_one_episode_is_the_same_alone_and_among_others() -> None:
    net, one = policy(), world()
    obs_processor, to_actions = ObsProcessor(net, one), decoded_by(SCALE, 8)
    greedy = Sampler(net, obs_processor, None)
    together = roll_out(one.many(), starts(1, 2, 3), greedy.choose, to_actions)
    alone = roll_out(one.many(), starts(2), greedy.choose, to_actions)[0]
    assert np.array_equal(together[1].bins, alone.bins)
    assert np.array_equal(together[1].snapshots, alone.snapshots)


def test_stored_log_probs_are_those_of_the_stored_tokens_where_they_were_seen() -> None:
    net, one = policy(), world()
    obs_processor = ObsProcessor(net, one)
    sampler = Sampler(net, obs_processor, 1.6, torch.Generator().manual_seed(1))
    episodes = roll_out(one.many(), starts(5, 6, 7), sampler.choose, decoded_by(SCALE, 8))
    logits = net(*obs_processor.look(seen_at_chunks(episodes)))
    bins = torch.from_numpy(np.concatenate([episode.bins for episode in episodes]).astype(np.int64))
    stored = np.concatenate([episode.log_probs for episode in episodes])
    assert np.abs(log_probs_of(logits, bins, 1.6).detach().numpy() - stored).max() < 1e-4


def test_what_was_looked_at_is_not_drawn_again() -> None:
    net, one = policy(), world()
    drawn: list[int] = []
    draw = one.draw

    def counted(snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        drawn.append(len(snapshots))
        return draw(snapshots, size_px, camera)

    one.draw = counted  # pyright: ignore[reportAttributeAccessIssue]
    remembering, plain = ObsProcessor(net, one, 5 * 3 * 16**2), ObsProcessor(net, one)
    obs = one.many().begin(np.array([1, 2, 1, 3]))
    for obs_processor in (remembering, remembering, plain):
        assert torch.equal(obs_processor.look(obs)[0], torch.from_numpy(draw(obs.snapshots, 16))[:, None])
    assert drawn == [3, 4]  # of four states three differ
    for state_ids in ([4, 5], [1, 2, 3], [6, 7], [1, 4]):  # five images are kept, the oldest go first
        remembering.look(one.many().begin(np.array(state_ids)))
    assert drawn == [3, 4, 2, 2, 1]


def test_with_shared_draws_a_chunk_strays_to_one_side() -> None:
    net, one = policy(), world()
    sampler = Sampler(net, ObsProcessor(net, one), 1.0, torch.Generator().manual_seed(1), shared=8)
    with torch.no_grad():
        net.bias.zero_()
        net.bins.zero_()  # all tokens have one and the same distribution
    bins, _ = sampler.choose(one.many().begin(np.arange(20)))
    by_step = bins.reshape(20, 8, 7)
    assert (by_step == by_step[:, :1]).all() and len(np.unique(by_step[:, 0])) > 50


def test_a_group_has_one_initial_state() -> None:
    with pytest.raises(ValueError, match="group 0 has two initial states, 1 and 2"):
        InitialStates(task="push_block", state_ids=np.array([1, 2]), groups=np.array([0, 0]))


def test_imitation_learns_what_the_script_shows() -> None:
    one, net = world(32), policy()
    config = SFTConfig(demonstrations=6, steps=60, batch_size=16, label_width=0.0)
    shown = demonstrate(one, config, 0)
    assert shown.num_episodes == 6 and len(shown.obs) == len(shown.actions) > 6
    scale = ActionScale.of_actions(shown.actions.reshape(-1, 7), one.scaled_actions)
    told: list[str] = []
    rng = np.random.default_rng(0)
    before = imitate(net, ObsProcessor(net, one), shown, scale, SFTConfig(steps=1, label_width=0.0), rng, told.append)
    after = imitate(net, ObsProcessor(net, one), shown, scale, config, rng, told.append)
    assert after < 0.8 * before


def test_what_led_the_script_astray_is_not_learned_from() -> None:
    perturbation = Perturbation(p_perturb=0.4)
    records = list(scripted_episodes(world(64), "", wanted=5, perturbation=perturbation, seed=3))
    won = [record.arrays for record in records if record.success]
    shown = demonstrate(world(64), SFTConfig(demonstrations=5, noise=0.0, p_perturb=0.4), 3)
    perturbed = np.concatenate([arrays["perturbed"] for arrays in won])
    assert 3 < perturbed.sum() and len(shown.obs) == len(shown.actions) == (~perturbed).sum()
    assert np.array_equal(shown.actions, np.concatenate([arrays["actions"] for arrays in won])[~perturbed])
    before = np.concatenate([arrays["snapshots"][:-1] for arrays in won])[~perturbed]
    assert np.array_equal(shown.obs.snapshots, before)
    kept = [int((~arrays["perturbed"]).sum()) for arrays in won]
    assert shown.begins.tolist() == np.cumsum([0, *kept[:-1]]).tolist()


class HalfScripted(PushBlock):
    """Has no script for some of its instructions, as a suite of tasks may."""

    unscripted: tuple[str, ...] = ("red", "blue")

    def reset(self, **options: Any) -> tuple[ChunkObs, dict[str, Any]]:
        obs, info = super().reset(**options)
        self._is_scripted = not any(colour in obs.instructions[0] for colour in self.unscripted)
        return obs, info

    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray:
        return super().scripted_chunk(noise, rng) if self._is_scripted else None  # pyright: ignore[reportReturnType]


def test_what_has_no_script_is_not_demonstrated_and_told() -> None:
    one, told = HalfScripted(EnvConfig(episode_steps=32), seed=0), []
    shown = demonstrate(one, SFTConfig(demonstrations=6), 0, told.append)
    assert shown.num_episodes == 6
    assert not any(colour in text for text in shown.obs.instructions for colour in ("red", "blue"))
    (line,) = [line for line in told if "for want of a script" in line]
    assert "red" in line or "blue" in line
    one.unscripted = ("",)
    with pytest.raises(UsageError, match="no script could demonstrate: push the"):
        demonstrate(one, SFTConfig(demonstrations=6), 0)


def test_a_script_that_only_fails_is_told_soon() -> None:
    one = PushBlock(EnvConfig(episode_steps=8), seed=0)  # too short for anything
    with pytest.raises(UsageError, match="succeeded in 0 of 20 episodes"):
        demonstrate(one, SFTConfig(demonstrations=1_000), 0)


def test_a_player_plays_the_same_states_again() -> None:
    net = policy()
    player = ChunkPlayer(net, world(), SCALE)
    first, again = player.play([1_000_000, 1_000_001]), player.play([1_000_000, 1_000_001])
    assert [episode.env_return for episode in first] == [episode.env_return for episode in again]
    assert np.array_equal(first[0].snapshots, again[0].snapshots)
    assert len(first[0].snapshots) == len(first[0].env_rewards) == len(first[0].captions)


def test_a_player_samples_what_rollouts_explore() -> None:
    still = ActionScale(low=(-1.0, -1.0, -0.1, 0, 0, 0, 0), high=(1.0, 1.0, 0.1, 0, 0, 0, 1.0), scaled=SCALE.scaled)
    player = ChunkPlayer(policy(), world(), still, temperature=1.0, least_range=0.2)
    log_probs = np.concatenate([one.log_probs for one in player.roll([1_000_000, 1_000_001])]).reshape(-1, 7)
    assert ((log_probs == 0).all(axis=0)).tolist() == [False, False, True, True, True, True, False]


def test_equal_greedy_episodes_are_no_evidence() -> None:
    """Of three initial states a greedy policy has three episodes, however many are asked for; sampled ones differ."""
    few = world()
    few.num_held_out = 3
    net, seeds = policy(), range(FIRST_HELD_OUT_STATE, FIRST_HELD_OUT_STATE + 5)
    assert len(ChunkPlayer(net, few, SCALE).play(seeds)) == 3
    assert len(ChunkPlayer(net, few, SCALE, temperature=1.0).play(seeds)) == 5


def test_soft_targets_are_bells_and_a_width_of_zero_single_bins() -> None:
    bells = soft_targets(0.1)
    assert torch.allclose(bells.sum(dim=1), torch.ones(256), atol=1e-5)
    bins = torch.arange(256.0)
    mean = (bells[100] * bins).sum()
    assert mean.item() == pytest.approx(100, abs=0.01)
    assert ((bells[100] * (bins - mean) ** 2).sum().sqrt()).item() == pytest.approx(12.75, abs=0.05)  # 0.1 of 127.5
    assert torch.equal(soft_targets(0.0), torch.eye(256))


def test_only_soft_dimensions_are_taught_softly() -> None:
    logits, bins = torch.zeros(1, 1, 2, 256), torch.tensor([[[7, 9]]])
    logits[0, 0, 1, 9] = 100.0  # sure of bin 9 in both readings of dimension 1
    targets, only_first = soft_targets(0.1), torch.tensor([True, False])
    loss = imitation_loss(logits, bins, targets, only_first)
    assert loss.item() == pytest.approx(np.log(256) / 2, abs=1e-4)
    assert imitation_loss(logits, bins, targets, torch.tensor([True, True])).item() > 10
