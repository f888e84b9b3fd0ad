"""`--goal-image`: what a run's judge is shown beside every question, from a photograph to a resumed run."""

import shlex
import shutil

import numpy as np
import pytest
from api_server import ApiServer
from PIL import Image
from tiny_run import WORDS, box_words, run_here

from rlvlm.cli import main
from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Clip, Query, Status
from rlvlm.judges.cache import CachedJudge, without_memory
from rlvlm.judges.goal_image import GoalImageJudge, read_goal_image
from rlvlm.labels.store import LabelStore
from rlvlm.testing import FakeJudge

_ORIENTATION = 0x0112
GENERAL = "--judge.backend openai --judge.model m --judge.api.key-env GOAL_TEST_KEY"


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("GOAL_TEST_KEY", "canary")


@pytest.fixture
def photo(tmp_path):
    """A photograph of 900 x 450 pixels, which a camera held upright has recorded lying: red above, blue below."""
    pixels = np.zeros((450, 900, 3), np.uint8)
    pixels[:, :450, 0] = pixels[:, 450:, 2] = 255
    exif = Image.Exif()
    exif[_ORIENTATION] = 6  # to be turned clockwise
    Image.fromarray(pixels).save(tmp_path / "goal.jpg", exif=exif, quality=95)
    return tmp_path / "goal.jpg"


def test_a_photograph_is_turned_and_no_larger_than_the_judged_images(photo):
    (image,) = read_goal_image(photo, 300)  # by hand: 450 x 900 upright, so 150 x 300
    assert image.shape == (300, 150, 3)
    assert image[10, 75, 0] > 240 and image[290, 75, 2] > 240


def test_every_question_has_the_image_and_caches_know_it(photo, tmp_path):
    frames = np.zeros((1, 8, 8, 3), np.uint8)
    cached = CachedJudge(FakeJudge(), LabelStore(tmp_path / "store"))
    shown = GoalImageJudge(cached, read_goal_image(photo, 32))
    query, clip = Query(goal="open it", left=frames, right=frames + 9), Clip(goal="open it", frames=frames)
    for judge in (shown, cached, shown):
        assert judge.compare([query])[0].status is not Status.FAILED and judge.score([clip])[0].value is not None
    assert (cached.misses, cached.hits) == (4, 2), "the same question without the image is another"
    bare = without_memory(shown)
    assert isinstance(bare, GoalImageJudge) and isinstance(bare.judge, FakeJudge)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "judge.backend pocket was never shown an image of the goal"),
        (f"{GENERAL} --reward.source score --judge.score delta", "judge.score delta was never shown an image"),
        ("--reward.teacher oracle", "--goal-image has no effect with reward.source"),
        (f"{GENERAL} --goal-image TEXT", "cannot be read as an image"),
        (f"{GENERAL} --goal-image MISSING", "cannot be read as an image"),
    ],
)
def test_an_unreadable_goal_image_is_refused_before_anything_starts(photo, tmp_path, capsys, words, message):
    (tmp_path / "text.png").write_text("no image")
    files = {"TEXT": str(tmp_path / "text.png"), "MISSING": str(tmp_path / "gone.png")}
    given = [files.get(word, word) for word in shlex.split(words)]
    given = given if "--goal-image" in given else [*given, "--goal-image", str(photo)]
    out = tmp_path / "runs"
    assert main(["run", "drawer_open", *given, "--out", str(out)]) == 2
    assert message in box_words(capsys.readouterr().err)
    assert not out.exists()


@pytest.mark.slow
def test_a_bench_asks_with_the_image_and_says_so(photo, tmp_path):
    server = ApiServer()
    with server.running() as url:
        words = ["cartpole", *GENERAL.split(), "--judge.api.base-url", url, "--goal-image", str(photo)]
        words += ["--pairs", "4", "--episodes", "4", "--frames", "1", "--out", str(tmp_path / "bench")]
        assert main(["judge-bench", *words]) == 0
    shown = read_goal_image(photo, 300)[0]
    assert server.calls and all((call.images[0] == shown).all() for call in server.calls)


@pytest.mark.ray
@pytest.mark.slow
def test_a_runs_judge_is_shown_the_goal_also_when_the_run_goes_on_without_the_file(local_ray, photo, tmp_path, capfd):
    server, run, shown = ApiServer(), tmp_path / "run", read_goal_image(photo, 300)[0]
    with server.running() as url:
        (tmp_path / "key").write_text("canary")  # the replica's Ray was started before the variable was set
        (tmp_path / "key").chmod(0o600)
        words = [
            "--reward.teacher",
            "judge",
            "--feedback.preflight",
            "0",
            *GENERAL.split(),
            "--judge.api.base-url",
            url,
            "--goal-image",
            str(photo),
        ]
        words += ["--judge.api.key-env", "", "--judge.api.key-file", str(tmp_path / "key")]
        run_here("run", *WORDS, *words, "--steps", "240", "--out", str(run))
        assert len(server.calls) > 8 and all((call.images[0] == shown).all() for call in server.calls)
        before = len(server.calls)
        photo.unlink()
        shutil.move(run, moved := tmp_path / "moved")
        run_here("resume", str(moved), "--steps", "400")
        new = server.calls[before:]
        assert new and all(len(call.images) == 3 and (call.images[0] == shown).all() for call in new)
        other = tmp_path / "other.png"
        Image.fromarray(shown).save(other)
        capfd.readouterr()
        assert main(["resume", str(moved), "--steps", "500", "--goal-image", str(other)]) == 2
        assert "goal_image is" in box_words(capfd.readouterr().err)
    assert f"goal_image: {photo}" in (moved / "config.yaml").read_text()
    assert "(goal_image.png)" in (moved / "README.md").read_text()
    assert "[image]" in (page := (moved / "judge_panel.html").read_text()) and "goal" in page.lower()
    (moved / "goal_image.png").write_text("torn")
    with pytest.raises(UsageError, match="cannot be read"):
        read_goal_image(moved / "goal_image.png", 300)
