"""The whole algorithm on RLlib: rounds, evaluation, and a continuation that repeats to the bit."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient, PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.chunks import ChunkSampler
from rlvlm.algorithms.policy_gradient.config import AdvantageConfig, chunk_defaults
from rlvlm.algorithms.policy_gradient.player import chunk_player, load_vla, take_vla
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core import metrics
from rlvlm.core.console.signals import StoppedEarly
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.judging import Clip, Score
from rlvlm.demonstrations.chunk_form import form_of
from rlvlm.demonstrations.collect import Disturbance, collect, play_episodes
from rlvlm.demonstrations.folder import create_folder
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.libero.config import LiberoConfig
from rlvlm.envs.registry import make_env
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.judge import Judge
from rlvlm.labels.images import image_digest
from rlvlm.labels.store import LabelStore
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.pocket import PocketVLA
from rlvlm.rewards.config import ChunkRewardConfig, MonitorConfig, TurnRewardConfig
from rlvlm.testing import FakeJudge
from tests.algorithms.policy_gradient.tiny_runs import chunk_config

pytestmark = pytest.mark.ray

Build = Callable[..., PolicyGradient]
SUCCESS = ChunkRewardConfig()


@pytest.fixture
def build(local_ray: None) -> Iterator[Build]:
    """Builds small algorithms and stops them after the test."""
    built: list[PolicyGradient] = []

    def make(
        seed: int = 0,
        scores: TurnRewardConfig = SUCCESS,
        data: str = "",
        start_from: str = "",
        head: str = "tokens",
        hidden: int = 64,
        has_values: bool = False,
        make_judge: Callable[[], Judge] = FakeJudge,
        **algo: Any,
    ) -> PolicyGradient:
        algorithm = chunk_config(
            head=head,
            pocket={"hidden": hidden, "has_values": has_values},
            sft=ChunkSFTConfig(episodes=20, updates=60, demonstrations=data, start_from=start_from),
            reward=scores,
            make_judge=make_judge if scores.asks_judge else None,
            seed=seed,
            **({"groups": 6, "group_size": 4, "rounds": 2} | algo),
        ).build_algo()
        assert isinstance(algorithm, PolicyGradient)
        built.append(algorithm)
        return algorithm

    yield make
    for algorithm in built:
        algorithm.stop()


def numbers(algorithm: PolicyGradient) -> dict[str, float]:
    """What it reports, but for what a clock says."""
    numbers = {name: value for name, value in algorithm.report().items() if np.isfinite(value)}
    clocks = (metrics.ROLLOUT_S, metrics.ROLLOUT_WAIT_S, metrics.UPDATE_S, metrics.REWARD_WAIT_S, metrics.SFT_WALL_S)
    for clock in clocks:
        assert numbers.pop(clock, 0.0) >= 0
    return numbers


def test_rounds_from_demonstrations_to_evaluation(build: Build, tmp_path: Path) -> None:
    algorithm = build()
    lines: list[str] = []
    algorithm.prepare(lines.append)
    assert "20 demonstrations" in lines[0] and algorithm.env_steps == 0
    result = algorithm.train()
    assert algorithm.env_steps > 0 and np.isfinite(result["score"])
    assert algorithm.report()[metrics.EPISODES] % 24 == 0
    assert 0 <= algorithm.report()[metrics.GROUP_KEPT] <= 1
    evaluation = algorithm.evaluate_policy(5)
    assert len(evaluation.episodes) == 5
    assert 0 <= evaluation.metrics[metrics.EVAL_SAMPLED_SUCCESS] <= 1
    algorithm.save_checkpoint(str(tmp_path / "checkpoint"))
    env = make_env("push_block", ChunkEnvConfig(episode_steps=32), 0)
    policy = load_vla(tmp_path / "checkpoint", env, VLAConfig())
    again = chunk_player(ChunkSampler(policy=policy, env=env)).play(range(1_000_000, 1_000_005))
    for one, other in zip(again, evaluation.episodes, strict=True):
        assert np.array_equal(one.snapshots, other.snapshots)


def test_a_collected_folder_teaches_the_same_as_the_runs_own_demonstrations(build: Build, tmp_path: Path) -> None:
    env = make_env("push_block", ChunkEnvConfig(episode_steps=32), 0)
    form = asdict(form_of(env))
    settings = asdict(ChunkEnvConfig(episode_steps=40))
    folder = create_folder(tmp_path / "d", "push_block", "chunks", env=settings, chunks=form)
    collect(env, Disturbance(noise=ChunkSFTConfig().noise), folder, 20, seed=3)
    lines: list[str] = []
    reading, playing = build(seed=3, data=str(tmp_path / "d")), build(seed=3)
    reading.prepare(lines.append)
    playing.prepare(lines.append)
    assert "was collected with env.episode_steps 40, not 32" in lines[0]
    assert "20 demonstrations from" in lines[1] and " by script-noise-0.05; left out" in lines[1]
    assert "20 demonstrations by the task's expert" in " ".join(lines)
    for mine, theirs in zip(reading.policy.parameters(), playing.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert reading.report()[metrics.SFT_DEMONSTRATIONS] == 20


def test_a_supervised_start_that_was_stopped_ends_as_one_that_was_not(build: Build, tmp_path: Path) -> None:
    def stop(line: str) -> None:
        if line.startswith("supervised start: update "):
            raise StoppedEarly

    whole, stopped, resumed = (build() for _ in range(3))
    whole.prepare(lambda line: None)
    with pytest.raises(StoppedEarly):
        stopped.prepare(stop, tmp_path / "start")
    told: list[str] = []
    resumed.prepare(told.append, tmp_path / "start")
    assert "going on after update 1 of 60" in told
    for algorithm in (whole, resumed):
        algorithm.train()
    assert numbers(resumed) == numbers(whole)
    for one, other in zip(resumed.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_begins_with_the_policy_of_another(build: Build, tmp_path: Path) -> None:
    before = build()
    before.prepare(lambda line: None)
    before.train()
    before.save_checkpoint(str(tmp_path / "step" / "algorithm"))
    lines: list[str] = []
    after = build(seed=7, start_from=str(tmp_path / "step"))
    after.prepare(lines.append)
    assert "starting from the policy of" in lines[0] and not any("demonstrations by" in line for line in lines)
    for mine, theirs in zip(after.policy.parameters(), before.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    again, once = (one.evaluate_policy(4).episodes for one in (after, before))
    assert all(np.array_equal(mine.snapshots, theirs.snapshots) for mine, theirs in zip(again, once, strict=True))
    other = build(start_from=str(tmp_path / "step"), hidden=32)
    with pytest.raises(UsageError, match=r"was built with policy\.pocket\.hidden 64"):
        other.prepare(lambda line: None)
    config = before.rollouts.policy.config
    libero = PocketVLA(config.pocket, num_cameras=2, proprio_size=8, num_tokens=56, num_offsets=6)
    libero.config = config
    was = [parameter.clone() for parameter in libero.parameters()]
    with pytest.raises(UsageError, match="made for another env: .* there and .* here"):
        take_vla(tmp_path / "step" / "algorithm", libero)
    assert all(map(torch.equal, libero.parameters(), was)), "nothing is taken of what does not fit"


def test_a_policy_learns_from_images_that_were_kept_and_refuses_others(build: Build, tmp_path: Path) -> None:
    env = make_env("push_block", ChunkEnvConfig(episode_steps=32), 0)
    lines: list[str] = []

    def folder_of(name: str, task: str = "push_block", **form: object) -> str:
        kept = asdict(form_of(env, image_px=16)) | form
        folder = create_folder(tmp_path / name, task, "chunks", chunks=kept)
        perturbation = Disturbance(noise=ChunkSFTConfig().noise)
        for record in play_episodes(env, perturbation, task, wanted=20, seed=0):
            images = env.draw(record.arrays["snapshots"][:-1], 16)
            arrays = {key: record.arrays[key] for key in ("actions", "proprio", "steps")}
            digests = np.array([[image_digest(image)] for image in images])
            folder.add(replace(record, arrays=arrays | {"pictures": digests}), images)
        return str(tmp_path / name)

    looking, drawing = build(data=folder_of("images")), build()
    looking.prepare(lines.append)
    drawing.prepare(lines.append)
    for mine, theirs in zip(looking.policy.parameters(), drawing.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for odd, message in (
        (folder_of("large", image_px=24), "keeps images of 24 pixels, and the policy looks at 16"),
        (folder_of("short", chunk_steps=4), "chunk_steps 4, not 8"),
        (folder_of("narrow", action_size=2), "action_size 2, not 7"),
        (folder_of("cameras", cameras=["above", "wrist"]), "cameras"),
        (folder_of("other", "libero_object/0"), "holds demonstrations of libero_object/0, not of push_block"),
    ):
        with pytest.raises(UsageError, match=message):
            build(data=odd).prepare(lines.append)


def test_an_evaluation_changes_nothing(build: Build) -> None:
    looked, alone = build(), build()
    for algorithm in (looked, alone):
        algorithm.prepare(lambda line: None)
    looked.evaluate_policy(3)
    for algorithm in (looked, alone):
        algorithm.train()
    assert numbers(looked) == numbers(alone)


@pytest.mark.parametrize("head", ["tokens", "flow"])
def test_a_continuation_repeats_to_the_bit(build: Build, tmp_path: Path, head: str) -> None:
    # with a critic of its own to save, or a value by which turns are shaped
    own: dict[str, Any] = {"advantage": AdvantageConfig(gamma=1.0, values="state")}
    if head == "flow":
        scores = ChunkRewardConfig(source="judged", teacher="biased", shaping="value")
        own = {"advantage": AdvantageConfig(estimator="rloo_turns"), "scores": scores}
    algorithm = build(head=head, **own)
    algorithm.prepare(lambda line: None)
    algorithm.train()
    algorithm.save_checkpoint(str(tmp_path / "half"))
    algorithm.train()
    algorithm.save_checkpoint(str(tmp_path / "whole"))
    other = build(head=head, **own)
    other.load_checkpoint(str(tmp_path / "half"))
    other.train()
    other.save_checkpoint(str(tmp_path / "again"))
    assert numbers(algorithm) == numbers(other)
    assert head == "tokens" or numbers(algorithm)[metrics.VALUE_SHAPING] > 0
    assert (tmp_path / "whole" / "state.json").read_bytes() == (tmp_path / "again" / "state.json").read_bytes()
    with np.load(tmp_path / "whole" / "arrays.npz") as one, np.load(tmp_path / "again" / "arrays.npz") as two:
        assert one.files == two.files and len(one.files) > 20
        for name in one.files:
            np.testing.assert_array_equal(one[name], two[name], err_msg=name)


@pytest.mark.parametrize("head", ["tokens", "flow"])
def test_a_stale_update_learns_from_the_rollout_before_and_none_is_lost(
    build: Build, tmp_path: Path, head: str
) -> None:
    untested = MonitorConfig(preflight=0, controls=0)
    scores = ChunkRewardConfig(source="judged", frame_px=16, num_frames=3, monitor=untested)
    # so that some of so few groups differ in every rollout
    temperature = 3.0 if head == "flow" else 1.0
    algorithm = build(scores=scores, rounds=1, staleness=1, head=head, temperature=temperature)
    algorithm.prepare(lambda line: None)
    for updates, staleness in ((1, 0), (2, 1), (3, 1)):
        algorithm.train()
        report = algorithm.report()
        assert (report[metrics.UPDATES], report[metrics.STALENESS]) == (updates, staleness)
        records = algorithm.drain_records()
        assert len(records) == 24 and {one.env_step for one in records} == {algorithm.env_steps}
        assert report[metrics.GROUP_SCORE] == pytest.approx(np.mean([one.score.value or 0.0 for one in records]))
    algorithm.save_checkpoint(str(tmp_path / "one"))  # learns from what is under way
    assert algorithm.report()[metrics.UPDATES] == 4 and len(algorithm.drain_records()) == 24
    saved = algorithm.env_steps
    algorithm.flush_pending()
    assert algorithm.env_steps == saved, "nothing was under way any more"
    other = build(scores=scores, rounds=1, staleness=1, head=head, temperature=temperature)
    other.load_checkpoint(str(tmp_path / "one"))
    for one in (algorithm, other):
        one.train()
        one.finish()
    assert numbers(algorithm) == numbers(other) and numbers(other)[metrics.UPDATES] == 6


@pytest.mark.slow
def test_rollouts_that_go_on_while_the_learner_learns_are_those_that_wait_for_it(build: Build) -> None:
    """Which weights play a rollout is decided by its number and not by who is faster."""
    untested = MonitorConfig(preflight=0, controls=0)
    scores = ChunkRewardConfig(source="judged", frame_px=16, num_frames=3, monitor=untested)
    # without an env runner each rollout ends before anything else begins
    pair = [build(scores=scores, rounds=1, staleness=2, env_runners=runners) for runners in (1, 0)]
    for algorithm in pair:
        algorithm.prepare(lambda line: None)
        ages = []
        for _ in range(4):
            algorithm.train()
            ages.append(algorithm.report()[metrics.STALENESS])
        assert ages == [0, 1, 2, 2]
        evaluation = algorithm.evaluate_policy(3)
        assert algorithm.report()[metrics.UPDATES] == 6 and len(evaluation.episodes) == 3
    one, two = map(numbers, pair)
    assert one == two


def test_a_judge_that_cannot_tell_success_from_failure_starts_nothing(build: Build) -> None:
    algorithm = build(scores=ChunkRewardConfig(source="judged", frame_px=16, num_frames=3))  # it prefers bright images
    with pytest.raises(JudgeUnavailable, match="does not tell success from failure") as caught:
        algorithm.prepare(lambda line: None)
    assert caught.value.exit_code == 5 and "--judge.faulty ok" in caught.value.fix


def test_a_die_whose_noise_is_measured_teaches_nothing(build: Build, tmp_path: Path) -> None:
    scores = ChunkRewardConfig(source="judged", teacher="random")
    gated = AdvantageConfig(estimator="grpo", scorer_noise="measured")
    algorithm = build(scores=scores, advantage=gated, rounds=1)
    algorithm.prepare(lambda line: None)
    assert algorithm.report()[metrics.JUDGE_PREFLIGHT_NOISE] == pytest.approx(1 / np.sqrt(12), abs=0.06)
    algorithm.save_checkpoint(str(tmp_path / "start"))
    resumed = build(scores=scores, advantage=gated, rounds=1)
    resumed.load_checkpoint(str(tmp_path / "start"))
    for one in (algorithm, resumed):
        one.train()
        assert (one.report()[metrics.UPDATES], one.report()[metrics.GROUP_KEPT]) == (0, 0)
    ungated = build(scores=scores, rounds=1)
    ungated.prepare(lambda line: None)
    ungated.train()
    assert (ungated.report()[metrics.UPDATES], ungated.report()[metrics.GROUP_KEPT]) == (1, 1)


class WaveringJudge(FakeJudge):
    """Likes dark images, and is of another mind each time it is asked about the same clip."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = Counter[bytes]()

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        scores = []
        for clip, score in zip(clips, super().score(clips), strict=True):
            self._asked[clip.frames.tobytes()] += 1
            change = 0.02 * (-1) ** self._asked[clip.frames.tobytes()]
            scores.append(replace(score, value=1 - (score.value or 0.0) + change))
        return scores


