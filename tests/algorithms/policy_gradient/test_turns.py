import copy
import dataclasses
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from rlvlm.algorithms.policy_gradient.algorithm import check_versions
from rlvlm.algorithms.policy_gradient.batch import order_rows
from rlvlm.algorithms.policy_gradient.config import AdvantageConfig, LossConfig, rl4vlm_parity
from rlvlm.algorithms.policy_gradient.rollouts import TurnRollouts
from rlvlm.algorithms.sft_config import ReplySFTConfig
from rlvlm.algorithms.sft_folders import sft_manifest_of, write_sft_manifest
from rlvlm.core import metrics
from rlvlm.core.errors import UsageError
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.rewards.config import TurnRewardConfig
from tests.algorithms.policy_gradient.tiny_runs import BI_LEVEL, KL, KL_AND_ENTROPY, build, grouped
from tests.oracles import ppo_vlm as oracle
from tests.tiny_policy import FAMILIES

pytestmark = pytest.mark.ray


@pytest.fixture
def make(local_ray, tmp_path):
    """Builds small algorithms and stops them after the test."""
    built = []

    def one(*arguments: Any, **settings: Any) -> Any:
        built.append(build(tmp_path / "model", *arguments, **settings))
        return built[-1]

    yield one
    for algorithm in built:
        algorithm.stop()


def weights(algorithm: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in algorithm.learner.policy.trained_state().items()}


def assert_equal_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def played(algorithm: Any) -> list[Any]:
    """A rollout with its rewards."""
    source = algorithm.source
    source.begin()
    return source.labelled(source.ended())


@pytest.mark.parametrize(
    ("algo", "head"),
    [
        (KL_AND_ENTROPY, "text"),
        ({"loss": rl4vlm_parity().loss}, "text"),
        (BI_LEVEL, "text"),
        ({"advantage": AdvantageConfig(estimator="gae_tokens")}, "text"),
        (grouped("gigpo"), "text"),
        ({}, "actions"),
    ],
)
def test_a_round_with_each_kind_of_estimator_and_loss(make, algo, head):
    algorithm = make(algo, {"head": head})
    before = weights(algorithm)
    algorithm.train()
    report = algorithm.report()
    assert algorithm.env_steps >= 12
    assert all(np.isfinite(value) for value in report.values())
    assert report[metrics.UPDATE_FIRST_RATIO] <= 1e-4, "the learner must see what the engine sampled"
    # Replies of random weights are alike in worth, so groups have nothing to compare; all others learn.
    moved = any(not torch.equal(value, before[name]) for name, value in weights(algorithm).items())
    assert moved or algorithm._is_compared


@pytest.mark.parametrize(("family", "head"), [*((family, "text") for family in FAMILIES), (FAMILIES[0], "actions")])
def test_every_family_is_taught_and_learns_by_an_adapter_alone(make, family, head):
    algorithm = make(
        {"shrinkage": False} | ({} if head == "actions" else KL),
        {"learns": "lora", "lora_rank": 4, "head": head},
        ReplySFTConfig(turns=8, updates=2, batch_size=4),
        family=family,
        rollout_turns=8,
    )
    before = weights(algorithm)
    assert all("lora" in name or "head" in name for name in before), "the base is frozen"
    algorithm.prepare(lambda line: None)
    taught = weights(algorithm)
    algorithm.train()
    report, after = algorithm.report(), weights(algorithm)
    assert np.isfinite(report[metrics.SFT_LOSS]) and report[metrics.UPDATE_FIRST_RATIO] <= 1e-4
    for earlier, later in ((before, taught), (taught, after)):
        assert any("lora" in name and not torch.equal(value, later[name]) for name, value in earlier.items())


