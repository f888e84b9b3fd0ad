"""Every source of reward with every kind of env: a run learns from it, or it is refused by name before Ray starts."""

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvlm.core import metrics
from rlvlm.core.errors import UsageError
from rlvlm.labels.store import LabelStore
from rlvlm.rewards.config import SOURCES
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.runs.start.build import algorithm_settings, built
from rlvlm.testing.judges import FakeJudge

KINDS: dict[str, dict[str, Any]] = {
    "steps rlvlm.testing:TINY": {
        "steps": 160, "env.episode_steps": 20, "algo.seed_steps": 40, "algo.batch_size": 32, "algo.hidden": [32, 32],
        "feedback.first_step": 60, "feedback.every_steps": 60, "feedback.queries": 8, "reward_model.ensemble": 2,
    },
    "turns number_line": {
        "steps": 24, "algo.num_envs": 4, "algo.rollout_turns": 12, "algo.minibatch_turns": 8,
        "algo.max_reply_tokens": 8, "sft.turns": 0, "reward.monitor.preflight": 0, "reward.monitor.controls": 0,
    },
    "chunks push_block": {
        "steps": 120, "sft.episodes": 4, "sft.updates": 4, "sft.scenes": 0, "algo.groups": 2, "algo.group_size": 2,
        "algo.rounds": 1, "policy.pocket.hidden": 32, "policy.pocket.image_px": 16, "reward.monitor.preflight": 0,
        "reward.monitor.controls": 0, "policy.pocket.predicts_offsets": False,
    },
}  # fmt: skip
"""The smallest run of each kind."""
EXAMPLES = Path(__file__).parents[2] / "examples"
BY_EPISODE = {"reward.per": "episode", "judge.score": "progress"}
BY_TURN = {"reward.per": "turn", "judge.score": "utility"}


def judged(**settings: Any) -> dict[str, Any]:
    return {"reward.source": "judged", **{name.replace("__", "."): value for name, value in settings.items()}}


def mixed(*sources: str) -> dict[str, Any]:
    return {"reward.source": "mixture", **{f"reward.mixture.{name}": 1.0 for name in sources}}


def growing(teacher: str) -> dict[str, Any]:
    credit = {"reward.per": "turn", "algo.advantage.estimator": "grpo_turns", "algo.group_size": 2}
    return judged(reward__teacher=teacher, reward__clip="growing") | BY_EPISODE | credit


def configured(kind: str, settings: dict[str, Any]) -> RunConfig:
    return override(recipe(kind.split()[1]), KINDS[kind] | settings)


STEPS, TURNS, CHUNKS = KINDS
TABLE: list[tuple[str, dict[str, Any], str]] = [
    *((STEPS, {"reward.source": name}, "") for name in ("environment", "success", "novelty", "judged")),
    *((STEPS, {"reward.source": name}, "") for name in ("preference", "score")),
    (STEPS, {"reward.teacher": "oracle", "feedback.sampling": f"{EXAMPLES}/own_queries.py:nearest"}, ""),
    (STEPS, {"env.draw_path": True}, ""),
    (STEPS, {"reward.source": "score", "env.draw_path": True}, ""),
    (STEPS, {"reward.source": "judged", "env.draw_path": True}, "scores each image once"),
    (CHUNKS, judged(env__draw_path=True) | BY_TURN, ""),
    (STEPS, {"reward.teacher": "mixed", "feedback.mixed.person": "simulated"}, ""),
    (STEPS, {"feedback.sampling": "entrpy"}, "did you mean entropy"),
    (STEPS, {"reward.source": "mixture"}, "reward.source is 'mixture'"),
    *((kind, {"reward.source": name}, "") for kind in (TURNS, CHUNKS) for name in ("environment", "success")),
    *(
        (kind, {"reward.source": name}, "reward.source")
        for kind in (TURNS, CHUNKS)
        for name in ("preference", "score", "novelty")
    ),
    *(
        (kind, judged(reward__teacher=teacher) | per, "")
        for kind in (TURNS, CHUNKS)
        for teacher, per in (*(("judge", BY_TURN), ("judge", BY_EPISODE), ("random", BY_TURN), ("biased", BY_EPISODE)),)
    ),
    (TURNS, growing("judge"), ""),
    (CHUNKS, growing("progress"), ""),
    *(
        (kind, growing("progress") | {"algo.advantage.estimator": name}, f"estimator {name} adds these up")
        for kind in (TURNS, CHUNKS)
        for name in ("grpo", "rloo")
    ),
    (CHUNKS, judged(reward__clip="growing") | BY_TURN, "reward.per turn is asked with judge.score progress"),
    (CHUNKS, judged(reward__clip="growing") | BY_EPISODE, "goes with reward.per turn"),
    (TURNS, mixed("environment", "judged") | BY_EPISODE, ""),
    (CHUNKS, mixed("environment", "judged") | BY_TURN, ""),
    (TURNS, mixed("environment", "novelty"), ""),
    (TURNS, {"policy.history": 3, "sft.turns": 12, "sft.updates": 2}, ""),
    (CHUNKS, mixed("environment", "novelty"), "reward.mixture.novelty"),
    (
        CHUNKS,
        judged(reward__teacher="progress") | BY_EPISODE | {"algo.staleness": 1, "algo.rounds": 3},
        "algo.rounds 3 has no effect with algo.staleness",
    ),
]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings", "refusal"), [row for row in TABLE if not row[2]])
def test_a_run_learns_from_the_source(
    local_ray,
    kind,
    settings,
    refusal,  # noqa: ARG001 - the table's columns
):
    config = configured(kind, settings)
    config = override(config, {"judge.faulty": "ok"})  # the fake knows no task
    with built(algorithm_settings(config, FakeJudge if config.reward.asks_judge else None)) as algorithm:
        algorithm.prepare(lambda line: None)
        while algorithm.env_steps < config.steps:
            algorithm.train()
        assert all(map(math.isfinite, algorithm.report().values()))


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_goes_on_while_a_person_answers(local_ray, tmp_path):
    people = pytest.importorskip("rlvlm.plugins.people.queue")
    (tmp_path / "run").mkdir()
    config = configured(STEPS, {"reward.teacher": "human"})
    config = replace(config, out=tmp_path / "run")
    assert config.kind.asks_person(config) and "rlvlm labels ask" in config.kind.notes(config)[0]

    def answer(page, choice) -> None:
        page.refresh()
        for name in [name for name, asked in page.asked.items() if asked.is_open]:
            about = {"question": name, "ticket": people.new_ticket(), "name": "anna", "client": "c", "seconds": 6.0}
            page.add(people.Said(**about, choice=choice, when=0.0))
        page.keep()

    with ExitStack() as stack:
        first, resumed = (stack.enter_context(built(algorithm_settings(config, None))) for _ in range(2))
        while first.env_steps < 100:
            first.train()
        assert first.report()[metrics.QUERIES_OPEN] == 8 and first.drain_records() == []
        first.save_checkpoint(str(tmp_path / "checkpoint"))
        page = people.PeopleQueue(LabelStore(tmp_path / "run" / "labels"))
        answer(page, "left")
        resumed.load_checkpoint(str(tmp_path / "checkpoint"))
        while resumed.env_steps < config.steps:
            resumed.train()
        resumed.finish()
        # later sessions show some of the same images, whose answers are in the store already
        records = resumed.drain_records()
        assert [(record.index, record.used_step) for record in records][:8] == [(index, 110) for index in range(8)]
        # an answer holds for the pair in the other order too, where it says right
        assert records[0].env_step < 100 and records[0].verdict.label == "left"
        assert {record.verdict.label for record in records} <= {"left", "right"}
        report = resumed.report()
        assert report[metrics.PERSON_ANSWERS] == len(records) and metrics.QUERIES_OPEN in report
        assert report[metrics.PERSON_MINUTES] == pytest.approx(len(records) / 10)


