"""Envs in chunks that are stepped and drawn in worker processes, on any node with a free core.

A runner samples for all of its envs as one batch, on its GPU, and each worker steps a share of them: a simulator needs
a core for milliseconds a step, and a policy of billions of parameters is not copied for envs. Envs with equal starts
are in one worker, so that a lost worker costs whole groups and breaks none.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, NodeDiedError, RayActorError

from rlvlm.algorithms.heartbeat import Lost, Replacements, ended, start_heartbeat
from rlvlm.core.episodes import ChunkStep, Observations
from rlvlm.core.errors import MachineError
from rlvlm.core.progress import count_progress
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import ChunkEnv, ChunkEnvs
from rlvlm.envs.pixels import PIXELS
from rlvlm.envs.registry import make_env

_LOST_IN_A_ROW = 5
"""Number of consecutive batches that lose every worker after which the workers count as unable to live."""
_RESTART_S = 60.0
"""Seconds that Ray is given to restart a worker before the next batch is tried."""


class EnvWorker:
    """Actor with some envs of one task.

    Args:
        task: name of the task.
        seed: see `make_env`.
        image_px: side of the images returned with observations, for the policy.
    """

    def __init__(self, task: str, seed: int, image_px: int) -> None:
        self._task, self._seed, self._image_px = task, seed, image_px
        self._made: dict[tuple[EnvConfig, int], tuple[ChunkEnv, ChunkEnvs]] = {}
        start_heartbeat()

    def begin(self, which: tuple[EnvConfig, int], state_ids: NDArray[np.int64]) -> tuple[Observations, Frames, bytes]:
        """Begins new episodes and returns observations, their images, and those stored meanwhile, packed; `which` envs:
        their settings, and a number that distinguishes those played at the same time.
        """
        if which not in self._made:
            env = make_env(self._task, which[0], self._seed)
            self._made[which] = env, env.many()
        env, envs = self._made[which]
        count_progress()
        obs = envs.begin(state_ids.copy())  # arrays from Ray are read-only, and an env may clip in place
        count_progress()
        return obs, env.draw_cameras(obs.snapshots, self._image_px), PIXELS.take_all()

    def step(
        self, which: tuple[EnvConfig, int], rows: NDArray[np.intp], chunks: FloatArray
    ) -> tuple[ChunkStep, Frames, bytes] | None:
        """Returns the results of `chunks` in this worker's envs `rows`, images of those that continue, and images
        stored meanwhile, packed; None if the worker was restarted since the episodes began.
        """
        if which not in self._made:
            return None
        env, envs = self._made[which]
        came = envs.step(rows.copy(), chunks.copy())
        count_progress()
        return came, env.draw_cameras(came.obs.snapshots[~came.ended], self._image_px), PIXELS.take_all()


class WorkerEnvs(ChunkEnvs):
    """Envs that are stepped by workers, from the player's side.

    Args:
        workers: handles of `EnvWorker` actors.
        settings: settings of the envs.
        local: an env of the same settings; it decides which episodes fit into memory together, and is not played.
        group_size: number of neighbours with equal starts.
        show: stores images by the bytes of their snapshots.
        max_still_s: time without progress after which a living worker counts as hung and is replaced; None: never.
        number: number of these envs among those that the same workers step for parallel threads.
        lock: lock held while `show` and `local` are used, which such threads share.
    """

    def __init__(  # noqa: PLR0913 - whose envs they are, and what is done with them
        self,
        workers: Sequence[ActorHandle],
        settings: EnvConfig,
        local: ChunkEnv,
        group_size: int,
        show: Callable[[Sequence[bytes], Frames], None],
        max_still_s: float | None = None,
        number: int = 0,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._workers, self._settings, self._local = workers, ray.put((settings, number)), local
        self._lock = lock or nullcontext()
        self._batches = local.many().batches
        self._group_size, self._show, self._max_still_s = group_size, show, max_still_s
        self._owner = np.empty(0, np.intp)
        self._place = np.empty(0, np.intp)
        self._num_lost_batches = 0
        self._replacements = Replacements("env worker", "--algo.env-workers")

    def batches(self, state_ids: NDArray[np.int64]) -> list[NDArray[np.intp]]:
        """Returns the batches that the envs themselves would choose."""
        return self._batches(state_ids)

    def begin(self, state_ids: NDArray[np.int64]) -> Observations:
        """Returns first observations of N new episodes; a lost worker's are placeholders, listed in `lost`.

        Raises:
            MachineError: workers are lost repeatedly.
        """
        whole = np.setdiff1d(np.arange(len(self._owner)), sorted(self.lost))
        for number in np.unique(self._owner[whole]).tolist():  # it has played all that was requested
            self._replacements.note_result(number)
        self.lost = frozenset()
        num_groups = -(-len(state_ids) // self._group_size)
        # neighbouring groups go to the same worker, whole: a lost worker costs groups and breaks none
        owners = np.arange(num_groups) * len(self._workers) // num_groups
        self._owner = owners.repeat(self._group_size)[: len(state_ids)]
        self._place = np.empty(len(state_ids), np.intp)
        asked = []
        for number, worker in enumerate(self._workers):
            rows = np.flatnonzero(self._owner == number)
            self._place[rows] = np.arange(len(rows))
            if len(rows):
                asked.append((rows, worker.begin.remote(self._settings, state_ids[rows])))
        found = self._gathered(asked)
        self._num_lost_batches = self._num_lost_batches + 1 if not found else 0
        if self._num_lost_batches == _LOST_IN_A_ROW:
            raise MachineError(
                f"all {len(self._workers)} env workers were lost, {_LOST_IN_A_ROW} times in a row",
                "look for what ends them (memory?), then `rlvlm resume` with a smaller --algo.env-workers",
            )
        if not found:
            self._wait_for_a_worker()
        with self._lock:
            example = found[0][1][0] if found else self._local.reset(options={"state_id": int(state_ids[0])})[0]
        whole = example.at(np.zeros(len(state_ids), np.intp))  # every row has an entry, including lost ones
        texts = list(whole.texts)
        for rows, (obs, images) in found:
            whole.snapshots[rows], whole.proprio[rows] = obs.snapshots, obs.proprio
            for row, text in zip(rows.tolist(), obs.texts, strict=True):
                texts[row] = text
            with self._lock:
                self._show(obs.images, images)
        return replace(whole, texts=tuple(texts), images=())  # keys of the present snapshots

    def _wait_for_a_worker(self) -> None:
        """Returns when a worker answers again, or none ever will: calls to a restarting worker fail at once, and
        several batches would be lost within a moment.
        """
        end = time.monotonic() + _RESTART_S
        while time.monotonic() < end:
            num_dead = 0
            for worker in self._workers:
                try:
                    ray.get(worker.__ray_ready__.remote(), timeout=1.0)
                    return
                except ActorDiedError:
                    num_dead += 1
                except (RayActorError, NodeDiedError, GetTimeoutError):
                    continue
            if num_dead == len(self._workers):
                return
            time.sleep(0.5)

    def step(self, rows: NDArray[np.intp], chunks: FloatArray) -> ChunkStep:
        """Steps the envs `rows` [n] by `chunks` [n, L, A]; lost ones end."""
        alive = np.array([row not in self.lost for row in rows.tolist()])
        asked = []
        for number in np.unique(self._owner[rows[alive]]).tolist():
            own = np.flatnonzero(alive & (self._owner[rows] == number))
            call = self._workers[number].step.remote(self._settings, self._place[rows[own]], chunks[own])
            asked.append((own, call))
        found = self._gathered(asked, rows)
        if not found:
            with self._lock:
                return _ended(len(rows), chunks.shape[1], self._local)
        parts = [part for _, (part, _) in found]
        came = np.concatenate([own for own, _ in found])
        missing = np.setdiff1d(np.arange(len(rows)), came)
        if len(missing):
            with self._lock:
                parts.append(_ended(len(missing), chunks.shape[1], self._local))
            came = np.concatenate([came, missing])
        for _, (part, images) in found:
            with self._lock:
                self._show(part.obs.at(np.flatnonzero(~part.ended)).images, images)
        return ChunkStep.joined(parts, np.argsort(came))  # answers are ordered by worker

    def _gathered(
        self, asked: Sequence[tuple[NDArray[np.intp], ray.ObjectRef]], rows: NDArray[np.intp] | None = None
    ) -> list[tuple[NDArray[np.intp], tuple[Any, Frames]]]:
        """Returns the answers that arrived; rows of dead workers, which Ray restarts, are lost from then on."""
        found, answers = [], dict(ended([call for _, call in asked], self._max_still_s))
        for own, call in asked:
            answer = answers[call]
            if isinstance(answer, Exception):  # an env's error
                raise answer
            if isinstance(answer, tuple):
                *seen, packed = answer
                PIXELS.unpack(packed)
                found.append((own, tuple(seen)))
                continue
            # All envs of that worker are lost, including those whose episodes are over: their group is not whole.
            owner = int(self._owner[(own if rows is None else rows[own])[0]])
            self.lost = self.lost | frozenset(np.flatnonzero(self._owner == owner).tolist())
            if answer is None:
                answer = Lost(what="was started again", fix="", is_gone=True)
            self._replacements.replace(owner, self._workers[owner], answer)
        return found


def start_workers(count: int, task: str, seed: int, image_px: int) -> list[Any]:
    """Starts workers of one core each, spread over the cluster's nodes; Ray restarts one that dies.

    In a sweep they are where its run's other processes are, in the resources reserved for it.
    """
    strategy = "DEFAULT" if ray.util.get_current_placement_group() else "SPREAD"
    # Mesa's software renderer uses all cores of a machine: several workers would slow each other down.
    threads = {"LP_NUM_THREADS": "1"} if count > 1 else {}
    actor = ray.remote(EnvWorker).options(
        num_cpus=1, max_restarts=-1, scheduling_strategy=strategy, runtime_env={"env_vars": threads}
    )
    return [actor.remote(task, seed, image_px) for _ in range(count)]


def _ended(count: int, steps: int, env: ChunkEnv) -> ChunkStep:
    """Returns the step of `count` lost envs: their episodes are over, and are not learned from."""
    obs, _ = env.reset(options={"state_id": 0})
    flags = np.zeros(count, bool)
    return ChunkStep(
        obs=obs.at(np.zeros(count, np.intp)),
        snapshots=obs.snapshots[:1].repeat(count, axis=0)[:, None].repeat(steps, axis=1),
        steps=np.ones(count, np.int64), env_rewards=np.zeros((count, steps), np.float32),
        success=flags, success_at_end=flags, progress=np.zeros(count, np.float32),
        terminated=~flags, truncated=flags,
    )  # fmt: skip
