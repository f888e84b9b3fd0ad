"""`rlvlm judge-bench harvest`: makes a suite of the episodes that fooled judges, in runs and in rehearsals."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlvlm.core.console.tables import plain_console, plain_table
from rlvlm.core.disk import make_output_folder, write_whole
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.steps import spread
from rlvlm.envs.pixels import PixelEnv
from rlvlm.envs.registry import make_env, task_env
from rlvlm.judge_bench.hacked import (
    MAX_IN_SUITE,
    SUFFIX,
    Distinct,
    HackedEpisode,
    parse_episode,
    read_suite,
    trick_of,
    write_suite,
)
from rlvlm.judge_bench.rows import ROW_FILE
from rlvlm.reports.contact_sheet import COLUMNS, IMAGE_PX, Row, contact_sheet
from rlvlm.runs.files.folder import find_folders
from rlvlm.runs.files.records import MAX_FRAMES
from rlvlm.vlms.stills import to_png

_MAX_SHOWN = 16
"""Maximum number of episodes on the sheet, one of each trick per judge."""


def harvest_suite(
    runs: Sequence[Path], out: Path, max_episodes: int = MAX_IN_SUITE, max_frames: int = MAX_FRAMES
) -> int:
    """Writes `TASK.hacked.json` and a sheet with images of each trick into `out`, and returns the exit code.

    Runs and benches take turns, so that one judge's tricks do not fill the suite.

    Args:
        runs: folders of runs, or folders that contain runs, or folders of benches with `--rehearse`.
        out: folder to write.
        max_episodes: maximum number in the suite, 1 to `MAX_IN_SUITE`.
        max_frames: images per episode, evenly spread; the first and the last are always kept.

    Raises:
        UsageError: the runs are of several tasks, kept nothing, or have an env that cannot draw past states.
    """
    found = list(_episodes(runs))
    if len(tasks := {task for task, _ in found}) > 1:
        raise UsageError(
            f"a suite is of one task, and these runs are of {', '.join(sorted(tasks))}", "name runs of one"
        )
    kept = [episodes for _, episodes in found]
    distinct = Distinct(min(max_episodes, MAX_IN_SUITE))
    for place in range(max(map(len, kept), default=0)):
        for episodes in kept:
            if place < len(episodes):
                distinct.add(episodes[place])
    if not distinct.episodes:
        raise UsageError(
            f"{len(runs)} folders kept no episode that fooled the judge",
            "runs with --reward.source judged keep them, where the judge called a failure a success, and benches with "
            "--rehearse",
        )
    (task,) = tasks
    make_output_folder(out)
    episodes, rows = [], []
    with closing(make_env(task, task_env(task), 0)) as env:
        if isinstance(env, PixelEnv):
            raise UsageError(f"{task} cannot draw its past again, and a suite keeps states", "use an env that can")
        env.reset_to(0)
        start = env.draw_sized(env.snapshot()[None], IMAGE_PX, "")
        for episode in distinct.episodes:
            moments = spread(episode.snapshots, max_frames)
            frames = env.draw_sized(moments, IMAGE_PX, "")
            seen = frames if len(frames) > 1 else np.concatenate([start, frames])
            named = replace(episode, snapshots=moments, trick=trick_of(episode, seen))
            episodes.append(named)
            what = f"{named.judge}: {named.trick}"
            if len(rows) < _MAX_SHOWN and not any(row.title.startswith(what) for row in rows):
                title = f"{what}, {named.progress:.2f} of the way, scored {named.score:.2f}"
                shown = spread(frames, COLUMNS)
                rows.append(Row(title=title, images=shown, labels=("",) * len(shown)))
    file = out / f"{task.replace('/', '-')}{SUFFIX}"
    digest = write_suite(file, task, episodes)
    write_whole(out / "tricks.png", to_png(np.asarray(contact_sheet(f"{task}: what fooled judges", rows))))
    _print_counts(episodes, file, digest)
    return EXIT_DONE


def bench_suites(run: Path) -> list[Path]:
    """Returns the suites of a bench's best-liked failures; none of a folder that is no bench's."""
    return sorted(run.glob(f"*{SUFFIX}")) if (run / ROW_FILE).exists() else []


def _episodes(runs: Sequence[Path]) -> Iterator[tuple[str, Sequence[HackedEpisode]]]:
    """Yields the task of each run and bench, and the episodes that it kept."""
    for run in runs:
        if (run / ROW_FILE).exists():
            yield from map(read_suite, bench_suites(run))  # what its judge liked best, the best first
            continue
        for folder in find_folders(run):
            # the newest first: a policy needs time to learn a trick
            yield folder.config().task, _kept(folder.fooled.path, folder.fooled.read())[::-1]


def _kept(path: Path, rows: Sequence[dict[str, object]]) -> list[HackedEpisode]:
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(parse_episode(row))
        except ValueError as error:
            raise UsageError(
                f"line {number} of {path} is no episode: {error}", "restore it, or leave the run out"
            ) from error
    return found


def _print_counts(episodes: Sequence[HackedEpisode], file: Path, digest: str) -> None:
    console = plain_console(soft_wrap=True)
    judges = sorted({episode.judge for episode in episodes})
    counts = [
        (trick, *(str(sum(e.trick == trick and e.judge == judge for e in episodes)) for judge in judges))
        for trick in sorted({episode.trick for episode in episodes})
    ]
    console.print(plain_table(("what it does", *judges), counts, words=("what it does",)))
    console.print(f"{len(episodes)} episodes, digest {digest[:12]}: {file}")
    console.print(f"images: {file.parent / 'tricks.png'}; ask a judge: rlvlm judge-bench {file}")
