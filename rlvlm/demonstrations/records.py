"""What a folder of demonstrations keeps of an episode, whatever kind of env it was played in."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.episodes import Observations, Reply, TokenEpisode
from rlvlm.envs.env import TurnEnv
from rlvlm.envs.replies import read_reply


class CorruptRecord(ValueError):  # noqa: N818 - named for what is found
    """A line that is no record of ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step of an episode in words. Episodes in chunks have none: theirs are arrays."""

    prompt: str
    """The prompt of the turn."""
    text: str
    """The player's reply; untrusted."""
    action: str | None
    """The action that was read in it; None where none could be."""
    env_reward: float
    success: bool
    """The env's own success test, after the step."""
    progress: float
    """In [0, 1], after the step."""
    pictures: tuple[str, ...] = ()
    """Digests of what the player saw; empty where images were not kept."""
    is_noise: bool = False
    """Whether the player was made to write something else than it would have."""
    quality: float | None = None
    """Somebody's score of the step in [0, 1], kept with it; None where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRecord:
    """One episode."""

    id: str
    """Unique in its folder, and part of a file's name."""
    task: str
    kind: str
    """`turns` or `chunks`, as the task's."""
    seed: int
    """Seed of the start: episodes of one seed never end up on both sides of a split."""
    player: str
    """Name of the player, e.g. `expert`."""
    goal: str
    """The env's goal phrase, or the instruction of this episode."""
    env_return: float
    success: bool
    """Whether the env's own success test held at the end."""
    terminated: bool
    """Whether it ended for good; a time limit only cuts it."""
    steps: tuple[StepRecord, ...] = ()
    """T of them; empty for chunks."""
    last_pictures: tuple[str, ...] = ()
    """Digests of what there was to see after the last step."""
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """By name: `snapshots` [T + 1, S] of turns. Of C chunks `snapshots` [C + 1, S], before each and at the end;
    `actions` [C, L, A], `proprio` [C, P], `steps` [C] that were run of each, `perturbed` [C] of those that were none of
    the player's, where it was made to go astray; in place of snapshots there may be
    `pictures` [C, cameras], the digests of what was seen before each."""

    def digests(self) -> set[str]:
        """All images of the episode."""
        of_chunks = {str(digest) for digest in np.ravel(self.arrays.get("pictures", ()))}
        return {digest for step in self.steps for digest in step.pictures} | set(self.last_pictures) | of_chunks


def to_json(record: EpisodeRecord) -> dict[str, Any]:
    """What goes into a line of `episodes.jsonl`: all but the arrays."""
    return asdict(replace(record, arrays={})) | {"arrays": sorted(record.arrays)}


def from_json(line: Any, arrays: Mapping[str, NDArray[Any]]) -> EpisodeRecord:
    """The record of a line, with its arrays.

    Raises:
        CorruptRecord: a field is missing, unknown, or of the wrong type.
    """
    try:
        fields = dict(line)
        steps = tuple(StepRecord(**{**step, "pictures": tuple(step["pictures"])}) for step in fields.pop("steps", ()))
        last = tuple(fields.pop("last_pictures", ()))
        fields.pop("arrays", None)
        record = EpisodeRecord(**fields, steps=steps, last_pictures=last, arrays=arrays)
        texts = [record.id, record.task, record.kind, record.player, record.goal]
        texts += [text for step in record.steps for text in (step.prompt, step.text, *step.pictures)]
        # JSON has no types of its own, and these go into prompts, file names and sums
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a text is wanted")
        numbers = [record.env_return, record.seed]
        numbers += [number for step in record.steps for number in (step.env_reward, step.progress)]
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            raise ValueError("a finite number is wanted")
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptRecord(f"no record of an episode: {error}") from error
    return record


def to_token_episode(record: EpisodeRecord, env: TurnEnv) -> TokenEpisode:
    """The episode as those know it who learn from it.

    Args:
        record: of kind `turns`, with its snapshots.
        env: of its task.

    Raises:
        ValueError: it has no snapshots, as after an import of chats.
    """
    if "snapshots" not in record.arrays:
        raise ValueError(f"the episode {record.id} keeps no snapshots, so nothing can be drawn again")
    names = env.action_names
    indices = {name: index for index, name in enumerate(names)}
    replies = []
    for step in record.steps:
        # read again for its span alone: the action is the one that was read as the episode was played
        read = read_reply(step.text, names, range(len(names)))
        action = None if step.action is None else indices[step.action]
        replies.append(Reply(text=step.text, thought=read.thought, action=action, action_span=read.action_span))
    snapshots = np.asarray(record.arrays["snapshots"], np.float32)
    progress = np.array([step.progress for step in record.steps], np.float32)
    count = len(record.steps)
    return TokenEpisode(
        task=record.task,
        seed=record.seed,
        played_at=np.arange(count),
        obs=Observations(
            images=tuple(key.tobytes() for key in env.image_key(snapshots)),
            texts=(*(step.prompt for step in record.steps), ""),  # there is no prompt for the last state
            snapshots=snapshots,
        ),
        snapshots=snapshots,
        steps=np.ones(count, np.int64),
        # no policy sampled these: there are no answers, log-probs, values or versions
        answers=(),
        log_probs=(),
        masks=(),
        values=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int64),
        replies=tuple(replies),
        env_rewards=np.array([step.env_reward for step in record.steps], np.float32),
        success=np.array([step.success for step in record.steps], bool),
        progress=progress,
        gains=np.diff(progress, prepend=0.0).astype(np.float32),
        action_names=tuple(step.action or "" for step in record.steps),
        goals=(record.goal,) * count,
        is_over=True,
        terminated=record.terminated,
    )
