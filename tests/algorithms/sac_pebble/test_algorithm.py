import dataclasses
import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from state_trees import assert_same

from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.core import metrics
from rlvlm.core.errors import MachineError, UsageError
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.envs.registry import Task
from rlvlm.judge_bench.preflight import JudgeRefused
from rlvlm.judges.config import JudgeConfig
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig, SimulatedTeacherConfig
from rlvlm.rewards.config import ExplorationConfig, StepRewardConfig
from rlvlm.testing import FakeJudge, TinyEnv

pytestmark = pytest.mark.ray


class ScrambledEnv(TinyEnv):
    """A TinyEnv whose true reward is noise."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, math.sin(1e4 * float(obs.sum()) + reward), terminated, truncated, info


class WideEnv(TinyEnv):
    """A TinyEnv with one more number in its snapshots."""

    snapshot_size = TinyEnv.snapshot_size + 1

    def snapshot(self):
        return np.append(super().snapshot(), np.float32(0))


WIDE = Task(name="wide", goal="push", maker=f"{__name__}:WideEnv")
SCRAMBLED = Task(name="scrambled", goal="push", maker=f"{__name__}:ScrambledEnv")
TINY = "rlvlm.testing:TINY"
PREFERENCE = StepRewardConfig(source="preference", teacher="judge", model="image")


@pytest.fixture
def build(local_ray):
    """Builds small algorithms and stops them after the test."""
    built = []

    def make(reward, task=TINY, seed=0, num_envs=2, env=None, feedback=None, reward_model=None, judge=None, **sac):
        ours = MetaWorldConfig(episode_steps=20, num_envs=num_envs, start="random", robot="visible")
        config = (
            SACPebbleConfig()
            .settings(task=task, env_settings=env or ours)
            .settings(
                sac=SACConfig(
                    **{
                        "hidden": (32, 32),
                        "batch_size": 32,
                        "seed_steps": 40,
                        "turn_steps": 7,
                        "replay_capacity": 200,
                        "critic_reset_updates": 5,
                        **sac,
                    }
                )
            )
            .settings(
                reward=reward,
                feedback=feedback or FeedbackConfig(first_step=100, every_steps=60, queries=10),
                reward_model=reward_model
                or RewardModelConfig(image_px=32, max_epochs=3, min_updates=0, hold_out_every=0),
                judge=judge or JudgeConfig(image_px=32),
                make_judge=functools.partial(FakeJudge),
            )
            .debugging(seed=seed)
        )
        built.append(config.build_algo())
        return built[-1]

    yield make
    for algorithm in built:
        algorithm.stop()


def train(algorithm, iterations):
    for _ in range(iterations):
        algorithm.train()
    return algorithm


def act(algorithm, num_steps):
    algorithm.runners.start({"num_steps": num_steps, "random_actions": True})
    return algorithm.runners.collect()


def tree(algorithm):
    return {
        "runner": algorithm.runners.get_state(),
        "learner": algorithm.learner.save_tree(),
        "schedule": algorithm.reward_switch.get_state(),
        "steps": algorithm.env_steps,
        "iteration": algorithm.iteration,
    }


def test_one_round_is_one_episode_of_every_env(build):
    algorithm = build(StepRewardConfig(source="environment"))
    result = algorithm.train()
    assert algorithm.env_steps == 40 and algorithm.report()[metrics.EPISODES] == 2
    assert algorithm.report()[metrics.UPDATES] == 0  # 40 random steps first
    algorithm.train()
    assert algorithm.report()[metrics.UPDATES] == 40  # one per step from then on
    assert math.isfinite(result["score"]) and all(map(math.isfinite, algorithm.report().values()))


@pytest.mark.parametrize(("updates_per_step", "expected"), [(0.25, [0, 2, 2]), (1.3, [0, 10, 10, 11, 10])])
def test_updates_per_step_may_be_a_fraction(updates_per_step, expected):
    # 8 steps a turn, 16 of them random: a turn's updates are what the steps so far are due beyond those before it
    sac = SACConfig(updates_per_step=updates_per_step, seed_steps=16)
    turns = range(16, 8 * len(expected) + 16, 8)
    assert [sac.updates_due(now, 8) for now in turns] == expected


def test_phases_of_a_run_on_preferences(build):
    algorithm = train(build(PREFERENCE), 2)  # 80 steps: novelty, labelled at the draw
    assert algorithm.reward_switch.learned is None and algorithm.drain_records() == []
    assert torch.isnan(algorithm.learner.replay.rewards).all()
    train(algorithm, 1)  # the first session falls due at 100 steps
    records = algorithm.drain_records()
    assert len(records) == 10 and algorithm.reward_switch.learned is not None
    assert algorithm.report()[metrics.UPDATES] == 80 + 5  # and five to catch up
    train(algorithm, 4)  # 280 steps in a replay of 200: all rows carry the newest reward
    replay, source = algorithm.learner.replay, algorithm.reward_switch.source
    assert len(replay) == 200 and source.version > 1
    np.testing.assert_allclose(replay.rewards.numpy(), source.label(replay.transitions(slice(0, 200))), atol=1e-5)
    assert algorithm.report()[metrics.QUERIES] == 10 * source.version


def exploring(**exploration):
    return StepRewardConfig(teacher="oracle", model="state", exploration=ExplorationConfig(**exploration))


def test_the_reward_is_the_members_mean_and_a_falling_share_of_their_spread(build):
    algorithm = train(build(exploring(bonus="disagreement", weight=0.5, decay=0.01)), 2)
    learner, schedule = algorithm.learner, algorithm.reward_switch
    assert schedule.bonus is None and not learner.replay.bonuses.any()
    train(algorithm, 1)  # the session at 108 steps, a turn after 100, puts the learned reward in force
    trained_on = []
    improve = learner._improve
    learner._improve = lambda batch: trained_on.append(batch) or improve(batch)
    for steps, version in ((160, 2), (200, 2), (240, 3), (280, 4)):
        train(algorithm, 1)
        assert (algorithm.env_steps, schedule.source.version) == (steps, version)
        replay, num_rows = learner.replay, len(learner.replay)
        rows = replay.transitions(slice(0, num_rows))
        read = torch.from_numpy(np.concatenate([rows.next_obs, rows.actions], axis=1))
        with torch.no_grad():
            rewards = torch.stack([member(read) for member in schedule._loop._model.ensemble.members])
        mean = rewards.sum(0) / 3
        spread = ((rewards - mean).square().sum(0) / 3).sqrt()
        torch.testing.assert_close(replay.rewards, mean, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(replay.bonuses, spread, atol=1e-5, rtol=1e-4)
        batch = trained_on[-1]
        place = [int((replay.obs - obs).square().sum(1).argmin()) for obs in batch.obs]
        expected = mean[place] + 0.5 * 0.99 ** (steps - 108) * spread[place]
        torch.testing.assert_close(batch.rewards, expected, atol=1e-5, rtol=1e-4)
        found = algorithm.report()[metrics.REPLAY_BONUS]
        assert found == pytest.approx(0.5 * 0.99 ** (steps - 108) * float(spread.mean()), rel=1e-3)
    assert spread.min() > 1e-4, "the members differ, so the formula was seen at work"


def test_novelty_beside_the_learned_reward_still_knows_every_state(build):
    algorithm = train(build(exploring(bonus="novelty", weight=0.5, decay=0.0)), 4)
    replay, schedule = algorithm.learner.replay, algorithm.reward_switch
    assert schedule.learned is not None and len(schedule.bonus.get_state()["states"]) == 160
    assert replay.bonuses.min() > 0, "those of before the session too"
    assert algorithm.report()[metrics.REPLAY_BONUS] == pytest.approx(0.5 * float(replay.bonuses.mean()))
    assert train(build(exploring(bonus="none")), 4).reward_switch.get_state()["novelty"] is None


def test_a_judged_run_trains_on_the_judges_word_about_every_new_image(build):
    algorithm = train(build(StepRewardConfig(source="judged")), 3)
    replay, env = algorithm.learner.replay, TinyEnv(MetaWorldConfig(robot="visible"))
    brightness = env.draw(replay.transitions(slice(0, 120)).snapshots, 32).mean(axis=(1, 2, 3)) / 255
    np.testing.assert_allclose(replay.rewards.numpy(), 2 * brightness - 1, atol=1e-6)
    assert len(np.unique(brightness)) > 5
    assert algorithm.report()[metrics.TRAIN_LEFT_OUT] == 0 and algorithm.report()[metrics.UPDATES] == 80
    records = algorithm.drain_records()
    assert len(records) == len({record.item.snapshots.tobytes() for record in records}) > 60
    assert {record.env_step for record in records} == {120} and algorithm.drain_records() == []


# each place where the state of a source lies; what is in it is held by `test_resume_contract`
UNLEARNED = [StepRewardConfig(source=source) for source in ("environment", "novelty", "judged")]
NOVEL = exploring(bonus="novelty")
# a learned reward takes over in the third round: a run may stop before that and after it
RESUMED = [*((reward, 3) for reward in (*UNLEARNED, PREFERENCE, NOVEL)), (NOVEL, 2)]


@pytest.mark.parametrize(
    ("reward", "stop_after"),
    RESUMED,
    ids=[f"{one.source}-{one.teacher}-{one.model}-{one.exploration.bonus}-{after}" for one, after in RESUMED],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(build, tmp_path, reward, stop_after):
    straight = train(build(reward), 6)
    first = train(build(reward), stop_after)
    first.evaluate_policy(1)
    first.save_checkpoint(str(tmp_path / "checkpoint"))
    resumed = build(reward)
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    train(resumed, 6 - stop_after)
    assert_same(tree(straight), tree(resumed))
    seconds = {metrics.TEACHER_WAIT_S, metrics.REWARD_FIT_S}
    left, right = (
        {name: value for name, value in run.report().items() if name not in seconds} for run in (straight, resumed)
    )
    assert left == right


def test_a_run_that_stops_within_an_episode_resumes_too(build, tmp_path):
    reward = StepRewardConfig(source="environment")
    straight, first, resumed = (build(reward) for _ in range(3))
    for algorithm in (straight, first):
        act(algorithm, 13)
    first.save_checkpoint(str(tmp_path / "checkpoint"))
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    left, right = act(straight, 13), act(resumed, 13)
    assert_same(dataclasses.asdict(left.transitions), dataclasses.asdict(right.transitions))
    for one, other in zip(left.episodes, right.episodes, strict=True):
        assert len(one) == 20
        assert_same(dataclasses.asdict(one), dataclasses.asdict(other))


def test_a_checkpoint_with_other_snapshots_is_refused(build, tmp_path):
    wide, other = (build(StepRewardConfig(source="environment"), task=task) for task in (f"{__name__}:WIDE", TINY))
    train(wide, 1)
    wide.save_checkpoint(str(tmp_path / "1"))
    wide.load_checkpoint(str(tmp_path / "1"))
    with pytest.raises(UsageError, match="have 4 numbers, and the env's have 3.*rlvlm 0.2 kept small images"):
        other.load_checkpoint(str(tmp_path / "1"))


def test_evaluating_changes_nothing(build):
    watched, alone = build(PREFERENCE), build(PREFERENCE)
    for _ in range(5):
        train(watched, 1), train(alone, 1)
        episodes = watched.evaluate_policy(2).episodes
    assert len(episodes) == 2 and len(episodes[0].env_rewards) == 20
    assert np.isfinite(episodes[0].learned_rewards).all()
    assert_same(tree(watched), tree(alone))


@pytest.mark.parametrize("reward", [PREFERENCE, StepRewardConfig(source="judged")], ids=lambda reward: reward.source)
def test_with_a_judge_the_true_reward_plays_no_part_in_training(build, reward):
    honest, scrambled = train(build(reward), 6), train(build(reward, task=f"{__name__}:SCRAMBLED"), 6)
    left, right = honest.learner.save_tree(), scrambled.learner.save_tree()
    truth = [tree["replay"]["columns"].pop("env_rewards") for tree in (left, right)]
    assert not np.array_equal(*truth)
    assert_same(left, right)


def test_a_folder_that_cannot_be_written_is_a_machine_error(build, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot write the checkpoint"):
        build(StepRewardConfig(source="success")).save_checkpoint(str(tmp_path / "file" / "checkpoint"))


def test_building_says_nothing_on_the_terminal(build, capfd):
    build(StepRewardConfig(source="environment")).train()
    captured = capfd.readouterr()
    assert "WARNING" not in captured.err and captured.out == ""


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda config: config.settings(task=""), "no task was chosen"),
        (lambda config: config.settings(make_judge=None), "a judge is to be asked and there is none"),
        (lambda config: config.env_runners(num_env_runners=1), "num_env_runners is 1, that of SACConfig 0"),
        (lambda config: config.learners(num_learners=1), "num_learners must be 0, got 1"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(change, rule):
    config = SACPebbleConfig().settings(task="rlvlm.testing:TINY", make_judge=FakeJudge)
    with pytest.raises(ValueError, match=rule):
        change(config).validate()


def calibrated(build, teacher):
    """A run on cartpole with the test of trust, and networks that see scaled states; sessions from 200 steps on."""
    return build(
        StepRewardConfig(source="preference", teacher=teacher, model="state"),
        task="cartpole",
        env=StepEnvConfig(episode_steps=50, num_envs=2),
        feedback=FeedbackConfig(
            first_step=200, every_steps=100, queries=100, simulated=SimulatedTeacherConfig(left=1.0)
        ),
        reward_model=RewardModelConfig(max_epochs=20),
        seed_steps=100,
        turn_steps=25,
        replay_capacity=1_000,
        is_calibrated=True,
    )


@pytest.mark.slow
def test_a_reward_from_labels_as_wrong_as_the_papers_takes_over_with_critics_that_begin_at_its_mean(build, tmp_path):
    algorithm = calibrated(build, "published")
    learner, schedule = algorithm.learner, algorithm.reward_switch
    critics = []
    restart = learner.restart_critics

    def restarted(*bonus_weight):
        restart(*bonus_weight)
        rows = learner.replay.draw(torch.arange(len(learner.replay)))
        value = learner.networks.critic(rows.obs, rows.actions).detach()
        critics.append((float(value.mean()), float(value.std()), float(learner.replay.rewards.mean())))

    learner.restart_critics = restarted
    train(algorithm, 1)
    assert schedule.learned is None and algorithm.report()[metrics.UPDATES] == 0
    train(algorithm, 1)  # the session at 200 steps
    found = algorithm.report()
    assert found[metrics.REWARD_IS_TRUSTED] == 1 and schedule.learned is schedule.source
    assert found[metrics.LABEL_ACCURACY] < 1, "some labels were wrong"
    ((mean, spread, reward),) = critics
    assert mean == pytest.approx(reward / (1 - 0.99), rel=0.2, abs=0.5) and spread < 1
    replay = learner.replay
    np.testing.assert_allclose(
        replay.rewards.numpy(), schedule.source.label(replay.transitions(slice(0, 200))), atol=1e-5
    )
    algorithm.save_checkpoint(str(tmp_path / "half"))
    train(algorithm, 2)
    assert len(critics) == 1, "critics start anew once"
    again = calibrated(build, "published")
    again.load_checkpoint(str(tmp_path / "half"))
    train(again, 2)
    assert_same(tree(algorithm), tree(again))


@pytest.mark.parametrize("name", ["brightness", "Effort", "BrighterSide"])
def test_the_example_of_an_own_reward_trains(build, name):
    own = f"{Path(__file__).parents[3] / 'examples' / 'own_reward.py'}:{name}"
    reward = StepRewardConfig(teacher=own, model="state") if name == "BrighterSide" else StepRewardConfig(source=own)
    algorithm = train(build(reward), 4)
    replay = algorithm.learner.replay
    assert algorithm.report()[metrics.UPDATES] > 0
    if name == "BrighterSide":
        records = algorithm.drain_records()
        assert len(records) == 20 and {record.verdict.stamp.judge for record in records} == {"teacher"}
    else:
        fresh = algorithm.reward_switch.source.label(replay.transitions(slice(0, len(replay))))
        np.testing.assert_allclose(replay.rewards.numpy(), fresh, rtol=1e-6)
        assert fresh.std() > 0


def test_pairs_of_the_preflight_are_compared_again_without_memory_while_the_judge_teaches(build):
    judge, feedback = JudgeConfig(image_px=32, faulty="ok"), FeedbackConfig(first_step=100, every_steps=60, queries=10)
    algorithm, twin = (build(PREFERENCE, judge=judge, feedback=feedback) for _ in range(2))
    algorithm.prepare(lambda _: None)
    asked, loop = [], algorithm.reward_switch._loop
    compare = loop.compare_anew
    loop.compare_anew = lambda pairs: (asked.append(len(pairs)), compare(pairs))[1]
    train(algorithm, 12)
    assert loop.num_sessions >= 6 and asked == [20, 20]  # in the first session and in the sixth
    assert algorithm.report()[metrics.JUDGE_KNOWN_SHIFT] == 0
    twin.reward_switch.set_state(algorithm.reward_switch.get_state())  # a resumed run has no preflight
    assert len(twin.reward_switch._loop.monitor.known_pairs(0)) == 20


def test_a_judge_may_be_tried_on_known_pairs_before_it_teaches(build):
    lines = []
    feedback = FeedbackConfig(first_step=100, every_steps=60, queries=10, preflight=30)
    algorithm = build(PREFERENCE, task="cartpole", feedback=feedback, env=StepEnvConfig(episode_steps=60))
    with pytest.raises(
        JudgeRefused, match="the judge .*nearer|the judge .*farther"
    ):  # brightness says nothing of a pole
        algorithm.prepare(lines.append)
    assert lines == ["trying the judge on 30 pairs whose truth is known, in both orders"]
    with pytest.raises(JudgeRefused):  # without being asked to
        build(PREFERENCE, task="cartpole", env=StepEnvConfig(episode_steps=60)).prepare(lines.append)
    assert lines[1:] == ["trying the judge on 24 pairs whose truth is known, in both orders"]
    untried = FeedbackConfig(first_step=100, every_steps=60, queries=10, preflight=0)
    algorithm = build(PREFERENCE, task="cartpole", feedback=untried, env=StepEnvConfig(episode_steps=60))
    assert algorithm.prepare(lines.append) is False and len(lines) == 2
