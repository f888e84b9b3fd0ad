"""The folder of one run (DESIGN section 5): made, found again, locked, cut back to a checkpoint, or taken away."""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvlm.core.disk import check_links, held, try_file_system, write_json, write_whole
from rlvlm.core.errors import MachineError, NumericsError, UsageError
from rlvlm.core.foreign import read_json
from rlvlm.core.metrics import ENV_STEPS
from rlvlm.core.trust import check_folder, code_digests, foreign_code, is_trusted, remember
from rlvlm.core.yaml_text import read_yaml
from rlvlm.runs.checkpoints import Checkpoint, RunState, checkpoint_store, newest_sound, resolved
from rlvlm.runs.config import GOAL_IMAGE, RunConfig
from rlvlm.runs.config_file import config_text, read_config_text
from rlvlm.runs.environment import describe_environment
from rlvlm.runs.settings import differences, flat
from rlvlm.runs.tables import CsvTable, JsonLines

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
"""The first five are the reference's; a score is the simulator's progress, empty where the env measures none (then true
returns are the truth), a label 0 (first), 1 (second) or -1. A question is named as in the run's label store. An answer
trains from `used_step` on, which is empty where a person was asked after it."""
SCORE_COLUMNS = (
    "ground_truth_score vlm_score timestamp status session env_step index return latency_s text question used_step"
).split()
"""A score is in [0, 1]; its truth is the simulator's progress (empty where the env measures none), or of a turn its
true utility."""
CODE_SETTINGS = (
    *("judge.backend", "reward.source", "reward.teacher", "feedback.sampling"),
    *("algo.advantage.estimator", "algo.loss.policy", "policy.head"),
)
"""Besides the task, those that may name code of the user's own."""
WAYS_OUT = (
    *("api.base_url", "api.key_env", "api.key_file", "api.ledger", "engine.python", "vllm.python"),
    *("judge.store", "cached.store", "judge.wording", "reward.measured", "feedback.measured", "track.bench"),
    *("sft.demonstrations", "sft.labels", "sft.start_from", "policy.adapter", "goal_image", "env.prompt"),
)
"""Settings that lead out of a run's folder: servers, variables, files elsewhere, programs."""
READ_OUTSIDE = ("env.prompt", "judge.store")
"""Those that are read where a run is only looked at: played, or its answers reported."""
USUAL_KEYS = ("OPENAI_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY")
"""Variables whose value goes to their own provider where no `base_url` is set."""
RAY_COPY = "_ray_pkg_"
"""How the folders begin into which Ray unpacks a job's --working-dir."""
BYTES_NEEDED = 512 * 2**20
"""Free disk that a run asks for before it starts: its checkpoints, twice."""


