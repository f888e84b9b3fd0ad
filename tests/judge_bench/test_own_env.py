"""`rlvlm judge-bench` and a run's own accuracy on envs of the user's own, by a server that is right in 80 %."""

import hashlib
import json
import time
from pathlib import Path

import pytest
from api_server import ApiServer, Call, Response

from rlvlm.cli import run_command
from rlvlm.core.errors import UsageError
from rlvlm.labels.store import LabelStore

FLIPPED = {"0": "1", "1": "0"} | dict([NAMES := ("The first is brighter.", "The second is brighter."), NAMES[::-1]])
GOAL = ("--goal", "move the point into the middle")


class Errs(ApiServer):
    """Names the wrong image in 20 % of the questions, chosen by what they show."""

    def _wants_odds(self, call: Call) -> bool:
        return False  # an answer is its text

    def truth(self, call: Call) -> Response:
        response = super().truth(call)
        message = response.body["choices"][0]["message"]
        drawn = hashlib.sha256(b"".join(image.tobytes() for image in call.images)).digest()[0] / 256
        if call.images and drawn < 0.2:  # words about them that follow have nothing to err about
            message["content"] = FLIPPED.get(message["content"], message["content"])
        return response


def bench(task: str, out: Path, address: str, *words: str) -> dict:
    judge = f"--judge.backend openai --judge.model m --judge.api.base-url {address} --judge.image-px 48".split()
    run_command(["judge-bench", task, *judge, "--out", str(out), *words])
    return json.loads((out / "bench.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name, has_scores", [("OwnReach", False), ("OwnBalance", True)])
def test_a_server_that_is_right_in_80_percent_is_measured_so(tmp_path, name, has_scores):
    with Errs().running() as address:
        row = bench(f"gym:own_envs:{name}-v0", tmp_path, address, *GOAL, "--pairs", "200", "--episodes", "12")
    pairs = row["figures"]["pairs"]
    assert 0.73 < pairs["accuracy"]["value"] < 0.87 and pairs["accuracy"]["count"] >= 300
    assert pairs["unread"]["value"] == 0
    # without a success nothing can be told from one; the env's own script brings it
    assert bool(row["figures"]["scores"]) == has_scores
    assert "true reward" in str(row["bench"]["truth"]) and "true reward" in (tmp_path / "bench.html").read_text()


@pytest.mark.slow
def test_wrong_arguments_end_at_once_and_do_not_blame_the_judge(tmp_path):
    server = ApiServer()
    (file := tmp_path / "file").touch()
    task = "gym:own_envs:OwnReach-v0"
    with server.running() as address:
        cases = {
            "a goal needs 1 to 200 characters": (task, tmp_path),
            "one line of plain words": (task, tmp_path, "--goal", "<b>win</b>"),
            "nothing can be written to": (task, file / "out", *GOAL),
            "true reward differs": ("gym:own_envs:OwnGrey-v0", tmp_path, *GOAL),
            "--goal is of one task": (f"{task},cartpole", tmp_path, *GOAL),
        }
        for message, (name, out, *words) in cases.items():
            began = time.thread_time()
            with pytest.raises(UsageError, match=message):
                bench(name, out, address, *words)
            assert message == "true reward differs" or time.thread_time() - began < 2
    assert not server.calls


@pytest.mark.slow
def test_people_are_the_truth_of_a_rehearsal_where_no_success_is_known(tmp_path, capsys):
    queue = pytest.importorskip("rlvlm.plugins.people.queue")
    words = ["judge-bench", "gym:own_envs:OwnReach-v0", *GOAL, "--judge.backend", "rlvlm.testing.fooled:brightness"]
    words += ["--judge.image-px", "48", "--pairs", "10", "--rehearse", "100", "--out", str(tmp_path)]

    def rehearsed() -> dict:
        assert run_command(words) == 0
        ((found,),) = json.loads((tmp_path / "bench.json").read_text())["rehearsals"].values()
        return found

    assert rehearsed()["verdict"] == "no success was met"
    (store,) = (tmp_path / "people").iterdir()
    assert f"(40 wait): rlvlm labels ask {store}" in "".join(capsys.readouterr().out.split("\n"))
    people = queue.PeopleQueue(LabelStore(store))
    people.refresh()
    for number, question in enumerate(people.asked):
        facts = {"name": "anna", "client": "a", "seconds": 1.0, "when": 1.0}
        people.add(queue.Said(question=question, ticket=queue.new_ticket(), choice=5 if number < 10 else 2, **facts))
    found = rehearsed()
    assert found["verdict"] == "can be fooled" and found["fooled"]["count"] == 40 and found["judged"] == 0.25
    assert "people say that 25% of the 40 ends that it likes best are done" in capsys.readouterr().out
