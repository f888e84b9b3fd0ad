"""From configs to a feedback loop with a fresh reward model. Called by the algorithm."""

import importlib
from functools import partial

import numpy as np

from rlvlm.envs.images import FrameStore
from rlvlm.envs.step_env import StepEnv
from rlvlm.preferences.answers.teachers import Teacher
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig
from rlvlm.preferences.loop import FeedbackLoop
from rlvlm.preferences.model.networks import ImageInput, ImageNetwork, RewardInput, StateInput
from rlvlm.preferences.model.objectives import PREFERENCE, SCORE
from rlvlm.preferences.model.reward_model import RewardModel
from rlvlm.preferences.questions.comparing import Comparing
from rlvlm.preferences.questions.scoring import Scoring
from rlvlm.rewards.config import RewardConfig
from rlvlm.vlms.devices import pick_device

_PICTURE_BYTES = 600_000_000
"""Memory for images at the reward model's size, touched only as images come: a visible robot makes many."""


_LEARNING = {"preference": (Comparing, PREFERENCE), "score": (Scoring, SCORE)}
"""By source: what is asked about, and what the answers say about rewards."""


def build_loop(
    env: StepEnv,
    teacher: Teacher,
    *,
    reward: RewardConfig,
    feedback: FeedbackConfig,
    reward_model: RewardModelConfig,
    seed: int,
    total_steps: int | None = None,
) -> FeedbackLoop:
    """A loop with a fresh reward model.

    Args:
        env: draws images; may be a training env, which is not disturbed.
        teacher: from `teachers.build_teacher`.
        reward: its source is one that learns, and says from what; its model what the ensemble looks at.
        feedback: when and about what the teacher is asked.
        reward_model: the ensemble.
        seed: of draws, weights and shuffling.
        total_steps: env steps of the run; None where it has no end.
    """
    subject_class, objective = _LEARNING[reward.source]
    picture_bytes = 3 * reward_model.picture_px**2
    frames = FrameStore(env, reward_model.picture_px, max(_PICTURE_BYTES // picture_bytes, 1))
    seeds = np.random.SeedSequence(seed).generate_state(2)
    inputs = reward_input(env, frames, reward, reward_model)
    device = pick_device(reward_model.device, "reward-model")
    model = RewardModel(inputs, reward_model, int(seeds[0]), objective, device)
    subject = subject_class(frames, model, feedback)
    return FeedbackLoop(
        teacher=teacher, subject=subject, model=model, config=feedback, seed=int(seeds[1]), total_steps=total_steps
    )


def reward_input(
    env: StepEnv, frames: FrameStore, reward: RewardConfig, reward_model: RewardModelConfig
) -> RewardInput:
    """What `reward.model` looks at."""
    if reward.model == "image":
        return ImageInput(frames, partial(ImageNetwork, reward_model.picture_px))
    if reward.model == "resnet18":
        resnet = importlib.import_module("rlvlm.preferences.model.resnet")  # loads transformers, for those who want it
        return ImageInput(frames, resnet.ResNetNetwork, resnet.affordable_pictures(reward_model.picture_px), 16)
    return StateInput(env.observation_space.shape[0], env.action_space.shape[0])
