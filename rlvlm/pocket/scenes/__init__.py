"""Scenes for the pocket judge: episodes of rlvlm's tasks, drawn. One provider per task, and one of them all.

`pocket.judge.train` and `pocket.judge.evaluate` take a provider by name.
"""

from collections.abc import Iterator
from functools import partial

from rlvlm.pocket.scenes.pairs import Scenes, Split
from rlvlm.pocket.scenes.play import collect
from rlvlm.pocket.scenes.tasks import TASKS

drawer_open = partial(collect, TASKS["drawer_open"])
soccer = partial(collect, TASKS["soccer"])
sweep_into = partial(collect, TASKS["sweep_into"])
cartpole = partial(collect, TASKS["cartpole"])
straighten_rope = partial(collect, TASKS["straighten_rope"])
pass_water = partial(collect, TASKS["pass_water"])
fold_cloth = partial(collect, TASKS["fold_cloth"])


def all_tasks(split: Split, seed: int) -> Iterator[Scenes]:
    """Yields the scenes of every task, one set-up at a time: all at once would be some gigabytes."""
    for task in TASKS.values():
        yield from collect(task, split, seed)
