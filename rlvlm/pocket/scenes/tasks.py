"""What is played for the pocket judge in each task: the way to the goal, the set-ups, the words for what is seen."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from metaworld.policies import SawyerDrawerOpenV3Policy, SawyerSoccerV3Policy, SawyerSweepIntoV3Policy
from metaworld.policies.policy import Policy

from rlvlm.core.steps import FloatArray
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import task_env

Skill = Callable[[FloatArray, FloatArray], FloatArray]
"""Observation [D] and snapshot [S] in, the action [A] that leads to the goal out; it may exceed [-1, 1]."""

_SWEEP_TARGET = np.array([0.0, 0.84, 0.02])
"""Middle of the hole, metres: the stock env never moves it."""
_FOLD_TARGET = np.array([0.833, -0.833])
"""The cloth's corner opposite the picker, as an action."""
_BALANCE = np.array([0.0, 0.2, 8.0, 1.5])
"""Force per cart position, its speed, pole angle and its speed, that keeps the pole up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One way to start and to show a task."""

    config: EnvConfig
    episodes: int
    """Played for training; half as many are held out."""
    max_pictures: int
    """Drawn for training, evenly spread over progress; half as many are held out."""
    share: float
    """How often the set-up is drawn in training, relative to all others."""

    @property
    def name(self) -> str:
        """E.g. `robot hidden, fixed start`."""
        return f"robot {self.config.robot}, {self.config.start} start"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScenes:
    """How one task is played."""

    name: str
    """In the registry of the envs."""
    phrase: str
    """What an image shows, with one slot: `the drawer is {percent}% open`."""
    skill: Skill
    setups: tuple[Setup, ...]
    paces: tuple[float, float] = (1.0, 1.0)
    """Lowest and highest factor on the skill's actions, drawn per episode."""
    max_noise: float = 0.8
    """Standard deviation of the noise on the skill's actions: drawn per episode, from 0 to this."""
    p_aimless: float = 0.15
    """Share of episodes that move at random from the start."""
    mirrors: tuple[tuple[int, ...], ...] = ()
    """Axes of images [N, H, W, 3] that may be turned round together, the progress staying what it is: training
    shows these images too."""


def _scripted(policy: Policy, obs: FloatArray, _: FloatArray) -> FloatArray:
    return policy.get_action(obs.astype(np.float64))


def _scripted_to(policy: Policy, target: FloatArray, obs: FloatArray, _: FloatArray) -> FloatArray:
    """For policies that read the target's place where our observations have zeros."""
    return policy.get_action(np.append(obs[:-3], target).astype(np.float64))


def _scripted_to_net(policy: Policy, obs: FloatArray, snapshot: FloatArray) -> FloatArray:
    """The net of `soccer` is what a reset moves: its place is the end of the snapshot."""
    return policy.get_action(np.append(obs[:-3], snapshot[-3:]).astype(np.float64))


def _balance(obs: FloatArray, _: FloatArray) -> FloatArray:
    return np.array([obs @ _BALANCE])


def _pull_apart(obs: FloatArray, _: FloatArray) -> FloatArray:
    """Both ends of the rope away from each other, flat on the table."""
    left, right = obs[-6:-3], obs[-3:]
    away = (right - left) / max(float(np.linalg.norm(right - left)), 1e-6)
    return np.concatenate([-away, [0.0], away, [0.0]])


def _forward(_: FloatArray, __: FloatArray) -> FloatArray:
    return np.ones(1, np.float32)


def _fold_over(_: FloatArray, __: FloatArray) -> FloatArray:
    return _FOLD_TARGET


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
        Setup(config=config, episodes=fixed, max_pictures=images[0], share=0.7 * share),
        Setup(config=replace(config, start="random"), episodes=random, max_pictures=images[1], share=0.3 * share),
    )


_DRAWER_SETUPS = (
    Setup(config=EnvConfig(), episodes=60, max_pictures=1_600, share=0.9),
    Setup(config=EnvConfig(start="random"), episodes=60, max_pictures=800, share=0.3),
    Setup(config=EnvConfig(robot="visible"), episodes=24, max_pictures=450, share=0.15),
    Setup(config=EnvConfig(start="random", robot="visible"), episodes=48, max_pictures=450, share=0.15),
)

TASKS = {
    task.name: task
    for task in (
        TaskScenes(
            name="drawer_open",
            phrase="the drawer is {percent}% open",
            skill=partial(_scripted, SawyerDrawerOpenV3Policy()),
            setups=_DRAWER_SETUPS,
        ),
        TaskScenes(
            name="soccer",
            phrase="the ball has gone {percent}% of the way to the goal",
            skill=partial(_scripted_to_net, SawyerSoccerV3Policy()),
            setups=_two_starts("soccer", 50, 36, share=1.3),
            p_aimless=0.3,
        ),
        TaskScenes(
            name="sweep_into",
            phrase="the cube has gone {percent}% of the way to the hole",
            skill=partial(_scripted_to, SawyerSweepIntoV3Policy(), _SWEEP_TARGET),
            setups=_two_starts("sweep_into", 50, 36),
            p_aimless=0.3,
        ),
        TaskScenes(
            name="cartpole",
            phrase="the pole is {percent}% upright",
            skill=_balance,
            setups=_two_starts("cartpole", 60, 30, (800, 300)),
            max_noise=2.0,
            p_aimless=0.5,
        ),
        TaskScenes(
            name="straighten_rope",
            phrase="the rope is {percent}% straight",
            skill=_pull_apart,
            setups=_two_starts("straighten_rope", 270, 60, (3_000, 600), share=2.0),
            paces=(0.1, 1.0),
            p_aimless=0.3,
            mirrors=((1,), (2,), (1, 2)),
        ),
        TaskScenes(
            name="pass_water",
            phrase="the water is {percent}% of the way to the circle",
            skill=_forward,
            setups=_two_starts("pass_water", 60, 24, share=1.3),
            paces=(0.1, 1.0),
            p_aimless=0.3,
        ),
        TaskScenes(
            name="fold_cloth",
            phrase="the cloth is {percent}% folded",
            skill=_fold_over,
            setups=_two_starts("fold_cloth", 1_600, 600),
            p_aimless=0.5,
        ),
    )
}
"""Every task that the pocket judge knows, the default run's first."""
