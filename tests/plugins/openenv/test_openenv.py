"""A judge's score as a rubric of OpenEnv."""

import shutil
from pathlib import Path

import pytest
from frameworks import needs, run, snippet


@needs("openenv")
@pytest.mark.slow
def test_the_page_judges_an_openenv_environment_at_the_end_of_an_episode(tmp_path):
    shutil.copy(Path(__file__).with_name("my_environment.py"), tmp_path)
    checks = """
from my_environment import Press
from openenv.core.rubrics import WeightedSum


def played(rubric, brighter):
    environment = LampEnvironment(rubric=rubric)
    environment.reset()
    return [environment.step(Press(brighter=brighter)).reward for _ in range(4)]


print(played(rubric, True), rubric.compute_step_rewards(), played(rubric, False), len(rubric.trajectory))
other = JudgeRubric(judge, lambda action, observation: image_of(observation), "make the lamp bright")
both = WeightedSum([rubric, other], [0.5, 0.5])  # it does not pass resets on
print(played(both, True), played(both, False), len(rubric.trajectory))

"""
    said = run("openenv", snippet("OpenEnv") + checks, tmp_path).splitlines()
    # by hand: a lamp of level 4 of 8, four steps up or down; the judge of the test sees brightness
    assert said[0] == "[0.0, 0.0, 0.0, 1.0] [0.0, 0.0, 0.0, 1.0] [0.0, 0.0, 0.0, 0.0] 4"
    assert said[1] == "[0.0, 0.0, 0.0, 1.0] [0.0, 0.0, 0.0, 0.0] 4"
