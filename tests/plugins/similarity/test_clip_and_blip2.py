"""The real networks at toy size, held to their own forward passes."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from plugins.similarity.tiny_encoders import save_tiny_encoder
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, Blip2ForImageTextRetrieval

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.core.judging import Clip, Label, Query, Status
from rlvlm.judges.asking import AdaptiveBatches
from rlvlm.judges.build import abilities_of, build_judge
from rlvlm.judges.config import JudgeConfig, SimilarityConfig
from rlvlm.plugins.similarity.baseline import baseline_reward, unit
from rlvlm.plugins.similarity.blip2 import Blip2Rater
from rlvlm.plugins.similarity.clip import ClipRater
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.testing import check_judge

FAMILIES = ("clip", "siglip", "blip2")
BACKEND = {"clip": "clip", "siglip": "clip", "blip2": "blip2"}
GOALS = ["an open drawer", "a"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    return {family: save_tiny_encoder(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (5, 32, 40, 3), np.uint8)


def judge(folders: dict[str, Path], family: str, **changes):
    similarity = changes.pop("similarity", SimilarityConfig())
    return build_judge(
        JudgeConfig(backend=BACKEND[family], model=str(folders[family]), device="cpu", similarity=similarity, **changes)
    )


def scores(one, images: np.ndarray, goal: str = GOALS[0], goal_picture: np.ndarray | None = None) -> np.ndarray:
    clips = [Clip(goal=goal, frames=image[None], goal_picture=goal_picture) for image in images]
    return np.array([score.value for score in one.score(clips)])


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_a_score_is_the_models_own_cosine(folders, images, family, goal):
    model, tokenizer = AutoModel.from_pretrained(folders[family]), AutoTokenizer.from_pretrained(folders[family])
    seen = AutoImageProcessor.from_pretrained(folders[family])(images=list(images), return_tensors="pt")
    is_padded = family == "siglip"  # trained on texts of one length, unmasked
    text = tokenizer([goal], return_tensors="pt", **({"padding": "max_length", "max_length": 64} if is_padded else {}))
    read = {"input_ids": text["input_ids"]} if is_padded else text
    with torch.no_grad():
        logits = model(**seen, **read).logits_per_image[:, 0] - (model.logit_bias if is_padded else 0)
    cosines = (logits / model.logit_scale.exp()).detach().numpy()
    np.testing.assert_allclose(scores(judge(folders, family), images, goal), (1 + cosines) / 2, atol=1e-6)


@pytest.mark.parametrize("head", ["match", "contrast"])
@pytest.mark.parametrize("has_query_places", [False, True])
def test_blip2s_score_does_not_depend_on_its_batch(tmp_path, images, has_query_places, head):
    """The matching head's probability, or the cosine."""
    folder = save_tiny_encoder(tmp_path, "blip2", has_query_places=has_query_places)
    model, tokenizer = Blip2ForImageTextRetrieval.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if head == "contrast":
        model.config.image_token_index = None  # of the bare text, no places have to be taken off
    process = AutoImageProcessor.from_pretrained(folder)
    one = judge({"blip2": folder}, "blip2", similarity=SimilarityConfig(head=head))
    assert ("head=contrast" in one.stamp.decoding) == (head == "contrast")
    clips = [Clip(goal=GOALS[at % 2], frames=image[None]) for at, image in enumerate(images)]
    mixed = [score.value for score in one.score(clips)]  # goals of unequal length, padded
    for clip, value in zip(clips, mixed, strict=True):
        text = tokenizer([clip.goal], return_tensors="pt")
        if has_query_places and head == "match":
            places = torch.full((1, 4), tokenizer.convert_tokens_to_ids("<|image_pad|>"))
            pairs = {"input_ids": places, "attention_mask": torch.ones_like(places)}
            text = {name: torch.cat([front, text[name]], 1) for name, front in pairs.items()}
        with torch.no_grad():
            seen = process(images=[clip.frames[0]], return_tensors="pt")
            own = model(**seen, **text, use_image_text_matching_head=head == "match").logits_per_image
        wanted = own.softmax(-1)[0, 1] if head == "match" else (1 + own) / 2
        assert value == pytest.approx(float(wanted), abs=1e-5)
    assert len(set(mixed)) == 5


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_change_nothing(folders, images, family):
    values = [scores(judge(folders, family, batch_size=size), images) for size in (1, 2, 16)]
    np.testing.assert_allclose(values[0], values[1], atol=1e-6)
    np.testing.assert_allclose(values[0], values[2], atol=1e-6)
    assert np.ptp(values[0]) > 1e-3, "images differ"


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_the_image_of_the_goal_fits_itself_best(folders, images, family):
    one = judge(folders, family)
    values = scores(one, images, goal_picture=images[2:3])
    assert values[2] == pytest.approx(1.0, abs=1e-6) and values.argmax() == 2
    queries = [
        Query(goal="open it", left=images[2:3], right=images[i : i + 1], goal_picture=images[2:3]) for i in (0, 1, 3)
    ]
    assert [v.label for v in one.compare(queries)] == [Label.LEFT] * 3


