"""The single entry of reward: for turns, chunks and whole episodes, from env, success, judge and novelty.

Rollouts show each turn or episode at once, so that a judge scores it while the next is played; the algorithm has the
episodes labelled before the update. A missing score of a judge is never replaced by the truth.
"""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np

from rlvlm.algorithms.policy_gradient.config import AdvantageConfig
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.judging import Score
from rlvlm.core.steps import FloatArray, Frames, spread
from rlvlm.envs.config import EnvConfig
from rlvlm.judge_bench.items import Item, TaskItems
from rlvlm.judge_bench.preflight import known_items, scored_suite
from rlvlm.judge_bench.preflight import preflight as try_judge
from rlvlm.judges.agreement import ALIKE, area_under_curve
from rlvlm.rewards.config import TurnRewardConfig
from rlvlm.rewards.judged import to_reward
from rlvlm.rewards.monitor import JudgeMonitor
from rlvlm.rewards.scorers import Scorer
from rlvlm.rewards.scoring_items import NO_PATH, ScoredItem, ScoringItem
from rlvlm.rewards.temporal import TemporalNovelty

_TURN_CLAIM, _EPISODE_CLAIM = 0.875, 0.5
"""Scores from which an episode counts as a claimed success. A turn's utility is 0.75 if it only comes nearer and 1 if
it reaches the goal."""
AWAY, SAME, NEARER, REACHED = 0.0, 0.25, 0.75, 1.0
"""Utility of a turn on the scale of scores, like the ratings in the prompt."""
_MOMENTS = 12
"""Maximum number of moments at which a judge scores an episode so far, for a video."""
Question = tuple[Hashable, ScoringItem]
"""Key of a turn, and the item to score for it."""