class RunFolder:
    """The places of a run's files.

    Args:
        path: an existing run folder.
        keep_checkpoints: newest checkpoints kept, besides the best.
    """

    def __init__(self, path: Path, keep_checkpoints: int) -> None:
        self.path = path
        self.first_made: Path | None = None
        """The topmost folder that was made for this run; None when all were there before."""
        self.evaluations = CsvTable(path / "eval.csv", EVAL_COLUMNS, "step")
        self.queries = CsvTable(path / "vlm_query_log.csv", QUERY_COLUMNS, "used_step", "env_step")
        self.scores = CsvTable(path / "vlm_score_log.csv", SCORE_COLUMNS, "used_step", "env_step")
        self.metrics = JsonLines(path / "metrics.jsonl", ENV_STEPS)
        self.samples = JsonLines(path / "judge_panel.jsonl", "used_step", ENV_STEPS)
        self.fooled = JsonLines(path / "fooled.jsonl", ENV_STEPS)
        self.checkpoints = checkpoint_store(path / "checkpoints", keep_checkpoints)
        self.plots = path / "plots"
        self.videos = path / "videos"
        self.tensorboard = path / "tensorboard"
        self.labels = path / "labels"
        self.ledger = path / "api_spending.json"
        self.log = path / "run.log"
        self.panel = path / "judge_panel.html"
        self.readme = path / "README.md"
        self.crash = path / "crash.txt"
        self.numerics = path / "numerics"

    def config(self) -> RunConfig:
        """The resolved configuration the run was started with, living where the folder is now."""
        return replace(read_config(self.path), out=self.path)

    def command(self) -> str:
        """The command line that started the run."""
        return (self.path / "command.txt").read_text().partition("\n")[0]

    @property
    def resume_command(self) -> str:
        """What goes on with the run; one that imports code of the user's own says so."""
        return f"rlvlm resume {shlex.quote(str(self.path))}{trust_option(self.path / 'config.yaml')}"

    def environment(self) -> dict[str, Any]:
        """Versions, commit and hardware: what the run was begun with, or where that cannot be told, what is here."""
        found: Any = None
        with suppress(OSError, ValueError):
            found = read_json(self.path / "environment.json")
        return describe_environment() | (found if isinstance(found, dict) else {})

    def summary(self) -> dict[str, Any]:
        """The numbers of the end, empty while there is none.

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
        """Puts the summary in place in one move."""
        write_json(self.path / "summary.json", summary)

    def cut(self, last_step: int) -> None:
        """Takes all growing files back to `last_step`, as they were when its checkpoint was made."""
        # rows of steps that were taken and never saved: they come again
        for table in (self.evaluations, self.queries, self.scores, self.metrics, self.samples, self.fooled):
            table.cut(last_step)
        self.checkpoints.discard_after(last_step)
        (self.path / "summary.json").unlink(missing_ok=True)

    def keep_evidence(self, error: NumericsError) -> None:
        """Puts what was met when a number was not finite into `numerics/`: message, seed, and the arrays as npz."""
        import numpy as np  # `rlvlm --help` starts without it

        shutil.rmtree(self.numerics, ignore_errors=True)
        config = self.config()
        about = {"what": str(error), "fix": error.fix, "task": config.task, "seed": config.seed}
        write_json(self.numerics / "error.json", about | {"arrays": {k: list(v.shape) for k, v in error.found.items()}})
        np.savez(self.numerics / "found.npz", allow_pickle=False, **error.found)

    def checkpoint_at(self, path: Path) -> Checkpoint | None:
        """The checkpoint of the run that `path` lies in; None where it lies in none."""
        here = resolved(path)  # also through the links `last` and `best`
        found = self.checkpoints.newest_first()
        return next((each for each in found if here.is_relative_to(each.path.resolve())), None)

    def has_begun(self) -> bool:
        """Whether anything was measured, asked or paid for, or a crash left its trace: then the folder is kept."""
        traces = (self.metrics.path, self.queries.path, self.scores.path, self.ledger, self.crash, self.numerics)
        return any(file.exists() for file in traces)

    def remove(self) -> None:
        """Takes the folder away, with the parents that were made for it. Only its holder may, see `locked`."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.first_made is None:
            self.path.mkdir(exist_ok=True)  # it was there before, empty
            return
        for parent in self.path.parents:
            if parent == self.first_made.parent or not parent.is_dir() or any(parent.iterdir()):
                return
            with suppress(OSError):  # a run beside it has just been made
                parent.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder for this process, and clears what a killed one left half written.

        Raises:
            UsageError: another process writes to it, or a link in it leads out of it.
        """
        what = f"another process is writing to {self.path}"
        check_links(self.path)
        # a lock is of a file and not of its name, so of one that is never replaced: `resume --steps N` renames another
        # config.yaml into place
        with held(self.path / "command.txt", what, "wait for that run to end, or stop it"):
            self.checkpoints.clear_unfinished()
            yield


def read_config(path: Path) -> RunConfig:
    """The configuration in a run's folder.

    Raises:
        UsageError: it cannot be read.
    """
    file = path / "config.yaml"
    return read_config_text(_text_of(file), str(file))


def create_folder(config: RunConfig, command: Sequence[str], started: datetime) -> RunFolder:
    """A new run folder with everything that is known before the run starts.

    Args:
        config: the run; `config.out` names the folder, otherwise it is `runs/TASK/<time>`.
        command: the words of the command line.
        started: local time, for the default name.

    Raises:
        UsageError: the folder is in use, cannot be made, or would not last.
        MachineError: the disk is full.
    """
    path = (config.out or default_path(config.task, started)).expanduser().absolute()
    another = "choose a new or empty folder with --out"
    if any(part.startswith(RAY_COPY) for part in path.parts):
        what = f"the run's folder would be in Ray's copy of the job's working folder, which Ray deletes: {path}"
        raise UsageError(what, "give --out an absolute path")
    is_named = config.out is not None  # of the other names one is taken that is free
    if is_named and path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file", another)
    if is_named and (path / "config.yaml").exists():
        fix = f"go on with it: rlvlm resume {shlex.quote(str(path))}  (or choose another --out)"
        raise UsageError(f"{path} already holds a run", fix)
    if is_named and path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} is not empty", another)
    check_disk(path, BYTES_NEEDED)
    # remembered for `remove`, which takes away what was made for a run that never began
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
        # nothing of another run may be resumed by this one
        folder.checkpoints.discard_after(-1)  # of a run that had this path before, on scratch
        (path / "command.txt").write_text(shlex.join(command) + "\n")  # in place: it is what `locked` locks
        code = code_named(config, goes_on=True)
        own = {"own_code": code_digests(code)} if code else {}
        write_json(path / "environment.json", describe_environment() | own)
        if config.goal_file:  # as the judge is shown it: the run goes on with it when the file is gone, or another
            from rlvlm.judges.goal_image import read_goal_image  # numpy is not for those who only ask for help
            from rlvlm.vlms.stills import to_png

            image = read_goal_image(config.goal_file, config.judge.image_px)
            write_whole(path / GOAL_IMAGE, to_png(image[0], is_small=True))
        write_settings(path / "config.yaml", config_text(config))
    except OSError as error:
        folder.remove()
        raise UsageError(f"cannot write the run's folder {path}: {error.strerror}", "choose another --out") from error
    return folder


def find_folder(path: Path | str) -> RunFolder:
    """The run that a path belongs to: its folder, a checkpoint in it, or any file in it.

    Raises:
        UsageError: there is no run around `path`.
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
    """Whether `path` is a run's folder: a config.yaml alone may be a copy that somebody edits."""
    return (path / "config.yaml").is_file() and (path / "command.txt").is_file()


