"""Observations of envs, answers of large policies, and the record of an episode.

An answer is a reply in text or a chunk of actions; only its policy knows its elements, tokens or the denoising steps of
a flow. Rollouts return a `TokenEpisode`, labellers fill it, estimators read it, learners shard it and pages show it.
Images stay references: snapshots and keys. Letters: S env steps so far, T turns of this piece (a turn is a reply or a
chunk), N elements of an answer, each drawn with a log-prob.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray

IntArray = NDArray[np.int64]
Answer = Mapping[str, NDArray[Any]]
"""Arrays of one answer by name, read only by the policy that gave it: a reply's token ids, the bins of a chunk, the
denoising steps of a flow."""
_NOTHING: FloatArray = np.empty((0, 0), np.float32)


def answer_key(answer: Answer) -> bytes:
    """Returns a key that is equal for equal answers of a policy."""
    return b"".join(answer[name].tobytes() for name in sorted(answer))


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Input of a player at its turn."""

    snapshot: FloatArray
    """[S] everything that can change the image; the env can draw it."""
    prompt: str
    """User's text of this turn, without any mark for the image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A player's text, and the env's reading of it."""

    text: str
    """Text as written; untrusted."""
    thought: str
    """Members of the reply's JSON object before its action, as written; empty if there are none."""
    action: int | None
    """Index into the env's `action_names`; None if it is unreadable, or not legal now."""
    action_span: tuple[int, int] | None
    """First and one past the last character of `text` that make up the action's value, without quotes; None if there
    is no such value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledReply:
    """Reply as its policy sampled it: a text that the env reads, or the index of an action."""

    answer: Answer
    """Answer in its policy's form. For a chat VLM `ids` [N]: tokens, with the end-of-turn token if there is one, or the
    action of an action head."""
    log_probs: FloatArray
    """[N] log-probability of each element under the weights and the temperature of sampling."""
    text: str = ""
    """Text without special tokens; untrusted. Empty if the action is given as `action`."""
    action: int | None = None
    """Index of the chosen action; None if the env reads it from the text."""
    value: float = 0.0
    """Critic's value before the reply; 0 without a critic."""
    is_complete: bool = True
    """False if the reply was cut at the token limit."""
    image: bytes = b""
    """Key of the image that it answers; set by the engine."""
    version: int = 0
    """Version of the weights that gave it; set by the engine."""

    @property
    def ids(self) -> IntArray:
        """[N] tokens of a chat VLM's answer."""
        return self.answer["ids"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledChunk:
    """Chunk as its policy sampled or chose it."""

    actions: FloatArray
    """[L, A] actions in the env's units."""
    answer: Answer
    """The answer in its policy's form."""
    log_probs: FloatArray
    """[N] log-probability of each element; 0 if it was taken and not drawn."""
    mask: NDArray[np.bool_]
    """[N] whether each element was drawn."""
    steps: IntArray
    """[N] env step of the chunk, 0 to L - 1, that each element belongs to."""
    value: float
    """Critic's value before the chunk; 0 without a critic."""
    version: int
    """Version of the weights that gave it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """Inputs of a policy before each of M answers; an env in chunks observes N envs at once, or one."""

    texts: tuple[str, ...]
    """Prompts, or instructions such as `push the red block onto the pad`."""
    proprio: FloatArray = field(default_factory=lambda: _NOTHING)
    """[M, P] proprioception of a robot, in the env's units; P = 0 by default."""
    snapshots: FloatArray = field(default_factory=lambda: _NOTHING)
    """[M, D] everything that can change the images: an env can draw them from it. D = 0 by default."""
    images: tuple[bytes, ...] = ()
    """Keys of the images: equal keys look the same. By default the bytes of the snapshots; code that replaces these
    must pass `images=()`."""

    def __post_init__(self) -> None:
        for name in ("proprio", "snapshots"):
            if getattr(self, name) is _NOTHING:
                object.__setattr__(self, name, np.empty((len(self.texts), 0), np.float32))
        if not self.images:
            object.__setattr__(self, "images", tuple(row.tobytes() for row in self.snapshots))
        # rows of all four are picked by index: with one missing, an image would get another one's text
        if not len(self.images) == len(self.texts) == len(self.proprio) == len(self.snapshots):
            raise ValueError(
                f"images, texts, proprio and snapshots need one entry per observation, got {len(self.images)}, "
                f"{len(self.texts)}, {len(self.proprio)} and {len(self.snapshots)}"
            )

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, rows: Sequence[int] | NDArray[np.intp]) -> "Observations":
        """Returns the observations of `rows`, in their order."""
        return Observations(
            texts=tuple(self.texts[row] for row in rows),
            proprio=self.proprio[list(rows)],
            snapshots=self.snapshots[list(rows)],
            images=tuple(self.images[row] for row in rows),
        )

    def row(self, row: int) -> "Observations":
        """Returns the observation of `row` alone; its arrays are views."""
        part = slice(row, row + 1)
        return Observations(
            texts=self.texts[part], proprio=self.proprio[part], snapshots=self.snapshots[part], images=self.images[part]
        )

    def with_history(self, num: int) -> "Observations":
        """Returns the observations of one episode, in order and from its first, with the `num` - 1 moments before each.

        Snapshots [M, num * D] and keys are concatenated, the oldest first. The first moment replaces missing earlier
        ones.
        """
        if num == 1:
            return self
        rows = np.maximum(np.arange(len(self))[:, None] - np.arange(num)[::-1], 0)  # [M, num]
        return Observations(
            texts=self.texts,
            proprio=self.proprio,
            snapshots=self.snapshots[rows].reshape(len(self), -1),
            images=tuple(b"".join(self.images[row] for row in seen) for seen in rows.tolist()),
        )

    @staticmethod
    def joined(parts: Sequence["Observations"]) -> "Observations":
        """Returns all of `parts`, end to end."""
        return Observations(
            texts=tuple(text for part in parts for text in part.texts),
            proprio=np.concatenate([part.proprio for part in parts]),
            snapshots=np.concatenate([part.snapshots for part in parts]),
            images=tuple(image for part in parts for image in part.images),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkStep:
    """The outcome of one chunk of L actions, in N envs. An env whose episode ends skips the rest of its chunk."""

    obs: Observations
    """Observations after the chunk's last env step."""
    snapshots: FloatArray
    """[N, L, S] snapshots after each env step; the last one is repeated for skipped steps."""
    steps: NDArray[np.int64]
    """[N] env steps that were run, 1 to L."""
    env_rewards: FloatArray
    """[N, L] true rewards; 0 for skipped steps."""
    success: NDArray[np.bool_]
    """[N] whether the env's own success test held at any step of the chunk."""
    success_at_end: NDArray[np.bool_]
    """[N] whether it held after the chunk's last env step."""
    progress: FloatArray
    """[N] the simulator's true progress after the chunk, in [0, 1]."""
    terminated: NDArray[np.bool_]
    """[N] whether the episode ended for good."""
    truncated: NDArray[np.bool_]
    """[N] whether the time limit was reached."""

    @property
    def ended(self) -> NDArray[np.bool_]:
        """[N] whether no further chunk may follow."""
        return self.terminated | self.truncated

    @staticmethod
    def joined(parts: Sequence["ChunkStep"], order: NDArray[np.intp]) -> "ChunkStep":
        """Returns the rows `order` [N] of all `parts` end to end."""
        names = [column.name for column in fields(ChunkStep) if column.name != "obs"]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts])[order] for name in names}
        return ChunkStep(obs=Observations.joined([part.obs for part in parts]).at(order), **arrays)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEpisode:
    """A whole episode, or the piece of one that was played between two updates.

    Data of the env (`snapshots`, `env_rewards`, `replies`) cover the whole episode so far; data for training cover the
    T turns of this piece. A demonstration, which no policy sampled, has no answers, log-probs, values and versions.
    """

    task: str
    seed: int
    """Seed of the reset at its start, or the number of its initial state."""
    group: int = 0
    """Group of episodes with equal starts."""
    slot: int = 0
    """Index among the envs that were played side by side; pieces of one env are not independent."""
    played_at: IntArray
    """[T] round of its rollout in which each turn was played; rows of an update are in this order."""
    obs: Observations
    """T + 1 observations: before each answer, and after the last one."""
    snapshots: FloatArray
    """[S + 1, D] snapshots at the start and after each env step."""
    steps: IntArray
    """[T] env steps of each turn: 1 for a reply, those that were run for a chunk."""
    answers: tuple[Answer, ...]
    """T answers, in their policy's form."""
    log_probs: tuple[FloatArray, ...]
    """T arrays [N] of the elements' log-probabilities at sampling."""
    masks: tuple[NDArray[np.bool_], ...]
    """T arrays [N] that mark the elements to train on: drawn, and of steps that were run."""
    runs: tuple[NDArray[np.bool_], ...] = ()
    """T arrays [N] that mark the elements of steps that were run, drawn or not: means are over these. Empty for all."""
    actions: tuple[NDArray[np.bool_], ...] = ()
    """T arrays [N] that mark the elements of the action; all others are a thought. Empty for all."""
    chunks: tuple[FloatArray, ...] = ()
    """T chunks [L, A] in the env's units; empty for replies."""
    extras: Mapping[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    """By name T numbers, or T arrays [N], which the author of an env or a policy adds for a custom loss."""
    values: FloatArray
    """[T] a critic's values before each answer; 0 without a critic."""
    versions: IntArray
    """[T] versions of the weights that answered."""
    replies: tuple[Reply, ...] = ()
    """S replies, as the env read them; empty for chunks."""
    env_rewards: FloatArray
    """[S] true rewards."""
    success: NDArray[np.bool_]
    """[S] whether the env's own success test held after each step; for chunks after the last step or before."""
    progress: FloatArray
    """[S] the simulator's progress in [0, 1]; NaN between the ends of chunks."""
    gains: FloatArray
    """[T] how much each turn brought success nearer, below 0 for farther: in turns of the expert if known, else in
    progress."""
    action_names: tuple[str, ...] = ()
    """[T] name of the action in each reply, empty if there was none; empty for chunks."""
    goals: tuple[str, ...]
    """[T] goal of each turn, for a judge."""
    is_over: bool
    """Whether the episode ended, for any reason, with this piece."""
    terminated: bool
    """Whether it ended for good; a time limit only cuts it."""
    success_lost: bool = False
    """Whether success held before and no longer does at the end."""
    rewards: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """[T] rewards to train on, set by a labeller; NaN if unknown."""

    def __len__(self) -> int:
        """Number of turns T."""
        return len(self.steps)

    @property
    def num_steps(self) -> int:
        """Number of env steps S so far."""
        return len(self.env_rewards)

    @property
    def first_step(self) -> int:
        """Number of env steps before this piece."""
        return self.num_steps - int(self.steps.sum())

    @property
    def ends(self) -> IntArray:
        """[T] index in `snapshots` of the state after each turn."""
        return self.first_step + np.cumsum(self.steps)

    @property
    def turn_rewards(self) -> FloatArray:
        """[T] true rewards, summed over each turn's env steps."""
        # turn t has the rewards from `ends - steps` to `ends`, and the next turn begins where it ends
        return np.add.reduceat(self.env_rewards, self.ends - self.steps).astype(np.float32)

    @property
    def is_success(self) -> bool:
        """Whether the env's own test ever held."""
        return bool(self.success.any())

    @property
    def env_return(self) -> float:
        """Sum of the true rewards."""
        return float(self.env_rewards.sum())
