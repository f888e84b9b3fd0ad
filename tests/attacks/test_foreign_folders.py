"""Folders that somebody else made: no command imports what they name, or goes where they lead, without --trust."""

import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from api_server import ApiServer
from tiny_run import WORDS, box_words, finish, start

import rlvlm
from rlvlm.algorithms.sft_folders import load_demonstrations
from rlvlm.cli import commands, main
from rlvlm.core import trust
from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Query
from rlvlm.core.leads import Lead, _kinds
from rlvlm.demonstrations.folder import create_folder as create_demonstrations
from rlvlm.envs.gym_cards.config import CardsConfig
from rlvlm.judges.cache import CachedJudge
from rlvlm.labels.records import Origin
from rlvlm.labels.store import LabelStore
from rlvlm.runs.files.folder import RunFolder, create_folder
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.settings.config_file import RENAMED, config_text
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import flat, nested, override
from rlvlm.testing import FakeJudge
from rlvlm.vlms.config import ApiConfig
from rlvlm.vlms.engines.remote import PROVIDERS, describe_server

CANARY = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nraise ImportError('a canary')\n"
READS = {
    "eval run": True,
    "eval run/checkpoints": True,
    "resume run": True,
    "resume sweep": True,
    "report run": True,
    "report sweep": True,
    "report linked": True,
    "report plain --bench bench": False,
    "judge-report run": True,
    "judge-report labels --out judged": False,
    "serve run": True,
    "export run --out weights": True,
    "data show demos": True,
    "collect push_block --episodes 1 --out demos": False,
    "sft number_line --from demos": False,
    "run push_block --sft.demonstrations demos --out new": False,
    "run push_block --sft.start-from run --out new": False,
    "run drawer_open --feedback.measured bench/bench.json --out new": False,
    "labels show labels": False,
    "labels export labels --out table": False,
    "labels ask run": True,
    "judge-bench demos --reference oracle --out new": False,
    "judge-bench drawer_open --player run": True,
    "judge-bench compare bench bench": False,
    "score demos --out scored": True,
} | {
    line: asks
    for file in Path(__file__).parents[1].glob("plugins/*/reads.json")
    for line, asks in json.loads(file.read_text()).items()
}
"""Command lines that read a folder of somebody else's; whether each asks for trust, and imports with it."""
NAME_ONLY_THEIR_OWN = {"check-task", "doctor", "fetch", "slurm", "sweep"}
"""Commands that read nobody's folder: a sweep's file is named as a program is, by who wants it run."""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A working folder, on a machine where nothing was trusted yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "_here", set())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's module of that name would be found first
    monkeypatch.chdir(tmp_path)
    return tmp_path


def unpack(here: Path, name: str) -> None:
    """An archive with one of everything, which names a task by `name`, and the module that it names."""
    (here / "canary.py").write_text(CANARY)
    for folder, file, text in (
        ("run", "config.yaml", f"algorithm: sac\ntask: '{name}'\n"),
        ("plain", "config.yaml", config_text(recipe("drawer_open"))),
        ("sweep", "sweep.yaml", f"title: x\nseeds: [0]\ntasks: ['{name}']\nsources: {{a: {{title: x}}}}\n"),
        (
            "bench",
            "bench.json",
            json.dumps(dict.fromkeys(("bench", "judge", "figures", "manifest"), {}) | {"tasks": {name: {}}}),
        ),
        (".", "chats.json", "[]"),
    ):
        (here / folder).mkdir(exist_ok=True)
        (here / folder / file).write_text(text)
    for folder in ("run", "plain"):
        (here / folder / "command.txt").write_text("rlvlm run\n")
    # a copy nearby that looks harmless does not hide the run around it
    (here / "run/checkpoints").mkdir()
    (here / "run/checkpoints/config.yaml").write_text("task: drawer_open\n")
    (here / "linked").mkdir()
    (here / "linked/task").symlink_to(here / "run")
    LabelStore(here / "labels", Origin(run="x", task=name, seed=0))
    assert main(["collect", "push_block", "--episodes", "1", "--out", "demos"]) == 0
    for file in ("demonstrations.json", "episodes.jsonl"):
        path = here / "demos" / file
        path.write_text(path.read_text().replace("push_block", name))


