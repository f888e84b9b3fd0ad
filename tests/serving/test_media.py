import base64
import io
from collections import Counter

import numpy as np
import pytest
from http_edge import movie, patched, png, png_chunk, png_saying, text, turned
from PIL import Image

from rlvlm.core.errors import MachineError
from rlvlm.serving.media import MAX_PIXELS, MediaRoot, read_images, read_video
from rlvlm.serving.refusal import Refusal

FOUR = movie([0, 60, 120, 180])
KINDS = [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("WEBP", {"lossless": True})]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("size", [(2, 3), (97, 41), (640, 480)])
def test_images_of_every_kind_come_through(kind, options, size):
    data = png(77, size, kind, **options)
    [frames] = read_images([[text(data)] * 2])
    assert frames.shape == (2, size[1], size[0], 3) and np.abs(frames.astype(int) - 77).max() <= 2


def test_images_come_through_as_clients_send_them():
    stream = io.BytesIO()
    first, second = (Image.new("RGB", (32, 24), (shade,) * 3) for shade in (77, 200))
    first.save(stream, "MPO", save_all=True, append_images=[second])
    plain = base64.b64encode(png(77, (32, 24))).decode()
    sent = [f"data:image/jpg;base64,{text(png(77, (32, 24), 'JPEG'))}", f"data:image/png;charset=utf-8;base64,{plain}"]
    sent += [base64.encodebytes(png(77, (32, 24))).decode(), f"data:image/png;base64,{plain[:76]}\r\n{plain[76:]}"]
    [frames] = read_images([[*sent, text(stream.getvalue())]])
    assert frames.shape == (5, 24, 32, 3) and np.abs(frames.astype(int) - 77).max() <= 2
    for wrong, reason in (
        ("data:image/png,abc", "data URI"),
        ("data:image/gif;base64,R0lGODlh", "no PNG, JPEG or WebP"),
    ):
        with pytest.raises(Refusal, match=reason):
            read_images([[wrong]])


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "I;16", "1"])
def test_every_mode_of_png_becomes_rgb(mode):
    stream = io.BytesIO()
    Image.new("L", (20, 20), 255).convert(mode if mode != "I;16" else "L").save(stream, "PNG")
    [frames] = read_images([[text(stream.getvalue())]])
    assert frames.shape == (1, 20, 20, 3) and (frames == 255).all()


def test_groups_keep_their_places_and_an_empty_one_is_empty():
    left, nothing, right = read_images([[text(png(10)), text(png(20))], [], [text(png(30))]])
    assert (left[0] == 10).all() and (left[1] == 20).all() and (right == 30).all() and len(nothing) == 0


def test_large_images_are_made_smaller_on_demand():
    [frames] = read_images([[text(png(5, (400, 100)))]], max_pixels=1_000)
    assert frames.shape == (1, 15, 63, 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GIF89a" + b"\0" * 50, "no PNG, JPEG or WebP"),
        (b"", "no base64"),
        (png()[:20], "no PNG, JPEG or WebP|damaged"),
        (png_saying(100_000, 100_000), "at most"),
        (png_saying(10, 0), "no PNG|at least"),
        (png_saying(1_000, 3), "none over"),
        (png_saying(8, 8, png_chunk(b"IDAT", b"rubbish")), "damaged"),
        (png_saying(8, 8, *[png_chunk(b"tEXt", b"a\0b")] * 10_000), "too many parts"),
        (png(1, (9, 9), "JPEG")[:-40], "damaged"),
    ],
)
def test_an_unfit_image_is_refused_with_its_place(data, reason):
    with pytest.raises(Refusal, match=f"image 2 of 2: .*({reason})"):
        read_images([[text(png())], [text(data)]])


def test_all_pixels_of_a_request_are_counted_together():
    side = int(MAX_PIXELS**0.5)
    largest = text(png(0, (side, side)))
    assert read_images([[largest]])[0].shape == (1, side, side, 3)
    with pytest.raises(Refusal, match="all images together"):
        read_images([[largest]] * 5)


def encoded(image, kind="PNG", **options) -> str:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return text(stream.getvalue())


def test_sixteen_bits_are_scaled_and_not_cut():
    # by hand: 257 steps of 16 bits are one of 8; 25,700 is 100
    values = np.array([[0, 257], [25_700, 65_535]], np.uint16)
    [frames] = read_images([[encoded(Image.fromarray(values))]])
    assert frames[0, :, :, 0].tolist() == [[0, 1], [100, 255]] and (frames == frames[..., :1]).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_stands_as_its_camera_was_held(kind, orientation):
    upright = Image.fromarray(np.kron(np.arange(6).reshape(2, 3) * 40, np.ones((16, 16))).astype(np.uint8)).convert(
        "RGB"
    )
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the turn that a camera so held makes of it
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    [frames] = read_images([[encoded(stored, kind, exif=exif)]])
    assert frames.shape == (1, 32, 48, 3)
    assert np.abs(frames[0].astype(int) - np.asarray(upright)).mean() < 3


