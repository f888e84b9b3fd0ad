"""Items that a policy can play and scripts rarely show: attempts, and states along a line to the goal and beyond it.

Scripts either solve a task or stop; a policy that follows a judge goes where neither went. Attempts are episodes of the
policy that a run starts from, the same with one dimension of its actions disturbed, and a success's actions played from
another start: the arm does everything, and the object nothing. The line shows where a judge's best lies.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rlvlm.demonstrations.playing import Choose, Episode, Script, Style, play, player_of, record, replay
from rlvlm.envs.env import FIRST_HELD_OUT_STATE, ChunkEnv, Env, StepEnv, TurnEnv
from rlvlm.envs.playing import Slot
from rlvlm.judge_bench.items import MIN_GAP, Item

START, DISTURBED, WITHOUT_OBJECT = "start policy", "disturbed", "without the object"
ATTEMPTS = (START, DISTURBED, WITHOUT_OBJECT)
"""Cases of attempts."""
LINE = "line"
"""Case of states along a line to the goal, and of their neighbouring pairs."""
ATTEMPTS_ASKED, LINE_ASKED = 24, 40
"""Attempts of each kind, and states along lines, that a rehearsal asks about."""
LINE_STATES = 10
"""States of each line: before the success, at it, and beyond it."""
_BEFORE, _AT = 6, 2
"""States of a line before the success, from half of the time to it on, and at it; the others lie beyond."""
_FIRST_SEED = 2**35
"""First seed of these episodes: beside those of the bench's other items, and of any run."""
_ELSEWHERE = 4
"""Other starts from which a success's actions are played."""
_GAINED = 0.5
"""Share of the success's own gain in progress from which on a motion has met its object after all."""
_TO_GOAL = 3
"""States short of the goal that are compared with it."""
_BEGUN = 0.1
"""Share of a line's gain in progress up to which it has not begun."""
_BEYOND = 0.3
"""Share of a line's steps for which the last motion goes on after the success."""

Player = Callable[[Env[Any, Any], int], Choose]
"""Makes the player of an episode in an env, by the episode's number."""


def attempt_items(
    env: Env, successes: Sequence[Episode], count: int, seed: int, start: Player | None = None
) -> list[Item]:
    """Returns up to `count` attempts of each of `ATTEMPTS`, as videos with the simulator's truth.

    Args:
        env: env that plays them.
        successes: episodes that ended in success, whose actions are played elsewhere.
        count: number of each case; 0 for none.
        seed: seed of the episodes.
        start: the policy that a run starts from; None plays at random, and disturbs the env's script.
    """
    if not count:
        return []
    first = _first(env, seed)
    found = []
    for number in range(count):
        begun = first + number
        policy = start or (lambda own, episode: player_of(own, episode, Style(extent=-1.0)))
        disturbed = start or (lambda own, episode: player_of(own, episode, Style()))
        choosers = {START: policy(env, begun), DISTURBED: _disturbed(env, number, disturbed(env, begun), successes)}
        for case, choose in choosers.items():
            if (episode := play(env, begun, choose, after_success=0)) is not None:
                found.append(_video(case, episode))
    moved = _without_object(env, successes, count, first + count)
    return sorted(found, key=lambda item: ATTEMPTS.index(item.case)) + [_video(WITHOUT_OBJECT, each) for each in moved]


def _first(env: Env, seed: int) -> int:
    return (FIRST_HELD_OUT_STATE + 5_000 if isinstance(env, ChunkEnv) else _FIRST_SEED) + 10_000 * seed


def _video(case: str, episode: Episode) -> Item:
    moments = list(episode.looked)
    return Item(
        kind="video",
        case=case,
        goal=episode.goal,
        sides=(episode.snapshots[moments],),
        truth=(float(episode.progress[-1]),),
        progress=tuple(episode.progress[moments].tolist()),
        success=episode.successes[-1],
    )


def _disturbed(env: Env, number: int, choose: Choose, successes: Sequence[Episode]) -> Choose:
    """Returns the player with one dimension of its actions held at a random value; of replies, one action replaced.

    Only dimensions that successes use are disturbed, in turn: a table ignores five of an arm's seven.
    """
    rng = np.random.default_rng((_FIRST_SEED, number))
    if isinstance(env, TurnEnv):
        wrong, instead = rng.permutation(len(env.action_names))[:2] if len(env.action_names) > 1 else (0, 0)

        def reply(obs: Any, progress: float) -> Any:
            answer = choose(obs, progress)
            if answer is not None and env.read(answer).action == wrong and instead in env.legal():
                return env.action_text(int(instead))
            return answer

        return reply
    if isinstance(env, ChunkEnv):
        low, high = env.action_low, env.action_high
    else:
        assert isinstance(env, StepEnv), "there are three kinds"
        low = np.full(env.action_space.shape, -1, np.float32)
        high = -low
    used = np.concatenate([np.reshape(answer, (-1, len(low))) for episode in successes for answer in episode.answers])
    moving = np.flatnonzero(np.ptp(used, axis=0) > 0)
    dimension = int(moving[number % len(moving)]) if len(moving) else number % len(low)
    held = rng.uniform(low[dimension], high[dimension])

    def act(obs: Any, progress: float) -> Any:
        answer = choose(obs, progress)
        if answer is None:
            return None
        changed = np.array(answer, np.float32)
        changed[..., dimension] = held
        return changed

    return act


