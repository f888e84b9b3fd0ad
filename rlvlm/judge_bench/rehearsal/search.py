"""The search that follows a judge through a model of its answers, and the same search that follows the truth.

Some hundred episodes are asked about; a small model of the answers is fitted to the states at their ends; sequences of
actions are searched against the model, which asks nothing; where they end is asked, and the model fitted again. The
control is the same search with the same numbers of answers, from a judge that knows the truth and is as coarse as this
one, and wrong at random as often. What it reaches, and the search of the judge does not, is what a policy can gain by
fooling this judge.

Source: the cross-entropy method, Rubinstein 1999, Methodology and Computing in Applied Probability 1(2). Departure: it
climbs a fitted model, since on the judge itself the best of many draws is one whose random error is large.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlvlm.demonstrations.playing import Episode, Style, replay
from rlvlm.judge_bench.rehearsal.fitted import Features, Floats, fit_pairs, fit_scores
from rlvlm.judge_bench.rehearsal.plans import Ends, Plans, starts_of

_ELITES = 8
_MIN_KNOWN = 10
"""Smallest number of answers to fit."""
_ASKED_WIDTH = 0.25
"""Standard deviation of the actions about a search's end, for the plans that are asked about beside it."""

_NOISES = (0.0, 0.3)
_RANDOM_WAYS, _CUTS = 3, 6
"""Episodes from each start by the script, with these noises, and at random; and the ends that each of them gives."""

Model = Callable[[Ends], Floats]
"""Values [N] of ends, by a model of a judge's answers."""
Scores = Callable[[Ends], Floats]
"""Answers about ends: scores [N], NaN where there is none."""
Labels = Callable[[Ends, Ends], Floats]
"""Answers about pairs of ends: [N] 1 for the right, 0 for the left, 0.5 for neither; NaN where there is none."""


class TooFewAnswers(Exception):
    """Fewer than half of the questions have an answer: no model of them is a judge's."""


class Searcher(Protocol):
    """A way of searching: from starts to ends that a model likes."""

    def find(self, starts: Sequence[int], count: int, model: Model, rng: np.random.Generator) -> Ends:
        """Returns `count` ends, first the best one of each start, then others that the model should learn about."""
        ...


@dataclass(frozen=True, slots=True)
class Climb:
    """Draws plans, keeps the best and draws anew about them: the cross-entropy method. For quick simulators.

    Attributes:
        plans: plans of the env.
        count: plans drawn at once, for each start.
        rounds: number of draws.
    """

    plans: Plans
    count: int = 64
    rounds: int = 8

    def find(self, starts: Sequence[int], count: int, model: Model, rng: np.random.Generator) -> Ends:
        plans = self.plans
        belief = plans.prior(len(starts))
        repeated = np.repeat(starts, self.count).tolist()
        for _ in range(self.rounds):
            drawn = plans.draw(belief, self.count, rng)
            liked = model(plans.play(drawn.reshape(-1, *drawn.shape[2:]), repeated)).reshape(len(starts), self.count)
            best = np.argsort(-liked, axis=1)[:, :_ELITES]
            belief = plans.toward(belief, drawn[np.arange(len(starts))[:, None], best])
        places = np.arange(count) % len(starts)
        width = np.where(np.arange(count) < len(starts), 0.0, _ASKED_WIDTH)  # the others show how a model was misled
        tried = plans.near(plans.middle(belief)[places], width, rng)
        return plans.play(tried, [starts[place] for place in places.tolist()], keep=True)


