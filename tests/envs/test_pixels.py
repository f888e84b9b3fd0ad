import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from filmed_lamp import FilmedLamp

from rlvlm.algorithms.checkpoint import PolicyFile, load_tree, save_tree
from rlvlm.algorithms.policy_gradient.critic import Critic
from rlvlm.core.errors import MachineError, RunError, UsageError
from rlvlm.demonstrations.collect import Disturbance, collect
from rlvlm.demonstrations.folder import create_folder, open_folder
from rlvlm.envs.check import check_turn_env
from rlvlm.envs.pixels import PIXELS, SNAPSHOT_SIZE, KeptPixels, PixelStore, encode
from rlvlm.envs.registry import make_env, task_env
from rlvlm.envs.slots import EnvSlot
from rlvlm.rewards.config import ValueConfig


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    PIXELS.clear()
    yield
    PIXELS.clear()


def grey(value: int, height: int = 4, width: int = 6) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def photograph(px: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (px, px, 3), np.uint8)


def png_that_promises(width: int, height: int) -> bytes:
    parts = (b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT")
    chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    return struct.pack("<I", len(png)) + png


class Owner:
    """Saves checkpoints."""


def test_an_image_is_kept_once_and_comes_back_as_it_was() -> None:
    kept = KeptPixels(Owner)
    first, other, again = (kept.keep([grey(value), grey(value + 1, 8, 8)]) for value in (10, 20, 10))
    assert first.shape == (SNAPSHOT_SIZE,) and first.dtype == np.float32 and len(PIXELS) == 2
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert (first == first.astype(int)).all() and (first < 2**24).all(), "float32 holds them exactly"
    np.testing.assert_array_equal(kept.draw(np.stack([other, first]), 4, 6), np.stack([grey(20), grey(10)]))
    np.testing.assert_array_equal(kept.draw(other[None], 8, 8, camera=1)[0], grey(21, 8, 8))
    # large ones are JPEGs: within the noise of a camera even where an image is nothing but noise
    for px, most in ((96, 0), (97, 6)):
        kept = KeptPixels(Owner)
        drawn = kept.draw(kept.keep([photograph(px)])[None], px, px)[0]
        assert np.abs(drawn.astype(int) - photograph(px)).mean() <= most
        assert f"{px} x {px} pixels" in kept.note and "for 20,000" in kept.note


@pytest.mark.parametrize(
    ("images", "rule"),
    [
        ([grey(1, 4, 7)], "images must keep their size; got 7 x 4 pixels after 6 x 4"),
        ([grey(1), grey(1)], "got 6 x 4 and 6 x 4 pixels after 6 x 4"),
        ([grey(1) / 255], r"must be \[H, W, 3\] of uint8.*got float64 \(4, 6, 3\)"),
        ([grey(1)[..., 0]], r"got uint8 \(4, 6\)"),
        ([grey(1)[:0]], r"got uint8 \(0, 6, 3\)"),
        ([grey(1, 1, 5_000)], "at most 4096 pixels wide and high"),
        ([], r"must be \[H, W, 3\]"),
    ],
)
def test_a_wrong_image_is_refused_with_the_name_of_the_env(images: list, rule: str) -> None:
    kept = KeptPixels(Owner)
    kept.keep([grey(0)])
    with pytest.raises(UsageError, match=f"the env Owner .*test_pixels.py, line .*{rule}"):
        kept.keep(images)


def test_images_that_are_not_here_or_broken_are_no_surprise(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptPixels(Owner)
    for content, rule in (
        (b"\x05\0\0\0junk!", "cannot be read"),
        (b"\x01", "cannot be read"),
        (png_that_promises(5_000, 1), "4096 x 4096 pixels"),
        (png_that_promises(40_000, 40_000), "cannot be read: Image size"),
    ):
        with pytest.raises(RunError, match=rule):
            kept.draw(PIXELS.add(content)[None], 4, 4)
    with pytest.raises(RunError, match="is not kept here"):
        kept.draw(np.zeros((1, SNAPSHOT_SIZE), np.float32), 4, 4)
    packed = PIXELS.pack([kept.keep([grey(3)])])
    for torn in (packed[:-1], packed[:2], struct.pack("<I", 0) + packed, struct.pack("<I", 2**31) + packed):
        with pytest.raises(ValueError, match="torn"):
            PixelStore().unpack(torn)

    class Full(io.BytesIO):
        def write(self, content: object) -> int:
            raise OSError(28, "No space left on device")

    store = PixelStore()
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(MachineError, match="full"):
        store.add(b"1")


def test_images_travel_with_their_snapshots() -> None:
    kept = KeptPixels(Owner)
    snapshots = np.stack([kept.keep([grey(value)]) for value in range(4)])
    sent, all_of_them = (
        PIXELS.pack([snapshots[[2, 0]].reshape(2, 1, -1), np.zeros((3, 5), np.float32)]),
        PIXELS.take_all(),
    )
    assert len(PIXELS) == 0
    PIXELS.unpack(sent)
    assert len(PIXELS) == 2
    np.testing.assert_array_equal(kept.draw(snapshots[[0, 2]], 4, 6)[:, 0, 0, 0], [0, 2])
    PIXELS.unpack(all_of_them)
    assert len(PIXELS) == 4 and PIXELS.pack([]) == b""


def test_a_checkpoint_has_the_images_it_needs_and_old_ones_go(tmp_path: Path) -> None:
    kept, one, other = KeptPixels(Owner), Owner(), Owner()
    policy = PolicyFile(kind="none", weights={})
    PIXELS.register(one)
    snapshots = np.stack([kept.keep([grey(value)]) for value in range(3)])
    tree = {"replay": {"snapshots": snapshots[:1]}, "turn": [snapshots[1]]}
    save_tree(tmp_path / "1", tree, policy, one)
    assert len(PIXELS) == 3, "what is as young as the checkpoint may still be looked at"
    PIXELS.register(other)
    save_tree(tmp_path / "2", tree, policy, one)
    save_tree(tmp_path / "3", tree, policy, one)
    assert len(PIXELS) == 3, "another that has not saved anything may need all of them"
    PIXELS.release(other)
    newest = kept.keep([grey(9)])
    save_tree(tmp_path / "4", tree, policy, one)
    assert PIXELS.known([snapshots, newest]) == {row.tobytes() for row in (*snapshots[:2], newest)}
    PIXELS.clear()
    assert np.array_equal(load_tree(tmp_path / "4")["turn"][0], snapshots[1])
    np.testing.assert_array_equal(kept.draw(snapshots[:2], 4, 6)[:, 0, 0, 0], [0, 1])
    with pytest.raises(RunError, match="not kept"):
        kept.draw(snapshots[2:], 4, 6)
    save_tree(tmp_path / "5", {"a": np.zeros(3)}, policy)
    assert not (tmp_path / "5" / "pixels.bin").exists()


def test_the_file_is_rewritten_without_dropped_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlvlm.envs.pixels._WASTE_BYTES", 0)
    store, owner = PixelStore(), Owner()
    snapshots = [store.add(encode([photograph(px)])) for px in (64, 32, 48)]
    contents = [store.get(snapshot) for snapshot in snapshots]
    for _ in range(2):
        store.drop(owner, frozenset({snapshots[1].tobytes()}))
    assert store._end == len(contents[1]) and store.get(snapshots[1]) == contents[1]
    assert store.get(store.add(contents[2])) == contents[2]


def test_an_env_in_turns_goes_on_in_the_middle_of_an_episode(tmp_path: Path) -> None:
    check_turn_env(FilmedLamp(), FilmedLamp())
    slot, again = EnvSlot(FilmedLamp(), "lamp"), EnvSlot(FilmedLamp(), "lamp")
    slot.begin(5)
    slot.play("nonsense")
    slot.play(slot.env.action_text(1 - slot.env.lamp))
    before = slot.env.draw(slot.episode().snapshots)
    assert before.shape == (3, 32, 48, 3) and len({frame.tobytes() for frame in before}) == 2
    save_tree(tmp_path / "1", {"slot": slot.get_state()}, PolicyFile(kind="none", weights={}))
    PIXELS.clear()  # as in a new process
    again.set_state(load_tree(tmp_path / "1")["slot"])
    for player in (slot, again):
        player.play(player.env.action_text(player.env.lamp))
    np.testing.assert_array_equal(slot.episode().snapshots, again.episode().snapshots)
    np.testing.assert_array_equal(again.env.draw(again.episode().snapshots)[:3], before)
    lamp = FilmedLamp()
    lamp.px = 25
    with pytest.raises(UsageError, match="the env FilmedLamp .*got 50 x 25 pixels after 48 x 24"):
        lamp.reset()


def test_demonstrations_bring_their_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    env = make_env("filmed_ball:TASK", task_env("filmed_ball:TASK"), 0)
    folder = create_folder(tmp_path / "own", "filmed_ball:TASK", "chunks")
    assert collect(env, Disturbance(), folder, wanted=2, seed=0) >= 2
    PIXELS.clear()
    (first, *_), drawn = open_folder(tmp_path / "own").episodes(), {}
    for camera in env.cameras:
        drawn[camera] = env.draw(first.arrays["snapshots"], 32, camera)
    assert set(first.arrays) >= {"snapshots", "actions"} and "pixels" not in first.arrays
    assert (drawn["above"] != drawn["hand"]).any()
    assert env.draw_cameras(first.arrays["snapshots"], 32).shape == (len(drawn["hand"]), 2, 32, 32, 3)
    with pytest.raises(UsageError, match="FilmedBall gives pixels alone"):
        Critic(ValueConfig(), env, 0)
    seen = Critic(ValueConfig(), env, 0, sees_images=True)._seen(first.arrays["snapshots"])
    assert seen.shape == (len(drawn["hand"]), 3 * 16 * 16) and 0 <= seen.min() < seen.max() <= 1
