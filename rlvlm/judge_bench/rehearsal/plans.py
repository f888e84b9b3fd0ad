"""Sequences of actions, decided before an episode begins, for envs of all kinds: drawn, played, and drawn anew about
the best ones. No env needs to go back to a state: each plan is played from a start.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray
from rlvlm.demonstrations.playing import Episode, Script, Style, replay, reward_ranks
from rlvlm.envs.config import ChunkEnvConfig, EnvConfig
from rlvlm.envs.env import FIRST_HELD_OUT_STATE, ChunkEnv, Env, TurnEnv
from rlvlm.envs.registry import make_env
from rlvlm.judge_bench.attempts import walk

Belief = TypeVar("Belief")
_KNOTS = 8
"""Parts of an episode, in each of which an action is held: the sequences stay few numbers long."""
_WIDTH, _MIN_WIDTH = 0.7, 0.05
"""Standard deviation of the first actions about 0, and the smallest about the best ones, in units of their range."""
_KEPT = 0.3
"""Share of the former mean and spread that is kept when plans are drawn anew."""
_AT_ONCE = 4_096
"""Plans that are played side by side."""
_RANKED = 16
"""Episodes whose rewards are ranked, where an env has no progress."""
_MIN_SHARE = 0.02
"""Smallest probability of an action in turns."""
_FIRST_SEED = 2**35 + 500_000
"""First seed of the starts, beside those of the bench's items."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """Ends of N played plans."""

    first: FloatArray
    """[N, S] states of the starts, as in `Episode.states`."""
    last: FloatArray
    """[N, S] states of the ends."""
    progress: FloatArray
    """[N] simulator's progress at the end; see `Plans.progress_of` for envs that have none."""
    success: NDArray[np.bool_]
    """[N] whether the goal is reached at the end."""
    goals: tuple[str, ...]
    """N goals."""
    shown: tuple[FloatArray, ...] = ()
    """N arrays [L, S] of all moments, if they were asked for."""

    @property
    def worth(self) -> FloatArray:
        """[N] the truth as one number: progress, and more than any progress at success."""
        return np.where(self.success, 1.0, 0.9 * self.progress).astype(np.float32)

    def __len__(self) -> int:
        return len(self.first)

    def at(self, rows: NDArray[np.integer] | Sequence[int]) -> "Ends":
        """Returns some of the ends."""
        chosen = np.asarray(rows, np.int64)
        return Ends(
            first=self.first[chosen],
            last=self.last[chosen],
            progress=self.progress[chosen],
            success=self.success[chosen],
            goals=tuple(self.goals[row] for row in chosen.tolist()),
            shown=tuple(self.shown[row] for row in chosen.tolist()) if self.shown else (),
        )

    @classmethod
    def joined(cls, parts: Sequence["Ends"]) -> "Ends":
        """Returns the ends of several plays, one after the other."""
        return cls(
            first=np.concatenate([part.first for part in parts]),
            last=np.concatenate([part.last for part in parts]),
            progress=np.concatenate([part.progress for part in parts]),
            success=np.concatenate([part.success for part in parts]),
            goals=tuple(goal for part in parts for goal in part.goals),
            shown=tuple(moments for part in parts for moments in part.shown),
        )


