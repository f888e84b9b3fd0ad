"""The single entry of reward: for turns, chunks and whole episodes, from env, success, judge and novelty.

Rollouts show each turn or episode at once, so that a judge scores it while the next is played; the algorithm has the
episodes labelled before the update. A missing score of a judge is never replaced by the truth.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlvlm.algorithms.policy_gradient.config import AdvantageConfig
from rlvlm.algorithms.policy_gradient.critic import Critic
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Score
from rlvlm.core.steps import FloatArray, Frames, spread
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import Env
from rlvlm.judge_bench.items import Item, TaskItems
from rlvlm.judge_bench.preflight import known_items, preflight, rehearse_before, scored_suite, with_rehearsal
from rlvlm.judges.agreement import ALIKE
from rlvlm.rewards.config import TurnRewardConfig
from rlvlm.rewards.judged_turns import JudgedTurns
from rlvlm.rewards.scorers import Scorer
from rlvlm.rewards.scoring_items import NO_PATH, ScoredItem, ScoringItem
from rlvlm.rewards.temporal import TemporalNovelty

logger = logging.getLogger(__name__)


class RewardLabeller:
    """Rewards every turn of a rollout by the weighted sum of its sources.

    Args:
        config: sources, their weights, and the scorer.
        scorer: scores turns or episodes; None if no scores are used.
        novelty: novelty of actions; None if it has no weight.
        goal: see `JudgedTurns`.
        view: see `JudgedTurns`.
        refuses_faulty: whether a judge with a fault that the preflight finds is refused.
        critic: learns the outcomes by which turns are shaped; None if they are not.
    """

    def __init__(  # noqa: PLR0913 - the sources, and what only some of them need
        self,
        config: TurnRewardConfig,
        scorer: Scorer | None,
        novelty: TemporalNovelty | None = None,
        goal: str = "",
        *,
        view: Env | None = None,
        refuses_faulty: bool = True,
        critic: Critic | None = None,
    ) -> None:
        self._config, self._novelty, self._refuses_faulty, self._critic = config, novelty, refuses_faulty, critic
        self._has_told = False
        if critic is not None and config.weights["environment"]:
            logger.warning("the env's own reward is in the sum beside reward.shaping value: if it shapes, both do")
        self._judged = None if scorer is None else JudgedTurns(config, scorer, goal, view)
        self._tried: list[tuple[ScoringItem, Score]] = []
        """Plain known items of the preflight, and their scores."""
        self._facts: dict[str, float] = {}

    @property
    def asks(self) -> bool:
        """Whether a scorer is asked about shown episodes."""
        return self._judged is not None

    @property
    def judged(self) -> JudgedTurns:
        """Rewards by a scorer, where one is asked."""
        assert self._judged is not None, "there is a scorer to be asked"
        return self._judged

    def show(self, episodes: Sequence[TokenEpisode], *, gathers: bool = False) -> None:
        """Starts asking a scorer, if there is one; see `JudgedTurns.show`."""
        if self._judged is not None:
            self._judged.show(episodes, gathers=gathers)

    def label(self, episodes: Sequence[TokenEpisode], env_step: int) -> list[TokenEpisode]:
        """Returns the episodes with every turn's reward; NaN if the scorer had no answer and the config leaves such
        turns out. For arguments and errors see `JudgedTurns.label` and `JudgedTurns.watch`.
        """
        began = time.monotonic()
        judged = [np.zeros(len(episode)) for episode in episodes]
        if self._judged is not None:
            judged = self._judged.label(episodes, env_step)
        waited = time.monotonic() - began
        weights = self._config.weights
        labelled, parts = [], []
        for episode, score, novel in zip(episodes, judged, self._novelties(episodes), strict=True):
            success = np.zeros(len(episode), np.float32)
            success[-1] = episode.is_over and episode.is_success  # with the last turn of a finished episode
            columns = {"environment": episode.turn_rewards, "success": success, "judged": score, "novelty": novel}
            total = np.zeros(len(episode), np.float64)
            for name, weight in weights.items():  # NaN of a source without weight must not spoil the sum
                total += weight * columns[name] if weight else 0.0
            labelled.append(replace(episode, rewards=total.astype(np.float32)))
            parts.append(np.stack([columns["environment"], score, novel, total], axis=1))
        self._note(np.concatenate(parts), labelled, waited)
        if self._critic is not None:
            true = np.array([episode.is_success for episode in episodes], np.float32)
            self._critic.note(episodes, true if self._judged is None else self._judged.outcomes(episodes))
        if self._judged is not None:
            self._facts |= self._judged.watch(episodes)
        if self._novelty is not None:
            self._novelty.learn([episode for episode in episodes if episode.is_over])
        return labelled

    def shape(self, episodes: Sequence[TokenEpisode], gamma: float) -> list[TokenEpisode]:
        """Returns labelled episodes with each turn's reward for the change of the learned value, if configured, which
        then learns from all that were labelled since the last call.

        Args:
            episodes: episodes, or pieces of them.
            gamma: discount per turn, of the advantages.
        """
        if self._critic is None:
            return list(episodes)
        config, rates = self._config, (0.0, 0.0)
        if config.corrects_noise and config.teacher == "biased":
            rates = config.false_positives, config.false_negatives
        elif config.corrects_noise and self._judged is not None:
            rates = self._judged.rates[0], self._judged.rates[1]
        # a success is worth 1, and 1 more than a failure, or 2 more if scores are centred
        unit = config.weights["judged"] * (1 + config.is_centred) if config.scores else 1.0
        shaped = self._critic.shape(episodes, gamma, unit, rates)
        if not self._critic.tells_apart and not self._has_told:
            self._has_told = True
            logger.info("all outcomes were alike so far: no value can be learned from them, and nothing is shaped")
        return shaped

    def preflight(
        self,
        task: str,
        env: EnvConfig,
        advantage: AdvantageConfig,
        seed: int,
        make_forgetful: Callable[[], Scorer],
        log: Callable[[str], None],
    ) -> dict[str, float]:
        """Tests the judge on known items, and its repeatability if its noise is to be measured.

        Args:
            task: task from whose bench a small sample is drawn.
            env: env settings of the run.
            advantage: whether noise is measured.
            seed: seed of the run.
            make_forgetful: makes the same judge without a memory, which answers the same question anew each time.
            log: receives messages about progress.

        Returns:
            Figures, by names in `rlvlm.core.metrics`; empty if no scorer is asked, or nothing is known.

        Raises:
            JudgeRefused: the judge cannot tell them apart.
            UsageError: a threshold is to be calibrated, or noise measured, and no episodes are known.
        """
        reward = self._config
        is_measured = reward.scores and advantage.scorer_noise == "measured"
        count = reward.monitor.preflight if reward.asks_judge or is_measured else 0
        if not count:
            return {}
        kind = "turns" if reward.rates_turns else "episodes"
        suite = with_rehearsal(scored_suite(task, count)) if reward.monitor.rehearse else scored_suite(task, count)
        made = known_items(suite, env, reward.frame_px, seed, reward.rates_turns, self.judged.goal)
        made.close()  # the run's own viewer draws
        if not made.items:
            unknown = "the task has no expert or script that succeeds and fails"
            if reward.threshold == "calibrated":
                raise UsageError(
                    f"nothing calibrates the threshold: {unknown}", "--reward.threshold with a number, or None"
                )
            if is_measured:
                fix = "--algo.advantage.scorer-noise with a number"
                raise UsageError(f"nothing to measure the judge's noise on: {unknown}", fix)
            log(f"the judge is not tried on known {kind}: {unknown}")
            return {}
        found: dict[str, float] = {}
        if reward.asks_judge:
            num_known = sum(item.source < 0 for item in made.items)  # controls are made from some of these
            log(f"trying the judge on {num_known} {kind} whose worth is known")
            found |= self.preflight_on(made, seed, log)
        if reward.monitor.rehearse:
            rehearse_before(
                self, task, env, reward.monitor.rehearse,
                kind="scores", size_px=reward.frame_px, num_frames=reward.num_frames, seed=seed,
                goal=self.judged.goal, refuses_faulty=self._refuses_faulty, log=log,
            )  # fmt: skip
        if is_measured:
            known = [scoring_item(item, reward.num_frames, env.draw_path) for item in made.items if item.source < 0]
            log(f"having {len(known)} {kind} scored twice")
            noise = found[metrics.JUDGE_PREFLIGHT_NOISE] = self.judged.measure_noise(known, make_forgetful())
            log(
                f"an episode's score has a standard deviation of {noise:.3f}: groups whose own is not "
                f"above {advantage.noise_factor * noise:.3f} teach nothing"
            )
        return found

    def answers(self, asked: Sequence[tuple[Item, bool]]) -> list[Score]:
        """Returns the run's scores of the bench's items, with its memory, images and fallback judge."""
        judged, frames = self.judged, self._config.num_frames
        items = [scoring_item(item, frames, judged.draws_path) for item, _ in asked]
        scores = judged.scorer.score(items)
        # controls are made from other items, and their truth is that of the change
        self._tried += [
            (item, score) for item, score, (known, _) in zip(items, scores, asked, strict=True) if known.source < 0
        ]
        return scores

    def preflight_on(self, made: TaskItems, seed: int, log: Callable[[str], None]) -> dict[str, float]:
        """Returns how well the judge distinguishes known items, by names in `rlvlm.core.metrics`; sets the threshold if
        it is to be calibrated, and the monitor's success threshold unless the user has set it.

        Raises:
            JudgeRefused: it cannot distinguish them.
        """
        config = self._config
        self._tried.clear()
        figures = preflight(
            self, made, config.num_frames, seed,
            min_auc=config.monitor.min_auc, refuses_faulty=self._refuses_faulty, log=log,
        )  # fmt: skip
        area, threshold = figures["auc"], figures["threshold"]
        log(
            f"AUC of success {area['value']:.2f} ({area['low']:.2f} to {area['high']:.2f}), best threshold "
            f"{threshold:.2f} (Youden's J {figures['youden']:.2f})"
        )
        means = figures["means"]
        lift = means.get("success", math.nan) - means.get("failure", math.nan)
        if config.threshold is None and lift <= ALIKE:
            # measured: with a perfect judge whose scores were within .007 of each other, a run with a critic learned
            # nothing
            hint = "a critic's error may hide that; --reward.threshold calibrated makes 1 and 0 of them"
            log(f"the judge scores successes only {lift:.3f} above failures: {hint}")
        if config.threshold == "calibrated":
            self.judged.threshold = threshold
        # for turns the threshold means that the turn came nearer, not that it reached the goal
        is_open = config.monitor.success_threshold is None and self.judged.threshold in (None, threshold)
        if not config.rates_turns and is_open:
            self.judged.monitor.success_threshold = threshold
        self.judged.expect(self._tried)
        return {metrics.JUDGE_PREFLIGHT_AUC: area["value"], metrics.JUDGE_PREFLIGHT_THRESHOLD: threshold}

    def follow(self, episode: TokenEpisode) -> FloatArray:
        """Returns the scores of a finished episode so far; see `JudgedTurns.follow`."""
        return self.judged.follow(episode)

    def report(self) -> dict[str, float]:
        """Returns the newest rollout's metrics by names in `rlvlm.core.metrics`."""
        learned = self._critic.report() if self._critic is not None else {}
        return self._facts | learned | (self._judged.monitor.report() if self._judged is not None else {})

    def drain_records(self) -> list[ScoredItem]:
        """Returns the scores since the last call."""
        return self._judged.drain_records() if self._judged is not None else []

    def get_state(self) -> dict[str, Any]:
        """Returns everything needed to resume exactly; waits for pending questions."""
        return (self._judged.get_state() if self._judged is not None else {}) | {
            "novelty": None if self._novelty is None else self._novelty.get_state(),
            "critic": None if self._critic is None else self._critic.get_state(),
            "facts": {name: value for name, value in self._facts.items() if name != metrics.REWARD_WAIT_S},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; drops pending questions."""
        self._facts = dict(state["facts"])
        if self._judged is not None:
            self._judged.set_state(state)
        if self._novelty is not None:
            self._novelty.set_state(state["novelty"])
        if self._critic is not None:
            self._critic.set_state(state["critic"])

    def _novelties(self, episodes: Sequence[TokenEpisode]) -> list[FloatArray]:
        """Returns [T], novelty in [0, 1] of each; 0 for turns of unfinished episodes."""
        found = [np.zeros(len(episode), np.float32) for episode in episodes]
        if self._novelty is None:
            return found
        over = [index for index, episode in enumerate(episodes) if episode.is_over]
        values = self._novelty.label([episodes[index] for index in over])
        for index, own in zip(over, values, strict=True):
            found[index] = own[len(own) - len(found[index]) :]  # it may have begun in an earlier rollout
        return found

    def _note(self, table: FloatArray, episodes: Sequence[TokenEpisode], waited: float) -> None:
        """Stores the unscaled means of each source."""
        names = (metrics.REWARD_ENVIRONMENT, metrics.REWARD_JUDGED, metrics.REWARD_NOVELTY, metrics.REWARD_TOTAL)
        used = (True, self.asks, self._novelty is not None, True)
        known = np.isfinite(table)  # NaN where the judge gave no answer: a mean over the rest
        means = np.where(known, table, 0.0).sum(0) / np.maximum(known.sum(0), 1)
        self._facts = {name: float(mean) for name, mean, is_used in zip(names, means, used, strict=True) if is_used}
        if self.asks:
            kept = sum(map(len, drop_unlabelled(episodes)))
            left_out = 1 - kept / max(sum(map(len, episodes)), 1)
            self._facts |= {metrics.REWARD_LEFT_OUT: left_out, metrics.REWARD_WAIT_S: waited}


def drop_unlabelled(episodes: Sequence[TokenEpisode]) -> list[TokenEpisode]:
    """Returns the episodes with all rewards known; if episodes are compared, drops groups with any other one."""
    # an advantage in a group that lost an episode would be relative to the wrong mean
    unknown = {id(episode) for episode in episodes if np.isnan(episode.rewards).any()}
    groups = [episode.group for episode in episodes]
    broken = {episode.group for episode in episodes if id(episode) in unknown and groups.count(episode.group) > 1}
    return [episode for episode in episodes if id(episode) not in unknown and episode.group not in broken]


def scoring_item(item: Item, num_frames: int, draws_path: bool = False) -> ScoringItem:
    """Returns a known episode or turn of the bench, in the form of a run's question."""
    return ScoringItem(
        goal=item.goal,
        snapshots=spread(item.sides[0], num_frames),
        path=item.side_path(0) if draws_path else NO_PATH,
        action=item.action,
        is_success=item.success,
        progress=item.truth[0],
    )


def flip_if_configured(frames: Frames, reward: TurnRewardConfig) -> Frames:
    """Returns `frames` [N, H, W, 3] as the judge sees them: unchanged, or flipped left to right."""
    return np.ascontiguousarray(frames[:, :, ::-1]) if reward.flip_images else frames