def test_a_judge_is_asked_twice_for_its_noise_though_its_answers_are_remembered(build: Build, tmp_path: Path) -> None:
    # which of two answers a control or an episode gets depends on how many were asked before: near the usual bound
    scores = ChunkRewardConfig(source="judged", frame_px=16, num_frames=3, monitor=MonitorConfig(min_auc=0.5))
    noisy = AdvantageConfig(estimator="grpo", scorer_noise="measured")
    algorithm = build(
        scores=scores, advantage=noisy, make_judge=lambda: CachedJudge(WaveringJudge(), LabelStore(tmp_path))
    )
    algorithm.prepare(lambda line: None)
    assert algorithm.report()[metrics.JUDGE_PREFLIGHT_NOISE] == pytest.approx(0.04 / np.sqrt(2))


def test_figures_are_of_all_rounds_of_an_update(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = build(rounds=2)
    algorithm.prepare(lambda line: None)
    source = algorithm.source
    played, scored = [], source.labelled

    def record(episodes: list[TokenEpisode]) -> list[TokenEpisode]:
        played.extend(episodes)
        return scored(episodes)

    monkeypatch.setattr(source, "labelled", record)
    groups = {one.group for one in source.next()}
    assert len(played) == 48 and len(groups) < 6, "one round did not find enough"
    report = algorithm.report()
    assert report[metrics.GROUP_KEPT] == pytest.approx(len(groups) / 12)
    assert report[metrics.TRAIN_EPISODE_SUCCESS] == pytest.approx(np.mean([one.is_success for one in played]))


MEASURED = chunk_defaults(advantage=AdvantageConfig(estimator="grpo", scorer_noise="measured"))
UNMEASURED = ChunkRewardConfig(source="judged", teacher="random", monitor=MonitorConfig(preflight=0))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"algo": MEASURED}, "measured needs reward.source judged"),
        ({"algo": MEASURED, "reward": UNMEASURED}, "and reward.monitor.preflight episodes"),
        ({"algo": chunk_defaults(staleness=1, rounds=1)}, "algo.staleness 1 has no effect where the run's own process"),
        ({"sft": ChunkSFTConfig(scenes=3)}, "sft.scenes 3 has no effect"),
        ({"reward": ChunkRewardConfig(source="judged")}, "a judge's score needs one"),
    ],
)
def test_settings_of_two_sections_are_refused_in_rllibs_config_as_in_a_run(settings: Any, says: str) -> None:
    config = PolicyGradientAlgorithmConfig().settings(task="push_block", policy=VLAConfig(), algo=chunk_defaults())
    with pytest.raises(ValueError, match=says):
        config.settings(**settings).validate()


