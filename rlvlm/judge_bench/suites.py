"""Suites: the tasks that a judge is asked about, and the number of items. Played from fixed seeds, not fetched."""

import difflib
from dataclasses import dataclass, replace
from pathlib import Path

from rlvlm.core.errors import UsageError
from rlvlm.core.guests import DataFormat, missing_of
from rlvlm.demonstrations.playing import Script
from rlvlm.demonstrations.recordings import MAX_ROWS, TABLES, guest_form
from rlvlm.demonstrations.trajectory import SuccessRule
from rlvlm.envs.registry import full_name, task_families
from rlvlm.judge_bench.archive import SUFFIX, Archive, open_archive
from rlvlm.judge_bench.attempts import Player
from rlvlm.judge_bench.hacked import HackedEpisode, read_suite, shipped_suites

VERSION = 5
"""Version of the way items are made; it must rise with any change, so that only comparable rows are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Tasks, and the number of items of each."""

    name: str
    tasks: tuple[str, ...]
    """Names in the registry; those that no script plays are left out when the suite is made."""
    episodes: int = 24
    """Episodes per task, >= 4: in turn straight, with noise, with a script that stops half way, and at random."""
    pairs: int = 100
    """Pairs of images per task, spread over ten difficulty bins; each is asked in both orders."""
    videos: int = 8
    """Episodes of each case: success, near miss, failure, cut short."""
    controls: int = 6
    """Items of each control."""
    tracks: int = 3
    """Straight episodes whose images are scored one by one, `TRACK_IMAGES` of each."""
    attempts: int = 0
    """Attempts of each kind: episodes that a policy can play and scripts do not (`attempts.ATTEMPTS`)."""
    line: int = 0
    """States along lines to the goal and beyond it, about."""
    rehearse: int = 0
    """Questions of the rehearsal of each task and kind of question; 0 for none."""
    start: Player | None = None
    """Policy that a run starts from, for the attempts; None plays at random."""
    success: SuccessRule | None = None
    """Rule for the success of recorded episodes that do not state it; None refuses them."""
    shares_scenes: bool = False
    """Whether the tasks of a family share one scene, so that each other's goals are goals there too."""
    goal: str = ""
    """Goal to ask about; empty for the task's own."""
    hacked: tuple[HackedEpisode, ...] = ()
    """Episodes of the only task that have fooled judges, asked about in addition to those that are played."""
    is_table: bool = False
    """Whether the items are whole clips, uncut, with labels from a table."""
    frozen: Archive | None = None
    """Frozen file whose items are asked about instead of new ones; it determines their number."""
    draw_path: bool = False
    """Whether the hand's path is drawn on the last image of each side."""
    player: Script | None = None
    """Policy that plays envs in steps instead of their script: an action [A] in [-1, 1] for an observation [D]."""


_LIBERO = (
    *(f"libero_spatial/{number}" for number in range(10)),
    *(f"libero_object/{number}" for number in range(10)),
    *(f"libero_goal/{number}" for number in (1, 2, 4, 5, 6, 8, 9)),
)
"""Tasks of LIBERO in which one thing is put somewhere; the script plays more tasks, but these are quick."""
_GRIDS = (
    "Empty-Random-6x6-v0 DoorKey-5x5-v0 DoorKey-6x6-v0 DoorKey-8x8-v0 FourRooms-v0 LavaGapS6-v0 SimpleCrossingS9N1-v0 "
    "MultiRoom-N2-S4-v0 Unlock-v0 UnlockPickup-v0 KeyCorridorS3R1-v0"
).split()
SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            name="tiny",
            tasks=("drawer_open", "cartpole", "straighten_rope", "push_block"),
            episodes=12,
            pairs=40,
            videos=6,
            controls=6,
            tracks=2,
        ),
        Suite(
            name="paper7",
            tasks=("drawer_open", "soccer", "sweep_into", "cartpole", "straighten_rope", "fold_cloth", "pass_water"),
        ),
        Suite(
            name="metaworld50",
            tasks=tuple(task_families()["metaworld"]),
            episodes=12,
            pairs=30,
            videos=4,
            controls=3,
            tracks=2,
        ),
        Suite(
            name="libero",
            tasks=_LIBERO,
            episodes=8,
            pairs=20,
            videos=3,
            controls=2,
            tracks=1,
            shares_scenes=True,
        ),
        Suite(name="minigrid", tasks=tuple(f"minigrid/MiniGrid-{name}" for name in _GRIDS), episodes=16, pairs=50),
        Suite(name="gym_cards", tasks=("number_line", "ez_points", "points24", "blackjack"), episodes=24, pairs=60),
    )
}
"""Named suites. `tiny` takes two minutes with a small model on two cores."""
_HACKED = "hacked_"
"""Prefix of the names of shipped suites of hacked episodes."""
PERSON_QUESTIONS = 40
"""Default number of questions to a person, which take about five minutes."""


