"""Folders of data that somebody else made: whatever their files name, no reader opens anything outside of them.

Each reader is given links, `..`, absolute paths and a hard case of its format. Outside lies a token, which must show up
neither in what is read nor in what is refused.
"""

import ast
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from peak_memory import peak_of
from PIL import Image

from rlvlm.core.errors import RunError
from rlvlm.core.foreign import OutsideFolder, files_ending, open_inside, read_json, read_text
from rlvlm.core.guests import guests
from rlvlm.demonstrations.folder import create_folder, open_folder
from rlvlm.demonstrations.recordings import Recordings, find_form
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.demonstrations.trajectory import CorruptEpisode
from rlvlm.judge_bench.prediction import read_curve
from rlvlm.labels.images import MissingImage, image_digest
from rlvlm.labels.store import open_store
from rlvlm.preferences.teachers import read_shares
from rlvlm.serving.app_file import read_app_file
from rlvlm.sweeps.config import read_sweep
from rlvlm.vlms.engines.secret import read_secret
from rlvlm.vlms.stills import to_png
from tests.recorded_data import GREEN, NAMES, PX, example, tfrecord, trajectory, write_film, write_lerobot, write_libero
from tests.test_malicious_files import make_store

RLVLM = Path(__file__).parents[1] / "rlvlm"
SECRET = "hf_nobody_may_read_this"
PIXELS = np.full((PX, PX, 3), 77, np.uint8)

OPENERS = {
    *("open", "os.open", "av.open", "h5py.File", "Image.open", "np.load", "zipfile.ZipFile", "safe_open", "load_file"),
    *("pq.read_table", "pq.read_metadata", "pq.read_schema", "pq.ParquetFile", "Path.open"),
}
METHODS = {"read_text", "read_bytes", "open"}
BY_ROOT = {"read_bytes": 3, "read_json": 3, "read_text": 3, "read_table": 4, "read_arrays": 2, "json_objects": 2}
"""Readers of `core.foreign` and `tables`, and the number of arguments with the folder."""
MODULES = ("demonstrations/*.py", "labels/*.py", "plugins/*/*.py", "vlms/videos.py", "vlms/stills.py")
MODEL = "of a model's folder, whose files are often links: shown to nobody, and names in it lead nowhere else"
JOB = "of the job's own folder, which its nodes write"
KNOWN = {
    "plugins/agreement/outputs.py: _from_csv: read_text": "the table that the user named",
    "plugins/exchange/chats.py: export_chats: open": "writes",
    "plugins/exchange/chats.py: _chats: read_text": "the file of chats that the user named",
    "plugins/exchange/evaluations.py: _inspect_trials: read_json": "the log that the user named",
    "plugins/exchange/evaluations.py: is_evaluation: read_json": "the log that the user named",
    "demonstrations/folder.py: add: open": "writes, and looks at the end of the lines to which it appends",
    "plugins/exchange/libero_hdf5.py: _opened: h5py.File": "a stream of open_inside",
    "demonstrations/recorded_labels.py: read_labels: pq.read_schema": "a stream of open_regular",
    "demonstrations/recorded_labels.py: read_labels: read_table": "the labels that the user named",
    "demonstrations/tables.py: _table: pq.read_metadata": "a stream",
    "demonstrations/tables.py: _table: pq.read_table": "a stream",
    "labels/images.py: load: Image.open": "bytes",
    "labels/index.py: write: open": "writes",
    "plugins/people/queue.py: attend: open": "writes",
    "plugins/judge_table/entries.py: read_entry: read_json": "an entry that the user named",
    "plugins/lerobot/checkpoint.py: _read_scales: read_bytes": MODEL,
    "plugins/lerobot/checkpoint.py: _read_scales: read_json": MODEL,
    "plugins/lerobot/checkpoint.py: read_checkpoint: read_json": MODEL,
    "plugins/lerobot/loading.py: _prompts: read_bytes": MODEL,
    "plugins/lerobot/loading.py: _renamed: safe_open": MODEL,
    "plugins/lerobot/loading.py: _smolvla_config: read_json": MODEL,
    "plugins/lerobot/loading.py: _unread: safe_open": MODEL,
    "plugins/openvla/images.py: _through_jpeg: Image.open": "bytes",
    "plugins/openvla/loading.py: _settings: read_json": MODEL,
    "plugins/openvla/loading.py: _statistics: read_json": MODEL,
    "plugins/reward_heads/backbone.py: load_head_model: read_json": MODEL,
    "plugins/reward_heads/robometer.py: settings: safe_open": MODEL,
    "plugins/slurm/command.py: job_script: shipped('cluster/slurm.sh').read_text": "a file of the package",
    "plugins/slurm/job_node.py: _member: address.read_text": JOB,
    "plugins/slurm/job_node.py: _member: log.open": JOB,
    "plugins/slurm/job_node.py: _member: log.read_text": JOB,
    "plugins/slurm/job_node.py: check: log.read_text": JOB,
    "vlms/stills.py: read_rgb: Image.open": "a stream",
    "vlms/videos.py: open_video: av.open": "a stream",
}
"""Calls in the modules that read others' folders which open a file, or take one that is open, by themselves."""


