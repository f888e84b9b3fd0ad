"""The folder of one run: creating, finding, locking, truncating to a checkpoint, removing."""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvlm.core.disk import check_links, held, try_file_system, write_json, write_whole
from rlvlm.core.errors import MachineError, NumericsError, UsageError
from rlvlm.core.foreign import read_json
from rlvlm.core.metrics import ENV_STEPS
from rlvlm.core.trust import check_folder, code_digests, foreign_code, is_trusted, names_of, remember
from rlvlm.runs.files.checkpoints import STATE, Checkpoint, RunState, checkpoint_store, newest_sound, resolved
from rlvlm.runs.files.environment import describe_environment
from rlvlm.runs.files.tables import CsvTable, JsonLines
from rlvlm.runs.settings.config import GOAL_IMAGE, RunConfig
from rlvlm.runs.settings.config_file import config_text, read_config_text, read_saved_settings
from rlvlm.runs.settings.tree import differences, flat

if TYPE_CHECKING:
    from rlvlm.labels.store import LabelStore

EVAL_COLUMNS = (
    "step success_rate episode_return learned_return final_progress episodes wall_s sampled_success_rate "
    "strict_success_rate sampled_strict_success_rate success_at_end distinct_episodes"
).split()
QUERY_COLUMNS = (
    "ground_truth_score_1 ground_truth_score_2 vlm_predicted_label timestamp train_iter "
    "status p_left p_right p_tie session env_step index correct return_1 return_2 latency_s text question "
    "answered_by used_step"
).split()
"""Columns of the query log, the first five as in the reference: a score is the simulator's progress, empty if the env
measures none (then true returns are the truth), a label is 0 (first), 1 (second) or -1. A question is named as in the
run's label store. Answers are trained on from `used_step` on, which is empty if a person was asked later."""
SCORE_COLUMNS = (
    "ground_truth_score vlm_score timestamp status session env_step index return latency_s text question used_step"
).split()
"""Columns of the score log: a score is in [0, 1]; its truth is the simulator's progress (empty if the env measures
none) or, for a turn, its true utility."""
INSTRUCTION_COLUMNS = "instruction episodes successes rate low high".split()
RAY_COPY = "_ray_pkg_"
"""Prefix of the folders into which Ray unpacks a job's --working-dir."""
BYTES_NEEDED = 512 * 2**20
"""Free disk space required before a run starts: twice its checkpoints."""


