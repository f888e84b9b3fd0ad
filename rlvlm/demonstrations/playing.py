"""Plays any kind of env: by its script, at random, or first by one and then by the other.

For inspection (`rlvlm check-task`, `rlvlm.judge_bench`); no policy learns from these episodes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlvlm.core.steps import FloatArray
from rlvlm.demonstrations.collect import RandomPlayer, ScriptedExpert
from rlvlm.envs.env import ChunkEnv, Env, StepEnv, TurnEnv
from rlvlm.envs.pixels import PixelEnv
from rlvlm.envs.playing import Slot
from rlvlm.envs.playing import play as play_slots

_HOLD = 0.9  # probability that a random action is repeated for one more step: persistent motion gets further
_CHUNK_NOISE = 0.02  # noise of a script's actions in chunks, as in a run's demonstrations


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """Record of one episode of T steps."""

    seed: int
    snapshots: FloatArray
    """[T + 1, S] snapshots, including the start."""
    progress: FloatArray
    """[T + 1] progress; in chunks each step has the progress at the end of its chunk."""
    rewards: FloatArray
    """[T] true rewards."""
    is_success: bool
    """Whether the task was solved at any step."""
    actions: tuple[str, ...] = ()
    """T action names, for envs in turns."""
    goal: str = ""
    """The env's goal in this episode."""
    looked: tuple[int, ...] = ()
    """Indices into `snapshots` of the moments with measured progress: the start, and the end of each step or chunk."""
    successes: tuple[bool, ...] = ()
    """Result of the env's own success test at each moment of `looked`."""
    answers: tuple[Any, ...] = ()
    """What the player answered, in the form that the env takes, so that the same motion can be played elsewhere."""
    states: FloatArray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """[L, D] numbers that tell apart the moments of `looked`: their snapshots or, for envs in steps whose snapshots
    only name kept images, their observations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """Style in which an episode is played."""

    noise: float = 0.0
    """While the script plays: standard deviation of the noise on each action in units of its range [-1, 1]; for envs in
    turns the probability of a wrong action."""
    extent: float = math.inf
    """Progress at which the script stops; if negative, it never plays."""
    rests: bool = False
    """Whether the player then does nothing (if the env has such an action) rather than random actions."""


Script = Callable[[FloatArray], FloatArray]
"""Function from an observation of an env in steps to an action."""
Choose = Callable[[Any, float], Any]
"""Function from an observation and the progress so far to an answer; None if the player cannot play this env."""


def players(env: Env) -> dict[str, Callable[[int], Episode | None]]:
    """Returns the players of `env`, random and scripted; each plays one episode of a seed, or returns None."""
    names = {StepEnv: ("random play", "its script"), ChunkEnv: ("random", "script"), TurnEnv: ("random", "expert")}
    random, script = next(pair for kind, pair in names.items() if isinstance(env, kind))
    noise = _CHUNK_NOISE if isinstance(env, ChunkEnv) else 0.0
    found = {random: lambda seed: play(env, seed, player_of(env, seed, Style(extent=-1.0)))}
    if not isinstance(env, TurnEnv) or env.has_expert:
        found[script] = lambda seed: play(env, seed, player_of(env, seed, Style(noise=noise)))
    return found


def player_of(env: Env, seed: int, style: Style, script: Script | None = None) -> Choose:
    """Returns a player of `env` in that style; the seed decides its random choices, and `script` replaces the own
    script of envs in steps.
    """
    if isinstance(env, StepEnv):
        scripted, aimless = _step_player(env, seed, style, script or env.scripted_action)
    elif isinstance(env, ChunkEnv):
        scripted, aimless = _chunk_player(env, seed, style)
    else:
        assert isinstance(env, TurnEnv), "there are three kinds"
        scripted, aimless = _turn_player(env, seed, style)
    has_arrived = style.extent < 0

    def choose(obs: Any, progress: float) -> Any:
        nonlocal has_arrived
        has_arrived = has_arrived or progress >= style.extent
        return (aimless if has_arrived else scripted)(obs)

    return choose


def _step_player(
    env: StepEnv, seed: int, style: Style, script: Callable[[FloatArray], FloatArray | None]
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    rng = np.random.default_rng(seed)
    shape = env.action_space.shape
    held = np.zeros(shape) if style.rests else rng.uniform(-1, 1, shape)

    def scripted(obs: FloatArray) -> FloatArray | None:
        action = script(obs)
        if action is None:
            return None
        # without noise nothing is drawn, so that later random choices do not depend on how long the script played
        noise = style.noise * rng.standard_normal(shape) if style.noise else 0.0
        return np.clip(action + noise, -1, 1).astype(np.float32)

    def aimless(_: FloatArray) -> FloatArray:
        nonlocal held
        if not style.rests and rng.random() >= _HOLD:
            held = rng.uniform(-1, 1, shape)
        return held.astype(np.float32)

    return scripted, aimless


def _chunk_player(env: ChunkEnv, seed: int, style: Style) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    rng = np.random.default_rng(seed)
    shape = (env.chunk_steps, len(env.action_low))
    # the middle of an action's range is no movement
    still = np.broadcast_to((env.action_low + env.action_high) / 2, shape).astype(np.float32)
    return (
        lambda _: env.scripted_chunk(style.noise, rng),
        lambda _: still if style.rests else rng.uniform(env.action_low, env.action_high, shape).astype(np.float32),
    )


def _turn_player(env: TurnEnv, seed: int, style: Style) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    expert, random = ScriptedExpert(style.noise), RandomPlayer()
    expert.begin(seed)
    random.begin(seed)
    return (
        lambda turn: expert.reply(env, turn).text if env.has_expert else None,
        lambda turn: random.reply(env, turn).text,
    )


def play(env: Env, seed: int, choose: Choose, after_success: int | None = None) -> Episode | None:
    """Plays one episode with the answers of `choose`; returns None if it has no answer.

    Args:
        env: env of any kind.
        seed: seed of the episode; for envs in chunks, the number of its initial state.
        choose: the player.
        after_success: steps, turns or chunks to play after a success, >= 0; None plays on until the env ends the
            episode.
    """
    is_left = was_success = False
    num_after = 0

    def act(slots: Sequence[Slot]) -> list[Any]:
        nonlocal is_left, was_success, num_after
        (slot,), info = slots, slots[0].infos[-1]
        was_success |= bool(info["success"])
        num_after += was_success and bool(slot.answers)
        is_left = after_success is not None and num_after > after_success
        return [None if is_left else choose(slot.seen[-1], float(info["progress"]))]

    (slot,) = play_slots([Slot(env)], [seed], act)
    return record(slot) if slot.is_over or is_left else None


def replay(env: Env, seed: int, answers: Iterable[Any]) -> Episode:
    """Plays the episode of a seed with these answers, in the form that the env takes, until they or the episode end."""
    slot = Slot(env)
    slot.begin(seed)
    for answer in answers:
        if slot.play(answer):
            break
    return record(slot)


def record(slot: Slot) -> Episode:
    """Returns the record of a slot's episode as far as it was played."""
    counts = [len(snapshots) for snapshots in slot.snapshots]
    successes = tuple(bool(info["success"]) for info in slot.infos)
    snapshots, looked = np.concatenate(slot.snapshots), np.cumsum(counts) - 1
    is_named = isinstance(slot.env, PixelEnv) and isinstance(slot.env, StepEnv)
    return Episode(
        seed=slot.start,
        snapshots=snapshots,
        # a chunk has a snapshot and a reward for each of its steps, but one progress, at its end
        progress=np.array([info["progress"] for info in slot.infos], np.float32).repeat(counts),
        rewards=np.concatenate([np.zeros(0, np.float32), *slot.env_rewards]).astype(np.float32),
        is_success=any(successes),
        actions=tuple(answer for answer in slot.answers if isinstance(answer, str)),
        goal=slot.goal,
        looked=tuple(looked.tolist()),
        successes=successes,
        answers=tuple(slot.answers),
        states=np.stack(slot.seen) if is_named else snapshots[looked],
    )


def reward_ranks(episode: Episode, met: FloatArray) -> FloatArray:
    """Returns [T + 1], a progress for envs that have none: the rank of the reward that led to each moment among the
    rewards `met` [M], which rise, as a share from 0 to 1; equal rewards share the middle of their ranks. The start has
    that of the first reward.

    Ranks and not values: one bonus at the end would make all other rewards look alike.
    """
    below, upto = (np.searchsorted(met, episode.rewards, side) for side in ("left", "right"))
    ranks = np.clip((below + upto - 1) / 2 / max(len(met) - 1, 1), 0, 1).astype(np.float32)
    return np.concatenate([ranks[:1], ranks])
