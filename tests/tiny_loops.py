"""Small feedback loops on TinyEnv, and state trees sent through JSON and arrays."""

import json
from typing import Any

import numpy as np
import torch
from tiny_episodes import BlockJudge, tiny_episodes

from rlvlm.envs.images import FrameStore
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig
from rlvlm.preferences.loop import FeedbackLoop, build_loop
from rlvlm.preferences.teachers import JudgeTeacher, Teacher
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.testing import TinyEnv

SMALL = RewardModelConfig(image_px=16, max_epochs=3, min_updates=0, hold_out_every=0)
FEEDBACK = FeedbackConfig(first_step=10, every_steps=5, queries=8)


def build(
    teacher: Teacher,
    feedback: FeedbackConfig = FEEDBACK,
    sees: str = "image",
    seed: int = 0,
    source: str = "preference",
) -> FeedbackLoop:
    reward = StepRewardConfig(model=sees, source=source)
    return build_loop(TinyEnv(), teacher, reward=reward, feedback=feedback, reward_model=SMALL, seed=seed)


def judge_teacher(failing: int = 0) -> JudgeTeacher:
    return JudgeTeacher(BlockJudge(failing=failing), FrameStore(TinyEnv(), 16), TinyEnv.goal)


def filled(teacher: Teacher, num_episodes: int = 6, **options: Any) -> FeedbackLoop:
    loop = build(teacher, **options)
    for episode in tiny_episodes(num_episodes):
        loop.add(episode)
    return loop


def through_files(tree: Any, arrays: dict[str, np.ndarray], path: str = "") -> Any:
    """`tree` with its arrays moved into `arrays`, so that JSON can hold the rest."""
    if isinstance(tree, np.ndarray | torch.Tensor):
        arrays[path] = np.array(tree)
        assert arrays[path].dtype != object
        return {"array": path}
    if isinstance(tree, dict):
        assert all(isinstance(name, str) for name in tree)
        return {name: through_files(value, arrays, f"{path}/{name}") for name, value in tree.items()}
    if isinstance(tree, list):
        return [through_files(value, arrays, f"{path}/{at}") for at, value in enumerate(tree)]
    assert isinstance(tree, str | int | float | bool | None), f"{path} is {type(tree)}"
    return tree


def from_files(tree: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {"array"}:
            return arrays[tree["array"]]
        return {name: from_files(value, arrays) for name, value in tree.items()}
    return [from_files(value, arrays) for value in tree] if isinstance(tree, list) else tree


def same_trees(one: Any, other: Any) -> bool:
    left: dict[str, np.ndarray] = {}
    right: dict[str, np.ndarray] = {}
    if json.dumps(through_files(one, left)) != json.dumps(through_files(other, right)):
        return False
    return all(np.array_equal(left[name], right[name]) for name in left)
