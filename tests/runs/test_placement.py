"""Every process of a run has a place of its own before anything starts. The nodes are real, their GPUs are in name."""

import re
from copy import deepcopy
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from chaos import wait_until
from ray.util.placement_group import placement_group, remove_placement_group
from rich.console import Console

from rlvlm.algorithms.learners import use_assigned_gpu
from rlvlm.cli import main
from rlvlm.core.errors import MachineError
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.runs.start.placement import Node, Role, book_gpu, layout_of, nodes, own_gpu, place, plan_table
from rlvlm.vlms.devices import pick_device

ROOT = Path(__file__).parents[2]


def role(name: str, count: int = 1, cpus: float = 0.0, gpus: float = 0.0, is_own: bool = False) -> Role:
    return Role(name=name, count=count, cpus=cpus, gpus=gpus, setting=f"--{name}.fewer", is_own=is_own)


def test_places_by_hand():
    head, cards = Node(name="head", cpus=4, gpus=[1.0], is_own=True), Node(name="cards", cpus=2, gpus=[1.0, 1.0])
    roles = [role("learners", 2, gpus=1), role("judge", 2, cpus=1, gpus=0.5), role("own", gpus=1, is_own=True)]
    with pytest.raises(MachineError, match="judge 1 of 2 asks for 1 CPU and 0.5 GPU, and has no place") as caught:
        place(roles, [head, cards])
    assert "--judge.fewer" in caught.value.fix and "head 4 CPU, 0 GPU" in str(caught.value)
    head, cards = Node(name="head", cpus=4, gpus=[1.0], is_own=True), Node(name="cards", cpus=2, gpus=[1.0] * 3)
    assert place(roles, [cards, head]) == {
        "own": ["head"], "learners": ["cards", "cards"], "judge": ["cards", "cards"]
    }  # fmt: skip
    assert cards.gpus == [0.0, 0.0, 0.0] and cards.cpus == 0, "two halves share the third card"


def test_a_kind_of_gpu_is_found_and_left_to_those_who_need_it():
    small, large = (Node(name=kind, cpus=4, gpus=[1.0], gpu_type=kind) for kind in ("L4", "H200"))
    roles = [role("judge", gpus=1), replace(role("learners", gpus=1), gpu_type="L4")]
    assert place(roles, deepcopy([small, large])) == {"learners": ["L4"], "judge": ["H200"]}
    with pytest.raises(MachineError, match=r"1 GPU \(L4\), and has no place: .* H200 4 CPU, 1 GPU \(H200\)"):
        place(roles[1:], [large])
    assert place(roles[1:], [Node(name="not there yet", cpus=4, gpus=[1.0])])["learners"] == ["not there yet"]


def test_a_share_of_a_card_does_not_come_from_two():
    halves = [role("judge", 2, gpus=0.6)]
    with pytest.raises(MachineError, match="judge 2 of 2"):
        place(halves, [Node(name="one", cpus=1, gpus=[1.0])])
    assert place(halves, [Node(name="two", cpus=1, gpus=[1.0, 1.0])])["judge"] == ["two", "two"]


def taken(config: RunConfig, machines: list[Node]) -> str:
    """The GPU share of the run's own process, or why there is no place for all."""
    try:
        return f"{layout_of(config, machines).own_share:g}"
    except MachineError as error:
        return str(error)


def own_nodes(*cards: int) -> list[Node]:
    return [
        Node(name=f"n{number}", cpus=128, gpus=[1.0] * count, is_own=not number) for number, count in enumerate(cards)
    ]


