"""What the pocket policy learns: right readings, even actions, plans that give nothing away."""

import json
from collections import Counter

import numpy as np
import pytest
from transformers import AutoTokenizer

from pocket_models.dataset import readable_columns
from pocket_models.policy import POLICY_TASKS, PolicyData, Replies, collect_moments, key_phrases, prompt_phrases
from rlvlm.pocket.models import weights_folder

NUMBER_LINE = POLICY_TASKS[0]


def test_a_thought_is_cut_before_its_plan_and_phrases_are_shared_by_prompts_and_replies():
    env, moments = collect_moments(NUMBER_LINE, 20, seed=0)
    replies = Replies([NUMBER_LINE], moments)
    for moment in moments:
        current, target = moment.key
        assert replies.reading(moment) == f'"current number": {current}, "target number": {target}, "thoughts": "'
    sentences = list(prompt_phrases(moments))
    assert "".join(sorted(sentences, key=moments[0].prompt.index)) == moments[0].prompt
    pieces = list(key_phrases([env.action_text(1, moments[0].thought)]))
    assert pieces == ['", "action": "', ', "target number": ', ', "thoughts": "', '{"current number": ', '"}']


@pytest.mark.parametrize("task", POLICY_TASKS, ids=lambda task: task.name)
def test_replies_read_the_image_correctly_and_act_evenly(task):
    env, moments = collect_moments(task, 30, seed=1)
    columns, sizes = readable_columns(np.stack([moment.key for moment in moments]))
    assert len(columns) == len(sizes) > 1, "what can be read varies"
    replies, rng, moment = Replies([task], moments), np.random.default_rng(0), moments[3]
    env.reset(seed=1)
    texts = [replies.draw(moment, env, rng) for _ in range(60 * len(moment.legal))]
    read = [env.read(text) for text in texts]
    assert all(text.startswith("{" + replies.reading(moment)) for text in texts)
    counts = Counter(reply.action for reply in read)
    assert set(counts) == set(moment.legal), "every legal action, and no other"
    assert all(30 < count < 90 for count in counts.values()), counts
    plans = task.plans(moment.key) if task.plans else ["", ""]
    assert len({reply.thought for reply in read}) >= min(len(plans), 2), "the plan is drawn too"


@pytest.mark.parametrize("task", POLICY_TASKS, ids=lambda task: task.name)
def test_prompts_are_still_those_of_the_training(task):
    """Whole sentences are single tokens; another wording would fall apart into many and mean nothing to the model."""
    env, [moment] = collect_moments(task, 1, seed=0)
    ids = AutoTokenizer.from_pretrained(weights_folder("policy"))(moment.prompt).input_ids
    assert len(ids) < len(moment.prompt) / 12, "the prompt was reworded: train the pocket policy again"
    assert task.name in json.loads((weights_folder("policy").parent / "evaluation.json").read_text())
    env.close()


def test_settings_that_cannot_work_are_refused():
    for broken in ({"moments": 0}, {"held_out": 0}, {"tasks": ("chess",)}):
        with pytest.raises(ValueError, match=">= 1|no such tasks: chess"):
            PolicyData(**broken)