def opening_calls() -> Iterator[str]:
    """Calls that open a file other than by `open_inside`: module, function, what is called."""
    for file in sorted(file for pattern in MODULES for file in RLVLM.glob(pattern)):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if not isinstance(call, ast.Call):
                    continue
                name = ast.unparse(call.func)
                is_method = isinstance(call.func, ast.Attribute) and call.func.attr in METHODS
                is_rooted = len(call.args) >= BY_ROOT.get(name, 0) or any(word.arg == "root" for word in call.keywords)
                if name in OPENERS or (is_method and name not in ("archive.open", "queue.open")) or not is_rooted:
                    yield f"{file.relative_to(RLVLM)}: {function.name}: {name}"


def test_a_new_reader_of_others_folders_opens_through_open_inside():
    there = {call for call in KNOWN if (RLVLM / call.partition(":")[0]).exists()}  # a guest may have been taken out
    assert set(opening_calls()) == there


# --- the function itself


def test_a_name_leads_to_a_file_of_the_folder_alone(tmp_path):
    root, token = tmp_path / "data", tmp_path / "token"
    (root / "deep").mkdir(parents=True)
    (root / "deep/good").write_text("good")
    token.write_text(SECRET)
    (root / "link").symlink_to(token)
    (root / "within").symlink_to(root / "deep/good")
    (root / "folder").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    (tmp_path / "named").symlink_to(root)
    assert read_text(root / "deep/good", root=root) == read_text(tmp_path / "named/deep/good", root=tmp_path / "named")
    for name in ("link", "within", "folder/token", "deep/../../token", str(token), "../token", ".", f"{token}/x"):
        with pytest.raises(OutsideFolder, match="cp -rL|lies outside"):
            open_inside(root, root / name)
    for name in ("pipe", "missing", "deep", "deep/good/x"):
        with pytest.raises(OSError) as refusal:
            open_inside(root, root / name)
        assert not isinstance(refusal.value, OutsideFolder) and name.split("/")[0] in str(refusal.value)
    os.chdir(root)
    assert read_text(Path("deep/good"), root=Path()) == "good"


def test_a_snapshot_of_a_hugging_face_cache_is_read_and_no_other_link_to_blobs(tmp_path):
    blobs, snapshot = tmp_path / "datasets--a--b/blobs", tmp_path / "datasets--a--b/snapshots" / ("c" * 40)
    (snapshot / "meta").mkdir(parents=True)
    blobs.mkdir()
    (blobs / ("a" * 40)).write_text('{"a": 1}')
    (snapshot / "meta/info.json").symlink_to(f"../../../blobs/{'a' * 40}")
    (snapshot / "top.json").symlink_to(f"../../blobs/{'a' * 40}")
    assert read_json(snapshot / "meta/info.json", root=snapshot) == read_json(snapshot / "top.json", root=snapshot)
    (tmp_path / "token").write_text(SECRET)
    (blobs / ("b" * 64)).symlink_to(tmp_path / "token")
    (tmp_path / "datasets--a--b/token").write_text(SECRET)
    (snapshot / "twice").symlink_to(f"../../blobs/{'b' * 64}")
    (snapshot / "beside").symlink_to("../../token")
    (snapshot / "far").symlink_to(f"../../../blobs/{'a' * 40}")
    other = tmp_path / "evil/data"
    other.mkdir(parents=True)
    (tmp_path / "evil/blobs").mkdir()
    (tmp_path / "evil/blobs" / ("a" * 40)).write_text(SECRET)
    (other / "clip.txt").symlink_to(f"../blobs/{'a' * 40}")
    for root, name in ((snapshot, "twice"), (snapshot, "beside"), (snapshot, "far"), (other, "clip.txt")):
        with pytest.raises(OutsideFolder, match="cp -rL"):
            open_inside(root, root / name)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, encoding):
    (tmp_path / "clip.txt").write_bytes("öffne die Lade".encode(encoding))
    assert read_text(tmp_path / "clip.txt") == "öffne die Lade"
    (tmp_path / "A.JSON").write_bytes('{"a": 1}'.encode(encoding))
    assert read_json(tmp_path / "A.JSON") == {"a": 1}
    assert files_ending(tmp_path, ".json") == [tmp_path / "A.JSON"] and not files_ending(tmp_path / "none", ".json")


