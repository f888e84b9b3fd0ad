"""The folder of a sweep: its file, the states of its runs, and which settings may change on resuming.

        SWEEP/sweep.yaml              the sweep, as last started
        SWEEP/trials.csv              one line per run: its state, as far as the sweep knows
    SWEEP/TASK/SOURCE/seed_N/     an ordinary run folder
    SWEEP/report.html ...         the comparison
        SWEEP/tune/, sweep.log        Tune's own files, and output of libraries

A run's progress is read from its own folder, so nothing is lost with the sweep's process.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from rlvlm.core.disk import check_links, held
from rlvlm.core.errors import UsageError
from rlvlm.core.trust import check_folder, names_of
from rlvlm.runs.files import folder as run_folders
from rlvlm.runs.files.folder import RunFolder, check_disk, read_config, settings_files, text_of, write_settings
from rlvlm.runs.files.scores import Floats, scores
from rlvlm.runs.files.tables import CsvTable
from rlvlm.runs.settings.tree import changed_leaves, to_yaml
from rlvlm.sweeps.config import SweepConfig, read_sweep
from rlvlm.sweeps.plan import TrialPlan, expand, run_configs

FILE = "sweep.yaml"
COLUMNS = ("task", "source", "seed", "state", "env_steps", "score", "cause")
BYTES_PER_RUN = 128 * 2**20
"""Free disk space required for each concurrent run, in bytes."""


class State(StrEnum):
    """State of a run."""

    WAITING = "waiting"
    RUNNING = "running"
    SAVED = "saved"
    """Stopped half-way with a checkpoint; resumed with the sweep."""
    DONE = "done"
    FLAT = "flat"
    """Ended early by the sweep's `flat`."""
    HALTED = "halted"
    """Ended early by the sweep's `halving`."""
    FAILED = "failed"


ENDED = (State.DONE, State.FLAT)
"""States of runs that ended properly; they are also the exit reason in the run's own summary."""
FINISHED = (*ENDED, State.HALTED)
"""States of runs that are never resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """A line of trials.csv."""

    task: str
    source: str
    seed: int
    state: State
    env_steps: int = 0
    score: float | None = None
    """Score of the newest evaluation."""
    cause: str = ""
    """Cause of a failure."""


class SweepFolder:
    """Paths of a sweep's files, and access to them.

    Args:
        path: absolute path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "sweep.log"
        self._trials = CsvTable(path / "trials.csv", COLUMNS, "env_steps")

    def config(self) -> SweepConfig:
        """Returns the sweep as last started."""
        return read_sweep(self.path / FILE)

    def plans(self) -> dict[str, TrialPlan]:
        """Returns the sweep's runs by key."""
        return {plan.key: plan for plan in expand(self.config())}

    def run_path(self, plan: TrialPlan) -> Path:
        """Returns the path of a run's folder, whether it exists or not."""
        return self.path / plan.key

    def run(self, plan: TrialPlan) -> RunFolder | None:
        """Returns a run's folder; None if it does not exist yet."""
        path = self.run_path(plan)
        is_there = (path / "config.yaml").is_file() and (path / "command.txt").is_file()
        return RunFolder(path, plan.config.track.keep_checkpoints) if is_there else None

    def ledger(self, app: str) -> Path:
        """Returns the file in which the judge of a Serve app counts its spending."""
        return self.path / f"{app}_spending.json"

    def evaluations(self, plan: TrialPlan) -> tuple[list[int], Floats]:
        """Returns env steps and scores of a run's evaluations so far."""
        run = self.run(plan)
        rows = run.evaluations.read() if run else []
        return [int(row["step"]) for row in rows], scores(plan.task, rows)

    def records(self, plans: Sequence[TrialPlan]) -> dict[str, TrialRecord]:
        """Returns the state of each run by key: from its folder, and from trials.csv if it was halted or failed."""
        noted = {(row["task"], row["source"], int(row["seed"])): row for row in self._trials.read()}
        records = {}
        for plan in plans:
            row = noted.get((plan.task, plan.source, plan.seed), {})
            run, (steps, found) = self.run(plan), self.evaluations(plan)
            reason = run.summary().get("exit_reason") if run else None
            # progress is in the run's own folder; only the sweep knows that it was halted, or failed
            state = State.WAITING if run is None else State.SAVED
            if row.get("state") in (State.HALTED, State.FAILED):
                state = State(row["state"])
            # a run that ended well after an earlier failure is finished
            if reason in ENDED:
                state = State(reason)
            records[plan.key] = TrialRecord(
                task=plan.task,
                source=plan.source,
                seed=plan.seed,
                state=state,
                env_steps=steps[-1] if steps else 0,
                score=float(found[-1]) if steps else None,
                cause=row.get("cause", "") if state is State.FAILED else "",
            )
        return records

    def write_records(self, records: Sequence[TrialRecord]) -> None:
        """Rewrites trials.csv."""
        self._trials.write(asdict(record) for record in records)


