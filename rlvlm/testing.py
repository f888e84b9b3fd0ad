"""Small stand-ins and contract checks; only tests import this file.

Sections: worlds (`TinyWorld`, `check_world`), judges (`FakeJudge`, `check_judge`).
"""

import json
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import check_env
from numpy.typing import NDArray

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import Task
from rlvlm.envs.world import World
from rlvlm.judges.judge import Judge
from rlvlm.types import Clip, FloatArray, Frames, Label, Query, Score, Stamp, Status, Verdict

# --- worlds -----------------------------------------------------------------------------------------------------------

_GRAIN = 1e-3
_HALF = 0.1
_START, _GOAL = 0.4, 0.8
_LANE = 0.5
_SPEED = 0.1
_TINY_STEPS = 20


class TinyWorld(World):
    """A point pushes a block to the right on the unit square: a whole World in numpy, for fast tests.

    Observations [4] are the point (x, y), the block's x and its distance to the goal; actions [2] move the point by up
    to 0.1 per axis. The block stands on the lane y = 0.5 and moves when the point reaches its left side there. It
    succeeds at x >= 0.8; going right at full speed from the fixed start takes five steps. The reward is the progress.
    Episodes last 20 steps at most. Pictures show the block (red), the goal line (green) and, with `robot="visible"`,
    the point (blue).

    Args:
        config: `start="random"` draws the point's start from the left third; `episode_steps` above 20 counts as 20.
        seed: of the random start.
    """

    metadata = {"render_modes": []}
    goal = "push the red block to the green line"
    snapshot_size = 3

    def __init__(self, config: EnvConfig | None = None, seed: int = 0) -> None:
        self._config = config or EnvConfig()
        self._episode_steps = min(self._config.episode_steps, _TINY_STEPS)
        self.render_mode = None
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._point = np.zeros(2)
        self._block = _START
        self._steps = 0
        super().reset(seed=seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """First observation and info of a new episode; `options` is not used."""
        super().reset(seed=seed, options=options)
        is_random = self._config.start == "random"
        self._point = self.np_random.uniform((0.0, 0.3), (0.3, 0.7)) if is_random else np.array([0.2, _LANE])
        self._block = _START
        self._steps = 0
        return self._observe(), self._info()

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Observation, reward (the progress), never terminated, truncated at the time limit, info."""
        left_side = self._block - _HALF + 1e-9  # touching is not yet pushing
        was_left = self._point[0] <= left_side
        self._point = np.clip(self._point + _SPEED * np.clip(action, -1, 1).astype(float), 0.0, 1.0)
        on_lane = abs(self._point[1] - _LANE) <= _HALF
        if was_left and on_lane and self._point[0] > left_side:
            self._block = float(min(self._point[0] + _HALF, 1.0 - _HALF))
        self._steps += 1
        info = self._info()
        return self._observe(), info["progress"], False, self._steps >= self._episode_steps, info

    def snapshot(self) -> FloatArray:
        """[3]: the point (x, y) and the block's x."""
        return np.array([*self._point, self._block], np.float32)

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Pictures [N, size_px, size_px, 3] of `snapshots` [N, 3]."""
        frames = np.full((len(snapshots), size_px, size_px, 3), 200, np.uint8)
        for frame, (x, y, block) in zip(frames, np.rint(snapshots / _GRAIN) * _GRAIN, strict=True):
            _paint(frame, (_GOAL + _HALF, 0.5), (0.02, 0.5), (0, 160, 0))
            _paint(frame, (block, _LANE), (_HALF, _HALF), (200, 0, 0))
            if self._config.robot == "visible":
                _paint(frame, (x, y), (0.04, 0.04), (0, 0, 200))
        return frames

    def picture_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """[N, 1] the block alone, or [N, 3] with the point where it is visible."""
        first = 0 if self._config.robot == "visible" else 2
        return np.rint(snapshots[:, first:] / _GRAIN).astype(np.int64)

    def get_state(self) -> dict[str, Any]:
        """Point, block, step count and generator."""
        generator = json.dumps(self.np_random.bit_generator.state)
        return {"point": self._point.copy(), "block": self._block, "steps": self._steps, "generator": generator}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self._point = np.array(state["point"])
        self._block, self._steps = float(state["block"]), int(state["steps"])
        self.np_random.bit_generator.state = json.loads(state["generator"])

    def _observe(self) -> FloatArray:
        return np.array([*self._point, self._block, _GOAL - self._block], np.float32)

    def _info(self) -> dict[str, Any]:
        progress = min(max((self._block - _START) / (_GOAL - _START), 0.0), 1.0)
        return {"snapshot": self.snapshot(), "progress": progress, "success": self._block >= _GOAL - 1e-9}


def _paint(
    frame: NDArray[np.uint8], centre: tuple[float, float], half: tuple[float, float], colour: tuple[int, int, int]
) -> None:
    """Fills a rectangle of the unit square (y upwards) in `frame` [H, W, 3]."""
    size_px = len(frame)
    left, right = (int((centre[0] + sign * half[0]) * size_px + 0.5) for sign in (-1, 1))
    top, bottom = (int((1 - centre[1] + sign * half[1]) * size_px + 0.5) for sign in (-1, 1))
    frame[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = colour


TINY = Task(name="tiny", goal=TinyWorld.goal, maker="rlvlm.testing:TinyWorld")
"""`make_world("rlvlm.testing:TINY", config, seed)` makes a TinyWorld without registering it, in any process."""


def check_world(world: World, twin: World, different: FloatArray) -> None:
    """Passes when `world` keeps every promise of the `World` contract.

    Args:
        world: any world; it is reset and stepped.
        twin: another instance of the same config and seed; episodes of at most 40 steps make the check meet their end.
        different: [N, S] snapshots, N >= 2, that must all look different from one another.

    Raises:
        AssertionError: says which promise is broken.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about bounds that some stock envs leave infinite
        check_env(world, skip_render_check=True)
    _check_infos(world)
    _check_seeds(world, twin)
    _check_state(world, twin)
    _check_pictures(world, twin, different)


Steps = list[tuple[FloatArray, float, bool, bool, dict[str, Any]]]


def _act(world: World, num_steps: int, seed: int) -> Steps:
    """What `world` answers to random actions; a finished episode is followed by the next."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(num_steps):
        action = rng.uniform(-1.0, 1.0, world.action_space.shape).astype(np.float32)
        steps.append(world.step(action))
        if steps[-1][2] or steps[-1][3]:
            obs, info = world.reset()
            steps.append((obs, 0.0, False, False, info))
    return steps


def _assert_same(left: Steps, right: Steps, promise: str) -> None:
    for one, other in zip(left, right, strict=True):
        assert np.array_equal(one[0], other[0]), f"{promise}: observations differ"
        assert one[1:4] == other[1:4], f"{promise}: rewards or ends differ"
        assert np.array_equal(one[4]["snapshot"], other[4]["snapshot"]), f"{promise}: snapshots differ"
        assert one[4]["progress"] == other[4]["progress"], f"{promise}: progress differs"


def _check_infos(world: World) -> None:
    start = world.reset(seed=3)
    steps = [(start[0], 0.0, False, False, start[1]), *_act(world, 5, seed=0)]
    for obs, _, _, _, info in steps:
        assert obs.dtype == np.float32 and world.observation_space.contains(obs), "observations are float32 in the box"
        snapshot = info["snapshot"]
        assert snapshot.shape == (world.snapshot_size,) and snapshot.dtype == np.float32, "snapshots are [S] float32"
        assert isinstance(info["progress"], float) and 0.0 <= info["progress"] <= 1.0, "progress is a float in [0, 1]"
        assert isinstance(info["success"], bool), "success is a bool"
    assert np.array_equal(world.snapshot(), steps[-1][4]["snapshot"]), "snapshot() is that of the latest info"
    assert world.goal, "a world has a goal phrase"


def _check_seeds(world: World, twin: World) -> None:
    first, again = world.reset(seed=11), twin.reset(seed=11)
    assert np.array_equal(first[0], again[0]), "equal seeds give equal starts"
    _assert_same(_act(world, 30, seed=1), _act(twin, 30, seed=1), "equal seeds and actions")


def _check_state(world: World, twin: World) -> None:
    world.reset(seed=5)
    _act(world, 7, seed=2)
    state = world.get_state()
    for name, value in state.items():
        assert isinstance(value, np.ndarray | np.generic | bool | int | float | str), f"state {name!r} is {type(value)}"
        assert np.asarray(value).dtype != object, f"state {name!r} holds Python objects"
    future = _act(world, 60, seed=3)
    twin.reset(seed=99)
    _act(twin, 3, seed=4)
    for other, promise in ((world, "set_state"), (twin, "set_state on another instance")):
        other.set_state(state)
        _assert_same(_act(other, 60, seed=3), future, promise)


def _check_pictures(world: World, twin: World, different: FloatArray) -> None:
    world.reset(seed=6)
    seen = np.stack([step[4]["snapshot"] for step in _act(world, 12, seed=5)])
    state = world.get_state()
    for size_px in (48, 64, 48):
        frames = world.draw(seen, size_px)
        assert frames.shape == (len(seen), size_px, size_px, 3), f"frames are [N, H, W, 3], got {frames.shape}"
        assert frames.dtype == np.uint8, f"frames are uint8, got {frames.dtype}"
        assert np.array_equal(frames, world.draw(seen, size_px)), "the same snapshot looks the same twice"
        assert np.array_equal(frames[::-1], twin.draw(seen[::-1], size_px)), "any instance draws it, in any order"
    future = _act(world, 30, seed=6)
    world.set_state(state)
    world.draw(different, 48)
    _assert_same(_act(world, 30, seed=6), future, "drawing disturbs nothing")
    both = np.concatenate([seen, different])
    keys, frames = world.picture_key(both), world.draw(both, 64)
    assert keys.dtype == np.int64 and keys.shape[0] == len(both), "keys are [N, P] int64"
    for i, j in zip(*np.triu_indices(len(both), 1), strict=True):
        if np.array_equal(keys[i], keys[j]):
            assert np.array_equal(frames[i], frames[j]), "equal keys look equal"
    looks = {frame.tobytes() for frame in world.draw(different, 64)}
    assert len(different) >= 2 and len(looks) == len(different), "different scenes look different"


# --- judges -----------------------------------------------------------------------------------------------------------


class FakeJudge:
    """A judge whose truth is brightness: the side whose last picture is brighter is nearer to the goal.

    Args:
        margin: differences of mean brightness up to this, in grey levels, are ties.
        failing: number of first questions that fail, as in an outage that ends.
    """

    def __init__(self, margin: float = 0.0, failing: int = 0) -> None:
        self._margin = margin
        self._failing = failing
        self.num_asked = 0
        """Questions seen so far."""

    @property
    def stamp(self) -> Stamp:
        """Always the same."""
        return Stamp(judge="fake", revision="1", prompt="brightness/1", decoding=f"margin={self._margin:g}")

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order."""
        return [self._compare(query) for query in queries]

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """The brightness of each clip's last picture, 1 for white."""
        return [Score(status=Status.OK, value=float(clip.frames[-1].mean() / 255), stamp=self.stamp) for clip in clips]

    def _compare(self, query: Query) -> Verdict:
        self.num_asked += 1
        if self.num_asked <= self._failing:
            return Verdict(status=Status.FAILED, label=None, stamp=self.stamp, text="outage")
        gain = float(query.right[-1].mean() - query.left[-1].mean())
        if abs(gain) <= self._margin:
            return Verdict(status=Status.NO_PREFERENCE, label=Label.TIE, stamp=self.stamp, text="-1")
        label = Label.RIGHT if gain > 0 else Label.LEFT
        return Verdict(status=Status.OK, label=label, stamp=self.stamp, text=str(int(gain > 0)))


def check_judge(judge: Judge, size_px: int = 32) -> None:
    """Passes when `judge` keeps every promise of the `Judge` protocol, whatever it believes.

    Args:
        judge: any judge; it is asked about twenty questions with random pictures.
        size_px: side of those pictures.

    Raises:
        AssertionError: says which promise is broken.
    """
    rng = np.random.default_rng(0)
    clips = [rng.integers(0, 256, (length, size_px, size_px, 3), np.uint8) for length in (1, 1, 1, 1, 1, 2, 3)]
    queries = [Query(goal="open the drawer", left=clips[i], right=clips[i - 1]) for i in range(len(clips))]
    assert isinstance(judge, Judge), "a judge has stamp, compare and score"
    assert judge.compare([]) == [] and judge.score([]) == [], "no questions, no answers"
    verdicts = judge.compare(queries)
    assert [v.stamp for v in verdicts] == [judge.stamp] * len(queries), "every verdict carries the judge's stamp"
    again = judge.compare(queries[::-1])[::-1]
    assert [v.label for v in again] == [v.label for v in verdicts], "answers follow the order of the questions"
    for verdict in verdicts:
        shares = verdict.probabilities
        assert shares is None or (abs(sum(shares) - 1) < 1e-4 and min(shares) >= 0), "probabilities are a distribution"
    bad = Query(goal="", left=clips[0], right=clips[1])
    mixed = judge.compare([queries[0], bad, queries[1]])
    assert [v.label for v in (mixed[0], mixed[2])] == [v.label for v in verdicts[:2]], "one bad item spoils no other"
    scores = judge.score([Clip(goal="open the drawer", frames=clip) for clip in clips])
    assert len(scores) == len(clips), "one score per clip"
    for score in scores:
        assert (score.status is Status.OK) == (score.value is not None), "a value goes with status ok"
        assert score.value is None or 0 <= score.value <= 1, "scores lie in [0, 1]"
