"""What every class with a state keeps: restored into a new object, through the files of a checkpoint, it goes on as it
would have, whatever was done before, and whatever the new object had done meanwhile.
"""

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numbered import rows
from state_trees import assert_same
from stub_judge import StubJudge
from tiny_episodes import score, tiny_episodes, transitions_of, truth, verdict
from tiny_loops import FEEDBACK, SMALL, build, from_files, judge_teacher, through_files

import rlvlm
from rlvlm.algorithms.outcome_value import OutcomeValue
from rlvlm.algorithms.policy_gradient.critic import Critic
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller
from rlvlm.algorithms.sac_pebble.label import Relabelling
from rlvlm.algorithms.sac_pebble.replay import Replay
from rlvlm.algorithms.sft import Imitator
from rlvlm.algorithms.sft_config import ReplySFTConfig
from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.core.judging import Clip, Label, Score, Status, Verdict
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.images import FrameStore
from rlvlm.envs.push_block import PushBlock
from rlvlm.preferences.config import MixedConfig, SimulatedTeacherConfig
from rlvlm.preferences.loop import FeedbackLoop
from rlvlm.preferences.monitor import LabelMonitor
from rlvlm.preferences.networks import StateInput
from rlvlm.preferences.people import MixedTeacher, PersonTeacher
from rlvlm.preferences.queries import draw_pairs
from rlvlm.preferences.records import FeedbackCounts, QueryRecord
from rlvlm.preferences.reward_model import Disagreement, Evidence, LearnedReward, RewardModel
from rlvlm.preferences.teachers import (
    SHARES,
    MeasuredTeacher,
    OracleTeacher,
    RandomTeacher,
    SimulatedTeacher,
    Teacher,
)
from rlvlm.rewards.config import ChunkRewardConfig, LabelMonitorConfig, MonitorConfig, ValueConfig
from rlvlm.rewards.judged import FunctionReward, JudgedReward
from rlvlm.rewards.monitor import JudgeMonitor
from rlvlm.rewards.novelty import NoveltyReward
from rlvlm.rewards.scorers import FallbackScorer, JudgeScorer, SimulatedScorer
from rlvlm.rewards.scoring_items import ScoringItem
from rlvlm.rewards.source import EnvironmentReward, SuccessReward
from rlvlm.rewards.temporal import TemporalNovelty
from rlvlm.testing import TinyEnv
from tests.algorithms.policy_gradient.by_hand import scored

Move = Callable[[Any], Any]

PICTURES = FrameStore(TinyEnv(), 16)
EPISODES = tiny_episodes(6)
PAIRS = draw_pairs(EPISODES, 24, 2, np.random.default_rng(0))
SHOWN = transitions_of(*EPISODES[:2])
OUTCOMES = (0.0, 1.0)


@dataclass(frozen=True)
class Example:
    """An object with a state, and what may be done with it."""

    make: Callable[[int], Any]
    """Makes a new one by a seed; what the seed decides is part of the state."""
    moves: Sequence[Move]
    """Each depends on the object alone, and returns what can be seen of it."""
    optional: Sequence[str] = ()
    """Names that states of older versions lack."""
    lends: bool = False
    """Whether the state is no copy, and is to be written before anything else happens."""
    by: int = 6
    """Number of histories to try."""