VLM = "number_line --policy.model DIR"
VLA = "libero_10/0 --policy.model DIR"
LEARN = "--algo.gpus-per-learner 1 --algo.num-learners"
JUDGE = "drawer_open --judge.backend transformers --judge.model DIR --serve.num-gpus"
PLAY = "--algo.env-runners 4 --algo.gpus-per-env-runner 1 --algo.env-workers 4"
FOUR = f"{PLAY} --algo.staleness 1 --algo.rounds 1 {LEARN} 4"
LAYOUTS = [
    # command, cards of each node, the share of the run's own process or what it is told
    ("drawer_open --reward.teacher oracle", (0,), "0"),
    ("drawer_open --reward.teacher oracle", (1,), "1"),
    ("drawer_open --reward.teacher oracle --algo.device cpu --reward-model.device cpu", (1,), "0"),
    ("drawer_open --reward.source environment", (1,), "0"),  # small networks are faster on a CPU
    ("drawer_open --reward.source environment --algo.hidden 1024 1024", (1,), "1"),
    (f"{JUDGE} 0.5", (1,), "0.5"),
    (f"{JUDGE} 1", (1,), "0"),
    (f"{JUDGE} 1 --algo.device cuda", (1,), "the judge asks"),
    (f"{JUDGE} 1", (2,), "1"),
    (f"{JUDGE} 0.6 --serve.num-replicas 2", (2,), "0.4"),
    (f"{JUDGE} 0.6 --serve.num-replicas 2", (1,), "the judge 2 of 2"),
    (VLM, (1,), "1"),
    (f"{VLM} {LEARN} 1", (1,), "0"),
    (f"{VLM} {LEARN} 1", (2,), "1"),
    (f"{VLM} {LEARN} 1", (1, 1), "1"),
    (f"{VLM} {LEARN} 2", (1, 1), "0"),
    (f"{VLM} {LEARN} 8", (8,), "0"),
    (f"{VLM} {LEARN} 8 --policy.device cpu", (8,), "0"),
    (f"{VLM} {LEARN} 9", (8,), "learners 9 of 9"),
    (f"{VLM} {LEARN} 7", (8,), "1"),
    (f"{VLM} {LEARN} 4 --engine.num-replicas 4 --engine.num-gpus 1", (8,), "0"),
    (f"{VLM} {LEARN} 2 --engine.num-replicas 2 --engine.colocated", (2,), "0"),
    (f"{VLM} {LEARN} 2 --engine.num-replicas 2 --engine.colocated", (1, 1), "on one node, and there are n0, n1"),
    (f"{VLA} {FOUR}", (8,), "0"),
    (f"{VLA} {FOUR}", (7,), "learners 4 of 4"),
    (f"{VLA} {FOUR}", (8, 1), "1"),
]


