import socket
from dataclasses import replace
from pathlib import Path

import pytest

from rlvlm.commands.arguments import parse_run
from rlvlm.core.errors import JudgeUnavailable, MachineError, UsageError
from rlvlm.judges.config import JudgeConfig
from rlvlm.pocket.models import weights_folder
from rlvlm.rewards.config import RewardConfig
from rlvlm.runs import preflight
from rlvlm.runs.config import RunConfig, TrackConfig
from rlvlm.runs.preflight import check_before_run, port_is_free
from rlvlm.runs.recipes import recipe
from rlvlm.runs.settings import override

ORACLE = RunConfig(task="drawer_open", reward=RewardConfig(teacher="oracle"))


def test_a_renderer_that_does_not_draw_stops_a_run_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "try_renderer", lambda backend: None if backend == "osmesa" else "broken")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(MachineError, match="drawing with egl does not work: broken"):
        check_before_run(ORACLE)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    check_before_run(ORACLE)


def test_a_taken_port_is_found_before_the_run() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free(port)
        with pytest.raises(MachineError, match=f"port {port}") as caught:
            check_before_run(replace(ORACLE, track=TrackConfig(dashboard=True, dashboard_port=port)))
        assert "--track.dashboard-port" in caught.value.fix
    assert port_is_free(port)


def test_a_missing_model_folder_matters_only_to_those_who_ask_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "try_renderer", lambda _: None)
    lost = JudgeConfig(backend="transformers", model="/no/such/folder")
    with pytest.raises(UsageError, match="/no/such/folder is not a folder"):
        check_before_run(RunConfig(task="drawer_open", judge=lost))
    check_before_run(replace(ORACLE, judge=lost))


@pytest.mark.parametrize(
    ("task", "setting", "name"),
    [
        ("number_line", "policy.model", "/no/such/folder"),
        ("number_line", "sft.demonstrations", "my_episodes"),
        ("number_line", "sft.start_from", "my_policy"),
        ("number_line", "policy.adapter", "my_adapter"),
        ("push_block", "policy.model", "./my_checkpoint"),
        ("push_block", "sft.demonstrations", "my_episodes"),
    ],
)
def test_a_folder_that_a_policy_needs_is_missed_before_anything_starts(task: str, setting: str, name: str) -> None:
    section, _, field = setting.partition(".")
    config = recipe(task)
    wrong = replace(config, **{section: replace(getattr(config, section), **{field: name})})
    with pytest.raises(UsageError, match=f"{setting} {name} is not a folder"):
        check_before_run(wrong)


@pytest.mark.parametrize(
    ("task", "setting"), [("number_line", "policy"), ("push_block", "policy"), ("soccer", "judge")]
)
def test_a_folder_that_holds_no_model_is_refused_before_anything_starts(
    task: str, setting: str, tmp_path: Path
) -> None:
    config = recipe(task)
    wrong = replace(config, **{setting: replace(getattr(config, setting), model=str(tmp_path))})
    with pytest.raises(UsageError, match=rf"{setting}.model {tmp_path} holds no model: there is no config.json"):
        check_before_run(wrong)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(UsageError, match=r"there is no \*.safetensors in it"):
        check_before_run(wrong)


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
def test_a_folder_of_another_kind_is_refused_before_anything_starts(task: str, setting: str, tmp_path: Path) -> None:
    section, _, field = setting.partition(".")
    config = recipe(task)
    wrong = replace(config, **{section: replace(getattr(config, section), **{field: str(tmp_path)})})
    with pytest.raises(UsageError, match=f"{setting} {tmp_path} is none: there is no .* in it"):
        check_before_run(wrong)


@pytest.mark.parametrize("content", [None, "not,a,report\n1,2,3\n"])
def test_a_table_of_a_judge_that_cannot_be_read_is_refused_before_anything_starts(
    content: str | None, tmp_path: Path
) -> None:
    table = tmp_path / "judge_report.csv"
    if content is not None:
        table.write_text(content)
    words = ["drawer_open", "--reward.teacher", "measured", "--feedback.measured", str(table)]
    with pytest.raises(UsageError, match="is no table of a judge"):
        check_before_run(parse_run(words, "run").config)


