"""Reward sources by name: those that ship, and a class, a function and a teacher from a file of one's own."""

import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stub_judge import StubJudge
from tiny_episodes import pair_of, tiny_episode, transitions_of

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Label
from rlvlm.core.references import load_object
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.teachers import build_teacher
from rlvlm.rewards.build import build_source
from rlvlm.rewards.config import SOURCES, StepRewardConfig
from rlvlm.rewards.source import Labelling, SourceContext
from rlvlm.testing import TinyEnv

OWN = textwrap.dedent(
    """
    from rlvlm.preferences.teachers import Teacher
    from rlvlm.rewards.source import RewardSource
    from rlvlm.core.judging import Label, Stamp, Status, Verdict

    asked = []

    class Still(RewardSource):
        def label(self, transitions):
            return -abs(transitions.actions).sum(axis=1)

    class ByGoal(Still):
        @classmethod
        def build(cls, context):
            source = cls()
            source.goal = context.goal
            return source

    def brightness(images, goal):
        asked.append(len(images))
        return images.mean(axis=(1, 2, 3)) / 255 + len(goal)

    def wrong(images, goal):
        return images

    def make(context):
        return Still()

    class AlwaysLeft(Teacher):
        def answer(self, pairs):
            stamp = Stamp(judge="left", revision="", prompt="", decoding="")
            return [Verdict(status=Status.OK, label=Label.LEFT, stamp=stamp) for _ in pairs]

    class Nothing:
        pass

    class NoLabel(RewardSource):
        pass
    """
)


def context() -> SourceContext:
    frames = FrameStore(TinyEnv(), 16)
    return SourceContext(env=TinyEnv(), frames=frames, goal="push", judge=StubJudge())


@pytest.fixture
def own(tmp_path):
    (tmp_path / "my_rewards.py").write_text(OWN)
    return str(tmp_path / "my_rewards.py")


def test_every_source_that_ships_is_made_by_its_name():
    direct = [name for name in SOURCES if not StepRewardConfig(source=name).is_learned]
    for name in direct:
        source = build_source(name, context())
        if source.labelling is Labelling.ON_DRAW:
            source.observe(transitions_of(tiny_episode(0)).obs)  # pyright: ignore[reportAttributeAccessIssue]
        rewards = source.label(transitions_of(tiny_episode(0)))
        assert rewards.shape == (20,) and rewards.dtype == np.float32 and source.version >= 0
    assert direct == ["judged", "environment", "success", "novelty"]
    won = replace(transitions_of(tiny_episode(0)), success=np.arange(20, dtype=np.float32))
    np.testing.assert_array_equal(build_source("environment", context()).label(won), won.env_rewards)
    np.testing.assert_array_equal(build_source("success", context()).label(won), won.success)


def test_a_users_own_source_needs_nothing_but_label(own):
    source, batch = build_source(f"{own}:Still", context()), transitions_of(tiny_episode(0))
    np.testing.assert_allclose(source.label(batch), -np.abs(batch.actions).sum(axis=1))
    assert source.labelling is Labelling.ON_ARRIVAL and source.version == 0
    assert build_source(f"{own}:ByGoal", context()).goal == "push"  # pyright: ignore[reportAttributeAccessIssue]
    assert type(build_source(f"{own}:make", context())).__name__ == "Still"


def test_a_plain_function_of_images_is_asked_once_about_each_that_looks_new(own):
    source, batch = build_source(f"{own}:brightness", context()), transitions_of(tiny_episode(0))
    rewards = source.label(batch)
    images = TinyEnv().draw(batch.snapshots, 16)
    np.testing.assert_allclose(rewards, images.mean(axis=(1, 2, 3)) / 255 + 4, rtol=1e-5)
    np.testing.assert_array_equal(source.label(batch), rewards)
    asked = load_object(f"{own}:asked", "reward.source")
    assert len(asked) == 1 and asked[0] < 20


def test_a_file_of_the_working_directory_is_found_by_its_name(own, monkeypatch):
    monkeypatch.chdir(Path(own).parent)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    assert build_source("my_rewards:Still", context()).label(transitions_of(tiny_episode(0))).shape == (20,)


def test_a_users_own_teacher_answers(own):
    frames = FrameStore(TinyEnv(), 16)
    teacher = build_teacher(f"{own}:AlwaysLeft", judge=None, frames=frames, goal="push", seed=0)
    assert [verdict.label for verdict in teacher.answer([pair_of(0.1, 0.9)])] == [Label.LEFT]
    assert teacher.get_state() == {} and StepRewardConfig(teacher=f"{own}:AlwaysLeft", source="score").is_learned
    with pytest.raises(UsageError, match="is no Teacher"):
        build_teacher(f"{own}:Still", judge=None, frames=frames, goal="push", seed=0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Nobody", "AttributeError: module 'my_rewards' has no attribute 'Nobody'"),
        ("Nothing", "lacks label, labelling, version"),
        ("NoLabel", "lacks label(?!,)"),
    ],
)
def test_an_unknown_source_is_refused_by_name(own, name, says):
    with pytest.raises(UsageError, match=says):
        build_source(f"{own}:{name}", context())
    with pytest.raises(UsageError, match="reward.source nowhere:Thing: ModuleNotFoundError"):
        build_source("nowhere:Thing", context())
    (Path(own).parent / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        build_source(f"{Path(own).parent / 'broken.py'}:Thing", context())
    with pytest.raises(UsageError, match=r"wrong gave rewards of shape .* for \d+ images"):
        build_source(f"{own}:wrong", context()).label(transitions_of(tiny_episode(0)))


def test_a_misspelt_name_gets_a_suggestion():
    with pytest.raises(ValueError, match="did you mean environment"):
        StepRewardConfig(source="enviroment")
    with pytest.raises(ValueError, match="did you mean oracle"):
        StepRewardConfig(teacher="orcle")