@pytest.mark.parametrize(("words", "cards", "expected"), LAYOUTS)
def test_a_plan_of_cards_in_name(words, cards, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("RAY_ADDRESS", "several nodes")
    found = taken(parse_run(words.split(), "rlvlm run").config, own_nodes(*cards))
    assert expected in found if " " in expected else found == expected


def documented() -> list[str]:
    """Commands and settings in README and docs that name GPUs of a run, each in one line; --job is of `rlvlm sft`."""
    found: dict[str, None] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text().replace("\\\n", " ")
        for piece in re.findall(r"`([^`\n]+)`|^ *((?:python -m rlvlm|rlvlm).*)$", text, re.MULTILINE):
            command = re.sub(r"\s+#.*|\.\.\.|,.*", "", " ".join("".join(piece).split()))
            is_named = re.search(r"--(?!job\.)[a-z.-]*gpus|--engine.colocated", command)
            if is_named and re.search(r"gpus\S* \d|colocated", command):
                found[command] = None
    return list(found)


@pytest.mark.parametrize("command", documented())
def test_a_documented_command_that_names_gpus_has_a_place(command, monkeypatch):
    """On the cards that it names, where it is a SLURM job, else on eight of one machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("RAY_ADDRESS", "several nodes")
    cards = (8,)
    words = re.sub(r"^(python -m )?rlvlm[. ](run )?", "", command).split()
    if words[0] == "slurm":
        count = {name: int(words[words.index(name) + 1]) for name in ("--nodes", "--gpus-per-node") if name in words}
        cards = (count["--gpus-per-node"],) * count.get("--nodes", 1)
        if words[1].endswith(".yaml"):
            return  # a sweep, which Tune places
        words = [words[1], *words[words.index("--") + 1 :]] if "--" in words else words[1:2]
    if words[0].startswith("--"):  # settings alone, of a run that has them
        task = VLA if "env-runner" in command else f"{VLM} --algo.num-learners 2" if "learner" in command else VLM
        if "colocated" in command:
            task = f"{VLM} {LEARN} 1 --engine.num-replicas 1"
        elif "engine." in command:
            task = f"{VLM} --engine.num-replicas 1"
        elif "serve." in command:
            task = "drawer_open"
        words = [*task.split(), *words]
    assert taken(parse_run(words, "rlvlm run").config, own_nodes(*cards)).replace(".", "").isdigit()


def test_a_run_without_room_is_refused_and_the_plan_shows_the_places():
    config = override(recipe("push_block"), {"algo.num_learners": 2, "algo.env_runners": 3})
    shown = Console(width=160, file=StringIO())
    shown.print(plan_table(config))  # cores of a private Ray are shared
    text = shown.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "3 on this machine" in text and "learners" in text and "the run's own process" in text
    for wanted in ({"algo.gpus_per_learner": 1.0}, {"reward.source": "judged", "serve.num_gpus": 0.5}):
        with pytest.raises(MachineError, match="has no place"):
            layout_of(override(config, wanted), nodes())


@pytest.fixture(scope="module")
def cluster(ray_nodes):
    ray.shutdown()
    with ray_nodes({"num_cpus": 128, "num_gpus": 8}) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        yield cluster
        ray.shutdown()


@ray.remote
class Worker:
    """Stands for any process of a run."""

    def device(self, wanted: str) -> str:
        """What the device setting means here, where torch sees the cards."""
        torch.cuda.is_available = lambda: True
        use_assigned_gpu()
        return str(pick_device(wanted, "policy"))


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_goes_where_the_plan_says(cluster, monkeypatch):
    """The rows of eight cards, on a cluster that has them in name: each process is given its place by Ray, and the
    run's own computes on no card of theirs.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
    for words, _, expected in [row for row in LAYOUTS if row[1] == (8,)]:
        config = parse_run(words.split(), "rlvlm run").config
        if " " in expected:
            with pytest.raises(MachineError, match=expected), own_gpu(config):
                pass
            continue
        with own_gpu(config):
            own = pick_device("auto", "policy")
            assert own.type == ("cuda" if float(expected) else "cpu"), words
            # Ray gives places away without the minutes that so many processes take to start
            bundles = [{"CPU": one.cpus, "GPU": one.gpus} for one in config.roles for _ in range(one.count)]
            bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
            places = placement_group([bundle for bundle in bundles if bundle] or [{"CPU": 1.0}])
            assert places.wait(60), words
            if float(expected):
                with pytest.raises(MachineError, match="Ray has given to others"):
                    book_gpu(1.0)
        remove_placement_group(places)
        wait_until(lambda: ray.available_resources().get("GPU") == 8, "what was booked is given back")


@pytest.mark.ray
@pytest.mark.slow
def test_a_supervised_job_asks_for_places_as_a_run_does(cluster, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
    demos = str(tmp_path / "demos")
    assert main(["collect", "number_line", "--episodes", "4", "--out", demos]) == 0
    worker: Any = Worker.options(num_gpus=8).remote()
    ray.get(worker.__ray_ready__.remote())
    words = ["sft", "number_line", "--from", demos, "--out", str(tmp_path / "out"), "--place-timeout-s", "1"]
    assert main([*words, "--job.num-workers", "2", "--job.gpus-per-worker", "1"]) == MachineError.exit_code
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert "others hold the places of learners (2 x 1 GPU)" in said and "--job.num-workers" in said
    ray.kill(worker)


@pytest.mark.ray
@pytest.mark.slow
def test_a_process_computes_on_the_device_that_ray_gave_it(cluster, monkeypatch):
    """Whatever the setting says, which is about the run's own process."""
    for gpus, wanted, expected in ((1, "cpu", "cuda:0"), (0, "auto", "cpu")):
        # as under SLURM, where every process sees all cards of the job
        environment = {"env_vars": {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}}
        worker: Any = Worker.options(num_gpus=gpus, num_cpus=0, runtime_env=environment).remote()
        assert ray.get(worker.device.remote(wanted)) == expected
        ray.kill(worker)
    # a process under `ray job submit --entrypoint-num-gpus 1` sees one of the node's cards, which is in Ray's books
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    before = ray.available_resources().get("GPU")
    with own_gpu(recipe("number_line")):
        assert pick_device("auto", "policy") == torch.device("cuda", 0)
        assert ray.available_resources().get("GPU") == before
