"""`rlvlm score`: labels of episodes whose brightness is their progress, in each form of recorded data; what goes wrong
with data, judges and labels; and what a killed command asks again.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from api_server import ApiServer
from frameworks import python_of

from rlvlm.cli import run_command
from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.guests import guests
from rlvlm.core.judging import Score, Stamp, Status
from rlvlm.core.steps import Frames
from rlvlm.demonstrations import films as recorded_films
from rlvlm.demonstrations.folder import create_folder
from rlvlm.demonstrations.recorded_labels import (
    EpisodeProgress,
    read_labels,
    write_frame_signals,
    write_labels,
    write_lerobot_progress,
)
from rlvlm.demonstrations.records import EpisodeRecord, StepRecord
from rlvlm.demonstrations.weighting import weigh
from rlvlm.judge_bench.preflight import JudgeRefused
from rlvlm.judge_bench.scoring import Asked
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.images import image_digest
from rlvlm.reports.score_readers import _score_part
from rlvlm.serving.apps import start_judge
from rlvlm.serving.config import PlacementConfig
from rlvlm.testing import FakeJudge
from tests.recorded_data import GREEN, NAMES, PX, write_film, write_lerobot, write_libero

ROOT = Path(__file__).parents[2]
CURVES = ([0, 0.3, 0.6, 0.9], [0, 0.2, 0.3, 0.3], [0, 0.9, 0.5, 0.1], [0, 0.2, 0.2, 0.2], [0, 0.4, 0.5, 0.95])
"""Progress at frames 0, 4, 8 and 12, linear between them."""
LOST = (1, 2)
"""Episodes that the data call failures; the fourth is a success that never looks like one."""
FORMS = ("v2.1 video", "v3.0 video", "v3.0 image", "folder", "turns", "videos", "metadata")
FORMS += ("libero",) * ("exchange" in guests())


def dim(images, goal):
    """A judge of one's own, see `--judge.backend`: the brighter, the nearer."""
    return [float(np.mean(image)) / 255 for image in images]


def blind(images, goal):
    return [0.5 for _ in images]


def killed(config: Any) -> Any:
    """A judge that writes down what it was asked, and kills its process in its fourth batch where MARK is not there."""
    log = Path(os.environ["ASKED"])

    class Logging:
        stamp = Stamp(judge="logging", revision="", prompt="", decoding="")

        def compare(self, queries):
            return []

        def score(self, clips):
            if log.exists() and len(log.read_text().split()) > 100 and not log.with_suffix(".mark").exists():
                log.with_suffix(".mark").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with open(log, "a") as file:
                file.writelines(f"{image_digest(clip.frames)}\n" for clip in clips)
            return [Score(status=Status.OK, value=dim(clip.frames[-1:], "")[0], stamp=self.stamp) for clip in clips]

    return Logging()


def films(num: int = 13) -> list[Frames]:
    """[T, PX, PX, 3] of each episode: as bright as it has progress."""
    grid = np.linspace(0, 12, num)
    values = [np.interp(grid, [0, 4, 8, 12], curve) for curve in CURVES]
    return [np.tile(np.round(250 * value).astype(np.uint8)[:, None, None, None], (1, PX, PX, 3)) for value in values]


