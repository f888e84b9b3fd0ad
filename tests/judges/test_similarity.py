import numpy as np
import pytest

from rlvlm.core.errors import UnsupportedQuestion
from rlvlm.core.judging import Clip, Label, Query, Status
from rlvlm.judges.config import JudgeConfig, SimilarityConfig
from rlvlm.judges.numeric import NumericJudge
from rlvlm.judges.similarity import SimilarityModel


def grey(*shades: int) -> np.ndarray:
    return np.stack([np.full((8, 8, 3), shade, np.uint8) for shade in shades])


class Brightness:
    """The brighter, the better; a goal image is reached where the shades agree."""

    revision, traits, sees_goal_images = "1", "none", True

    def __init__(self, sees_goal_images: bool = True) -> None:
        self.sees_goal_images = sees_goal_images
        self.goals = []

    def rate(self, images, goals):
        self.goals += goals
        return np.array(
            [
                image.mean() / 255 if isinstance(goal, str) else 1 - abs(image.mean() - goal.mean()) / 255
                for image, goal in zip(images, goals, strict=True)
            ]
        )


def judge(rater=None, *, prompt="direct", score="progress", **settings) -> NumericJudge:
    similarity = SimilarityConfig(**settings)
    config = JudgeConfig(backend="mine:judge", prompt=prompt, score=score, similarity=similarity)
    return NumericJudge(config, SimilarityModel(config, rater or Brightness()))


def test_the_last_image_counts_and_the_sides_are_symmetric():
    queries = [
        Query(goal="open it", left=left, right=right)
        for left, right in ((grey(0, 10), grey(255, 0)), (grey(9), grey(10)))
    ]
    mirrored = [query.swapped for query in queries]
    assert [verdict.label for verdict in judge().compare(queries)] == [Label.LEFT, Label.RIGHT]
    assert [verdict.label for verdict in judge().compare(mirrored)] == [Label.RIGHT, Label.LEFT]
    assert judge().score([Clip(goal="open it", frames=grey(0, 255))])[0].value == 1.0


def test_within_the_band_there_is_no_preference():
    queries = [Query(goal="open it", left=grey(100), right=grey(shade)) for shade in (100, 110, 130)]
    assert [v.label for v in judge().compare(queries)] == [Label.TIE, Label.RIGHT, Label.RIGHT]
    verdicts = judge(tie_band=0.05).compare(queries)
    assert [v.label for v in verdicts] == [Label.TIE, Label.TIE, Label.RIGHT]
    assert verdicts[0].status is Status.NO_PREFERENCE and verdicts[1].text == "left 0.3922, right 0.4314"


def test_the_sentence_is_the_templates_and_a_goal_image_takes_its_place():
    rater = Brightness()
    one = judge(rater, template="an image of {goal}")
    goal = grey(30)
    (verdict,) = one.compare([Query(goal="an open drawer", left=grey(25), right=grey(200), goal_picture=goal)])
    assert verdict.label is Label.LEFT and not isinstance(rater.goals[0], str)
    one.score([Clip(goal="an open drawer", frames=grey(1))])
    assert rater.goals[-1] == "an image of an open drawer"
    blind = judge(Brightness(sees_goal_images=False))
    (verdict,) = blind.compare([Query(goal="open it", left=grey(1), right=grey(2), goal_picture=goal)])
    assert verdict.status is Status.FAILED and "leave out goal_picture" in verdict.text


@pytest.mark.parametrize("changes", [{"prompt": "two_stage"}, {"score": "rating"}])
def test_unsupported_questions_are_refused(changes):
    with pytest.raises(UnsupportedQuestion, match="it knows"):
        judge(None, **changes)
