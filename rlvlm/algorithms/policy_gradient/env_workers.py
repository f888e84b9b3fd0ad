"""Envs in chunks that are stepped and drawn in processes of their own, on whatever node has a core for them.

A runner samples for all of its envs as one batch, on its GPU, and each worker steps a share of them: a simulator takes
a core for milliseconds a step, and a policy of billions of parameters is copied for no env. Envs that begin alike lie
in one worker, so a worker that is lost costs whole groups and spoils none.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
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
"""Batches that lose every worker before it is believed that they cannot live."""
_RESTART_S = 60.0
"""Seconds that Ray is given to start a worker again before the next batch is tried."""


class EnvWorker:
    """Some envs of one task, in an actor.

    Args:
        task: of the envs.
        seed: as `make_env` takes it.
        image_px: side of the images that go back with what is observed, as the policy looks at them.
    """

    def __init__(self, task: str, seed: int, image_px: int) -> None:
        self._task, self._seed, self._image_px = task, seed, image_px
        self._made: dict[tuple[EnvConfig, int], tuple[ChunkEnv, ChunkEnvs]] = {}
        start_heartbeat()

    def begin(self, which: tuple[EnvConfig, int], state_ids: NDArray[np.int64]) -> tuple[Observations, Frames, bytes]:
        """First observations of new episodes, their images, and those that were kept meanwhile, packed; `which` envs:
        their settings, and a number that tells those apart which are played at the same time.
        """
        if which not in self._made:
            env = make_env(self._task, which[0], self._seed)
            self._made[which] = env, env.many()
        env, envs = self._made[which]
        count_progress()
        obs = envs.begin(state_ids.copy())  # what comes through Ray is read-only, and an env may clip in place
        count_progress()
        return obs, env.draw_cameras(obs.snapshots, self._image_px), PIXELS.take_all()

    def step(
        self, which: tuple[EnvConfig, int], rows: NDArray[np.intp], chunks: FloatArray
    ) -> tuple[ChunkStep, Frames, bytes] | None:
        """Results of `chunks` in the envs `rows` of this worker, the images of those that go on, and those that were
        kept meanwhile, packed; None of a worker that was started again since they were begun.
        """
        if which not in self._made:
            return None
        env, envs = self._made[which]
        came = envs.step(rows.copy(), chunks.copy())
        count_progress()
        return came, env.draw_cameras(came.obs.snapshots[~came.ended], self._image_px), PIXELS.take_all()


class WorkerEnvs(ChunkEnvs):
    """Envs that workers step, as the player sees them.

    Args:
        workers: handles of `EnvWorker` actors.
        settings: of the envs.
        local: an env of the same settings; it says which episodes fit together in memory, and is not played.
        group_size: neighbours that begin alike.
        show: keeps images by the bytes of their snapshots.
        max_still_s: a worker that lives, but has done nothing for so long, hangs and is replaced; None: never.
        number: of these among the envs that the same workers step for threads side by side.
        lock: held while `show` and `local` are used, which such threads share.
    """

    def __init__(  # noqa: PLR0913 - whose envs they are, and what is done with them
        self,
        workers: Sequence[Any],
        settings: EnvConfig,
        local: ChunkEnv,
        group_size: int,
        show: Callable[[Sequence[bytes], Frames], None],
        max_still_s: float | None = None,
        number: int = 0,
        lock: AbstractContextManager[Any] | None = None,
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
        """As the envs themselves would have it."""
        return self._batches(state_ids)

    def begin(self, state_ids: NDArray[np.int64]) -> Observations:
        """First observations of N new episodes; those of a worker that is lost are made up, and in `lost`.

        Raises:
            MachineError: workers are lost again and again.
        """
        whole = np.setdiff1d(np.arange(len(self._owner)), sorted(self.lost))
        for number in np.unique(self._owner[whole]).tolist():  # it has played all that it was asked for
            self._replacements.note_result(number)
        self.lost = frozenset()
        num_groups = -(-len(state_ids) // self._group_size)
        # neighbouring groups to the same worker, whole: one that is lost costs groups and spoils none
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
        whole = example.at(np.zeros(len(state_ids), np.intp))  # every row has a place, what is lost too
        texts = list(whole.texts)
        for rows, (obs, images) in found:
            whole.snapshots[rows], whole.proprio[rows] = obs.snapshots, obs.proprio
            for row, text in zip(rows.tolist(), obs.texts, strict=True):
                texts[row] = text
            with self._lock:
                self._show(obs.images, images)
        return replace(whole, texts=tuple(texts), images=())  # keys of the snapshots as they are now

    def _wait_for_a_worker(self) -> None:
        """Returns when one answers again, or none ever will: calls to a worker that is being started again fail at
        once, and some batches in a row would be lost within a moment.
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
        """Drives the envs `rows` [n] by `chunks` [n, L, A]; those that were lost end."""
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
        return ChunkStep.joined(parts, np.argsort(came))  # answers lie worker by worker

    def _gathered(
        self, asked: Sequence[tuple[NDArray[np.intp], Any]], rows: NDArray[np.intp] | None = None
    ) -> list[tuple[NDArray[np.intp], tuple[Any, Frames]]]:
        """The answers that came; rows of workers that are gone are lost from then on, and Ray starts those again."""
        found, answers = [], dict(ended([call for _, call in asked], self._max_still_s))
        for own, call in asked:
            answer = answers[call]
            if isinstance(answer, Exception):  # what an env raised
                raise answer
            if isinstance(answer, tuple):
                *seen, packed = answer
                PIXELS.unpack(packed)
                found.append((own, tuple(seen)))
                continue
            # All envs of that worker are gone; those whose episodes are over already too: their group is not whole.
            owner = int(self._owner[(own if rows is None else rows[own])[0]])
            self.lost = self.lost | frozenset(np.flatnonzero(self._owner == owner).tolist())
            if answer is None:
                answer = Lost(what="was started again", fix="", is_gone=True)
            self._replacements.replace(owner, self._workers[owner], answer)
        return found


def start_workers(count: int, task: str, seed: int, image_px: int) -> list[Any]:
    """Starts workers of one core each, spread over the cluster's nodes; one that dies is started again by Ray.

    In a sweep they lie where its run's other processes do, in the places that were set aside for it.
    """
    strategy = "DEFAULT" if ray.util.get_current_placement_group() else "SPREAD"
    # Mesa's software renderer draws with all cores of a machine: several workers would stand in each other's way.
    threads = {"LP_NUM_THREADS": "1"} if count > 1 else {}
    actor = ray.remote(EnvWorker).options(
        num_cpus=1, max_restarts=-1, scheduling_strategy=strategy, runtime_env={"env_vars": threads}
    )
    return [actor.remote(task, seed, image_px) for _ in range(count)]


def _ended(count: int, steps: int, env: ChunkEnv) -> ChunkStep:
    """The step of `count` lost envs: their episodes are over, and are not learned from."""
    obs, _ = env.reset(options={"state_id": 0})
    flags = np.zeros(count, bool)
    return ChunkStep(
        obs=obs.at(np.zeros(count, np.intp)),
        snapshots=obs.snapshots[:1].repeat(count, axis=0)[:, None].repeat(steps, axis=1),
        steps=np.ones(count, np.int64), env_rewards=np.zeros((count, steps), np.float32),
        success=flags, success_at_end=flags, progress=np.zeros(count, np.float32),
        terminated=~flags, truncated=flags,
    )  # fmt: skip
