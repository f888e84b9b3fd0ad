import io
from collections import Counter

import numpy as np
import pytest
from http_edge import png, png_chunk, png_saying, text
from PIL import Image

from rlvlm.gateway.media.headers import read_header
from rlvlm.gateway.media.images import MAX_PIXELS, read_pictures
from rlvlm.serving.refusal import Refusal

KINDS = [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("WEBP", {"lossless": True})]


def test_a_png_header_is_read_where_the_standard_puts_it():
    # by hand: 13 bytes of IHDR after signature, length and name; width 3, height 2, big-endian
    data = bytes.fromhex("89504e470d0a1a0a 0000000d 49484452 00000003 00000002 0802000000 12160a7b")
    header = read_header(data + png_chunk(b"IDAT", b"") + png_chunk(b"IEND", b""))
    assert (header.kind, header.width_px, header.height_px, header.num_pixels) == ("PNG", 3, 2, 6)


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("size", [(2, 3), (97, 41), (640, 480)])
def test_headers_agree_with_the_library_and_images_come_through(kind, options, size):
    data = png(77, size, kind, **options)
    header = read_header(data)
    assert (header.kind, header.width_px, header.height_px) == (kind, *size)
    [frames] = read_pictures([[text(data)] * 2])
    assert frames.shape == (2, size[1], size[0], 3) and np.abs(frames.astype(int) - 77).max() <= 2


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "I;16", "1"])
def test_every_mode_of_png_becomes_rgb(mode):
    stream = io.BytesIO()
    Image.new("L", (20, 20), 255).convert(mode if mode != "I;16" else "L").save(stream, "PNG")
    [frames] = read_pictures([[text(stream.getvalue())]])
    assert frames.shape == (1, 20, 20, 3) and (frames == 255).all()


def test_only_chunks_that_draw_are_kept():
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (9, 9, 9)).save(stream, "PNG", dpi=(72, 72))
    data = stream.getvalue()
    noisy = data[:33] + png_chunk(b"zTXt", b"a\0\0" + b"x" * 100) + png_chunk(b"iCCP", b"p\0\0") + data[33:]
    header = read_header(noisy)
    assert b"zTXt" not in header.data and b"iCCP" not in header.data and b"pHYs" not in header.data
    assert (read_pictures([[text(noisy)]])[0] == 9).all()


def test_groups_keep_their_places_and_an_empty_one_is_empty():
    left, nothing, right = read_pictures([[text(png(10)), text(png(20))], [], [text(png(30))]])
    assert (left[0] == 10).all() and (left[1] == 20).all() and (right == 30).all() and len(nothing) == 0


def test_large_images_are_made_smaller_on_demand():
    [frames] = read_pictures([[text(png(5, (400, 100)))]], max_pixels=1_000)
    assert frames.shape == (1, 15, 63, 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GIF89a" + b"\0" * 50, "no PNG, JPEG or WebP"),
        (b"", "no base64"),
        (png()[:20], "cut off|in the middle"),
        (png_saying(100_000, 100_000), "at most"),
        (png_saying(10, 0), "sides of at least"),
        (png_saying(1_000, 3), "none over"),
        (png_saying(8, 8, png_chunk(b"acTL", b"\0" * 8)), "animated"),
        (png_saying(8, 8, png_chunk(b"IHDR", b"\0" * 13)), "one header"),
        (png_saying(8, 8, png_chunk(b"IDAT", b"rubbish")), "damaged"),
        (png(1, (9, 9), "JPEG")[:-40], "damaged|in the middle|no image"),
    ],
)
def test_what_is_no_fit_image_is_refused_with_its_place(data, reason):
    with pytest.raises(Refusal, match=f"image 2 of 2: .*({reason})"):
        read_pictures([[text(png())], [text(data)]])


def test_all_pixels_of_a_request_are_counted_together():
    side = int(MAX_PIXELS**0.5)
    largest = text(png(0, (side, side)))
    assert read_pictures([[largest]])[0].shape == (1, side, side, 3)
    with pytest.raises(Refusal, match="all images together"):
        read_pictures([[largest]] * 5)


def encoded(image, kind="PNG", **options) -> str:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return text(stream.getvalue())


def test_sixteen_bits_are_scaled_and_not_cut() -> None:
    # by hand: 257 steps of 16 bits are one of 8; 25,700 is 100
    values = np.array([[0, 257], [25_700, 65_535]], np.uint16)
    [frames] = read_pictures([[encoded(Image.fromarray(values))]])
    assert frames[0, :, :, 0].tolist() == [[0, 1], [100, 255]] and (frames == frames[..., :1]).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_image_stands_as_its_camera_was_held(kind, orientation) -> None:
    upright = Image.fromarray(np.kron(np.arange(6).reshape(2, 3) * 40, np.ones((16, 16))).astype(np.uint8)).convert(
        "RGB"
    )
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the turn that a camera so held makes of it
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    [frames] = read_pictures([[encoded(stored, kind, exif=exif)]])
    assert frames.shape == (1, 32, 48, 3)
    assert np.abs(frames[0].astype(int) - np.asarray(upright)).mean() < 3


def test_broken_exif_leaves_a_sound_image_as_it_is() -> None:
    [frames] = read_pictures([[encoded(Image.new("RGB", (4, 6), (7, 7, 7)), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")]])
    assert frames.shape == (1, 6, 4, 3) and (frames == 7).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode) -> None:
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[0, :, 3] = 255  # a black row on nothing
    image = Image.fromarray(pixels).convert(mode) if mode != "P" else Image.fromarray(pixels).quantize(4)
    [frames] = read_pictures([[encoded(image)]])
    assert (frames[0, 0] == 0).all() and (frames[0, 1:] == 255).all()


def test_half_transparent_red_is_pink_and_a_named_grey_of_sixteen_bits_is_white() -> None:
    red = Image.new("RGBA", (2, 2), (255, 0, 0, 128))
    assert read_pictures([[encoded(red)]])[0][0, 0, 0].tolist() == [255, 127, 127]
    grey = Image.fromarray(np.array([[512, 25_700]] * 2, np.uint16))
    assert read_pictures([[encoded(grey, transparency=512)]])[0][0, 0, :, 0].tolist() == [255, 100]


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(2_000, marks=pytest.mark.full)])
def test_a_image_with_other_bytes_in_it_is_read_or_refused_and_nothing_else(count):
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
            [frames] = read_pictures([[text(bytes(data))]])
            assert frames.dtype == np.uint8 and frames.ndim == 4 and frames.size <= 3 * MAX_PIXELS
            outcomes["read"] += 1
        except Refusal:
            outcomes["refused"] += 1
    assert outcomes.total() == count and min(outcomes.values()) > 0.05 * count, outcomes
