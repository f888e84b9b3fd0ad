from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from rlvlm.algorithms.evaluation import PlayedEpisode
from rlvlm.envs.registry import make_env
from rlvlm.runs.files.video import FPS, HEADER_PX, LEAST_S, TRACE_PX, compose_frames, write_mp4, write_videos
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.start.build import film_draw


def compose(rewards: list[float], width: int = 128, title: str = "t", **more: Any) -> list[NDArray[np.uint8]]:
    """Black frames 64 pixels high, with their strips."""
    return compose_frames(
        np.zeros((len(rewards), 64, width, 3), np.uint8), np.array(rewards, np.float32), title, **more
    )


def orange(image: NDArray[np.uint8], first: int = HEADER_PX, last: int = TRACE_PX) -> tuple[NDArray, NDArray]:
    """Rows and columns of the pixels in the colour of the present, between two rows of the strip."""
    strip = image[64 + first : 64 + last].astype(int)
    return np.nonzero((strip[..., 0] > 200) & (strip[..., 2] < 120))


def test_the_mark_follows_the_reward_on_the_episodes_range_or_the_one_that_is_known():
    images = compose([0.0, 1.0, 0.0])
    assert images[0].shape == (64 + TRACE_PX, 128, 3)
    rows, columns = zip(*((found[0].mean(), found[1].mean()) for found in map(orange, images)), strict=True)
    assert columns[0] < columns[1] < columns[2], "time goes right"
    assert rows[1] < rows[0] == pytest.approx(rows[2]), "more reward is higher"
    own, known = (orange(compose([0.0, 0.01], bounds=bounds)[-1])[0].mean() for bounds in (None, (0.0, 1.0)))
    assert known > own + 20, "0.01 of 1 is at the bottom"
    assert len(compose([1.0, 1.0])) == 2, "a constant reward is drawn too"


def test_title_reward_and_true_progress_stand_on_lines_of_their_own():
    plain, titled = (compose([1.0], 300, title)[0] for title in ("", "x" * 60))
    rows_of_title = np.argwhere((plain != titled)[64:].any(-1))[:, 0]
    assert rows_of_title.max() < orange(plain, 0, HEADER_PX)[0].min()
    plain, barred = compose([0.0, 0.0], 256), compose([0.0, 0.0], 256, progress=np.array([0.1, 0.9], np.float32))
    changed = [np.argwhere((one != other).any(-1)) for one, other in zip(plain, barred, strict=True)]
    assert all(len(pixels) > 50 and pixels[:, 0].min() > 64 + 70 for pixels in changed), "in the last line of the strip"
    assert not np.array_equal(barred[0], barred[1])


def test_a_long_title_goes_on_beside_the_reward_and_does_not_run_into_it():
    title = "step 20,000, success, undone at the end, judge's score so far"
    plain, titled = (compose([-123.45], 300, words)[0] for words in ("", title))
    written = np.argwhere((plain != titled).any(-1))
    assert written[:, 0].max() > 64 + 20, "on two lines"
    assert written[:, 1].max() < 300 - 10
    second = written[written[:, 0] >= 64 + 20]
    assert second[:, 1].max() < 300 - 10 - 50, "the reward stands to its right"


@pytest.mark.parametrize(("height", "width", "shown"), [(64, 96, 384), (64, 192, 384), (64, 300, 300), (75, 301, 300)])
def test_small_images_are_enlarged_until_there_is_room_for_words_and_odd_ones_are_filmed_too(
    height, width, shown, tmp_path
):
    ones = np.ones(3, np.float32)
    played = PlayedEpisode(
        snapshots=ones[:, None], env_rewards=ones, learned_rewards=ones, success=ones > 0, progress=ones
    )
    (file,) = write_videos(tmp_path, [played], 0, lambda rows, _: np.zeros((len(rows), height, width, 3), np.uint8))
    with av.open(str(file)) as container:
        assert container.streams.video[0].width == shown


@pytest.mark.slow
def test_films_show_the_robot_that_policy_and_judge_do_not_see():
    config = recipe("drawer_open")
    env = make_env(config.task, config.env, 0)
    env.reset(seed=0)
    hidden = env.draw(env.snapshot()[None], 120)[0].astype(int)
    with film_draw(config, env.draw) as draw:
        shown = draw(env.snapshot()[None], 120)[0].astype(int)
    assert (np.abs(shown - hidden).max(-1) > 30).mean() > 0.03
    env.close()
    turns = recipe("number_line")
    with film_draw(turns, env.draw) as draw:
        assert draw == env.draw, "there is no robot"


@pytest.mark.parametrize(("steps", "fps", "num_images"), [(1, 1, 5), (10, 2, 10), (40, 8, 40), (250, FPS, 250)])
def test_a_video_plays_back_and_lasts_five_seconds(steps, fps, num_images, tmp_path):
    file = write_mp4(
        tmp_path / "videos" / "a.mp4", [np.full((32, 64, 3), 20 * n % 200, np.uint8) for n in range(steps)]
    )
    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.average_rate) == ("h264", fps)
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(decoded) == num_images >= LEAST_S * fps
    assert abs(int(decoded[steps - 1][20, 20, 0]) - 20 * (steps - 1) % 200) < 8
    assert [path.name for path in file.parent.iterdir()] == ["a.mp4"]


def test_a_broken_video_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="ndim"):
        write_mp4(tmp_path / "a.mp4", [np.zeros((64, 64, 3), np.uint8), np.zeros((64, 64), np.uint8)])
    assert list(tmp_path.iterdir()) == []
