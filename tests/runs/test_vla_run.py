"""A run of push_block from demonstrations to its pages; its config; and a run that was killed and goes on."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import start

from rlvlm.core.errors import EXIT_PREEMPTED, JudgeUnavailable, UsageError
from rlvlm.demonstrations.folder import create_folder
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.tokens import ActionScale
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.runs.start import build
from rlvlm.runs.start.preflight import check_before_run
from rlvlm.serving.client import answering_judge

WORDS = (
    "push_block --steps 6000 --seed 1 --sft.episodes 12 --sft.updates 40 --algo.groups 6 --algo.group-size 4 "
    "--algo.rounds 1 --policy.pocket.hidden 32 --policy.pocket.image-px 16 --eval.every-steps 2000 --eval.episodes 4 "
    "--track.checkpoint-every-steps 1000 --track.log-every-steps 1000"
).split()


def test_an_evaluation_plays_the_policy_greedily_and_sampled(monkeypatch):
    config = recipe("push_block")
    env = make_env("push_block", config.env, 0)
    scale = ActionScale(low=(-1.0,) * 7, high=(1.0,) * 7, scaled=(True,) * 7)
    policy: Any = build_policy(config.policy, env)
    policy.scale = scale
    monkeypatch.setattr("rlvlm.algorithms.policy_gradient.player.load_vla", lambda *_: policy)
    played_in: list[StepEnvConfig] = []

    def remembered(task: str, env: StepEnvConfig, seed: int) -> Any:
        played_in.append(env)
        return make_env(task, env, seed)

    monkeypatch.setattr("rlvlm.runs.settings.chunks_run.make_env", remembered)
    of_training = replace(config.env, continue_after_success=True)
    players = build.open_players(replace(config, env=of_training), Path())
    assert played_in == [config.env]
    others = dict(players.others)
    greedy, again, sampled = (one.play([5]) for one in (players.own, players.own, others.pop("policy, sampled")))
    assert players.name == "policy, greedy" and not others
    assert np.array_equal(greedy[0].snapshots, again[0].snapshots)
    assert not np.array_equal(greedy[0].snapshots, sampled[0].snapshots)


@pytest.mark.ray
@pytest.mark.slow
def test_a_signal_during_demonstrations_does_not_wait_for_the_rest(ray_address, tmp_path):
    words = (*WORDS, "--sft.episodes", "100000", "--out", str(tmp_path / "run"))
    process = start("run", *words, RAY_ADDRESS=ray_address)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "demonstrations: 50 of 100000" in line:
            process.send_signal(signal.SIGINT)
    assert process.wait(60) == EXIT_PREEMPTED
    [asked] = [line for line in lines if line.startswith("SIGINT: ")]
    assert "of which supervised updates are kept" in asked and "then saving" not in asked
    assert "nothing was there to save" in lines[-1] and "rlvlm resume" in lines[-1]
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


@pytest.mark.ray
def test_a_last_resort_that_is_not_there_is_missed_at_the_start(local_ray):
    with pytest.raises(JudgeUnavailable, match=r"reward\.fallback_judge.*nothere") as caught:
        answering_judge("nothere", None)
    assert "--reward.fallback-judge" in caught.value.fix


def test_demonstrations_of_another_task_are_refused_before_anything_starts(tmp_path):
    create_folder(tmp_path / "d", "libero_object/0", "chunks", chunks={})
    with pytest.raises(UsageError, match="demonstrations of libero_object/0, not of push_block"):
        check_before_run(override(recipe("push_block"), {"sft.demonstrations": str(tmp_path / "d")}))


def test_another_judge_than_the_pocket_ones_is_not_shown_their_frames_without_a_word():
    judged = override(recipe("libero_object/8"), {"reward.source": "judged"})
    attached = override(judged, {"serve.app": "robometer-4b"})
    notes = judged.kind.notes
    assert not notes(judged) and "robometer-4b score" in attached.reward_name
    assert "--reward.flip-images" in notes(attached)[0]
    assert notes(override(judged, {"judge.backend": "openai", "judge.model": "some"})) == notes(attached)
    assert not notes(override(attached, {"reward.num_frames": 8}))
    elsewhere = override(recipe("push_block"), {"reward.source": "judged", "serve.app": "robometer-4b"})
    assert not notes(elsewhere), "its images are not mirrored"


@pytest.mark.parametrize("task", ["libero_goal/0", "libero_10/5"])
def test_a_pocket_judge_is_not_asked_how_an_unknown_tasks_episodes_end(task):
    config = recipe(task)
    tasks = config.kind.judge_knows(config)
    assert tasks and task not in tasks
    for known in (recipe("libero_object/4"), recipe("push_block")):
        assert known.task in known.kind.judge_knows(known)
