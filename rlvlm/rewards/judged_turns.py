"""Rewards of turns, chunks and episodes by a judge: what is asked, what an answer is worth, and the watch over it."""

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Score
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray, spread
from rlvlm.envs.env import Env
from rlvlm.judges.agreement import area_under_curve
from rlvlm.judges.side_by_side import ASKED_AT_ONCE, callers_at_once
from rlvlm.rewards.config import TurnRewardConfig
from rlvlm.rewards.judged import to_reward
from rlvlm.rewards.monitor import MIN_KNOWN, JudgeMonitor
from rlvlm.rewards.scorers import Scorer
from rlvlm.rewards.scoring_items import NO_PATH, ScoredItem, ScoringItem

_TURN_CLAIM, _EPISODE_CLAIM = 0.875, 0.5
"""Scores from which an episode counts as a claimed success. A turn's utility is 0.75 if it only comes nearer and 1 if
it reaches the goal."""
AWAY, SAME, NEARER, REACHED = 0.0, 0.25, 0.75, 1.0
"""Utility of a turn on the scale of scores, like the ratings in the prompt."""
_GATHER_S = 0.005
"""Time for which a question of an asynchronous rollout waits for others, seconds: a judge answers sixteen as fast."""
_MOMENTS = 12
"""Maximum number of moments at which a judge scores an episode so far, for a video."""
Question = tuple[Hashable, ScoringItem]
"""Key of a turn, and the item to score for it."""

Answers = dict[Hashable, tuple[ScoringItem, Score]]
"""Items and their scores, by the keys of their turns."""


