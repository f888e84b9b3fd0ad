"""A folder of demonstrations: `episodes.jsonl`, arrays and images beside it, and a card that counts them."""

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.disk import append_whole, replacing, write_json
from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import MAX_JSON_BYTES, open_inside, parse_json, read_arrays, read_json
from rlvlm.core.trust import check_folder, foreign_code, remember
from rlvlm.demonstrations.records import CorruptRecord, EpisodeRecord, from_json, to_json
from rlvlm.envs.config import current_settings
from rlvlm.envs.pixels import PIXELS
from rlvlm.labels.images import ImageStore, image_digest

SCHEMA = 1
"""Version of the format; it rises when older code can no longer read what newer code writes."""
_MARK, _WHAT, _PIXELS = "demonstrations.json", "rlvlm demonstrations", "pixels"
# errors that a truncated or foreign line, or an array file with any byte changed, may raise
_DAMAGES = (
    *(ValueError, TypeError, KeyError, RecursionError),
    *(OSError, BadZipFile, zlib.error, EOFError, NotImplementedError),
)
_ID = re.compile(r"[A-Za-z0-9._-]{1,120}")


class DemonstrationFolder:
    """Episodes of one task. They are appended and never changed; a crash loses at most the episode being written.

    Args:
        path: a folder made by `create_folder`, or opened by `open_folder`.
        about: content of `demonstrations.json`.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.task: str = about["task"]
        """Task name in the folder's file; untrusted, so import it only through `trusted_task`."""
        self.kind: str = about["kind"]
        self.action_names: tuple[str, ...] = tuple(about["action_names"])
        """Names of the actions of an env in turns; empty for chunks."""
        self.env: Mapping[str, Any] = current_settings(about.get("env", {}))
        """Env settings with which the episodes were collected, by name; empty if unknown."""
        self.chunks: Mapping[str, Any] = about.get("chunks", {})
        """For a task in chunks: their form and, by name, how they were made from other data."""
        self._lines = path / "episodes.jsonl"
        self.image_store = ImageStore(path / "pictures")
        self.num_damaged = 0
        """Number of damaged lines and files found when the episodes were last read."""

    @property
    def has_chunks(self) -> bool:
        """Whether the env is one in chunks, as opposed to turns."""
        return self.kind == "chunks"

    def check_task(self, task: str) -> None:
        """Checks that the episodes are of `task`.

        Raises:
            UsageError: they are of another task.
        """
        if self.task != task:
            what = f"{self.path} holds demonstrations of {self.task}, not of {task}"
            raise UsageError(what, f"rlvlm collect {task}, or run {self.task} with these")

    def trusted_task(self, *, trust: bool) -> str:
        """Returns the task's name for importing the task; `task` suffices for display.

        Raises:
            UsageError: the name refers to code that the user neither trusted nor collected with on this machine.
        """
        mark = self.path / _MARK
        check_folder(mark, "", foreign_code([self.task]), {}, trust=trust)
        return self.task

    def differs(self, env: Mapping[str, Any]) -> list[str]:
        """Returns the settings of `env` that differ from those of the episodes, in words; unknown ones are left out."""
        return [f"env.{text}" for text in _changed(self.env, env)]

    def add(self, record: EpisodeRecord, images: Iterable[NDArray[np.uint8]] = ()) -> None:
        """Appends an episode and syncs it to disk.

        Args:
            record: an episode of this folder's task.
            images: [H, W, 3] each; the images that its digests name.

        Raises:
            ValueError: the record is of another task, or its id is no valid file name.
            OSError: writing failed.
        """
        if (record.task, record.kind) != (self.task, self.kind):
            raise ValueError(f"{self.path} holds {self.task}, got an episode of {record.task} ({record.kind})")
        if not _ID.fullmatch(record.id):
            raise ValueError(f"an id is up to 120 letters, digits and . _ -, got {record.id!r}")
        # images and arrays first and the line last: a crash may leave a file without a line, but never a line that
        # names a missing file
        self.image_store.keep((image_digest(image), image) for image in images)
        if record.arrays:
            with replacing(self.path / "arrays" / f"{record.id}.npz") as partial, open(partial, "wb") as stream:
                # for an env that cannot draw its past again, images are stored with their snapshots
                packed = PIXELS.pack(record.arrays.values())
                pixels = {_PIXELS: np.frombuffer(packed, np.uint8)} if packed else {}
                np.savez_compressed(stream, allow_pickle=False, **dict(record.arrays), **pixels)
        line = json.dumps(to_json(record), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        line_break = b""
        if self.has_lines:
            with open(self._lines, "rb") as file:
                file.seek(-1, 2)
                if file.read(1) != b"\n":  # a crash left half a line: start a new one
                    line_break = b"\n"
        append_whole(self._lines, line_break + line.encode() + b"\n")

    def episodes(self) -> Iterator[EpisodeRecord]:
        """Yields all episodes in the order added; of two with the same id, the first. Damaged ones are counted."""
        self.num_damaged = 0
        seen: set[str] = set()
        if not self._lines.exists():
            return
        with open_inside(self.path, self._lines) as lines:
            while line := lines.readline(MAX_JSON_BYTES):  # an endless line is split into damaged parts
                try:
                    found = parse_json(line)
                    arrays: dict[str, np.ndarray] = {}
                    if found["arrays"]:
                        if not _ID.fullmatch(str(found["id"])):  # lines are untrusted: the id could name any file
                            raise CorruptRecord("its id cannot name a file")
                        file = self.path / "arrays" / f"{found['id']}.npz"
                        held = read_arrays(file, is_compressed=True, root=self.path)
                        arrays = {name: held[name] for name in found["arrays"]}
                        if _PIXELS in held:
                            PIXELS.unpack(held[_PIXELS].tobytes())
                    record = from_json(found, arrays)
                except _DAMAGES:  # one line is lost, not the folder
                    self.num_damaged += 1
                    continue
                if record.id not in seen:
                    seen.add(record.id)
                    yield record

    @property
    def has_lines(self) -> bool:
        """Whether any episode was added."""
        return self._lines.exists() and self._lines.stat().st_size > 0


def create_folder(
    path: Path,
    task: str,
    kind: str,
    action_names: tuple[str, ...] = (),
    env: Mapping[str, Any] | None = None,
    chunks: Mapping[str, Any] | None = None,
) -> DemonstrationFolder:
    """Creates a folder, or opens the one there if it holds episodes of the same task, to which more can be added.

    A folder without episodes, as a failed import leaves, is treated as new.

    Args:
        path: path of the folder.
        task: name of the episodes' task.
        kind: `turns` or `chunks`, the task's kind.
        action_names: names of the actions of an env in turns.
        env: settings of the env, by name. Episodes record player and start but not these, so a folder has one set of
            them. None, e.g. for imported chats, is compatible with any.
        chunks: for a task in chunks, their form and how they were made, by name; a folder has one set.

    Raises:
        UsageError: the folder holds something else, or episodes of an env with other settings.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        if not (path / _MARK).is_file():
            raise UsageError(
                f"{path} is not a folder of demonstrations, and not empty", "name a new or an empty folder with --out"
            )
        folder = open_folder(path)
        if folder.has_lines:  # a failed import left it, so its former purpose does not matter
            if (folder.task, folder.kind, folder.action_names) != (task, kind, action_names):
                raise UsageError(f"{path} holds demonstrations of {folder.task}, not of {task}", "name another folder")
            if other := folder.differs(env or {}) + _changed(folder.chunks, chunks or {}):
                raise UsageError(
                    f"{path} holds demonstrations collected with {'; '.join(other)}", "name another folder with --out"
                )
            return folder
    about = {"what": _WHAT, "schema": SCHEMA, "task": task, "kind": kind, "action_names": list(action_names)}
    about |= {} if env is None else {"env": dict(env)}
    about |= {} if chunks is None else {"chunks": json.loads(json.dumps(chunks))}
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / _MARK, about)
    remember("", foreign_code([task]))  # the caller's own names, not read from a file
    return DemonstrationFolder(path, about)


def _changed(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Returns the entries of `ours` that differ in `theirs`, in words."""
    changes = []
    for key, own in json.loads(json.dumps(ours)).items():  # through JSON, like theirs: tuples become lists
        # settings missing from an older folder had no effect, and each run decides about `auto` itself
        if theirs.get(key, own) not in (own, "auto"):
            changes.append(f"{key} {theirs[key]}, not {own}")
    return changes


def open_folder(path: Path) -> DemonstrationFolder:
    """Opens the folder of demonstrations at `path`.

    Raises:
        UsageError: it is not such a folder, or has a schema unknown to this rlvlm.
    """
    try:
        about = read_json(path / _MARK, root=path)
        is_ours = about["what"] == _WHAT and type(about["schema"]) is int
        # untrusted, and used in messages, names and settings
        texts, parts = [about["task"], about["kind"], *about["action_names"]], [about.get("env", {})]
        is_ours &= all(isinstance(text, str) for text in texts)
        is_ours &= all(isinstance(part, dict) for part in [*parts, about.get("chunks", {})])
    except (OSError, ValueError, TypeError, KeyError):
        is_ours, about = False, {}
    if not is_ours:
        inside = sorted(mark.parent for depth in ("*", "*/*") for mark in path.glob(f"{depth}/{_MARK}"))
        fix = f"did you mean {inside[0]}?" if inside else "make one with: rlvlm collect TASK --out DIR"
        raise UsageError(f"{path} is not a folder of demonstrations", fix)
    if about["schema"] > SCHEMA:
        raise UsageError(
            f"{path} has schema {about['schema']}; this rlvlm reads schemas up to {SCHEMA}", "use a newer rlvlm"
        )
    return DemonstrationFolder(path, about)
