"""Plays episodes into a folder of demonstrations: of envs in turns by a player, of envs in chunks by their script.

Every episode has random numbers of its own, decided by the seed and by its place: a collection that was stopped goes on
as if it had not been, and a run that plays by itself sees what `rlvlm collect` writes down with the same seed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.episodes import Turn
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.folder import DemonstrationFolder
from rlvlm.demonstrations.records import EpisodeRecord, StepRecord
from rlvlm.envs.env import FIRST_HELD_OUT_STATE, ChunkEnv, TurnEnv
from rlvlm.envs.playing import Act, Slot
from rlvlm.envs.playing import play as play_slots
from rlvlm.labels.images import image_digest

_REMEMBERED = 256  # thoughts, of which a wrong one is taken


@dataclass(frozen=True, slots=True)
class PlayerReply:
    """A reply, and whether it was spoilt on purpose."""

    text: str
    is_noise: bool = False


class Demonstrator(Protocol):
    """Anything that answers turns: a script, a policy, a VLM behind an API."""

    name: str
    """Kept with each episode."""

    def begin(self, seed: int) -> None:
        """An episode of that seed begins."""
        ...

    def reply(self, env: TurnEnv, turn: Turn) -> PlayerReply:
        """The answer to `turn`, which `env` waits for."""
        ...


def acting(player: Demonstrator) -> Act[Slot]:
    """`player` as an actor in a single slot of an env in turns."""

    def act(slots: Sequence[Slot]) -> list[PlayerReply]:
        (slot,) = slots
        if not slot.answers:
            player.begin(slot.start)
        return [player.reply(slot.env, slot.shown)]

    return act


class ScriptedExpert:
    """The env's own expert, with a share of mistakes that gives learning by trial something to do.

    A wrong action is another legal one; a wrong thought is one that belonged to an earlier turn. Equal seeds make equal
    mistakes, as long as the episodes are played in the same order.

    Args:
        p_wrong_action: probability of a wrong action.
        p_wrong_thought: probability of a wrong thought.
    """

    def __init__(self, p_wrong_action: float = 0.0, p_wrong_thought: float = 0.0) -> None:
        for name, value in (("p_wrong_action", p_wrong_action), ("p_wrong_thought", p_wrong_thought)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        self.name = "expert"
        if p_wrong_action or p_wrong_thought:
            self.name = f"expert-wrong-actions-{p_wrong_action:g}-thoughts-{p_wrong_thought:g}"
        self._p_wrong_action, self._p_wrong_thought = p_wrong_action, p_wrong_thought
        self._noise = np.random.default_rng(0)
        self._thoughts: deque[str] = deque(maxlen=_REMEMBERED)

    def begin(self, seed: int) -> None:
        """Mistakes depend on the seed."""
        self._noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))

    def reply(self, env: TurnEnv, turn: Turn) -> PlayerReply:
        """The expert's reply, or a spoilt one."""
        action, thought = env.expert_action(), env.expert_thought()
        others = [other for other in env.legal() if other != action]
        is_wrong_action = bool(others) and self._noise.random() < self._p_wrong_action
        if is_wrong_action:
            action = int(self._noise.choice(others))
        earlier = sorted({known for known in self._thoughts if known != thought})
        is_wrong_thought = bool(earlier) and self._noise.random() < self._p_wrong_thought
        self._thoughts.append(thought)  # the right one: mistakes are not repeated as if they had been thoughts
        if is_wrong_thought:
            thought = earlier[int(self._noise.integers(len(earlier)))]
        return PlayerReply(env.action_text(action, thought), is_wrong_action or is_wrong_thought)


class RandomPlayer:
    """Any legal action, without a thought: what a task gives to those who cannot play it."""

    name = "random"

    def begin(self, seed: int) -> None:
        """Actions depend on the seed."""
        self._noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(2,)))

    def reply(self, env: TurnEnv, turn: Turn) -> PlayerReply:
        """A reply that can be read."""
        return PlayerReply(env.action_text(int(self._noise.choice(env.legal()))))


