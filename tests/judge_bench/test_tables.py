"""Other people's tables as suites: their columns, their metrics worked out by hand, and rows that cannot be used."""

import csv
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import kendalltau, rankdata

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.demonstrations.recordings import Recordings, find_form
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory
from rlvlm.judge_bench.bench import freeze, measure, summarise
from rlvlm.judge_bench.items import Item
from rlvlm.judge_bench.published import confusion, preference_accuracy, ranking_tau, ratings
from rlvlm.judge_bench.suites import find_suite
from rlvlm.judges.config import JudgeConfig
from tests.recorded_data import write_lerobot

BLUE, RED = "lift the blue cube", "lift the red cube"
FRAMES = 6


def film(path: Path, last: int, size: tuple[int, int] = (48, 32)) -> None:
    """A clip that gets brighter from 20 to `last`; `size` is width and height."""
    path.parent.mkdir(exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=5, options={"crf": "0"})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv444p"
        for level in np.linspace(20, last, FRAMES).round().astype(np.uint8):
            picture = np.full((size[1], size[0], 3), level, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def write_table(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


class Light:
    """Scores the last image's brightness, 20 to 220 as 0 to 1, and compares by it."""

    stamp = Stamp(judge="light", revision="", prompt="none", decoding="")

    @staticmethod
    def value(frames) -> float:
        return float(np.clip((frames[-1].mean() - 20) / 200, 0, 1))

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        return [Score(status=Status.OK, value=self.value(clip.frames), stamp=self.stamp) for clip in clips]

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        labels = [Label.of(self.value(query.left), self.value(query.right)) for query in queries]
        return [Verdict(status=Status.of(label), label=label, stamp=self.stamp) for label in labels]


ENDS = {"a": 220, "b": 170, "c": 20, "d": 70}
"""Brightness at the end: the judge rates them 5, 4, 1 and 2."""
REWARDS = {"a": 5, "b": 3, "c": 1, "d": 4}
"""MAE (0 + 1 + 0 + 2) / 4; of the pairs of different rewards all but (b, d) in order."""
ROBOREWARD = [{"video": f"clips/{name}.mp4", "task": BLUE, "reward": REWARDS[name]} for name in ENDS]
LABELS = {"a": ("successful", None), "b": ("suboptimal", 0.5), "c": ("failure", 0.0), "d": ("successful", 1.0)}
ROBOMETER = [
    {"id": name, "frames": f"clips/{name}.mp4", "task": BLUE, "quality_label": label, "partial_success": share}
    for name, (label, share) in LABELS.items()
]
"""Tuples (failure, suboptimal, successful): c b a is in order, tau 1; c b d has d below b, tau 1/3."""
BY_HAND = {
    "roboreward.csv": (ROBOREWARD, {"mae": 0.75, "preference": 5 / 6, "kendall_tau": 1 / 3}),
    "roboreward.parquet": (ROBOREWARD, {"mae": 0.75, "preference": 5 / 6, "kendall_tau": 1 / 3}),
    "robometer.csv": (ROBOMETER, {"mae": (0 + 1 + 0 + 3) / 4, "preference": 4 / 5, "kendall_tau": 2 / 3}),
    "robometer.parquet": (ROBOMETER, {"mae": (0 + 1 + 0 + 3) / 4, "preference": 4 / 5, "kendall_tau": 2 / 3}),
}
"""RoboReward's qualities 1, .5, 0, .75 are cut into thirds: {c: 0}, {b: .75}, {a 1, d .25: mean .625}, tau-a 1/3."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    for name, last in ENDS.items():
        film(folder / "clips" / f"{name}.mp4", last)
    film(folder / "clips" / "wide.mp4", 220, (64, 32))
    (folder / "clips" / "torn.mp4").write_bytes((folder / "clips" / "a.mp4").read_bytes()[:200])
    (folder / "clips" / "text.mp4").write_text("no video")
    return folder


@pytest.mark.parametrize("name", BY_HAND)
def test_their_metrics_by_hand(folder, name):
    rows, expected = BY_HAND[name]
    write_table(folder / name, rows)
    row = summarise(measure(find_suite(str(folder / name)), Light(), JudgeConfig(), num_frames=4))
    found = row["figures"]["published"]
    assert found["mae"]["value"] == pytest.approx(expected["mae"])
    assert found["preference"] == pytest.approx(expected["preference"])
    assert found["kendall_tau"] == pytest.approx(expected["kendall_tau"])
    # every pair of different quality was asked about in both orders, as whole clips
    assert found["compared"]["value"] == pytest.approx(expected["preference"])
    assert np.sum(found["confusion"]) == 4 and found["confusion"][0][0] == 1
    assert row["figures"]["scores"]["voc"]["value"] == pytest.approx(1.0)
    assert row["tasks"].keys() == {name} and row["figures"]["scores"]["auc"]["value"] is not None


def test_clips_of_two_sizes_are_asked_about_and_frozen(folder, tmp_path):
    wide = [
        {"video": "clips/wide.mp4", "task": RED, "reward": 5},
        {"video": "clips/wide.mp4", "task": BLUE, "reward": 1},
    ]
    write_table(folder / "sizes.csv", [*ROBOREWARD, *wide])
    suite = find_suite(str(folder / "sizes.csv"))
    live = summarise(measure(suite, Light(), JudgeConfig(), num_frames=4))
    assert np.sum(live["figures"]["published"]["confusion"]) == 6 and live["bench"]["truth"] == {}
    freeze(suite, tmp_path / "sizes.zip", num_frames=4, size_px=300, asks_turns=False, seed=0)
    asked = summarise(measure(find_suite(str(tmp_path / "sizes.zip")), Light(), JudgeConfig(), num_frames=4))
    assert asked["figures"]["published"] == live["figures"]["published"]


def test_episodes_of_lerobot_by_hand(tmp_path):
    """Two successes, each with what is cut of it (3 and 5 stars), and a failure that looks like a quarter of one."""
    shown = [(20 + 200 * end * np.arange(13) / 12).round().astype(np.uint8) for end in (1.0, 1.0, 0.25)]
    robot = [
        (
            np.zeros((13, 7), np.float32),
            np.ones((13, 8), np.float32),
            np.tile(each[:, None, None, None, None], (1, 2, 8, 8, 3)),
        )
        for each in shown
    ]
    write_lerobot(tmp_path / "data", "v3.0", robot, "image", lost=[2])
    found = summarise(measure(find_suite(str(tmp_path / "data")), Light(), JudgeConfig(), num_frames=4))["figures"]
    published = found["published"]
    assert published["mae"]["value"] == pytest.approx(1 / 7) and published["confusion"][0] == [0, 1, 0, 0, 0]
    assert [published["confusion"][place][place] for place in range(5)] == [0, 0, 2, 0, 4]
    assert published["preference"] == published["kendall_tau"] == found["scores"]["voc"]["value"] == 1


def test_truth_is_read_as_tools_write_it(folder):
    # pandas writes a column of booleans with a gap as floats
    for text, success in (("1.0", True), ("0.0", False), ("True", True), ("no", False), ("NaN", None), (None, None)):
        write_table(folder / "said.csv", [{"file_name": ROBOREWARD[0]["video"], "goal": "push it", "success": text}])
        (episode,) = Recordings(path=folder / "said.csv", form=find_form(folder / "said.csv"))
        assert isinstance(episode, RobotTrajectory) and episode.success is success, text


BAD = [
    ({"video": "clips/torn.mp4"}, "missing or torn"),
    ({"video": "clips/text.mp4"}, "missing or torn"),
    ({"video": "clips/none.mp4"}, "missing or torn"),
    ({"video": "../elsewhere.mp4"}, "lies outside of"),
    ({"video": ""}, "names no video"),
    ({"reward": 6}, "its reward is 1, 2, 3, 4 or 5, got '6'"),
    ({"reward": "many"}, "could not convert"),
    ({"quality_label": "fine"}, "its quality_label is one of"),
    ({"partial_success": 1.5}, "its partial_success is in"),
    ({"success": "maybe"}, "its success is true, false or empty"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[str(change) for change, _ in BAD])
def test_a_row_that_cannot_be_used_is_counted_with_its_line(folder, change, message):
    write_table(folder / "bad.csv", [ROBOREWARD[0], ROBOREWARD[1] | change, ROBOREWARD[2]])
    good, bad, last = Recordings(path=folder / "bad.csv", form=find_form(folder / "bad.csv"))
    assert isinstance(good, RobotTrajectory) and isinstance(last, RobotTrajectory) and good.quality == 1.0
    assert isinstance(bad, CorruptEpisode) and bad.reason.startswith("bad.csv, line 3: ") and message in bad.reason
    row = summarise(measure(find_suite(str(folder / "bad.csv")), Light(), JudgeConfig(), num_frames=4))
    assert row["bench"]["truth"]["bad.csv"].startswith("1 recorded episodes are left out: bad.csv, line 3: ")


def test_an_empty_task_is_counted(folder):
    write_table(folder / "empty.csv", [*ROBOREWARD, ROBOREWARD[1] | {"task": "  "}])
    row = summarise(measure(find_suite(str(folder / "empty.csv")), Light(), JudgeConfig(), num_frames=4))
    assert row["bench"]["truth"]["empty.csv"].endswith("clips/b.mp4: its task is empty")
    assert np.sum(row["figures"]["published"]["confusion"]) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("table.csv", b"clip,task\na.mp4,x\n", "names no video: .*got clip, task"),
        ("table.csv", b"video,task\n\xff\xfe,x\n", "utf-8"),
        ("table.csv", b"video,task,reward\na.mp4,x\n" * 1, None),
        ("table.parquet", b"PAR1 and no more", "ArrowInvalid|ValueError"),
    ],
)
def test_a_table_without_its_columns_is_refused_by_name(folder, name, content, message):
    path = folder / name
    path.write_bytes(content)
    films = iter(Recordings(path=path, form="videos"))
    if message is None:  # only the row is wrong
        assert isinstance(next(films), CorruptEpisode)
        return
    with pytest.raises(UsageError, match=f"(?s){name} cannot be read: .*{message}"):
        next(films)


def test_labels_that_say_nothing_of_success_need_a_rule(folder):
    write_table(folder / "none.csv", [{"video": "clips/a.mp4", "task": BLUE}])
    with pytest.raises(UsageError, match="does not say whether"):
        measure(find_suite(str(folder / "none.csv")), Light(), JudgeConfig(), num_frames=4)


def test_arithmetic_against_scipy():
    rng = np.random.default_rng(0)
    goals = [f"task {number}" for number in rng.integers(4, size=60)]
    table = np.stack([rng.integers(3, size=60) / 2, rng.random(60)], axis=1)
    taus = []
    for goal in set(goals):
        own = table[[place for place, other in enumerate(goals) if other == goal]]
        levels = [own[own[:, 0] == level, 1] for level in (0.0, 0.5, 1.0)]
        found: list[Any] = [kendalltau((1, 2, 3), each) for each in itertools.product(*levels)]
        taus.append(np.mean([each.statistic for each in found]))
    assert ranking_tau(goals, table) == pytest.approx(np.mean(taus))
    # of one task with two qualities preference accuracy is the area under the curve, Mann-Whitney's U
    two = table[table[:, 0] != 0.5]
    good = two[:, 0] == 1
    u = rankdata(two[:, 1])[good].sum() - good.sum() * (good.sum() + 1) / 2
    assert preference_accuracy(["t"] * len(two), two) == pytest.approx(u / (good.sum() * (~good).sum()))
    tied = np.array([[0.0, 0.3], [1.0, 0.3]])
    assert preference_accuracy(["t", "t"], tied) == 0.5 and ranking_tau(["t", "t"], tied) == 0.0
    # tau-a, by hand: thirds with mean scores .4, .4 and .9 are one equal pair and two in order; tau-b would be .82
    thirds = np.array([[0.1, 0.3], [0.2, 0.5], [0.5, 0.4], [0.9, 0.9]])
    assert ranking_tau(["t"] * 4, thirds) == pytest.approx(2 / 3)
    assert preference_accuracy(["t", "u"], tied) is None and ranking_tau(["t", "u"], tied) is None
    np.testing.assert_array_equal(ratings(np.array([0, 0.125, 0.25, 0.375, 0.5, 1])), [1, 1, 2, 3, 3, 5])
    np.testing.assert_array_equal(np.argwhere(confusion(np.array([[5, 4], [1, 1], [5, 4]]))), [[0, 0], [4, 3]])


def test_pairs_are_of_one_task_and_of_different_quality(folder):
    rows = [
        *ROBOREWARD,
        {"video": "clips/a.mp4", "task": RED, "reward": 5},
        {"video": "clips/b.mp4", "task": RED, "reward": 5},
    ]
    write_table(folder / "pairs.csv", rows)
    found = measure(find_suite(str(folder / "pairs.csv")), Light(), JudgeConfig(), num_frames=4)
    pairs = [item for item in found.made["pairs.csv"].items if item.case == "pair"]
    assert len(pairs) == 6 and {item.goal for item in pairs} == {BLUE} and all(item.gap for item in pairs)
    assert all(len(side) == FRAMES for item in pairs for side in item.sides)
    assert json.dumps(summarise(found)["figures"]["published"]) and isinstance(pairs[0], Item)