def find_sweep(path: Path) -> SweepFolder | None:
    """Returns the sweep in the folder `path`; None if it is not a sweep's folder."""
    return SweepFolder(path.absolute()) if (path / FILE).is_file() else None


def check_trust(paths: Sequence[Path], *, trust: bool) -> None:
    """Admits sweeps as well as runs; otherwise as `rlvlm.runs.files.folder.check_trust`."""
    for file in settings_files(paths, FILE):
        text, sweep = text_of(file), read_sweep(file)
        check_folder(file, text, *names_of(sweep), trust=trust)  # its tasks, whose recipes its runs start from
        check_folder(file, text, *names_of(*run_configs(expand(sweep))), trust=trust)
    run_folders.check_trust(paths, trust=trust)


@contextmanager
def held_sweep(path: Path, config: SweepConfig) -> Iterator[tuple[SweepFolder, list[str]]]:
    """Holds the folder of a sweep for this process, and yields it with notes on changes since the last start.

    Tasks, sources and seeds may be added or left out, and the execution of runs may change; the definition of a run may
    not change once it has begun.

    Raises:
        UsageError: the folder is in use, holds something else, or has a run with other settings than `config`.
        MachineError: the disk is full.
    """
    folder = SweepFolder(path.absolute())
    plans = expand(config)
    # not all runs are concurrent, and finished ones keep little
    check_disk(folder.path, BYTES_PER_RUN * min(len(plans), 4))
    is_new = not (folder.path / FILE).exists()
    if is_new and folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise UsageError(f"{path} is not empty and holds no sweep", "choose a new or empty folder with --out")
    folder.path.mkdir(parents=True, exist_ok=True)
    what = f"another process runs the sweep in {folder.path}"
    check_links(folder.path)
    # a separate lock file: sweep.yaml is replaced below
    with held(folder.path / ".lock", what, "wait for it, or stop it"):
        for plan in plans:
            run = folder.run(plan)
            if run is None or not run.has_begun():
                continue
            # before anything is written: a refused sweep leaves its folder unchanged
            begun = replace(read_config(run.path), out=None)  # its folder is no setting
            for name, (old, new) in changed_leaves(begun, replace(plan.config, out=None)).items():
                raise UsageError(
                    f"{plan.key} was started with {name} {old!r}, and would now have {new!r}: runs of one "
                    "sweep must stay comparable",
                    "undo the change, or choose another folder with --out",
                )
        before, now = {} if is_new else folder.plans(), {plan.key: plan for plan in plans}
        changes = {
            "added": [key for key in now if key not in before and not is_new],
            "no longer in the file, left alone": sorted(before.keys() - now),
        }
        notes = [
            f"{what}: {', '.join(keys[:3])}" + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            for what, keys in changes.items()
            if keys
        ]
        write_settings(folder.path / FILE, to_yaml(config), *run_configs(plans))
        yield folder, notes
