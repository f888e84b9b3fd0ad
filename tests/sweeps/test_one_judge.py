"""One judge that three algorithms ask at the same time."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from api_server import ApiServer
from ray import serve
from tiny_run import run_here, table

from rlvlm.cli import main
from rlvlm.labels.store import LabelStore
from rlvlm.sweeps.config import read_sweep
from rlvlm.sweeps.plan import expand, shared_judges

FILE = Path(__file__).parents[2] / "tune_configs" / "one_judge.yaml"
TASKS = ("rlvlm.testing:TINY", "number_line", "push_block")


def test_the_algorithms_share_one_deployment(tmp_path):
    plans = expand(read_sweep(FILE))
    assert {plan.config.kind.name for plan in plans} == {"steps", "turns", "chunks"}
    assert len(shared_judges(plans, 0.0, tmp_path)) == 1


@pytest.mark.ray
@pytest.mark.slow
def test_three_algorithms_learn_from_one_judge_at_the_same_time(local_ray, tmp_path, capfd):
    """Tasks that take seconds in the place of those in the file, and a judge behind a server's API."""
    tree = yaml.safe_load(FILE.read_text())
    own = list(tree["task_settings"].values())
    tree |= {"tasks": list(TASKS), "task_settings": dict(zip(TASKS, own, strict=True))}
    for task in TASKS[1:]:
        tree["task_settings"][task] |= {"reward.monitor.preflight": 0}  # it tells bright from dark
    tree["task_settings"]["rlvlm.testing:TINY"] |= {
        "steps": 160, "env.episode_steps": 20, "algo.seed_steps": 40, "eval.every_steps": 160,
        "feedback.first_step": 100, "feedback.every_steps": 100, "feedback.queries": 8, "feedback.preflight": 0,
        "reward_model.ensemble": 1,
        "reward_model.min_updates": 5, "reward_model.max_updates": 5, "algo.critic_reset_updates": 5,
    }  # fmt: skip
    tree["task_settings"]["number_line"] |= {
        "steps": 32, "algo.num_envs": 4, "algo.rollout_turns": 32, "algo.epochs": 1, "algo.max_reply_tokens": 64,
        "sft.turns": 16, "sft.updates": 2, "eval.every_steps": 32, "eval.episodes": 2,
    }  # fmt: skip
    tree["task_settings"]["push_block"] |= {
        "steps": 200, "sft.episodes": 4, "sft.updates": 4, "algo.groups": 4, "algo.rounds": 1, "eval.episodes": 2,
        "policy.pocket.hidden": 32, "policy.pocket.image_px": 16, "reward.num_frames": 2, "reward.frame_px": 32,
    }  # fmt: skip
    store = tmp_path / "labels"
    server = ApiServer()
    with server.running() as url:
        tree["settings"] = {
            "judge.backend": "openai",
            "judge.model": "m",
            "judge.api.base_url": url,
            "judge.score": "success",
            "judge.store": str(store),
        }
        file = tmp_path / "sweep.yaml"
        file.write_text(yaml.safe_dump(tree))
        run_here("sweep", str(file), "--out", str(tmp_path / "sweep"))
        serve.shutdown()
    assert capfd.readouterr().out.count("loading the judge") == 1
    states = {row["task"]: row["state"] for row in table(tmp_path / "sweep" / "trials.csv")}
    assert states == dict.fromkeys(TASKS, "done")

    asked = Counter(answer.origin.task for answer in LabelStore(store).answers())
    assert set(asked) == set(TASKS), "all answers lie in one store"
    assert sum("label" in call.text for call in server.calls) and sum("yes or no" in call.text for call in server.calls)
    summaries = [json.loads(run.read_text()) for run in (tmp_path / "sweep").glob("*/judge/seed_0/summary.json")]
    assert len(summaries) == len(TASKS) and all(summary["queries"] > 0 for summary in summaries)

    assert main(["report", str(tmp_path / "sweep")]) == 0
    rows = table(tmp_path / "sweep" / "report_runs.csv")
    assert {row["task"] for row in rows} == set(TASKS), "one report has all three"
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert all(task in page for task in TASKS)
