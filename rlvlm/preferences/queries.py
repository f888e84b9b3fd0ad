"""Queries to a teacher: draws questions from episodes, chooses those worth asking, and stores the answers. Used by the
loop.

A question is a pair of segments to compare, or a single frame to score. Sources of the sampling: Lee et al. 2021
(PEBBLE), arXiv:2106.05091, sec. 4.2, and its code in Lee et al. 2021 (B-Pref), arXiv:2111.03026: disagreement, entropy
and k-center over ten times as many candidates as questions. Departures: they work on images as well, and k-center runs
in the space of the model's features for images, of its scaled inputs for states.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from rlvlm.core import metrics
from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Score, Status, Verdict
from rlvlm.core.references import find_registered
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray, Pair, Segment, Trajectory
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.config import FeedbackConfig
from rlvlm.preferences.dataset import Examples, Steps, decided, scored, sides_of
from rlvlm.preferences.ensemble import Ensemble
from rlvlm.preferences.reward_model import RewardModel

Question = TypeVar("Question", Pair, Segment)

_ROUNDS = 100
"""Rounds in which questions that are not worth asking are replaced."""


def draw_segments(lengths: Sequence[int], num: int, segment_steps: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draws segments uniformly, with replacement, from all segments; each episode's last frame included.

    Args:
        lengths: number of steps of each episode.
        num: number of segments to draw.
        segment_steps: length L, >= 1.
        rng: source of the draws, used once.

    Returns:
        [num, 2] index of the episode and first step of each segment.

    Raises:
        ValueError: no episode is as long as a segment.
    """
    # an episode of T steps has T - L + 1 segments; drawing among all of them makes each equally likely
    starts = np.maximum(np.asarray(lengths, np.int64) - segment_steps + 1, 0)
    ends = starts.cumsum()
    if not starts.sum():
        raise ValueError(f"need an episode of at least {segment_steps} steps to draw a segment from, got {lengths}")
    drawn = rng.integers(ends[-1], size=num)
    episodes = ends.searchsorted(drawn, side="right")
    return np.stack([episodes, drawn - (ends - starts)[episodes]], axis=1)


def draw_pairs(
    trajectories: Sequence[Trajectory], num: int, segment_steps: int, rng: np.random.Generator, path_moments: int = 0
) -> list[Pair]:
    """Draws pairs whose sides are independent and uniform over all segments of `trajectories`.

    Each side has `path_moments` moments before its end, for the hand's path.

    Raises:
        ValueError: no trajectory is as long as a segment.

    Source: Lee et al. 2021 (PEBBLE), arXiv:2106.05091, sec. 4.2, uniform sampling. Departures from the code of
    RL-VLM-F: each frame is equally likely, the last one of an episode too, and not first an episode, then a frame.
    """
    drawn = draw_segments([len(trajectory) for trajectory in trajectories], 2 * num, segment_steps, rng)
    sides = [trajectories[episode].segment(start, segment_steps, path_moments) for episode, start in drawn]
    return [Pair(left=left, right=right) for left, right in zip(sides[:num], sides[num:], strict=True)]


def look_alike(pairs: Sequence[Pair], frames: FrameStore) -> NDArray[np.bool_]:
    """Returns [N] whether both sides of a pair show the same images at each step: nothing to compare."""
    if not pairs:
        return np.zeros(0, np.bool_)
    snapshots = np.array([(pair.left.snapshots, pair.right.snapshots) for pair in pairs])  # [N, 2, L, S]
    _, image = frames.distinct(snapshots.reshape(-1, snapshots.shape[-1]))
    left, right = image.reshape(snapshots.shape[:3]).swapaxes(0, 1)
    return (left == right).all(axis=1)


def disagreement(returns: FloatArray) -> NDArray[np.float64]:
    """Returns the disagreement of the members about each candidate.

    Args:
        returns: [K, N, S] predicted returns of its sides.

    Returns:
        [N] standard deviation over the members, of P(right is better) for pairs and of the reward for single segments.
    """
    values = returns.astype(np.float64)
    # Bradley-Terry: P(right is better) = sigmoid(return of the right side - return of the left side)
    return (expit(values[..., 1] - values[..., 0]) if values.shape[-1] == 2 else values[..., 0]).std(axis=0)


def entropy(returns: FloatArray) -> NDArray[np.float64]:
    """Returns [N] mean entropies of the members' predictions about each pair, in nats; `returns` are [K, N, 2]."""
    p = np.clip(expit((returns[..., 1] - returns[..., 0]).astype(np.float64)), 1e-12, 1 - 1e-12)
    return -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean(axis=0)


