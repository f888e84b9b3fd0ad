import re
import subprocess
import sys
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image
from tiny_run import box_words

from rlvlm.cli import main
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.cartpole import CartPole
from rlvlm.envs.config import ChunkEnvConfig, EnvConfig, StepEnvConfig
from rlvlm.envs.env import StepEnv
from rlvlm.envs.gym_cards.number_line import NumberLine
from rlvlm.envs.push_block import PushBlock
from rlvlm.envs.registry import Task
from rlvlm.reports import check_task as report
from rlvlm.reports.check_task import check_task
from rlvlm.testing import TinyEnv

TINY = "rlvlm.testing:TINY"


class Frozen(TinyEnv):
    """Draws the same image whatever happened."""

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        return super().draw(np.full_like(snapshots, 0.4), size_px)


class Alive(TinyEnv):
    """A TinyEnv that hands out the very array it goes on changing."""

    def get_state(self):
        return super().get_state() | {"point": self._point}

    def step(self, action):
        point, answer = self._point, super().step(action)
        point[:] = self._point
        self._point = point
        return answer


class Deaf(NumberLine):
    """Takes what it cannot read for a plus."""

    def act(self, action):
        return super().act(1 if action is None else action)


class Ageless(PushBlock):
    """Leaves out of its state how long the episode has lasted."""

    def set_state(self, state):
        super().set_state(state | {"age": 0})


class Hasty(PushBlock):
    """Ends at success whatever `continue_after_success` says."""

    def __init__(self, config, seed):
        super().__init__(replace(config, continue_after_success=False), seed)


class Silent(PushBlock):
    """Does not say how many steps of a chunk were run."""

    def step(self, chunk):
        *answer, info = super().step(chunk)
        return *answer, {name: value for name, value in info.items() if name != "steps"}


class Blind(PushBlock):
    """Sees through no camera."""

    cameras = ()


class Uneven(PushBlock):
    """Scales more dimensions than its actions have."""

    scaled_actions = (True,) * 8


class Idle(TinyEnv):
    """Measures no progress when an episode begins."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)[0], {"snapshot": self.snapshot(), "success": False}


class Plain(PushBlock):
    """Shows an array, as Gymnasium's envs do."""

    def step(self, chunk):
        return self.snapshot(), *super().step(chunk)[1:]


class Bare(TinyEnv):
    """Has no way to draw."""

    draw = StepEnv.draw


class Clumsy(TinyEnv):
    """Divides by zero in its fifth step."""

    def step(self, action):
        return super().step(action * (1 / (4 - self._steps)))


class Nameless(TinyEnv):
    """Says nothing of the size of its snapshots."""

    def __getattribute__(self, name):
        if name == "snapshot_size":
            raise AttributeError(name)
        return super().__getattribute__(name)


DEAF = Task(name="deaf", goal=NumberLine.goal, maker=f"{__name__}:Deaf", kind="turns")
AGELESS = Task(name="ageless", goal=PushBlock.goal, maker=f"{__name__}:Ageless", kind="chunks")
HASTY, SILENT, BLIND, UNEVEN, PLAIN = (
    Task(name=name, goal=PushBlock.goal, maker=f"{__name__}:{name}", kind="chunks", env=EnvConfig(episode_steps=32))
    for name in ("Hasty", "Silent", "Blind", "Uneven", "Plain")
)
IDLE = Task(name="idle", goal=TinyEnv.goal, maker=f"{__name__}:Idle")
BARE = Task(name="bare", goal=TinyEnv.goal, maker=f"{__name__}:Bare")
CLUMSY = Task(name="clumsy", goal=TinyEnv.goal, maker=f"{__name__}:Clumsy")
NAMELESS = Task(name="nameless", goal=TinyEnv.goal, maker=f"{__name__}:Nameless")
FROZEN = Task(name="frozen", goal=TinyEnv.goal, maker=f"{__name__}:Frozen")
ALIVE = Task(name="alive", goal=TinyEnv.goal, maker=f"{__name__}:Alive")
OTHER_GOAL = Task(name="other", goal="push the block away", maker="rlvlm.testing:TinyEnv")


