"""One complete, tuned configuration per task of the third pipeline. docs/vla.md has their runs."""

from collections.abc import Callable
from dataclasses import replace

from rlvlm.envs.libero.suites import SUITES
from rlvlm.envs.registry import task_env
from rlvlm.policies.vla.config import PocketVLAConfig
from rlvlm.runs.config import EvalConfig, TrackConfig
from rlvlm.runs.vla.config import VLARunConfig


def push_block() -> VLARunConfig:
    """The tiny world in chunks, from a start that succeeds in a third to a half of all episodes."""
    return VLARunConfig(
        task="push_block",
        steps=1_500_000,
        env=task_env("push_block"),
        eval=EvalConfig(every_steps=100_000, episodes=200),
        track=TrackConfig(log_every_steps=50_000, checkpoint_every_steps=200_000),
    )


def libero(task: str) -> VLARunConfig:
    """One task of LIBERO, its things moved by up to 2 cm so that the policy must look. No figures yet."""
    return VLARunConfig(
        task=task,
        steps=400_000,
        env=replace(task_env(task), moved=0.02, physics="fast"),
        policy=PocketVLAConfig(image_px=64),
        eval=EvalConfig(every_steps=50_000, episodes=50),
        track=TrackConfig(log_every_steps=10_000, checkpoint_every_steps=50_000),
    )


RECIPES: dict[str, Callable[[], VLARunConfig]] = {"push_block": push_block}
FAMILY_RECIPES: dict[str, Callable[[str], VLARunConfig]] = dict.fromkeys(SUITES, libero)
