"""Images a second, by size, beside the stock env's `render()`: `python benchmarks/rendering.py`.

All contestants run in one process on one core, in turns. Content differs step by step, so that it is clear what buys
what: MetaWorld's `render()` as it comes; the same without shadows and multisampling; the same with the robot hidden
(what the paper's images show, and what `draw` draws). `draw` poses the scene from a stored snapshot each time, which
`render()` does not have to. Prints medians of interleaved rounds and their ratios as JSON, and what all cores do
together.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import mujoco
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS

from rlvlm.core.steps import FloatArray
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.envs.metaworld.env import DRAWER_OPEN
from rlvlm.envs.mujoco.renderer import aim
from rlvlm.envs.registry import make_env
from rlvlm.envs.rendering import ensure_renderer

SIZES = (64, 128, 200, 300)
PICTURES = 20


def recorded_snapshots() -> FloatArray:
    """[N, S] of an episode in which the drawer moves from closed to open."""
    ours = make_env("drawer_open", MetaWorldConfig(), 0)
    rng = np.random.default_rng(0)
    ours.reset(seed=0)
    rows = [ours.step(rng.uniform(-1, 1, 4).astype(np.float32))[4]["snapshot"] for _ in range(PICTURES)]
    snapshots = np.stack(rows)
    snapshots[:, 9] = -np.linspace(0, 0.16, PICTURES)  # the drawer's joint, metres
    return snapshots


def stock_env(size_px: int, *, plain: bool, robot: bool):
    """MetaWorld's own env as a user makes it to get images of `size_px`."""
    env = ALL_V3_ENVIRONMENTS["drawer-open-v3"](render_mode="rgb_array")
    model = env.model
    env.mujoco_renderer.width = env.mujoco_renderer.height = size_px
    model.vis.global_.offwidth = model.vis.global_.offheight = size_px
    if plain:
        model.vis.quality.offsamples = 0
        model.light_castshadow[:] = 0
        model.mat_reflectance[:] = 0
    if not robot:
        roots = [model.body(name).id for name in ("base", "mocap")]
        hidden = np.isin(model.body_rootid[model.geom_bodyid], roots)
        model.geom_matid[hidden], model.geom_rgba[hidden] = -1, 0.0
    aim(model, DRAWER_OPEN.camera)
    env.mujoco_renderer.camera_id = 0
    env._set_task_called, env._freeze_rand_vec = True, False
    env.reset()
    return env


def seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def one_core(size_px: int, snapshots: FloatArray, rounds: int) -> dict[str, float]:
    """Images per CPU second of each contestant."""
    ours = make_env("drawer_open", MetaWorldConfig(), 0)
    stock = {
        "stock render": stock_env(size_px, plain=False, robot=True),
        "stock, no shadows or multisampling": stock_env(size_px, plain=True, robot=True),
        "stock, robot hidden too": stock_env(size_px, plain=True, robot=False),
    }
    contestants = {name: (lambda env=env: [env.render() for _ in range(PICTURES)]) for name, env in stock.items()}
    contestants["rlvlm draw"] = lambda: ours.draw(snapshots, size_px)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()  # opens OpenGL
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(seconds(run))
    for env in stock.values():
        env.close()
    ours.close()
    return {name: PICTURES / statistics.median(values) for name, values in times.items()}


def draw_many(size_px: int, snapshots: FloatArray, repeats: int) -> float:
    """When the last of `repeats` batches was drawn, on the machine's clock."""
    ours = make_env("drawer_open", MetaWorldConfig(), 0)
    ours.draw(snapshots[:1], size_px)
    started = time.time()
    for _ in range(repeats):
        ours.draw(snapshots, size_px)
    return time.time() - started


def all_cores(size_px: int, snapshots: FloatArray, repeats: int = 20) -> float:
    """Images a second by the clock, one process per core."""
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores) as pool:
        waits = [pool.submit(draw_many, size_px, snapshots, repeats) for _ in range(cores)]
        return sum(repeats * PICTURES / wait.result() for wait in waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    backend, snapshots = ensure_renderer(), recorded_snapshots()
    together = {size_px: all_cores(size_px, snapshots) for size_px in SIZES}  # before this process opens OpenGL
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result: dict[str, object] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "backend": backend,
        "mujoco": mujoco.__version__,
    }
    for size_px in SIZES:
        rates = one_core(size_px, snapshots, rounds)
        ours = rates["rlvlm draw"]
        result[f"{size_px} px"] = {
            "images per CPU second": {name: round(rate, 1) for name, rate in rates.items()},
            "draw over stock": {name: round(ours / rate, 1) for name, rate in rates.items() if name != "rlvlm draw"},
            "all cores, per second": round(together[size_px], 1),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
