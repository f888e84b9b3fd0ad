from pathlib import Path

import pytest

from rlvlm.core.errors import UsageError
from rlvlm.runs.settings import from_yaml, to_yaml
from rlvlm.sweeps.config import SweepConfig, find_sweep_file, read_sweep
from rlvlm.sweeps.plan import expand

READY = sorted(Path(__file__).parents[2].glob("tune_configs/*.yaml"))
SMALL = """
title: oracle against the true reward
tasks: [drawer_open]
seeds: [0, 1]
sources:
  oracle: {title: Oracle, settings: {reward.teacher: oracle}}
"""


def test_a_small_file_is_read() -> None:
    sweep = from_yaml(SweepConfig, SMALL)
    assert sweep.seeds == (0, 1) and sweep.sources["oracle"].settings == {"reward.teacher": "oracle"}
    assert sweep.flat is None and sweep.halving is None and sweep.resources.cpus == 1
    assert from_yaml(SweepConfig, to_yaml(sweep)) == sweep


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        (SMALL + "seed: [3]", "unknown key seed", "did you mean seeds?"),
        (SMALL + "budget: {step: 3}", "unknown key budget.step", "did you mean budget.steps?"),
        (SMALL + "flat: {shar: 0.3}", "unknown key flat.shar", "did you mean flat.share?"),
        (SMALL + "flat: {share: 1.5}", "need flat.share in", ""),
        (SMALL + "halving: {keep_one_in: 1}", "keep_one_in >= 2", ""),
        (SMALL + "resources: {cpus: 0}", "resources.cpus > 0", ""),
        (SMALL + "budget: {steps: none}", "budget.steps must be of type int", ""),
        (SMALL + "task_settings: {soccer: {steps: 3}}", "not among the tasks", ""),
        (SMALL.replace("[0, 1]", "[1, 1]"), "seeds must name at least one, and none twice", ""),
        (SMALL.replace("  oracle:", "  a/b:"), "it names a folder", ""),
        (SMALL.replace("title: Oracle, ", ""), "sources.oracle.title is missing", ""),
    ],
)
def test_what_is_wrong_is_named(text: str, what: str, fix: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        from_yaml(SweepConfig, text)
    assert fix in caught.value.fix


@pytest.mark.parametrize("file", READY, ids=lambda file: file.stem)
def test_the_ready_sweeps_can_be_planned(file: Path) -> None:
    sweep = read_sweep(find_sweep_file(file.stem))
    assert len(expand(sweep)) == sum(len(sweep.seeds_of(task)) for task in sweep.tasks) * len(sweep.sources)
    assert file.read_text().startswith("# ")  # says what it compares


def test_a_name_that_is_none_is_told_with_those_that_are() -> None:
    assert READY
    with pytest.raises(UsageError, match="reward_sources"):
        find_sweep_file("reward_sorces")
    with pytest.raises(UsageError, match="cannot read"):
        read_sweep(find_sweep_file("nowhere.yaml"))
