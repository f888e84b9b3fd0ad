"""Plays envs of any kind side by side, episode by episode: one loop for every player and every record.

A slot is an env with its running episode. An actor is a function that answers the observations of several slots: a
policy in one forward pass, a script one by one. Rollouts of policies, evaluations, demonstrations and the episodes of
judge benchmarks all come from `play`; each caller reads from the slot what it keeps of an episode.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from rlvlm.core.episodes import Observations
from rlvlm.core.steps import FloatArray
from rlvlm.envs.env import ChunkEnv, ChunkEnvs, Env


class Slot:
    """One of several envs played side by side, and its running episode of T answers.

    Args:
        env: env of any kind; played by this slot alone.
        index: index of the slot among those side by side.
    """

    def __init__(self, env: Env, index: int = 0) -> None:
        self.env: Any = env
        self.index = index

    def begin(self, start: int) -> None:
        """Starts a new episode from `start`: a seed or, for envs in chunks, the number of an initial state."""
        self.open(start, *self.env.reset_to(start))

    def open(self, start: int, obs: Any, info: dict[str, Any]) -> None:
        """Starts a new episode, for which the env returned `obs` and `info`."""
        self.start = start
        self._rng: np.random.Generator | None = None
        self.is_over = self.is_terminated = False  # over for any reason; terminated: not by the time limit
        is_chunks = isinstance(obs, Observations)
        self.goal: str = obs.texts[0] if is_chunks else self.env.goal
        self.shown = obs  # latest observation; after the episode's end, its last state
        self.seen = [self.see(obs)]  # T + 1 observations, as returned by `see`
        self.infos = [info]  # T + 1
        self.answers: list[Any] = []  # T answers of the actor
        self.rewards: list[float] = []  # T
        # T + 1 snapshots and T rewards; for chunks, one per env step
        self.snapshots: list[FloatArray] = [obs.snapshots if is_chunks else self.env.snapshot()[None]]
        self.env_rewards: list[FloatArray] = []

    @property
    def rng(self) -> np.random.Generator:
        """Random generator of this episode alone, independent of other episodes."""
        self._rng = self._rng or np.random.default_rng(self.start)  # made on demand: it takes 20 us
        return self._rng

    def play(self, answer: Any) -> bool:
        """Passes an answer to the env; returns whether the episode is over.

        Args:
            answer: the env's action, or a reply with the action as its `text`.
        """
        return self.keep(answer, *self.env.step(getattr(answer, "text", answer)))

    def keep(
        self, answer: Any, obs: Any, reward: float, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> bool:
        """Stores what the env returned for an answer; returns whether the episode is over."""
        self.shown = obs
        self.seen.append(self.see(obs))
        self.infos.append(info)
        self.answers.append(answer)
        self.rewards.append(float(reward))
        if "snapshots" in info:  # a chunk
            self.snapshots.append(info["snapshots"])
            self.env_rewards.append(info["env_rewards"])
        else:
            snapshot = info["snapshot"] if "snapshot" in info else self.env.snapshot()
            self.snapshots.append(snapshot[None])
            self.env_rewards.append(np.array([reward], np.float32))
        self.is_over, self.is_terminated = bool(terminated or truncated), bool(terminated)
        return self.is_over

    def see(self, obs: Any) -> Any:
        """Converts an observation to the form that this slot's actors and episodes use; here unchanged."""
        return obs


S = TypeVar("S", bound=Slot)
Act = Callable[[Sequence[S]], Sequence[Any]]
"""Function from the observations of several slots to answers in their order; None abandons the episode, e.g. when a
script has no answer."""


def play(slots: Sequence[S], starts: Iterable[int], act: Act[S], envs: ChunkEnvs | None = None) -> Iterator[S]:
    """Plays a whole episode from each start, as many at once as there are slots. Yields each slot as its episode ends,
    before it begins another; `index` is then the episode's number.

    Args:
        slots: slots of one task.
        starts: seeds, or numbers of initial states; one is taken whenever a slot is free.
        act: the actor. If it answers None, the episode is abandoned, and its slot is yielded without `is_over`.
        envs: the slots' envs, if they are stepped as one; then there is one slot for each start, and answers are
            `SampledChunk`s.
    """
    waiting = enumerate(starts)
    free, running = list(slots), []
    while True:
        begun = list(zip(free, waiting, strict=False))  # as many as there are free slots and starts
        first = envs.begin(np.array([start for _, (_, start) in begun], np.int64)) if envs and begun else None
        for slot, (index, start) in begun:
            slot.index = index
            if first is None:
                slot.begin(start)
            else:
                slot.open(start, first.row(index), {})
        free = free[len(begun) :]
        running += [slot for slot, _ in begun]
        if not running:
            return
        answered = list(zip(running, act(running), strict=True))
        if envs:
            _drive(envs, answered)
        for slot, answer in () if envs else answered:
            if answer is not None:
                slot.play(answer)
        running = [slot for slot, answer in answered if answer is not None and not slot.is_over]
        for slot, answer in answered:
            if answer is None or slot.is_over:
                yield slot
                free.append(slot)


def _drive(envs: ChunkEnvs, answered: Sequence[tuple[Slot, Any]]) -> None:
    """Steps `envs` with each slot's chunk, and stores each result in its slot."""
    chunks = np.stack([answer.actions for _, answer in answered])
    came = envs.step(np.array([slot.index for slot, _ in answered]), chunks)
    for row, (slot, answer) in enumerate(answered):
        slot.keep(answer, *ChunkEnv.answer_alone(came, slot.start, row))