def test_files_of_settings_and_tables_may_begin_with_a_byte_order_mark(tmp_path):
    """As Notepad, Excel and PowerShell write them."""

    def written(name: str, text: str, encoding: str = "utf-8-sig") -> Path:
        (tmp_path / name).write_bytes(text.encode(encoding))
        (tmp_path / name).chmod(0o600)
        return tmp_path / name

    rows = "".join(f"{number},1,0,0,0,0\n" for number in range(1, 11))
    table = written("r.csv", f"bin,correct,incorrect,no_preference,invalid,failed\n{rows}")
    assert read_shares(table, "x").shape == (10, 3)
    assert len(read_curve(written("c.csv", "task,kind,worth,before,success\nt,pairs,.9,.1,.5\n"))) == 1
    sweep = "title: t\ntasks: [number_line]\nseeds: [0]\nsources:\n  a:\n    title: a\n    settings: {}\n"
    assert read_sweep(written("s.yaml", sweep)) == read_sweep(written("w.yaml", sweep, "utf-16"))
    app = (RLVLM.parent / "serve_apps/pocket.yaml").read_text()
    (tmp_path / "plain").mkdir()
    assert read_app_file(written("a.yaml", app)) == read_app_file(written("plain/a.yaml", app, "utf-8"))
    assert read_secret(written("key", "abc\r\n")).reveal() == "abc"


# --- the readers


def read_recordings(root: Path) -> Iterator[Any]:
    for episode in Recordings(path=root, form=find_form(root)):
        yield episode
        if not isinstance(episode, CorruptEpisode):
            yield episode.images(np.arange(len(episode.actions)))


def read_records(root: Path) -> Iterator[Any]:
    from rlvlm.plugins.exchange.cutting import CutConfig
    from rlvlm.plugins.exchange.rlds import read_rlds

    yield from read_rlds(root, CutConfig())


def read_chats(root: Path) -> Iterator[Any]:
    folder = create_folder(root.parent / "imported", "number_line", "turns", ("+", "-"))
    from rlvlm.plugins.exchange.chats import import_chats

    yield import_chats(root / "chats.json", folder, "x", root / "images")
    yield list(folder.episodes())


def read_folder(root: Path) -> Iterator[Any]:
    folder = open_folder(root)
    for record in folder.episodes():
        yield record
        yield folder.image_store.load(str(record.arrays["pictures"][0][0]))
    if folder.num_damaged:
        yield CorruptEpisode(file=root, reason="damaged")


def read_store(root: Path) -> Iterator[Any]:
    store = open_store(root)
    items = list(store.answers())
    yield items
    yield [store.image(item.question.left[0]) for item in items]
    if not items:
        yield CorruptEpisode(file=root, reason="no answer")


def make_lerobot(kind: str) -> Callable[[Path], None]:
    return lambda root: write_lerobot(root, "v2.1", [trajectory(9)], kind)


def make_lerobot_3(root: Path) -> None:
    write_lerobot(root, "v3.0", [trajectory(9)], "video")


def make_videos(root: Path) -> None:
    root.mkdir()
    write_film(root / "clip.mp4", trajectory(9)[2][:, 0])
    (root / "clip.txt").write_text(GREEN)


def make_libero(root: Path) -> None:
    root.mkdir()
    write_libero(root / "x_demo.hdf5", GREEN, [trajectory(9)], is_own=True)


def make_rlds(root: Path) -> None:
    root.mkdir()
    (root / "x.tfrecord").write_bytes(tfrecord(example(*trajectory(9), instruction=GREEN)))


def make_chats(root: Path) -> None:
    (root / "images").mkdir(parents=True)
    Image.fromarray(PIXELS).save(root / "images/a.png")
    write_chat(root, "a.png")


def write_chat(root: Path, image: str) -> None:
    said = [{"from": "human", "value": "<image>\nWhat now?"}, {"from": "gpt", "value": "+"}]
    (root / "chats.json").write_text(json.dumps([{"image": image, "conversations": said}]))


def make_folder(root: Path) -> None:
    folder = create_folder(root, "push_block", "chunks")
    about: Any = {"task": "push_block", "kind": "chunks", "seed": 0, "player": "x", "goal": GREEN, "env_return": 0.0}
    arrays = {"pictures": np.array([[image_digest(PIXELS)]])}
    folder.add(EpisodeRecord(id="e", success=True, terminated=True, arrays=arrays, **about), [PIXELS])


READERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Iterator[Any]]]] = {
    "LeRobot 2.1, images": (make_lerobot("image"), read_recordings),
    "LeRobot 2.1, films": (make_lerobot("video"), read_recordings),
    "LeRobot 3.0, films": (make_lerobot_3, read_recordings),
    "videos": (make_videos, read_recordings),
    "LIBERO's HDF5": (make_libero, read_recordings),
    "RLDS": (make_rlds, read_records),
    "chats": (make_chats, read_chats),
    "our folder": (make_folder, read_folder),
    "label store": (make_store, read_store),
}
if "exchange" not in guests():
    READERS = {name: reader for name, reader in READERS.items() if name not in ("RLDS", "chats", "LIBERO's HDF5")}


def replaced(name: str) -> Callable[[Path, Path], None]:
    """The file, or the folder, is a link to its like outside."""

    def harm(root: Path, outside: Path) -> None:
        (file,) = root.glob(name)
        file.rename(outside / "moved")
        file.symlink_to(outside / "moved")

    return harm


def info(**changes: Any) -> Callable[[Path, Path], None]:
    """LeRobot's `info.json` has other entries; OUT stands for the folder outside."""

    def harm(root: Path, outside: Path) -> None:
        (root / "data").rename(outside / "data")
        file = root / "meta/info.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes).replace("OUT", str(outside)))
        episodes = root / "meta/episodes.jsonl"
        episodes.write_text(json.dumps(json.loads(episodes.read_text()) | {"secret": f"{outside}/data"}))

    return harm


def written(name: str, text: str) -> Callable[[Path, Path], None]:
    def harm(root: Path, outside: Path) -> None:
        (outside / "token").write_text(SECRET)
        (root / "clip.txt").unlink(missing_ok=True)
        (outside / "other.mp4").write_bytes((root / "clip.mp4").read_bytes())
        (root / name).write_text(text.replace("OUT", str(outside)))

    return harm


def sentence_is_a_link(name: str) -> Callable[[Path, Path], None]:
    def harm(root: Path, outside: Path) -> None:
        text = SECRET if name == "clip.txt" else f"file_name,goal\nclip.mp4,{SECRET}\n"
        text = json.dumps({"file_name": "clip.mp4", "goal": SECRET}) if name.endswith("l") else text
        (outside / "token").write_text(text)
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(outside / "token")

    return harm


def hdf5(change: Callable[[Any, Path], None]) -> Callable[[Path, Path], None]:
    def harm(root: Path, outside: Path) -> None:
        write_libero(outside / "private.hdf5", SECRET, [trajectory(9)], is_own=True)
        with h5py.File(root / "x_demo.hdf5", "r+") as file:
            change(file, outside / "private.hdf5")

    return harm


def external(file: Any, private: Path) -> None:
    del file["data/demo_0"]
    file["data/demo_0"] = h5py.ExternalLink(str(private), "data/demo_0")


def soft_through_external(file: Any, private: Path) -> None:
    del file["data"]
    file["way"] = h5py.ExternalLink(str(private), "/")
    file["data"] = h5py.SoftLink("/way/data")


def brackets(file: Any, _: Path) -> None:
    file["data"].attrs["problem_info"] = "[" * 30_000


def chat(image: str) -> Callable[[Path, Path], None]:
    def harm(root: Path, outside: Path) -> None:
        (outside / "private.png").write_bytes(to_png(PIXELS))
        (root / "images/link.png").symlink_to(outside / "private.png")
        write_chat(root, image.replace("OUT", str(outside)))

    return harm


def line(**changes: Any) -> Callable[[Path, Path], None]:
    def harm(root: Path, outside: Path) -> None:
        (root / "arrays/e.npz").rename(outside / "e.npz")
        file = root / "episodes.jsonl"
        text = json.dumps(json.loads(file.read_text()) | changes)
        file.write_text(text.replace("OUT", str(outside)))

    return harm