@pytest.mark.parametrize(("kind", "settings", "refusal"), [row for row in TABLE if row[2]])
def test_a_source_that_the_kind_has_not_is_refused_before_anything_starts(kind, settings, refusal):
    with pytest.raises((UsageError, ValueError), match=refusal):
        algorithm_settings(configured(kind, settings), None).validate()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("kind", [TURNS, CHUNKS])
def test_a_users_own_loss_reads_a_tensor_of_its_own_in_turns_and_in_chunks(local_ray, kind):
    config = configured(kind, {"algo.loss.policy": f"{EXAMPLES}/own_loss.py:early"})
    with built(algorithm_settings(config, None)) as algorithm:
        algorithm.prepare(lambda line: None)
        while "loss/weight" not in (report := algorithm.report()):  # chunks of one rollout may teach nothing
            algorithm.train()
            assert algorithm.env_steps < 40 * config.steps
        assert 0 < report["loss/weight"] < 1


EXTRAS = """
from rlvlm.algorithms.policy_gradient.losses import clipped, policy_loss
@policy_loss("mine", extras=lambda episode: EXPRESSION)
def mine(batch, config):
    return clipped(batch, config)
"""


@pytest.mark.parametrize("kind", [TURNS, CHUNKS])
@pytest.mark.parametrize(
    ("expression", "refusal"),
    [
        ('{"own": episode.env_rewards}', "the extras own of algo.loss.policy .* have lengths"),
        ('{"own": episode.reward}', "asks for episode.reward, which there is not"),
        ('{"own": sum(episode.gains)}', "are a single number"),
        ("episode.gains", "returns a ndarray"),
        *((f'{{"own": episode.{name}}}', "") for name in ("turn_rewards", "gains", "rewards", "values", "log_probs")),
        ('{"own": [answer["bins"] for answer in episode.answers]}', ""),  # as only the policy knows them
    ],
)
def test_a_function_of_an_episode_that_a_loss_cannot_use_is_refused_before_anything_starts(
    kind, expression, refusal, tmp_path
):
    file = tmp_path / "mine.py"
    file.write_text(EXTRAS.replace("EXPRESSION", expression))
    settings = algorithm_settings(configured(kind, {"algo.loss.policy": f"{file}:mine"}), None)
    if not refusal:
        settings.validate()
        return
    with pytest.raises(UsageError, match=refusal) as caught:
        settings.validate()
    assert refusal.startswith("returns") or "episode" in f"{caught.value} {caught.value.fix}"


def test_every_source_of_every_kind_has_a_row():
    rows = {(kind, settings["reward.source"]) for kind, settings, _ in TABLE if "reward.source" in settings}
    assert rows == {(kind, source) for kind in KINDS for source in (*SOURCES, "mixture")}
