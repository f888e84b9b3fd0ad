"""One complete, tuned configuration per task of the third pipeline. docs/vla.md has their runs."""

from collections.abc import Callable

from rlvlm.envs.registry import task_env
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


RECIPES: dict[str, Callable[[], VLARunConfig]] = {"push_block": push_block}
