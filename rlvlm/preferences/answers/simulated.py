"""Teachers who know the true reward and answer as imperfectly as people do: B-Pref's. Built by `teachers`.

The maths is pure functions of arrays; `SimulatedTeacher` puts them in order: skip, myopia, choice, mistake, equal,
left.

Source: Lee et al. 2021 (B-Pref), arXiv:2111.03026, sec. 3.1 and 4. Departures:

1. A threshold is a share of what a segment of the current policy is worth, and that share enters once. In B-Pref's
   code it enters twice from the second session on, so that a tenth becomes a hundredth.
2. Two exactly equal returns are no preference for a perfectly rational teacher, where B-Pref calls them left.
3. A skipped query is answered with no preference and the word `skipped`; B-Pref drops it. It is of no use with
   `FeedbackConfig.ties` equal, which is refused.
4. `left` is no weakness of people, but of VLMs that prefer a place: it is not in B-Pref.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.judging import Label, Stamp, Status, Verdict
from rlvlm.core.steps import FloatArray, Pair, Trajectory
from rlvlm.preferences.config import SimulatedTeacherConfig

Returns = NDArray[np.float64]
Flags = NDArray[np.bool_]

RECENT_EPISODES = 10
"""Episodes whose mean reward tells what a segment of the current policy is worth, as in B-Pref."""
SKIPPED = "skipped: neither side is good enough to judge"


def myopic_returns(rewards: FloatArray, gamma: float) -> Returns:
    """Returns of segments as somebody sees them who remembers the end best.

    Args:
        rewards: [N, L] true rewards per step.
        gamma: weight of a step against its successor, in (0, 1]; 1 gives plain sums.

    Returns:
        [N] sums in which step t weighs gamma^(L - 1 - t).
    """
    steps_to_end = np.arange(rewards.shape[1] - 1, -1, -1)
    return rewards.astype(np.float64) @ gamma**steps_to_end


def p_right_of(left: Returns, right: Returns, beta: float) -> Returns:
    """Probability of preferring the right side, by the Bradley-Terry model.

    Args:
        left: [N] returns.
        right: [N] returns.
        beta: rationality per unit of reward, > 0; infinity always prefers the larger return.

    Returns:
        [N] in [0, 1]; one half where the returns are equal.
    """
    gain = right - left
    if np.isinf(beta):
        return (np.sign(gain) + 1) / 2
    return 0.5 * (1 + np.tanh(beta * gain / 2))  # the logistic function, which cannot overflow in this form


def is_skipped(left: Returns, right: Returns, threshold: float) -> Flags:
    """[N] where the better side's plain return is not above `threshold`; one of 0 or less skips nothing.

    Args:
        left: [N] plain returns.
        right: [N] plain returns.
        threshold: in units of a segment's return.
    """
    return np.full(len(left), False) if threshold <= 0 else np.maximum(left, right) <= threshold


def is_equal(left: Returns, right: Returns, threshold: float) -> Flags:
    """[N] where the plain returns differ by less than `threshold`."""
    return np.abs(right - left) < threshold


def choose(p_right: Returns, draws: Returns) -> NDArray[np.int8]:
    """[N] the side drawn: -1 left, 1 right.

    Args:
        p_right: [N] probability of right.
        draws: [N] uniform in [0, 1).
    """
    return np.where(draws < p_right, 1, -1).astype(np.int8)


def mistake(sides: NDArray[np.int8], draws: Returns, p_mistake: float) -> NDArray[np.int8]:
    """[N] the sides, each turned round where its uniform draw is below `p_mistake`."""
    return np.where(draws < p_mistake, -sides, sides).astype(np.int8)


def names_left(draws: Returns, p_left: float) -> Flags:
    """[N] where the left side is named whatever is shown: the uniform draw is among the largest `p_left` of all.

    The draw of `mistake` does: what is the smallest there is turned round, so that no answer is both.
    """
    return draws >= 1 - p_left


class SimulatedTeacher:
    """Compares true returns with the weaknesses that `config` names.

    Two uniform draws are spent on every query whatever its answer, so that teachers of one seed differ by their
    weaknesses alone.

    Args:
        config: the weaknesses; without any this is the oracle.
        seed: of choice and mistakes.
    """

    def __init__(self, config: SimulatedTeacherConfig, seed: int) -> None:
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._reward_per_step = 0.0
        names = ("mistake", "left", "beta", "gamma", "skip", "equal")
        weaknesses = " ".join(f"{name}={getattr(config, name):g}" for name in names)
        self._stamp = Stamp(judge="simulated", revision="", prompt="", decoding=weaknesses)

    def inform(self, recent: Sequence[Trajectory]) -> None:
        """Learns from the newest finished episodes, oldest first, what the current policy's rewards are like."""
        newest = list(recent)[-RECENT_EPISODES:]
        rewards = np.concatenate([episode.env_rewards for episode in newest]) if newest else np.zeros(1)
        self._reward_per_step = float(rewards.mean(dtype=np.float64))

    def prepare(self, pairs: Sequence[Pair]) -> Callable[[], list[Verdict]]:
        """Answers now: there is nothing to wait for."""
        verdicts = self.answer(pairs)
        return lambda: verdicts

    def answer(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict per pair, in order."""
        if not pairs:
            return []
        config = self._config
        rewards = np.array([(pair.left.env_rewards, pair.right.env_rewards) for pair in pairs])  # [N, 2, L]
        left, right = rewards.sum(-1, dtype=np.float64).T
        margin = self._reward_per_step * rewards.shape[-1]
        seen_left, seen_right = (myopic_returns(side, config.gamma) for side in rewards.swapaxes(0, 1))
        p_right = p_right_of(seen_left, seen_right, config.beta)
        draws = self._rng.random((2, len(pairs)))
        sides = mistake(choose(p_right, draws[0]), draws[1], config.mistake)
        tied = is_equal(left, right, config.equal * margin)
        if np.isinf(config.beta):
            tied |= p_right == 0.5
        skipped = is_skipped(left, right, config.skip * margin)
        biased = names_left(draws[1], config.left)
        sides[biased], tied[biased], skipped[biased] = -1, False, False
        return [self._verdict(*answer) for answer in zip(sides, tied, skipped, strict=True)]

    def get_state(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state, "reward_per_step": self._reward_per_step}

    def set_state(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]
        self._reward_per_step = float(state["reward_per_step"])

    def _verdict(self, side: np.int8, is_tied: bool, is_skipped: bool) -> Verdict:
        if is_skipped or is_tied:
            text = SKIPPED if is_skipped else ""
            return Verdict(status=Status.NO_PREFERENCE, label=Label.TIE, stamp=self._stamp, text=text)
        return Verdict(status=Status.OK, label=Label.RIGHT if side > 0 else Label.LEFT, stamp=self._stamp)
