from pathlib import Path

import av
import numpy as np
import pytest

from rlvlm.runs.video import FPS, HEADER_PX, LEAST_S, TRACE_PX, compose_frames, write_video


def test_the_mark_follows_the_reward() -> None:
    frames = np.zeros((3, 64, 128, 3), np.uint8)
    images = compose_frames(frames, np.array([0.0, 1.0, 0.0], np.float32), "t")
    assert images[0].shape == (64 + TRACE_PX, 128, 3)
    marks = []
    for image in images:
        strip = image[64 + HEADER_PX :].astype(int)  # below the line of text
        rows, columns = np.nonzero((strip[..., 0] > 200) & (strip[..., 2] < 120))
        marks.append((columns.mean(), rows.mean()))
    assert marks[0][0] < marks[1][0] < marks[2][0]  # time goes right
    assert marks[1][1] < marks[0][1] == pytest.approx(marks[2][1])  # more reward is higher


def test_a_score_whose_range_is_known_is_drawn_on_that_range() -> None:
    frames, low = np.zeros((2, 64, 128, 3), np.uint8), np.array([0.0, 0.01], np.float32)
    heights = []
    for bounds in (None, (0.0, 1.0)):
        strip = compose_frames(frames, low, "t", bounds=bounds)[-1][64 + HEADER_PX :].astype(int)
        heights.append(np.nonzero((strip[..., 0] > 200) & (strip[..., 2] < 120))[0].mean())
    assert heights[1] > heights[0] + 20, "0.01 of 1 is at the bottom"


def test_a_video_can_be_played_back(tmp_path: Path) -> None:
    frames = np.stack([np.full((96, 96, 3), 20 * step, np.uint8) for step in range(10)])
    file = write_video(tmp_path / "videos" / "a.mp4", frames, np.arange(10, dtype=np.float32), "step 1,000")
    with av.open(str(file)) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert container.streams.video[0].codec_context.name == "h264"
    assert len(decoded) == 10
    assert abs(int(decoded[9][40, 40, 0]) - 180) < 8
    assert [path.name for path in file.parent.iterdir()] == ["a.mp4"]


def test_a_broken_video_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        write_video(tmp_path / "a.mp4", np.zeros((3, 64, 64, 3), np.uint8), np.zeros(1, np.float32), "t")
    assert list(tmp_path.iterdir()) == []


def test_a_constant_reward_is_drawn() -> None:
    assert len(compose_frames(np.zeros((2, 32, 64, 3), np.uint8), np.ones(2, np.float32), "t")) == 2


def test_true_progress_stands_beside_a_reward_that_may_be_wrong() -> None:
    frames, rewards = np.zeros((2, 64, 256, 3), np.uint8), np.zeros(2, np.float32)
    plain = compose_frames(frames, rewards, "t")
    told = compose_frames(frames, rewards, "t", np.array([0.1, 0.9], np.float32))
    changed = [np.argwhere((one != other).any(-1)) for one, other in zip(plain, told, strict=True)]
    assert all(len(pixels) > 50 and pixels[:, 0].min() > 64 + 70 for pixels in changed)  # in the last line of the strip
    assert not np.array_equal(told[0], told[1])


@pytest.mark.parametrize(
    ("num_steps", "fps", "num_images"), [(1, 1, 5), (3, 1, 5), (10, 2, 10), (40, 8, 40), (250, FPS, 250)]
)
def test_nobody_has_to_look_in_less_than_five_seconds(
    num_steps: int, fps: int, num_images: int, tmp_path: Path
) -> None:
    frames = np.zeros((num_steps, 32, 64, 3), np.uint8)
    file = write_video(tmp_path / "a.mp4", frames, np.zeros(num_steps, np.float32), "t")
    with av.open(str(file)) as container:
        assert container.streams.video[0].average_rate == fps
        assert len(list(container.decode(video=0))) == num_images >= LEAST_S * fps


def test_title_and_reward_stand_on_lines_of_their_own() -> None:
    frames, rewards = np.zeros((1, 32, 300, 3), np.uint8), np.ones(1, np.float32)
    strips = [compose_frames(frames, rewards, title)[0][32:].astype(int) for title in ("", "x" * 60)]
    rows = np.unique(np.argwhere((strips[0] != strips[1]).any(-1))[:, 0])
    reward = np.argwhere((strips[0][:HEADER_PX, :, 0] > 200) & (strips[0][:HEADER_PX, :, 2] < 120))[:, 0]
    assert rows.max() < reward.min()