def for_person(suite: Suite) -> Suite:
    """Returns the suite with about `PERSON_QUESTIONS` questions, at least 8 per task.

    It has no controls, which would be half of them.
    """
    # an episode of each of four cases, and pairs in both orders
    pairs = max(2, (PERSON_QUESTIONS // len(suite.tasks) - 4) // 2)
    return replace(suite, episodes=8, pairs=pairs, videos=1, controls=0, tracks=0)


def questions_of_person(suite: Suite) -> int:
    """Returns the number of questions of each kind about each task: at least 4, about `PERSON_QUESTIONS` in all."""
    return max(4, PERSON_QUESTIONS // (2 * len(suite.tasks)))


def is_recording(name: str) -> bool:
    """Returns whether `name` is recorded data: a table of videos, or of a guest's format."""
    return is_table(name) or bench_form(name) is not None


def bench_form(name: str) -> DataFormat | None:
    """Returns the guest's format of the recorded data at the path `name`; None if no guest has the bench read them."""
    found = guest_form(Path(name))
    return found[1] if found and found[1].bench else None


def is_table(name: str) -> bool:
    """Returns whether `name` is a table of videos."""
    return Path(name).suffix.lower() in TABLES


def find_suite(name: str) -> Suite:
    """Returns the suite called `name`, or one made of comma-separated tasks, a table of videos, recorded data of a
    guest's format, a file of hacked episodes, or a frozen suite.

    Raises:
        UsageError: `name` is none of these.
    """
    if name in SUITES:
        return SUITES[name]
    shipped = {f"{_HACKED}{short}": file for short, file in shipped_suites().items()}
    if name in shipped or (name.endswith(".json") and bench_form(name) is None):
        task, episodes = read_suite(shipped.get(name, Path(name)))
        return Suite(name=Path(name).name, tasks=(full_name(task),), pairs=0, tracks=0, hacked=tuple(episodes))
    if name.endswith(SUFFIX):
        archive = open_archive(Path(name))
        return Suite(name=archive.suite, tasks=tuple(entry.task for entry in archive.tasks), frozen=archive)
    if is_table(name):
        return Suite(name=Path(name).name, tasks=(name,), videos=MAX_ROWS, tracks=8, is_table=True)
    if form := bench_form(name):
        return Suite(name=Path(name).name, tasks=(name,), controls=form.controls)
    if Path(name).is_dir():
        what = f"the folder {name} is no LeRobot data set: it has no meta/info.json{missing_of('formats')}"
        raise UsageError(what, "name the folder above meta, data and videos; or a suite, or tasks")
    try:
        tasks = tuple(full_name(task) for task in name.split(","))
    except UsageError as error:
        names = [*SUITES, *shipped]
        near = difflib.get_close_matches(name, names, n=1)
        fix = f"did you mean {near[0]}?" if near else error.fix
        raise UsageError(f"{name!r} is neither a suite ({', '.join(names)}) nor a task: {error}", fix) from error
    return Suite(name=name, tasks=tasks)