def find_folders(path: Path) -> list[RunFolder]:
    """All runs below a folder, by their paths; else the one that the path belongs to, with errors as `find_folder`."""
    # command.txt marks a run; config.yaml alone may be a copy that somebody edits
    below = sorted(file.parent for file in path.glob("**/command.txt")) if path.is_dir() else []
    return [find_folder(folder) for folder in below or [path]]


def check_newest(folder: RunFolder, path: Path) -> None:
    """Raises UsageError when `path` lies in a checkpoint older than the newest sound one: later work would be lost."""
    named = folder.checkpoint_at(path)
    newest = None if named is None else newest_sound(folder.checkpoints.newest_first())
    if named is not None and newest is not None and named.step < newest.step:
        fix = f"go on from the newest, step {newest.step:,}: {folder.resume_command}"
        raise UsageError(f"{path} is not the newest checkpoint; going on there would discard later work", fix)


def choose_checkpoint(folder: RunFolder, path: Path, log: Callable[[str], None]) -> Checkpoint:
    """The checkpoint that `path` lies in, otherwise the best of the run, or the newest sound one where that is damaged.

    Raises:
        UsageError: there is none yet.
        CorruptCheckpoint: the one that was named is damaged, or all are.
    """
    if (named := folder.checkpoint_at(path)) is not None:
        named.check()
        return named
    best = folder.checkpoints.best()
    if best is None:
        raise UsageError(f"{folder.path} has no checkpoint yet", f"let it continue: {folder.resume_command}")
    # where the best is damaged, the newest sound one is the next best guess
    candidates = [best, *folder.checkpoints.newest_first()]
    return newest_sound(candidates, lambda damage: log(f"damaged checkpoint: {damage}")) or best


def check_settings(before: RunState, config: RunConfig) -> None:
    """Raises UsageError where a setting that says what is learned is not what it was before."""
    changed = differences(before.settings, flat(config))
    # compared with what the checkpoint was made with, not with the file: the file is what was changed
    odd = [name for name in changed if not any(fnmatchcase(name, pattern) for pattern in config.may_change)]
    if odd:
        changes = "; ".join(f"{name} is {changed[name]}" for name in odd)
        raise UsageError(
            f"the settings differ from those of the run at step {before.env_steps:,}: {changes}",
            "undo the change, or start a new run with it",
        )


def check_disk(path: Path, needed: int) -> None:
    """Raises MachineError when the disk under `path` has fewer than `needed` bytes free."""
    existing = next(p for p in (path, *path.parents) if p.exists())
    # a run that fills the disk loses its last checkpoint, hours later
    free = shutil.disk_usage(existing).free
    if free < needed:
        what = f"the disk of {path} has {free / 2**20:.0f} MiB free, a run needs {needed / 2**20:.0f} MiB"
        raise MachineError(what, "free some space, or put the run elsewhere with --out DIR")


def default_path(task: str, started: datetime) -> Path:
    """The first of the names `runs/TASK/<time>`, `runs/TASK/<time>-2`, ... that is not taken."""
    path = Path("runs") / re.sub(r"\W+", "-", task) / started.strftime("%Y%m%d-%H%M%S")
    return next(name for name in _numbered(path) if not name.exists())


