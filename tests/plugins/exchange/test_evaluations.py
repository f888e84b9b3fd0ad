"""Others' evaluations as data: is the grader right, from each camera, in either order, and where nothing moves?"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import needs, run

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Label, Score, Stamp, Status, Verdict
from rlvlm.demonstrations.recordings import Recordings, find_form
from rlvlm.demonstrations.trajectory import CorruptEpisode
from rlvlm.judge_bench.bench import measure, summarise
from rlvlm.judge_bench.suites import find_suite
from rlvlm.judges.config import JudgeConfig
from rlvlm.plugins.exchange.evaluations import is_evaluation
from tests.judge_bench.test_tables import film

GOAL = "make the lamp bright"
CONTROLS = ("where another camera shows it", "prefers the left image", "in which nothing happens")


def write_log(folder: Path, truths: list[bool], **changes: Any) -> Path:
    """A log of inspect-robots: trials of a lamp from grey 20 to 220, or to 60, from two cameras; one is reddish."""
    frames = folder / "frames" / "run1"
    frames.mkdir(parents=True)
    for number, is_success in enumerate(truths):
        for t, level in enumerate(np.linspace(20, 220 if is_success else 60, 6).astype(np.uint8)):
            for camera, red in (("front", 0), ("wrist", 20)):
                image = np.full((16, 16, 3), level, np.uint8)
                image[..., 0] += red
                np.save(frames / f"lamp{number}-e0_{camera}_{t:06d}.npy", image)
    samples = [
        {"scene_id": f"lamp{n}", "status": "success", "instruction": GOAL, "epochs": [{"success_at_end": float(truth)}]}
        for n, truth in enumerate(truths)
    ]
    samples[0] |= {"operator_judgements": ["failure"], "judgement_sources": ["vlm"]}
    log = {
        "version": 1, "status": "success", "eval": {}, "results": {}, "samples": samples,
        "stats": {"frames_dir": "C:\\elsewhere\\frames\\run1"},
    }  # fmt: skip
    path = folder / "lamp_1.json"
    path.write_text(json.dumps(log | changes))
    return path


class Light:
    """Scores the last image's green, 20 to 220 as 0 to 1, and compares by it; `fault` is what it does wrong."""

    stamp = Stamp(judge="light", revision="", prompt="none", decoding="")

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def value(self, frames) -> float:
        if self.fault == "still" and len(frames) > 1 and (frames == frames[0]).all():
            return 1.0
        value = float(np.clip((frames[-1, ..., 1].mean() - 20) / 200, 0, 1))
        is_wrist = frames[-1, 0, 0, 0] > frames[-1, 0, 0, 1]
        return 1 - value if self.fault == "camera" and is_wrist else value

    def compare(self, queries):
        def label(query) -> Label:
            return Label.LEFT if self.fault == "order" else Label.of(self.value(query.left), self.value(query.right))

        labels = [label(query) for query in queries]
        return [Verdict(status=Status.of(label), label=label, stamp=self.stamp) for label in labels]

    def score(self, clips):
        return [Score(status=Status.OK, value=self.value(clip.frames), stamp=self.stamp) for clip in clips]


def test_a_log_of_inspect_robots_is_read_with_the_truth_and_not_a_models_verdict(tmp_path):
    path = write_log(tmp_path, [True, False])
    assert is_evaluation(path) and find_form(path) == "evaluation"
    first, second = Recordings(path=path, form="evaluation")
    assert not isinstance(first, CorruptEpisode) and not isinstance(second, CorruptEpisode)
    # a model graded the first trial a failure: that is no truth
    assert [first.success, second.success] == [True, False] and first.instruction == GOAL
    images = first.images(np.array([0, 5]))
    assert images.shape == (2, 2, 16, 16, 3) and images[1, :, 0, 0].tolist() == [[220] * 3, [240, 220, 220]]
    (wrist, _) = Recordings(path=path, form="evaluation", camera="wrist")
    assert not isinstance(wrist, CorruptEpisode) and wrist.images(np.array([0]))[0, 0, 0, 0].tolist() == [40, 20, 20]
    with pytest.raises(UsageError, match="no camera top; it has front, wrist"):
        list(Recordings(path=path, form="evaluation", camera="top"))


