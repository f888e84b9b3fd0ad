"""What can be known before Ray starts is said before, RAY_ADDRESS within seconds."""

import shlex
import socket
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from rlvlm.algorithms.sft_folders import sft_manifest_of, write_sft_manifest
from rlvlm.commands import eval as eval_command
from rlvlm.commands import resume, serve
from rlvlm.core.console.arguments import parse
from rlvlm.core.errors import JudgeUnavailable, MachineError, UsageError
from rlvlm.envs import rendering
from rlvlm.envs.registry import find_task, make_env
from rlvlm.judges import build
from rlvlm.pocket.models import weights_folder
from rlvlm.reports.options import BenchOptions
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.runs.files.checkpoints import RunState
from rlvlm.runs.files.folder import create_folder
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.settings.config import TrackConfig
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.runs.start import preflight
from rlvlm.runs.start.preflight import bench_command, check_before_play, check_before_run, cluster_address, port_is_free
from rlvlm.vlms.engines import http_client

ORACLE = StepsRun(task="drawer_open", reward=StepRewardConfig(teacher="oracle"))


def test_a_renderer_that_does_not_draw_stops_a_run_before_it_starts(monkeypatch):
    monkeypatch.setattr(preflight, "try_renderer", lambda backend: None if backend == "osmesa" else "broken")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(MachineError, match="drawing with egl does not work: broken"):
        check_before_run(ORACLE)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    check_before_run(ORACLE)


@pytest.mark.parametrize("task", ["cartpole", "number_line", "push_block", "empty_random_6x6"])
def test_a_run_without_opengl_needs_no_renderer(task, monkeypatch):
    for module in (preflight, rendering):
        monkeypatch.setattr(module, "try_renderer", lambda _: "there is none")
    monkeypatch.setenv("MUJOCO_GL", "")
    check_before_run(recipe(task))
    env: Any = make_env(task, recipe(task).env, 0)
    env.reset(seed=0)
    assert env.draw_sized(env.snapshot()[None], None if find_task(task).kind == "turns" else 64).any()


def test_a_renderer_that_was_just_chosen_is_not_tried_again(monkeypatch):
    tried: list[str] = []
    for module in (preflight, rendering):
        monkeypatch.setattr(module, "try_renderer", tried.append)
    monkeypatch.setenv("MUJOCO_GL", "")  # given back after the test
    check_before_run(ORACLE)
    assert len(tried) == 1


def test_a_taken_port_is_found_before_the_run():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free(port)
        with pytest.raises(MachineError, match=f"port {port}") as caught:
            check_before_run(replace(ORACLE, track=TrackConfig(dashboard=True, dashboard_port=port)))
        assert "--track.dashboard-port" in caught.value.fix
    assert port_is_free(port)


def test_demonstrations_without_a_script_are_refused_before_anything_starts():
    task = "minigrid/MiniGrid-Playground-v0"
    with pytest.raises(UsageError, match=f"no scripted expert.* those have none: {task}") as caught:
        check_before_run(recipe(task))
    assert "--sft.turns 0" in caught.value.fix
    check_before_run(override(recipe(task), {"sft.turns": 0}))


@pytest.mark.parametrize(
    ("task", "setting"),
    [
        ("number_line", "sft.demonstrations"),
        ("number_line", "sft.start_from"),
        ("number_line", "policy.adapter"),
        ("push_block", "sft.demonstrations"),
        ("push_block", "sft.start_from"),
    ],
)
def test_a_folder_that_is_not_there_or_holds_something_else_is_refused(task, setting, tmp_path):
    gone = override(recipe(task), {setting: "my_folder"})
    with pytest.raises(UsageError, match=f"{setting} my_folder is not a folder"):
        check_before_run(gone)
    if setting.startswith("sft."):
        check_before_run(gone, has_started=True)  # the start is over, and nothing reads the folder again
    with pytest.raises(UsageError, match=f"{setting} {tmp_path} is none: there is no .* in it"):
        check_before_run(override(recipe(task), {setting: str(tmp_path)}))


