"""The one loop that plays envs to the ends of their episodes."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from rlvlm.core.episodes import SampledChunk
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.playing import Slot, play
from rlvlm.envs.push_block import PushBlock
from rlvlm.envs.registry import make_env, task_env


def number_line() -> Slot:
    return Slot(make_env("number_line", task_env("number_line"), 0))


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_slots_are_filled_again_and_starts_taken_when_a_slot_is_free(num_slots):
    taken: list[int] = []
    under_way: list[int] = []

    def starts() -> Iterator[int]:
        for seed in (7, 8, 9, 7):
            taken.append(seed)
            yield seed

    def act(slots: Sequence[Slot]) -> list[str]:
        under_way.append(len(slots))
        return [slot.env.action_text(slot.env.expert_action()) for slot in slots]

    ended: dict[int, list[Any]] = {}
    for slot in play([number_line() for _ in range(num_slots)], starts(), act):
        assert slot.is_over and len(slot.seen) == len(slot.infos) == len(slot.answers) + 1 == len(slot.rewards) + 1
        assert len(taken) <= min(4, len(ended) + num_slots), "none is begun before its slot is free"
        ended[slot.index] = [slot.start, slot.answers, np.concatenate(slot.snapshots).tolist()]
    assert max(under_way) == min(num_slots, 4) and taken == [7, 8, 9, 7]
    assert [ended[place][0] for place in range(4)] == taken and ended[0] == ended[3]


def test_an_episode_without_an_answer_is_left_where_it_is():
    def act(slots: Sequence[Slot]) -> list[str | None]:
        return [None if slot.start == 8 else slot.env.action_text(slot.env.expert_action()) for slot in slots]

    assert {slot.start: slot.is_over for slot in play([number_line()], [7, 8, 9], act)} == {7: True, 8: False, 9: True}


def test_slots_driven_together_give_the_same_as_each_env_alone():
    """Of 32 steps at most, of which the script needs more or fewer."""
    env, rng = PushBlock(ChunkEnvConfig(episode_steps=32), seed=0), np.random.default_rng(0)
    alone = {
        slot.start: (np.concatenate(slot.snapshots), slot.rewards, slot.infos[1:], slot.answers)
        for slot in play([Slot(env)], range(8), lambda _: [env.scripted_chunk(1.0, rng)])
    }

    def again(slots: Sequence[Slot]) -> list[SampledChunk]:
        """The chunks that were played in the envs alone."""
        chunks = [alone[slot.start][3][len(slot.answers)] for slot in slots]
        empty: dict[str, Any] = {"log_probs": np.zeros(0, np.float32), "mask": np.zeros(0, bool)}
        of_none = empty | {"answer": {}, "steps": np.zeros(0, np.int64), "value": 0.0, "version": 0}
        return [SampledChunk(actions=chunk, **of_none) for chunk in chunks]

    lengths = set()
    for slot in play([Slot(env) for _ in range(8)], range(8), again, env.many()):
        snapshots, rewards, infos, _ = alone[slot.start]
        lengths.add(len(slot.rewards))
        assert np.array_equal(np.concatenate(slot.snapshots), snapshots) and slot.rewards == rewards
        for own, one in zip(slot.infos[1:], infos, strict=True):
            assert own.keys() == one.keys() and all(np.array_equal(own[name], one[name]) for name in own)
    assert len(lengths) > 1, "some ended before others"