def test_the_operators_word_is_the_truth_and_a_trial_without_frames_is_left_out(tmp_path):
    path = write_log(tmp_path, [False, True, True])
    log = json.loads(path.read_text())
    log["samples"][0] |= {"operator_judgements": ["Success "], "judgement_sources": ["prompt"]}
    log["samples"][1]["epochs"] = [{}]
    path.write_text(json.dumps(log))
    for file in (tmp_path / "frames").rglob("lamp2*"):
        file.unlink()
    first, second, third = Recordings(path=path, form="evaluation")
    assert [getattr(trial, "success", "?") for trial in (first, second)] == [True, None]
    assert isinstance(third, CorruptEpisode) and "lamp2-e0: there are no frames" in third.reason
    with pytest.raises(UsageError, match="schema version 2, and 1 is read"):
        list(Recordings(path=write_log(tmp_path / "new", [True], version=2), form="evaluation"))


def test_films_of_lerobot_eval_have_the_simulators_success(tmp_path):
    for number, last in enumerate((220, 60)):
        (tmp_path / "videos").mkdir(exist_ok=True)
        film(tmp_path / "videos" / "libero_10_3" / f"eval_episode_{number}.mp4", last)
    paths = [f"/their/outputs/videos/libero_10_3/eval_episode_{number}.mp4" for number in range(3)]
    metrics = {"sum_rewards": [1, 0, 0], "successes": [True, False, False], "video_paths": paths}
    info = {"per_task": [{"task_group": "libero_10", "task_id": 3, "metrics": metrics}], "overall": {}}
    (tmp_path / "eval_info.json").write_text(json.dumps(info))
    first, second, third = Recordings(path=tmp_path, form=find_form(tmp_path), goal=GOAL)
    assert [(trial.name, trial.success, trial.instruction) for trial in (first, second)] == [
        ("libero_10_3/0", True, GOAL),
        ("libero_10_3/1", False, GOAL),
    ]
    assert first.images(np.array([5])).mean() > 200
    assert isinstance(third, CorruptEpisode) and "eval_episode_2.mp4" in third.reason


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "named"), [("", ""), *zip(("camera", "order", "still"), CONTROLS, strict=True)])
def test_a_grader_is_held_to_each_camera_either_order_and_a_scene_where_nothing_moves(tmp_path, fault, named):
    path = write_log(tmp_path, [True, False] * 12)
    found = measure(find_suite(str(path)), Light(fault), JudgeConfig(backend="mine:Light"), num_frames=6)
    row = summarise(found)
    said = [f"{one['name']}: {one['evidence']}" for one in row["faults"]]
    of_controls = {key for key in CONTROLS for line in said if key in line}
    assert of_controls == ({named} if named else set()), said


@needs("inspect")
@pytest.mark.slow
def test_a_log_that_inspect_robots_itself_wrote_is_read(tmp_path):
    program = """
import inspect_robots as ir
from inspect_robots.mock.cubepick import CubePickEmbodiment
from inspect_robots.mock.policies import NoopPolicy, ScriptedPolicy
from inspect_robots.scene import Scene
from inspect_robots.task import Task
scenes = [Scene(id=f"cube {n}", instruction="reach the cube", init_seed=n) for n in range(2)]
for policy, name in ((ScriptedPolicy(), "good"), (NoopPolicy(), "still")):
    task = Task(name=name, scenes=scenes, scorer="success_at_end", max_steps=20, epochs=2)
    ir.eval(task, policy, CubePickEmbodiment(), log_dir="logs", store_frames=True)
"""
    run("inspect", program, tmp_path)
    logs = {path.name.partition("_")[0]: path for path in (tmp_path / "logs").glob("*.json")}
    for name, truth in (("good", True), ("still", False)):
        trials = list(Recordings(path=logs[name], form=find_form(logs[name])))
        assert [getattr(trial, "success", trial) for trial in trials] == [truth] * 4
        assert [trial.name for trial in trials] == ["cube 0-e0", "cube 0-e1", "cube 1-e0", "cube 1-e1"]
        images = trials[0].images(np.arange(len(trials[0].actions)))
        assert images.shape[1:] == (1, 32, 32, 3) and bool(np.ptp(images, axis=0).any()) == truth