class RunFolder:
    """Paths of a run's files.

    Args:
        path: an existing run folder.
        keep_checkpoints: number of newest checkpoints to keep, besides the best.
    """

    def __init__(self, path: Path, keep_checkpoints: int) -> None:
        self.path = path
        self.first_made: Path | None = None
        """Topmost folder that was created for this run; None if all existed."""
        self.evaluations = CsvTable(path / "eval.csv", EVAL_COLUMNS, "step")
        self.queries = CsvTable(path / "vlm_query_log.csv", QUERY_COLUMNS, "used_step", "env_step")
        self.scores = CsvTable(path / "vlm_score_log.csv", SCORE_COLUMNS, "used_step", "env_step")
        self.metrics = JsonLines(path / "metrics.jsonl", ENV_STEPS)
        self.samples = JsonLines(path / "judge_panel.jsonl", "used_step", ENV_STEPS)
        self.fooled = JsonLines(path / "fooled.jsonl", ENV_STEPS)
        self.checkpoints = checkpoint_store(path / "checkpoints", keep_checkpoints)
        self.unfinished_start = self.checkpoints.path / "supervised_start"
        """Checkpoint of a supervised start that was stopped, before there is one of the run."""
        self.plots = path / "plots"
        self.videos = path / "videos"
        self.tensorboard = path / "tensorboard"
        self.labels = path / "labels"
        self.ledger = path / "api_spending.json"
        self.log = path / "run.log"
        self.panel = path / "judge_panel.html"
        self.played = path / "episodes.json"
        self.by_instruction = CsvTable(path / "success_by_instruction.csv", INSTRUCTION_COLUMNS)
        self.readme = path / "README.md"
        self.crash = path / "crash.txt"
        self.numerics = path / "numerics"

    def config(self) -> RunConfig:
        """Returns the resolved configuration with which the run was started, with the folder's present location."""
        return replace(read_config(self.path), out=self.path)

    def command(self) -> str:
        """Returns the command line that started the run."""
        return (self.path / "command.txt").read_text().partition("\n")[0]

    @property
    def resume_command(self) -> str:
        """Returns the command that resumes the run; with --trust if it imports a user's own code."""
        file = self.path / "config.yaml"
        option = trust_option(file, replace(read_config(self.path), out=None))
        return f"rlvlm resume {shlex.quote(str(self.path))}{option}"

    def environment(self) -> dict[str, Any]:
        """Versions, commit and hardware at the start of the run or, if unknown, the present ones."""
        found: Any = None
        with suppress(OSError, ValueError):
            found = read_json(self.path / "environment.json")
        return describe_environment() | (found if isinstance(found, dict) else {})

    def summary(self) -> dict[str, Any]:
        """Returns the final figures, empty before the run's end.

        Raises:
            UsageError: they cannot be read.
        """
        file = self.path / "summary.json"
        try:
            found = read_json(file) if file.exists() else {}
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {file}: {error}", "restore it, or remove it and resume the run") from error
        return found if isinstance(found, dict) else {}

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes the summary atomically."""
        write_json(self.path / "summary.json", summary)

    def cut(self, last_step: int) -> None:
        """Truncates all growing files to `last_step`, their state when its checkpoint was made."""
        # rows of steps after the checkpoint: those steps are taken again
        for table in (self.evaluations, self.queries, self.scores, self.metrics, self.samples, self.fooled):
            table.cut(last_step)
        self.checkpoints.discard_after(last_step)
        (self.path / "summary.json").unlink(missing_ok=True)

    def keep_evidence(self, error: NumericsError) -> None:
        """Stores the evidence of a non-finite number in `numerics/`: message, seed, and the arrays as npz."""
        import numpy as np  # `rlvlm --help` starts without it

        shutil.rmtree(self.numerics, ignore_errors=True)
        config = self.config()
        about = {"what": str(error), "fix": error.fix, "task": config.task, "seed": config.seed}
        write_json(self.numerics / "error.json", about | {"arrays": {k: list(v.shape) for k, v in error.found.items()}})
        np.savez(self.numerics / "found.npz", allow_pickle=False, **error.found)

    def checkpoint_at(self, path: Path) -> Checkpoint | None:
        """Returns the checkpoint that `path` is in; None if it is in none."""
        here = resolved(path)  # follows the links `last` and `best` too
        found = self.checkpoints.newest_first()
        return next((each for each in found if here.is_relative_to(each.path.resolve())), None)

    def has_begun(self) -> bool:
        """Returns whether anything was measured, asked or paid for, or crashed: then the folder is kept."""
        traces = (self.metrics.path, self.queries.path, self.scores.path, self.ledger, self.crash, self.numerics)
        return any(file.exists() for file in traces)

    def remove(self) -> None:
        """Removes the folder, and the parents created for it. Only for its holder, see `locked`."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.first_made is None:
            self.path.mkdir(exist_ok=True)  # it existed before, empty
            return
        for parent in self.path.parents:
            if parent == self.first_made.parent or not parent.is_dir() or any(parent.iterdir()):
                return
            with suppress(OSError):  # another run was just created beside it
                parent.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder for this process, and removes half-written files of a killed one.

        Raises:
            UsageError: another process writes to it, or a link in it leads outside.
        """
        what = f"another process is writing to {self.path}"
        check_links(self.path)
        # locks belong to a file, not its name, so to one that is never replaced: `resume --steps N` renames a new
        # config.yaml into place
        with held(self.path / "command.txt", what, "wait for that run to end, or stop it"):
            self.checkpoints.clear_unfinished()
            yield


def read_config(path: Path) -> RunConfig:
    """Reads the configuration in a run's folder.

    Raises:
        UsageError: it cannot be read.
    """
    file = path / "config.yaml"
    return read_config_text(text_of(file), str(file))


def create_folder(config: RunConfig, command: Sequence[str], started: datetime) -> RunFolder:
    """Creates a run folder with all files that are known before the run starts.

    Args:
        config: config of the run; `config.out` is the folder, by default `runs/TASK/<time>`.
        command: arguments of the command line.
        started: local time, for the default name.

    Raises:
        UsageError: the folder is in use, cannot be created, or would not persist.
        MachineError: the disk is full.
    """
    path = (config.out or default_path(config.task, started)).expanduser().absolute()
    another = "choose a new or empty folder with --out"
    if any(part.startswith(RAY_COPY) for part in path.parts):
        what = f"the run's folder would be in Ray's copy of the job's working folder, which Ray deletes: {path}"
        raise UsageError(what, "give --out an absolute path")
    is_named = config.out is not None  # a default name gets the first free number
    if is_named and path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file", another)
    if is_named and (path / "config.yaml").exists():
        fix = f"go on with it: rlvlm resume {shlex.quote(str(path))}  (or choose another --out)"
        raise UsageError(f"{path} already holds a run", fix)
    if is_named and path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} is not empty", another)
    check_disk(path, BYTES_NEEDED)
    # remembered for `remove`, which removes what was created for a run that never began
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path = _claim(path, is_named=is_named)
    except FileExistsError as error:
        raise UsageError(f"another run has just taken {path}", another) from error
    except OSError as error:
        raise UsageError(f"cannot write the run's folder {path}: {error.strerror}", "choose another --out") from error
    folder = RunFolder(path, config.track.keep_checkpoints)
    folder.first_made = missing[-1] if len(missing) > 1 else path if missing else None
    try:
        try_file_system(path)
        # no file of another run must be resumed by this one
        folder.checkpoints.discard_after(-1)  # of a run that had this path before, on scratch
        (path / "command.txt").write_text(shlex.join(command) + "\n")  # written in place, because `locked` locks it
        code, _ = names_of(config)
        own = {"own_code": code_digests(code)} if code else {}
        write_json(path / "environment.json", describe_environment() | own)
        if config.goal_file:  # as shown to the judge: the run continues with it even if the file is gone or changed
            from rlvlm.judges.goal_image import read_goal_image  # help texts should not wait for numpy
            from rlvlm.vlms.stills import to_png

            image = read_goal_image(config.goal_file, config.judge.image_px)
            write_whole(path / GOAL_IMAGE, to_png(image[0], is_small=True))
        write_settings(path / "config.yaml", config_text(config), config)
    except OSError as error:
        folder.remove()
        raise UsageError(f"cannot write the run's folder {path}: {error.strerror}", "choose another --out") from error
    return folder


def find_folder(path: Path | str) -> RunFolder:
    """Returns the run that a path belongs to: its folder, a checkpoint in it, or any file in it.

    Raises:
        UsageError: `path` belongs to no run.
    """
    here = Path(path).expanduser().absolute()
    if not here.exists():
        raise UsageError(f"{path} does not exist", "name the folder that a run printed at its start")
    for candidate in (here, *here.parents):
        if _is_run(candidate):
            return RunFolder(candidate, read_config(candidate).track.keep_checkpoints)
    raise UsageError(
        f"{path} is not in a run's folder: no config.yaml with its command.txt around it",
        "name one like runs/TASK/<time>",
    )


def _is_run(path: Path) -> bool:
    """Returns whether `path` is a run's folder: a config.yaml alone may be a copy for editing."""
    return (path / "config.yaml").is_file() and (path / "command.txt").is_file()


