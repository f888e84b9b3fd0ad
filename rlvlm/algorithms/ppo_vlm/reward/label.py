"""The one door where reward enters PPO. The algorithm shows it each row of turns as it is played, and has it label the
rollout before the update.
"""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlvlm.algorithms.ppo_vlm.play import PlayedTurn
from rlvlm.algorithms.ppo_vlm.runner import Rollout
from rlvlm.core import metrics
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Score
from rlvlm.core.steps import FloatArray
from rlvlm.judges.agreement import area_under_curve
from rlvlm.rewards.config import TurnRewardConfig
from rlvlm.rewards.judged import to_reward
from rlvlm.rewards.monitor import JudgeMonitor, Preflight, check_judge
from rlvlm.rewards.scorers import Scorer
from rlvlm.rewards.scoring_items import ScoredItem, ScoringItem, spread
from rlvlm.rewards.temporal import TemporalNovelty

_TURN_CLAIM, _EPISODE_CLAIM = 0.875, 0.5
"""Scores from here on say that an episode is a success. A turn's utility lies at 0.75 for a turn that only comes nearer
and at 1 for the one that reaches the goal."""
AWAY, SAME, NEARER, REACHED = 0.0, 0.25, 0.75, 1.0
"""Utility of a turn on the scale of scores, as the prompt has its ratings."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was asked about a row."""

    places: Sequence[int]
    """Envs that are asked about."""
    turns: Sequence[PlayedTurn]
    """Theirs."""
    items: Sequence[ScoringItem]
    answers: Future[list[Score]] | None
    """None where nobody is asked about anything."""


_Scored = tuple[PlayedTurn, ScoringItem, Score]