def test_a_baseline_changes_the_score_and_the_stamp(folders, images):
    plain = judge(folders, "clip")
    projected = judge(folders, "clip", similarity=SimilarityConfig(baseline="a drawer", alpha=1.0))
    unused = judge(folders, "clip", similarity=SimilarityConfig(baseline="a drawer", alpha=0.0))
    np.testing.assert_allclose(scores(plain, images), scores(unused, images), atol=1e-6)
    assert np.abs(scores(plain, images) - scores(projected, images)).max() > 1e-3
    assert "baseline='a drawer' alpha=1" in projected.stamp.decoding and plain.stamp != projected.stamp


def test_blip2_has_no_goal_images_and_no_baseline(folders, images):
    one = judge(folders, "blip2")
    query = Query(goal="open it", left=images[:1], right=images[1:2], goal_picture=images[:1])
    assert one.compare([query])[0].status is Status.FAILED
    with pytest.raises(ValueError, match="baseline needs vectors"):
        judge(folders, "blip2", similarity=SimilarityConfig(baseline="a drawer"))


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_agrees_with_whole(folders, images, family):
    half, whole = (scores(judge(folders, family, dtype=dtype), images) for dtype in ("bfloat16", "float32"))
    np.testing.assert_allclose(half, whole, atol=0.05)


@pytest.mark.slow
def test_an_unusable_model_is_refused_with_the_reason(folders, tmp_path):
    with pytest.raises(JudgeUnavailable, match="no judge at"):
        judge({"clip": tmp_path / "none"}, "clip")
    (tmp_path / "empty").mkdir()
    with pytest.raises(JudgeUnavailable, match="safetensors"):
        judge({"clip": tmp_path / "empty"}, "clip")
    with pytest.raises(JudgeUnavailable, match="lacks .* weights of a"):
        judge({"clip": folders["blip2"]}, "clip")
    with pytest.raises(UnsupportedQuestion, match="no 4-bit weights"):
        judge(folders, "clip", quantization="nf4")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["clip", "blip2"])
