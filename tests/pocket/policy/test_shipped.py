"""The pocket policy as it ships: what it reads, that it cannot play, and that its prompts are those it was taught."""

import json

import pytest

from rlvlm.envs.registry import make_env, task_env
from rlvlm.pocket.policy.dataset import TAUGHT_TASKS, TaughtTask
from rlvlm.pocket.policy.evaluate import EvaluateConfig, measure
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.vlms.shipped import weights_folder

RECORDED = json.loads((weights_folder("policy").parent / "evaluation.json").read_text())
TAUGHT = [task for task in TAUGHT_TASKS if task.name in RECORDED]
MAX_BYTES = 8_000_000


@pytest.fixture(scope="module")
def engine() -> PolicyEngine:
    return PolicyEngine(load_policy(PolicyConfig(device="cpu")))


def test_the_weights_are_small() -> None:
    assert sum(file.stat().st_size for file in weights_folder("policy").iterdir()) < MAX_BYTES


@pytest.mark.parametrize("task", TAUGHT, ids=lambda task: task.name)
def test_prompts_are_those_it_was_taught(engine: PolicyEngine, task: TaughtTask) -> None:
    """Whole sentences are single tokens; another wording would fall apart into many and mean nothing to the model."""
    turn, _ = make_env(task.name, task_env(task.name), 0).reset(seed=0)
    ids = engine.policy.tokenizer(turn.prompt)["input_ids"]
    assert len(ids) < len(turn.prompt) / 12, "the prompt was reworded: train the pocket policy again"


@pytest.mark.slow
@pytest.mark.parametrize("task", TAUGHT, ids=lambda task: task.name)
def test_it_reads_as_its_card_says_and_cannot_play(engine: PolicyEngine, task: TaughtTask) -> None:
    figures = measure(engine, task, EvaluateConfig(moments=150))
    assert figures["valid"] > 0.95
    assert figures["reads greedy"] > RECORDED[task.name]["reads greedy"] - 0.1
    assert figures["plays"] < figures["chance"] + 0.15
    assert figures["most chosen"] < figures["chance"] + 0.15


def test_the_card_tells_of_every_task_it_was_taught() -> None:
    card = (weights_folder("policy").parent / "CARD.md").read_text()
    assert all(f"`{task}`" in card for task in RECORDED)
