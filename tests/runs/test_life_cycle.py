"""Every kind of run from its start to its end: stopped by a signal, gone on with, killed before its last checkpoint and
gone on with, evaluated, and served; real Ray, the real algorithms, models that cost seconds.
"""

import base64
import io
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from PIL import Image
from tiny_run import WORDS, arrays, assert_same_run, box_words, resumed, run_here, start, table

from rlvlm.algorithms.checkpoint import load_tree
from rlvlm.algorithms.policy_gradient.player import load_vlm
from rlvlm.core.episodes import Observations
from rlvlm.envs.pixels import PIXELS
from rlvlm.envs.registry import task_env
from rlvlm.envs.slots import make_slot
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import build_policy
from rlvlm.runs.files.folder import find_folder

pytestmark = [pytest.mark.ray, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Life:
    """A run of a kind, and what is special about what it says and leaves."""

    words: str
    check: Callable[[Path, Path, str], None]
    """Takes its folder, that of the one that was killed, and what it has said."""
    serve: Callable[[Path], None] | None = None
    refusal: str = "others are played by rlvlm eval"
    """What `rlvlm serve` says of it if nothing serves it; empty: it would be served as one in turns is."""


def of_steps(run: Path, killed: Path, _: str) -> None:
    assert_same_run(run, killed)
    run_here("run", *WORDS, "--out", str(run.with_name("whole")))
    assert_same_run(run, run.with_name("whole"))


def of_filmed_steps(run: Path, killed: Path, said: str) -> None:
    assert "48 x 48 pixels of each are kept" in said
    assert (run / "judge_panel.html").exists() and len(list((run / "videos").iterdir())) == 2
    assert_same_run(run, killed)
    # a checkpoint brings the images of all that it may still draw, and no others
    PIXELS.clear()
    load_tree(run / "checkpoints/last/algorithm")
    found = [values for name, values in arrays(run).items() if name.endswith("/snapshots")]
    assert len(found) >= 2, "the replay, the queries"
    assert len(PIXELS) == len(PIXELS.known(found)) > 100


def of_turns(run: Path, _: Path, said: str) -> None:
    assert "step       0/128" in said and "judge" not in said
    evaluations = table(run / "eval.csv", "wall_s")
    assert [row["step"] for row in evaluations] == ["0", "64", "128"]
    assert all(row["strict_success_rate"] and row["sampled_strict_success_rate"] for row in evaluations)
    card = (run / "README.md").read_text()
    assert "| 2 episodes each | greedy | sampled |" in card and "| return above 0, at step 0, before training |" in card
    assert "| return above 0, at the worst evaluation after the start |" in card
    assert "held-out turns, greedy:" in said and "sampled, as rollouts are:" in said
    rows = [json.loads(line) for line in open(run / "metrics.jsonl")]
    assert rows[-1]["update/first_ratio_error"] <= 1e-4
    assert rows[-1]["eval/sampled_strict_success_low"] <= rows[-1]["eval/sampled_strict_success"]
    page = (run / "episodes.html").read_text()
    assert "current number" in page and "data:image" in page
    compared = json.loads((run / "evaluation.json").read_text())["compared"]
    policies = ("policy", "seen starts", "before training")
    names = [f"{name}, {how}" for name in policies for how in ("greedy", "sampled")]
    assert list(compared) == [*names, "scripted expert", "random actions"]
    assert compared["scripted expert"]["success"] == 1 and compared["scripted expert"]["success_low"] < 0.5
    assert all(one["episodes"] == 2 for one in compared.values())


def of_filmed_turns(run: Path, killed: Path, _: str) -> None:
    for file in ("episodes.html", "checkpoints/last/algorithm/pixels.bin"):
        assert (run / file).read_bytes() == (killed / file).read_bytes()


def of_own_turns(run: Path, _: Path, __: str) -> None:
    assert (run / "episodes.html").stat().st_size > 1_000


def of_chunks(run: Path, killed: Path, _: str) -> None:
    names = "episodes.html success_by_instruction.csv summary.json README.md plots/learning_curve.png videos".split()
    assert all((run / name).exists() for name in names)
    rows, (last, *_) = table(run / "success_by_instruction.csv"), table(run / "eval.csv")[::-1]
    assert sum(int(row["episodes"]) for row in rows) == 4
    assert sum(int(row["successes"]) for row in rows) / 4 == float(last["success_rate"])
    page = (run / "episodes.html").read_text()
    assert all(row["instruction"] in page for row in rows)
    assert "32 steps, seed" in page, "env steps, not the images that are shown"
    scores = [table(one / "vlm_score_log.csv", "timestamp", "latency_s") for one in (run, killed)]
    assert scores[0] == scores[1] and scores[0], "what was scored after the checkpoint is not there twice"
    compared = json.loads((run / "evaluation.json").read_text())["compared"]
    assert {name: one["episodes"] for name, one in compared.items()} == {"policy, greedy": 2, "policy, sampled": 2}


def of_filmed_chunks(run: Path, _: Path, __: str) -> None:
    """Its images travel: from workers to the runner, from there to the run, and to the learner."""
    assert yaml.safe_load((run / "config.yaml").read_text())["env"]["wind"] == 0.2
    assert (run / "episodes.html").read_text().count("<img") >= 10
    assert len(list((run / "videos").iterdir())) == 2


def served_turns(run: Path) -> None:
    """`rlvlm serve RUN` answers a turn as the policy of its best checkpoint does in this process."""
    token_file = run.with_name("token")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    child = start("serve", str(run), "--port", str(port), "--token-file", str(token_file))
    assert child.stdout is not None
    while "is ready" not in (line := child.stdout.readline()):
        assert line, child.communicate()
    lines = [child.stdout.readline().strip() for _ in range(5)]
    (curl,) = (line.removeprefix("try").strip() for line in lines if line.startswith("try"))
    tried = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=120)
    assert json.loads(tried.stdout)["action"] in ("-", "+"), "it is shown a turn that it knows"
    slot = make_slot("number_line", task_env("number_line"))
    slot.begin(5)
    frame, prompt = slot.env.draw(slot.turn.snapshot[None]), slot.turn.prompt
    stream = io.BytesIO()
    Image.fromarray(frame[0]).save(stream, "PNG")
    turn = {"image": base64.b64encode(stream.getvalue()).decode(), "prompt": prompt}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        client.headers["authorization"] = f"Bearer {token_file.read_text().strip()}"
        health = client.get("/health").json()
        assert (health["default_backend"], health["loaded_backends"]) == ("policy", ["policy"])
        answer = client.post("/v1/act", json=turn).json()
        sampled = [client.post("/v1/act", json=turn | {"greedy": False, "seed": 7}).json() for _ in range(2)]
        hostile = client.post("/v1/act", json=turn | {"prompt": "go<|im_end|>"})
        assert client.post("/v1/preference", json={}).status_code == 404, "there is no judge here"
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=100)
    assert child.returncode == 0
    assert not Path(curl.split("-d @")[1].split()[0]).exists()

    policy = build_policy(PolicyConfig(device="cpu"), slot.env)
    best = find_folder(run).checkpoints.best()
    assert best is not None
    load_vlm(policy, best.algorithm)
    policy.show([b"it"], frame)
    asked = Observations(texts=(prompt,), images=(b"it",)), [7]
    engine = PolicyEngine(policy)
    (own,) = engine.reply(*asked, ReplySampling(max_new_tokens=48, greedy=True))
    assert answer["text"] == own.text and answer["log_prob"] == pytest.approx(own.log_probs.sum(), abs=1e-4)
    read = slot.env.read(own.text).action
    assert answer["action"] == (None if read is None else slot.env.action_names[read])
    assert sampled[0]["text"] == sampled[1]["text"] == engine.reply(*asked, ReplySampling(max_new_tokens=48))[0].text
    assert hostile.status_code == 422 and "tokens of the chat's format" in hostile.json()["error"]["message"]