def farthest_first(points: FloatArray, centres: FloatArray, num: int) -> NDArray[np.int64]:
    """Returns a greedy k-center: repeatedly the point that is farthest from all chosen ones.

    Args:
        points: [N, E] candidates.
        centres: [M, E] points chosen before; if M is 0, the first point comes first.
        num: number of points to choose, <= N.

    Returns:
        [num] indices in `points`, ascending.

    Source: Sener and Savarese 2018, arXiv:1708.00489, algorithm 1.
    """

    def squared_distances(centre: FloatArray) -> NDArray[np.float64]:
        return np.square(points - centre).sum(axis=1, dtype=np.float64)

    # only the distance to the nearest centre is kept, so a new centre costs one pass over the points
    nearest = np.full(len(points), np.inf)
    for centre in centres:
        nearest = np.minimum(nearest, squared_distances(centre))
    chosen: list[int] = []
    for _ in range(num):
        chosen.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, squared_distances(points[chosen[-1]]))
        nearest[chosen] = -1.0  # never twice, even if points coincide
    return np.sort(np.array(chosen, np.int64))


class Candidates(Generic[Question]):
    """Candidate questions with the reward model's outputs for them, computed on demand.

    Args:
        questions: N pairs or single segments, all of one length.
        ensemble: ensemble fitted at least once; each distinct image is read once.
        known: questions answered before.
    """

    def __init__(self, questions: Sequence[Question], ensemble: Ensemble, known: Examples) -> None:
        self.questions, self._ensemble, self._known = questions, ensemble, known

    def __len__(self) -> int:
        return len(self.questions)

    @cached_property
    def _steps(self) -> Steps:
        return Steps.of_segments([side for question in self.questions for side in sides_of(question)])

    @cached_property
    def returns(self) -> FloatArray:
        """[K, N, S] predicted return of each of S sides by each of K members."""
        returns = self._ensemble.predict(self._steps)
        return returns.reshape(len(returns), len(self), self._known.num_sides, -1).sum(axis=-1)

    @cached_property
    def points(self) -> FloatArray:
        """[N, S * E] each question as a point: the mean features of each side's steps, concatenated."""
        return self._embed(self._steps)

    @cached_property
    def known_points(self) -> FloatArray:
        """[M, S * E] points of the questions that were answered before."""
        return self._embed(self._known.steps())

    def _embed(self, steps: Steps) -> FloatArray:
        features = self._ensemble.features(steps)
        num_sides = self._known.num_sides
        num_questions = len(steps) // (num_sides * len(sides_of(self.questions[0])[0]))
        means = features.reshape(num_questions, num_sides, -1, features.shape[-1]).mean(axis=2)
        return means.reshape(num_questions, -1)


def highest(values: NDArray[np.floating], num: int) -> NDArray[np.int64]:
    """Returns the [num] indices of the largest of `values` [N], ascending; among equals the earlier ones."""
    return np.sort(np.argsort(-values, kind="stable")[:num])


Strategy = Callable[[Candidates[Any], int], NDArray[np.int64]]
"""Chooses `num` of N candidates to ask about, and returns their indices [num]."""
STRATEGIES: dict[str, Strategy] = {
    "uniform": lambda candidates, num: np.arange(min(num, len(candidates))),
    "disagreement": lambda candidates, num: highest(disagreement(candidates.returns), num),
    "entropy": lambda candidates, num: highest(entropy(candidates.returns), num),
    "k_center": lambda candidates, num: farthest_first(candidates.points, candidates.known_points, num),
}
"""Strategies by name, as in `feedback.sampling`."""


def query_strategy(name: str) -> Callable[[Strategy], Strategy]:
    """Returns a decorator that registers a function under `name`."""

    def register(strategy: Strategy) -> Strategy:
        STRATEGIES[name] = strategy
        return strategy

    return register


def find_strategy(name: str) -> Strategy:
    """Returns the strategy of that name, or the user's own for `module:FUNCTION`.

    Raises:
        UsageError: there is none, or it takes other arguments than candidates and a number.
    """
    takes = ("candidates", "num")
    return find_registered(name, STRATEGIES, "feedback.sampling", "query_strategy", takes=takes)


def choose(
    candidates: list[Question], num: int, *, sampling: str, ensemble: Ensemble, known: Examples
) -> list[Question]:
    """Returns the `num` candidates to ask about, in the order in which they were drawn; all if there are no more.

    Args:
        candidates: pairs or segments of one length.
        num: number to choose, >= 1.
        sampling: name of the strategy; uniform takes the first ones.
        ensemble: ensemble fitted at least once unless sampling is uniform.
        known: questions answered before.

    Raises:
        UsageError: a user's strategy did not return `num` different indices of candidates.
    """
    if len(candidates) <= num:
        return candidates
    chosen = np.asarray(find_strategy(sampling)(Candidates(candidates, ensemble, known), num))
    indices = np.unique(chosen)
    if chosen.shape != (num,) or len(indices) != num or not (0 <= indices[0] and indices[-1] < len(candidates)):
        raise UsageError(
            f"feedback.sampling {sampling} chose {len(indices)} different candidates in an array of shape "
            f"{list(chosen.shape)}, not {num} of {len(candidates)}",
            "return indices [num] of different candidates",
        )
    return [candidates[index] for index in indices.tolist()]