def test_micro_batches_give_the_gradient_of_the_whole(make):
    both = BI_LEVEL | KL  # with the passes of the reference
    whole, parts = make(both, microbatch_turns=8), make(both, microbatch_turns=3)
    tokens = make(both, microbatch_tokens=1400)
    gradients = []
    for algorithm in (whole, parts, tokens):
        learner = algorithm.learner
        learner.begin()
        episodes, sizes, pad = played(algorithm), [], learner.policy.pad

        def measured(*arguments: Any, pad: Any = pad, sizes: list[int] = sizes) -> Any:
            padded = pad(*arguments)
            sizes.append(padded.ids.numel())
            return padded

        learner.policy.pad = measured
        batch = learner.batches.make(episodes)
        learner.gradients.backward(batch, torch.arange(8), learner.parameters, 0)
        gradients.append([parameter.grad.clone() for parameter in learner.parameters if parameter.grad is not None])
    for others in gradients[1:]:
        for left, right in zip(gradients[0], others, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
    assert 0 < max(sizes) <= 1400, "what is read before an update is bounded, too"
    packed = learner.gradients.micro_batches(batch, torch.arange(8))
    assert 1 < len(packed) < 8 and sorted(torch.cat(packed).tolist()) == list(range(8))
    for part in packed:
        padded = learner.policy.pad(batch.obs.at(part.tolist()), [batch.answers[row]["ids"] for row in part.tolist()])
        assert padded.ids.numel() <= 1400, "what goes through at once, padding included"


def scorer() -> Judge:
    return build_judge(JudgeConfig(model="scorer", score="utility"))


def test_a_real_judge_rewards_every_turn_and_goes_on_where_it_was(make, tmp_path):
    """The pocket scorer on the replies of a policy with random weights: most cannot be read and change nothing."""
    judged = {"reward": TurnRewardConfig(source="judged"), "make_judge": scorer, "policy": {"head": "actions"}}
    first, second = make(**judged), make(**judged)
    lines: list[str] = []
    first.prepare(lines.append)
    assert lines[:2] == [
        "trying the judge on 64 turns whose worth is known",
        "AUC of success 1.00 (1.00 to 1.00), best threshold 0.38 (Youden's J 1.00)",
    ]
    first.train()
    records, report = first.drain_records(), first.report()
    assert len(records) == 12 == first.env_steps
    assert np.mean([abs(record.score.value - record.truth) < 0.1 for record in records]) == 1
    expected = np.mean([2 * record.score.value - 1 for record in records])
    assert report[metrics.REWARD_JUDGED] == pytest.approx(expected) == report[metrics.REWARD_TOTAL]
    assert report[metrics.JUDGE_TURN_AUC] == 1
    first.save_checkpoint(str(tmp_path / "saved"))
    first.train()
    second.load_checkpoint(str(tmp_path / "saved"))
    second.train()
    assert_equal_weights(weights(first), weights(second))


def test_the_value_of_a_state_that_was_cut_off_is_the_critics(make):
    algorithm = make(rollout_turns=40, num_envs=4)  # 10 turns an env: random replies meet the time limit
    torch.nn.init.constant_(algorithm.learner.policy.value_head[-1].bias, 3.0)
    episodes = played(algorithm)
    assert all(episode.is_over and not episode.terminated and len(episode) == 10 for episode in episodes)
    batches, seen = algorithm.learner.batches, []
    inner = batches._trajectories
    batches._trajectories = lambda *arguments: seen.append(inner(*arguments)) or seen[-1]
    batches.make(episodes)
    assert torch.all(seen[0].next_values == 3.0) and seen[0].ends[-1].all() and not seen[0].ends[:-1].any()


def test_groups_start_alike_and_others_do_not(make):
    episodes = played(make(grouped("grpo")))
    starts = [episode.obs.images[0] for episode in episodes]
    assert starts[0] == starts[1] and starts[2] == starts[3] and len(episodes) == 4
    assert [episode.group for episode in episodes] == [0, 0, 1, 1] and all(episode.is_over for episode in episodes)


def test_pieces_of_episodes_join_without_a_gap(make):
    algorithm = make(num_envs=2, rollout_turns=6)
    first, second = played(algorithm), played(algorithm)
    for slot in range(2):
        before, after = (next(one for one in some if one.slot == slot) for some in (first[::-1], second))
        if not before.is_over:
            assert after.first_step == before.num_steps and before.obs.images[-1] == after.obs.images[0]
    assert sum(map(len, first)) == sum(map(len, second)) == 6


def test_evaluations_repeat_and_leave_training_alone(make):
    watched, alone = make(), make()
    first, second = (watched.evaluate_policy(2) for _ in range(2))
    assert first.metrics == second.metrics
    assert [episode.captions for episode in first.episodes] == [episode.captions for episode in second.episodes]
    watched.train()
    alone.train()
    # not to the bit: on some processors sums depend on where memory lies, and an evaluation moves that; other replies
    # would change the weights by Adam's step size
    torch.testing.assert_close(weights(watched), weights(alone), rtol=1e-4, atol=1e-5)


def test_evaluations_of_more_envs_at_once_play_the_same_in_fewer_batches(make, monkeypatch):
    algorithm, found, sizes = make(num_envs=2, rollout_turns=4), [], list[int]()
    sample = algorithm.policy.sample

    def counted(obs: Any, *rest: Any) -> Any:
        sizes.append(len(obs))
        return sample(obs, *rest)

    monkeypatch.setattr(algorithm.policy, "sample", counted)
    for eval_envs in (0, 4):
        config = algorithm.config.copy(copy_frozen=False).settings(eval_envs=eval_envs)
        algorithm.rollouts = TurnRollouts(config, algorithm._viewer, algorithm.policy, algorithm.env_runner_group)
        sizes.clear()
        evaluation = algorithm.evaluate_policy(4)
        captions = [episode.captions for episode in evaluation.episodes]
        found.append((max(sizes), len(sizes), captions, evaluation.metrics))
    (small, many, *plain), (large, few, *wide) = found
    assert (small, large) == (2, 4) and few < many and wide == plain


def test_a_warm_up_of_the_critic_leaves_the_policy_where_it_was(make):
    algorithm = make(value_warm_up=1)
    before = weights(algorithm)
    algorithm.train()
    after = weights(algorithm)
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed and all(name.startswith("value_head") for name in changed)


@pytest.mark.slow
@pytest.mark.parametrize(("pays", "updates", "least", "most"), [("an action", 2, 0.8, 1.0), ("a die", 6, 0.0, 0.3)])
def test_only_the_part_of_an_update_beyond_chance_is_kept(make, pays, updates, least, most):
    algorithm = make(
        {"advantage": AdvantageConfig(gamma=0.0)}, {"head": "actions"}, num_envs=16, rollout_turns=64, minibatch_turns=8
    )
    algorithm.prepare(lambda line: None)
    learner, die, kept = algorithm.learner, np.random.default_rng(0), []

    def reward(episode: Any) -> np.ndarray:
        paid = [answer["ids"][0] == 1 if pays == "an action" else die.random() for answer in episode.answers]
        return np.array(paid, np.float32)

    for _ in range(updates):
        episodes = [dataclasses.replace(one, rewards=reward(one)) for one in played(algorithm)]
        before = weights(algorithm)
        learner.learn(episodes, 0.0)
        kept.append(learner.report()[metrics.UPDATE_KEPT])
        moved = {name for name, value in weights(algorithm).items() if not torch.equal(value, before[name])}
        assert any(name.startswith("value_head") for name in moved), "the critic learns from chance too: its mean"
        assert any(name.startswith("action_head") for name in moved) == (kept[-1] > 0)
    assert least <= np.mean(kept) <= most


@pytest.mark.parametrize("policy", [{}, {"learns": "lora", "lora_rank": 4}], ids=["all weights", "adapter"])
def test_the_reference_stays_where_ppo_started(make, tmp_path, policy):
    """That is the policy after its supervised start, not the model that this began with."""
    sft = ReplySFTConfig(turns=8, updates=2, batch_size=4, lr=1e-2)
    algorithm, resumed = (make(KL | {"shrinkage": False}, policy, sft) for _ in range(2))
    learner = algorithm.learner
    algorithm.prepare(lambda line: None)
    episodes, read = played(algorithm), learner.policy.log_probs
    before = learner.batches.make(episodes)
    with torch.no_grad():
        torch.testing.assert_close(before.reference, read(before.obs, before.answers).log_probs, rtol=0, atol=1e-5)
    algorithm.train()
    after = learner.batches.make(episodes)
    torch.testing.assert_close(after.reference, before.reference, rtol=0, atol=1e-5)
    with torch.no_grad():
        moved = read(before.obs, before.answers).log_probs - before.reference
    assert moved.abs().max() > 1e-4, "the policy itself moves on"
    algorithm.save_checkpoint(str(tmp_path / "saved"))
    resumed.load_checkpoint(str(tmp_path / "saved"))
    assert_equal_weights(resumed.learner.batches.start, learner.batches.start)
    assert_equal_weights(weights(resumed), weights(algorithm))


def test_a_run_starts_from_an_earlier_supervised_policy(make, tmp_path):
    taught = make()
    taught.train()
    taught.save_checkpoint(str(tmp_path / "algorithm"))
    fresh = make(sft=ReplySFTConfig(start_from=str(tmp_path)))
    fresh.prepare(lambda line: None)
    assert_equal_weights(weights(fresh), weights(taught))
    write_sft_manifest(tmp_path, sft_manifest_of("other", ChunkEnvConfig(), PolicyConfig(), ("left", "right")))
    with pytest.raises(UsageError, match="its actions are not"):
        make(sft=ReplySFTConfig(start_from=str(tmp_path))).prepare(lambda line: None)
    with pytest.raises(UsageError, match="not a folder of demonstrations"):
        make(sft=ReplySFTConfig(demonstrations=str(tmp_path))).prepare(lambda line: None)


def test_turns_that_are_alike_are_read_once_and_valued_alike(make):
    algorithm = make(BI_LEVEL | KL)
    algorithm.prepare(lambda line: None)
    batches, episodes = algorithm.learner.batches, played(algorithm)
    twins = [dataclasses.replace(episode, slot=episode.slot + 4) for episode in episodes]
    read: list[int] = []
    inner = batches._log_probs
    batches._log_probs = lambda obs, tokens: read.append(len(tokens)) or inner(obs, tokens)
    once = batches.make(episodes)
    half = sum(read)
    doubled = batches.make([*episodes, *twins])
    assert sum(read) == 2 * half and len(doubled.answers) == 2 * len(once.answers)
    assert once.reference is not None and doubled.reference is not None
    own = doubled.slots < 4
    torch.testing.assert_close(doubled.reference[own], once.reference, rtol=0, atol=1e-5)
    torch.testing.assert_close(doubled.values[own], once.values, rtol=0, atol=1e-5)


class RoundedEngine(PolicyEngine):
    """Samples with weights of fewer bits than the trainer's, as an engine in 8 bits does, and says with what odds."""

    def reply(self, *asked: Any, **settings: Any) -> Any:
        exact = {name: value.clone() for name, value in self.policy.trained_state().items()}
        noise = torch.Generator().manual_seed(0)
        rounded = {
            name: value + 0.15 * value.std() * torch.randn(value.shape, generator=noise) if value.ndim > 1 else value
            for name, value in exact.items()
        }
        with self.policy.with_weights(rounded):
            return super().reply(*asked, **settings)


class LateEngine(PolicyEngine):
    """Its first reply comes when four others have been asked for, one of them for an env's second turn."""

    def begin(self, *asked: Any, **settings: Any) -> list[Future[Any]]:
        future, replies = Future[Any](), self.reply(*asked, **settings)
        self.asked = [*getattr(self, "asked", []), (future, replies)]
        if len(self.asked) == 5:
            self.asked[0][0].set_result(self.asked[0][1])
        if len(self.asked) > 1:
            future.set_result(replies)
        return [future]

    def end(self, asked: list[Future[Any]]) -> Any:
        return [reply for future in asked for reply in future.result()]


def late_engine(policy: Any, *_: Any) -> LateEngine:
    return LateEngine(policy)


@pytest.mark.parametrize("algo", [{}, grouped("grpo") | {"rollout_turns": 0}])
def test_asynchronous_envs_do_not_wait_for_the_slowest_reply(make, algo):
    algorithm = make({"rollout": "asynchronous"} | algo, make_engine=late_engine)
    if not algo:
        # row by row the first reply would be waited for without end
        assert sum(map(len, played(algorithm))) == 12
    algorithm.train()  # groups of random weights are alike in worth, and teach nothing
    ratio = algorithm.report().get(metrics.UPDATE_FIRST_RATIO, 1.0 if not algo else 0.0)
    assert ratio <= 1e-4, "the learner must see what the engine sampled"
    with pytest.raises(ValueError, match="algo.rollout asynchronous needs engine.num_replicas"):
        make({"rollout": "asynchronous"})


class OwnEngine(PolicyEngine):
    """Samples with a copy of the policy, which is given weights as an engine elsewhere is; each reply takes 5 ms."""

    def __init__(self, policy: Any) -> None:
        super().__init__(copy.deepcopy(policy))
        self._trained, self._pool = policy, ThreadPoolExecutor(8)

    def pack(self, version: int, buckets: Any = ()) -> Any:
        return version, {name: value.clone() for name, value in self._trained.trained_state().items()}

    def use(self, weights: Any) -> None:
        self.version, state = weights
        self.policy.load_trained_state(state)

    def begin(self, *asked: Any, **settings: Any) -> list[Future[Any]]:
        [reply] = self.reply(*asked, **settings)
        return [self._pool.submit(lambda: time.sleep(0.005) or reply)]

    def end(self, asked: list[Future[Any]]) -> Any:
        return [future.result() for future in asked]


def own_engine(policy: Any, *_: Any) -> OwnEngine:
    return OwnEngine(policy)


@pytest.mark.parametrize("correction", ["none", "token"])
def test_carried_over_replies_are_learned_from_as_by_the_oracle(make, tmp_path, correction):
    """The loss of turns, some of which older weights drew than others, number by number from what was kept of each."""
    loss = LossConfig(correction=correction)
    algorithm = make({"rollout": "asynchronous", "staleness": 1, "loss": loss}, make_engine=own_engine)
    algorithm.prepare(lambda line: None)
    learner, rollouts = algorithm.learner, algorithm.rollouts
    runner, use_newest = rollouts._runner, rollouts._use_newest
    learner.begin()

    def update() -> Any:
        with torch.no_grad():
            for number, value in enumerate(learner.policy.trained_state().values()):
                noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(number))
                value.add_(0.1 * value.std(correction=0) * noise)
        algorithm._version += 1
        return rollouts.pack(algorithm._version, [])

    def update_once() -> None:
        if rollouts.engine.version == version:
            update()
        use_newest()

    weights = update()
    version, runner.use_newest = algorithm._version, update_once  # as the learner would, in the middle of a rollout
    rollouts.play(weights, is_compared=False)
    assert len(runner._asked) == 4, "every env waits for a reply that will be of the next rollout"
    runner.use_newest = use_newest
    episodes, _ = rollouts.play(update(), is_compared=False)
    episodes = algorithm.source.labelled(episodes)
    check_versions(episodes, algorithm._version, 1)
    assert {int(sampled) for episode in episodes for sampled in episode.versions} == {version + 1, version + 2}
    batch, rows = learner.batches.make(episodes), order_rows(episodes)
    log_probs = learner.policy.log_probs(batch.obs, batch.answers).log_probs.double()
    credit, expected = credited(episodes, learner), torch.zeros((), dtype=torch.float64)
    for row, (t, e) in enumerate(rows.indices):
        for now, drawn in zip(log_probs[row], episodes[e].log_probs[t].tolist(), strict=False):
            is_corrected = correction == "token"
            counts = min(math.exp(now.item() - drawn), loss.correction_cap) if is_corrected else 1.0
            ratio = torch.exp(now - (now.item() if is_corrected else drawn))
            expected = expected + counts * oracle.pessimist(ratio, credit[e][t], loss.clip_low) / len(rows.indices)
    wanted = torch.autograd.grad(expected, learner._acting, allow_unused=True)
    found = learner.gradients.backward(batch, torch.arange(len(rows.indices)), learner.parameters, 9)
    assert found[metrics.UPDATE_POLICY_LOSS] == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    scale = min(1.0, learner._algo.max_grad_norm / found[metrics.UPDATE_GRADIENT])
    norm = torch.stack([part.norm() for part in wanted if part is not None]).norm()
    for parameter, part in zip(learner._acting, wanted, strict=True):
        assert part is None or (parameter.grad - scale * part).norm() <= 1e-3 * norm
    # the whole of it, and from a checkpoint
    algorithm.train()
    algorithm.save_checkpoint(str(tmp_path / "saved"))
    algorithm.load_checkpoint(str(tmp_path / "saved"))
    algorithm.train()
    assert algorithm.report()[metrics.STALENESS] <= 1