OPENS_RUN = [line for line, asks in READS.items() if asks and "run" in line.split()]
OPENS_SWEEP = [line for line, asks in READS.items() if asks and "sweep" in line.split()]
CANARIES = {Lead.CODE: ("canary:NAME", "./canary.py:NAME"), Lead.MODEL: ("./canary/model",), Lead.KEY: ("CANARY_KEY",)}
"""Values by the kind of a setting; those of other kinds are a path, which no server has either."""
touched: list[str] = []
"""Files of the canary that were opened, made or listed."""


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.mkdir", "os.listdir", "os.scandir", "subprocess.Popen", "import"):
        # the digest of a file with code is taken, which is how it is known; the module is named in `sys.modules`
        found = (str(each) for each in arguments if "canary" in str(each) and "no_command" not in Path(str(each)).name)
        touched.extend(f"{event} {each}" for each in found if not each.endswith("canary.py"))


sys.addaudithook(watch)


def leading_settings() -> Iterator[tuple[str, str, str]]:
    """Every setting that leads somewhere, once, with a task that has it and a value; under its old names too."""
    seen: set[str] = set()
    for task in ("drawer_open", "number_line", "push_block"):
        for name, kind in kinds_of(recipe(task)):
            if name in seen or name in ("task", "out"):
                continue
            seen.add(name)
            olds = [
                old + name.removeprefix(now)
                for old, now in ((old, f"{old.rpartition('.')[0]}.{last}") for old, last in RENAMED.items())
                if name == now or name.startswith(f"{now}.")
            ]
            values = CANARIES.get(kind, ("http://canary/v1" if kind is Lead.ADDRESS else "./canary/file",))
            if isinstance(flat(recipe(task))[name], dict):
                name += ".one"
            yield from ((task, each, value) for each in (name, *olds) for value in values)


def kinds_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Lead]]:
    for name, kind in _kinds(type(config)).items():
        if is_dataclass(value := getattr(config, name)):
            yield from kinds_of(value, f"{prefix}{name}.")
        elif kind is not None:
            yield f"{prefix}{name}", kind


_MODEL = {"policy.model": "name/of-the-hub"}
_FLOW = _MODEL | {"policy.head": "flow"}
WITH: dict[str, dict[str, Any]] = {
    "judge.wording": {"judge.score": "video"},
    "feedback.measured": {"reward.teacher": "measured"},
    "reward.measured": {"reward.source": "judged", "reward.teacher": "measured", "reward.per": "episode"},
    "policy.settings.one": {"policy.head": "rlvlm.testing:POLICY"},
    "sft.labels": {"sft.weighting": "filter", "sft.demonstrations": "demos"},
    "engine.vllm.python": {"engine.backend": "vllm", "engine.num_replicas": 1} | _MODEL,
    "policy.openvla.adapter": _MODEL,
    "policy.lerobot.body": _FLOW,
    "policy.smolvla.body": _FLOW,
    "policy.lerobot.adapter": _FLOW | {"policy.lerobot.learns": "lora"},
    "policy.smolvla.adapter": _FLOW | {"policy.smolvla.learns": "lora"},
}
"""Settings without which one is refused before anybody asks for trust, by its name."""


@pytest.mark.slow
def test_no_command_follows_any_setting_of_a_foreign_folder(machine, capsys):
    (machine / "canary.py").write_text(CANARY)
    (machine / "run").mkdir()
    (machine / "run/command.txt").write_text("rlvlm run\n")
    (machine / "sweep").mkdir()
    config, sweep = machine / "run/config.yaml", machine / "sweep/sweep.yaml"

    def refused(line: str, value: str) -> None:
        capsys.readouterr()
        code, said = main(line.split()), box_words(capsys.readouterr().err).replace(" ", "")
        assert code == 2 and "--trust" in said and value in said, (line, said)
        assert not touched and not (machine / "ran").exists() and "canary" not in sys.modules, (line, touched)

    for task, name, value in leading_settings():
        settings = WITH.get(name, {}) | {name: value}
        touched.clear()
        config.write_text(json.dumps({"kind": recipe(task).kind.name, "task": task} | nested(settings)))
        for line in OPENS_RUN:
            refused(line, value)
        for load in (rlvlm.load_policy, rlvlm.learned_reward):
            with pytest.raises(UsageError, match="code outside of rlvlm|leads out of its folder"):
                load(rlvlm.find_folder(machine / "run"))
        sources = {"a": {"title": "a", "settings": {}}}
        plain = {"title": "x", "tasks": [task], "seeds": [0], "sources": sources}
        for place in (
            {"settings": settings},
            {"task_settings": {task: nested(settings)}},
            {"sources": {"a": {"title": "a", "settings": settings}}},
        ):
            sweep.write_text(json.dumps(plain | place))
            for line in OPENS_SWEEP:
                refused(line, value)


