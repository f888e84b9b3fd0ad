from dataclasses import replace
from pathlib import Path

import pytest

from rlvlm.envs.config import EnvConfig
from rlvlm.errors import UsageError
from rlvlm.runs.folder.settings import from_yaml, to_yaml
from rlvlm.runs.preference.config import PreferenceRunConfig


def test_a_file_written_by_hand_is_read() -> None:
    config = from_yaml(
        PreferenceRunConfig, "task: drawer_open\nseed: 4\nenv:\n  start: random\nalgo:\n  hidden: [32, 16]\n"
    )
    assert (config.seed, config.env.start, config.algo.hidden) == (4, "random", (32, 16))
    assert config.steps == PreferenceRunConfig(task="drawer_open").steps


def test_a_round_trip_changes_nothing() -> None:
    config = PreferenceRunConfig(task="drawer_open", out=Path("runs/x"), env=EnvConfig(start="random", num_envs=3))
    assert from_yaml(PreferenceRunConfig, to_yaml(config)) == config
    assert from_yaml(PreferenceRunConfig, to_yaml(replace(config, out=None))).out is None


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("task: t\nsede: 1", "unknown key sede", "did you mean seed?"),
        ("task: t\nalgo: {batchsize: 1}", "unknown key algo.batchsize", "did you mean algo.batch_size?"),
        ("task: t\nzzz: 1", "unknown key zzz", "known here: task"),
        ("task: t\nseed: one", "seed must be of type int, got 'one'", ""),
        ("task: t\nseed: true", "seed must be of type int, got True", ""),
        ("task: t\nenv: {start: randm}", "env.start must be one of fixed, random", ""),
        ("task: t\nalgo: {hidden: 5}", "algo.hidden must be a list", ""),
        ("task: t\nalgo: {hidden: [a]}", r"algo.hidden\[0\] must be of type int", ""),
        ("task: t\nalgo: 3", "algo must be a mapping", ""),
        ("task: t\nsteps: 0", "steps must be >= 1, got 0", ""),
        ("seed: 1", "lacks task", "add task"),
        ("task: [", "not YAML", ""),
        ("", "must be a mapping", ""),
    ],
)
def test_what_is_wrong_is_named(text: str, what: str, fix: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        from_yaml(PreferenceRunConfig, text)
    assert fix in caught.value.fix