class JudgedTurns(Stateful):
    """Rewards turns, or whole episodes with their last turn, by a scorer that is asked as soon as they are shown.

    A single thread asks, in the order of showing; of a judge that several may ask (`questions_at_once`), as many as
    keep it busy. A judge's failures never become the truth: the config decides whether the run ends, the episode (or
    its group) is left out, or its turn counts as neutral.

    Args:
        config: what is scored, and what a score is worth.
        scorer: scores turns or episodes.
        goal: goal for the judge, instead of the env's own; empty takes the env's.
        view: env as the judge sees it: whether the path of the hand is drawn, and what controls take from a scene; None
            knows nothing of it.
    """

    STATE = ("monitor", "scorer", "threshold", "_known", "_num_watched", "rates")

    def __init__(self, config: TurnRewardConfig, scorer: Scorer, goal: str = "", view: Env | None = None) -> None:
        self._config, self.scorer, self.goal = config, scorer, goal
        self.draws_path = view is not None and view.draws_path
        # a single thread: the random numbers of a simulated scorer, and of controls, depend on the order of questions
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="scores")
        threads = callers_at_once(scorer)
        self._asking = ThreadPoolExecutor(threads, thread_name_prefix="scores") if threads > 1 else self._pool
        self._waiting: list[tuple[list[Question], Future[list[Score]]]] = []
        self._unasked: deque[tuple[list[ScoringItem], Future[list[Score]]]] = deque()
        """Those of them that no thread has begun to ask about."""
        self._taking = Lock()
        self._answered: Answers = {}
        """Answers about turns of episodes that are not labelled yet."""
        self._given: Answers = {}
        """Answers about the episodes that were labelled last."""
        self._controls: Future[list[list[float]]] | None = None
        self._records: list[ScoredItem] = []
        # by slot: score of a growing clip at the end of the last piece, for running episodes
        self._worth: dict[int, float] = {}
        self.threshold = None if config.threshold == "calibrated" else config.threshold
        """Score from which a score counts as 1; None uses scores unchanged."""
        success_threshold = _TURN_CLAIM if config.rates_turns else self.threshold or _EPISODE_CLAIM
        claim = config.monitor.success_threshold or success_threshold
        columns = () if view is None else view.robot_columns
        # which of the scene's goals the user's own words name is not known
        goals_in_view = None if view is None or goal else view.goals_in_view
        self.monitor = JudgeMonitor(config.monitor, claim, columns, goals_in_view)
        self.monitor.is_graded = config.threshold is None
        self._known: list[dict[str, Any]] = []
        """Known items that are shown again, with their scores before the run."""
        self._num_watched = 0
        self.rates = [0.0, 0.0]
        """Mean score of known failures, and 1 minus that of known successes: its false positives and negatives, if
        scores are 0 or 1. 0 before they are known."""
        self.make_forgetful: Callable[[], Scorer] | None = None
        """Makes the same judge without its memory, for these; None shows none."""

    def expect(self, asked: Sequence[tuple[ScoringItem, Score]]) -> None:
        """Takes known items and the judge's scores of them, before the run, as what it is to be held to."""
        answered = [(item, score) for item, score in asked if score.value is not None and item.is_success is not None]
        known = [(item, float(score.value or 0.0)) for item, score in answered]
        self.monitor.expect([value for _, value in known], [bool(item.is_success) for item, _ in known])
        for truth in (False, True):
            values = [self._value(score) for item, score in answered if bool(item.is_success) is truth]
            if len(values) >= MIN_KNOWN:
                self.rates[truth] = abs(truth - float(np.mean(values)))
        count = self._config.monitor.known_again
        # half of them successes, if there are as many: a judge may forget what success looks like, or failure
        halves = [[pair for pair in known if bool(pair[0].is_success) is truth] for truth in (True, False)]
        chosen = [pair for half in halves for pair in half[: (count + 1) // 2]][:count]
        self._known = [
            {
                "goal": item.goal, "snapshots": item.snapshots, "path": item.path, "action": item.action,
                "is_success": bool(item.is_success), "progress": item.progress, "score": value,
            }
            for item, value in chosen
        ]  # fmt: skip

    def show(self, episodes: Sequence[TokenEpisode], *, gathers: bool = False) -> None:
        """Starts asking about the last turn of each of `episodes`, or about finished ones as a whole.

        If turns are scored, the player shows an episode after each of its turns, or once at its end.

        Args:
            episodes: what was played.
            gathers: whether these questions may go out with those of other calls: what one asks together then depends
                on timing, so only rollouts do so that depend on it anyway.
        """
        questions = [question for episode in episodes for question in self._questions(episode)]
        if questions:
            answers: Future[list[Score]] = Future()
            self._waiting.append((questions, answers))
            self._unasked.append(([item for _, item in questions], answers))
            if not gathers or len(self._unasked) == 1:  # else somebody is on the way to these as well
                self._asking.submit(self._ask, gathers)

    def _ask(self, gathers: bool) -> None:
        """Asks the questions of the earliest call to `show` that waits, or of all that do."""
        with self._taking:  # one gathers at a time, or all would have a few
            if not self._unasked:  # another one has gathered them
                return
            if gathers and len(self._unasked) < ASKED_AT_ONCE:
                time.sleep(_GATHER_S)
            asked = [self._unasked.popleft() for _ in range(min(len(self._unasked), ASKED_AT_ONCE) if gathers else 1)]
            if gathers and self._unasked:
                self._asking.submit(self._ask, gathers)
        try:
            scores = iter(self.scorer.score([item for items, _ in asked for item in items]))
        except BaseException as error:
            for _, answers in asked:
                answers.set_exception(error)  # `label` raises it
            return
        for items, answers in asked:
            answers.set_result(list(islice(scores, len(items))))

    def label(self, episodes: Sequence[TokenEpisode], env_step: int) -> list[FloatArray]:
        """Returns each episode's rewards [T]; NaN where there was no answer and the config leaves such turns out.

        Args:
            episodes: episodes all of whose turns were shown.
            env_step: env steps done when they had been played.

        Raises:
            JudgeUnavailable: the judge does not answer, or left a turn out although the config forbids it.
        """
        wanted = {key for episode in episodes for key, _ in self._questions(episode)}
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
        self._given = {key: self._answered.pop(key) for key in list(self._answered) if key in wanted}
        self._note_controls()  # shown by the last call
        return [self._rewards(episode, env_step) for episode in episodes]

    def watch(self, episodes: Sequence[TokenEpisode]) -> dict[str, float]:
        """Passes the episodes labelled last to the monitor, which shows its controls with the next questions.

        An episode with an unreadable last reply was not called a success: it counts as scored 0.

        Returns:
            How well turns are told apart, by its name in `rlvlm.core.metrics`, where turns are scored.

        Raises:
            RewardHacked: the judge is being fooled, and the config says to stop then.
        """
        figures: dict[str, float] = {}
        given, self._given = self._given, {}
        if not given:
            return figures
        self._num_watched += 1
        if self._num_watched % self._config.monitor.known_every == 0:
            self._show_known()
        items, scores = [item for item, _ in given.values()], [score for _, score in given.values()]
        self._controls = self._pool.submit(self.monitor.show_controls, self.scorer, items, scores)
        if self._config.rates_turns:
            known = [
                (asked[1].value, float(episode.gains[t]) > 0)
                for episode in episodes
                for t in range(len(episode))
                if (asked := given.get(_key(episode, t))) is not None and asked[1].value is not None
            ]
            area = area_under_curve([value for value, _ in known], [truth for _, truth in known])
            figures = {metrics.JUDGE_TURN_AUC: area} if math.isfinite(area) else {}
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
        return figures

    def outcomes(self, episodes: Sequence[TokenEpisode]) -> FloatArray:
        """Returns [E], the scores in [0, 1] of the episodes labelled last; NaN without an answer, or an end."""
        given = [self._given.get(_key(episode, len(episode) - 1)) for episode in episodes]
        values = [self._value(asked[1]) if asked and asked[1].value is not None else math.nan for asked in given]
        return np.array(values, np.float32)

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
        steps = episode.num_steps
        moments = np.unique(np.linspace(1, steps, min(_MOMENTS, steps)).round().astype(int))
        items = [self._so_far(episode, moment, episode.goals[-1]) for moment in moments.tolist()]
        scores = self._pool.submit(self.scorer.score, items).result()
        values = np.array([math.nan if score.value is None else score.value for score in scores], np.float32)
        return values.repeat(np.diff(moments, append=steps + 1))

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
        return super().get_state() | {
            "worth": [[float(slot), worth] for slot, worth in self._worth.items()],
            "success_threshold": self.monitor.success_threshold,
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
        older = {"known": [], "num_watched": 0, "rates": [0.0, 0.0]}  # what older checkpoints do not have
        super().set_state(older | state)
        self.monitor.success_threshold = float(state["success_threshold"])

    def _questions(self, episode: TokenEpisode) -> list[Question]:
        """Returns questions about the turns of an episode, or about a finished one as a whole."""
        if self._config.per == "episode":
            whole = self._so_far(episode, episode.num_steps, episode.goals[-1])
            return [(_key(episode, len(episode) - 1), whole)] if episode.is_over else []
        return [(_key(episode, t), item) for t in range(len(episode)) if (item := self._turn(episode, t)) is not None]

    def _so_far(self, episode: TokenEpisode, end: int, goal: str) -> ScoringItem:
        """Returns the item of an episode as if it had ended after `end` steps; `goal` is its own."""
        moments = episode.snapshots[: end + 1]
        return ScoringItem(
            goal=self.goal or goal,
            snapshots=spread(moments, self._config.num_frames),
            path=self._path(moments),
            is_success=bool(episode.success[:end].any()),
            success_lost=episode.success_lost and end == episode.num_steps,
            progress=float(episode.progress[end - 1]),
        )

    def _path(self, moments: FloatArray) -> FloatArray:
        """Returns the `path` of an item that shows some of `moments` [N, S]."""
        return moments if self.draws_path else NO_PATH

    def _turn(self, episode: TokenEpisode, t: int) -> ScoringItem | None:
        """Returns the item to score for turn `t`; None if its reply was unreadable."""
        end = int(episode.ends[t])
        reply = episode.replies[end - 1] if episode.replies else None
        if reply is not None and reply.action is None:
            return None
        if self._config.clip == "growing":
            return self._so_far(episode, end, episode.goals[t])
        moments = episode.snapshots[end - int(episode.steps[t]) : end + 1]
        return ScoringItem(
            goal=self.goal or episode.goals[t],
            snapshots=moments[[0, -1]],
            path=self._path(moments),
            action=episode.action_names[t] if episode.action_names else "",
            is_success=bool(episode.success[end - 1]),
            progress=float(episode.progress[end - 1]),
        )

    def _rewards(self, episode: TokenEpisode, env_step: int) -> FloatArray:
        """Returns [T], the judge's rewards, NaN if there is none; also records the scores."""
        config, per_turn, rates_turns = self._config, self._config.per == "turn", self._config.rates_turns
        worth = self._worth.pop(episode.slot, 0.0) if episode.first_step else 0.0
        # turns without a question are those with an unreadable reply
        rewards = np.full(len(episode), config.unreadable if per_turn else 0.0)
        for t in range(len(episode) if self._given else 0):
            asked = self._given.get(_key(episode, t))
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
            return score.value if self.threshold is None else float(score.value >= self.threshold)
        if config.without_answer == "stop":
            raise JudgeUnavailable(
                f"the judge gave no score: {score.status}",
                "look at the judge, then `rlvlm resume`; or choose --reward.without-answer drop",
            )
        return math.nan if config.without_answer == "drop" else config.neutral

    def _show_known(self) -> None:
        """Has the known items scored again, as if for the first time, and passes that to the monitor."""
        if not self._known or self.make_forgetful is None:
            return
        asked = [ScoringItem(**{name: row[name] for name in row if name != "score"}) for row in self._known]
        again = self.make_forgetful().score(asked)
        first, truths = [row["score"] for row in self._known], [row["is_success"] for row in self._known]
        self.monitor.note_again(again, first, truths)

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
