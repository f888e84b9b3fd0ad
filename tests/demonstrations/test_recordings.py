"""Recorded data as cameras, Windows and other people's tools write them."""

import io
import json
import shutil
import struct
import threading
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from av.stream import Disposition

from rlvlm.core.errors import UsageError
from rlvlm.demonstrations import films
from rlvlm.demonstrations.recordings import Recordings, find_form, recordings_digest
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory
from rlvlm.vlms.videos import CorruptVideo, open_video
from tests.recorded_data import GREEN, PX, png, trajectory, write_film, write_lerobot


def read(path: Path, **settings: Any) -> list[Any]:
    return list(Recordings(path=path, form=find_form(path), **settings))


# --- MP4


def film(title: str = "", comment: str = "", cover: bool = False, num: int = 6) -> bytes:
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as out:
        out.metadata.update({"title": title, "comment": comment})
        if cover:
            art: Any = out.add_stream("mjpeg", rate=1)
            art.width, art.height, art.pix_fmt = 96, 96, "yuvj420p"
            art.disposition = Disposition.attached_pic
        stream: Any = out.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        if cover:
            image = av.VideoFrame.from_ndarray(np.full((96, 96, 3), 250, np.uint8), format="rgb24")
            out.mux([*art.encode(image), *art.encode()])
        for step in range(num):
            out.mux(
                stream.encode(av.VideoFrame.from_ndarray(np.full((64, 64, 3), 20 * step, np.uint8), format="rgb24"))
            )
        out.mux(stream.encode())
    return data.getvalue()


def box(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), name) + content


@pytest.mark.parametrize("title", ["the trunk is open", "truncated, lost at costco", "stsz"])
def test_a_title_may_hold_the_name_of_a_table(title):
    with open_video(io.BytesIO(film(title, comment=title)), 64 * 64) as (container, stream):
        assert container.metadata["title"] == title and sum(1 for _ in container.decode(stream)) == 6


def test_a_table_beside_the_titles_is_still_counted():
    """A hundred million frames are claimed in a box that FFmpeg walks, and in one that only looks like a text."""
    claim = box(b"stsz", struct.pack(">III", 0, 1, 100_000_000))
    for place in (box(b"udta", claim), box(b"udta", box(b"trak", claim)), box(b"free", box(b"\xa9nam", claim))):
        data = bytearray(film())
        start = data.index(b"moov") - 4
        (size,) = struct.unpack_from(">I", data, start)
        struct.pack_into(">I", data, start, size + len(place))
        data[start + size : start + size] = place
        with pytest.raises(CorruptVideo, match="cannot hold the frames"), open_video(io.BytesIO(data), 64 * 64):
            pass


def test_a_cover_picture_is_no_film(tmp_path):
    (tmp_path / "clip.mp4").write_bytes(film(cover=True))
    (episode,) = read(tmp_path, goal=GREEN)
    assert isinstance(episode, RobotTrajectory) and len(episode.actions) == 6
    greys = episode.look(np.arange(6))[:, 0, 32, 32, 0].astype(int)
    assert np.abs(greys - 20 * np.arange(6)).max() <= 3


def test_a_film_whose_decoder_hangs_is_waited_for_once(tmp_path, monkeypatch):
    (tmp_path / "clip.mp4").write_bytes(film())
    (episode,) = read(tmp_path, goal=GREEN)
    hung = threading.Event()
    monkeypatch.setattr(films, "upright", lambda frame: hung.wait())
    monkeypatch.setattr(films, "MAX_READ_S", 1.0)
    with pytest.raises(UsageError, match="not decoded within 1 s"):
        episode.images(np.arange(6))
    hung.set()
    monkeypatch.undo()
    with pytest.raises(UsageError, match="not decoded within 300 s"):
        episode.images(np.arange(1))