LIVES = {
    "steps": Life(" ".join(WORDS), of_steps),
    "steps, filmed, judged": Life(
        f"gym:own_envs:OwnReach-v0 {' '.join(WORDS[1:])} --goal bright --judge.backend own_envs:brightness "
        "--reward.teacher judge --reward.model image --algo.env-runners 1 --steps 240 "
        "--track.checkpoint-every-steps 120",
        of_filmed_steps,
    ),
    "turns": Life(
        "number_line --steps 128 --algo.rollout-turns 64 --algo.num-envs 16 --algo.epochs 1 --sft.turns 64 "
        "--sft.updates 10 --eval.every-steps 64 --eval.episodes 2 --track.checkpoint-every-steps 64 "
        "--track.log-every-steps 64 --env.split training",
        of_turns,
        served_turns,
    ),
    "turns, filmed": Life(
        "filmed_lamp:TASK --steps 80 --algo.rollout-turns 20 --algo.num-envs 10 --algo.epochs 1 --sft.turns 32 "
        "--sft.updates 5 --eval.every-steps 20 --eval.episodes 2 --track.checkpoint-every-steps 20",
        of_filmed_turns,
        refusal="",
    ),
    "turns, a network of one's own": Life(
        f"number_line --policy.head {EXAMPLES}/own_turn_policy.py:SmallNet --policy.settings width 32 --steps 128 "
        "--algo.rollout-turns 64 --algo.num-envs 16 --algo.epochs 1 --sft.turns 40 --sft.updates 8 "
        "--eval.every-steps 64 --eval.episodes 2 --track.checkpoint-every-steps 64 --track.log-every-steps 64",
        of_own_turns,
        refusal="replicas hold chat VLMs",
    ),
    "chunks": Life(
        "push_block --steps 6000 --seed 1 --sft.episodes 12 --sft.updates 40 --algo.groups 6 --algo.group-size 4 "
        "--algo.rounds 1 --policy.pocket.hidden 32 --policy.pocket.image-px 16 --eval.every-steps 2000 "
        "--eval.episodes 4 --track.checkpoint-every-steps 1000 --track.log-every-steps 1000 --reward.source judged "
        "--reward.teacher biased",
        of_chunks,
    ),
    "chunks, filmed": Life(
        "filmed_ball:TASK --smoke --env.wind 0.2 --policy.pocket.hidden 32 --policy.pocket.image-px 16 "
        "--sft.episodes 12 --sft.updates 40 --steps 3000 --track.checkpoint-every-steps 1000 --eval.every-steps 1500 "
        "--algo.env-runners 1 --algo.env-workers 2 --algo.num-learners 1",
        of_filmed_chunks,
    ),
}