class Together(Stateful):
    """Objects that are saved side by side, since one is nothing without the other."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__ |= parts
        self.STATE = tuple(parts)  # pyright: ignore[reportAttributeAccessIssue] - of this object


def with_one_step(env: PushBlock) -> PushBlock:
    env.snapshot_size = 1
    env.landmarks = lambda snapshots: np.empty((len(snapshots), 0, 2), np.float32)
    return env


def outcome_value(seed: int) -> OutcomeValue:
    return OutcomeValue(ValueConfig(hidden=8, steps=6, heads=2, td_lambda=0.5, monte_carlo=1, episodes=30), 5, seed)


def learn_walks(seed: int, value: OutcomeValue) -> FloatArray:
    rng = np.random.default_rng(seed)
    walks = [rng.integers(0, 5, rng.integers(1, 6)) for _ in range(20)]
    value.learn([np.eye(5, dtype=np.float32)[walk] for walk in walks], rng.integers(0, 2, 20), (0.1, 0.0))
    return value.predict(np.eye(5, dtype=np.float32))


def small_critic(seed: int) -> Critic:
    config = ValueConfig(hidden=8, steps=6, batch_size=16, heads=2)
    return Critic(config, with_one_step(PushBlock(ChunkEnvConfig(episode_steps=32), 0)), seed)


def played(first: int) -> list[Any]:
    """Episodes of a few chunks, every third of which is a success."""
    kinds = [(number % 3 == 0, first + number) for number in range(6)]
    return [scored(float(won), (2, 2) if won else (8, 8), success=won, group=group) for won, group in kinds]


def shape(first: int, critic: Critic) -> list[Any]:
    episodes = played(first)
    critic.note(episodes, np.array([episode.rewards.sum() for episode in episodes]))
    return [[episode.rewards for episode in critic.shape(episodes, 0.9, 1.0, OUTCOMES)], critic.report()]


def chunk_labeller(seed: int) -> RewardLabeller:
    config = ChunkRewardConfig(source="judged", teacher="random", shaping="value", monitor=MonitorConfig(controls=2))
    scorer = SimulatedScorer(lambda item, rng: float(rng.random()), 0, "dice")
    return RewardLabeller(config, scorer, critic=small_critic(seed))


def label_chunks(first: int, labeller: RewardLabeller) -> list[Any]:
    episodes = played(first)
    labeller.show(episodes)
    labelled = labeller.shape(labeller.label(episodes, first), 0.9)
    labeller.get_state()  # controls that are still asked about
    figures = {name: value for name, value in labeller.report().items() if not name.endswith("_s")}
    return [[episode.rewards for episode in labelled], figures]


def expect_known(labeller: RewardLabeller) -> list[float]:
    labeller.judged.expect([(item, score(0.4 + 0.01 * number)) for number, item in enumerate(asked(*[10, 40] * 12))])
    return labeller.judged.rates


class Line:
    """A policy of two weights that imitates numbers, with what an imitator asks of one."""

    device = torch.device("cpu")

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.network = torch.nn.Linear(1, 1)
        self.lengths = [1, 2, 3, 4, 5]
        self.forget_stale_images = lambda: None

    def __len__(self) -> int:
        return 5

    def imitation(self, *_: Any) -> "Line":
        return self

    def acting_parameters(self) -> list[Any]:
        return list(self.network.parameters())

    def loss(self, rows: torch.Tensor, _: Any) -> torch.Tensor:
        return ((self.network(rows[:, None].float()) - 2.0) ** 2).mean()


def imitator(seed: int) -> Together:
    policy: Any = Line(seed)
    sft = ReplySFTConfig(updates=100, batch_size=2)
    taught = Imitator(policy, TinyEnv(), [], sft, np.random.default_rng(seed), lambda line: None)  # pyright: ignore[reportArgumentType]
    return Together(network=policy.network, imitator=taught)


def loop_of(
    seed: int, teacher: str = "random", sees: str = "state", source: str = "preference", **change: Any
) -> FeedbackLoop:
    answers: Teacher = RandomTeacher(seed) if teacher == "random" else judge_teacher()
    if teacher == "mixed":
        answers = MixedTeacher(RandomTeacher(seed), OracleTeacher(), MixedConfig(share=0.4))
    return build(answers, replace(FEEDBACK, **change), sees, seed, source)


def hold_session(loop: FeedbackLoop) -> list[Any]:
    step = 10 + 5 * loop.num_sessions
    figures = loop.run_session(step) if loop.is_due(step) else {}
    said = [getattr(record, "verdict", None) or record.score for record in loop.drain_records()]
    return [{name: value for name, value in figures.items() if not name.endswith("_s")}, map_answers(said)]


def map_answers(answers: Sequence[Verdict | Score]) -> list[Any]:
    return [str(getattr(answer, "label", None) or getattr(answer, "value", None)) for answer in answers]


LOOP_MOVES: Sequence[Move] = (
    lambda loop: [loop.add(episode) for episode in EPISODES[:4]] and hold_session(loop),
    lambda loop: loop.add(EPISODES[4]) or hold_session(loop),
    lambda loop: loop.source.label(SHOWN),
)


def small_model(seed: int, output: str = "bounded") -> RewardModel:
    return RewardModel(StateInput(4, 2), replace(SMALL, output=output), seed)


def fit(first: int, model: RewardModel) -> list[Any]:
    loop = loop_of(0)
    loop._queries.add(PAIRS[first : first + 12], truth(PAIRS[first : first + 12]))
    return [model.fit(loop._queries.examples), model.ensemble.rewards(loop._queries.examples.steps())]


def model_and_rewards(seed: int) -> Together:
    model = small_model(seed)
    return Together(model=model, learned=LearnedReward(model), bonus=Disagreement(model))


def records(kind: str) -> list[QueryRecord]:
    right = truth(PAIRS[:8])
    wrong = [replace(each, label=each.label.swapped) if each.label else each for each in truth(PAIRS)]
    labels = {"right": right, "wrong": wrong * 12, "unread": [verdict(None, Status.INVALID)] * 24}[kind]
    return [
        QueryRecord(env_step=0, session=0, index=index, timestamp=0.0, pair=PAIRS[index % 24], verdict=label)
        for index, label in enumerate(labels)
    ]


def answer(first: int, teacher: Teacher) -> list[Any]:
    questions = PAIRS[first : first + 10]
    return [map_answers(teacher.answer(questions)), map_answers(teacher.prepare(questions)())]


TEACHER_MOVES: Sequence[Move] = (lambda teacher: teacher.inform(EPISODES[:3]), partial(answer, 0), partial(answer, 10))


class Moody(StubJudge):
    """A judge with answers that cannot be read."""

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        answers = super().score(clips)
        return [score(None, Status.INVALID) if (one.value or 0) > 0.6 else one for one in answers]


def pixels(snapshots: FloatArray) -> Frames:
    return np.broadcast_to(snapshots[:, :1, None, None], (len(snapshots), 2, 2, 3)).astype(np.uint8)


def asked(*moments: float) -> list[ScoringItem]:
    return [
        ScoringItem(
            goal="go", snapshots=np.array([[1.0], [at]], np.float32), action="+", is_success=at > 25, progress=0.5
        )
        for at in moments
    ]


def judge_scorer(_: int) -> JudgeScorer:
    return JudgeScorer(Moody(), pixels, remembers=True)


def dice(seed: int) -> SimulatedScorer:
    return SimulatedScorer(lambda item, rng: float(rng.random()), 7, "dice")


def score_items(moments: Sequence[float], scorer: Any) -> list[float | None]:
    return [each.value for each in scorer.score(asked(*moments))]


SCORER_MOVES: Sequence[Move] = tuple(partial(score_items, moments) for moments in ((10, 20), (20, 30, 40), (50,)))


def seen(kind: str, watch: JudgeMonitor) -> dict[str, float]:
    rng = np.random.default_rng(0)
    if kind == "known":
        watch.expect([0.9, 0.2, 0.8], [True, False, True])
    elif kind == "controls":
        watch.note_controls(watch.show_controls(dice(0), asked(10, 20, 30), [score(0.9)] * 3))
        watch.note_again([score(0.4)], [0.5], [True])
    elif kind == "fooled":
        watch.note([0.9] * 60, [False] * 60)
    else:
        watch.note(rng.random(30).tolist(), (rng.random(30) > 0.5).tolist())
    return watch.report() | {"alarm": watch.alarm}  # pyright: ignore[reportReturnType]


def note_known(watch: LabelMonitor) -> None:
    watch.expect(
        [{"snapshots": np.zeros((2, 3), np.float32), "paths": np.zeros((2, 1, 0)), "truth": np.array(OUTCOMES)}]
    )
    watch.note_known(["right"])


def record(stats: TrainingStats) -> dict[str, float]:
    stats.record(30, [(3.0, True), (1.0, False)])
    stats.note({"reward_model/loss": 0.5})
    return stats.report()


def pay(rewards: Sequence[float], ended: int, stats: TrainingStats) -> dict[str, float]:
    stats.note_rewards(np.array(rewards, np.float32), ended, leaves_out=True)
    return stats.report() | {"settled": stats.signal._is_settled}


class Scaled(EnvironmentReward):
    """A reward that changes, labelled in pieces."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def label(self, transitions: Any) -> FloatArray:
        return transitions.obs[:, 0] * self.scale

    def label_leading(self, transitions: Any) -> FloatArray:
        return self.label(transitions)[:700]


