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
from rlvlm.core.foreign import MAX_JSON_BYTES, open_regular, read_arrays, read_json
from rlvlm.core.trust import check_folder, foreign_code, remember
from rlvlm.demonstrations.records import CorruptRecord, EpisodeRecord, from_json, to_json
from rlvlm.envs.config import current_settings
from rlvlm.envs.pixels import PIXELS
from rlvlm.labels.images import ImageStore, image_digest

SCHEMA = 1
"""Rises when older code could no longer read what newer code writes."""
_MARK, _WHAT, _PIXELS = "demonstrations.json", "rlvlm demonstrations", "pixels"
# what a torn or foreign line, and an array file with any of its bytes changed, may raise
_DAMAGES = (
    *(ValueError, TypeError, KeyError, RecursionError),
    *(OSError, BadZipFile, zlib.error, EOFError, NotImplementedError),
)
_ID = re.compile(r"[A-Za-z0-9._-]{1,120}")


class DemonstrationFolder:
    """Episodes of one task. They are appended and never changed; what a crash tears off costs that one episode.

    Args:
        path: of a folder made by `create_folder`, or found by `open_folder`.
        about: what `demonstrations.json` says.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.task: str = about["task"]
        """As the folder's file says it, so not to be imported: that is what `trusted_task` is for."""
        self.kind: str = about["kind"]
        self.action_names: tuple[str, ...] = tuple(about["action_names"])
        """Words of the actions of an env in turns; empty for chunks."""
        self.env: Mapping[str, Any] = current_settings(about.get("env", {}))
        """Settings of the env that the episodes were collected in, by name; empty where they are not known."""
        self.chunks: Mapping[str, Any] = about.get("chunks", {})
        """For a task in chunks, the form of these, and how they were made from others' data, by name."""
        self._lines = path / "episodes.jsonl"
        self.image_store = ImageStore(path / "pictures")
        self.num_damaged = 0
        """Lines and files that were not believed when the episodes were last read."""

    def check_task(self, task: str) -> None:
        """Checks that the episodes are of `task`.

        Raises:
            UsageError: they are not.
        """
        if self.task != task:
            what = f"{self.path} holds demonstrations of {self.task}, not of {task}"
            raise UsageError(what, f"rlvlm collect {task}, or run {self.task} with these")

    def trusted_task(self, *, trust: bool) -> str:
        """The task's name, for those who import the task; `task` is for those who only read it.

        Raises:
            UsageError: it names code that the user has not trusted, and did not collect with on this machine.
        """
        mark = self.path / _MARK
        check_folder(mark, "", foreign_code([self.task]), {}, trust=trust)
        return self.task

    def differs(self, env: Mapping[str, Any]) -> list[str]:
        """Which settings of `env` the episodes were not collected with, in words; none that are not known."""
        return [f"env.{text}" for text in _changed(self.env, env)]

    def add(self, record: EpisodeRecord, images: Iterable[NDArray[np.uint8]] = ()) -> None:
        """Appends an episode; the disk has it when this returns.

        Args:
            record: of this folder's task.
            images: [H, W, 3] each; those that its digests name.

        Raises:
            ValueError: the record is of another task, or its id cannot name a file.
            OSError: the disk refused.
        """
        if (record.task, record.kind) != (self.task, self.kind):
            raise ValueError(f"{self.path} holds {self.task}, got an episode of {record.task} ({record.kind})")
        if not _ID.fullmatch(record.id):
            raise ValueError(f"an id is up to 120 letters, digits and . _ -, got {record.id!r}")
        # images and arrays first and the line last: what a crash leaves is a file that nothing names, never a line
        # that names what is not there
        self.image_store.keep((image_digest(image), image) for image in images)
        if record.arrays:
            with replacing(self.path / "arrays" / f"{record.id}.npz") as partial, open(partial, "wb") as stream:
                # of an env that cannot draw its past again, the images go with their snapshots
                packed = PIXELS.pack(record.arrays.values())
                pixels = {_PIXELS: np.frombuffer(packed, np.uint8)} if packed else {}
                np.savez_compressed(stream, allow_pickle=False, **dict(record.arrays), **pixels)
        line = json.dumps(to_json(record), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        line_break = b""
        if self.has_lines:
            with open(self._lines, "rb") as file:
                file.seek(-1, 2)
                if file.read(1) != b"\n":  # a crash left half a line: the next one has to stand by itself
                    line_break = b"\n"
        append_whole(self._lines, line_break + line.encode() + b"\n")

    def episodes(self) -> Iterator[EpisodeRecord]:
        """All episodes, in the order they were added; of two with one id the first. Damaged ones are counted."""
        self.num_damaged = 0
        seen: set[str] = set()
        if not self._lines.exists():
            return
        with open_regular(self._lines) as lines:
            while line := lines.readline(MAX_JSON_BYTES):  # of an endless line the parts are damaged
                try:
                    found = json.loads(line)
                    arrays: dict[str, NDArray[Any]] = {}
                    if found["arrays"]:
                        if not _ID.fullmatch(str(found["id"])):  # a line may not be trusted: it could name any file
                            raise CorruptRecord("its id cannot name a file")
                        held = read_arrays(self.path / "arrays" / f"{found['id']}.npz", is_compressed=True)
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
        """Whether an episode was ever added."""
        return self._lines.exists() and self._lines.stat().st_size > 0


def create_folder(
    path: Path,
    task: str,
    kind: str,
    action_names: tuple[str, ...] = (),
    env: Mapping[str, Any] | None = None,
    chunks: Mapping[str, Any] | None = None,
) -> DemonstrationFolder:
    """A new folder, or the one that is there if it holds episodes of the same task: more can be added to it.

    One that holds none, as a failed import leaves it, is taken for a new one.

    Args:
        path: of the folder.
        task: whose episodes it is for.
        kind: `turns` or `chunks`, as the task's.
        action_names: words of the actions of an env in turns.
        env: settings of the env, by name. An episode records its player and its start, but not these, so a folder has
            one set of them. None, as of chats that others made, goes with any.
        chunks: of a task in chunks: what these look like and how they were made, by name; a folder has one set.

    Raises:
        UsageError: the folder holds something else, or episodes of an env set up otherwise.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        if not (path / _MARK).is_file():
            raise UsageError(
                f"{path} is not a folder of demonstrations, and not empty", "name a new or an empty folder with --out"
            )
        folder = open_folder(path)
        if folder.has_lines:  # else a failed import left it: what it was for no longer matters
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
    remember("", foreign_code([task]))  # the caller's own words, and no file's
    return DemonstrationFolder(path, about)


def _changed(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """What of `ours` is set otherwise in `theirs`, in words."""
    changes = []
    for key, own in json.loads(json.dumps(ours)).items():  # through JSON, as theirs went: tuples become lists
        # what an older folder does not name had no effect, and `auto` is what each run decides for itself
        if theirs.get(key, own) not in (own, "auto"):
            changes.append(f"{key} {theirs[key]}, not {own}")
    return changes


def open_folder(path: Path) -> DemonstrationFolder:
    """The folder of demonstrations at `path`.

    Raises:
        UsageError: it is none, or of a schema that this rlvlm does not know.
    """
    try:
        about = read_json(path / _MARK)
        is_ours = about["what"] == _WHAT and type(about["schema"]) is int
        # it may be somebody else's, and these go into messages, names and settings
        texts, parts = [about["task"], about["kind"], *about["action_names"]], [about.get("env", {})]
        is_ours &= all(isinstance(text, str) for text in texts)
        is_ours &= all(isinstance(part, dict) for part in [*parts, about.get("chunks", {})])
    except (OSError, ValueError, TypeError, KeyError):
        is_ours, about = False, {}
    if not is_ours:
        raise UsageError(f"{path} is not a folder of demonstrations", "make one with: rlvlm collect TASK --out DIR")
    if about["schema"] > SCHEMA:
        raise UsageError(
            f"{path} has schema {about['schema']}; this rlvlm reads schemas up to {SCHEMA}", "use a newer rlvlm"
        )
    return DemonstrationFolder(path, about)