FIRST_SEED = 2**33
"""Demonstrations start from seeds from here on, which neither training nor evaluation uses."""
Log = Callable[[str], None]
_STREAM = 6  # of a seed's random numbers; others are for policies and judges
_LOG_EVERY = 50  # demonstrations between lines about them
_MOST_SKIPPED = 50  # initial states without a script, one after the other, after which the env is taken to have none
_HOPELESS = 20  # failures without a success after which no more is tried
_CHANCES = 4  # episodes that the script may play for each one that is wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbation:
    """What happens to the script of an env in chunks, so that its episodes show more than the straight way."""

    noise: float = 0.0
    """Standard deviation of what is added to its actions, scaled to [-1, 1]."""
    p_perturb: float = 0.0
    """Probability that an earlier chunk of the episode is carried out again in place of the script's. A thing is missed
    or lost by it, and the script begins again; the chunks' `perturbed` say which they were."""

    @property
    def name(self) -> str:
        """A name for who plays so, as of a `Demonstrator`."""
        astray = f"-perturb-{self.p_perturb:g}" if self.p_perturb else ""
        return (f"script-noise-{self.noise:g}" if self.noise else "script") + astray


def collect(
    env: TurnEnv | ChunkEnv,
    player: Demonstrator | Perturbation,
    folder: DemonstrationFolder,
    wanted: int,
    seed: int,
    *,
    keeps_images: bool = True,
    log: Log = lambda line: None,
) -> int:
    """Plays until the folder has `wanted` episodes of this player and seed, and returns how many were new.

    What is there already is not played again, so that a collection that was stopped goes on.

    Args:
        env: of the folder's task.
        player: plays; what it writes is kept as it is.
        folder: of the task.
        wanted: as of `play_episodes`; at most 10 million.
        seed: as of `play_episodes`; 0 to 999 for turns.
        keeps_images: whether each turn's image is written beside its snapshot, which chat formats need; those of chunks
            are drawn from their states.
        log: takes a line.

    Raises:
        ValueError: seed or number is out of range.
        UsageError: as of `play_episodes`.
        OSError: the disk refused.
    """
    # each seed has ten million starts of its own, from `FIRST_SEED` on
    if isinstance(env, TurnEnv) and not (0 <= seed < 1_000 and 0 <= wanted <= 10**7):
        raise ValueError(f"0 <= seed < 1000 and 0 <= episodes <= 10 million are wanted, got {seed} and {wanted}")
    known = {record.id: record.success for record in folder.episodes()}
    num_new = 0
    for record in play_episodes(env, player, folder.task, wanted=wanted, seed=seed, known=known, log=log):
        images: Frames = np.empty((0, 0, 0, 3), np.uint8)
        if keeps_images and isinstance(env, TurnEnv):  # drawn once the episode is over: from its snapshots, in one go
            images = env.draw(record.arrays["snapshots"])
            *digests, last = [(image_digest(image),) for image in images]
            steps = tuple(replace(step, pictures=kept) for step, kept in zip(record.steps, digests, strict=True))
            record = replace(record, steps=steps, last_pictures=last)
        folder.add(record, images)
        num_new += 1
    return num_new


def play_episodes(
    env: TurnEnv | ChunkEnv,
    player: Demonstrator | Perturbation,
    task: str,
    *,
    wanted: int,
    seed: int,
    known: Mapping[str, bool] | None = None,
    log: Log = lambda line: None,
) -> Iterator[EpisodeRecord]:
    """Yields episodes until there are `wanted` of them; of an env in chunks, failures too, until `wanted` succeeded.

    An env of several tasks may have a script for some of them; the others are not demonstrated, which is logged.

    Args:
        env: of the task; one in chunks has exact physics, and its episodes end at success.
        player: of an env in turns who plays it; of one in chunks what happens to its script.
        task: its name.
        wanted: episodes, or successes, those of `known` among them.
        seed: decides starts, and perturbation; episode i of turns starts from `FIRST_SEED + 10**7 * seed + i`.
        known: success of the episodes that have been played already, by id: they are counted, and not played again.
        log: takes a line.

    Raises:
        UsageError: the env in chunks has no script, or the script fails most of the time.
    """
    is_turns = isinstance(env, TurnEnv)
    without_script: set[str] = set()
    successes = failures = num_skipped = 0
    for place in count():
        played = successes + failures
        if (played if is_turns else successes) >= wanted:  # of chunks only successes are learned from
            break
        # a script that mostly fails would play for ever
        if not is_turns and (played >= _CHANCES * wanted or (failures >= _HOPELESS and not successes)):
            raise UsageError(
                f"the script succeeded in {successes} of {played} episodes, {wanted} are wanted",
                "ask for fewer demonstrations, for less noise, for a smaller p-perturb, or for longer episodes with "
                "--env.episode-steps",
            )
        start = FIRST_SEED + 10**7 * seed + place
        name = f"{player.name}-{start}" if is_turns else f"{player.name}-{seed}-{place}"
        if known and name in known:
            # counted as when it was played, so that a resumed collection stops where an uninterrupted one does
            successes, failures = successes + known[name], failures + (not known[name])
            continue
        if isinstance(env, TurnEnv):
            assert not isinstance(player, Perturbation), "a script of chunks plays no turns"
            episode = play(env, player, task, start)
        else:
            assert isinstance(player, Perturbation), "only its script plays an env in chunks"
            # of this episode alone: it does not matter which others were played before
            rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_STREAM, place)))
            episode = _play_chunks(env, task, name, player, rng)
        if isinstance(episode, str):  # the instruction that there is no script for
            without_script.add(episode)
            num_skipped += 1
            if num_skipped >= _MOST_SKIPPED and not played:
                fix = "choose a policy that is trained, or import demonstrations with rlvlm data import"
                raise UsageError(f"no script could demonstrate: {', '.join(sorted(without_script))}", fix)
            continue
        successes, failures = successes + episode.success, failures + (not episode.success)
        if episode.success and successes % _LOG_EVERY == 0:
            log(f"demonstrations: {successes} of {wanted}, {failures} failures" + ("" if is_turns else " left out"))
        yield episode
    if without_script:
        log(f"not demonstrated, for want of a script: {', '.join(sorted(without_script))}")