def _claim(path: Path, *, is_named: bool) -> Path:
    """Makes the folder of a run that no other process is given, with `command.txt` as its mark.

    Args:
        path: the folder wanted.
        is_named: whether the user named it; else another number is taken where `path` is taken meanwhile.

    Raises:
        FileExistsError: another run has taken it.
        OSError: it cannot be made.
    """
    # several runs may start in one second, as those of a job array do; looking first would give two of them one folder
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
    """`path`, then with -2, -3, ... behind its name."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def check_trust(paths: Sequence[Path], *, trust: bool, goes_on: bool = False) -> None:
    """Lets pass what imports nothing but rlvlm and stays in its folder, what this user made or trusted on this machine,
    and everything where `trust` says so, which is remembered. Nothing is imported here.

    Args:
        paths: folders of runs or sweeps, folders full of them, or files in them.
        trust: whether the user gave --trust.
        goes_on: whether the run is trained on or its judge asked, which imports more than its task, and goes where the
            other settings lead.

    Raises:
        UsageError: a folder is not trusted, or its file cannot be read.
    """
    for file in (file for path in paths for file in _settings_of(path)):
        text = _text_of(file)
        settings = read_yaml(text, str(file))
        code, out = code_named(settings, goes_on=goes_on), ways_out(settings, goes_on=goes_on)
        check_folder(file, text, code, out, trust=trust)


def write_settings(file: Path, text: str) -> None:
    """Writes a file of settings that the user made or has trusted, and remembers that.

    Raises:
        OSError: the disk refused.
    """
    write_whole(file, text)
    remember(text, code_named(read_yaml(text, str(file)), goes_on=True))


def trust_option(file: Path) -> str:
    """` --trust` where going on with the run or sweep of this file of settings asks for it on this machine, else empty.

    Raises:
        UsageError: the file cannot be read.
    """
    text = _text_of(file)
    settings = read_yaml(text, str(file))
    known = is_trusted(text, code_named(settings, goes_on=True), ways_out(settings, goes_on=True))
    return "" if known else " --trust"


def code_named(settings: Any, *, goes_on: bool) -> list[str]:
    """What is named as `module:NAME` and is not rlvlm's own, in the config of a run or a sweep or in the YAML values of
    its file; `goes_on` as of `check_trust`.
    """
    leaves = _leaves(settings)
    tasks = leaves.get("tasks")  # a sweep names several, a run one
    named = [leaves.get("task"), *(tasks if isinstance(tasks, list) else ())]
    if goes_on:
        # in a run by its place, in a sweep as a dotted name among the settings of all, of a task or of a source
        named += [value for name, value in leaves.items() if name.endswith(CODE_SETTINGS)]
    return foreign_code(map(str, named))


def ways_out(settings: Any, *, goes_on: bool) -> dict[str, str]:
    """The settings that lead out of the folder of a run or a sweep, with their values; arguments as of `code_named`."""
    leaves, wanted = _leaves(settings), WAYS_OUT if goes_on else READ_OUTSIDE
    found = {name: str(value) for name, value in leaves.items() if name.endswith(wanted) and value}
    # an env's key goes to its own provider, but for a server of somebody's own
    if not any(name.endswith("api.base_url") for name in found):
        found = {name: value for name, value in found.items() if value not in USUAL_KEYS}
    return found


def _leaves(settings: Any) -> dict[str, Any]:
    """The settings by dotted name; a value that is no tree names nothing, and is refused where it is read."""
    return flat(settings) if is_dataclass(settings) or isinstance(settings, dict) else {}


def _text_of(file: Path) -> str:
    """A file of settings.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}", "restore the file, or start a new run") from error


def _settings_of(path: Path) -> list[Path]:
    """The files of settings of a path and below it, and that of the run that it lies in."""
    here, names = path.expanduser().absolute(), ("config.yaml", "sweep.yaml")
    found = [file for name in names if (file := here / name).is_file()]
    # a checkpoint's path leads to the run around it: the same that `find_folder` finds
    if (run := next(filter(_is_run, (here, *here.parents)), here)) != here:
        found.append(run / "config.yaml")
    if here.is_dir():
        # the first levels also through links to folders, as a sweep's TASK/SOURCE/seed_N are opened
        levels = ("*/" * depth + name for depth in range(1, 5) for name in names)
        below = {file for name in names for file in here.rglob(name)}.union(*map(here.glob, levels))
        found += sorted(file for file in below - {*found} if file.is_file())
    return found


def label_store(folder: RunFolder, config: RunConfig) -> "LabelStore":
    """The store of a run: the shared one that `judge.store` names, or its own.

    Raises:
        UsageError: the folder named holds something else, or a store of a newer schema.
    """
    from rlvlm.labels.records import Origin  # numpy is not for those who only ask for help
    from rlvlm.labels.store import LabelStore

    origin = Origin(run=folder.path.name, task=config.task, seed=config.seed)
    return LabelStore(config.labels(folder.labels), origin)