class RewardLabeller:
    """Rewards every turn of a rollout.

    A single thread asks, in the order of showing. A judge's failures never become the truth: the config decides whether
    the run ends, the episode (or its group) is left out, or its turn counts as neutral.

    Args:
        config: sources, their weights, and the scorer.
        scorer: scores turns or episodes; None if no scores are used.
        novelty: novelty of actions; None if it has no weight.
        goal: goal for the judge, instead of the env's own; empty takes the env's.
        draws_path: whether the judge sees the path of the hand.
    """

    def __init__(
        self,
        config: TurnRewardConfig,
        scorer: Scorer | None,
        novelty: TemporalNovelty | None = None,
        goal: str = "",
        *,
        draws_path: bool = False,
    ) -> None:
        self._config, self._scorer, self._novelty, self._goal = config, scorer, novelty, goal
        self._draws_path = draws_path
        # a single thread: the random numbers of a simulated scorer depend on the order of questions
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="scores")
        self._waiting: list[tuple[list[Question], Future[list[Score]]]] = []
        self._answered: dict[Hashable, tuple[ScoringItem, Score]] = {}
        """Answers about turns of episodes that are not labelled yet."""
        self._controls: Future[list[list[float]]] | None = None
        self._records: list[ScoredItem] = []
        # by slot: score of a growing clip at the end of the last piece, for running episodes
        self._worth: dict[int, float] = {}
        self._facts: dict[str, float] = {}
        self._threshold = None if config.threshold == "calibrated" else config.threshold
        success_threshold = _TURN_CLAIM if config.rates_turns else self._threshold or _EPISODE_CLAIM
        self.monitor = JudgeMonitor(config.monitor, config.monitor.success_threshold or success_threshold)

    @property
    def asks(self) -> bool:
        """Whether a scorer is asked about shown episodes."""
        return self._scorer is not None

    def show(self, episodes: Sequence[TokenEpisode]) -> None:
        """Starts asking about the last turn of each of `episodes`, or about finished ones as a whole.

        If turns are scored, the player shows an episode after each of its turns, or once at its end.
        """
        if self._scorer is None:
            return
        questions = [question for episode in episodes for question in self._questions(episode)]
        if questions:
            answers = self._pool.submit(self._scorer.score, [item for _, item in questions])
            self._waiting.append((questions, answers))

    def label(self, episodes: Sequence[TokenEpisode], env_step: int) -> list[TokenEpisode]:
        """Returns the episodes with every turn's reward; NaN if the scorer had no answer and the config leaves such
        turns out.

        Args:
            episodes: episodes all of whose turns were shown.
            env_step: env steps done when they had been played.

        Raises:
            JudgeUnavailable: the judge does not answer, or left a turn out although the config forbids it.
            RewardHacked: the judge is being fooled, and the config says to stop then.
        """
        began = time.monotonic()
        wanted = {key for episode in episodes for key, _ in self._questions(episode)} if self._scorer else set()
        # Some answers may be for the next rollout, or for groups carried over into it. In place, because the playing
        # thread appends to the list meanwhile.
        index = 0
        while index < len(self._waiting):
            questions, answers = self._waiting[index]
            if not any(key in wanted for key, _ in questions):
                index += 1
                continue
            del self._waiting[index]
            self._answered |= {
                key: (item, score) for (key, item), score in zip(questions, answers.result(), strict=True)
            }  # fmt: skip
        given = {key: self._answered.pop(key) for key in list(self._answered) if key in wanted}
        self._note_controls()  # shown by the last call
        waited = time.monotonic() - began
        novelty = self._novelties(episodes)
        weights = self._config.weights
        labelled, parts = [], []
        for episode, novel in zip(episodes, novelty, strict=True):
            success = np.zeros(len(episode), np.float32)
            success[-1] = episode.is_over and episode.is_success  # with the last turn of a finished episode
            columns = {
                "environment": episode.turn_rewards,
                "success": success,
                "judged": self._judged(episode, given, env_step),
                "novelty": novel,
            }
            total = np.zeros(len(episode), np.float64)
            for name, weight in weights.items():  # NaN of a source without weight must not spoil the sum
                total += weight * columns[name] if weight else 0.0
            labelled.append(replace(episode, rewards=total.astype(np.float32)))
            parts.append(np.stack([columns["environment"], columns["judged"], columns["novelty"], total], axis=1))
        self._note(np.concatenate(parts), labelled, waited)
        if given:
            self._watch_judge(episodes, given)
        if self._novelty is not None:
            self._novelty.learn([episode for episode in episodes if episode.is_over])
        return labelled

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
        made = known_items(scored_suite(task, count), env, reward.frame_px, seed, reward.rates_turns, self._goal)
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
        if is_measured:
            known = [scoring_item(item, reward.num_frames, env.draw_path) for item in made.items if item.source < 0]
            log(f"having {len(known)} {kind} scored twice")
            noise = found[metrics.JUDGE_PREFLIGHT_NOISE] = self.measure_noise(known, make_forgetful())
            log(
                f"an episode's score has a standard deviation of {noise:.3f}: groups whose own is not "
                f"above {advantage.noise_factor * noise:.3f} teach nothing"
            )
        return found

    def preflight_on(self, made: TaskItems, seed: int, log: Callable[[str], None]) -> dict[str, float]:
        """Returns how well the judge distinguishes known items, by names in `rlvlm.core.metrics`; sets the threshold if
        it is to be calibrated, and the monitor's success threshold unless the user has set it.

        Raises:
            JudgeRefused: it cannot distinguish them.
        """
        assert self._scorer is not None, "there is a scorer to be tried"
        config = self._config
        judge = RunScorer(self._scorer, config.num_frames, self._draws_path)
        figures = try_judge(judge, made, config.num_frames, seed, min_auc=config.monitor.min_auc, log=log)
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
            self._threshold = threshold
        # for turns the threshold means that the turn came nearer, not that it reached the goal
        is_open = config.monitor.success_threshold is None and self._threshold in (None, threshold)
        if not config.rates_turns and is_open:
            self.monitor.success_threshold = threshold
        return {metrics.JUDGE_PREFLIGHT_AUC: area["value"], metrics.JUDGE_PREFLIGHT_THRESHOLD: threshold}

    def measure_noise(self, known: Sequence[ScoringItem], scorer: Scorer) -> float:
        """Returns the standard deviation of an episode's reward when the judge is asked again.

        Args:
            known: items that are scored twice; those without an answer are left out. Scores clipped to 0 or 1 differ
                less than others would.
            scorer: the judge without a memory: a remembered answer contains no noise.

        Raises:
            JudgeUnavailable: there is no answer about an episode, and the config says to stop then.
        """
        # Var(first - again) = 2 Var(noise)
        # the threshold and the success's weight are part of an episode's reward, and so of its noise
        first, again = (np.array([self._value(score) for score in scorer.score(known)]) for _ in range(2))
        return float(np.sqrt(np.nanmean((first - again) ** 2) / 2)) / (1.0 + self._config.success_weight)

    def follow(self, episode: TokenEpisode) -> FloatArray:
        """Returns [S], the scores of a finished episode so far after each step: asked at most `_MOMENTS` times, evenly
        spread, and held constant in between. NaN where there is no answer.

        Raises:
            JudgeUnavailable: the judge does not answer.
        """
        assert self._scorer is not None, "there is a scorer to be asked"
        steps = episode.num_steps
        moments = np.unique(np.linspace(1, steps, min(_MOMENTS, steps)).round().astype(int))
        whole = self._whole(episode)
        # the same question as about the whole episode, with as many images, as if it had ended at that moment
        items = [
            replace(
                whole,
                snapshots=spread(episode.snapshots[: moment + 1], self._config.num_frames),
                path=self._path(episode.snapshots[: moment + 1]),
                is_success=episode.is_success and moment == steps,
                success_lost=False,
            )
            for moment in moments
        ]
        scores = self._pool.submit(self._scorer.score, items).result()
        values = np.array([math.nan if score.value is None else score.value for score in scores], np.float32)
        return values.repeat(np.diff(moments, append=steps + 1))

    def report(self) -> dict[str, float]:
        """Returns the newest rollout's metrics by names in `rlvlm.core.metrics`."""
        return self._facts | (self.monitor.report() if self._scorer is not None else {})

    def drain_records(self) -> list[ScoredItem]:
        """Returns the scores since the last call."""
        records, self._records = self._records, []
        return records

    def get_state(self) -> dict[str, Any]:
        """Returns everything needed to resume exactly; between rounds only questions about controls and carried-over
        data may be pending.
        """
        wait([answers for _, answers in self._waiting])  # the scorer counts its questions
        self._note_controls()
        return {
            "monitor": self.monitor.get_state(),
            "scorer": None if self._scorer is None else self._scorer.get_state(),
            "novelty": None if self._novelty is None else self._novelty.get_state(),
            "threshold": self._threshold,
            "worth": [[float(slot), worth] for slot, worth in self._worth.items()],
            "success_threshold": self.monitor.success_threshold,
            "facts": {name: value for name, value in self._facts.items() if name != metrics.REWARD_WAIT_S},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; drops pending questions."""
        # a late answer would change the scorer's count of questions
        wait([answers for _, answers in self._waiting])
        self._note_controls()
        self._waiting.clear()
        self._answered.clear()
        self._records = []
        self._worth = {int(slot): float(worth) for slot, worth in state.get("worth", [])}
        self.monitor.set_state(state["monitor"])
        self._threshold, self.monitor.success_threshold = state["threshold"], float(state["success_threshold"])
        self._facts = dict(state["facts"])
        if self._scorer is not None:
            self._scorer.set_state(state["scorer"])
        if self._novelty is not None:
            self._novelty.set_state(state["novelty"])

    def _questions(self, episode: TokenEpisode) -> list[Question]:
        """Returns questions about the turns of an episode, or about a finished one as a whole."""
        if self._config.per == "episode":
            return [(_key(episode, len(episode) - 1), self._whole(episode))] if episode.is_over else []
        return [(_key(episode, t), item) for t in range(len(episode)) if (item := self._turn(episode, t)) is not None]

    def _whole(self, episode: TokenEpisode) -> ScoringItem:
        return ScoringItem(
            goal=self._goal or episode.goals[-1],
            snapshots=spread(episode.snapshots, self._config.num_frames),
            path=self._path(episode.snapshots),
            is_success=episode.is_success,
            success_lost=episode.success_lost,
            progress=float(episode.progress[-1]),
        )

    def _path(self, moments: FloatArray) -> FloatArray:
        """Returns the `path` of an item that shows some of `moments` [N, S]."""
        return moments if self._draws_path else NO_PATH

    def _turn(self, episode: TokenEpisode, t: int) -> ScoringItem | None:
        """Returns the item to score for turn `t`; None if its reply was unreadable."""
        end = int(episode.ends[t])
        reply = episode.replies[end - 1] if episode.replies else None
        if reply is not None and reply.action is None:
            return None
        if self._config.clip == "growing":
            return ScoringItem(
                goal=self._goal or episode.goals[t],
                snapshots=spread(episode.snapshots[: end + 1], self._config.num_frames),
                path=self._path(episode.snapshots[: end + 1]),
                is_success=bool(episode.success[:end].any()),
                success_lost=episode.success_lost and end == episode.num_steps,
                progress=float(episode.progress[end - 1]),
            )
        moments = episode.snapshots[end - int(episode.steps[t]) : end + 1]
        return ScoringItem(
            goal=self._goal or episode.goals[t],
            snapshots=moments[[0, -1]],
            path=self._path(moments),
            action=episode.action_names[t] if episode.action_names else "",
            is_success=bool(episode.success[end - 1]),
            progress=float(episode.progress[end - 1]),
        )

    def _judged(
        self, episode: TokenEpisode, given: dict[Hashable, tuple[ScoringItem, Score]], env_step: int
    ) -> FloatArray:
        """Returns [T], the judge's rewards, NaN if there is none; also records the scores."""
        config, per_turn, rates_turns = self._config, self._config.per == "turn", self._config.rates_turns
        worth = self._worth.pop(episode.slot, 0.0) if episode.first_step else 0.0
        # turns without a question are those with an unreadable reply
        rewards = np.full(len(episode), config.unreadable if per_turn and self._scorer is not None else 0.0)
        for t in range(len(episode) if given else 0):
            asked = given.get(_key(episode, t))
            if asked is None:
                continue
            item, score = asked
            value = self._value(score)
            if not per_turn:
                # weighted mean of the judge's score and the env's own test, which stays in [0, 1]
                value = (value + config.success_weight * bool(item.is_success)) / (1.0 + config.success_weight)
            rewards[t] = float(to_reward(value)) if config.is_centred and math.isfinite(value) else value
            if config.clip == "growing" and math.isfinite(value):  # the gain: an episode's add up to its last score
                rewards[t], worth = rewards[t] - worth, float(rewards[t])
            record = ScoredItem(
                item=item, score=score, env_step=env_step, timestamp=time.time(), group=episode.group,
                env_return=float(episode.turn_rewards[t]) if per_turn else episode.env_return,
                truth=_utility(item, float(episode.gains[t])) if rates_turns else item.progress,
                success_threshold=self.monitor.success_threshold,
            )  # fmt: skip
            self._records.append(record)
        if not episode.is_over:
            self._worth[episode.slot] = worth
        return rewards

    def _value(self, score: Score) -> float:
        config = self._config
        if score.value is not None:
            return score.value if self._threshold is None else float(score.value >= self._threshold)
        if config.without_answer == "stop":
            raise JudgeUnavailable(
                f"the judge gave no score: {score.status}",
                "look at the judge, then `rlvlm resume`; or choose --reward.without-answer drop",
            )
        return math.nan if config.without_answer == "drop" else config.neutral

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
        used = (True, self._scorer is not None, self._novelty is not None, True)
        known = np.isfinite(table)  # NaN where the judge gave no answer: a mean over the rest
        means = np.where(known, table, 0.0).sum(0) / np.maximum(known.sum(0), 1)
        self._facts = {name: float(mean) for name, mean, is_used in zip(names, means, used, strict=True) if is_used}
        if self._scorer is not None:
            kept = sum(map(len, drop_unlabelled(episodes)))
            left_out = 1 - kept / max(sum(map(len, episodes)), 1)
            self._facts |= {metrics.REWARD_LEFT_OUT: left_out, metrics.REWARD_WAIT_S: waited}

    def _watch_judge(self, episodes: Sequence[TokenEpisode], given: dict[Hashable, tuple[ScoringItem, Score]]) -> None:
        """Passes finished episodes to the monitor, and has it show its controls with the next questions.

        An episode with an unreadable last reply was not called a success: it counts as scored 0.
        """
        assert self._scorer is not None, "there is a scorer"
        items, scores = [item for item, _ in given.values()], [score for _, score in given.values()]
        self._controls = self._pool.submit(self.monitor.show_controls, self._scorer, items, scores)
        if self._config.rates_turns:
            known = [
                (asked[1].value, float(episode.gains[t]) > 0)
                for episode in episodes
                for t in range(len(episode))
                if (asked := given.get(_key(episode, t))) is not None and asked[1].value is not None
            ]
            area = area_under_curve([value for value, _ in known], [truth for _, truth in known])
            self._facts |= {metrics.JUDGE_TURN_AUC: area} if math.isfinite(area) else {}
            self._note_controls()  # turns are many and cheap: none is pending between rollouts
        ended: list[tuple[float, bool | None]] = []
        for episode in episodes:
            if not episode.is_over:
                continue
            asked = given.get(_key(episode, len(episode) - 1))
            truth = bool(episode.success[-1]) if self._config.rates_turns else episode.is_success
            if asked is None:
                ended.append((0.0, truth))
            elif asked[1].value is not None:
                ended.append((asked[1].value, None if episode.success_lost else truth))
        self.monitor.note([value for value, _ in ended], [truth for _, truth in ended])

    def _note_controls(self) -> None:
        """Passes the controls shown last to the monitor, once they are answered."""
        shown, self._controls = self._controls, None
        if shown is not None:
            self.monitor.note_controls(shown.result())


def _key(episode: TokenEpisode, t: int) -> Hashable:
    """Returns the key of a turn, the same in a running episode and in its piece for learning."""
    return episode.group, episode.slot, episode.seed, int(episode.ends[t]), int(episode.played_at[t])


def _utility(item: ScoringItem, gain: float) -> float:
    """Returns a perfect judge's score for a turn, on the scale of its scores."""
    if item.is_success:
        return REACHED
    return NEARER if gain > 0 else SAME if gain == 0 else AWAY


def drop_unlabelled(episodes: Sequence[TokenEpisode]) -> list[TokenEpisode]:
    """Returns the episodes with all rewards known; if episodes are compared, drops groups with any other one."""
    # an advantage in a group that lost an episode would be relative to the wrong mean
    unknown = {id(episode) for episode in episodes if np.isnan(episode.rewards).any()}
    groups = [episode.group for episode in episodes]
    broken = {episode.group for episode in episodes if id(episode) in unknown and groups.count(episode.group) > 1}
    return [episode for episode in episodes if id(episode) not in unknown and episode.group not in broken]


class RunScorer:
    """Lets a run's scorer answer the bench's items, with its memory, images and fallback judge.

    Args:
        scorer: scorer of the run.
        num_frames: maximum number of images of an episode.
        draws_path: whether it sees the path of the hand.
    """

    def __init__(self, scorer: Scorer, num_frames: int, draws_path: bool = False) -> None:
        self._scorer, self._num_frames, self._draws_path = scorer, num_frames, draws_path

    def answers(self, asked: Sequence[tuple[Item, bool]]) -> list[Score]:
        return self._scorer.score([scoring_item(item, self._num_frames, self._draws_path) for item, _ in asked])


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