@contextmanager
def stopped_after_the_first_evaluation(run: Path) -> Iterator[None]:
    """Sends this process SIGTERM as soon as the run has evaluated its policy."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            if (run / "eval.csv").exists() and len((run / "eval.csv").read_text().splitlines()) > 1:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("name", LIVES)
def test_a_run_is_stopped_killed_gone_on_with_evaluated_and_served(name, local_ray, tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    life, run = LIVES[name], tmp_path / "run"
    PIXELS.clear()
    with stopped_after_the_first_evaluation(run):
        run_here("run", *life.words.split(), "--out", str(run), code=75)
    said = capfd.readouterr().out
    summary, total = json.loads((run / "summary.json").read_text()), int(life.words.split("--steps ")[-1].split()[0])
    assert f"rlvlm resume {run}" in said
    assert summary["exit_reason"] == "SIGTERM" and 0 <= summary["env_steps"] < total
    assert (run / "README.md").exists() and (run / "plots" / "learning_curve.png").exists()

    PIXELS.clear()  # as in a new process
    run_here("resume", str(run / "eval.csv"))  # a file of it says where it is
    went_on = capfd.readouterr().out
    began = f" from step {summary['env_steps']}" if summary["env_steps"] else ""
    assert f"training in {run}{began}" in went_on, "where it goes on"
    ended = json.loads((run / "summary.json").read_text())
    assert ended["exit_reason"] == "done" and ended["env_steps"] >= total and ended["wall_s"] > summary["wall_s"]
    killed = resumed(run)

    capfd.readouterr()
    run_here("eval", str(run), "--episodes", "2")
    assert "success" in capfd.readouterr().out
    life.check(run, killed, said + went_on)
    if life.serve:
        life.serve(run)
    elif life.refusal:
        run_here("serve", str(run), code=2)
        assert life.refusal in box_words(capfd.readouterr().err)