class Queries(Stateful):
    """Questions of one kind: draws those worth asking, and stores the answers to train on.

    Args:
        frames: finds equal images; any size will do.
        model: rates the candidates, if `config.sampling` needs that.
        config: sampling of questions and handling of ties.
    """

    count: str
    """Metric of the number of answers to train on."""
    num_sides: int
    """Number of segments per question."""
    STATE = ("examples",)

    def __init__(self, frames: FrameStore, model: RewardModel, config: FeedbackConfig) -> None:
        self._frames = frames
        self._model = model
        self._config = config
        self.examples = Examples(self.num_sides)

    def _num_candidates(self, num: int) -> int:
        return num * self._config.pool_factor(self._model.num_fits)

    def _choose(self, candidates: list[Question], num: int) -> list[Question]:
        ensemble = self._model.ensemble
        return choose(candidates, num, sampling=self._config.sampling, ensemble=ensemble, known=self.examples)


class PairQueries(Queries):
    """Pairs of segments that a teacher compares: draws pairs whose sides look different, stores the decided ones."""

    count = metrics.COMPARISONS
    num_sides = 2

    def draw(self, recent: Sequence[Trajectory], num: int, rng: np.random.Generator) -> tuple[list[Pair], int]:
        """Returns up to `num` pairs worth asking about, and how many drawn pairs looked alike."""
        wanted, steps = self._num_candidates(num), self._config.segment_steps
        kept: list[Pair] = []
        num_drawn = 0
        for _ in range(_ROUNDS):
            # repeated, but not for ever: episodes in which nothing moves have no pair worth asking
            drawn = draw_pairs(recent, wanted - len(kept), steps, rng, self._frames.path_moments)
            num_drawn += len(drawn)
            kept += [pair for pair, is_dull in zip(drawn, look_alike(drawn, self._frames), strict=True) if not is_dull]
            if len(kept) == wanted:
                break
        return self._choose(kept, num), num_drawn - len(kept)

    def add(self, questions: Sequence[Pair], answers: Sequence[Verdict]) -> int:
        """Stores the labels to train on, and returns their number."""
        return self.examples.add(decided(questions, answers, self._config.ties))


class ScoreQueries(Queries):
    """Single frames that a teacher scores: draws frames whose image was not scored before, stores the scored ones.

    Source: the VLM Score baseline of Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681. Departures: frames are drawn one by
    one, and not as pairs with one side discarded; no image is scored twice, since a judge would repeat itself, and all
    new images are equally likely, however often they occurred.
    """

    count = metrics.SCORES
    num_sides = 1

    def __init__(self, frames: FrameStore, model: RewardModel, config: FeedbackConfig) -> None:
        super().__init__(frames, model, config)
        self._asked: set[bytes] = set()

    def draw(self, recent: Sequence[Trajectory], num: int, rng: np.random.Generator) -> tuple[list[Segment], int]:
        """Returns up to `num` frames with new images, each image equally likely; and 0, as none is discarded."""
        snapshots = np.concatenate([trajectory.snapshots for trajectory in recent])
        first, _ = self._frames.distinct(snapshots)
        names = self._frames.keys(snapshots[first])
        # one row per image: an image that fills fifty episodes is as likely as a rare one
        new = [row for row, name in zip(first, names, strict=True) if name not in self._asked]
        rows = rng.permutation(new)[: self._num_candidates(num)].astype(np.int64)
        # from rows of all episodes end to end back to an episode and its step
        ends = np.cumsum([len(trajectory) for trajectory in recent])
        episodes = ends.searchsorted(rows, side="right")
        steps = rows - (ends - [len(trajectory) for trajectory in recent])[episodes]
        way = self._frames.path_moments
        frames = [recent[episode].segment(int(step), 1, way) for episode, step in zip(episodes, steps, strict=True)]
        frames = self._choose(frames, num)
        self._asked.update(self._keys(frames))  # at once: with `ahead` the next draw comes before the answers
        return frames, 0

    def add(self, questions: Sequence[Segment], answers: Sequence[Score]) -> int:
        """Stores the scores to train on, and returns their number; failed questions may be asked again."""
        failed = [frame for frame, score in zip(questions, answers, strict=True) if score.status is Status.FAILED]
        # a failure is no answer: the image may be asked about again
        self._asked.difference_update(self._keys(failed))
        return self.examples.add(scored(questions, answers))

    def get_state(self) -> dict[str, Any]:
        # sorted, since a set's order differs between processes and checkpoints should be equal
        asked = np.frombuffer(b"".join(sorted(self._asked)), np.uint8)
        asked = asked.reshape(len(self._asked), len(asked) // max(len(self._asked), 1))
        return super().get_state() | {"asked": asked}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._asked = {row.tobytes() for row in state["asked"]}

    def _keys(self, frames: Sequence[Segment]) -> list[bytes]:
        return self._frames.keys(np.concatenate([frame.snapshots for frame in frames])) if frames else []