class TurnLabeller:
    """Gives each turn of a rollout what it is worth.

    A judge is asked about a row of turns while the next one is played. Its failures never become the truth: the config
    says whether the run ends, the episode is left out, or its turn counts as neutral.

    Args:
        config: sources, their weights, and who scores.
        scorer: scores turns or episodes; None where nobody does.
        novelty: of what is done; None where it counts nothing.
        goal: what the judge is told in the place of the world's own goal; empty tells that.
    """

    def __init__(
        self, config: TurnRewardConfig, scorer: Scorer | None, novelty: TemporalNovelty | None = None, goal: str = ""
    ) -> None:
        self._config = config
        self._scorer = scorer
        self._novelty = novelty
        self._goal = goal
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="turn-scores")
        self._waiting: list[_Asked] = []
        self._records: list[ScoredItem] = []
        self._facts: dict[str, float] = {}
        is_per_turn = config.per == "turn"
        self.monitor = JudgeMonitor(config.monitor, _TURN_CLAIM if is_per_turn else _EPISODE_CLAIM)

    def watch(self, row: Sequence[PlayedTurn | None]) -> None:
        """Begins to ask about a row of turns that was just played."""
        if self._scorer is None:
            return
        asked = [
            (place, played, item)
            for place, played in enumerate(row)
            if played is not None and (item := self._item(played)) is not None
        ]
        items = [item for _, _, item in asked]
        answers = self._pool.submit(self._scorer.score, items) if items else None
        places, turns = [place for place, *_ in asked], [played for _, played, _ in asked]
        self._waiting.append(_Asked(places, turns, items, answers))

    def label(self, rollout: Rollout, env_step: int) -> Rollout:
        """The rollout with every turn's reward; NaN where nobody could say it and the config has it left out.

        Args:
            rollout: whose rows were all shown to `watch`, in their order.
            env_step: env steps done when it had been played.

        Raises:
            JudgeUnavailable: the judge does not answer, or left a turn out where the config wants none left out.
            RewardHacked: the judge is being fooled, and the config says to stop then.
        """
        began = time.monotonic()
        judged, scored = self._judged(rollout, env_step)
        waited = time.monotonic() - began
        novelty = self._novelties(rollout)
        weights = self._config.weights
        rows: list[list[PlayedTurn | None]] = []
        parts: list[tuple[float, float, float, float]] = []
        for t, row in enumerate(rollout.turns):
            labelled: list[PlayedTurn | None] = []
            for w, played in enumerate(row):
                if played is None:
                    labelled.append(None)
                    continue
                env_reward = played.outcome.env_reward
                total = 0.0  # a source without weight must not spoil the sum with what it does not know
                for weight, reward in (
                    (weights.environment, env_reward), (weights.judged, judged[t, w]), (weights.novelty, novelty[t, w]),
                ):  # fmt: skip
                    total += weight * float(reward) if weight else 0.0
                parts.append((env_reward, float(judged[t, w]), float(novelty[t, w]), total))
                labelled.append(replace(played, reward=total))
            rows.append(labelled)
        labelled_rollout = replace(rollout, turns=rows)
        self._note(parts, 1 - len(without_unknown(labelled_rollout)) / max(len(rollout), 1), waited)
        if scored:
            self._watch_judge(rollout, scored)
        if self._novelty is not None:
            self._novelty.learn(rollout.episodes)
        return labelled_rollout

    def preflight_on(self, known: Sequence[ScoringItem]) -> Preflight:
        """How the judge tells items apart whose truth is known.

        Raises:
            JudgeUnavailable: it cannot tell them apart.
        """
        assert self._scorer is not None, "there is somebody to be tried"
        return check_judge(self._scorer, known, self._config.monitor)

    def report(self) -> dict[str, float]:
        """The newest rollout's figures by their names in `rlvlm.core.metrics`."""
        return self._facts | (self.monitor.report() if self._scorer is not None else {})

    def drain_records(self) -> list[ScoredItem]:
        """What was scored since the last call."""
        records, self._records = self._records, []
        return records

    def save_tree(self) -> dict[str, Any]:
        """Everything that an exact continuation needs; between rollouts nothing is being asked."""
        return {
            "monitor": self.monitor.save_tree(),
            "scorer": None if self._scorer is None else self._scorer.get_state(),
            "novelty": None if self._novelty is None else self._novelty.save_tree(),
            "facts": self._facts,
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        self.monitor.load_tree(tree["monitor"])
        self._facts = dict(tree["facts"])
        if self._scorer is not None:
            self._scorer.set_state(tree["scorer"])
        if self._novelty is not None:
            self._novelty.load_tree(tree["novelty"])

    def _item(self, played: PlayedTurn) -> ScoringItem | None:
        """What is asked about a turn; None where nothing is."""
        outcome, episode = played.outcome, played.outcome.episode
        goal = self._goal or outcome.goal
        if self._config.per == "turn":
            if outcome.reply.action is None:
                return None
            return ScoringItem(
                goal=goal,
                snapshots=outcome.snapshots,
                action=outcome.action,
                is_success=outcome.is_success,
                progress=outcome.progress,
            )
        if episode is None:
            return None
        return ScoringItem(
            goal=goal,
            snapshots=spread(episode.snapshots, self._config.num_frames),
            is_success=outcome.is_success,
            progress=outcome.progress,
        )

    def _judged(self, rollout: Rollout, env_step: int) -> tuple[FloatArray, list[_Scored]]:
        """[T, W] the judge's rewards in [-1, 1], NaN where there is none to be had, and what was said of what."""
        grid = np.zeros((len(rollout.turns), len(rollout.turns[0])), np.float32)
        waiting, self._waiting = self._waiting, []
        if self._scorer is None:
            return grid, []
        assert len(waiting) == len(rollout.turns), "every row was shown to `watch`"
        if self._config.per == "turn":  # the others are overwritten below
            for t, row in enumerate(rollout.turns):
                grid[t] = [0 if played is None else self._config.unreadable for played in row]
        scored: list[_Scored] = []
        for t, asked in enumerate(waiting):
            scores = [] if asked.answers is None else asked.answers.result()
            for place, played, item, score in zip(asked.places, asked.turns, asked.items, scores, strict=True):
                grid[t, place] = self._reward(score)
                scored.append((played, item, score))
                whole = played.outcome.episode if self._config.per == "episode" else None
                true_reward = played.outcome.env_reward if whole is None else whole.env_rewards.sum()
                record = ScoredItem(
                    item=item, score=score, env_step=env_step, timestamp=time.time(),
                    env_return=float(true_reward), truth=self._truth(played),
                    claim=self.monitor.claim,
                )  # fmt: skip
                self._records.append(record)
        return grid, scored

    def _truth(self, played: PlayedTurn) -> float:
        """What a judge without fault would say, on the scale of its scores."""
        outcome = played.outcome
        if self._config.per == "episode":
            return outcome.progress
        if outcome.is_success:
            return REACHED
        return NEARER if outcome.gain > 0 else SAME if outcome.gain == 0 else AWAY

    def _reward(self, score: Score) -> float:
        if score.value is not None:
            return float(to_reward(score.value))
        if self._config.without_answer == "stop":
            raise JudgeUnavailable(
                f"the judge gave no score: {score.status}",
                "look at the judge, then `rlvlm resume`; or choose --reward.without-answer drop",
            )
        return math.nan if self._config.without_answer == "drop" else float(to_reward(self._config.neutral))

    def _novelties(self, rollout: Rollout) -> FloatArray:
        """[T, W] novelty in [0, 1]; 0 for turns of episodes that are not over yet."""
        grid = np.zeros((len(rollout.turns), len(rollout.turns[0])), np.float32)
        if self._novelty is None:
            return grid
        spans = [(w, span) for w, span in _episodes(rollout) if _played(rollout, w, span.stop - 1).outcome.episode]
        episodes = [_played(rollout, w, span.stop - 1).outcome.episode for w, span in spans]
        for (w, span), values in zip(spans, self._novelty.label([one for one in episodes if one]), strict=True):
            grid[span, w] = values[len(values) - (span.stop - span.start) :]  # it may have begun in an earlier rollout
        return grid

    def _note(self, parts: Sequence[tuple[float, ...]], left_out: float, waited: float) -> None:
        """Keeps the means of each source, raw."""
        names = (metrics.REWARD_ENVIRONMENT, metrics.REWARD_JUDGED, metrics.REWARD_NOVELTY, metrics.REWARD_TOTAL)
        used = {
            metrics.REWARD_ENVIRONMENT: True,
            metrics.REWARD_JUDGED: self._scorer is not None,
            metrics.REWARD_NOVELTY: self._novelty is not None,
            metrics.REWARD_TOTAL: True,
        }
        table = np.array(parts, np.float64)
        known = np.isfinite(table)
        means = np.where(known, table, 0.0).sum(0) / np.maximum(known.sum(0), 1)
        self._facts = {name: float(mean) for name, mean in zip(names, means, strict=True) if used[name]}
        if self._scorer is not None:
            self._facts |= {metrics.REWARD_LEFT_OUT: left_out, metrics.REWARD_WAIT_S: waited}

    def _watch_judge(self, rollout: Rollout, scored: Sequence[_Scored]) -> None:
        """Tells the monitor of the episodes that ended, and has it show its controls.

        An episode whose last reply could not be read was called no success by anybody: it counts as scored 0.
        """
        assert self._scorer is not None, "somebody scored"
        known = [(played.outcome, score.value) for played, _, score in scored if score.value is not None]
        if self._config.per == "turn":
            area = area_under_curve([value for _, value in known], [outcome.gain > 0 for outcome, _ in known])
            self._facts |= {metrics.JUDGE_TURN_AUC: area} if math.isfinite(area) else {}
        items, scores = [item for _, item, _ in scored], [score for _, _, score in scored]
        self.monitor.note_controls(self.monitor.show_controls(self._scorer, items, scores))
        ended = [(value, outcome.is_success) for outcome, value in known if outcome.is_end]
        if self._config.per == "turn":
            last = [one.outcome for row in rollout.turns for one in row if one is not None and one.outcome.is_end]
            ended += [(0.0, outcome.is_success) for outcome in last if outcome.reply.action is None]
        self.monitor.note([value for value, _ in ended], [truth for _, truth in ended])


def _episodes(rollout: Rollout) -> Iterator[tuple[int, slice]]:
    """Each env with each run of rows that belong to one episode."""
    for w in range(len(rollout.turns[0])):
        begin = 0
        for t, row in enumerate(rollout.turns):
            played = row[w]
            if played is None:
                break
            if played.outcome.is_end or t + 1 == len(rollout.turns):
                yield w, slice(begin, t + 1)
                begin = t + 1


def _played(rollout: Rollout, w: int, t: int) -> PlayedTurn:
    played = rollout.turns[t][w]
    assert played is not None, "a run of rows was played"
    return played


def without_unknown(rollout: Rollout) -> Rollout:
    """The rollout without episodes that have a turn of unknown reward, and, where they are compared, their groups."""
    unknown = [
        (w, span)
        for w, span in _episodes(rollout)
        if any(math.isnan(_played(rollout, w, t).reward) for t in range(span.start, span.stop))
    ]
    if not unknown:
        return rollout
    rows = [list(row) for row in rollout.turns]
    groups = {rollout.groups[w] for w, _ in unknown}
    is_compared = len(set(rollout.groups)) < len(rollout.groups)
    for w, span in [
        (w, span)
        for w, span in _episodes(rollout)
        if (w, span) in unknown or (is_compared and rollout.groups[w] in groups)
    ]:
        for t in range(span.start, span.stop):
            rows[t][w] = None
    return replace(rollout, turns=rows)
