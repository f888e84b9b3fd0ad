"""The cache of features: what is missing is told once, the least recently used leaves, and sizes are counted."""

import pytest
import torch

from rlvlm.core.episodes import IntArray
from rlvlm.core.errors import MachineError
from rlvlm.policies.protocol import SeenImages
from rlvlm.policies.vlm.backbone import SeenImage, pad

KIB = 1024


def image(kib: int = 1) -> SeenImage:
    return SeenImage(features=torch.zeros(1, kib, KIB // 4), grids=((1, 2, 2),), size_px=(8, 8))


def test_missing_images_are_named_once_in_order():
    images = SeenImages(10 * KIB)
    images.add(b"a", image())
    assert images.missing([b"b", b"a", b"c", b"b"]) == [0, 2]


def test_the_least_recently_used_leaves_when_room_is_short():
    images = SeenImages(3 * KIB)
    for key in (b"a", b"b", b"c"):
        images.add(key, image())
    assert images.missing([b"a"]) == []  # a look is a use
    images.add(b"d", image())
    assert images.missing([b"a", b"b", b"c", b"d"]) == [1]
    images.add(b"d", image(kib=2))  # the same key again takes the place of the old one, and more room
    assert len(images) == 2
    with pytest.raises(MachineError, match="was not shown"):
        images.get([b"b"])


def test_a_single_image_larger_than_the_room_is_kept():
    images = SeenImages(KIB)
    images.add(b"big", image(kib=5))
    assert len(images.get([b"big"])) == 1


def ids(*values: int) -> IntArray:
    return torch.tensor(values, dtype=torch.long).numpy()


def test_padding_by_hand():
    """Prompts 5 6 7 and 8, replies 1 and 2 3: prompts end in column 2, replies begin in column 3."""
    positions = [torch.tensor([[0, 1, 2]]), torch.tensor([[0]])]
    padded = pad([ids(5, 6, 7), ids(8)], positions, [ids(1), ids(2, 3)], pad_id=9, device=torch.device("cpu"))
    assert padded.ids.tolist() == [[5, 6, 7, 1, 9], [9, 9, 8, 2, 3]]
    assert padded.positions[0].tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]
    assert padded.attention is not None
    assert padded.attention.tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert padded.is_reply.tolist() == [[True, False], [True, True]]
    assert padded.replies.tolist() == [[1, 9], [2, 3]]
    assert padded.prompt_length == 3


def test_prompts_of_one_length_need_no_mask():
    positions = [torch.tensor([[0, 1]])] * 2
    padded = pad([ids(5, 6), ids(7, 8)], positions, [ids(1), ids()], pad_id=9, device=torch.device("cpu"))
    assert padded.attention is None