def episode(*progress: float) -> report.Episode:
    scenes = np.array(progress, np.float32)
    return report.Episode(seed=0, snapshots=scenes[:, None], progress=scenes, rewards=scenes[1:], is_success=False)


def test_the_spread_goes_from_least_to_most_by_hand():
    snapshots, progress = report.spread_of_progress([episode(0.2, 0.9, 0.1), episode(0.5, 0.48)], count=3)
    np.testing.assert_allclose(progress, [0.1, 0.5, 0.9])
    np.testing.assert_allclose(snapshots[:, 0], progress)
    assert len(report.spread_of_progress([episode(0.0, 0.0, 0.0)], count=3)[1]) == 1


def test_different_looks_by_hand():
    env = TinyEnv()
    scenes = np.array([[0, 0, 0.4], [0, 0, 0.45], [0, 0, 0.9], [0, 0, 0.6], [0.5, 0.5, 0.4]], np.float32)
    np.testing.assert_allclose(report.different_looks(env, scenes, 3)[:, 2], [0.4, 0.9, 0.6])
    assert len(report.different_looks(env, scenes[[0, 4]], 3)) == 1  # the hidden robot makes no difference
    assert len(report.different_looks(Frozen(), scenes, 3)) == 1


def test_random_play_is_one_whole_episode_and_the_same_again():
    first, again = (report.players(TinyEnv(StepEnvConfig(start="random")))["random play"](5) for _ in range(2))
    assert len(first.snapshots) == len(first.progress) == len(first.rewards) + 1 == 21
    np.testing.assert_array_equal(first.snapshots, again.snapshots)


def test_scripted_play_solves_the_task_that_has_a_script():
    episode = report.players(CartPole(StepEnvConfig(episode_steps=100), 0))["its script"](2)
    assert episode is not None and episode.is_success and len(episode.rewards) == 100
    assert report.players(TinyEnv())["its script"](2) is None


def test_a_sound_task_gets_a_sheet(tmp_path, capsys):
    assert main(["check-task", TINY, "--out", str(tmp_path / "deep" / "sheet.png"), "--episodes", "3"]) == 0
    text = capsys.readouterr().out
    assert "passes the env contract" in text and "ms an image of 64 pixels" in text
    assert (
        "fixed start, random play" in text
        and "its script there is none" in text
        and str(tmp_path) in text.replace("\n", "")
    )
    page = np.asarray(Image.open(tmp_path / "deep" / "sheet.png"))
    is_block = (page == (200, 0, 0)).all(-1)
    assert is_block.sum(axis=1).astype(bool).any() and page.shape[0] > 4 * 150 and page.shape[1] > 7 * 150


def test_a_row_of_the_sheet_says_what_was_asked_where_that_differs():
    env = PushBlock(ChunkEnvConfig(episode_steps=32), 0)
    plays = {"script": [found for seed in (0, 1) if (found := report.players(env)["script"](seed))]}
    best = max(plays["script"], key=lambda played: float(played.progress.max()))
    (row,) = report._rows(env, plays)
    assert row.title == f"script, seed {best.seed}, above: {best.goal}" and best.goal in env.instructions


@pytest.mark.parametrize(
    ("task", "promise"),
    [
        ("FROZEN", "change the image"),
        ("ALIVE", r"get_state\(\) gives 'point' as it is now"),
        ("OTHER_GOAL", "goal phrase"),
        ("DEAF", "a reply that cannot be read does nothing"),
        ("AGELESS", "breaks the env contract"),
        ("HASTY", "with env.continue_after_success an episode goes on after its success"),
        ("SILENT", r"the info of step\(\) has no steps"),
        ("IDLE", r"the info of reset\(\) has no progress"),
        ("BLIND", "an env has at least one camera"),
        ("UNEVEN", r"A entries each, got shapes \(\(7,\), \(7,\), \(8,\)\)"),
        ("PLAIN", r"step\(\) observes rlvlm.core.episodes.Observations, got <class 'numpy.ndarray'>"),
        ("BARE", rf"the env Bare \({re.escape(__file__)}, line \d+\) lacks draw"),
        ("NAMELESS", "Nameless .* has no snapshot_size"),
    ],
)
def test_a_broken_promise_is_named(task, promise, tmp_path):
    with pytest.raises(UsageError, match=promise):
        check_task(f"{__name__}:{task}", tmp_path / "sheet.png", num_episodes=4, seed=0)
    assert not (tmp_path / "sheet.png").exists()