def test_random_weights_are_drawn_by_the_judges_seed_and_say_what_they_are(backend, images):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    one, again, other = (
        build_judge(JudgeConfig(backend=backend, model="random", device="cpu", seed=seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert one.stamp.judge == f"{backend}:random" and one.stamp.revision == "random weights, seed 0"
    values = scores(one, images[:2])
    assert values[0] != values[1] and ((values > 0) & (values < 1)).all()
    np.testing.assert_array_equal(values, scores(again, images[:2]))
    assert one.stamp != other.stamp and not np.allclose(values, scores(other, images[:2]))


def test_memory_that_runs_out_makes_the_batches_smaller_and_keeps_the_order():
    sizes, released = [], []

    def ask(batch):
        sizes.append(len(batch))
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch

    batches = AdaptiveBatches(10, lambda: released.append(1))
    assert batches.run(list(range(7)), ask) == list(range(7)) and sizes == [7, 4, 2, 2, 3] and len(released) == 2
    assert batches.run([1, 2, 3], ask) == [1, 2, 3] and sizes[-2:] == [2, 1]
    with pytest.raises(MemoryError, match="out of memory"):
        batches.run([1], lambda batch: ask([0] * 9))
    with pytest.raises(RuntimeError, match="size of tensor"):
        batches.run([1], lambda batch: torch.zeros(2) + torch.zeros(3))


def test_a_network_that_breaks_is_unavailable(folders, images):
    clip = judge(folders, "clip")
    for error, says in ((torch.OutOfMemoryError("out of memory"), "out of memory"), (ValueError("odd"), "broke: odd")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(JudgeUnavailable, match=says):
            patch.setattr(clip._model, "rate", Mock(side_effect=error))
            scores(clip, images)


def test_the_baseline_removes_the_part_off_the_line_to_the_goal():
    # By hand, in the plane: goal (0, 1), baseline (1, 0), state (1, 0) + what has nothing to do with it (third axis).
    goal, baseline, state = np.array([[0.0, 1.0, 0.0]]), np.array([1.0, 0.0, 0.0]), np.array([[0.6, 0.0, 0.8]])
    # Line direction (-1, 1, 0); (state - baseline) . line = 0.4, over 2 is 0.2; projection (0.8, 0.2, 0).
    # alpha 1: |(0.8, 0.2, 0) - goal|^2 = 0.64 + 0.64 = 1.28, reward 0.36. alpha 0: the cosine, 0.
    assert baseline_reward(state, goal, baseline, 1.0) == pytest.approx([0.36])
    assert baseline_reward(state, goal, baseline, 0.0) == pytest.approx([0.0])
    # alpha 0.5: (0.7, 0.1, 0.4) - goal: 0.49 + 0.81 + 0.16 = 1.46, reward 0.27.
    assert baseline_reward(state, goal, baseline, 0.5) == pytest.approx([0.27])


def test_rewards_stay_in_their_range_and_the_goal_itself_is_best():
    rng = np.random.default_rng(0)
    states, goals = unit(rng.normal(size=(500, 8))), unit(rng.normal(size=(500, 8)))
    baseline = unit(rng.normal(size=(1, 8)))[0]
    for alpha in (0.0, 0.3, 1.0):
        rewards = baseline_reward(states, goals, baseline, alpha)
        assert rewards.min() >= -1 - 1e-9 and rewards.max() <= 1 + 1e-9
        assert baseline_reward(goals, goals, baseline, alpha) == pytest.approx(np.ones(500))
    assert np.isfinite(baseline_reward(states, np.tile(baseline, (500, 1)), baseline, 1.0)).all()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_keeps_the_contract_of_a_judge(folders, family):
    one = judge(folders, family, batch_size=3)
    check_judge(one)
    frames = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), np.uint8)
    assert one.score([Clip(goal="open the drawer", frames=frames)])[0].num_frames == 1


def test_properties_known_before_loading_match_the_models():
    for backend, rater in (("clip", ClipRater), ("blip2", Blip2Rater)):
        assert abilities_of(backend, "").goal_pictures == rater.sees_goal_images


def test_they_take_a_described_state_and_are_named_after_their_weights():
    config = recipe("drawer_open")
    assert config.judge_goal == "open the drawer"
    for backend in ("clip", "blip2"):
        random = override(config, {"judge.backend": backend, "judge.model": "random"})
        assert random.judge_goal == "the drawer is open"
        assert override(random, {"goal": "shut it"}).judge_goal == "shut it"
        for settings, name in (
            ({}, "judge (random weights) labels, image reward"),
            ({"reward.source": "judged"}, f"{backend} score (random weights)"),
            ({"reward.teacher": "oracle"}, "oracle labels, image reward"),
        ):
            assert override(random, settings).reward_name == name
