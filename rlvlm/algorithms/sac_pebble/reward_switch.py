"""The present reward source, and the feedback that changes it: novelty until a learned reward is trusted."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlvlm.algorithms.evaluation import PlayedEpisode
from rlvlm.algorithms.sac_pebble.runner import Sample
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import Frames, spread
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import StepEnv
from rlvlm.envs.images import PATH_MOMENTS, FrameStore
from rlvlm.envs.registry import warn_once
from rlvlm.judge_bench.preflight import compared_suite, known_items, preflight, rehearse_before
from rlvlm.judge_bench.rows import PAIR_NAMES, share_cell
from rlvlm.judges.cache import without_memory
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge, PatientJudge
from rlvlm.preferences.config import PREFLIGHT, FeedbackConfig, RewardModelConfig, check_learning
from rlvlm.preferences.loop import FeedbackLoop, build_loop
from rlvlm.preferences.people import PersonTeacher, compares_progress, make_teacher
from rlvlm.preferences.records import Record, ScoreLog
from rlvlm.preferences.reward_model import LearnedReward
from rlvlm.preferences.teachers import JudgeTeacher
from rlvlm.rewards.build import build_source
from rlvlm.rewards.config import ExplorationConfig, StepRewardConfig
from rlvlm.rewards.judged import JudgedReward
from rlvlm.rewards.novelty import NoveltyReward
from rlvlm.rewards.source import RewardSource, SourceContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSetup:
    """Everything that decides the reward: the sections of a run's config, whole."""

    reward: StepRewardConfig = field(default_factory=StepRewardConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    goal: str = ""
    """Goal that the judge is asked about; empty takes the task's own."""
    make_judge: Callable[[], Judge] | None = None
    """Called once, in the asking process, if a judge is used; must pickle."""
    make_person: Callable[[], PatientJudge] | None = None
    """Called once, in the asking process, if a person is asked; must pickle."""
    goal_picture: Frames | None = None
    """[1, H, W, 3] image of the goal, shown to that person; a judge has its own."""
    total_steps: int | None = None
    """Env steps of the whole run: no teacher is asked at its end, when no training would use the answers. None: asked
    for as long as the budget lasts."""

    def check(self) -> None:
        """Raises unless the feedback settings fit the reward source and its teacher.

        Raises:
            ValueError: a setting is wrong; the message says which and what to do.
        """
        check_learning(self.reward, self.feedback, self.reward_model)
        if self.reward.asks_judge and self.make_judge is None:
            raise ValueError(
                "a judge is to be asked and there is none; call .settings(make_judge=...), "
                "or choose teacher oracle or random"
            )
        is_simulated = self.reward.teacher == "mixed" and self.feedback.mixed.person == "simulated"
        if self.reward.may_ask_person and not is_simulated and self.make_person is None:
            raise ValueError(
                f"reward.teacher {self.reward.teacher} asks a person and there is none; "
                "call .settings(make_person=...), or choose another teacher"
            )


class RewardSwitch:
    """The present source. With a feedback loop, the learned reward replaces it once that is trusted.

    Args:
        source: source at the start.
        novelty: receives every visited state while it is used; None if it is not.
        loop: asks the teacher; None if the source never changes.
        log: stores direct answers of a judge; None if there are none.
        exploration: bonus beside the learned reward.
    """

    def __init__(
        self,
        source: RewardSource,
        novelty: NoveltyReward | None = None,
        loop: FeedbackLoop | None = None,
        log: ScoreLog | None = None,
        exploration: ExplorationConfig | None = None,
    ) -> None:
        self.source = self._first_source = source
        self._novelty = novelty
        self._loop = loop
        self._log = log
        self._exploration = exploration or ExplorationConfig()
        self._learned_since = 0

    @property
    def learned(self) -> LearnedReward | None:
        """Source learned from feedback, once it is in use."""
        return self._loop.source if self._loop is not None and self.source is self._loop.source else None

    @property
    def bonus(self) -> RewardSource | None:
        """Bonus beside the learned reward, without its weight; None until that reward is in use."""
        if self._loop is None or self.learned is None:
            return None
        return {"none": None, "disagreement": self._loop.disagreement, "novelty": self._novelty}[
            self._exploration.bonus
        ]

    @property
    def _novelty_in_use(self) -> NoveltyReward | None:
        """Novelty while it counts: until the learned reward takes over, or beside that as a bonus."""
        return self._novelty if self.learned is None or self._exploration.bonus == "novelty" else None

    def bonus_weight(self, env_steps: int) -> float:
        """Returns the present weight of the bonus, >= 0."""
        return 0.0 if self.learned is None else self._exploration.weight_after(env_steps - self._learned_since)

    def record(self, sample: Sample) -> None:
        """Stores visited states and finished episodes for the sources that need them."""
        if (novelty := self._novelty_in_use) is not None:
            novelty.observe(sample.transitions.obs)
        for listener in (self._loop, self._log):
            if listener is not None:
                for episode in sample.episodes:
                    listener.add(episode)

    def is_feedback_due(self, env_steps: int) -> bool:
        """Returns whether the teacher is to be asked now."""
        return self._loop is not None and self._loop.is_due(env_steps)

    def steps_to_session(self, env_steps: int) -> int | None:
        """Returns the env steps until the teacher is asked again, >= 0; None if it will not be."""
        return None if self._loop is None else self._loop.steps_to_session(env_steps)

    def hold_session(self, env_steps: int) -> dict[str, float]:
        """Asks the teacher and fits the reward; after the first trusted fit the learned reward is used."""
        assert self._loop is not None, "sessions are only due where there is a feedback loop"
        session_metrics = self._loop.run_session(env_steps)
        # once in use it stays so: later answers may be harder without being random
        if self._loop.source.is_trusted and self.learned is None:
            logger.info("the learned reward is in force from step %d on", env_steps)
            self._switch_to_learned(self._loop, env_steps)
        elif self.learned is None:
            logger.info("step %d: exploring goes on: the reward model is not yet better than chance", env_steps)
        return session_metrics

    def note_evaluation(self, episodes: Sequence[PlayedEpisode]) -> None:
        """Holds an evaluation by the learned reward, once that is in use, against the truth."""
        if self._loop is not None and self.learned is not None and episodes:
            returns = [[episode.learned_return, episode.env_return] for episode in episodes]
            self._loop.monitor.note_evaluation(*np.mean(returns, axis=0).tolist())

    def expect(self, known: Sequence[dict[str, Any]]) -> None:
        """Takes known pairs, before the run, that the judge is held to; see `LabelMonitor.expect`."""
        if self._loop is not None:
            self._loop.monitor.expect(known)

    def finish_feedback(self, env_steps: int) -> dict[str, float]:
        """Waits for a judge's outstanding answers, so that their records are not lost; returns metrics."""
        return {} if self._loop is None else self._loop.finish(env_steps)

    def drain_records(self, env_steps: int) -> list[Record]:
        """Returns the records since the last call, of queries or of direct scores; empty if no teacher is asked."""
        if self._log is not None:
            return [*self._log.drain(env_steps)]
        return [] if self._loop is None else self._loop.drain_records()

    def get_state(self) -> dict[str, Any]:
        """Returns the state of all parts, as a state tree."""
        novelty = self._novelty_in_use
        return {
            "is_learned": self.learned is not None,
            "learned_since": self._learned_since,
            # novelty is saved below, and only while it counts: its states grow with every step
            "source": None if self._first_source is self._novelty else self._first_source.get_state(),
            "novelty": None if novelty is None else novelty.get_state(),
            "loop": None if self._loop is None else self._loop.get_state(),
        }

    def set_state(self, tree: dict[str, Any]) -> None:
        """Restores what `get_state` returned, in a switch built from the same config, in any state."""
        # reset first: this switch may be further than the saved one
        self.source = self._first_source
        if tree["source"] is not None:
            self._first_source.set_state(tree["source"])
        if self._loop is not None:
            self._loop.set_state(tree["loop"])
            if tree["is_learned"]:
                self._switch_to_learned(self._loop, tree["learned_since"])
        if (novelty := self._novelty_in_use) is not None:
            novelty.set_state(tree["novelty"])

    def _switch_to_learned(self, loop: FeedbackLoop, env_steps: int) -> None:
        """Switches to the learned reward; unless novelty continues beside it, its memory of states is freed."""
        self.source, self._learned_since = loop.source, env_steps
        if self._novelty is not None and self._novelty_in_use is None:
            self._novelty.forget()


def build_switch(setup: RewardSetup, task: str, viewer: StepEnv, novelty_neighbour: int, seed: int) -> RewardSwitch:
    """Builds the switch that `setup` describes.

    Args:
        setup: reward settings of the run, already checked.
        task: name in the registry.
        viewer: an env that only draws the images; it is not trained in.
        novelty_neighbour: k of the exploration reward.
        seed: seed of all random choices.
    """
    reward = setup.reward
    judge = setup.make_judge() if reward.asks_judge and setup.make_judge else None
    if not viewer.has_progress and (reward.is_learned or judge):
        if reward.is_learned and compares_progress(reward, setup.feedback):
            raise UsageError(
                f"reward.teacher {reward.teacher} needs progress, and {task} gives no info['progress'] in [0, 1]",
                "give it in step() (docs/tasks.md), or take --reward.teacher oracle, which compares true returns",
            )
        warn_once(f"{task} gives no info['progress']: a judge's answers are held against true returns instead")
    frames = FrameStore(viewer, setup.judge.image_px, capacity=256)
    goal = setup.goal or viewer.goal
    context = SourceContext(env=viewer, frames=frames, goal=goal, judge=judge, novelty_neighbour=novelty_neighbour)
    if not reward.is_learned:
        source = build_source(reward.source, context)
        # a reward of novelty receives every state; a judge's direct answers are logged, as queries are
        return RewardSwitch(
            source,
            novelty=source if isinstance(source, NoveltyReward) else None,
            log=ScoreLog(source, frames, viewer.has_progress) if isinstance(source, JudgedReward) else None,
        )
    person = None
    if reward.may_ask_person and setup.make_person:
        person = PersonTeacher(setup.make_person(), frames, goal, setup.goal_picture)
    teacher = make_teacher(reward, setup.feedback, person, judge=judge, frames=frames, goal=goal, seed=seed, task=task)
    loop = build_loop(
        viewer,
        teacher,
        reward=reward,
        feedback=setup.feedback,
        reward_model=setup.reward_model,
        seed=seed,
        total_steps=setup.total_steps,
    )
    if judge is not None:
        loop.compare_anew = JudgeTeacher(without_memory(judge), frames, goal).answer
    novelty = NoveltyReward.build(context)
    # novelty twice: it is the first source, and receives every state while it counts
    return RewardSwitch(novelty, novelty, loop, exploration=reward.exploration)


def preflight_on_pairs(
    setup: RewardSetup, task: str, env: EnvConfig, seed: int, log: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Asks the judge of comparisons about a few pairs with known answers, if configured; returns them for
    `LabelMonitor.expect`.

    Args:
        setup: reward settings of the run.
        task: task from whose bench a small sample is drawn.
        env: env settings of the run.
        seed: seed of the sample.
        log: receives progress messages.

    Raises:
        JudgeRefused: the judge's answers say nothing about which side is nearer.
    """
    reward, feedback = setup.reward, setup.feedback
    # people, and a store of answers, cannot be asked anything new before the run
    is_open = not setup.judge.is_human and setup.judge.backend != "cached"
    count = feedback.preflight if feedback.preflight is not None else PREFLIGHT * is_open
    known: list[dict[str, Any]] = []
    if not ((count or feedback.rehearse) and reward.asks_judge and reward.source == "preference"):
        return known
    assert setup.make_judge is not None, "it has been checked"
    # with its memory: a run that is started again, or another with the same store, asks nothing twice
    judge, size_px, refuses_faulty = setup.make_judge(), setup.judge.image_px, setup.judge.refuses_faulty
    if count:
        suite = compared_suite(task, count, line=bool(feedback.rehearse))
        made = known_items(suite, env, size_px, seed, per_turn=False, goal=setup.goal)
        try:
            if not made.items:
                log("the judge is not tried on known pairs: nobody knows how to play the task")
                return known
            log(f"trying the judge on {len(made.items)} pairs whose truth is known, in both orders")
            figures = preflight(judge, made, 1, seed, refuses_faulty=refuses_faulty, log=log)
            known = [
                {
                    "snapshots": np.concatenate(item.sides),
                    "paths": [spread(item.side_path(side), PATH_MOMENTS if made.paint else 0) for side in (0, 1)],
                    "truth": np.array(item.truth, np.float32),
                }
                for item in made.items
                if item.source < 0
            ]
        finally:
            made.close()
        names = ("accuracy", "undecided", "said_left")
        log("; ".join(f"{PAIR_NAMES[name]} {share_cell(figures[name])}" for name in names))
    if feedback.rehearse:
        rehearse_before(
            judge, task, env, feedback.rehearse,
            kind="pairs", size_px=size_px, num_frames=1, seed=seed, goal=setup.goal,
            refuses_faulty=refuses_faulty, log=log,
        )  # fmt: skip
    return known