ATTACKS: list[tuple[str, str, Callable[[Path, Path], None]]] = [
    ("LeRobot 2.1, images", "link: info", replaced("meta/info.json")),
    ("LeRobot 2.1, images", "link: episodes", replaced("meta/episodes.jsonl")),
    ("LeRobot 2.1, images", "link: data", replaced("data/chunk-000/episode_000000.parquet")),
    ("LeRobot 2.1, images", "link: folder of data", replaced("data/chunk-000")),
    ("LeRobot 2.1, films", "link: film", replaced(f"videos/chunk-000/{NAMES[1]}/episode_000000.mp4")),
    ("LeRobot 3.0, films", "link: episodes", replaced("meta/episodes/chunk-000/file-000.parquet")),
    ("LeRobot 3.0, films", "link: film", replaced(f"videos/{NAMES[1]}/chunk-000/file-000.mp4")),
    ("LeRobot 2.1, images", "..", info(data_path="../outside/data/chunk-000/episode_000000.parquet")),
    ("LeRobot 2.1, images", "absolute", info(data_path="OUT/data/chunk-000/episode_000000.parquet")),
    ("LeRobot 2.1, images", "hard: a value", info(data_path="{secret}/chunk-000/episode_000000.parquet")),
    ("LeRobot 2.1, images", "hard: a width", info(data_path="{episode_index:>3000000000}")),
    ("LeRobot 2.1, images", "hard: an attribute", info(data_path="{episode_index.__class__}")),
    ("LeRobot 2.1, images", "hard: no chunks", info(chunks_size=0)),
    ("videos", "link: film", replaced("clip.mp4")),
    ("videos", "link: sentence", sentence_is_a_link("clip.txt")),
    ("videos", "link: metadata.csv", sentence_is_a_link("metadata.csv")),
    ("videos", "link: metadata.jsonl", sentence_is_a_link("metadata.jsonl")),
    ("videos", "..", written("metadata.csv", "file_name,goal\n../outside/other.mp4,x\nclip.mp4,x\n")),
    ("videos", "absolute", written("metadata.csv", "file_name,goal\nOUT/other.mp4,x\nclip.mp4,x\n")),
    ("videos", "hard: a zero byte", written("metadata.jsonl", '{"file_name": "clip.mp4\\u0000", "goal": "x"}')),
    ("LIBERO's HDF5", "link: file", replaced("x_demo.hdf5")),
    ("LIBERO's HDF5", "absolute: external link", hdf5(external)),
    ("LIBERO's HDF5", "hard: soft link through an external one", hdf5(soft_through_external)),
    ("LIBERO's HDF5", "hard: brackets", hdf5(brackets)),
    ("RLDS", "link: file", replaced("x.tfrecord")),
    ("chats", "link: image", chat("link.png")),
    ("chats", "..", chat("../../outside/private.png")),
    ("chats", "absolute", chat("OUT/private.png")),
    ("chats", "hard: file:", chat("file://OUT/private.png")),
    ("our folder", "link: mark", replaced("demonstrations.json")),
    ("our folder", "link: lines", replaced("episodes.jsonl")),
    ("our folder", "link: arrays", replaced("arrays/e.npz")),
    ("our folder", "link: folder of arrays", replaced("arrays")),
    ("our folder", "link: image", replaced("pictures/*/*.png")),
    ("our folder", "link: folder of images", replaced("pictures")),
    ("our folder", "..", line(id="../../outside/e")),
    ("our folder", "absolute", line(id="OUT/e")),
    ("label store", "link: mark", replaced("store.json")),
    ("label store", "link: segment", replaced("lines/*.jsonl")),
    ("label store", "link: folder of segments", replaced("lines")),
    ("label store", "link: image", replaced("pictures")),
]
ATTACKS = [attack for attack in ATTACKS if attack[0] in READERS]


@pytest.mark.parametrize("reader", READERS)
def test_undamaged_files_are_read(tmp_path, reader):
    make, read = READERS[reader]
    make(tmp_path / "data")
    found = list(read(tmp_path / "data"))
    assert found and not any(isinstance(item, CorruptEpisode) for item in found)


@pytest.mark.parametrize(("reader", "name", "harm"), ATTACKS, ids=[f"{reader}, {name}" for reader, name, _ in ATTACKS])
def test_nothing_outside_of_a_folder_is_read(tmp_path, reader, name, harm):
    make, read = READERS[reader]
    make(tmp_path / "data")
    (tmp_path / "outside").mkdir()
    harm(tmp_path / "data", tmp_path / "outside")
    found: list[Any] = []

    def take() -> None:
        try:
            found.extend(read(tmp_path / "data"))
        except (RunError, MissingImage) as refusal:
            found.append(refusal)

    assert peak_of(take) < 96 << 20
    text = repr(found)
    assert SECRET not in text and SECRET.swapcase() not in text
    if "HDF5" in reader and "link" in name:  # h5py follows none of them anyway, but would not say so
        assert "is a link" in text or "through a link" in text
    is_counted = reader == "chats" and "unreadable" in text
    assert is_counted or any(isinstance(item, CorruptEpisode | RunError | MissingImage) for item in found), found
