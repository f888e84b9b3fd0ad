"""Plays envs of any kind, side by side, to the ends of their episodes: one loop for every player and every record.

A slot is an env with its running episode. An actor is a function that answers what several slots show: a policy in one
pass, a script one by one. Rollouts of policies, evaluations, demonstrations and the play that judges are measured on
all come from `play`; what each of them keeps of an episode, it reads off the slot.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from rlvlm.core.episodes import Observations
from rlvlm.core.steps import FloatArray
from rlvlm.envs.env import ChunkEnv, ChunkEnvs, Env


class Slot:
    """One of the envs that are played side by side, and its running episode of T answers.

    Args:
        env: of any kind; played by this slot alone.
        index: of the slot among those side by side.
    """

    def __init__(self, env: Env[Any, Any], index: int = 0) -> None:
        self.env: Any = env
        self.index = index

    def begin(self, start: int) -> None:
        """A new episode from `start`: a seed, or of envs in chunks the number of an initial state."""
        self.open(start, *self.env.reset_to(start))

    def open(self, start: int, obs: Any, info: dict[str, Any]) -> None:
        """A new episode, which the env has begun with `obs` and `info`."""
        self.start = start
        self._rng: np.random.Generator | None = None
        self.is_over = self.is_terminated = False  # for whatever reason, and for good: a time limit only cuts
        is_chunks = isinstance(obs, Observations)
        self.goal: str = obs.texts[0] if is_chunks else self.env.goal
        self.shown = obs  # by the env; after the episode's end it is the last state
        self.seen = [self.see(obs)]  # T + 1, as `see` has it
        self.infos = [info]  # T + 1
        self.answers: list[Any] = []  # T, as the actor gave them
        self.rewards: list[float] = []  # T
        # T + 1 and T: a chunk has a snapshot and a reward for each of its steps
        self.snapshots: list[FloatArray] = [obs.snapshots if is_chunks else self.env.snapshot()[None]]
        self.env_rewards: list[FloatArray] = []

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers of this episode alone: what else is played makes no difference to them."""
        self._rng = self._rng or np.random.default_rng(self.start)  # made when it is asked for: it takes 20 us
        return self._rng

    def play(self, answer: Any) -> bool:
        """Gives an answer to the env; says whether the episode is over.

        Args:
            answer: what the env takes, or a reply that has it as `text`.
        """
        return self.keep(answer, *self.env.step(getattr(answer, "text", answer)))

    def keep(
        self, answer: Any, obs: Any, reward: float, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> bool:
        """Keeps what the env gave for an answer; says whether the episode is over."""
        self.shown = obs
        self.seen.append(self.see(obs))
        self.infos.append(info)
        self.answers.append(answer)
        self.rewards.append(float(reward))
        if "snapshots" in info:  # of a chunk
            self.snapshots.append(info["snapshots"])
            self.env_rewards.append(info["env_rewards"])
        else:
            snapshot = info["snapshot"] if "snapshot" in info else self.env.snapshot()
            self.snapshots.append(snapshot[None])
            self.env_rewards.append(np.array([reward], np.float32))
        self.is_over, self.is_terminated = bool(terminated or truncated), bool(terminated)
        return self.is_over

    def see(self, obs: Any) -> Any:
        """An observation of the env in the form that this slot's actors and episodes have it: here as it is."""
        return obs


S = TypeVar("S", bound=Slot)
Act = Callable[[Sequence[S]], Sequence[Any]]
"""Answers what slots show, in their order; None leaves an episode where it is, as a script that has no answer does."""


def play(slots: Sequence[S], starts: Iterable[int], act: Act[S], envs: ChunkEnvs | None = None) -> Iterator[S]:
    """Plays a whole episode from each start, as many at once as there are slots, and yields each slot as its episode
    ends, before another begins in it; its `index` is the episode's number.

    Args:
        slots: of one task.
        starts: taken one by one, each when a slot is free for it; seeds, or numbers of initial states.
        act: answers. Where it has no answer, the episode is left, and its slot is yielded without `is_over`.
        envs: those of the slots, where they are driven as one; then there is a slot for each start, and answers are
            `SampledChunk`s.
    """
    waiting = enumerate(starts)
    free, running = list(slots), []
    while True:
        begun = list(zip(free, waiting, strict=False))  # as far as both reach
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
    """Gives each slot's chunk to its row of `envs`, and the result to the slot."""
    chunks = np.stack([answer.actions for _, answer in answered])
    came = envs.step(np.array([slot.index for slot, _ in answered]), chunks)
    for row, (slot, answer) in enumerate(answered):
        slot.keep(answer, *ChunkEnv.answer_alone(came, slot.start, row))