def test_broken_exif_leaves_a_sound_image_as_it_is():
    [frames] = read_images([[encoded(Image.new("RGB", (4, 6), (7, 7, 7)), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")]])
    assert frames.shape == (1, 6, 4, 3) and (frames == 7).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(mode):
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[0, :, 3] = 255  # a black row on nothing
    image = Image.fromarray(pixels).convert(mode) if mode != "P" else Image.fromarray(pixels).quantize(4)
    [frames] = read_images([[encoded(image)]])
    assert (frames[0, 0] == 0).all() and (frames[0, 1:] == 255).all()


def test_half_transparent_red_is_pink_and_a_named_grey_of_sixteen_bits_is_white():
    red = Image.new("RGBA", (2, 2), (255, 0, 0, 128))
    assert read_images([[encoded(red)]])[0][0, 0, 0].tolist() == [255, 127, 127]
    grey = Image.fromarray(np.array([[512, 25_700]] * 2, np.uint16))
    assert read_images([[encoded(grey, transparency=512)]])[0][0, 0, :, 0].tolist() == [255, 100]


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(2_000, marks=pytest.mark.full)])
def test_an_image_with_other_bytes_in_it_is_read_or_refused_and_nothing_else(count):
    """Bytes changed, cut out, doubled and cut off, in files of every kind that is let in."""
    rng, outcomes = np.random.default_rng(0), Counter()
    noise = Image.fromarray(rng.integers(0, 256, (40, 60, 3), np.uint8))
    for number in range(count):
        kind, options = KINDS[number % len(KINDS)]
        stream = io.BytesIO()
        noise.save(stream, kind, **options)
        data = bytearray(stream.getvalue())
        for _ in range(rng.integers(1, 6)):
            at = int(rng.integers(min(len(data), 200) if rng.random() < 0.5 else len(data)))
            match rng.integers(4):
                case 0:
                    data[at] = rng.integers(256)
                case 1:
                    del data[at : at + rng.integers(1, 9)]
                case 2:
                    data[at:at] = data[at : at + rng.integers(1, 99)]
                case _:
                    del data[max(at, 8) :]
            if not data:
                break
        try:
            [frames] = read_images([[text(bytes(data))]])
            assert frames.dtype == np.uint8 and frames.ndim == 4 and frames.size <= 3 * MAX_PIXELS
            outcomes["read"] += 1
        except Refusal:
            outcomes["refused"] += 1
    assert outcomes.total() == count and min(outcomes.values()) > 0.05 * count, outcomes


@pytest.fixture
def root(tmp_path):
    (tmp_path / "media" / "a").mkdir(parents=True)
    (tmp_path / "media" / "a" / "b.mp4").write_bytes(FOUR)
    return tmp_path / "media"


def test_evenly_spread_frames_with_first_and_last():
    # by hand: of frames 0..3, three evenly spread are 0, 1.5 -> 2, 3
    frames = read_video(FOUR, 3, None)
    assert frames.shape == (3, 48, 64, 3)
    assert np.abs(frames.mean((1, 2, 3)) - [0, 120, 180]).max() < 4


@pytest.mark.parametrize("codec", ["libx264", "mpeg4", "libvpx-vp9"])
def test_codecs_that_clients_write(codec):
    assert read_video(movie([0, 100, 200], codec=codec), 16, None).shape == (3, 48, 64, 3)


def test_a_turned_video_is_judged_upright():
    lying, upright = (read_video(data, 1, None) for data in (movie([200]), turned(movie([200]))))
    assert lying.shape == (1, 48, 64, 3) and upright.shape == (1, 64, 48, 3)


def test_frames_are_made_smaller_on_demand():
    assert read_video(FOUR, 1, 800).shape == (1, 24, 32, 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "damaged"),
        (b"RIFF" + b"\0" * 100, "damaged|besides"),
        (FOUR[: len(FOUR) // 2], "0 video tracks"),
        (movie([0] * 65), "at most 64 frames, it says 65"),
        (FOUR[:32] + (b"\0\0\0\x08free" * 40_000), "bytes besides its frames"),
        (patched(FOUR, b"vide", lambda data, at: data.__setitem__(slice(at - 4, at), b"soun")), "0 video tracks"),
        (patched(FOUR, b"mdat", lambda data, at: data.__setitem__(slice(at, at + 400), b"\xff" * 400)), "damaged"),
    ],
)
def test_an_unfit_video_is_refused(data, reason):
    with pytest.raises(Refusal, match=reason):
        read_video(data, 16, None)


def test_a_name_below_the_root_is_read_and_nothing_else(root):
    media = MediaRoot(str(root))
    assert media.read("a/b.mp4") == media.read(f"{root}/a/b.mp4") == FOUR
    for name in ("a", "a/", "b.mp4", "a/c.mp4", "a/./b.mp4", "a//b.mp4", "../media/a/b.mp4", f"{root.parent}/a/b.mp4"):
        with pytest.raises(Refusal, match="names no video"):
            media.read(name)


def test_without_a_root_every_name_is_refused_and_a_missing_root_is_reported_at_once(tmp_path):
    with pytest.raises(Refusal, match="names no video"):
        MediaRoot("").read("a.mp4")
    with pytest.raises(MachineError, match="cannot be opened"):
        MediaRoot(str(tmp_path / "gone"))
