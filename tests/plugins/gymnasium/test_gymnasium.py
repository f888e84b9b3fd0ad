"""A judge's score as the reward of Gymnasium's envs, and of Stable-Baselines3's vectorized ones."""

import numpy as np
import pytest
from frameworks import Faulty, needs, run, snippet
from lamp import Lamp

import rlvlm
from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Status
from rlvlm.plugins.gymnasium.reward import JudgeReward
from rlvlm.testing import FakeJudge


def played(judge, per, **settings) -> list[tuple[float, dict]]:
    """An episode of the lamp, six steps brighter from level 3."""
    env = JudgeReward(Lamp(6), rlvlm.Judge.local(judge), "make the lamp bright", per, **settings)
    env.reset(seed=3)
    env.unwrapped._level = 2
    steps = [env.step(1) for _ in range(6)]
    assert [truncated for _, _, _, truncated, _ in steps] == [False] * 5 + [True]
    return [(reward, info) for _, reward, _, _, info in steps]


@pytest.mark.parametrize(
    ("per", "due", "lengths"), [("step", range(6), [1] * 6), (4, (3, 5), [5, 3]), ("episode", (5,), [7])]
)
def test_the_reward_is_the_judges_score_and_the_envs_stays_in_info(per, due, lengths):
    judge = Faulty()
    steps = played(judge, per, num_frames=7)
    # by hand: the level after step t is 3 + t of 8; the fake judge sees it as brightness
    for t, (reward, info) in enumerate(steps):
        assert info["env_reward"] == (3 + t) / 8 and "judge_clip" not in info
        assert reward == pytest.approx((3 + t) / 8 if t in due else 0, abs=1e-2)
        assert info.get("judge_status") == ("ok" if t in due else None)
    assert judge.lengths == lengths


def test_a_long_clip_is_cut_to_its_first_last_and_evenly_between():
    judge = Faulty()
    played(judge, "episode", num_frames=3)
    assert judge.lengths == [3]


def test_a_missing_answer_is_worth_what_the_user_says_and_info_says_why():
    reward, info = played(Faulty(Status.FAILED), "episode", without_answer=0.5)[-1]
    assert reward == 0.5 and info["judge_status"] == "failed" and info["env_reward"] == 1.0


def test_wrong_arguments_are_refused_at_once():
    judge, dark = rlvlm.Judge.local(FakeJudge()), Lamp()
    with pytest.raises(ValueError, match="per must be"):
        JudgeReward(dark, judge, "brighter", per=0)
    dark.render_mode = None
    with pytest.raises(UsageError, match="rgb_array, got None"):
        JudgeReward(dark, judge, "brighter")


def test_an_image_that_the_env_draws_over_stays_as_it_was():
    class Redrawn(Lamp):
        image = np.zeros((8, 8, 3), np.uint8)

        def render(self):
            self.image[:] = super().render()
            return self.image

    seen = []

    class Looking(FakeJudge):
        def score(self, clips):
            seen.extend(clip.frames[:, 0, 0, 0].tolist() for clip in clips)
            return super().score(clips)

    env = JudgeReward(Redrawn(3), rlvlm.Judge.local(Looking()), "brighter", per="episode")
    env.reset(seed=0)
    for _ in range(3):
        env.step(0)
    assert len(set(seen[0])) == 4


@needs("sb3")
@pytest.mark.slow
def test_the_page_trains_sb3_on_a_judge_and_asks_once_for_all_envs(tmp_path):
    program = snippet("Gymnasium and Stable-Baselines3")
    checks = """
model.learn(2_000)
import numpy as np
levels = model.predict(np.eye(9, dtype=np.float32)[:8], deterministic=True)[0]
print(sum(levels), "of 8 levels are made brighter")
envs.reset()
envs.step_async([1] * 4)
_, rewards, _, infos = envs.step_wait()
print(abs(rewards - [info["env_reward"] for info in infos]).max() < 0.01, {info["judge_status"] for info in infos})
try:
    JudgeVecReward(make_vec_env(Lamp, n_envs=2), judge, "make the lamp bright")
except rlvlm.core.errors.UsageError as error:
    print(error)
"""
    (tmp_path / "my_env.py").write_text("from lamp import Lamp\n")
    said = run("sb3", program + checks, tmp_path)
    assert "8 of 8 levels" in said and "True {'ok'}" in said and "an env is not filmed" in said