def write_data(root: Path, form: str, shown: list[Frames]) -> Path:
    """Recorded data of a form."""
    path = root / "data"
    still = [(np.zeros((len(one), 7), np.float32), np.ones((len(one), 8), np.float32)) for one in shown]
    robot = [(*numbers, one[:, None].repeat(2, axis=1)) for numbers, one in zip(still, shown, strict=True)]
    if " " in form:
        version, kind = form.split()
        write_lerobot(path, version, robot, kind, lost=LOST)
        return path
    path.mkdir(parents=True)
    if form == "libero":
        write_libero(path / "push_the_green_block_onto_the_pad_demo.hdf5", GREEN, robot, is_own=False)
        with h5py.File(path / "push_the_green_block_onto_the_pad_demo.hdf5", "r+") as file:
            for number in set(LOST) & set(range(len(shown))):
                rewards: Any = file[f"data/demo_{number}/rewards"]
                rewards[...] = 0
    elif form in ("folder", "turns"):
        kind, task = ("turns", "number_line") if form == "turns" else ("chunks", "push_block")
        folder = create_folder(path, task, kind, chunks={"cameras": ["above"]})
        for number, one in enumerate(shown):
            names = [image_digest(image) for image in one]
            step = StepRecord(prompt="p", text="+", action=None, env_reward=0.0, success=False, progress=0.0)
            seen: dict[str, Any] = {"arrays": {"pictures": np.array(names)[:, None]}}
            if form == "turns":  # what there was to see after the last turn stands apart
                steps = [replace(step, pictures=(name,), progress=0.5) for name in names[:-1]]
                seen = {"steps": tuple(steps), "last_pictures": (names[-1],)}
            record = EpisodeRecord(
                id=f"e{number}", task=task, kind=kind, seed=number, player="test", goal=GREEN,
                env_return=0.0, success=number not in LOST, terminated=True, **seen,
            )  # fmt: skip
            folder.add(record, one)
    else:
        rows = []
        for number, one in enumerate(shown):
            write_film(path / f"clip{number}.mp4", one)
            rows.append({"file_name": f"clip{number}.mp4", "goal": GREEN, "success": number not in LOST})
            if form == "videos":
                (path / f"clip{number}.txt").write_text(f"{GREEN}\n")
        if form == "metadata":
            (path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def score(data: Path, *words: str, judge: str = "dim") -> tuple[list[dict], dict]:
    """The rows of the table, and the JSON beside it."""
    out = data.with_name(f"{data.name}.labels")
    backend = f"tests.reports.test_score:{judge}"
    run_command(["score", str(data), "--judge.backend", backend, "--every", "4", "--frames", "4", *words])
    return pq.read_table(out / "labels.parquet").to_pylist(), json.loads((out / "score.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_labels_are_right_in_each_form(tmp_path: Path, form: str, capsys: pytest.CaptureFixture) -> None:
    data = write_data(tmp_path, form, films())
    before = {file: file.read_bytes() for file in data.rglob("*") if file.is_file()}
    words = ["--success", "assumed", "--judge.faulty", "ok"] if form == "videos" else []
    rows, found = score(data, *words)
    assert {file: file.read_bytes() for file in data.rglob("*") if file.is_file()} == before
    for number, curve in enumerate(CURVES):
        own = [row for row in rows if row["episode"] == number]
        assert [row["frame"] for row in own] == [0, 4, 8, 12, None]
        assert np.allclose([row["progress"] for row in own[:4]], np.array(curve) * 250 / 255, atol=0.02)
        assert own[4]["success"] == own[3]["progress"] and own[4]["progress"] is None
        assert {row["status"] for row in own} == {"ok"} and "test_score" in own[0]["judge"] and own[0]["goal"]
        corrected = ([0, 0, 1, 1] if number == 2 else [0] * 4) if " " in form else [None] * 4
        assert [row["corrected"] for row in own[:4]] == corrected
    assert found["suspicious"]["2"][0].startswith("progress falls by 0.7")
    if form != "videos":  # its episodes are all taken for successes
        assert found["suspicious"].keys() == {"2", "3"} and found["figures"]["scores"]["auc"]["value"] == pytest.approx(
            5 / 6
        )
        assert found["suspicious"]["3"] == ["a success that never looks like one"]
    page = (tmp_path / "data.labels" / "score.html").read_text()
    assert (
        page.index("progress falls by 0.7") < page.index("0: ") and "data:image/webp" in page and "<script" not in page
    )
    assert "0 questions asked" not in capsys.readouterr().out
    rows_again, _ = score(data, *words)
    assert rows_again == rows and "0 questions asked" in capsys.readouterr().out
    assert (tmp_path / "data.labels" / "rlvlm_progress.parquet").exists() == (" " in form)


def test_a_dry_run_says_the_price_and_labels_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = write_data(tmp_path, "folder", films())
    words = ["score", str(data), "--judge.backend", "tests.reports.test_score:dim", "--every", "4", "--frames", "3"]
    run_command([*words, "--ask", "progress", "success", "pairs", "--pairs", "2", "--dry-run"])
    said, num = capsys.readouterr().out, len(CURVES)
    # four frames of each episode: clips of 1, 2, 3 and 3 images; two pairs and the ends of two in a row, in both orders
    assert re.search(rf"progress +{4 * num} +{9 * num} ", said) and re.search(rf"success +{num} +{3 * num} ", said)
    pairs = 2 * (2 * num + num - 1)
    assert re.search(rf"pairs +{pairs} +{2 * pairs} ", said) and "Nothing was measured" in said
    assert not list(data.with_name("data.labels").glob("*.parquet"))


@pytest.mark.slow
def test_a_value_of_the_outcomes_stands_beside_the_labels(tmp_path: Path) -> None:
    data = write_data(tmp_path, "libero", films() * 4)
    rows, found = score(data, "--value", "--judge.faulty", "ok")
    frames, wholes = ([row for row in rows if (row["frame"] is None) is is_whole] for is_whole in (False, True))
    assert all(0 <= row["value"] <= 1 and 0 <= row["upper_value"] <= 1 for row in frames)
    # bright last frames mean success to networks that have not seen this episode, but others like it
    last = {row["episode"]: row["value"] for row in frames if row["frame"] == 12}
    assert min(last[0], last[4]) > max(last[1], last[2], last[3]) + 0.2
    assert [row["value"] for row in wholes[:5]] == [1, 0, 0, 0, 1] and "calibration error" in found["summary"]["value"]
    labels = read_labels(tmp_path / "data.labels" / "labels.parquet", found["dataset"])
    for weighting in ("advantage", "condition", "iql"):
        assert weigh(labels, [13] * 20, weighting, 0.5, 4).values.max() > 0
    shutil.rmtree(tmp_path / "data.labels")
    rows, found = score(data, "--value", "--judge.faulty", "ok", judge="blind")
    assert "all alike" in found["summary"]["value"] and {row["value"] for row in rows} == {None}


@pytest.mark.slow
def test_one_video_and_pairs_of_images(tmp_path: Path) -> None:
    data = write_data(tmp_path, "videos", films())
    (data / "clip0.txt").unlink()
    rows, _ = score(data / "clip0.mp4", "--goal", "open the drawer", "--preflight", "0")
    assert [row["goal"] for row in rows] == ["open the drawer"] * 5 and rows[-1]["success"] == pytest.approx(
        0.88, abs=0.02
    )
    # of the videos one has no sentence now; in successes alone the order in time is the truth of a pair
    rows, found = score(data, "--success", "assumed", "--ask", "pairs", "--pairs", "6", "--preflight", "12")
    assert [row["status"] for row in rows] == ["unreadable"] and found["suspicious"].keys() == {"0"}
    pairs = found["figures"]["pairs"]
    # three pairs of the second's last frames are ties, and three of the third's are wrong
    assert pairs["accuracy"]["count"] == 2 * (4 * 6 - 1 - 3) and pairs["accuracy"]["value"] == 1 - 6 / 40
    assert found["suspicious"].keys() == {"0"}
    table = pq.read_table(tmp_path / "data.labels" / "pairs.parquet").to_pylist()
    assert len(table) == 2 * (4 * 6 + 3) and {row["label"] for row in table} == {"left", "right", "tie"}
    for row in table:  # of the third and fourth episode (the first has no goal) the ends, brighter against darker
        if (row["left_episode"], row["right_episode"]) in ((3, 4), (4, 3)):
            assert row["label"] == ("left" if row["left_episode"] == 4 else "right") and row["left_frame"] == 12
    assert pairs["consistent"]["value"] == 1 and found["figures"]["scores"] == {}


@pytest.mark.slow
def test_unreadable_episodes_are_counted_and_the_others_are_scored(tmp_path: Path) -> None:
    data = write_data(tmp_path, "metadata", [*films(), films(3)[0]])
    noise = np.random.default_rng(0).integers(0, 256, (13, PX, PX, 3), np.uint8)  # a frame takes many bytes
    write_film(data / "clip1.mp4", noise)
    torn = bytearray((data / "clip1.mp4").read_bytes())
    torn[len(torn) // 2 : len(torn) * 2 // 3] = bytes(len(torn) * 2 // 3 - len(torn) // 2)  # frames, and not the header
    (data / "clip1.mp4").write_bytes(torn)
    (data / "clip2.mp4").write_bytes(b"no film")
    (data / "clip4.mp4").unlink()
    with open(data / "metadata.jsonl", "a") as file:
        file.write(json.dumps({"file_name": "../elsewhere.mp4", "goal": GREEN}) + "\n")
    shutil.copy(data / "clip0.mp4", tmp_path / "elsewhere.mp4")
    rows, found = score(data, "--preflight", "0")
    by_status = {number: {row["status"] for row in rows if row["episode"] == number} for number in range(7)}
    assert [number for number, statuses in by_status.items() if statuses == {"unreadable"}] == [2, 5, 6]
    assert by_status[0] == by_status[3] == by_status[4] == {"ok"} and found["shorter_than_clip"] == 1
    assert by_status[1] == {"ok", "unreadable"}, "the frames before the torn ones"
    assert found["statuses"]["unreadable"] == sum(row["status"] == "unreadable" for row in rows)
    assert {"1", "2", "5", "6"} <= found["suspicious"].keys() and found["episodes"] == 7


@pytest.mark.slow
def test_a_film_that_hangs_its_decoder_is_one_bad_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_data(tmp_path, "metadata", films())
    decoded, hung = recorded_films._decoded, threading.Event()

    def decode(root: Path, file: Path, *which: Any) -> Any:
        return hung.wait() if file.name == "clip1.mp4" else decoded(root, file, *which)

    monkeypatch.setattr(recorded_films, "MAX_READ_S", 5.0)
    monkeypatch.setattr(recorded_films, "_decoded", decode)
    rows, found = score(data, "--preflight", "0")
    assert {row["episode"] for row in rows if row["status"] == "unreadable"} == {1} and found["episodes"] == 5
    assert {row["status"] for row in rows if row["episode"] != 1} == {"ok"}
    hung.set()


@pytest.mark.parametrize(
    ("form", "words", "message"),
    [
        ("v3.0 image", ["--camera", "front"], rf"has no camera front; it has {NAMES[1]}, {NAMES[0]}"),
        ("libero", ["--camera", "front"], r"has no camera front; it has agentview_rgb, eye_in_hand_rgb"),
        ("folder", ["--camera", "front"], r"has no camera front; it has above"),
        ("videos", ["--camera", "front"], r"no effect on videos"),
        ("folder", ["--out", "{data}/labels"], r"inside of the data"),
        ("folder", ["--against", "{data}/demonstrations.json"], r"no file of labels that can be used"),
        ("nothing", [], r"no recorded episodes"),
    ],
)
def test_a_mistake_that_concerns_all_episodes_is_an_error(
    tmp_path: Path, form: str, words: list[str], message: str
) -> None:
    data = tmp_path / "data"
    data.mkdir() if form == "nothing" else write_data(tmp_path, form, films()[:2])
    with pytest.raises(UsageError, match=message):
        score(data, *(word.format(data=data) for word in words))


def test_a_judge_that_knows_nothing_is_refused_in_the_benchs_words(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data = write_data(tmp_path, "folder", films())
    with pytest.raises(JudgeRefused, match=r"the judge scores everything alike \(0.50 for all of \d+\)") as refused:
        score(data, judge="blind")
    assert (
        "--judge.faulty ok starts all the same" in refused.value.fix
        and not (tmp_path / "data.labels/labels.parquet").exists()
    )
    # where the data do not say which episodes succeeded, it is no reason to stop; the page says what the terminal says
    data = write_data(tmp_path / "unknown", "videos", films())
    capsys.readouterr()
    found = score(data, judge="blind")[1]
    page = data.with_name("data.labels").joinpath("score.html").read_text()
    names = [fault["name"] for fault in found["faults"]]
    assert "scores everything alike" in names
    for text in (capsys.readouterr().out, page):
        assert all(name in text for name in (*names, "as if all episodes were successes", found["advice"]))
    assert found["advice"].startswith("Drop nothing by these labels: the judge scores everything alike")
    assert not found["drop"] and "Keep the 0" not in page
    # nor is anything dropped on its word, where it was asked all the same
    data = write_data(tmp_path / "known", "folder", films())
    found = score(data, "--preflight", "0", judge="blind")[1]
    assert found["advice"] == "Drop nothing by these labels: the judge scores everything alike." and not found["drop"]


@pytest.mark.slow
def test_a_budget_holds_across_calls_and_paid_answers_are_kept(tmp_path: Path) -> None:
    data = write_data(tmp_path, "folder", films())
    server = ApiServer()
    with server.running() as address:
        words = ["score", str(data), "--judge.backend", "openai", "--judge.model", "m", "--judge.score", "rating"]
        words += ["--judge.api.base-url", address, "--every", "1", "--preflight", "0", "--judge.api.max-requests"]
        with pytest.raises(JudgeUnavailable, match=r"budget of 30 requests is spent; what was answered before") as left:
            run_command([*words, "30"])
        rows = pq.read_table(tmp_path / "data.labels" / "labels.parquet").to_pylist()
        assert sum(row["status"] == "ok" for row in rows) >= len(server.calls) > 20 and len(server.calls) <= 30
        assert "the same command" in left.value.fix
        assert "Stopped before" in (tmp_path / "data.labels" / "score.html").read_text()
        run_command([*words, "200"])
    rows = pq.read_table(tmp_path / "data.labels" / "labels.parquet").to_pylist()
    assert len(rows) == 5 * 14 and {row["status"] for row in rows} == {"ok"}
    asked = [(call.text, *(image.tobytes() for image in call.images)) for call in server.calls]
    assert len(asked) == len(set(asked)) > 50, "each question once, of both calls"


def test_labels_are_of_their_own_data_and_there_is_one_for_each_frame(tmp_path: Path) -> None:
    data = write_data(tmp_path, "folder", films())
    rows, found = score(data)
    file = tmp_path / "data.labels" / "labels.parquet"
    # another judge, who thinks otherwise of the first episode alone
    other = [row | {"success": 0.1} if row["episode"] == 0 and row["frame"] is None else row for row in rows]
    write_labels(tmp_path / "other.parquet", found["dataset"], other)
    _, found = score(data, "--against", str(tmp_path / "other.parquet"))
    assert found["suspicious"]["0"] == ["two judges disagree: 0.88 and 0.10"]
    with pytest.raises(UsageError, match=r"two labels for one frame: \(0, 0\)"):
        write_labels(tmp_path / "twice.parquet", found["dataset"], [rows[0], *rows])
        read_labels(tmp_path / "twice.parquet", found["dataset"])
    shutil.rmtree(data)
    score(write_data(tmp_path, "folder", films()[::-1]))
    with pytest.raises(UsageError, match="labels of other data"):
        score(data, "--against", str(tmp_path / "other.parquet"))
    assert read_labels(file, json.loads((file.parent / "score.json").read_text())["dataset"]).success.keys() == set(
        range(5)
    )


def test_one_judges_labels_are_not_replaced_by_anothers(tmp_path: Path) -> None:
    data = write_data(tmp_path, "folder", films())
    rows, _ = score(data)
    with pytest.raises(UsageError, match=r"has the labels of \S+dim: .* would replace") as refused:
        score(data, "--preflight", "0", judge="blind")
    assert "--out" in refused.value.fix
    assert score(data, "--ask", "pairs")[0] == rows, "other questions to the same judge leave its table"


@pytest.mark.slow
def test_a_killed_command_asks_each_question_once(tmp_path: Path) -> None:
    data = write_data(
        tmp_path, "folder", [np.clip(one + number, 0, 255).astype(np.uint8) for number, one in enumerate(films() * 3)]
    )
    words = [
        "score",
        str(data),
        "--every",
        "1",
        "--judge.backend",
        "tests.reports.test_score:killed",
        "--preflight",
        "0",
    ]
    command = [sys.executable, "-m", "rlvlm.cli", *words]
    settings = os.environ | {"ASKED": str(tmp_path / "asked"), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    codes = [subprocess.run(command, env=settings, capture_output=True, timeout=120).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, 0]
    asked = (tmp_path / "asked").read_text().split()
    rows = pq.read_table(tmp_path / "data.labels" / "labels.parquet").to_pylist()
    assert len(rows) == 15 * 14 and {row["status"] for row in rows} == {"ok"}
    assert len(asked) == len(set(asked)) > 150


@pytest.mark.ray
def test_a_served_judge_labels_as_one_here(
    tmp_path: Path, local_ray: None, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_data(tmp_path, "folder", films())
    with pytest.raises(UsageError, match="Serve app of a running cluster"):
        score(data, "--app", "dim")
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    with pytest.raises(JudgeUnavailable, match="no Serve app 'dim'"):
        score(data, "--app", "dim")
    config = JudgeConfig(backend="tests.reports.test_score:dim")
    with start_judge(config, PlacementConfig(num_cpus=1), name="score", app="dim"):
        # by a task that reads the episodes part by part
        served, there = score(data, "--app", "dim", "--readers", "1", "--preflight", "0")
    (tmp_path / "data.labels" / "answers").rename(tmp_path / "answers")
    rows, here = score(data, "--preflight", "0")
    assert served == rows and there["asked"] == here["asked"] > 0, "of one judge the answers are the same"
    assert (there["judge"], there["prompt"]) == (here["judge"], here["prompt"])
    with pytest.raises(UsageError, match="--readers ask a running --app"):
        score(data, "--readers", "1")
    *_, error = _score_part(FakeJudge(), (tmp_path, tmp_path / "elsewhere"), [], Asked(), range(1))
    assert "elsewhere is not there on node" in str(error)


def test_lerobots_progress_by_hand(tmp_path: Path) -> None:
    first = EpisodeProgress(
        episode=3, indices=np.arange(20, 25), frames=np.array([0, 2, 4]), progress=np.array([0.0, 1.0, 0.5], np.float32)
    )
    second = EpisodeProgress(
        episode=4, indices=np.array([25, 26]), frames=np.array([0, 1]), progress=np.array([0.25, np.nan], np.float32)
    )
    assert write_lerobot_progress(tmp_path / "p.parquet", [first, second], "abc", "oracle") == 7
    table = pq.read_table(tmp_path / "p.parquet")
    assert table.column_names == ["index", "episode_index", "frame_index", "progress_sparse"]
    assert [field.type for field in table.schema] == [pa.int64()] * 3 + [pa.float32()]
    assert table.schema.metadata[b"reward_model_path"] == b"oracle"
    rows = [tuple(row.values()) for row in table.to_pylist()]
    assert rows[:6] == [
        (20, 3, 0, 0),
        (21, 3, 1, 0.5),
        (22, 3, 2, 1),
        (23, 3, 3, 0.75),
        (24, 3, 4, 0.5),
        (25, 4, 0, 0.25),
    ]
    assert rows[6][:3] == (26, 4, 1) and np.isnan(rows[6][3]), "behind the last answer nothing is known"


def test_frame_signals_are_in_lerobots_proposed_form(tmp_path: Path) -> None:
    episode = EpisodeProgress(
        episode=3, indices=np.arange(20, 23), frames=np.array([0, 1]), progress=np.array([0.0, 1.0], np.float32)
    )
    assert write_frame_signals(tmp_path / "s.parquet", [episode], {"judge": "oracle"}) == 3
    table = pq.read_table(tmp_path / "s.parquet")
    rows = [tuple(row.values()) for row in table.to_pylist()]
    assert table.column_names == ["index", "episode_index", "frame_index", "progress"]
    assert rows[:2] == [(20, 3, 0, 0), (21, 3, 1, 1)] and np.isnan(rows[2][3])
    found = {
        name.decode().removeprefix("lerobot.reward_scoring."): value.decode()
        for name, value in table.schema.metadata.items()
        if name.startswith(b"lerobot.")
    }
    assert (found.pop("format"), found.pop("schema_version")) == ("lerobot.frame_signals", "1")
    about = {name: json.loads(value) for name, value in found.items()}
    assert about["provenance"] == {"judge": "oracle"} and about["episode_indices"] == [3]
    assert found["provenance"] == '{"judge":"oracle"}', "sorted, and without spaces"
    wanted = {"description", "direction", "bounds", "unit", "comparison_scope", "allow_nan"}
    assert about["descriptors"].keys() == {"progress"} and about["descriptors"]["progress"].keys() == wanted


LEROBOT = python_of("lerobot")
READ_AS_LEROBOT = """
import json, sys
import draccus, torch
from lerobot.configs.train import TrainPipelineConfig
from lerobot.rewards.sarm.rabc import RABCWeights
config = draccus.parse(TrainPipelineConfig, args=[*sys.argv[1:], "--dataset.repo_id=x"])
found = config.sample_weighting
weights = RABCWeights(found.progress_path, chunk_size=2, head_mode=found.head_mode, device=torch.device("cpu"))
given, _ = weights.compute_batch_weights({"index": torch.arange(20, 27)})
print(json.dumps([found.type, weights.progress_lookup, given.tolist()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not LEROBOT.exists(), reason="needs LeRobot: environments/lerobot.sh")
def test_the_command_in_the_docs_is_lerobots_own_and_reads_the_file(tmp_path: Path) -> None:
    episodes = [
        EpisodeProgress(
            episode=number,
            indices=np.arange(first, last),
            frames=np.array([0, last - first - 1]),
            progress=np.array([0, end], np.float32),
        )
        for number, (first, last, end) in enumerate([(20, 25, 1.0), (25, 27, 0.5)])
    ]
    write_lerobot_progress(tmp_path / "rlvlm_progress.parquet", episodes, "abc", "oracle")
    [line] = [line for line in (ROOT / "docs/score.md").read_text().splitlines() if line.startswith("lerobot-train")]
    words = line.replace("DATA.labels", str(tmp_path)).split()[1:]
    command = [LEROBOT, "-c", READ_AS_LEROBOT, *(word for word in words if word != "...")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    kind, progress, weights = json.loads(done.stdout.splitlines()[-1])
    assert kind == "rabc" and list(progress.values()) == pytest.approx([0, 0.25, 0.5, 0.75, 1, 0, 0.5])
    assert max(weights[:3]) > weights[4], "the last frame of an episode gains nothing"


def test_a_foreign_folder_may_hold_anything(tmp_path: Path) -> None:
    folder = create_folder(tmp_path / "data", "push_block", "chunks", chunks={"cameras": 5})
    arrays = (
        {"snapshots": np.zeros((), np.float32)},
        {"snapshots": np.zeros((3, 2), np.float32)},
        {"pictures": np.array("x")},
    )
    arrays += ({"pictures": np.array([["0" * 64]] * 4)}, {"pictures": np.array([["../../x"]] * 4)})
    for number, one in enumerate(arrays):
        record = EpisodeRecord(
            id=f"e{number}", task="push_block", kind="chunks", seed=0, player="test", goal=GREEN,
            env_return=0.0, success=True, terminated=True, arrays=one,
        )  # fmt: skip
        folder.add(record)
    (folder.path / "episodes.jsonl").write_text((folder.path / "episodes.jsonl").read_text() + "{torn\n")
    rows, found = score(tmp_path / "data", "--preflight", "0")
    assert len(rows) == 6 and {row["status"] for row in rows} == {"unreadable"} and len(found["suspicious"]) == 6