def _without_object(env: Env, successes: Sequence[Episode], count: int, first: int) -> list[Episode]:
    """Returns up to `count` replays of successes from other starts that left the object behind, and of these the ones
    that end most like their success.
    """
    known = [episode for episode in successes if episode.answers and episode.is_success][:count]
    found: list[tuple[float, Episode]] = []
    for number, source in enumerate(known):
        spread = np.stack([episode.snapshots[-1] for episode in known]).std(0)
        for place in range(_ELSEWHERE):
            episode = replay(env, first + _ELSEWHERE * number + place, source.answers)
            gained = float(episode.progress[-1] - episode.progress[0])
            if not episode.is_success and gained < _GAINED * float(source.progress[-1] - source.progress[0]):
                gap = np.abs(episode.snapshots[-1] - source.snapshots[-1])[spread > 0] / spread[spread > 0]
                found.append((float(gap.mean()) if len(gap) else 0.0, episode))
    return [episode for _, episode in sorted(found, key=lambda pair: pair[0])[:count]]


def line_items(env: Env, count: int, seed: int) -> list[Item]:
    """Returns about `count` states along lines to the goal as videos, and pairs of them: neighbours, and the goal with
    the last states short of it.

    A line is the script's way from half of the time to its success, and beyond it: the script's last motion goes on.
    Empty where no script succeeds.

    Args:
        env: env that plays them; one that ends at success shows nothing beyond it.
        count: number of states; 0 for none.
        seed: seed of the episodes.
    """
    found: list[Item] = []
    first = _first(env, seed) + 2_000
    for track in range(count):  # a short way gives few states
        episode = walk(env, first + track, Style()) if sum(item.is_video for item in found) < count else None
        if episode is None:
            break
        if not episode.is_success:
            continue
        came, last = episode.successes.index(True), len(episode.successes) - 1  # every step is a moment here
        gained = episode.progress[: came + 1] - episode.progress[0]
        # a hand that has not met its object yet is not on the way
        begun = max(came // 2, int(np.flatnonzero(gained <= _BEGUN * gained[-1])[-1]))
        parts = (
            np.linspace(begun, came - 1, _BEFORE),
            np.linspace(came, min(came + 1, last), _AT),
            np.linspace(came + 1, last, LINE_STATES - _BEFORE - _AT + 1)[1:],
        )
        moments = np.unique(np.concatenate(parts).round().astype(int).clip(0, last)).tolist()
        for moment in moments:
            item = Item(
                kind="video",
                case=LINE,
                goal=episode.goal,
                sides=(episode.snapshots[: moment + 1],),
                truth=(float(episode.progress[moment]),),
                progress=tuple(episode.progress[: moment + 1].tolist()),
                success=episode.successes[moment],
                track=track,
            )
            found.append(item)
        short = [moment for moment in moments if moment < came]
        for left, right in dict.fromkeys([*pairwise(moments), *((moment, came) for moment in short[-_TO_GOAL:])]):
            truth = (_worth(episode, left), _worth(episode, right))
            if abs(truth[1] - truth[0]) >= MIN_GAP:
                sides = (episode.snapshots[[left]], episode.snapshots[[right]])
                paths = (episode.snapshots[: left + 1], episode.snapshots[: right + 1])
                pair = Item(kind="pair", case=LINE, goal=episode.goal, sides=sides, paths=paths, truth=truth)
                found.append(pair)
    return found


def _worth(episode: Episode, moment: int) -> float:
    return 1.0 if episode.successes[moment] else float(episode.progress[moment])


def walk(env: Env, start: int, style: Style, script: Script | None = None) -> Episode | None:
    """Returns the episode of the env's script, or of `script` for envs in steps, one step after the other, also in
    chunks, continued beyond its success by its last motion; None if there is no script.
    """
    slot = Slot(env)
    slot.begin(start)
    choose = player_of(env, start, style, script)
    steps: list[Any] = []
    beyond = 0
    while not slot.is_over:
        if not steps:
            answer = choose(slot.seen[-1], float(slot.infos[-1]["progress"]))
            if answer is None:
                return None
            steps = list(answer[:, None]) if isinstance(env, ChunkEnv) else [answer]
        if slot.infos[-1]["success"] or beyond:
            if not beyond:
                steps = [slot.answers[-1]] * max(2, round(_BEYOND * len(slot.answers))) if slot.answers else []
                beyond = len(steps)
            if not steps:
                break
        slot.play(steps.pop(0))
        if beyond and not steps:
            break
    return record(slot)
