"""SAC as in CleanRL's single file (`examples/sac_in_one_file.py`), numpy replay: `python run_cleanrl.py WORLD`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import numpy as np
import torch
from contest import BATCH, WARM_UP_STEPS, answer_orders
from envs import make
from sac_in_one_file import SAC

torch.set_num_threads(1)
env = make(sys.argv[1])
obs_size, action_size = env.observation_space.shape[0], env.action_space.shape[0]
sac, rng, steps_done = SAC(obs_size, action_size), np.random.default_rng(0), 0
columns = [np.zeros((100_000, size), np.float32) for size in (obs_size, action_size, obs_size)]
ends, rewards = np.zeros((2, 100_000), np.float32)
obs, _ = env.reset(seed=0)


def advance(steps: int) -> int:
    global obs, steps_done
    for _ in range(steps):
        if steps_done < WARM_UP_STEPS:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = sac.act(torch.as_tensor(obs)[None], torch.randn(1, action_size))[0][0].numpy()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        row = steps_done % len(rewards)
        for column, value in zip(columns, (obs, action, next_obs), strict=True):
            column[row] = value
        ends[row], rewards[row] = terminated, reward
        obs = env.reset()[0] if terminated or truncated else next_obs
        steps_done += 1
        if steps_done > WARM_UP_STEPS:
            rows = rng.integers(min(steps_done, len(rewards)), size=BATCH)
            batch = [torch.as_tensor(column[rows]) for column in (*columns, ends, rewards)]
            sac.update(*batch, torch.randn(BATCH, action_size), torch.randn(BATCH, action_size))
    return steps


answer_orders(advance)
