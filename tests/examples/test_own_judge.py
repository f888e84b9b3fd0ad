import numpy as np
import pytest

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.core.judging import Clip, Label, Query
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.testing import check_judge


@pytest.mark.parametrize("backend", ["own_judge:nearness", "own_judge:make_judge"])
def test_both_judges_of_the_example_keep_the_contract_and_know_the_task(backend):
    judge = build_judge(JudgeConfig(backend=backend))
    if backend.endswith("nearness"):
        check_judge(judge)
    env = make_env("slide_ball:TASK", StepEnvConfig(), 0)
    near, far = env.draw(np.array([[0.68, 0.32], [0.1, 0.9]], np.float32), 64)[:, None]
    queries = [Query(goal=env.goal, left=near, right=far), Query(goal=env.goal, left=far, right=near)]
    assert [verdict.label for verdict in judge.compare(queries)] == [Label.LEFT, Label.RIGHT]
    near_score, far_score = (
        score.value for score in judge.score([Clip(goal=env.goal, frames=one) for one in (near, far)])
    )
    assert near_score > 0.9 and far_score < 0.5
    assert judge.stamp.revision and build_judge(JudgeConfig(backend=backend, both_orders=True)).compare(queries[:1])


def test_an_incomplete_judge_is_refused_with_the_missing_methods(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "odd_judges.py").write_text(
        "def nothing(): pass\n"
        "def half(config): return type('Half', (), {'stamp': 1, 'score': 2})()\n"
        "def many(images, goal): return [0.5]\n"
        "def large(images, goal): return [2.0 for _ in images]\n"
    )
    for backend, words in (
        ("odd_judges:nobody", "has no attribute 'nobody'"),
        ("no_such_file:judge", "No module named"),
        ("odd_judges:nothing", "takes nothing; a judge of one's own takes a config, or images and a goal"),
        ("odd_judges:half", "is no judge: it has no compare"),
    ):
        with pytest.raises(JudgeUnavailable, match=words):
            build_judge(JudgeConfig(backend=backend))
    clips = [Clip(goal="open it", frames=np.zeros((1, 8, 8, 3), np.uint8))] * 2
    for name, words in (("many", r"got \(1,\) numbers from 0.5 to 0.5 for 2 images"), ("large", "one number in")):
        with pytest.raises(JudgeUnavailable, match=words):
            build_judge(JudgeConfig(backend=f"odd_judges:{name}")).score(clips)
    with pytest.raises(UnsupportedQuestion, match="two_stage"):
        build_judge(JudgeConfig(backend="odd_judges:many", prompt="two_stage"))


def test_a_function_gets_one_array_of_images_as_a_judge_as_it_does_as_a_reward(tmp_path, monkeypatch):
    (tmp_path / "plain_judge.py").write_text(
        "def bright(images, goal):\n    return images.mean(axis=(1, 2, 3)) / 255\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    judge = build_judge(JudgeConfig(backend="plain_judge:bright"))
    sides = [np.full((1, side, side, 3), shade, np.uint8) for side, shade in ((8, 0), (8, 255), (16, 51))]
    scores = judge.score([Clip(goal=goal, frames=frames) for goal in ("a", "b") for frames in sides])
    assert [score.value for score in scores] == pytest.approx([0, 1, 0.2] * 2)