@pytest.mark.parametrize(
    ("task", "options", "told", "fix"),
    [
        ("number_line", ["--policy.device", "cuda:63"], "the policy wants cuda:63", "--algo.gpus-per-learner"),
        ("number_line", ["--policy.device", "gpu"], "'gpu' is no device", "--policy.device auto"),
        ("drawer_open", ["--algo.device", "cuda"], "the algo wants cuda", "use --algo.device cpu, or a CUDA build"),
        ("drawer_open", ["--reward-model.device", "cuda"], "the reward-model wants cuda", "--reward-model.device cpu"),
        ("push_block", ["--algo.device", "cuda"], "the algo wants cuda", "--algo.device cpu"),
        (
            "libero_goal/8",
            ["--policy.model", "a/b", "--policy.openvla.device", "cuda"],
            "wants cuda",
            "gpus-per-learner",
        ),
    ],
)
def test_a_gpu_that_is_not_there_is_missed_before_anything_starts(
    task: str, options: list[str], told: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MachineError, match=told) as caught:
        check_before_run(parse_run([task, *options], "run").config)
    assert fix in caught.value.fix and "--serve.num-gpus" not in caught.value.fix


@pytest.mark.parametrize("task", ["number_line", "push_block"])
def test_a_policy_that_cannot_be_fetched_is_missed_before_anything_starts(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="policy no/such-model is not on this machine") as caught:
        check_before_run(parse_run([task, "--policy.model", "no/such-model"], "run").config)
    assert "hf download no/such-model" in caught.value.fix
    with pytest.raises(UsageError, match="the folder does not exist"):
        check_before_run(parse_run([task, "--policy.model", "my_model"], "run").config)


def test_a_judge_is_not_asked_about_a_goal_that_nobody_said() -> None:
    config = recipe("gym:MountainCarContinuous-v0")
    with pytest.raises(UsageError, match="no goal phrase of its own") as caught:
        check_before_run(config)
    assert "--goal" in caught.value.fix
    general = replace(config.judge, untrained="ok")
    check_before_run(replace(config, goal="drive the car up to the flag", judge=general))
    check_before_run(replace(config, reward=replace(config.reward, teacher="oracle")))


def test_the_pocket_judge_is_not_asked_about_a_task_it_has_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "try_renderer", lambda _: None)
    config = recipe("metaworld/window-close-v3")
    with pytest.raises(UsageError, match="knows cartpole, .* alone; about metaworld/window-close") as caught:
        check_before_run(config)
    assert all(word in caught.value.fix for word in ("--judge.backend", "--reward.teacher", "--judge.untrained ok"))
    check_before_run(replace(config, judge=replace(config.judge, untrained="ok")))
    own = str(weights_folder())  # a judge of one's own, for all that is known
    check_before_run(replace(config, judge=replace(config.judge, model=own)))
    check_before_run(recipe("drawer_open"))
    config = override(
        recipe("libero_10/0"), {"reward.source": "judged", "judge.model": "video", "judge.score": "success"}
    )
    with pytest.raises(UsageError, match=r"knows libero_spatial/0, libero_spatial/1 and 27 others alone"):
        check_before_run(config)


@pytest.mark.parametrize(
    ("words", "kind", "what"),
    [
        ("drawer_open --judge.device cuda", MachineError, "the judge wants cuda"),
        ("drawer_open --serve.num-gpus 1", MachineError, "this machine has none"),
        ("drawer_open --judge.backend openai --judge.model m", JudgeUnavailable, "needs a key"),
        ("drawer_open --judge.backend gemini --judge.model m", JudgeUnavailable, "needs a key"),
        (
            "drawer_open --judge.backend vllm --judge.model a/b --judge.engine.python /no/python",
            JudgeUnavailable,
            "missing",
        ),
        ("gym:CartPole-v1 --reward.source environment", UsageError, "gym:CartPole-v1"),
        ("gym:NoSuchEnv-v0 --reward.source environment", UsageError, "NoSuchEnv"),
    ],
)
def test_what_can_be_known_before_ray_starts_is_said_before(
    words: str, kind: type[Exception], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(preflight, "gpu_names", list)
    for name in ("RAY_ADDRESS", "OPENAI_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(kind, match=what):
        check_before_run(parse_run(words.split(), "run").config)
