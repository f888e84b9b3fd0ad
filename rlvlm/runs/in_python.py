"""A run from Python: trained in this process, and its learned reward as a function of images. See docs/python.md."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import numpy as np
import torch
from PIL import Image

from rlvlm.algorithms.checkpoint import load_tree
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.images import FrameStore
from rlvlm.envs.registry import make_env
from rlvlm.preferences.networks import reward_input
from rlvlm.preferences.reward_model import RewardModel
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.runs.checkpoints import newest_sound
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder import RunFolder, create_folder
from rlvlm.runs.preflight import check_before_run
from rlvlm.runs.train import start_run


def train(config: RunConfig) -> RunFolder:
    """Runs `config` to its end, as `python -m rlvlm.run` does, and returns its folder.

    Works in scripts and in notebooks. A notebook's cell lives in a running asyncio loop, where Ray Serve's handles do
    not answer: there the run gets a thread of its own, which no signal can stop.

    Raises:
        RunError: it cannot start or go on.
    """
    check_before_run(config)
    folder = create_folder(config, ["rlvlm.train"], datetime.now())
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # there is none
        start_run(folder, config)
        return folder
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(start_run, folder, config).result()
    return folder


def learned_reward(run: RunFolder) -> Callable[[Frames], FloatArray]:
    """The reward that a run has learned, by its newest sound checkpoint: from images [N, H, W, 3] to rewards [N].

    Raises:
        UsageError: the run has learned no reward of images, or has no checkpoint yet.
        CorruptCheckpoint: no checkpoint is sound.
    """
    config = run.config()
    reward, model_config = config.reward, config.reward_model
    if not isinstance(reward, StepRewardConfig) or not model_config or not reward.is_learned or reward.model == "state":
        raise UsageError(f"{run.path} has learned no reward of images", "use a run with --reward.model image")
    checkpoint = newest_sound(run.checkpoints.newest_first())
    if checkpoint is None:
        raise UsageError(f"{run.path} has no checkpoint yet", f"let it run on: {run.resume_command}")
    size_px = model_config.picture_px
    world = make_env(config.task, config.env, config.seed)
    inputs = reward_input(world, FrameStore(world, size_px, 1), reward, model_config)
    model = RewardModel(inputs, model_config, seed=0)
    model.set_state(load_tree(checkpoint.algorithm)["schedule"]["loop"]["model"])

    def rewards(images: Frames) -> FloatArray:
        sized = [np.asarray(Image.fromarray(image).resize((size_px, size_px))) for image in images]
        with torch.no_grad():
            rows = torch.from_numpy(np.stack(sized))
            return torch.stack([member(rows) for member in model.ensemble.members]).mean(dim=0).numpy()

    return rewards
