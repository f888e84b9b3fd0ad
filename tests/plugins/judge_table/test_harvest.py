"""Runs keep what fooled their judge, and a suite is made of it."""

import json
from dataclasses import replace

import pytest

from rlvlm.cli import run_command
from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Stamp
from rlvlm.envs.push_block import draw_tables
from rlvlm.judge_bench.bench import measure, summarise
from rlvlm.judge_bench.hacked import SUFFIX, read_suite, shipped_suites, write_suite
from rlvlm.judge_bench.prediction import predict, predict_row
from rlvlm.judge_bench.suites import find_suite
from rlvlm.judges.config import JudgeConfig
from rlvlm.plugins.judge_table.commands import harvest
from rlvlm.plugins.judge_table.harvest import harvest_suite
from rlvlm.rewards.scoring_items import ScoredItem
from rlvlm.runs.files.folder import RunFolder
from rlvlm.runs.files.records import Recorder
from rlvlm.runs.settings.config_file import config_text
from rlvlm.runs.settings.recipes import recipe
from rlvlm.testing import fooled
from tests.judge_bench.test_hacked import scored

STAMP = Stamp(judge="fooled", revision="", prompt="", decoding="")


def rated(number: int, value: float, progress: float) -> ScoredItem:
    """An image that a run in steps has scored, which claims no success."""
    whole = scored(number, value, is_success=False)
    item = replace(whole.item, snapshots=whole.item.snapshots[-1:], is_success=None, progress=progress)
    return replace(whole, item=item, truth=progress, success_threshold=None)


@pytest.mark.slow
def test_episodes_that_fooled_a_judge_are_kept_and_become_a_suite(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(config_text(replace(recipe("push_block"), out=run)))
    (run / "command.txt").write_text("python -m rlvlm.run push_block\n")
    folder = RunFolder(run, 1)

    def recorder() -> Recorder:
        return Recorder(folder, lambda: pytest.fail("no labels"), draw_tables, "")

    kept = [scored(number, 0.9, is_success=False) for number in range(1, 13)]
    others = [scored(20, 0.9, is_success=True), scored(21, 0.1, is_success=False), scored(22, None, is_success=False),
              scored(23, 0.9, is_success=False, success_lost=True)]  # fmt: skip
    recorder().keep([*kept[:8], *others])
    recorder().keep([*kept[8:], *kept[:8]])
    assert len(folder.fooled.read()) == 12
    recorder().keep(kept)  # a run that goes on knows them
    assert len(folder.fooled.read()) == 12
    # of a judge of progress, what scores best and is worst, on whatever scale
    recorder().keep([rated(30 + number, 0.3 + 0.01 * number, 0.7 - 0.1 * number) for number in range(5)])
    recorder().keep([rated(30 + number, 0.3 + 0.01 * number, 0.1 * number) for number in range(5)])
    recorder().keep([rated(30 + number, 0.3, 0.7) for number in range(5)])
    recorder().keep([rated(30, 0.3, float("nan"))])
    found = folder.fooled.read()[12:]
    assert [(len(row["snapshots"]), round(row["score"], 2)) for row in found] == [(1, 0.34), (1, 0.33)]
    assert harvest_suite([run], tmp_path / "few", 5, 2) == 0
    shapes = {shown.snapshots.shape for shown in read_suite(tmp_path / "few" / f"push_block{SUFFIX}")[1]}
    assert shapes == {(1, 10), (2, 10)}
    folder.fooled.path.write_text("".join(folder.fooled.path.read_text().splitlines(keepends=True)[:12]))
    assert harvest_suite([run], tmp_path / "suite") == 0
    file = tmp_path / "suite" / f"push_block{SUFFIX}"
    assert {shown.trick for shown in read_suite(file)[1]} == {"only something small moves"}
    assert (tmp_path / "suite" / "tricks.png").stat().st_size > 1_000

    suite = replace(find_suite(str(file)), episodes=12, videos=6)
    config = JudgeConfig(image_px=48)
    row = summarise(measure(suite, fooled.hand_distance(config), config, num_frames=8))
    assert row["figures"]["scores"]["hacked_auc"]["count"] > 12
    assert "calls what has fooled judges successes" in {fault["name"] for fault in row["faults"]}
    assert [one.grade for one in predict_row(row, []) if one.is_asked] == ["can be fooled"]
    json.dumps(row, allow_nan=False)
    # what is expected of training rests on them too: a policy plays them
    plain = predict(
        summarise(measure(replace(suite, hacked=()), fooled.hand_distance(config), config, num_frames=8))["teacher"], []
    )
    worths = [next(one.worth for one in found if one.is_asked) for found in (plain, predict(row["teacher"], []))]
    assert worths[1] < worths[0] - 0.2


def test_the_best_liked_failures_of_a_rehearsal_become_a_suite(tmp_path):
    bench = tmp_path / "bench"
    bench.mkdir()
    task, episodes = read_suite(shipped_suites()["push_block"])
    write_suite(bench / f"push_block{SUFFIX}", task, episodes[:8])
    (bench / "bench.json").write_text("{}")
    run_command(["judge-bench", "harvest", str(bench), "--out", str(tmp_path / "suite"), "--episodes", "5"])
    made = read_suite(tmp_path / "suite" / f"push_block{SUFFIX}")
    assert made[0] == task and [each.score for each in made[1]] == [each.score for each in episodes[:5]]
    (bench / f"push_block{SUFFIX}").unlink()
    write_suite(bench / f"own{SUFFIX}", "my_file:Task", episodes[:8])
    with pytest.raises(UsageError, match="--trust"):
        harvest(["--out", str(tmp_path / "other"), str(bench)], "rlvlm")


def test_runs_without_such_episodes_are_refused(tmp_path):
    (tmp_path / "config.yaml").write_text(config_text(replace(recipe("push_block"), out=tmp_path)))
    (tmp_path / "command.txt").write_text("python -m rlvlm.run push_block\n")
    with pytest.raises(UsageError, match="kept no episode that fooled the judge"):
        harvest_suite([tmp_path], tmp_path / "suite")