def relabelling(_: int) -> Together:
    replay = Replay(2000)
    replay.add(rows(1, 500), np.zeros(500, np.float32))
    return Together(replay=replay, relabelling=Relabelling(replay))


def arrive(whole: Any) -> None:
    whole.replay.add(rows(len(whole.replay), 900), np.zeros(900, np.float32))


def relabel(scale: float, whole: Any) -> FloatArray:
    whole.relabelling.advance(Scaled(scale))
    return whole.replay.rewards.numpy().copy()


def turns(white: bool, *actions: int | None) -> Any:
    from tests.rewards.test_temporal import episode

    return episode(white, *actions)


def meet(first: int, novelty: NoveltyReward) -> int:
    novelty.observe(np.random.default_rng(first).normal(size=(700, 4)).astype(np.float32))
    return novelty.version


def add_numbers(spread: Any) -> float:
    spread.spread.add(np.arange(5.0))
    return spread.spread.std


def label_shown(source: Any) -> FloatArray:
    return source.label(SHOWN)


def label_some(source: Any) -> FloatArray:
    return source.label(transitions_of(EPISODES[3]))


WEAK = SimulatedTeacherConfig(mistake=0.3, beta=1.0, equal=0.1)
EXAMPLES: dict[str, Example] = {
    "outcome value": Example(outcome_value, [partial(learn_walks, 1), partial(learn_walks, 2)]),
    "critic": Example(small_critic, [partial(shape, 0), partial(shape, 9)]),
    "reward labeller": Example(
        chunk_labeller,
        [partial(label_chunks, 0), partial(label_chunks, 9), expect_known],
        optional=("known", "num_watched", "rates", "worth", "novelty"),
    ),
    "imitator": Example(imitator, [lambda whole: whole.imitator.train(whole.imitator.num_updates + 3)], lends=True),
    "relabelling": Example(
        relabelling,
        [arrive, lambda whole: whole.relabelling.start(), partial(relabel, 2.0), partial(relabel, 3.0)],
        lends=True,
    ),
    "training stats": Example(
        lambda seed: TrainingStats(),
        [record, partial(pay, [1.0] * 50, 20), partial(pay, [1.0] * 30, 0), partial(pay, [0.5, np.nan], 1)],
    ),
    "loop of pairs": Example(loop_of, LOOP_MOVES, optional=("monitor",)),
    "loop of pairs, ahead": Example(partial(loop_of, ahead=True), LOOP_MOVES, optional=("monitor",), by=12),
    "loop of pairs, a judge": Example(
        partial(loop_of, teacher="judge", sees="image"), LOOP_MOVES, optional=("monitor",), by=4
    ),
    "loop of pairs, by disagreement": Example(
        partial(loop_of, sampling="disagreement", pool=5), LOOP_MOVES, optional=("monitor",)
    ),
    "loop of scores": Example(partial(loop_of, source="score", queries=20), LOOP_MOVES, optional=("monitor",)),
    "loop of scores, by images": Example(
        partial(loop_of, source="score", sees="image", queries=20), LOOP_MOVES, optional=("monitor",), by=4
    ),
    "reward model": Example(small_model, [partial(fit, 0), partial(fit, 12)], optional=("scale",)),
    "reward model, normalised": Example(
        partial(small_model, output="normalised"), [partial(fit, 0), partial(fit, 12)], optional=("scale",)
    ),
    "learned reward": Example(
        model_and_rewards,
        [
            lambda whole: fit(0, whole.model),
            lambda whole: [whole.learned.label(SHOWN), whole.learned.version],
            lambda whole: [whole.bonus.label(SHOWN), whole.bonus.version],
        ],
    ),
    "evidence": Example(
        lambda seed: Evidence(),
        [lambda each: each.add([True] * 5) or each.is_enough, lambda each: each.add([False] * 3) or each.is_enough],
    ),
    "counts of feedback": Example(
        lambda seed: FeedbackCounts(),
        [
            lambda counts: counts.count(records("right"), 3) or counts.metrics(),
            lambda counts: counts.count(records("unread"), 0) or counts.metrics(),
            lambda counts: counts.count(records("right"), 0, by_person=True) or counts.metrics(),
        ],
        by=30,
    ),
    "random teacher": Example(RandomTeacher, TEACHER_MOVES),
    "simulated teacher": Example(partial(SimulatedTeacher, WEAK), TEACHER_MOVES),
    "measured teacher": Example(lambda seed: MeasuredTeacher(SHARES["Sweep"], seed=seed, name="x"), TEACHER_MOVES),
    "oracle": Example(lambda seed: OracleTeacher(), TEACHER_MOVES),
    "judge teacher": Example(lambda seed: judge_teacher(), TEACHER_MOVES),
    "person": Example(lambda seed: PersonTeacher(None, PICTURES, "push"), [lambda one: len(one.answer(PAIRS[:3]))]),  # pyright: ignore[reportArgumentType]
    "mixed teacher": Example(
        lambda seed: MixedTeacher(
            RandomTeacher(seed), SimulatedTeacher(WEAK, seed), MixedConfig(share=0.4, max_answers=9)
        ),
        [*TEACHER_MOVES, lambda teacher: teacher.note_used([replace(verdict(Label.LEFT), latency_s=4.0)] * 2)],
    ),
    "label monitor": Example(
        lambda seed: LabelMonitor(LabelMonitorConfig()),
        [
            lambda watch: watch.note(records("right")) or watch.report(),
            lambda watch: watch.note(records("wrong")) or watch.alarm,
            note_known,
        ],
        optional=("known", "again"),
    ),
    "judge's monitor": Example(
        lambda seed: JudgeMonitor(MonitorConfig(on_alarm="stop"), 0.5),
        [partial(seen, kind) for kind in ("some", "known", "controls", "fooled")],
        by=30,
    ),
    "judged images": Example(lambda seed: JudgedReward(Moody(), PICTURES, "push"), [label_shown, label_some]),
    "function": Example(
        lambda seed: FunctionReward(lambda images, goal: images.mean((1, 2, 3)), PICTURES, "push"),
        [label_shown, label_some],
    ),
    "judge's scorer": Example(judge_scorer, SCORER_MOVES),
    "fallback": Example(lambda seed: FallbackScorer(judge_scorer(0), dice(0)), SCORER_MOVES),
    "dice": Example(dice, SCORER_MOVES),
    "novelty": Example(
        lambda seed: NoveltyReward(k=5, obs_size=4),
        [partial(meet, 0), partial(meet, 1), label_shown, lambda novelty: novelty.forget()],
    ),
    "temporal novelty": Example(
        lambda seed: TemporalNovelty(3, lambda rows: np.repeat(pixels(255 * rows), 6, 1).repeat(6, 2), seed=seed),
        [
            lambda novelty: novelty.learn([turns(False, 0, 1), turns(True, 2, 2)]),
            lambda novelty: novelty.learn([turns(True, 0, None)]),
            lambda novelty: novelty.label([turns(False, 0, 1), turns(True, 2, 2)]),
        ],
    ),
    "true reward": Example(lambda seed: EnvironmentReward(), [label_shown]),
    "success": Example(lambda seed: SuccessReward(), [label_shown]),
}


