"""Real episodes of TinyEnv, in which a point pushes a block; only the block shows in the image."""

import numpy as np

from rlvlm.core.judging import Label, Query, Score, Stamp, Status, Verdict
from rlvlm.core.steps import Pair, Segment, Trajectory, Transitions
from rlvlm.envs.config import StepEnvConfig
from rlvlm.preferences.dataset import Steps
from rlvlm.testing import FakeJudge, TinyEnv

STAMP = Stamp(judge="test", revision="", prompt="", decoding="")
_FIELDS = ("obs", "actions", "next_obs", "env_rewards", "snapshots", "progress", "success")


def tiny_episode(seed: int, env: TinyEnv | None = None, num_steps: int = 20) -> Trajectory:
    """One episode of noisy pushing to the right."""
    env = env or TinyEnv(StepEnvConfig(start="random"), seed)
    rng = np.random.default_rng(seed)
    rows = []
    obs, _ = env.reset()
    for _ in range(num_steps):
        action = np.clip(rng.normal([0.4, 0.0], 0.6), -1, 1).astype(np.float32)
        next_obs, reward, _, _, info = env.step(action)
        rows.append((obs, action, next_obs, reward, info["snapshot"], info["progress"], info["success"]))
        obs = next_obs
    columns = dict(zip(_FIELDS, zip(*rows, strict=True), strict=True))
    arrays = {name: np.array(column, bool if name == "success" else np.float32) for name, column in columns.items()}
    return Trajectory(**arrays, terminated=False)


def tiny_episodes(num: int) -> list[Trajectory]:
    return [tiny_episode(seed) for seed in range(num)]


def transitions_of(*episodes: Trajectory) -> Transitions:
    """All steps of some episodes, one after the other; none ends for good or is a success."""
    names = ("obs", "actions", "next_obs", "env_rewards", "snapshots")
    columns = {name: np.concatenate([getattr(episode, name) for episode in episodes]) for name in names}
    flat = np.zeros(len(columns["obs"]), np.float32)
    return Transitions(**columns, terminated=flat, success=flat)


def steps_of(*episodes: Trajectory) -> Steps:
    """What a reward model reads of all their steps."""
    names = ("actions", "next_obs", "snapshots")
    return Steps(**{name: np.concatenate([getattr(episode, name) for episode in episodes]) for name in names})


def some_steps(steps: Steps, which: slice) -> Steps:
    return Steps(actions=steps.actions[which], next_obs=steps.next_obs[which], snapshots=steps.snapshots[which])


def numbered_trajectory(num_steps: int, first: float = 0.0) -> Trajectory:
    """A trajectory whose every number at step t is `first` + t."""
    column = first + np.arange(num_steps, dtype=np.float32)
    wide = np.repeat(column[:, None], 2, axis=1)
    return Trajectory(
        obs=wide,
        actions=wide,
        next_obs=wide,
        env_rewards=column,
        snapshots=wide,
        progress=column,
        success=np.zeros(num_steps, bool),
        terminated=False,
    )


def one_step(number: float, block: float = 0.4) -> Segment:
    """A segment of one step of TinyEnv with the block at `block`; its true reward and progress are `number`."""
    obs = np.array([[0.2, 0.5, block, 0.8 - block]], np.float32)
    value = np.array([number], np.float32)
    return Segment(
        obs=obs,
        actions=np.zeros((1, 2), np.float32),
        next_obs=obs,
        env_rewards=value,
        progress=value,
        snapshots=np.array([[0.2, 0.5, block]], np.float32),
    )


class BlockJudge(FakeJudge):
    """Looks for the red block: the further to the right, the better."""

    def _compare(self, query: Query) -> Verdict:
        return super()._compare(Query(goal=query.goal, left=red_ramp(query.left), right=red_ramp(query.right)))


def red_ramp(frames: np.ndarray) -> np.ndarray:
    """Images [N, H, W] that are black but for the block, which is brighter the further right it stands."""
    is_red = (frames[..., 0] == 200) & (frames[..., 1] == 0)
    return is_red * np.arange(frames.shape[2])


def pair_of(left: float, right: float) -> Pair:
    """A pair of single steps with these true rewards; the blocks stand accordingly."""
    return Pair(left=one_step(left, 0.4 + 0.4 * left), right=one_step(right, 0.4 + 0.4 * right))


def verdict(label: Label | None, status: Status | None = None, text: str = "") -> Verdict:
    return Verdict(status=status or Status.of(label), label=label, stamp=STAMP, text=text)


def score(value: float | None, status: Status | None = None) -> Score:
    """A score, or an answer that could not be read."""
    return Score(status=status or Status.of(value), value=value, stamp=STAMP)


def truth(pairs: list[Pair]) -> list[Verdict]:
    """What somebody who sees the true progress answers."""
    return [verdict(Label.of(pair.left.progress.mean(), pair.right.progress.mean())) for pair in pairs]