class Plans(ABC, Generic[Belief]):
    """Plans of one env: arrays [..., P] of numbers, drawn about a belief per start.

    Args:
        env: env that plays them.
        horizon: env steps, turns or, for envs in chunks, actions of a plan.
        script: player in place of the env's own script, for envs in steps.
    """

    def __init__(self, env: Env, horizon: int, script: Script | None = None) -> None:
        self.env, self.horizon, self._script = env, horizon, script
        self._rewards: FloatArray | None = None

    def rank_rewards(self, starts: Sequence[int], rng: np.random.Generator) -> None:
        """Plays a random plan from each of `starts`, and from then on reads progress from rewards."""
        drawn = self.draw(self.prior(1), len(starts), rng)[0]
        played = [replay(self.env, start, self.answers(plan)) for start, plan in zip(starts, drawn, strict=True)]
        self._rewards = np.sort(np.concatenate([episode.rewards for episode in played]))

    def walk(self, start: int, style: Style) -> Episode | None:
        """Returns the script's episode, see `attempts.walk`."""
        return walk(self.env, start, style, self._script)

    def progress_of(self, episode: Episode) -> FloatArray:
        """Returns [T + 1] progress of an episode or, after `rank_rewards`, its `reward_ranks`."""
        if self._rewards is None:
            return episode.progress
        return reward_ranks(episode, self._rewards)

    @abstractmethod
    def prior(self, count: int) -> Belief:
        """Returns the belief before anything is known, for `count` starts."""

    @abstractmethod
    def draw(self, belief: Belief, count: int, rng: np.random.Generator) -> FloatArray:
        """Returns [starts, count, ...] plans drawn from a belief."""

    @abstractmethod
    def toward(self, belief: Belief, best: FloatArray) -> Belief:
        """Returns the belief moved toward the best plans [starts, E, ...]."""

    @abstractmethod
    def middle(self, belief: Belief) -> FloatArray:
        """Returns [starts, ...], the most likely plan of each start."""

    @abstractmethod
    def near(self, plans: FloatArray, width: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Returns plans near `plans` [N, ...], changed by `width` [N]: 0 for not at all, 1 for as if drawn anew."""

    @abstractmethod
    def answers(self, plan: FloatArray) -> list[Any]:
        """Returns what the env is given, one after the other."""

    def play(self, plans: FloatArray, starts: Sequence[int], *, keep: bool = False) -> Ends:
        """Plays plans [N, ...] from `starts` [N]; keeps all moments if asked to."""
        episodes = [replay(self.env, start, self.answers(plan)) for start, plan in zip(starts, plans, strict=True)]
        return Ends(
            first=np.stack([episode.states[0] for episode in episodes]),
            last=np.stack([episode.states[-1] for episode in episodes]),
            progress=np.array([self.progress_of(episode)[-1] for episode in episodes], np.float32),
            success=np.array([episode.successes[-1] for episode in episodes], bool),
            goals=tuple(episode.goal for episode in episodes),
            shown=tuple(episode.snapshots for episode in episodes) if keep else (),
        )


class NumberPlans(Plans[tuple[FloatArray, FloatArray]]):
    """Plans of envs whose actions are numbers: knots [K, A] in units of their range, each held for some steps."""

    def __init__(self, env: Env, horizon: int, script: Script | None = None) -> None:
        super().__init__(env, horizon, script)
        if isinstance(env, ChunkEnv):
            self._low, self._high = env.action_low, env.action_high
            self.horizon = -(-horizon // env.chunk_steps) * env.chunk_steps
        else:
            size = env.action_space.shape or (1,)
            self._low, self._high = -np.ones(size, np.float32), np.ones(size, np.float32)
        self._knots = min(_KNOTS, self.horizon)

    def prior(self, count: int) -> tuple[FloatArray, FloatArray]:
        shape = (count, self._knots, len(self._low))
        return np.zeros(shape, np.float32), np.full(shape, _WIDTH, np.float32)

    def draw(self, belief: tuple[FloatArray, FloatArray], count: int, rng: np.random.Generator) -> FloatArray:
        mean, spread = belief
        noise = rng.normal(size=(len(mean), count, *mean.shape[1:])).astype(np.float32)
        return np.clip(mean[:, None] + spread[:, None] * noise, -1, 1).astype(np.float32)

    def toward(self, belief: tuple[FloatArray, FloatArray], best: FloatArray) -> tuple[FloatArray, FloatArray]:
        mean, spread = belief
        return (
            _KEPT * mean + (1 - _KEPT) * best.mean(1),
            np.maximum(_KEPT * spread + (1 - _KEPT) * best.std(1), _MIN_WIDTH),
        )

    def middle(self, belief: tuple[FloatArray, FloatArray]) -> FloatArray:
        return np.clip(belief[0], -1, 1)

    def near(self, plans: FloatArray, width: FloatArray, rng: np.random.Generator) -> FloatArray:
        noise = rng.normal(size=plans.shape) * width[:, None, None]
        return np.clip(plans + noise, -1, 1).astype(np.float32)

    def _actions(self, plans: FloatArray) -> FloatArray:
        """Returns [N, horizon, A] actions in the env's units."""
        steps = np.arange(self.horizon) * self._knots // self.horizon
        middle, half = (self._high + self._low) / 2, (self._high - self._low) / 2
        return (middle + half * plans[:, steps]).astype(np.float32)

    def answers(self, plan: FloatArray) -> list[FloatArray]:
        actions = self._actions(plan[None])[0]
        if isinstance(self.env, ChunkEnv):
            return list(actions.reshape(-1, self.env.chunk_steps, actions.shape[1]))
        return list(actions)

    def play(self, plans: FloatArray, starts: Sequence[int], *, keep: bool = False) -> Ends:
        if not isinstance(self.env, ChunkEnv):
            return super().play(plans, starts, keep=keep)
        envs, parts = self.env.many(), []
        for begin in range(0, len(plans), _AT_ONCE):
            own = np.array(starts[begin : begin + _AT_ONCE], np.int64)
            chunks = self._actions(plans[begin : begin + _AT_ONCE])
            for rows in envs.batches(own):
                obs = envs.begin(own[rows])
                trail, running = [obs.snapshots[:, None]], np.arange(len(rows))
                progress, success = np.zeros(len(rows), np.float32), np.zeros(len(rows), bool)
                for index in range(0, self.horizon, self.env.chunk_steps):
                    came = envs.step(running, chunks[rows[running], index : index + self.env.chunk_steps])
                    moved = np.repeat(trail[-1][:, -1:], self.env.chunk_steps, axis=1)
                    moved[running] = came.snapshots
                    trail.append(moved if keep else moved[:, -1:])
                    progress[running], success[running] = came.progress, came.success_at_end
                    running = running[~(came.terminated | came.truncated)]
                    if not len(running):
                        break
                ends = Ends(
                    first=trail[0][:, 0],
                    last=trail[-1][:, -1],
                    progress=progress,
                    success=success,
                    goals=tuple(obs.texts),
                    shown=tuple(np.concatenate(trail, axis=1)) if keep else (),
                )
                parts.append(ends)
        return Ends.joined(parts)


class WordPlans(Plans[FloatArray]):
    """Plans of envs in turns: the index of an action for each turn, [T], drawn by probabilities [T, actions]."""

    env: TurnEnv

    def prior(self, count: int) -> FloatArray:
        actions = len(self.env.action_names)
        return np.full((count, self.horizon, actions), 1 / actions, np.float32)

    def draw(self, belief: FloatArray, count: int, rng: np.random.Generator) -> FloatArray:
        below = belief.cumsum(-1)[:, None]
        drawn = rng.random((len(belief), count, self.horizon, 1))
        return (drawn > below[..., :-1]).sum(-1).astype(np.float32)

    def toward(self, belief: FloatArray, best: FloatArray) -> FloatArray:
        actions = belief.shape[-1]
        shares = (best[..., None] == np.arange(actions)).mean(1)
        moved = np.maximum(_KEPT * belief + (1 - _KEPT) * shares, _MIN_SHARE)
        return (moved / moved.sum(-1, keepdims=True)).astype(np.float32)

    def middle(self, belief: FloatArray) -> FloatArray:
        return belief.argmax(-1).astype(np.float32)

    def near(self, plans: FloatArray, width: FloatArray, rng: np.random.Generator) -> FloatArray:
        other = rng.integers(len(self.env.action_names), size=plans.shape)
        return np.where(rng.random(plans.shape) < width[:, None], other, plans).astype(np.float32)

    def answers(self, plan: FloatArray) -> list[str]:
        return [self.env.action_text(int(action)) for action in plan]


def make_plans(task: str, config: EnvConfig, horizon: int, seed: int, script: Script | None = None) -> Plans:
    """Returns the plans of a task's env, which goes on after success where it can: an end tells nothing then. Where an
    env has no progress, its rewards say how far an episode is.

    Raises:
        UsageError: there is no such task.
    """
    if isinstance(config, ChunkEnvConfig):
        config = replace(config, continue_after_success=True)
    env = make_env(task, config, seed)
    plans = WordPlans(env, horizon) if isinstance(env, TurnEnv) else NumberPlans(env, horizon, script)
    if not env.has_progress:
        plans.rank_rewards(starts_of(env, 60_000, _RANKED, seed), np.random.default_rng((seed, 6)))
    return plans


def starts_of(env: Env, first: int, count: int, seed: int) -> list[int]:
    """Returns `count` starts from the `first` one on, which no run and no other item of a bench has."""
    begin = (FIRST_HELD_OUT_STATE + 3_000_000 if isinstance(env, ChunkEnv) else _FIRST_SEED) + 100_000 * seed + first
    return list(range(begin, begin + count))
