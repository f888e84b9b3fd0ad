"""The ball of `catch_ball` seen through two cameras: an env that cannot draw its past again, as no robot can."""

from dataclasses import replace

import numpy as np
from catch_ball import TASK as DRAWN
from catch_ball import CatchBall, CatchBallConfig

from rlvlm.envs.env import ChunkEnv
from rlvlm.envs.pixels import PixelEnv

TASK = replace(DRAWN, name="filmed_ball", maker="filmed_ball:FilmedBall")


class FilmedBall(PixelEnv, ChunkEnv):
    """Gives the images of each env step to `keep`, and puts the snapshot that it gets where others put their state."""

    cameras = ("above", "hand")

    def __init__(self, config: CatchBallConfig, seed: int) -> None:
        self.world = world = CatchBall(config, seed)
        self.goal, self.instructions, self.episode_steps = world.goal, world.instructions, world.episode_steps
        self.chunk_steps, self.proprio_size, self.scaled_actions = world.chunk_steps, 2, world.scaled_actions
        self.action_low, self.action_high = world.action_low, world.action_high
        self.film()

    def film(self):
        above = self.world.draw(self.world.scene[None], 96)[0]
        x, y = (np.clip(self.world.scene[:2] + 1, 0.34, 1.66) * 48).astype(int)  # the middle of the hand's view
        return self.keep(above, above[y - 16 : y + 16, x - 16 : x + 16])

    def reset(self, *, seed=None, options=None):
        obs, info = self.world.reset(seed=seed, options=options)
        return replace(obs, snapshots=self.film()[None], images=()), info

    def step(self, chunk):
        obs, reward, terminated, truncated, info = self.world.step(chunk)
        shots = []
        for self.world.scene in info["snapshots"]:  # as the world was after each step of the chunk
            shots.append(self.film())
        shown = replace(obs, snapshots=shots[-1][None], images=())
        return shown, reward, terminated, truncated, info | {"snapshots": np.stack(shots)}

    def scripted_chunk(self, noise, rng):
        return self.world.scripted_chunk(noise, rng)

    def get_state(self):
        return self.world.get_state()

    def set_state(self, state):
        self.world.set_state(state)
        self.film()
