import numpy as np

from rlvlm.envs.registry import register
from rlvlm.envs.task import Task
from rlvlm.runs.scores import score_name, scores

ROWS = [{"success_rate": "0.2", "episode_return": "-100"}, {"success_rate": "1", "episode_return": "50"}]


def test_a_task_is_compared_by_success_or_by_its_return() -> None:
    np.testing.assert_allclose(scores("drawer_open", ROWS), [0.2, 1.0])
    register(Task(name="test_scores", goal="", maker="rlvlm.testing:TinyEnv", return_range=(-200.0, 0.0)))
    np.testing.assert_allclose(scores("test_scores", ROWS), [0.5, 1.25])  # half-way, and better than solved
    assert score_name("test_scores") == "true return, 0 is -200 and 1 is 0"
    assert scores("drawer_open", []).shape == (0,)