@pytest.mark.slow
def test_no_command_runs_the_code_of_a_folder_without_trust(machine, capsys):
    assert {line.split()[0] for line in READS} | NAME_ONLY_THEIR_OWN == {name.split()[0] for name in commands()}
    unpack(machine, "canary:TASK")
    for name in ("canary:TASK", "gym:canary:X-v0"):
        for file in (one for one in machine.rglob("*") if one.suffix in (".yaml", ".json", ".jsonl")):
            file.write_text(file.read_text().replace("canary:TASK", name))
        for line, asks in READS.items():
            capsys.readouterr()
            code = main(line.split())
            said = capsys.readouterr().err
            assert not (machine / "ran").exists() and "canary" not in sys.modules, line
            assert (code == 2 and "--trust" in said) == asks, (line, said)
        for load in (rlvlm.load_policy, rlvlm.learned_reward):
            with pytest.raises(UsageError, match="names code outside of rlvlm"):
                load(rlvlm.find_folder(machine / "run"))
    # a run in turns reads the folder once Ray is up
    env = rlvlm.make_env("number_line", CardsConfig(), 0)
    with pytest.raises(UsageError, match="not turns"):
        load_demonstrations(machine / "demos", env, CardsConfig())
    assert not (machine / "ran").exists()
    # the canary sings where it is trusted, so the silence above was no accident; `labels ask` would serve a page
    for line in (line for line, asks in READS.items() if asks and not line.startswith("labels ask")):
        trust._here.clear()
        trust.record_file().unlink(missing_ok=True)
        main([*line.split(), "--trust"])
        assert (machine / "ran").exists(), line
        (machine / "ran").unlink()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"judge.api.base_url": "http://127.0.0.1:9", "judge.api.key_env": "AWS_SECRET_ACCESS_KEY"}, "AWS_SECRET"),
        ({"judge.api.key_env": "AWS_SECRET_ACCESS_KEY"}, "AWS_SECRET"),
        ({"judge.api.base_url": "http://127.0.0.1:9", "judge.api.key_env": "OPENAI_API_KEY"}, "OPENAI_API_KEY"),
        ({"judge.api.key_file": "/etc/shadow"}, "/etc/shadow"),
        ({"judge.api.ledger": "/elsewhere"}, "judge.api.ledger"),
        ({"judge.store": "/elsewhere"}, "judge.store"),
        ({"judge.engine.python": "/elsewhere/python"}, "judge.engine.python"),
        ({"judge.api.key_env": "OPENAI_API_KEY"}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_a_folder_from_elsewhere_leads_nowhere_without_trust(settings, named, machine, monkeypatch, capsys):
    config = override(recipe("drawer_open"), settings | {"judge.backend": "openai", "judge.model": "x"})
    (machine / "run").mkdir()
    (machine / "run/config.yaml").write_text(config_text(config))
    (machine / "run/command.txt").write_text("rlvlm run\n")
    went_on: list[str] = []
    monkeypatch.setattr("rlvlm.commands.resume.check_before_run", lambda *_, **__: went_on.append("checked"))
    monkeypatch.setattr("rlvlm.runs.train.resume_run", lambda *_: went_on.append("resumed") or 0)
    for words in (["resume", "run"], ["resume", "run", "--trust"], ["resume", "run"]):  # trusted once is enough
        is_refused = bool(named) and not went_on and "--trust" not in words
        assert main(words) == (2 if is_refused else 0)
        said = capsys.readouterr().err.replace("\n", "")
        assert not is_refused or (named in said.replace(" │", "").replace("│ ", "")), said
    (machine / "run").rename(machine / "moved")
    assert main(["resume", "moved"]) == 0


@pytest.mark.parametrize("command", ["report", "judge-report"])
def test_a_label_store_elsewhere_is_not_read_without_trust(command, machine, capsys):
    store = LabelStore(machine / "private", Origin(run="x", task="drawer_open", seed=0))
    frames = np.zeros((1, 8, 8, 3), np.uint8)
    query = Query(goal="open it", left=frames, right=frames + 9)
    [verdict] = CachedJudge(FakeJudge(), store).compare([query])
    (machine / "run").mkdir()
    (machine / "run/config.yaml").write_text(config_text(override(recipe("drawer_open"), {"judge.store": "private"})))
    (machine / "run/command.txt").write_text("rlvlm run\n")
    table = RunFolder(machine / "run", 1).queries
    table.append([dict.fromkeys(table.columns, "") | {"question": verdict.question, "status": "ok", "env_step": 1}])
    assert main([command, "run"]) == 2
    assert "judge.store private" in box_words(capsys.readouterr().err)
    assert not (machine / "judge_report").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_a_secret_reaches_the_server_of_a_foreign_folder_only_with_trust(machine, monkeypatch, capsys):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-4b1d")
    file, server = machine / "run/config.yaml", ApiServer()
    with server.running() as url, socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        api = {"judge.api.base_url": nobody, "judge.api.key_env": "AWS_SECRET_ACCESS_KEY"}
        asks = {"reward.teacher": "judge", "judge.backend": "openai", "judge.model": "x", "steps": 200}
        asks |= {"feedback.preflight": 0}  # the server knows no task
        file.parent.mkdir()
        file.write_text(config_text(override(parse_run(WORDS, "rlvlm run").config, api | asks)))
        (machine / "run/command.txt").write_text("rlvlm run\n")
        assert main(["resume", "run"]) == 2
        said = box_words(capsys.readouterr().err)
        assert nobody in said and "AWS_SECRET_ACCESS_KEY" in said
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):  # not even a connection
            listener.accept()
        file.write_text(file.read_text().replace(nobody, url))
        out, _ = finish(start("resume", "run", "--trust"))  # there is no environment.json: it is this one's
        assert f"the judge asks {url}, with the key in $AWS_SECRET_ACCESS_KEY" in "".join(out.splitlines()[:4])
        assert {call.headers["authorization"] for call in server.calls} == {"Bearer canary-4b1d"}


