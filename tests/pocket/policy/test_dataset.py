"""What the pocket policy is taught: right readings, even actions, plans that give nothing away."""

from collections import Counter

import numpy as np
import pytest

from rlvlm.envs.registry import task_names
from rlvlm.pocket.policy.dataset import (
    TAUGHT_TASKS,
    Replies,
    TaughtTask,
    collect_moments,
    key_phrases,
    prompt_phrases,
    readable,
)

KNOWN = [task for task in TAUGHT_TASKS if task.name in task_names()]
NUMBER_LINE = TAUGHT_TASKS[0]


def test_a_thought_is_cut_before_its_plan() -> None:
    _, moments = collect_moments(NUMBER_LINE, 20, seed=0)
    replies = Replies([NUMBER_LINE], moments)
    for moment in moments:
        current, target = moment.key
        assert replies.reading(moment) == f'"current number": {current}, "target number": {target}, "thoughts": "'


@pytest.mark.parametrize("task", KNOWN, ids=lambda task: task.name)
def test_replies_are_valid_right_in_what_they_read_and_even_in_what_they_do(task: TaughtTask) -> None:
    env, moments = collect_moments(task, 20, seed=1)
    replies = Replies([task], moments)
    rng = np.random.default_rng(0)
    moment = moments[3]
    env.reset(seed=1)
    texts = [replies.draw(moment, env, rng) for _ in range(60 * len(moment.legal))]
    read = [env.read(text) for text in texts]
    assert all(text.startswith("{" + replies.reading(moment)) for text in texts)
    counts = Counter(reply.action for reply in read)
    assert set(counts) == set(moment.legal), "every legal action, and no other"
    assert all(30 < count < 90 for count in counts.values()), counts
    plans = task.plans(moment.key) if task.plans else ["", ""]
    assert len({reply.thought for reply in read}) >= min(len(plans), 2), "the plan is drawn too"


@pytest.mark.parametrize("task", KNOWN, ids=lambda task: task.name)
def test_what_can_be_read_varies(task: TaughtTask) -> None:
    _, moments = collect_moments(task, 30, seed=2)
    columns, sizes = readable(moments)
    keys = np.stack([moment.key for moment in moments])
    assert len(columns) == len(sizes) > 1
    assert all(keys[:, column].max() < size for column, size in zip(columns, sizes, strict=True))


def test_phrases_are_what_prompts_and_replies_share() -> None:
    env, moments = collect_moments(NUMBER_LINE, 5, seed=3)
    sentences = list(prompt_phrases(moments))
    assert "".join(sorted(sentences, key=moments[0].prompt.index)) == moments[0].prompt
    pieces = list(key_phrases([env.action_text(1, moments[0].thought)]))
    assert pieces == ['", "action": "', ', "target number": ', ', "thoughts": "', '{"current number": ', '"}']