def play(env: TurnEnv, player: Demonstrator, task: str, seed: int) -> EpisodeRecord:
    """One whole episode of turns, without its images."""
    (slot,) = play_slots([Slot(env)], [seed], acting(player))
    columns = zip(slot.seen, slot.answers, slot.rewards, slot.infos[1:], strict=False)  # one more is seen
    steps = tuple(
        StepRecord(
            prompt=turn.prompt,
            text=reply.text,
            action=None if info["is_invalid"] else env.action_names[info["action"]],
            env_reward=reward,
            success=info["success"],
            progress=info["progress"],
            is_noise=reply.is_noise,
        )
        for turn, reply, reward, info in columns
    )
    arrays = {"snapshots": np.concatenate(slot.snapshots)}
    return _record(slot, task, f"{player.name}-{seed}", player.name, steps, arrays)


def _play_chunks(
    env: ChunkEnv, task: str, name: str, perturbation: Perturbation, rng: np.random.Generator
) -> EpisodeRecord | str:
    """An episode of the script; where there is no script for what is asked, the instruction."""
    perturbed: list[bool] = []

    def act(slots: Sequence[Slot]) -> list[FloatArray | None]:
        before, p_perturb = slots[0].answers, perturbation.p_perturb
        chunk = env.scripted_chunk(perturbation.noise, rng)
        if chunk is None:
            return [None]
        perturbed.append(bool(p_perturb and before and rng.random() < p_perturb))
        # the script's own movements at a wrong moment: within reach, and likely to undo something
        return [before[rng.integers(len(before))] if perturbed[-1] else chunk]

    (slot,) = play_slots([Slot(env)], [int(rng.integers(FIRST_HELD_OUT_STATE))], act)
    if not slot.is_over:
        return slot.goal
    arrays = {
        "snapshots": np.concatenate([obs.snapshots for obs in slot.seen]),
        "proprio": np.concatenate([obs.proprio for obs in slot.seen[:-1]]),
        "actions": np.stack(slot.answers),
        "steps": np.array([info["steps"] for info in slot.infos[1:]], np.int64),
        **({"perturbed": np.array(perturbed)} if perturbation.p_perturb else {}),
    }
    return _record(slot, task, name, perturbation.name, (), arrays)


def _record(
    slot: Slot, task: str, name: str, player: str, steps: tuple[StepRecord, ...], arrays: Mapping[str, NDArray[Any]]
) -> EpisodeRecord:
    """The episode that ended in `slot`, by `name`; of turns with `steps`."""
    return EpisodeRecord(
        id=name,
        task=task,
        kind="turns" if steps else "chunks",
        seed=slot.start,
        player=player,
        goal=slot.goal,
        env_return=float(sum(slot.rewards)),
        success=bool(slot.infos[-1]["success"]),
        terminated=slot.is_terminated,
        steps=steps,
        arrays=arrays,
    )
