"""Record of an episode in a folder of demonstrations, for any kind of env."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from rlvlm.core.episodes import Observations, Reply, TokenEpisode
from rlvlm.envs.env import TurnEnv
from rlvlm.envs.replies import read_reply

SOURCE_DIGEST, SOURCE_EPISODE, SOURCE_FRAMES = "source_digest", "source_episode", "source_frames"
"""Arrays of an imported episode: digest of the data set by which labels identify it, [] text; number of the episode in
it, []; and frame at which each chunk begins, [C]."""


class CorruptRecord(ValueError):  # noqa: N818 - named for what is found
    """A line that is not a valid record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step of an episode of turns. Episodes in chunks have none: they consist of arrays."""

    prompt: str
    """The prompt of the turn."""
    text: str
    """The player's reply; untrusted."""
    action: str | None
    """The action read from it; None if none could be read."""
    env_reward: float
    success: bool
    """Result of the env's own success test after the step."""
    progress: float
    """Progress in [0, 1] after the step."""
    pictures: tuple[str, ...] = ()
    """Digests of the images shown to the player; empty if images were not stored."""
    is_noise: bool = False
    """Whether the player's reply was corrupted on purpose."""
    quality: float | None = None
    """Score of the step from any source, in [0, 1]; None if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRecord:
    """Record of one episode."""

    id: str
    """Id, unique in its folder, and part of file names."""
    task: str
    kind: str
    """`turns` or `chunks`, the task's kind."""
    seed: int
    """Seed of the start: episodes of one seed are always on the same side of a split."""
    player: str
    """Name of the player, e.g. `expert`."""
    goal: str
    """The env's goal phrase, or the instruction of this episode."""
    env_return: float
    success: bool
    """Result of the env's own success test at the end."""
    terminated: bool
    """Whether it terminated, as opposed to being truncated by a time limit."""
    steps: tuple[StepRecord, ...] = ()
    """T steps; empty for chunks."""
    last_pictures: tuple[str, ...] = ()
    """Digests of the images after the last step."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays by name: `snapshots` [T + 1, S] for turns. For C chunks: `snapshots` [C + 1, S], before each and at the
    end; `actions` [C, L, A]; `proprio` [C, P]; `steps` [C], the number run of each; `perturbed` [C], True for chunks
    that replaced the player's; instead of snapshots there may be `pictures` [C, cameras], the digests of the images
    before each. `goals` [C] has the instruction of each chunk where they differ within the episode."""

    @property
    def has_chunks(self) -> bool:
        """Whether the env is one in chunks, as opposed to turns."""
        return self.kind == "chunks"

    def digests(self) -> set[str]:
        """Returns the digests of all images of the episode."""
        of_chunks = {str(digest) for digest in np.ravel(self.arrays.get("pictures", ()))}
        return {digest for step in self.steps for digest in step.pictures} | set(self.last_pictures) | of_chunks


def to_json(record: EpisodeRecord) -> dict[str, Any]:
    """Returns the content of a line of `episodes.jsonl`: everything but the arrays."""
    return asdict(replace(record, arrays={})) | {"arrays": sorted(record.arrays)}


def from_json(line: Any, arrays: Mapping[str, np.ndarray]) -> EpisodeRecord:
    """Returns the record of a line, with its arrays.

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
        # JSON does not check types, and these values go into prompts, file names and sums
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
    """Converts an episode to the form that learners use.

    Args:
        record: record of kind `turns`, with its snapshots.
        env: env of its task.

    Raises:
        ValueError: it has no snapshots, as after an import of chats.
    """
    if "snapshots" not in record.arrays:
        raise ValueError(f"the episode {record.id} keeps no snapshots, so nothing can be drawn again")
    names = env.action_names
    indices = {name: index for index, name in enumerate(names)}
    replies = []
    for step in record.steps:
        # parsed again only for the span: the action is the one parsed when the episode was played
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