def find_folders(path: Path) -> list[RunFolder]:
    """Returns all runs below a folder, sorted; else the run that the path belongs to, raising as `find_folder` does."""
    # command.txt marks a run; config.yaml alone may be a copy for editing
    below = sorted(file.parent for file in path.glob("**/command.txt")) if path.is_dir() else []
    return [find_folder(folder) for folder in below or [path]]


def check_newest(folder: RunFolder, path: Path) -> None:
    """Raises UsageError if `path` is in a checkpoint older than the newest intact one: later work would be lost."""
    named = folder.checkpoint_at(path)
    newest = None if named is None else newest_sound(folder.checkpoints.newest_first())
    if named is not None and newest is not None and named.step < newest.step:
        fix = f"go on from the newest, step {newest.step:,}: {folder.resume_command}"
        raise UsageError(f"{path} is not the newest checkpoint; going on there would discard later work", fix)


def choose_checkpoint(folder: RunFolder, path: Path, log: Callable[[str], None]) -> Checkpoint:
    """Returns the checkpoint that `path` is in, otherwise the run's best, or the newest intact one if that is corrupt.

    Raises:
        UsageError: there is no checkpoint yet.
        CorruptCheckpoint: the named one is corrupt, or all are.
    """
    if (named := folder.checkpoint_at(path)) is not None:
        named.check()
        return named
    best = folder.checkpoints.best()
    if best is None:
        raise UsageError(f"{folder.path} has no checkpoint yet", f"let it continue: {folder.resume_command}")
    # if the best is corrupt, the newest intact one is the next best guess
    candidates = [best, *folder.checkpoints.newest_first()]
    return newest_sound(candidates, lambda damage: log(f"damaged checkpoint: {damage}")) or best


def read_state(checkpoint: Checkpoint, config: RunConfig) -> RunState:
    """Returns the run loop's state in a checkpoint, with its settings under today's names.

    Raises:
        UsageError: a setting that defines the run differs from `config`'s.
        CorruptCheckpoint: it cannot be read.
    """
    saved = checkpoint.state
    before = replace(saved, settings=read_saved_settings(saved.settings, config, str(checkpoint.path / STATE)))
    changed = differences(before.settings, flat(config))
    # compared with the checkpoint's settings, not the file's: the file was edited
    odd = [name for name in changed if not any(fnmatchcase(name, pattern) for pattern in config.may_change)]
    if odd:
        changes = "; ".join(f"{name} is {changed[name]}" for name in odd)
        raise UsageError(
            f"the settings differ from those of the run at step {before.env_steps:,}: {changes}",
            "undo the change, or start a new run with it",
        )
    return before


