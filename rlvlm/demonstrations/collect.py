"""Plays episodes into a folder of demonstrations: a player plays envs in turns, a script plays envs in chunks.

Each episode has its own random numbers, decided by the seed and its index: a resumed collection equals an uninterrupted
one, and a run that plays its own demonstrations sees the same as `rlvlm collect` writes with the same seed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

import numpy as np

from rlvlm.core.episodes import Turn
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.folder import DemonstrationFolder
from rlvlm.demonstrations.records import EpisodeRecord, StepRecord
from rlvlm.envs.env import FIRST_HELD_OUT_STATE, ChunkEnv, TurnEnv
from rlvlm.envs.playing import Act, Slot
from rlvlm.envs.playing import play as play_slots
from rlvlm.labels.images import image_digest

_REMEMBERED = 256  # recent thoughts, from which a wrong one is taken


@dataclass(frozen=True, slots=True)
class PlayerReply:
    """A reply, and whether it was corrupted on purpose."""

    text: str
    is_noise: bool = False


class Demonstrator(Protocol):
    """A player of envs in turns: a script, a policy, a VLM behind an API."""

    name: str
    """Name stored with each episode."""

    def begin(self, seed: int) -> None:
        """Prepares for an episode of that seed."""
        ...

    def reply(self, env: TurnEnv, turn: Turn) -> PlayerReply:
        """Returns the answer to `turn`, the present turn of `env`."""
        ...


def acting(player: Demonstrator) -> Act[Slot]:
    """Returns `player` as an actor in a single slot of an env in turns."""

    def act(slots: Sequence[Slot]) -> list[PlayerReply]:
        (slot,) = slots
        if not slot.answers:
            player.begin(slot.start)
        return [player.reply(slot.env, slot.shown)]

    return act


class ScriptedExpert:
    """The env's own expert, with a share of mistakes from which learning by trial can improve.

    A wrong action is another legal one; a wrong thought is one from an earlier turn. Equal seeds make equal mistakes if
    the episodes are played in the same order.

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
        """Seeds the mistakes of an episode."""
        self._noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))

    def reply(self, env: TurnEnv, turn: Turn) -> PlayerReply:
        """Returns the expert's reply, or a corrupted one."""
        action, thought = env.expert_action(), env.expert_thought()
        others = [other for other in env.legal() if other != action]
        is_wrong_action = bool(others) and self._noise.random() < self._p_wrong_action
        if is_wrong_action:
            action = int(self._noise.choice(others))
        earlier = sorted({known for known in self._thoughts if known != thought})
        is_wrong_thought = bool(earlier) and self._noise.random() < self._p_wrong_thought
        self._thoughts.append(thought)  # the right one: mistakes are not reused as thoughts
        if is_wrong_thought:
            thought = earlier[int(self._noise.integers(len(earlier)))]
        return PlayerReply(env.action_text(action, thought), is_wrong_action or is_wrong_thought)


class RandomPlayer:
    """Plays random legal actions without a thought: the baseline of a player without any skill."""

    name = "random"

    def begin(self, seed: int) -> None:
        """Seeds the actions of an episode."""
        self._noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(2,)))

    def reply(self, env: TurnEnv, turn: Turn) -> PlayerReply:
        """Returns a well-formed reply with a random legal action."""
        return PlayerReply(env.action_text(int(self._noise.choice(env.legal()))))


FIRST_SEED = 2**33
"""First seed of demonstrations; neither training nor evaluation uses seeds from here on."""
Log = Callable[[str], None]
_STREAM = 6  # random stream of a seed; others are for policies and judges
_LOG_EVERY = 50  # demonstrations between progress messages
_MOST_SKIPPED = 50  # consecutive initial states without a script after which the env counts as having none
_HOPELESS = 20  # failures without a success after which collection gives up
_CHANCES = 4  # episodes that the script may play per wanted one


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """Disturbances of an env's script in chunks, so that its episodes show more than the ideal path."""

    noise: float = 0.0
    """Standard deviation of the noise added to its actions, scaled to [-1, 1]."""
    p_perturb: float = 0.0
    """Probability that an earlier chunk of the episode is repeated in place of the script's. It makes the script miss
    or lose a thing and start over; `perturbed` marks these chunks."""

    @property
    def name(self) -> str:
        """Name under which these episodes are stored, like a `Demonstrator`'s."""
        astray = f"-perturb-{self.p_perturb:g}" if self.p_perturb else ""
        return (f"script-noise-{self.noise:g}" if self.noise else "script") + astray