@pytest.mark.parametrize(
    ("task", "setting"), [("number_line", "policy.model"), ("push_block", "policy.model"), ("soccer", "judge.model")]
)
def test_a_folder_that_is_not_there_or_holds_no_model_is_refused(task, setting, tmp_path):
    for lost in ("/no/such/folder", "./my_checkpoint"):
        with pytest.raises(UsageError, match=f"{setting} {lost} is not a folder"):
            check_before_run(override(recipe(task), {setting: lost}))
    wrong = override(recipe(task), {setting: str(tmp_path)})
    with pytest.raises(UsageError, match=rf"{setting} {tmp_path} holds no model: there is no config.json"):
        check_before_run(wrong)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(UsageError, match=r"there is no \*.safetensors in it"):
        check_before_run(wrong)
    if setting == "judge.model":
        check_before_run(replace(ORACLE, judge=wrong.judge))  # it matters only to those who ask a judge


def test_a_start_that_learned_other_actions_is_refused_before_anything_starts(tmp_path):
    config = override(recipe("number_line"), {"sft.start_from": str(tmp_path)})
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "policy.json").touch()
    for names, is_right in ((("-", "+"), True), (("hit", "stand"), False)):
        write_sft_manifest(tmp_path, sft_manifest_of("blackjack", config.env, config.policy, names))
        with nullcontext() if is_right else pytest.raises(UsageError, match="its actions are not '-'"):
            check_before_run(config)


@pytest.mark.parametrize("content", [None, "not,a,report\n1,2,3\n"])
def test_a_table_of_a_judge_that_cannot_be_read_is_refused_before_anything_starts(content, tmp_path):
    table = tmp_path / "judge_report.csv"
    if content is not None:
        table.write_text(content)
    words = ["drawer_open", "--reward.teacher", "measured", "--feedback.measured", str(table)]
    with pytest.raises(UsageError, match="is no table of a judge"):
        check_before_run(parse_run(words, "run").config)


@pytest.mark.parametrize("task", ["number_line", "push_block"])
def test_a_policy_that_cannot_be_fetched_is_missed_before_anything_starts(task, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="policy no/such-model is not on this machine") as caught:
        check_before_run(parse_run([task, "--policy.model", "no/such-model"], "run").config)
    assert "hf download no/such-model" in caught.value.fix
    with pytest.raises(UsageError, match="the folder does not exist"):
        check_before_run(parse_run([task, "--policy.model", "my_model"], "run").config)


def test_a_judge_is_not_asked_without_a_goal():
    config = recipe("gym:MountainCarContinuous-v0")
    with pytest.raises(UsageError, match="no goal phrase of its own") as caught:
        check_before_run(config)
    assert "--goal" in caught.value.fix
    general = replace(config.judge, untrained="ok")
    check_before_run(replace(config, goal="drive the car up to the flag", judge=general))
    check_before_run(replace(config, reward=replace(config.reward, teacher="oracle")))


def test_the_pocket_judge_is_not_asked_about_a_task_it_has_never_seen(monkeypatch):
    monkeypatch.setattr(preflight, "try_renderer", lambda _: None)
    config = recipe("metaworld/window-close-v3")
    with pytest.raises(UsageError, match="knows only cartpole, .*; about metaworld/window-close") as caught:
        check_before_run(config)
    assert all(word in caught.value.fix for word in ("--judge.backend", "--reward.teacher", "--judge.untrained ok"))
    check_before_run(replace(config, judge=replace(config.judge, untrained="ok")))
    own = str(weights_folder())  # a judge of one's own, for all that is known
    check_before_run(replace(config, judge=replace(config.judge, model=own)))
    check_before_run(recipe("drawer_open"))
    config = override(
        recipe("libero_10/0"), {"reward.source": "judged", "judge.model": "video", "judge.score": "success"}
    )
    with pytest.raises(UsageError, match=r"knows only libero_spatial/0, libero_spatial/1 and 27 others;"):
        check_before_run(config)