def test_endings_in_capitals_and_numbers_of_pandas_are_read(tmp_path):
    videos = tmp_path / "videos"
    videos.mkdir()
    write_film(videos / "a.mp4", trajectory(5)[2][:, 0])
    shutil.copy(videos / "a.mp4", videos / "GOPR0001.MP4")
    (videos / "GOPR0001.TXT").write_bytes("open it\r\n".encode("utf-16"))
    named = {episode.name: episode.instruction for episode in read(videos)}
    assert named == {"GOPR0001.MP4": "open it", "a.mp4": ""}
    (videos / "T.CSV").write_bytes(b"\xef\xbb\xbffile_name,goal,success\na.mp4,x,1.0\na.mp4,y,0.0\nGOPR0001.MP4,z,\n")
    rows = [(episode.instruction, episode.success) for episode in read(videos / "T.CSV")]
    assert rows == [("x", True), ("y", False), ("z", None)]


# --- LeRobot


def write_images(root: Path, cameras: dict[str, dict[str, Any]], pixels: dict[str, np.ndarray], numbers: bool) -> Path:
    """A LeRobot data set of one episode of four steps, with images in Parquet."""
    (root / "meta").mkdir(parents=True)
    (root / "data/chunk-000").mkdir(parents=True)
    features: dict[str, Any] = {
        name: {"dtype": "image", "shape": [PX, PX, 3], **more} for name, more in cameras.items()
    }
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns: dict[str, Any] = {
        name: pa.array([{"bytes": png(pixels[name]), "path": None}] * 4, type=kind) for name in cameras
    }
    for name in ("action", "observation.state") if numbers else ():
        features[name], columns[name] = {"dtype": "float32", "shape": [7]}, np.zeros((4, 7), np.float32).tolist()
    about = {"codebase_version": "v2.1", "fps": 10, "chunks_size": 1000, "video_path": None, "features": features}
    about["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    (root / "meta/info.json").write_text(json.dumps(about))
    (root / "meta/episodes.jsonl").write_text(json.dumps({"episode_index": 0, "tasks": [GREEN], "length": 4}))
    table = {**columns, "episode_index": [0] * 4, "timestamp": [0.0, 0.1, 0.2, 0.3]}
    pq.write_table(pa.table(table), root / "data/chunk-000/episode_000000.parquet")
    return root


RED = np.full((PX, PX, 3), (200, 30, 0), np.uint8)
FAR = np.full((PX, PX), 650, np.uint16)
DEPTHS = (
    {"info": {"is_depth_map": True}},
    {"info": {"video.is_depth_map": True}},
    {"is_depth_map": True},
    {"shape": [PX, PX, 1]},
    {"info": {"video.channels": 1}},
)


@pytest.mark.parametrize("about", DEPTHS, ids=str)
def test_a_camera_of_depth_is_not_judged_by_default(tmp_path, about):
    pixels = {"a_depth": FAR, "front": RED}
    (episode,) = read(write_images(tmp_path / "both", {"a_depth": about, "front": {}}, pixels, numbers=True))
    assert (episode.images(np.arange(4)) == RED).all()
    alone = write_images(tmp_path / "alone", {"a_depth": about}, pixels, numbers=True)
    with pytest.raises(UsageError, match="no camera in colour|neither images nor videos"):
        read(alone)


def test_undeclared_depth_is_refused_and_not_shown_as_black(tmp_path):
    (episode,) = read(write_images(tmp_path / "data", {"a": {}, "b": {}}, {"a": FAR, "b": RED}, numbers=True))
    with pytest.raises(UsageError, match="grey of 16 bits.* name a camera in colour"):
        episode.images(np.arange(4))


def test_images_without_states_and_actions_are_judged(tmp_path):
    digests = set()
    for name, image in (("red", RED), ("dark", RED // 2)):
        root = write_images(tmp_path / name, {"front": {}}, {"front": image}, numbers=False)
        (episode,) = read(root)
        assert (
            len(episode.actions) == 4 and episode.instruction == GREEN and (episode.images(np.arange(4)) == image).all()
        )
        digests.add(recordings_digest([episode]))
    assert len(digests) == 2, "labels of one are not taken for the other's"


@pytest.mark.parametrize("fps", [0, -1, float("inf")])
def test_a_rate_that_is_no_number_is_refused(tmp_path, fps):
    write_lerobot(tmp_path / "set", "v2.1", [trajectory(5)], "video")
    info = tmp_path / "set/meta/info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"fps": fps}))
    (episode,) = read(tmp_path / "set")
    assert isinstance(episode, CorruptEpisode) and "fps in meta/info.json is above 0" in episode.reason
