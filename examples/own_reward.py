"""Rewards and a teacher of your own: copy this file, keep what you need, and name it on the command line.

python -m rlvlm.run drawer_open --reward.source examples/own_reward.py:brightness
python -m rlvlm.run drawer_open --reward.source examples/own_reward.py:Effort
python -m rlvlm.run drawer_open --reward.teacher examples/own_reward.py:BrighterSide
"""

import numpy as np

from rlvlm.preferences.teachers import Teacher
from rlvlm.rewards.source import RewardSource


def brightness(images, goal):
    """A plain function: one number per image, of [N, H, W, 3] uint8, 0 to 255. An image is asked about once."""
    return images.mean(axis=(1, 2, 3)) / 255


class Effort(RewardSource):
    """A class sees whole transitions: here, the env's reward less what the actions cost."""

    def label(self, transitions):
        return transitions.env_rewards - 0.1 * np.square(transitions.actions).sum(axis=1)


class BrighterSide(Teacher):
    """Compares pairs of segments, of which a reward is learned: here, by the brightness of their last images."""

    @classmethod
    def build(cls, *, judge, frames, goal, seed):
        teacher = cls()
        teacher.frames = frames
        return teacher

    def answer(self, pairs):
        verdicts = []
        for pair in pairs:
            left, right = (self.frames.frames(side.snapshots[-1:]).mean() for side in (pair.left, pair.right))
            verdicts.append(self.prefer(right - left))
        return verdicts