def check_disk(path: Path, needed: int) -> None:
    """Raises MachineError if the disk under `path` has fewer than `needed` bytes free."""
    existing = next(p for p in (path, *path.parents) if p.exists())
    # a run that fills the disk loses its last checkpoint, hours later
    free = shutil.disk_usage(existing).free
    if free < needed:
        what = f"the disk of {path} has {free / 2**20:.0f} MiB free, a run needs {needed / 2**20:.0f} MiB"
        raise MachineError(what, "free some space, or put the run elsewhere with --out DIR")


def default_path(task: str, started: datetime) -> Path:
    """Returns the first free name of `runs/TASK/<time>`, `runs/TASK/<time>-2`, ..."""
    path = Path("runs") / re.sub(r"\W+", "-", task) / started.strftime("%Y%m%d-%H%M%S")
    return next(name for name in _numbered(path) if not name.exists())


def _claim(path: Path, *, is_named: bool) -> Path:
    """Creates the folder of a run exclusively, with `command.txt` as its mark, or raises OSError; unless the user named
    it, another number is used if `path` is taken meanwhile.
    """
    # runs of a job array may start in the same second; checking first would give two of them the same folder
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in (path,) if is_named else _numbered(path):
        try:
            name.mkdir(exist_ok=is_named)
            open(name / "command.txt", "x").close()
            return name
        except FileExistsError:
            continue
    raise FileExistsError(path)


def _numbered(path: Path) -> Iterator[Path]:
    """Yields `path`, then `path` with -2, -3, ... appended."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def check_trust(paths: Sequence[Path], *, trust: bool) -> None:
    """Admits runs that import only rlvlm and stay within their folders, that this user made or trusted on this machine
    and, with `trust`, all, which is remembered. Imports nothing.

    Args:
        paths: folders of runs, folders that contain them, or files in them.
        trust: whether the user gave --trust.

    Raises:
        UsageError: a run is not trusted, or its settings cannot be read.
    """
    for file in settings_files(paths, "config.yaml"):
        if not _is_run(file.parent):  # nothing reads it
            continue
        text = text_of(file)
        config = read_config_text(text, str(file))
        check_folder(file, text, *_without_place(config), trust=trust)
        if foreign_code([config.task]):  # now that its task may be imported, its env's own settings are known
            check_folder(file, text, *_without_place(read_config_text(text, str(file))), trust=trust)


def write_settings(file: Path, text: str, *configs: Any) -> None:
    """Writes a file of settings that the user made or trusted, and remembers that.

    Args:
        file: the file.
        text: its new text.
        configs: config trees with all names in the text.

    Raises:
        OSError: writing failed.
    """
    write_whole(file, text)
    remember(text, names_of(*configs)[0])


def trust_option(file: Path, *configs: Any) -> str:
    """Returns ` --trust` if resuming a run or a sweep requires it on this machine, else an empty string.

    Args:
        file: its file of settings.
        configs: config trees in the file.

    Raises:
        UsageError: the file cannot be read.
    """
    return "" if is_trusted(text_of(file), *names_of(*configs)) else " --trust"


def _without_place(config: RunConfig) -> tuple[list[str], dict[str, str]]:
    """Returns what a run refers to outside of its folder; `out` is the folder itself, wherever it was made."""
    return names_of(replace(config, out=None))


def text_of(file: Path) -> str:
    """Returns the text of a file of settings, or raises UsageError if it cannot be read."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}", "restore the file, or start a new run") from error


def settings_files(paths: Sequence[Path], name: str) -> list[Path]:
    """Returns the files `name` at and below paths, and that of the run that a path is in; each once.

    Args:
        paths: files and folders.
        name: `config.yaml` or `sweep.yaml`.
    """
    found: list[Path] = []
    for path in paths:
        here = path.expanduser().absolute()
        found.append(here / name)
        # a checkpoint's path leads to the run around it, as in `find_folder`
        found += [next(filter(_is_run, (here, *here.parents)), here) / name]
        if here.is_dir():
            # follows links to folders at the first levels too, because a sweep's TASK/SOURCE/seed_N are opened
            levels = ("*/" * depth + name for depth in range(1, 5))
            found += sorted({*here.rglob(name)}.union(*map(here.glob, levels)))
    return [file for file in dict.fromkeys(found) if file.is_file()]


def label_store(folder: RunFolder, config: RunConfig) -> "LabelStore":
    """Returns the store of a run: the shared one named by `judge.store`, or its own.

    Raises:
        UsageError: the folder contains something else, or a store of a newer schema.
    """
    from rlvlm.labels.records import Origin  # help texts should not wait for numpy
    from rlvlm.labels.store import LabelStore

    origin = Origin(run=folder.path.name, task=config.task, seed=config.seed)
    return LabelStore(config.labels(folder.labels), origin)
