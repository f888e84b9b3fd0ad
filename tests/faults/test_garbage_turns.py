"""Policies that write nonsense: no exception, no action that nobody wrote, and nothing in the world changes by it."""

import random

import numpy as np
import pytest
from chaos import garbage

from rlvlm.envs.registry import make_env, task_env
from rlvlm.envs.slots import EnvSlot

SEED = 2026
COUNT = 2_500
"""Per task; four tasks."""
_BEGINS = ('{"action": ', '{"thoughts": "x", "action": "', '{"action": "', '"action":', '{"action": {"action": ', "")
_ENDS = ('"}', "}", '", "action": "0"}', "")


def nearly(names: tuple[str, ...], seed: int) -> list[str]:
    """Nonsense of which two thirds look as if an action were to come, and some have one."""
    rng = random.Random(seed)
    texts = []
    for text in garbage(COUNT, seed):
        word = rng.choice([*names, "go", "", "1e999", "null", "[0]", str(rng.randrange(-3, 40))])
        begin, end = rng.choice(_BEGINS), rng.choice(_ENDS)
        texts.append(rng.choice([text, f"{begin}{word}{end}", f"{begin}{text}{end}"]))
    return texts


def image_of(slot: EnvSlot) -> bytes:
    return slot.env.image_key(slot.turn.snapshot[None])[0].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["number_line", "blackjack", "points24", "doorkey_6x6"])
def test_garbage_is_flagged_and_never_becomes_an_action(task):
    slot = EnvSlot(make_env(task, task_env(task), 0), task)
    slot.begin(0)
    names = slot.env.action_names
    unread = written = 0
    for number, text in enumerate(nearly(names, SEED)):
        before, image = slot.turn.snapshot, image_of(slot)
        slot.play(text)
        played = slot.episode(only_newest=True)
        reply = played.replies[-1]
        assert np.isfinite(played.env_rewards[-1])
        if reply.action is None:
            unread += 1
            assert np.array_equal(slot.turn.snapshot, before) and image_of(slot) == image, text
            assert not slot.is_terminated, "an unreadable reply ends nothing for good"
        else:
            written += 1
            begin, end = reply.action_span or (0, 0)
            assert text[begin:end].strip().casefold() == names[reply.action].casefold(), text
        if slot.is_over:
            slot.begin(number)
    assert unread + written == COUNT and unread > COUNT / 2 and written > 10, "both kinds must occur"