@pytest.mark.parametrize("head", ["tokens", "flow"])
def test_ppo_learns_chunks_by_a_value_head_of_the_policys_own(build: Build, tmp_path: Path, head: str) -> None:
    own: dict[str, Any] = {"head": head} | {
        "advantage": AdvantageConfig(gamma=0.99),
        "has_values": True,
        "shrinkage": False,
    }
    algorithm, other = build(**own), build(**own)
    algorithm.prepare(lambda line: None)
    before = {name: value.clone() for name, value in algorithm.policy.trained_state().items()}
    algorithm.train()
    report = algorithm.report()
    assert report[metrics.UPDATE_FIRST_RATIO] <= 1e-5 and np.isfinite(report[metrics.UPDATE_VALUE_LOSS])
    moved = {name for name, value in algorithm.policy.trained_state().items() if not torch.equal(value, before[name])}
    assert {"value_head" in name for name in moved} == {True, False}
    algorithm.save_checkpoint(str(tmp_path / "half"))
    algorithm.train()
    other.load_checkpoint(str(tmp_path / "half"))
    other.train()
    assert numbers(algorithm) == numbers(other)


def test_chunks_may_be_judged_one_by_one(build: Build) -> None:
    """By the labeller that judges turns: each chunk's first and last moment, and a reward for each chunk."""
    untested = MonitorConfig(preflight=0, controls=0)
    reward = ChunkRewardConfig(source="judged", per="turn", frame_px=16, monitor=untested)
    algorithm = build(scores=reward, rounds=1)
    algorithm.prepare(lambda line: None)
    algorithm.train()
    episodes, records = algorithm.source.newest, algorithm.drain_records()
    assert len(records) == sum(map(len, episodes)) and all(len(one.item.snapshots) == 2 for one in records)
    assert [one.score.value for one in records] == pytest.approx(
        np.concatenate([episode.rewards for episode in episodes])
    )


@pytest.mark.slow
def test_judge_and_policy_each_see_their_own_look(local_ray: None) -> None:
    """A pocket policy plays what is drawn lightly, and a large judge is shown the shadows that it knows."""
    light = LiberoConfig(episode_steps=16, render_style="light", mesh_cell=0.012)
    config = (
        PolicyGradientAlgorithmConfig()
        .settings(algo=chunk_defaults(), task="libero_object/0", env_settings=light, policy=VLAConfig())
        .settings(
            reward=ChunkRewardConfig(source="judged"),
            make_judge=FakeJudge,
            judge_env=replace(light, render_style="benchmark"),
        )
    )
    algorithm = config.build_algo()
    assert isinstance(algorithm, PolicyGradient)
    env = make_env("libero_object/0", replace(light, render_style="benchmark"), 0)
    start = env.snapshot()[None]
    np.testing.assert_array_equal(algorithm.draw_for_judge(start, 64), env.draw(start, 64))
    apart = np.abs(algorithm.draw(start, 64).astype(int) - env.draw(start, 64)).mean()
    assert apart > 2, apart
    algorithm.stop()