@pytest.mark.parametrize(
    ("words", "kind", "what", "fix"),
    [
        ("number_line --policy.device cuda:63", MachineError, "the policy wants cuda:63", "--algo.gpus-per-learner"),
        ("number_line --policy.device gpu", MachineError, "'gpu' is no device", "--policy.device auto"),
        ("drawer_open --algo.device cuda", MachineError, "the algo wants cuda", "--algo.device cpu, or a CUDA build"),
        ("drawer_open --reward-model.device cuda", MachineError, "the reward-model wants", "--reward-model.device cpu"),
        ("push_block --algo.device cuda", MachineError, "the algo wants cuda", "--algo.device cpu"),
        ("drawer_open --judge.device cuda --serve.num-gpus 1", MachineError, "the judge wants cuda", ""),
        ("drawer_open --serve.num-gpus 1", MachineError, "this machine has none", "RAY_ADDRESS"),
        ("drawer_open --judge.backend openai --judge.model m", JudgeUnavailable, "needs a key", ""),
        ("drawer_open --judge.backend gemini --judge.model m", JudgeUnavailable, "needs a key", ""),
        (
            "drawer_open --judge.backend vllm --judge.model a/b --judge.engine.python /no/python",
            *(JudgeUnavailable, "missing", "make vllm"),
        ),
        ("gym:CartPole-v1 --reward.source environment", UsageError, "gym:CartPole-v1", ""),
        (
            "minigrid/MiniGrid-Empty-5x5-v0 --env.split training",
            UsageError,
            "no start .* 'held_out'",
            "--env.split all",
        ),
        ("gym:CartPole-v1", UsageError, "must observe and act in Box spaces", ""),  # before the goal is asked for
        ("gym:NoSuchEnv-v0 --reward.source environment", UsageError, "NoSuchEnv", ""),
        (
            "push_block --algo.group-size 1",
            UsageError,
            "grpo needs algo.group_size >= 2",
            "rlvlm run push_block --help",
        ),
    ],
)
def test_known_problems_are_reported_before_ray_starts(words, kind, what, fix, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(preflight, "gpu_names", list)
    for name in ("RAY_ADDRESS", "OPENAI_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(kind, match=what) as caught:
        check_before_run(parse_run(words.split(), "run").config)
    assert fix in caught.value.fix
    assert "--judge" in words or "--serve" in words or "--serve.num-gpus" not in caught.value.fix


@pytest.mark.slow
def test_envs_that_go_on_by_themselves_pass_where_replicas_will_answer_them():
    words = ["number_line", "--algo.rollout", "asynchronous", "--algo.staleness", "1"]
    check_before_run(parse_run([*words, "--engine.num-replicas", "1"], "run").config)
    with pytest.raises(UsageError, match="needs engine.num_replicas|has no effect"):
        check_before_run(parse_run(words, "run").config)


@pytest.mark.parametrize("command", [eval_command.command, serve.command, resume.command])
@pytest.mark.parametrize(
    ("setting", "value", "kind", "what"),
    [
        ("policy.model", "{gone}", UsageError, "policy.model .* is not a folder"),
        ("policy.adapter", "{gone}", UsageError, "policy.adapter .* is not a folder"),
        ("policy.device", "cuda:63", MachineError, "the policy wants cuda:63"),
    ],
)
def test_a_policy_that_cannot_be_played_is_missed_before_it_is_loaded(command, setting, value, kind, what, tmp_path):
    settings = {setting: value.format(gone=tmp_path / "gone"), "out": tmp_path / "run"}
    folder = create_folder(override(recipe("number_line"), settings), ["rlvlm"], datetime(2026, 1, 2))
    if command != resume.command:  # which begins again
        with pytest.raises(UsageError, match="no checkpoint yet"):
            command([str(folder.path)], "rlvlm")
    state = RunState(env_steps=5, wall_s=1.0, peak_rss_mb=1.0)
    folder.checkpoints.save(state, lambda path: path.mkdir(parents=True), is_best=True)
    with pytest.raises(kind, match=what):
        command([str(folder.path)], "rlvlm")


def test_playing_needs_no_gpu_judge_or_demonstrations_of_the_training():
    settings = {"algo.device": "cuda", "judge.backend": "transformers", "judge.model": "/no/judge"}
    check_before_play(override(recipe("drawer_open"), settings))
    check_before_play(override(recipe("push_block"), {"algo.device": "cuda", "sft.demonstrations": "/no/folder"}))


OWN = """
def three(images, goal, step): return []
class NoLabel: pass
class NeedsModel:
    def __init__(self, model): pass
    def label(self, transitions): return transitions.env_rewards
class Whole(NeedsModel):
    def __init__(self): pass
NUMBER = 5
from rlvlm.preferences.teachers import Teacher
class Mute(Teacher): pass
"""


@pytest.mark.parametrize(
    ("setting", "name", "what"),
    [
        ("reward.source", "three", "takes images, goal, step, not images and a goal"),
        ("reward.source", "NoLabel", "lacks label"),
        ("reward.source", "NeedsModel", "a class that needs model to be made"),
        ("reward.source", "NUMBER", "lacks label"),
        ("reward.source", "Whole", ""),
        ("reward.teacher", "three", "is no Teacher"),
        ("reward.teacher", "NUMBER", "is no Teacher"),
        ("reward.teacher", "Mute", "has no method answer"),
        ("judge.backend", "three", "takes images, goal, step; a judge"),
        ("judge.backend", "NUMBER", "cannot load the judge"),
    ],
)
def test_an_unusable_source_teacher_or_judge_is_reported_before_ray_starts(setting, name, what, tmp_path):
    (tmp_path / "own_things.py").write_text(OWN)
    config = override(recipe("cartpole"), {setting: f"{tmp_path / 'own_things.py'}:{name}"})
    if not what:
        check_before_run(config)
        return
    with pytest.raises((UsageError, JudgeUnavailable), match=what):
        check_before_run(config)


@pytest.mark.parametrize("address", ["", " ", "local"])
def test_without_a_cluster_the_run_starts_its_own(address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert cluster_address() == ""


@pytest.mark.parametrize(
    ("address", "what", "fix"),
    [
        ("http://head:8265", "where jobs are submitted", "ray job submit --address http://head:8265 --"),
        ("https://head", "where jobs are submitted", "ray job submit"),
        ("ray://head:10001", "Ray Client", "log in to the cluster"),
        ("head", "not of the form HOST:PORT", "HOST:6379"),
        ("head:gcs", "not of the form HOST:PORT", "HOST:6379"),
    ],
)
def test_an_address_of_another_kind_is_explained(address, what, fix, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError, match=what) as caught:
        cluster_address()
    assert fix in caught.value.fix and "unset RAY_ADDRESS" in caught.value.fix


def test_a_dead_cluster_is_no_wait_of_ten_minutes(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as alive:
        address = f"127.0.0.1:{alive.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert cluster_address() == address
    for dead in (address, "127.0.0.1:99999", "no-such-host.invalid:6379"):
        monkeypatch.setenv("RAY_ADDRESS", dead)
        with pytest.raises(MachineError, match="no Ray answers at"):
            cluster_address()


def test_a_missing_judge_is_reported_before_anything_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(http_client, "getproxies", dict)
    remote = {"judge.backend": "openai", "judge.model": "a model"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = {"judge.api.base_url": f"http://127.0.0.1:{server.getsockname()[1]}/v1"}
        config = override(recipe("drawer_open"), remote | address)
        build.check_reachable(config.judge)
    with pytest.raises(JudgeUnavailable, match=r"nothing listens at http://127.0.0.1:\d+/v1: Connection refused"):
        check_before_run(config)
    monkeypatch.setattr(http_client, "getproxies", lambda: {"http": "http://127.0.0.1:1"})
    monkeypatch.setattr(http_client, "proxy_bypass", lambda host: False)
    build.check_reachable(config.judge)  # the proxy may know the way
    for backend in ("no_such_file:judge", "rlvlm.testing:no_such_judge"):
        with pytest.raises(UsageError, match="judge.backend"):
            check_before_run(override(recipe("drawer_open"), {"judge.backend": backend}))


@pytest.mark.parametrize(
    "changes",
    [
        {"reward.source": "judged"},
        {
            **{"reward.source": "judged", "reward.num_frames": 5, "judge.backend": "openai", "judge.model": "a model"},
            **{"judge.api.base_url": "http://127.0.0.1:1/v1", "judge.both_orders": True, "judge.score": "success"},
        },
    ],
)
def test_the_command_that_looks_closer_asks_the_runs_own_judge(changes):
    config = override(recipe("push_block"), changes)
    said = shlex.split(bench_command(config))
    assert said[:2] == ["rlvlm", "judge-bench"]
    read = parse(BenchOptions, said[2:], "rlvlm judge-bench")
    assert (read.suite, read.judge, read.frames) == ("push_block", config.judge, config.reward.num_frames)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("task", "is_said"), [("number_line", False), ("blackjack", True)])
def test_a_scorer_that_has_not_seen_the_tasks_turns_says_so(task, is_said):
    config = override(recipe(task), {"reward.source": "judged"})
    assert any("the pocket scorer has learned from turns of" in note for note in config.kind.notes(config)) == is_said