def collect(
    env: TurnEnv | ChunkEnv,
    player: Demonstrator | Disturbance,
    folder: DemonstrationFolder,
    wanted: int,
    seed: int,
    *,
    keeps_images: bool = True,
    log: Log = lambda line: None,
) -> int:
    """Plays until the folder has `wanted` episodes of this player and seed; returns how many were added.

    Episodes already in the folder are not played again, so an interrupted collection resumes.

    Args:
        env: env of the folder's task.
        player: player; its replies are stored unchanged.
        folder: folder of the task.
        wanted: see `play_episodes`; at most 10 million.
        seed: see `play_episodes`; 0 to 999 for turns.
        keeps_images: whether each turn's image is written beside its snapshot, as chat formats need; images of chunks
            are drawn from their states.
        log: receives progress messages.

    Raises:
        ValueError: seed or number is out of range.
        UsageError: see `play_episodes`.
        OSError: writing failed.
    """
    # each seed has ten million starts of its own, from `FIRST_SEED` on
    if isinstance(env, TurnEnv) and not (0 <= seed < 1_000 and 0 <= wanted <= 10**7):
        raise ValueError(f"0 <= seed < 1000 and 0 <= episodes <= 10 million are wanted, got {seed} and {wanted}")
    known = {record.id: record.success for record in folder.episodes()}
    num_new = 0
    for record in play_episodes(env, player, folder.task, wanted=wanted, seed=seed, known=known, log=log):
        images: Frames = np.empty((0, 0, 0, 3), np.uint8)
        if keeps_images and isinstance(env, TurnEnv):  # drawn once the episode is over, from its snapshots, all at once
            images = env.draw(record.arrays["snapshots"])
            *digests, last = [(image_digest(image),) for image in images]
            steps = tuple(replace(step, pictures=kept) for step, kept in zip(record.steps, digests, strict=True))
            record = replace(record, steps=steps, last_pictures=last)
        folder.add(record, images)
        num_new += 1
    return num_new


def play_episodes(
    env: TurnEnv | ChunkEnv,
    player: Demonstrator | Disturbance,
    task: str,
    *,
    wanted: int,
    seed: int,
    known: Mapping[str, bool] | None = None,
    log: Log = lambda line: None,
) -> Iterator[EpisodeRecord]:
    """Yields episodes until there are `wanted`; for envs in chunks also failures, until `wanted` succeeded.

    An env of several tasks may have scripts for only some of them; the others are skipped, which is logged.

    Args:
        env: env of the task; in chunks, with exact physics and episodes that end at success.
        player: player of an env in turns; for one in chunks, the disturbances of its script.
        task: name of the task.
        wanted: number of episodes, or of successes, including those in `known`.
        seed: decides starts and disturbances; episode i of turns starts from `FIRST_SEED + 10**7 * seed + i`.
        known: success by id of the episodes played before: they are counted, and not played again.
        log: receives progress messages.

    Raises:
        UsageError: the env in chunks has no script, or the script mostly fails.
    """
    is_turns = isinstance(env, TurnEnv)
    without_script: set[str] = set()
    successes = failures = num_skipped = 0
    for place in count():
        played = successes + failures
        if (played if is_turns else successes) >= wanted:  # of episodes in chunks only successes are learned from
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
            # counted in the order of play, so that a resumed collection stops where an uninterrupted one does
            successes, failures = successes + known[name], failures + (not known[name])
            continue
        if isinstance(env, TurnEnv):
            assert not isinstance(player, Disturbance), "a script of chunks plays no turns"
            episode = play(env, player, task, start)
        else:
            assert isinstance(player, Disturbance), "only its script plays an env in chunks"
            # a generator for this episode alone, independent of the episodes played before
            rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_STREAM, place)))
            episode = _play_chunks(env, task, name, player, rng)
        if isinstance(episode, str):  # an instruction without a script
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
    """Plays one whole episode of turns, without its images."""
    (slot,) = play_slots([Slot(env)], [seed], acting(player))
    columns = zip(slot.seen, slot.answers, slot.rewards, slot.infos[1:], strict=False)  # `seen` has one more entry
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
    env: ChunkEnv, task: str, name: str, disturbance: Disturbance, rng: np.random.Generator
) -> EpisodeRecord | str:
    """Plays an episode by the script; returns the instruction if there is no script for it."""
    perturbed: list[bool] = []

    def act(slots: Sequence[Slot]) -> list[FloatArray | None]:
        before, p_perturb = slots[0].answers, disturbance.p_perturb
        chunk = env.scripted_chunk(disturbance.noise, rng)
        if chunk is None:
            return [None]
        perturbed.append(bool(p_perturb and before and rng.random() < p_perturb))
        # one of the script's own movements at a wrong moment: within reach, and likely to undo something
        return [before[rng.integers(len(before))] if perturbed[-1] else chunk]

    (slot,) = play_slots([Slot(env)], [int(rng.integers(FIRST_HELD_OUT_STATE))], act)
    if not slot.is_over:
        return slot.goal
    arrays = {
        "snapshots": np.concatenate([obs.snapshots for obs in slot.seen]),
        "proprio": np.concatenate([obs.proprio for obs in slot.seen[:-1]]),
        "actions": np.stack(slot.answers),
        "steps": np.array([info["steps"] for info in slot.infos[1:]], np.int64),
        **({"perturbed": np.array(perturbed)} if disturbance.p_perturb else {}),
    }
    return _record(slot, task, name, disturbance.name, (), arrays)


def _record(
    slot: Slot, task: str, name: str, player: str, steps: tuple[StepRecord, ...], arrays: Mapping[str, np.ndarray]
) -> EpisodeRecord:
    """Returns the episode that ended in `slot`, as played by `name`; of turns with `steps`."""
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