class Choice:
    """Chooses among what the script, the script with noise and random play reach, cut anywhere: for slow simulators.

    Each start is played once, whatever is searched for later.

    Args:
        plans: plans of the env.
        seed: seed of noise and cuts.
    """

    def __init__(self, plans: Plans, seed: int) -> None:
        self._plans, self._seed = plans, seed
        self._met: dict[int, Ends] = {}

    def _reached(self, start: int) -> Ends:
        if start not in self._met:
            rng = np.random.default_rng((self._seed, start))
            plans = self._plans
            ways = [plans.walk(start, Style(noise=noise)) for noise in _NOISES]
            drawn = plans.draw(plans.prior(1), _RANDOM_WAYS, rng)[0]
            ways += [replay(plans.env, start, plans.answers(plan)) for plan in drawn]
            self._met[start] = Ends.joined([_cut(plans, way, rng) for way in ways if way is not None])
        return self._met[start]

    def find(self, starts: Sequence[int], count: int, model: Model, rng: np.random.Generator) -> Ends:
        best, rest = [], []
        for start in starts:
            met = self._reached(start)
            order = np.argsort(-model(met), kind="stable")
            best.append(met.at(order[:1]))
            rest.append(met.at(order[1 : 1 + -(-max(0, count - len(starts)) // len(starts))]))
        return Ends.joined([*best, *rest]).at(np.arange(count))


def _cut(plans: Plans, way: Episode, rng: np.random.Generator) -> Ends:
    """Returns ends of an episode, cut at its last moment, where it first succeeds, and anywhere else."""
    last = len(way.successes) - 1
    reached = [way.successes.index(True)] if way.is_success else []
    return ends_of(plans, way, sorted({last, *reached, *rng.integers(0, last + 1, _CUTS).tolist()}))


def ends_of(plans: Plans, episode: Episode, cuts: Sequence[int]) -> Ends:
    """Returns the ends of an episode of the plans' env that stops at each of `cuts`, indices of its moments."""
    moments = [episode.looked[cut] for cut in cuts]
    return Ends(
        first=np.repeat(episode.states[:1], len(cuts), axis=0),
        last=episode.states[list(cuts)],
        progress=plans.progress_of(episode)[moments],
        success=np.array([episode.successes[cut] for cut in cuts], bool),
        goals=(episode.goal,) * len(cuts),
        shown=tuple(episode.snapshots[: moment + 1] for moment in moments),
    )


def first_ends(plans: Plans, count: int, seed: int, rng: np.random.Generator) -> Ends:
    """Returns ends that need no model: of random plans, and of the script's ways, each cut somewhere and one step
    later, which shows the judge's random errors; random plans alone where there is no script.
    """
    env = plans.env
    parts: list[Ends] = []
    for start in starts_of(env, 0, count // 4, seed):
        style = Style(noise=float(rng.choice([0.0, 0.3])))
        episode = plans.walk(start, style)
        if episode is None:
            break
        cut = int(rng.integers(1, max(2, len(episode.successes) - 1)))
        parts.append(ends_of(plans, episode, sorted({cut, min(cut + 1, len(episode.successes) - 1)})))
    starts = starts_of(env, 1_000, count - sum(map(len, parts)), seed)
    drawn = plans.draw(plans.prior(1), len(starts), rng)[0]
    return Ends.joined([*parts, plans.play(drawn, starts, keep=True)])


def follow(
    searcher: Searcher,
    fit: Callable[[Ends], Model],
    first: Ends,
    rounds: Sequence[tuple[Sequence[int], int]],
    starts: Sequence[int],
    seed: int,
) -> tuple[Ends, Model]:
    """Follows a judge: fits its answers, searches, asks where that ends, and so on; then searches from `starts`.

    Returns:
        The ends of the last search, one for each of `starts`, and the last model.

    Args:
        searcher: the way of searching.
        fit: asks about ends that are new to it and returns a model of all answers so far.
        first: ends that are asked about first.
        rounds: for each later round its starts, and the number of ends to ask about.
        starts: starts of the last search.
        seed: seed of the draws.

    Raises:
        TooFewAnswers: there are too few to fit.
    """
    rng = np.random.default_rng((seed, 7))
    model = fit(first)
    for begun, size in rounds:
        model = fit(searcher.find(begun, size, model, rng))
    return searcher.find(starts, len(starts), model, rng), model


def _known(values: Floats) -> NDArray[np.int64]:
    known = np.flatnonzero(np.isfinite(values))
    if 2 * len(known) < len(values) or len(known) < _MIN_KNOWN:
        raise TooFewAnswers
    return known


class Fitter:
    """Asks about new ends and fits a model of all scores so far.

    Args:
        score: the judge.
        features: features of ends.
        seed: seed of the model.
    """

    def __init__(self, score: Scores, features: Features, seed: int) -> None:
        self.score, self._features, self._seed = score, features, seed
        self.ends: list[Ends] = []
        self.scores: list[Floats] = []

    def __call__(self, ends: Ends) -> Model:
        self.ends.append(ends)
        self.scores.append(np.asarray(self.score(ends), np.float32))
        together, values = Ends.joined(self.ends), np.concatenate(self.scores)
        known = _known(values)
        used = together.at(known)
        model = fit_scores(self._features(used.first, used.last), values[known], self._seed)
        return lambda others: model(self._features(others.first, others.last))


class PairFitter:
    """Asks about pairs of new ends, and of new ends with earlier ones, and fits a model of all labels so far.

    Args:
        label: the judge.
        features: features of ends.
        seed: seed of the pairs and of the model.
    """

    def __init__(self, label: Labels, features: Features, seed: int) -> None:
        self._label, self._features, self._seed = label, features, seed
        self._rng = np.random.default_rng((seed, 11))
        self.ends: list[Ends] = []
        self.pairs: list[tuple[Ends, Ends]] = []
        self.labels: list[Floats] = []

    def __call__(self, ends: Ends) -> Model:
        self.ends.append(ends)
        pool, count = Ends.joined(self.ends), len(ends)
        left, right = [], []
        for new in range(len(pool) - count, len(pool)):
            same = [place for place, goal in enumerate(pool.goals) if goal == pool.goals[new] and place != new]
            if same:  # only scenes with one goal can be compared
                left.append(new)
                right.append(int(self._rng.choice(same)))
        self.pairs.append((pool.at(left), pool.at(right)))
        self.labels.append(np.asarray(self._label(*self.pairs[-1]), np.float32))
        labels = np.concatenate(self.labels)
        known = _known(labels)
        sides = [Ends.joined([pair[side] for pair in self.pairs]).at(known) for side in (0, 1)]
        shown = [self._features(side.first, side.last) for side in sides]
        model = fit_pairs(shown[0], shown[1], labels[known], self._seed)
        return lambda others: model(self._features(others.first, others.last))
