"""One trainer for four datasets, at a scale of seconds: the loss falls, a seed repeats itself, the weights load."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_clips import LONG, SHORT, make_clips, make_scenes
from torch import nn

from pocket_models.evaluate import video_figures
from pocket_models.judge import JudgeData
from pocket_models.policy import PolicyData
from pocket_models.scenes import Scenes
from pocket_models.scorer import ScorerData
from pocket_models.train import CONFIGS, TrainConfig, Trainer, hold_then_fall, muon_and_adamw
from pocket_models.video import VideoData
from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.judges.build import ABILITIES_FILE, build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.loading import load_policy

FILES = {
    *("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"),
    *("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"),
}


def bars(split: str, seed: int) -> Iterator[Scenes]:
    yield from (make_scenes(), make_scenes(topic=SHORT))


def train(config: TrainConfig, out: Path) -> Trainer:
    trainer = Trainer(replace(config, out=out))
    trainer.train()
    return trainer


def test_step_sizes_and_optimizers_worked_by_hand():
    assert [hold_then_fall(step, 100) for step in (0, 9, 70, 85, 99)] == pytest.approx([0.1, 1, 1, 0.5, 1 / 30])
    assert hold_then_fall(24, 1_000) == 0.5  # 50 steps at most to warm up
    layers, head = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 2)
    muon, adamw = muon_and_adamw(layers, [*layers.parameters(), *head.parameters()], lr=0.1)
    assert [group["params"] for group in muon.param_groups] == [[layers[0].weight]]
    others = [id(one) for one in (layers[0].bias, layers[1].weight, layers[1].bias, head.weight, head.bias)]
    assert [id(one) for one in adamw.param_groups[0]["params"]] == others
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.2, 0.1)


def test_a_vision_encoder_must_come_from_somewhere():
    with pytest.raises(ValueError, match="--start"):
        replace(CONFIGS["policy"], vision_steps=0)
    with pytest.raises(ValueError, match="language_steps must be >= 1"):
        replace(CONFIGS["judge"], language_steps=0)


@pytest.mark.slow
def test_a_judge_learns_repeats_itself_and_replaces_the_old_folder_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_bars", sys.modules[__name__])
    short = replace(CONFIGS["judge"], data=JudgeData(scenes="own_bars:bars"), vision_batch=6, language_batch=3)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "stale.txt").write_text("old")
    few = replace(short, vision_steps=2, language_steps=2)
    first, again = (train(few, tmp_path / name).metrics for name in ("first", "again"))
    assert {path.name for path in (tmp_path / "first").iterdir()} == FILES
    longer = train(replace(short, vision_steps=50, language_steps=20), tmp_path / "longer").metrics
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["again", "first", "longer"]
    assert longer["vision"]["loss"] < 0.8 * first["vision"]["loss"]
    assert longer["language"]["direct"] < 0.8 * first["language"]["direct"]
    assert first == again
    weights, same = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "again"))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert all(weight.dtype is torch.bfloat16 for weight in weights.values())
    assert LONG[0] in {each.goal for each in bars("train", 0)}


@pytest.mark.slow
def test_a_scorer_and_a_video_judge_say_what_they_may_be_asked(tmp_path):
    scorer = replace(CONFIGS["scorer"], data=ScorerData(moves=40, pushes=6), vision_batch=8, language_batch=8)
    train(replace(scorer, vision_steps=1, language_steps=2), tmp_path / "scorer")
    made = build_judge(JudgeConfig(model=str(tmp_path / "scorer"), score="success"))
    assert made.stamp.judge.startswith("pocket:")
    with pytest.raises(UnsupportedQuestion, match="judge.score progress, it knows success, utility"):
        build_judge(JudgeConfig(model=str(tmp_path / "scorer")))
    (tmp_path / "scorer" / ABILITIES_FILE).write_text("{}")
    with pytest.raises(JudgeUnavailable, match="cannot be read"):
        build_judge(JudgeConfig(model=str(tmp_path / "scorer"), score="success"))
    make_clips().save(tmp_path / "clips.npz")
    video = replace(CONFIGS["video"], data=VideoData(clips=tmp_path / "clips.npz"), vision_batch=4, language_batch=4)
    train(replace(video, vision_steps=2, language_steps=2), tmp_path / "video")
    judge = build_judge(JudgeConfig(model=str(tmp_path / "video"), score="success"))
    assert video_figures(judge, make_clips(), 2)["unanswered"] == 0
    with pytest.raises(UnsupportedQuestion, match="it knows success"):
        build_judge(JudgeConfig(model=str(tmp_path / "video")))


@pytest.mark.slow
def test_a_policy_goes_on_with_a_vision_encoder_that_stays_as_it_was(tmp_path):
    data = PolicyData(tasks=("number_line",), moments=60, held_out=20)
    config = replace(CONFIGS["policy"], data=data, vision_steps=3, language_steps=3, vision_batch=6, language_batch=6)
    trainer = train(config, tmp_path / "first")
    assert "held_out/number_line" in trainer.metrics["vision"]
    assert load_policy(PolicyConfig(model=str(tmp_path / "first"), learns="all", device="cpu")).stop_id > 0
    train(replace(config, start=tmp_path / "first", vision_steps=0), tmp_path / "on")
    first, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "on"))
    changed = {name for name in first if not first[name].equal(after[name])}
    assert changed and not any("visual" in name for name in changed)
    assert np.isfinite(trainer.metrics["language"]["replies"])
