from dataclasses import replace
from pathlib import Path

import pytest

from rlvlm.core.errors import UsageError
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.rewards.config import TurnRewardConfig
from rlvlm.runs.settings.config_file import config_text, read_config_text
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import commented, differences, from_yaml, override, to_yaml


def test_a_file_written_by_hand_is_read():
    config = read_config_text("task: drawer_open\nseed: 4\nenv:\n  start: random\nalgo:\n  hidden: [32, 16]\n")
    assert (config.seed, config.env.start, config.algo.hidden) == (4, "random", (32, 16))
    assert config.steps == StepsRun(task="drawer_open").steps


def test_a_round_trip_changes_nothing():
    config = StepsRun(task="drawer_open", out=Path("runs/x"), env=MetaWorldConfig(start="random", num_envs=3))
    assert read_config_text(config_text(config)) == config
    assert read_config_text(config_text(replace(config, out=None))).out is None
    for threshold in (0.25, "calibrated", None):
        scores = TurnRewardConfig(source="judged", threshold=threshold)
        assert from_yaml(TurnRewardConfig, to_yaml(scores)) == scores
    with pytest.raises(UsageError, match="must be of type float"):
        from_yaml(TurnRewardConfig, "{source: judged, threshold: guessed}")


def test_differences_worked_by_hand():
    """Of three settings one is as it was, one is another, one is gone; and one is new."""
    before, after = {"seed": 1, "lr": 0.1, "gone": 2}, {"seed": 1, "lr": 0.2, "new": 3}
    assert differences(before, after) == {"lr": "0.2, before 0.1", "gone": "unset, before 2"}
    assert differences(before, before) == {}


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("task: t\nsede: 1", "unknown key sede", "did you mean seed?"),
        ("task: t\nalgo: {batchsize: 1}", "unknown key algo.batchsize", "did you mean algo.batch_size?"),
        ("task: t\nzzz: 1", "unknown key zzz", "known here: task"),
        ("task: t\nseed: one", "seed must be of type int, got 'one'", ""),
        ("task: t\nseed: true", "seed must be of type int, got True", ""),
        ("task: t\nenv: {start: randm}", "env.start must be one of fixed, near, random", ""),
        ("task: t\nalgo: {hidden: 5}", "algo.hidden must be a list", ""),
        ("task: t\nalgo: {hidden: [a]}", r"algo.hidden\[0\] must be of type int", ""),
        ("task: t\nalgo: 3", "algo must be a mapping", ""),
        ("task: t\nsteps: 0", "steps must be >= 1, got 0", ""),
        ("seed: 1", "task is missing", "add task"),
        ("task: [", "not YAML", ""),
        ("", "must be a mapping", ""),
    ],
)
def test_mistakes_are_named(text, what, fix):
    with pytest.raises(UsageError, match=what) as caught:
        read_config_text(text)
    assert fix in caught.value.fix


def test_the_printed_config_explains_each_setting_and_reads_back():
    config = replace(recipe("number_line"), goal=f"a goal in {'many ' * 36}words")
    text = commented(config_text(config), config)
    assert "\nsteps: 10240  # Env steps of the run\n" in text
    line = "    clip_low: 0.2  # Lower clip of the ratio: below 1 - clip_low there is no further gain; in (0, 1)\n"
    assert line in text
    assert read_config_text(text) == config


def test_a_section_may_be_overridden_by_a_mapping():
    own = {
        "judge": {"backend": "transformers", "model": "x", "api": {"retries": 2}},
        "reward.exploration": {"bonus": "none"},
    }
    config = override(recipe("drawer_open"), own)
    assert (config.judge.backend, config.judge.api.retries) == ("transformers", 2)
    assert config.judge.batch_size == recipe("drawer_open").judge.batch_size
    with pytest.raises(UsageError, match="unknown setting judge.api.retrys"):
        override(recipe("drawer_open"), {"judge": {"api": {"retrys": 2}}})
