"""Scenes of rlvlm's own tasks: episodes from random play to solved, drawn, with the simulator's progress as truth.

The pocket judge learns from pairs of them and is measured on pairs of them. Tasks of one's own can be added:
`collect_scenes` also takes `module:function`.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.env import StepEnv
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.envs.registry import make_env, task_env

TIE_GAP = 0.02
"""Images whose progress differs by less than this are taught as no difference, however well they can be seen."""
IMAGE_PX = 300
"""As the preference loop draws for a judge."""
_LONGEST_MOVE = 20  # steps that a random action is held, at most
_BINS = 50

Split = Literal["train", "held_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenes:
    """Distinct images of one set-up of one task, and which of them the frames of its episodes show."""

    task: str
    """E.g. `drawer_open`."""
    name: str
    """Set-up, e.g. `robot hidden, fixed start`."""
    goal: str
    """Fills the slot of the prompt."""
    phrase: str
    """What an image shows, with one slot: `the drawer is {percent}% open`."""
    images: Frames
    """[N, H, W, 3], no two alike."""
    progress: FloatArray
    """[N] in [0, 1]."""
    frames: NDArray[np.int64]
    """[M] the image that each frame of the episodes shows: what a uniform draw over frames would meet."""
    share: float = 1.0
    """How often the set-up is drawn in training, relative to the others."""

    def __post_init__(self) -> None:
        if len(self.images) != len(self.progress):
            raise ValueError(f"need one progress per image, got {len(self.progress)} for {len(self.images)}")
        if len(self.frames) == 0 or not 0 <= self.frames.min() <= self.frames.max() < len(self.images):
            raise ValueError(f"frames must name images 0 to {len(self.images) - 1}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One way to start and to show a task."""

    config: StepEnvConfig
    episodes: int
    """Played for training; half as many are held out."""
    max_images: int
    """Drawn for training, evenly spread over progress; half as many are held out."""
    share: float
    """How often the set-up is drawn in training, relative to all others."""

    @property
    def name(self) -> str:
        """E.g. `start fixed, robot hidden`."""
        return self.config.start_words.rstrip(", ")


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneTask:
    """How one task is played."""

    name: str
    """In the registry of the envs."""
    phrase: str
    """What an image shows, with one slot: `the drawer is {percent}% open`."""
    skill: Callable[[FloatArray], NDArray[np.floating]] | None = None
    """Observation [D] in, the action [A] that leads to the goal out; it may exceed [-1, 1]. None: the env's script."""
    setups: tuple[Setup, ...]
    paces: tuple[float, float] = (1.0, 1.0)
    """Lowest and highest factor on the skill's actions, drawn per episode."""
    max_noise: float = 0.8
    """Standard deviation of the noise on the skill's actions: drawn per episode, from 0 to this."""
    p_aimless: float = 0.15
    """Share of episodes that move at random from the start."""
    mirrors: tuple[tuple[int, ...], ...] = ()
    """Axes of images [N, H, W, 3] that may be flipped together, the progress staying what it is: training shows these
    images too."""


def collect_scenes(names: str, split: Split, seed: int) -> Iterator[Scenes]:
    """Yields the scenes of one task or of all, one set-up at a time: all at once would be some gigabytes.

    Args:
        names: a task of `TASKS`, `all` of them, or `module:function` that takes split and seed and gives scenes.
        split: the two share no episode.
        seed: of episodes and play.

    Raises:
        ValueError: there are no scenes of that name.
    """
    if names == "all" or names in TASKS:
        for task in TASKS.values() if names == "all" else (TASKS[names],):
            yield from collect(task, split, seed)
        return
    module, _, function = names.partition(":")
    try:
        provider: Callable[[Split, int], Iterable[Scenes]] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no scenes {names!r} ({error}); name {', '.join(TASKS)}, all, or module:function") from error
    yield from provider(split, seed)


