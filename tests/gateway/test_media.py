import os

import numpy as np
import pytest
from http_edge import movie, patched

from rlvlm.core.errors import MachineError
from rlvlm.gateway.media.files import MediaRoot
from rlvlm.gateway.media.mp4 import Movie, read_movie
from rlvlm.gateway.media.video import read_video
from rlvlm.serving.refusal import Refusal

FOUR = movie([0, 60, 120, 180])


@pytest.fixture
def root(tmp_path):
    (tmp_path / "media" / "a").mkdir(parents=True)
    (tmp_path / "media" / "a" / "b.mp4").write_bytes(FOUR)
    return tmp_path / "media"


def test_evenly_spread_frames_with_first_and_last():
    # by hand: of frames 0..3, three evenly spread are 0, 1.5 -> 2, 3
    assert read_movie(FOUR) == Movie(4, 64, 48)
    frames = read_video(FOUR, 3, None)
    assert frames.shape == (3, 48, 64, 3)
    assert np.abs(frames.mean((1, 2, 3)) - [0, 120, 180]).max() < 4


@pytest.mark.parametrize("codec", ["libx264", "mpeg4", "libvpx-vp9"])
def test_codecs_that_clients_write(codec):
    assert read_video(movie([0, 100, 200], codec=codec), 16, None).shape == (3, 48, 64, 3)


def test_frames_are_made_smaller_on_demand():
    assert read_video(FOUR, 1, 800).shape == (1, 24, 32, 3)


def put(value: bytes, offset: int):
    def change(data: bytearray, at: int) -> None:
        data[at + offset : at + offset + len(value)] = value

    return change


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no MP4"),
        (b"RIFF" + b"\0" * 100, "no MP4|fit"),
        (FOUR[: len(FOUR) // 2], "fit|middle|no plain"),
        (movie([0] * 65), "at most 64 frames, it says 65"),
        (patched(FOUR, b"stsz", put(b"\xff\xff\xff\xff", 8)), "at most 64 frames, it says 4294967295"),
        (patched(FOUR, b"stts", put(b"\x3b\x9a\xca\x00", 8)), "covers too many"),
        (patched(FOUR, b"stts", put(b"\x3b\x9a\xca\x00", 4)), "cut off"),
        (patched(FOUR, b"avc1", put(b"\xff\xff\xff\xff", 24)), "at most"),
        (patched(FOUR, b"udta", put(b"cmov", -4)), "fragmented, compressed"),
        (patched(FOUR, b"udta", put(b"mvex", -4)), "fragmented, compressed"),
        (patched(FOUR, b"vide", put(b"soun", -4)), "0 video tracks"),
        (patched(FOUR, b"stbl", put(b"free", -4)), "one box"),
        (patched(FOUR, b"mdat", lambda data, at: data.__setitem__(slice(at, at + 400), b"\xff" * 400)), "damaged"),
    ],
)
def test_what_is_no_plain_short_video_is_refused(data, reason):
    with pytest.raises(Refusal, match=reason):
        read_video(data, 16, None)


def test_a_name_below_the_root_is_read_and_nothing_else(root):
    media = MediaRoot(str(root))
    assert media.read("a/b.mp4") == media.read(f"{root}/a/b.mp4") == FOUR
    for name in ("a", "a/", "b.mp4", "a/c.mp4", "a/./b.mp4", "a//b.mp4", "../media/a/b.mp4", f"{root.parent}/a/b.mp4"):
        with pytest.raises(Refusal, match="names no video"):
            media.read(name)


def test_links_and_odd_files_are_refused_like_what_is_not_there(root, tmp_path):
    media = MediaRoot(str(root))
    (tmp_path / "secret.mp4").write_bytes(FOUR)
    (root / "soft.mp4").symlink_to(tmp_path / "secret.mp4")
    os.link(tmp_path / "secret.mp4", root / "hard.mp4")
    (root / "out").symlink_to(tmp_path)
    os.mkfifo(root / "pipe.mp4")
    (root / "text.mp4").write_text("ftyp, it says")
    (root / "b.avi").write_bytes(FOUR)
    refusals = []
    for name in ("soft.mp4", "hard.mp4", "out/secret.mp4", "pipe.mp4", "text.mp4", "b.avi", "gone.mp4", "x\0.mp4"):
        with pytest.raises(Refusal) as caught:
            media.read(name)
        refusals.append((caught.value.status, caught.value.code, str(caught.value), caught.value.fix))
    assert len(set(refusals)) == 1


def test_without_a_root_every_name_is_refused_and_a_missing_root_is_said_at_once(tmp_path):
    with pytest.raises(Refusal, match="names no video"):
        MediaRoot("").read("a.mp4")
    with pytest.raises(MachineError, match="cannot be opened"):
        MediaRoot(str(tmp_path / "gone"))
