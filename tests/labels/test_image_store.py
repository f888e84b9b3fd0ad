import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from rlvlm.labels.images import ImageStore, MissingImage, image_digest

IMAGE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def test_an_image_comes_back_as_it_was_and_is_written_once(tmp_path):
    store, digest = ImageStore(tmp_path), image_digest(IMAGE)
    assert store.keep([(digest, IMAGE), (digest, IMAGE)]) == 1
    assert store.keep([(digest, IMAGE)]) == 0
    assert [file.name for file in tmp_path.rglob("*.png")] == [f"{digest}.png"]
    np.testing.assert_array_equal(store.load(digest), IMAGE)
    assert not list(tmp_path.rglob("*.partial"))


def test_shape_and_pixels_make_the_name():
    looks = [IMAGE, IMAGE.reshape(5, 4, 3), IMAGE + 1, IMAGE.astype(np.int16)]
    assert len({image_digest(look) for look in looks}) == len(looks)
    assert image_digest(IMAGE[:, ::-1]) == image_digest(IMAGE[:, ::-1].copy())


def test_only_images_are_kept(tmp_path):
    odd = [IMAGE.astype(np.float32), IMAGE[..., 0], np.zeros((0, 4, 3), np.uint8), np.array(3, np.uint8)]
    assert ImageStore(tmp_path).keep([(image_digest(array), array) for array in odd]) == 0


def bomb(side):
    """A PNG whose header promises side x side pixels, a few bytes long."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("harm", ["another", "cut", "empty", "bomb", "link", "pipe", "folder", "gif"])
def test_a_file_that_is_not_the_image_is_not_shown(tmp_path, harm):
    store, digest = ImageStore(tmp_path), image_digest(IMAGE)
    store.keep([(digest, IMAGE)])
    file = next(tmp_path.rglob("*.png"))
    whole = file.read_bytes()
    file.unlink()
    if harm == "link":
        (tmp_path / "elsewhere").write_bytes(whole)
        file.symlink_to(tmp_path / "elsewhere")
    elif harm == "pipe":
        os.mkfifo(file)
    elif harm == "folder":
        file.mkdir()
    elif harm in ("another", "gif"):
        Image.fromarray(IMAGE + 1).save(file, format="png" if harm == "another" else "gif")
    else:
        file.write_bytes({"cut": whole[:-30], "empty": b"", "bomb": bomb(60_000)}[harm])
    with pytest.raises(MissingImage):
        store.load(digest)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "a" * 63, "A" * 64, "/" * 64, "a" * 63 + "\n", None, 3])
def test_only_a_digest_names_an_image(tmp_path, name):
    assert not ImageStore(tmp_path).has(name)
    with pytest.raises(MissingImage, match="64 hexadecimal"):
        ImageStore(tmp_path).load(name if isinstance(name, str) else "x")