class Unsteady(gym.Env):
    """Draws chances that no seed decides."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space = action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, render_mode=None):
        self.place = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        return self.step(None)[0], {}

    def step(self, action):
        self.place = np.random.uniform(-1, 1, 1).astype(np.float32)
        return self.place, 0.0, False, False, {}

    def render(self):
        return np.full((8, 8, 3), 100 + 100 * self.place[0], np.uint8)


class Lamp(gym.Env):
    """A switch, 0 or 1, and what it switches."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Box(0, 1, (1,), np.int64)
    light = 0.0

    def __init__(self, render_mode=None):
        pass

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.light = 0.0
        return np.full(1, self.light, np.float32), {}

    def step(self, action):
        self.light = float(action[0])
        return np.full(1, self.light, np.float32), self.light, False, False, {}

    def render(self):
        return np.full((8, 8, 3), 50 + 200 * self.light, np.uint8)


def test_a_switch_is_an_action(tmp_path, capsys):
    gym.register("LampTest-v0", entry_point=Lamp, max_episode_steps=20)
    try:
        assert check_task("gym:LampTest-v0", tmp_path / "sheet.png", num_episodes=1, seed=0) == 0
    finally:
        del gym.registry["LampTest-v0"]
    assert "its actions are integers: each has an equal part of [-1, 1]" in capsys.readouterr().out


def test_of_a_wrapped_env_its_own_file_is_to_be_mended_not_ours(tmp_path):
    gym.register("UnsteadyTest-v0", entry_point=Unsteady, max_episode_steps=20)
    try:
        with pytest.raises(UsageError, match="chances come from self.np_random alone") as caught:
            check_task("gym:UnsteadyTest-v0", tmp_path / "sheet.png", num_episodes=2, seed=0)
    finally:
        del gym.registry["UnsteadyTest-v0"]
    assert re.fullmatch(rf"mend Unsteady: {re.escape(__file__)}, line \d+", caught.value.fix)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("number_line", "expert       success in 2 of 2, return above 0 in 2"),
        ("push_block", "script       success in 2 of 2"),
    ],
)
def test_turns_and_chunks_are_checked_by_the_same_report(task, words, tmp_path, capsys):
    out = tmp_path / "sheet.png"
    assert main(["check-task", task, "--episodes", "2", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "passes the env contract" in text and words in text
    assert Image.open(out).width > 400


def test_an_error_of_the_users_code_is_reported_with_its_place(tmp_path, capsys):
    assert main(["check-task", f"{__name__}:CLUMSY", "--out", str(tmp_path / "sheet.png")]) == 2
    text = box_words(capsys.readouterr().err)
    assert "ZeroDivisionError: division by zero" in text and "code of your own, in step() at line" in text
    assert "please report" not in text


def test_words(capsys):
    assert main(["check-task", "--list"]) == 0
    text = capsys.readouterr().out
    assert "drawer_open" in text and "open the drawer" in text and "50 tasks, e.g. metaworld/assembly-v3: " in text
    assert len(text.splitlines()) < 50 and "metaworld/door-open-v3" not in text
    assert main(["check-task", "metaworld", "--list"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 50 and "metaworld/door-open-v3" in text and "open the door" in text
    assert main(["check-task", "libero_10", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 11, "the suite is a task too"
    wrong = (
        ["check-task"],
        ["check-task", "socer"],
        ["check-task", TINY, "--episodes", "0"],
        ["check-task", TINY, "--out", "sheet"],
        ["check-task", "metawrld", "--list"],
    )
    for words in wrong:
        assert main(words) == 2
    assert "soccer" in capsys.readouterr().err


def test_a_python_without_asserts_is_refused_and_passes_nothing(tmp_path):
    words = ["rlvlm.cli", "check-task", TINY, "--out", str(tmp_path / "sheet.png")]
    ended = subprocess.run([sys.executable, "-O", "-m", *words], capture_output=True, text=True)
    assert ended.returncode == 2 and "start it without -O" in ended.stdout + ended.stderr