def test_runs_made_here_are_trusted_until_their_code_changes(machine):
    (machine / "mine.py").write_text("def judge(clips): ...\n")
    own = {"judge.backend": "mine:judge", "judge.store": "labels", "judge.model": ""}
    folder = create_folder(
        override(recipe("drawer_open"), own | {"out": str(machine / "run")}),
        ["rlvlm"],
        SimpleNamespace(),  # pyright: ignore[reportArgumentType] - not asked for a named folder
    )
    assert list(folder.environment()["own_code"]) == ["mine:judge"]
    assert not folder.resume_command.endswith("--trust")
    trust._here.clear()  # another process
    assert not folder.resume_command.endswith("--trust")
    (machine / "mine.py").write_text("def judge(clips): pass\n")
    assert folder.resume_command.endswith("--trust")
    text = (folder.path / "config.yaml").read_text()
    (machine / "mine.py").write_text("def judge(clips): ...\n")
    (folder.path / "config.yaml").write_text(text.replace("store: labels", "store: /elsewhere"))
    assert folder.resume_command.endswith("--trust")
    # demonstrations of one's own task
    demos = create_demonstrations(machine / "demos", "mine:TASK", "chunks")
    assert demos.trusted_task(trust=False) == "mine:TASK"


def test_the_server_and_the_place_of_its_key_are_named():
    assert {key for provider in PROVIDERS.values() for key in provider.key_names} == {*trust.USUAL_KEYS}
    own = ApiConfig(base_url="http://127.0.0.1:9/v1", key_env="AWS_SECRET_ACCESS_KEY")
    assert describe_server("openai", own) == "http://127.0.0.1:9/v1, with the key in $AWS_SECRET_ACCESS_KEY"
    assert describe_server("openai", ApiConfig(base_url="http://a/v1")) == "http://a/v1, with no key"
    assert describe_server("openai", ApiConfig()) == "https://api.openai.com/v1, with the key in $OPENAI_API_KEY"
    assert describe_server("pocket", own) == ""