def seen_of(move: Move, thing: Any) -> Any:
    """Returns what a move shows: what it returns, or the error that it ends with."""
    try:
        return move(thing)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def copied(state: Any) -> Any:
    """A state as a checkpoint gives it back: through JSON, with its arrays beside it."""
    arrays: dict[str, FloatArray] = {}
    return from_files(json.loads(json.dumps(through_files(state, arrays))), arrays)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_restored_object_goes_on_as_it_would_have(name):
    example = EXAMPLES[name]
    steps = st.lists(st.sampled_from(range(len(example.moves))), min_size=1, max_size=4)

    @settings(max_examples=example.by, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(before=steps, meanwhile=steps, after=steps)
    def check(before: list[int], meanwhile: list[int], after: list[int]) -> None:
        one, other = example.make(0), example.make(1)
        for thing, history in ((one, before), (other, meanwhile)):
            for number in history:
                seen_of(example.moves[number], thing)
        state = one.get_state()
        kept = copied(state)
        other.set_state(copied(state))
        assert_same(copied(other.get_state()), kept)
        for number in after:
            torch.manual_seed(len(kept))  # random numbers are its own
            found = seen_of(example.moves[number], one)
            torch.manual_seed(99)
            assert_same(seen_of(example.moves[number], other), found)
        assert_same(copied(other.get_state()), copied(one.get_state()))
        if not example.lends:
            assert_same(copied(state), kept, "a state is a copy, which what comes later does not change")

    check()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_state_that_lacks_a_name_is_refused(name):
    example = EXAMPLES[name]
    whole = example.make(0)
    for move in example.moves:
        seen_of(move, whole)
    state = whole.get_state()
    for missing in state:
        part = {key: value for key, value in state.items() if key != missing}
        if missing in example.optional:
            example.make(1).set_state(part)
        else:
            with pytest.raises(KeyError, match=missing):
                example.make(1).set_state(part)
                pytest.fail(f"{missing} is not missed")


def subclasses(of: type) -> Iterator[type]:
    for each in of.__subclasses__():
        yield each
        yield from subclasses(each)


def parts(thing: Any) -> Iterator[type]:
    """The classes of an object and of everything that is saved with it."""
    yield type(thing)
    for value in vars(thing).values() if hasattr(thing, "set_state") and hasattr(thing, "__dict__") else ():
        if hasattr(value, "set_state") and not isinstance(value, torch.Generator):
            yield from parts(value)


@pytest.mark.slow  # it imports all of the package
def test_every_class_with_a_state_has_an_example():
    for module in pkgutil.walk_packages(rlvlm.__path__, "rlvlm."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # a guest's own framework is not installed
            assert module.name.startswith("rlvlm.plugins.") and not str(error.name).startswith("rlvlm"), error
    known = {each for example in EXAMPLES.values() for each in parts(example.make(0))}
    ours = {each for each in subclasses(Stateful) if each.__module__.startswith("rlvlm.")}
    bases = {base for each in ours for base in each.__mro__[1:]}  # those are what their subclasses are
    assert not [f"{each.__module__}.{each.__qualname__}" for each in ours - known - bases]
