"""Whole episodes of a policy in real envs, and the supervised start."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rlvlm.algorithms.policy_gradient.chunks import ChunkSampler, play_chunks
from rlvlm.algorithms.policy_gradient.config import chunk_defaults
from rlvlm.algorithms.policy_gradient.player import TokenPlayer, chunk_player
from rlvlm.algorithms.sft import Imitator
from rlvlm.algorithms.sft_chunks import demonstrate
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core.episodes import Observations, TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.collect import Disturbance, play_episodes
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.env import FIRST_HELD_OUT_STATE
from rlvlm.envs.push_block import PushBlock, PushBlocks, observed
from rlvlm.policies.protocol import Reading
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import PocketVLAConfig, VLAConfig
from rlvlm.policies.vla.pocket import PocketVLA
from rlvlm.policies.vla.policy import SampledChunks, Sampling, VLAPolicy
from rlvlm.policies.vla.token_policy import soft_targets, token_loss
from rlvlm.policies.vla.tokens import ActionScale

SCALE = ActionScale(low=(-1.0,) * 6 + (0.0,), high=(1.0,) * 7, scaled=(True,) * 6 + (False,))


def env(episode_steps: int = 20) -> PushBlock:
    return PushBlock(ChunkEnvConfig(episode_steps=episode_steps), seed=0)


def policy() -> PocketVLA:
    torch.manual_seed(0)
    policy = build_policy(VLAConfig(pocket=PocketVLAConfig(image_px=16, hidden=32)), env())
    assert isinstance(policy, PocketVLA)
    policy.scale = SCALE
    return policy


class Scripted(VLAPolicy):
    """Gives the same actions whatever it sees, and counts how many asked."""

    image_px = 16

    def __init__(self, action: float = 0.0) -> None:
        super().__init__()
        self.register_parameter("nothing", torch.nn.Parameter(torch.zeros(1)))
        self.calls: list[int] = []
        self._action = action

    def sample(self, obs: Observations, sampling: Sampling) -> SampledChunks:
        self.calls.append(len(obs))
        actions = np.zeros((len(obs), 8, 7), np.float32)
        actions[..., 0] = self._action
        return SampledChunks(
            actions=actions, answers=[{}] * len(obs), log_probs=np.zeros((len(obs), 56), np.float32),
            mask=np.zeros((len(obs), 56), bool), steps=np.arange(56) // 7, values=np.zeros(len(obs), np.float32),
        )  # fmt: skip


def play(net: VLAPolicy, *state_ids: int, many: Any = None, temperature: float | None = None) -> list[TokenEpisode]:
    one = env()
    generator = torch.Generator().manual_seed(1)
    algo = chunk_defaults(temperature=temperature or 1.0)
    sampler = ChunkSampler(policy=net, env=one, algo=algo, greedy=temperature is None, generator=generator)
    ids = np.array(state_ids)
    return play_chunks(many or one.many(), "push_block", ids, ids, sampler)


def test_an_episode_has_its_own_chunks_and_stops_at_its_end() -> None:
    one, still = env(), Scripted()
    episodes = play(still, 3, 4)
    assert still.calls == [2, 2, 2]  # 8 + 8 + 4 of 20 steps
    assert [episode.steps.tolist() for episode in episodes] == [[8, 8, 4]] * 2
    assert not any(episode.is_success or episode.terminated for episode in episodes)
    one.reset(options={"state_id": 4})
    assert np.array_equal(episodes[1].snapshots[0], one.snapshot())
    assert not any(mask.any() for episode in episodes for mask in episode.masks), "what is taken teaches nothing"


def test_a_success_that_is_undone_is_one_and_is_none_at_the_end() -> None:
    class Ready(PushBlocks):
        """The block lies beside the pad, and the hand behind the block."""

        def begin(self, state_ids: NDArray[np.int64]) -> Observations:
            super().begin(state_ids)
            self.states[:] = np.array([0.2, 0.0, 0.42, 0.0, 0.0, 0.5, 0.6, 0.0, 0, 2], np.float32)
            return observed(self.states)

    seen = {}
    for continue_after_success in (False, True):  # on the pad after one step, and pushed over it and away
        (episode,) = play(Scripted(1.0), 3, many=Ready(16, continue_after_success))
        seen[continue_after_success] = (episode.is_success, episode.success_lost, episode.num_steps)
    assert seen == {False: (True, False, 1), True: (True, True, 16)}


def test_one_episode_is_the_same_alone_and_among_others() -> None:
    together, alone = play(policy(), 1, 2, 3), play(policy(), 2)[0]
    assert all(map(np.array_equal, together[1].chunks, alone.chunks))
    assert np.array_equal(together[1].snapshots, alone.snapshots)


def test_stored_log_probs_are_those_of_the_stored_tokens_where_they_were_seen() -> None:
    net = policy()
    for one in play(net, 5, 6, 7, temperature=1.6):
        found = net.log_probs(one.obs.at(range(len(one))), one.answers, Reading(temperature=1.6)).log_probs
        assert np.abs(found.detach().numpy() - np.stack(one.log_probs)).max() < 1e-4


def test_known_images_are_not_drawn_again() -> None:
    net, one = policy(), env()
    drawn: list[int] = []
    draw = one.draw

    def counted(snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        drawn.append(len(snapshots))
        return draw(snapshots, size_px, camera)

    one.draw = counted  # pyright: ignore[reportAttributeAccessIssue]
    sampler = ChunkSampler(policy=net, env=one)
    snapshots = one.many().begin(np.array([1, 2, 1, 3])).snapshots
    keys = tuple(row.tobytes() for row in snapshots)
    obs = Observations(images=keys, texts=("go",) * 4, proprio=np.zeros((4, 2), np.float32), snapshots=snapshots)
    for _ in range(2):
        sampler.act(obs)
    assert drawn == [3]  # of four states three differ
    assert np.array_equal(np.stack(net.images.get(keys))[:, 0], draw(snapshots, 16))


def test_with_shared_draws_a_chunk_leans_to_one_side() -> None:
    net, one = policy(), env()
    with torch.no_grad():
        net.bias.zero_()
        net.bins.zero_()  # all tokens have one and the same distribution
    generator = torch.Generator().manual_seed(1)
    algo = chunk_defaults(draws="chunk")
    sampler = ChunkSampler(policy=net, env=one, algo=algo, greedy=False, is_rollout=True, generator=generator)
    ids = np.arange(20)
    episodes = play_chunks(one.many(), "", ids, ids, sampler)
    by_step = np.stack([episode.answers[0]["bins"] for episode in episodes]).reshape(20, 8, 7)
    assert (by_step == by_step[:, :1]).all() and len(np.unique(by_step[:, 0])) > 50


@pytest.mark.slow
def test_imitation_learns_from_the_script() -> None:
    one, net = env(32), policy()
    config = ChunkSFTConfig(episodes=6, updates=60, batch_size=16, label_width=0.0)
    shown = demonstrate(one, config, 0)
    assert shown.num_episodes == 6 and len(shown.obs) == len(shown.actions) > 6
    net.learn_statistics(shown, one)
    lines: list[str] = []
    rng = np.random.default_rng(0)
    before = Imitator(net, one, shown, ChunkSFTConfig(updates=1, label_width=0.0), rng, lines.append).train(1)
    after = Imitator(net, one, shown, config, rng, lines.append).train(config.updates)
    assert after < 0.8 * before


def test_perturbing_actions_are_not_learned_from() -> None:
    perturbation = Disturbance(p_perturb=0.4)
    records = list(play_episodes(env(64), perturbation, "", wanted=5, seed=3))
    won = [record.arrays for record in records if record.success]
    shown = demonstrate(env(64), ChunkSFTConfig(episodes=5, noise=0.0, p_perturb=0.4), 3)
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

    def reset(self, **options: Any) -> tuple[Observations, dict[str, Any]]:
        obs, info = super().reset(**options)
        self._is_scripted = not any(colour in obs.texts[0] for colour in self.unscripted)
        return obs, info

    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray:
        return super().scripted_chunk(noise, rng) if self._is_scripted else None  # pyright: ignore[reportReturnType]


def test_a_task_without_a_script_is_reported_and_not_demonstrated() -> None:
    one, lines = HalfScripted(ChunkEnvConfig(episode_steps=32), seed=0), []
    shown = demonstrate(one, ChunkSFTConfig(episodes=6), 0, lines.append)
    assert shown.num_episodes == 6
    assert not any(colour in text for text in shown.obs.texts for colour in ("red", "blue"))
    (line,) = [line for line in lines if "for want of a script" in line]
    assert "red" in line or "blue" in line
    one.unscripted = ("",)
    with pytest.raises(UsageError, match="no script could demonstrate: push the"):
        demonstrate(one, ChunkSFTConfig(episodes=6), 0)


def test_a_script_that_only_fails_is_reported_soon() -> None:
    one = PushBlock(ChunkEnvConfig(episode_steps=8), seed=0)  # too short for anything
    with pytest.raises(UsageError, match="succeeded in 0 of 20 episodes"):
        demonstrate(one, ChunkSFTConfig(episodes=1_000), 0)


def player(net: VLAPolicy, greedy: bool = True, **settings: Any) -> TokenPlayer:
    few = settings.pop("env", env())
    return chunk_player(ChunkSampler(policy=net, env=few, algo=chunk_defaults(**settings)), greedy)


def test_a_player_samples_as_rollouts_do() -> None:
    still = ActionScale(low=(-1.0, -1.0, -0.1, 0, 0, 0, 0), high=(1.0, 1.0, 0.1, 0, 0, 0, 1.0), scaled=SCALE.scaled)
    net = policy()
    net.scale = still
    episodes = player(net, min_range=0.2).roll([1_000_000, 1_000_001], False)
    log_probs = np.concatenate([np.stack(episode.log_probs) for episode in episodes]).reshape(-1, 7)
    assert ((log_probs == 0).all(axis=0)).tolist() == [False, False, True, True, True, True, False]


def test_equal_greedy_episodes_are_no_evidence() -> None:
    """Of three initial states a greedy policy has three episodes, however many are asked for; sampled ones differ."""
    few = env()
    few.num_held_out = 3
    net, seeds = policy(), range(FIRST_HELD_OUT_STATE, FIRST_HELD_OUT_STATE + 5)
    assert len(player(net, env=few).play(seeds)) == 3
    assert len(player(net, env=few, greedy=False).play(seeds)) == 5


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
    loss = token_loss(logits, bins, targets, only_first)
    assert loss.item() == pytest.approx(np.log(256) / 2, abs=1e-4)
    assert token_loss(logits, bins, targets, torch.tensor([True, True])).item() > 10