def credited(episodes: Any, learner: Any) -> list[list[float]]:
    """The oracle's advantages of each turn of `episodes`, whose critic is asked about the states that follow a cut."""
    envs = []
    for episode in episodes:
        after = 0.0
        if not episode.terminated:
            after = learner.policy.values(episode.obs.at([len(episode)])).item()
        following = [*episode.values[1:].tolist(), after]
        ends = [*[False] * (len(episode) - 1), True]
        columns = zip(episode.rewards.tolist(), episode.values.tolist(), following, ends, strict=True)
        envs.append([dict(zip(("reward", "value", "next_value", "end"), each, strict=True)) for each in columns])
    config = learner._algo.advantage
    return oracle.turn_critic_credit(envs, config.gamma, config.gae_lambda)[0]


def rounded_engine(policy: Any, *_: Any) -> RoundedEngine:
    return RoundedEngine(policy)


def test_samples_of_another_engine_are_corrected_and_the_difference_is_reported(make, caplog):
    plain, corrected = (
        make({"loss": LossConfig(correction=name)}, make_engine=rounded_engine) for name in ("none", "token")
    )
    with caplog.at_level("WARNING"):
        plain.train()
    assert plain.report()[metrics.UPDATE_FIRST_RATIO] > 0.05 and metrics.ENGINE_KL not in plain.report()
    assert "--algo.loss.correction token" in caplog.text
    caplog.clear()
    corrected.train()
    found = corrected.report()
    assert found[metrics.UPDATE_FIRST_RATIO] < 1e-4, "ratios begin at the trainer's"
    assert found[metrics.ENGINE_KL] > 1e-4 and found[metrics.ENGINE_MAX_RATIO] > 1.1
    assert "off the trainer's" not in caplog.text
    same = make({"loss": LossConfig(correction="token")})
    same.train()
    assert same.report()[metrics.ENGINE_KL] < 1e-8 and same.report()[metrics.ENGINE_TRUNCATED] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_runs_in_bfloat16_repeat_and_resume_to_the_bit_on_a_gpu(make, tmp_path):
    settings = {"learns": "lora", "lora_rank": 4, "device": "cuda", "dtype": "bfloat16", "recompute": True}
    sft = ReplySFTConfig(turns=32, updates=4, batch_size=16)
    first, again, resumed = (make(KL, settings, sft, rollout_turns=48) for _ in range(3))
    for algorithm in (first, again):
        algorithm.train()
    first.save_checkpoint(str(tmp_path / "saved"))
    resumed.load_checkpoint(str(tmp_path / "saved"))
    for algorithm in (first, again, resumed):
        algorithm._forget_images()
        algorithm.train()
    assert_equal_weights(weights(first), weights(again))
    assert_equal_weights(weights(first), weights(resumed))
