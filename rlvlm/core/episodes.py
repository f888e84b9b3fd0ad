"""What envs show, what a large policy is asked and answers, and the one record of an episode.

An answer is a reply in words or a chunk of actions; what it is made of, tokens or the denoising steps of a flow, its
policy alone knows. `TokenEpisode` is what rollouts give, labellers fill, estimators read, learners shard and pages
show. Images stay references: snapshots and keys. Letters: S env steps so far, T turns of this piece (a turn is a reply
or a chunk), N elements of an answer: what was drawn with a log-prob each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray

IntArray = NDArray[np.int64]
Answer = Mapping[str, NDArray[Any]]
"""Arrays of one answer by name, which only the policy that gave it reads: a reply's token ids, the bins of a chunk, the
denoising steps of a flow."""
_NOTHING: FloatArray = np.empty((0, 0), np.float32)


def answer_key(answer: Answer) -> bytes:
    """Equal for equal answers of a policy."""
    return b"".join(answer[name].tobytes() for name in sorted(answer))


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a player is given when it is its turn."""

    snapshot: FloatArray
    """[S] everything that can change the image; the env can draw it."""
    prompt: str
    """The user's words of this turn, without any mark for the image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a player wrote, and what the env read in it."""

    text: str
    """As it was written; untrusted."""
    thought: str
    """The members of the reply's JSON object that stand before its action, as written; empty where there are none."""
    action: int | None
    """Index into the env's `action_names`; None: nothing could be read, or the action is not legal now."""
    action_span: tuple[int, int] | None
    """First and one past the last character of `text` that make up the action's value, its quotes left out; None where
    there is no such value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledReply:
    """A reply as a policy sampled it: a text that the env reads, or the number of an action."""

    answer: Answer
    """As its policy reads it. A chat VLM's is `ids` [N]: its tokens, with the end-of-turn token where there is one, or
    the action of an action head."""
    log_probs: FloatArray
    """[N] of each element under the weights and the temperature it was sampled with."""
    text: str = ""
    """Its words, without special tokens: untrusted; empty where `action` says all."""
    action: int | None = None
    """Index of the action that was picked; None where it is read in the text."""
    value: float = 0.0
    """A critic's, before the reply; 0 without one."""
    is_complete: bool = True
    """False where the reply was cut at the token limit."""
    image: bytes = b""
    """Key of the image that it answers; the engine gives it."""
    version: int = 0
    """Version of the weights that gave it; the engine gives it."""

    @property
    def ids(self) -> IntArray:
        """[N] tokens of a chat VLM's answer."""
        return self.answer["ids"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledChunk:
    """A chunk as a policy sampled it, or took it."""

    actions: FloatArray
    """[L, A] in the env's units."""
    answer: Answer
    """As its policy reads it."""
    log_probs: FloatArray
    """[N] of each element; 0 where it was taken and not drawn."""
    mask: NDArray[np.bool_]
    """[N] elements that were drawn."""
    steps: IntArray
    """[N] env step of the chunk, 0 to L - 1, that each element belongs to."""
    value: float
    """A critic's, before the chunk; 0 without one."""
    version: int
    """Version of the weights that gave it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """What a policy is given before each of M answers; an env in chunks observes N envs at once, and by itself one."""

    texts: tuple[str, ...]
    """Prompts, or instructions such as `push the red block onto the pad`."""
    proprio: FloatArray = field(default_factory=lambda: _NOTHING)
    """[M, P] what a robot feels of itself, in the env's units; left out P is 0."""
    snapshots: FloatArray = field(default_factory=lambda: _NOTHING)
    """[M, D] everything that can change the images: an env can draw them from it. Left out D is 0."""
    images: tuple[bytes, ...] = ()
    """Their keys: equal keys look the same. Left out they are the bytes of the snapshots; code that replaces them gives
    `images=()` with them."""

    def __post_init__(self) -> None:
        for name in ("proprio", "snapshots"):
            if getattr(self, name) is _NOTHING:
                object.__setattr__(self, name, np.empty((len(self.texts), 0), np.float32))
        if not self.images:
            object.__setattr__(self, "images", tuple(row.tobytes() for row in self.snapshots))
        # rows are picked by number from all four: one too few would pair an image with another one's words
        if not len(self.images) == len(self.texts) == len(self.proprio) == len(self.snapshots):
            raise ValueError(
                f"images, texts, proprio and snapshots need one entry per observation, got {len(self.images)}, "
                f"{len(self.texts)}, {len(self.proprio)} and {len(self.snapshots)}"
            )

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, rows: Sequence[int] | NDArray[np.intp]) -> "Observations":
        """The observations of `rows`, in their order."""
        return Observations(
            texts=tuple(self.texts[row] for row in rows),
            proprio=self.proprio[list(rows)],
            snapshots=self.snapshots[list(rows)],
            images=tuple(self.images[row] for row in rows),
        )

    def row(self, row: int) -> "Observations":
        """That of `row` alone; its arrays are views."""
        part = slice(row, row + 1)
        return Observations(
            texts=self.texts[part], proprio=self.proprio[part], snapshots=self.snapshots[part], images=self.images[part]
        )

    def with_history(self, num: int) -> "Observations":
        """The observations of one episode, in order and from its first, with the `num` - 1 moments before each:
        snapshots [M, num * D] and keys in a row, the oldest first. The first moment stands for those before it.
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
        """All of `parts`, one after the other."""
        return Observations(
            texts=tuple(text for part in parts for text in part.texts),
            proprio=np.concatenate([part.proprio for part in parts]),
            snapshots=np.concatenate([part.snapshots for part in parts]),
            images=tuple(image for part in parts for image in part.images),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkStep:
    """The outcome of one chunk of L actions, in N envs. An env whose episode ends leaves the rest of its chunk out."""

    obs: Observations
    """Observations at the moment after the chunk's last env step."""
    snapshots: FloatArray
    """[N, L, S] after each env step; the last one is repeated where steps were left out."""
    steps: NDArray[np.int64]
    """[N] env steps that were run, 1 to L."""
    env_rewards: FloatArray
    """[N, L] true rewards; 0 where steps were left out."""
    success: NDArray[np.bool_]
    """[N] whether the env's own success test held at any step of the chunk."""
    success_at_end: NDArray[np.bool_]
    """[N] whether it held after the chunk's last env step."""
    progress: FloatArray
    """[N] in [0, 1], the simulator's truth after the chunk."""
    terminated: NDArray[np.bool_]
    """[N] the episode ended for good."""
    truncated: NDArray[np.bool_]
    """[N] the time limit was reached."""

    @property
    def ended(self) -> NDArray[np.bool_]:
        """[N] whether no further chunk may follow."""
        return self.terminated | self.truncated

    @staticmethod
    def joined(parts: Sequence["ChunkStep"], order: NDArray[np.intp]) -> "ChunkStep":
        """All of `parts`, one after the other, and of these the rows `order` `[N]`."""
        names = [column.name for column in fields(ChunkStep) if column.name != "obs"]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts])[order] for name in names}
        return ChunkStep(obs=Observations.joined([part.obs for part in parts]).at(order), **arrays)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEpisode:
    """A whole episode, or the piece of one that was played between two updates.

    What an env shows (`snapshots`, `env_rewards`, `replies`) is of the whole episode so far; what is learned from is of
    the T turns of this piece. A demonstration, which no policy sampled, has no answers, log-probs, values and versions.
    """

    task: str
    seed: int
    """Seed of the reset that it began with, or the number of its initial state."""
    group: int = 0
    """Episodes of one group began alike."""
    slot: int = 0
    """Place among the envs that were played side by side; pieces of one env are not independent."""
    played_at: IntArray
    """[T] number of the round of its rollout in which each turn was played; rows of an update are in this order."""
    obs: Observations
    """T + 1: before each answer, and what the last one led to."""
    snapshots: FloatArray
    """[S + 1, D] at the start and after each env step."""
    steps: IntArray
    """[T] env steps of each turn: 1 for a reply, those of a chunk that were run."""
    answers: tuple[Answer, ...]
    """T answers, as their policy reads them."""
    log_probs: tuple[FloatArray, ...]
    """T times [N] of each element when it was sampled."""
    masks: tuple[NDArray[np.bool_], ...]
    """T times [N] elements that are learned from: drawn, and of steps that were run."""
    runs: tuple[NDArray[np.bool_], ...] = ()
    """T times [N] elements of steps that were run, drawn or not: means are over these. Empty: all were."""
    actions: tuple[NDArray[np.bool_], ...] = ()
    """T times [N] elements that make the action; all others are a thought. Empty: all are."""
    chunks: tuple[FloatArray, ...] = ()
    """T chunks [L, A] in the env's units; empty of replies."""
    extras: Mapping[str, tuple[NDArray[Any], ...]] = field(default_factory=dict)
    """By name T numbers, or T arrays [N], which an env's or a policy's author adds and an own loss reads."""
    values: FloatArray
    """[T] a critic's, before each answer; 0 without one."""
    versions: IntArray
    """[T] of the weights that answered."""
    replies: tuple[Reply, ...] = ()
    """S of them, as the env read them; empty of chunks."""
    env_rewards: FloatArray
    """[S] true rewards."""
    success: NDArray[np.bool_]
    """[S] whether the env's own success test held after each step; of chunks after its last step or before."""
    progress: FloatArray
    """[S] in [0, 1], the simulator's; NaN between the ends of chunks."""
    gains: FloatArray
    """[T] by how much each turn brought success nearer, below 0 for farther: in turns of the expert where they are
    known, in progress elsewhere."""
    action_names: tuple[str, ...] = ()
    """[T] name of the action that was read in each reply, empty where none was; empty of chunks."""
    goals: tuple[str, ...]
    """[T] the goal of each turn, for a judge."""
    is_over: bool
    """Whether the episode ended, for whatever reason, with this piece."""
    terminated: bool
    """Whether it ended for good; a time limit only cuts it."""
    success_lost: bool = False
    """Whether success held and no longer does at the end."""
    rewards: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """[T] the reward that is learned from; a labeller gives it. NaN where it is unknown."""

    def __len__(self) -> int:
        """T."""
        return len(self.steps)

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.env_rewards)

    @property
    def first_step(self) -> int:
        """Env steps before this piece."""
        return self.num_steps - int(self.steps.sum())

    @property
    def ends(self) -> IntArray:
        """[T] place in `snapshots` of the state after each turn."""
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