def collect(task: SceneTask, split: Split, seed: int) -> Iterator[Scenes]:
    """Yields the scenes of each set-up, the recipe's own first: of frames met at random, and of all progress."""
    shrink = 1 if split == "train" else 2
    for number, setup in enumerate(task.setups):
        first_seed = 100_000 * (2 * seed + (split == "held_out")) + 10_000 * number
        env = make_env(task.name, setup.config, first_seed)
        rng = np.random.default_rng(first_seed)
        episodes = range(setup.episodes // shrink)
        played = [moment for episode in episodes for moment in _play(env, task, first_seed + episode, rng)]
        snapshots = np.stack([snapshot for snapshot, _ in played])
        progress = np.array([value for _, value in played], np.float32)
        # frames that look alike are one image; `looks` says which image each frame shows
        _, first, looks = np.unique(env.image_key(snapshots), axis=0, return_index=True, return_inverse=True)
        count = setup.max_images // shrink
        # half of the images as a run meets them, half spread over progress: most frames show very little of it
        met = rng.choice(looks.ravel(), size=min(len(looks), count // 2), replace=False)
        kept = np.union1d(met, _spread(progress[first], count - len(np.unique(met)), rng))
        images, progress = env.draw(snapshots[first[kept]], IMAGE_PX), progress[first[kept]]
        env.close()
        if split == "train":  # what is held out stays as a run would draw it
            images = np.concatenate([images, *(np.flip(images, axes) for axes in task.mirrors)])  # behind the others
            progress = np.tile(progress, 1 + len(task.mirrors))
        yield Scenes(
            task=task.name,
            name=setup.name,
            goal=env.goal,
            phrase=task.phrase,
            images=images,
            progress=progress,
            frames=np.searchsorted(kept, met),
            share=setup.share,
        )


def _play(env: StepEnv, task: SceneTask, seed: int, rng: np.random.Generator) -> Iterator[tuple[FloatArray, float]]:
    """Yields snapshot and progress of every step of one episode.

    The task's skill, slowed down and with noise, goes on to a random extent, then holds still or moves at random; some
    episodes move at random from the start.
    """
    obs, info = env.reset(seed=seed)
    shape = env.action_space.shape or ()
    longest = int(rng.integers(1, _LONGEST_MOVE + 1))
    random_action, steps_left = np.zeros(shape, np.float32), 0
    noise, extent, pace = rng.uniform(0, task.max_noise), rng.uniform(0, 1.1), rng.uniform(*task.paces)
    is_aimless, holds = rng.random() < task.p_aimless, rng.random() < 0.5
    has_arrived = is_over = False
    while not is_over:
        # once there it stays "there", even where the random actions that follow lead away again
        has_arrived = has_arrived or info["progress"] >= extent
        if is_aimless or (has_arrived and not holds):
            if steps_left == 0:  # each random action is held for a while, or the robot would only tremble
                random_action = rng.uniform(-1, 1, shape).astype(np.float32)
                steps_left = int(rng.integers(1, longest + 1))
            steps_left -= 1
            action = random_action
        elif has_arrived:
            action = np.zeros(shape)
        else:
            skilled = np.asarray(env.scripted_action(obs), np.float64) if task.skill is None else task.skill(obs)
            action = pace * skilled + noise * rng.standard_normal(shape)
        obs, _, terminated, truncated, info = env.step(np.clip(action, -1, 1).astype(np.float32))
        is_over = terminated or truncated
        yield info["snapshot"], info["progress"]


def _spread(progress: FloatArray, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """At most `count` indices whose progress is as even as the supply allows."""
    if len(progress) <= count:
        return np.arange(len(progress))
    bins = np.clip((progress * _BINS).astype(int), 0, _BINS - 1)
    # p = 1 / how many share its bin: every bin of progress is as likely
    crowd = np.bincount(bins, minlength=_BINS)[bins]
    return np.sort(rng.choice(len(progress), size=count, replace=False, p=(1 / crowd) / (1 / crowd).sum()))


def label_of(left: float, right: float, tie_gap: float = TIE_GAP) -> int:
    """The true label of two progresses: 0 left is nearer, 1 right is nearer, -1 no difference."""
    return -1 if abs(left - right) < tie_gap else int(right > left)


def draw_uniform_pairs(scenes: Scenes, num_pairs: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """[num_pairs, 2] images as the preference loop meets them: uniform over frames, never the same twice."""
    pairs = np.empty((0, 2), np.int64)
    while len(pairs) < num_pairs:  # pairs of one image are thrown away, so more are drawn than are needed
        drawn = scenes.frames[rng.integers(len(scenes.frames), size=(2 * num_pairs, 2))]
        pairs = np.concatenate([pairs, drawn[drawn[:, 0] != drawn[:, 1]]])
    return pairs[:num_pairs]


def _two_starts(
    task: str, fixed: int, random: int, images: tuple[int, int] = (1_200, 500), share: float = 1.0
) -> tuple[Setup, ...]:
    """The recipe's own set-up, and its random start.

    Args:
        task: whose recipe.
        fixed: episodes from the fixed start.
        random: episodes from random starts.
        images: drawn of each.
        share: how often the task is drawn in training, relative to all others: the hardest ones more often.
    """
    config = task_env(task)
    return (
        Setup(config=config, episodes=fixed, max_images=images[0], share=0.7 * share),
        Setup(config=replace(config, start="random"), episodes=random, max_images=images[1], share=0.3 * share),
    )


_DRAWER_SETUPS = (
    Setup(config=MetaWorldConfig(), episodes=60, max_images=1_600, share=0.9),
    Setup(config=MetaWorldConfig(start="random"), episodes=60, max_images=800, share=0.3),
    Setup(config=MetaWorldConfig(robot="visible"), episodes=24, max_images=450, share=0.15),
    Setup(config=MetaWorldConfig(start="random", robot="visible"), episodes=48, max_images=450, share=0.15),
)

TASKS = {
    task.name: task
    for task in (
        SceneTask(
            name="drawer_open",
            phrase="the drawer is {percent}% open",
            setups=_DRAWER_SETUPS,
        ),
        SceneTask(
            name="soccer",
            phrase="the ball has gone {percent}% of the way to the goal",
            setups=_two_starts("soccer", 50, 36, share=1.3),
            p_aimless=0.3,
        ),
        SceneTask(
            name="sweep_into",
            phrase="the cube has gone {percent}% of the way to the hole",
            setups=_two_starts("sweep_into", 50, 36),
            p_aimless=0.3,
        ),
        SceneTask(
            name="cartpole",
            phrase="the pole is {percent}% upright",
            skill=lambda obs: obs @ np.array([[0.0], [0.2], [8.0], [1.5]]),  # cart, its speed, pole, its speed
            setups=_two_starts("cartpole", 60, 30, (800, 300)),
            max_noise=2.0,
            p_aimless=0.5,
        ),
        SceneTask(
            name="straighten_rope",
            phrase="the rope is {percent}% straight",
            setups=_two_starts("straighten_rope", 270, 60, (3_000, 600), share=2.0),
            paces=(0.1, 1.0),
            p_aimless=0.3,
            mirrors=((1,), (2,), (1, 2)),
        ),
        SceneTask(
            name="pass_water",
            phrase="the water is {percent}% of the way to the circle",
            skill=lambda _: np.ones(1, np.float32),
            setups=_two_starts("pass_water", 60, 24, share=1.3),
            paces=(0.1, 1.0),
            p_aimless=0.3,
        ),
        SceneTask(
            name="fold_cloth",
            phrase="the cloth is {percent}% folded",
            skill=lambda _: np.array([0.833, -0.833]),  # the corner opposite the picker
            setups=_two_starts("fold_cloth", 1_600, 600),
            p_aimless=0.5,
        ),
    )
}
"""Every task that the pocket judge knows, the default run's first."""
