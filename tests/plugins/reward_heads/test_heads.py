"""Reward models with heads: hand-made numbers, where they are read, what they see, loading, and the judge."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plugins.reward_heads.tiny_reward_models import save_tiny_robometer, save_tiny_rynnvalue
from safetensors.torch import load_file, save_file

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion, UsageError
from rlvlm.core.judging import Clip, Label, Query, Status
from rlvlm.judges import prompts
from rlvlm.judges.build import abilities_of, build_judge
from rlvlm.judges.config import JudgeConfig, backends
from rlvlm.judges.numeric import NumericJudge
from rlvlm.plugins.reward_heads import robometer, rynnvalue
from rlvlm.reports.options import BenchOptions, parse_judged
from rlvlm.testing import check_judge

CLIP = Clip(goal="open the drawer", frames=np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), np.uint8))
QUERY = Query(goal=CLIP.goal, left=CLIP.frames[:1], right=CLIP.frames[1:])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("reward_models")
    made = {"robometer": save_tiny_robometer, "rynnvalue": save_tiny_rynnvalue}
    return {name: save(root / name) for name, save in made.items()}


def judge_of(folder: Path, **settings: Any) -> Any:
    return build_judge(JudgeConfig(**{"backend": folder.name, "model": str(folder), "batch_size": 3, **settings}))


def answer_always(judge: NumericJudge, **biases: list[float]) -> None:
    """Makes the heads of a Robometer say the same whatever they see."""
    for name, bias in biases.items():
        last = getattr(judge._model._model.model, name)[4]  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            last.weight.zero_()
            last.bias.copy_(torch.tensor(bias))


def test_robometer_is_the_mean_of_its_bins_and_two_sigmoids(folders):
    # by hand: bins 0 and 9 of ten at 1/4 and 3/4 are 0 and 1, so 3/4; sigmoid(log 4) = 4/5; sigmoid(-log 9) = 1/10
    progress, success = judge_of(folders["robometer"]), judge_of(folders["robometer"], score="success")
    for judge in (progress, success):
        bins = [math.log(0.25), *[-1e9] * 8, math.log(0.75)]
        answer_always(judge, progress_head=bins, success_head=[math.log(4)], preference_head=[-math.log(9)])
    assert progress.score([CLIP])[0].value == pytest.approx(0.75)
    assert success.score([CLIP])[0].value == pytest.approx(0.8)
    assert progress.score([CLIP])[0].text == "progress 0.750, success 0.800"
    verdict = progress.compare([QUERY])[0]
    assert verdict.label is Label.RIGHT and verdict.probabilities == pytest.approx((0.1, 0.9, 0.0))
    answer_always(progress, preference_head=[0.0])
    assert progress.compare([QUERY])[0].status is Status.NO_PREFERENCE


def test_seconds_are_read_in_symlog():
    # by hand: half in the first and half in the last of 256 bins is half of log 513, which is sqrt(513) - 1 seconds
    logits = torch.full((256,), -1e9)
    logits[[0, -1]] = 0.0
    assert rynnvalue.seconds_of(logits, 0.0, 512.0).item() == pytest.approx(math.sqrt(513) - 1, rel=1e-5)
    assert rynnvalue.seconds_of(logits, -256.0, 256.0).item() == pytest.approx(0.0, abs=1e-4)


def test_less_time_left_is_a_higher_score_and_the_nearer_side(folders):
    judge = judge_of(folders["rynnvalue"])
    scores = judge.score([replace(CLIP, frames=CLIP.frames[: 1 + number]) for number in range(5)])
    seconds = [float(score.text.split()[0]) for score in scores]
    assert len(set(seconds)) == 5
    assert np.argsort([score.value for score in scores]).tolist() == np.argsort(seconds)[::-1].tolist()
    assert scores[0].value == pytest.approx(1 - math.log1p(seconds[0]) / math.log1p(512), abs=1e-3)
    verdict = judge.compare([QUERY])[0]
    left, right = (float(part.split()[0]) for part in verdict.text.removesuffix(" left").split(" and "))
    assert verdict.label is (Label.LEFT if left < right else Label.RIGHT) and verdict.probabilities is None


def test_groups_are_runs_of_equal_tokens_and_see_what_the_paper_says():
    groups = rynnvalue.group_tokens(torch.tensor([[5, 8, 8, 6, 9, 9, 8, 8]]), [8, 9])
    assert groups.tolist() == [[-1, 0, 0, -1, 1, 1, 2, 2]]
    there = torch.tensor([[False, True, True, True, True, True, True, True]])
    seen = rynnvalue.open_pairs(there, groups)[0]
    assert seen[1].nonzero()[:, 0].tolist() == [1, 2]  # its own group, later ones too; padding never
    assert seen[3].nonzero()[:, 0].tolist() == [3]  # no group before it
    assert seen[7].nonzero()[:, 0].tolist() == [3, 6, 7]


def test_no_value_depends_on_another_group(folders):
    judge = judge_of(folders["rynnvalue"])
    before = judge.score([CLIP])[0].value
    model = judge._model._model
    table = model.model.model.language_model.embed_tokens.weight
    with torch.no_grad():
        table[model.token_id(rynnvalue.RELATIVE)] += 5.0
    assert judge.score([CLIP])[0].value == pytest.approx(before, abs=1e-5)
    with torch.no_grad():
        table[model.token_id(rynnvalue.VALUE)] += 5.0
    assert judge.score([CLIP])[0].value != pytest.approx(before, abs=1e-4)


@pytest.mark.parametrize("name", ["robometer", "rynnvalue"])
def test_a_batch_is_its_clips_one_by_one_and_eight_frames_are_shown(folders, name):
    judge = judge_of(folders[name])
    clips = [CLIP, replace(CLIP, frames=CLIP.frames[:2], goal="close it"), replace(CLIP, frames=CLIP.frames[:1])]
    together = [score.value for score in judge.score(clips)]
    alone = [judge.score([clip])[0].value for clip in clips]
    assert together == pytest.approx(alone, abs=1e-5)
    long = replace(CLIP, frames=np.random.default_rng(1).integers(0, 256, (20, 32, 32, 3), np.uint8))
    picked = replace(long, frames=long.frames[np.linspace(0, 19, 8).round().astype(int)])
    assert judge.score([long])[0].value == pytest.approx(judge.score([picked])[0].value, abs=1e-6)


@pytest.mark.parametrize("name", ["robometer", "rynnvalue"])
def test_the_presets_of_app_files_are_these_judges(folders, name):
    words = ["--judge.preset", f"{name}_4b", "--judge.model", str(folders[name]), "--judge.dtype", "float32"]
    config = parse_judged(BenchOptions, words, "rlvlm judge-bench").judge
    assert config.backend == name and build_judge(config).score([CLIP])[0].status is Status.OK


def test_tokens_stand_where_the_authors_put_them(folders):
    judge = judge_of(folders["robometer"])
    model = judge._model
    parts = model._progress_chat(CLIP)[0]["content"]
    assert [part.get("text", "image") for part in parts[1:]] == ["image", robometer.PROGRESS] * 5
    texts = [part.get("text", "image") for part in model._preference_chat(QUERY)[0]["content"]]
    assert texts.index(robometer.SPLIT) == 4 and texts[-1] == robometer.PREFERENCE
    assert texts.count(robometer.PROGRESS) == 5
    first = len(model._model.processor.tokenizer) - len(robometer.TOKENS)
    assert [model._model.token_id(token) - first for token in robometer.TOKENS] == [0, 1, 2, 3, 4]


def test_weights_by_lerobots_names_are_the_same_model(folders, tmp_path):
    own, copy = folders["robometer"], tmp_path / "robometer"
    copy.mkdir()
    for file in own.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = load_file(own / "model.safetensors")
    renamed = {f"model.{name}" if name.startswith("model.") else name: value for name, value in weights.items()}
    renamed["model.lm_head.weight"] = weights["model.language_model.embed_tokens.weight"].clone()
    save_file(renamed, copy / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((own / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({"type": "robometer", "vlm_config": content}))
    assert judge_of(copy).score([CLIP])[0].value == pytest.approx(judge_of(own).score([CLIP])[0].value, abs=1e-6)


def test_a_residual_head_and_several_heads_are_built_from_the_config(tmp_path):
    head = {"head_type": "bro", "hidden_dims": 12, "depth": 2, "activation": "gelu"}
    folder = save_tiny_rynnvalue(tmp_path / "rynnvalue", value_head_config=head, num_value_heads=2)
    names = set(load_file(folder / "model.safetensors"))
    assert {"value_heads.1.proj.blocks.1.ln2.weight", "value_heads.0.proj.final_layer.bias"} <= names
    assert judge_of(folder).score([CLIP])[0].status is Status.OK


def test_unusable_models_and_questions_are_refused(folders, tmp_path):
    with pytest.raises(UnsupportedQuestion, match="cannot be asked with judge.score success"):
        judge_of(folders["rynnvalue"], score="success")
    with pytest.raises(UnsupportedQuestion, match="4-bit"):
        judge_of(folders["robometer"], quantization="nf4")
    with pytest.raises(JudgeUnavailable, match="not 'rynn_value_lang'"):
        build_judge(JudgeConfig(backend="rynnvalue", model=str(folders["robometer"])))
    broken = save_tiny_robometer(tmp_path / "robometer")
    weights = load_file(broken / "model.safetensors")
    for change, words in (
        ({"success_head.0.bias": None}, "lacks 1 weights of a .* such as success_head.0.bias"),
        ({"other_head.0.bias": torch.zeros(1)}, "has too many: 1 weights of a .* such as other_head.0.bias"),
    ):
        kept = {name: value for name, value in {**weights, **change}.items() if value is not None}
        save_file(kept, broken / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(JudgeUnavailable, match=words):
            judge_of(broken)
    failed = judge_of(folders["robometer"]).score([replace(CLIP, goal_picture=CLIP.frames[:1]), CLIP])
    assert [score.status for score in failed] == [Status.FAILED, Status.OK]


def test_published_sentences_take_the_place_of_ours(folders, tmp_path):
    file = tmp_path / "wording.json"
    file.write_text(json.dumps({"robometer_progress": "How far is '{goal}'?"}))
    judge = judge_of(folders["robometer"], wording=str(file))
    assert judge._model._progress_chat(CLIP)[0]["content"][0]["text"] == "How far is 'open the drawer'?"
    assert judge.stamp.prompt != judge_of(folders["robometer"]).stamp.prompt
    for text, words in (
        ('{"robometer": "{goal}"}', "known are statement"),
        ('{"rubric": "no slot"}', "must have"),
        ("[1]", "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=words):
            judge_of(folders["robometer"], wording=str(file))
    with pytest.raises(ValueError, match="no effect on judge.score progress"):
        JudgeConfig(wording=str(file))
    assert prompts.wording_mark(JudgeConfig()) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["robometer", "rynnvalue"])
def test_each_keeps_the_contract_of_a_judge(folders, name):
    judge = judge_of(folders[name])
    check_judge(judge)
    frames = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), np.uint8)
    [score] = judge.score([Clip(goal="open the drawer", frames=frames)])
    assert score.num_frames == (0 if score.status is Status.FAILED else 8)


def test_properties_known_before_loading_match_the_models():
    for name, model in (("robometer", robometer.Robometer), ("rynnvalue", rynnvalue.RynnValue)):
        assert abilities_of(name, "").goal_pictures == model.abilities.goal_pictures
        sentences = backends()[name].sentences
        assert sentences and all(key.startswith(name) for key in sentences)
