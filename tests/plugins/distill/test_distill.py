"""A student learns what a teacher said, is graded on images it never saw, and is a pocket judge like any other."""

import numpy as np
import pytest
from grey_pairs import fill_store, grey_pair
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Label, Stamp
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.store import LabelStore, open_store
from rlvlm.plugins.distill.config import DistillConfig
from rlvlm.plugins.distill.training import AGREES, LabelDataset, Labelled, distill, read_labels, split
from rlvlm.pocket.models import weights_folder
from rlvlm.testing import FakeJudge
from rlvlm.vlms.supervised import IGNORED


class Brightness(FakeJudge):
    """Named apart, so that a store can hold two."""

    def __init__(self, name: str = "bright", margin: float = 0.0) -> None:
        super().__init__(margin)
        self._name = name

    @property
    def stamp(self) -> Stamp:
        return Stamp(judge=self._name, revision="1", prompt="direct/1", decoding="")


def fill(folder, judge, num_pairs: int = 150) -> LabelStore:
    """Labels about pairs of 40 greys, a tie among them."""
    rng = np.random.default_rng(0)
    levels = np.linspace(0, 255, 40).astype(np.uint8)
    pairs = levels[rng.integers(40, size=(num_pairs, 2))]
    pairs[0] = levels[20]
    return fill_store(folder, judge, pairs)


def test_held_out_labels_show_an_image_that_is_never_learnt():
    def label(left: str, right: str) -> Labelled:
        return Labelled(goal="g", left=left * 64, right=right * 64, answer=Label.LEFT, truth=None)

    # 0000... and 1111... lie below a quarter of all digests, 8888... and ffff... do not
    labels = [label("8", "f"), label("0", "f"), label("f", "1"), label("1", "0"), label("f", "f")]
    learnt, held_out = split(labels, 0.25)
    assert learnt == [labels[0], labels[4]] and held_out == labels[1:4]


def test_dialogues_ask_in_both_orders_and_learn_the_answer_alone(tmp_path):
    store = open_store(fill(tmp_path / "s", Brightness()).folder)
    teacher, labels = read_labels(store)
    assert teacher.judge == "bright" and {one.answer for one in labels} == set(Label)
    assert all(one.truth is one.answer for one in labels)
    tokenizer = AutoTokenizer.from_pretrained(weights_folder())
    processor = Qwen2VLImageProcessorPil.from_pretrained(weights_folder())
    batch, patches = LabelDataset(store, labels, tokenizer, processor, seed=0).draw(4)
    said = [tokenizer.decode(row[row != IGNORED]) for row in batch.targets]
    mirror = {"0<|im_end|>": "1<|im_end|>", "1<|im_end|>": "0<|im_end|>", "-1<|im_end|>": "-1<|im_end|>"}
    assert [mirror[answer] for answer in said[:4]] == said[4:]
    assert np.array_equal(batch.images[:4].numpy(), batch.images[4:].numpy()[:, ::-1])
    brightness = patches.mean((1, 2)).numpy()[batch.images.numpy()]
    for (left, right), answer in zip(brightness, said, strict=True):
        assert answer == mirror["0<|im_end|>" if right > left else "1<|im_end|>"] or abs(left - right) < 0.15


def test_unusable_answers_are_reported(tmp_path):
    with pytest.raises(UsageError, match="no label store"):
        distill(tmp_path / "none", tmp_path / "out", DistillConfig())
    fill(tmp_path / "s", Brightness(), 30)
    with pytest.raises(UsageError, match="too few"):
        distill(tmp_path / "s", tmp_path / "out", DistillConfig(held_out=0.05))
    with pytest.raises(UsageError, match="no label to learn from"):
        distill(tmp_path / "s", tmp_path / "out", DistillConfig(judge="nobody"))
    fill(tmp_path / "s", Brightness("other"), 30)
    with pytest.raises(UsageError, match="2 teachers"):
        distill(tmp_path / "s", tmp_path / "out", DistillConfig())
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").touch()
    with pytest.raises(UsageError, match="in use"):
        distill(tmp_path / "s", tmp_path / "thesis", DistillConfig())
    assert (tmp_path / "thesis" / "chapter.txt").exists() and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_pupil_comes_to_agree_with_its_teacher(tmp_path):
    fill(tmp_path / "s", Brightness(), 400)
    outcome = distill(tmp_path / "s", tmp_path / "out", DistillConfig(steps=25, num_pairs=6, held_out=0.15))
    assert outcome.teacher_accuracy == 1.0
    assert outcome.after[AGREES] > max(outcome.before[AGREES] + 0.1, 0.8)
    assert f"{100 * outcome.after[AGREES]:.1f} %" in (tmp_path / "out" / "CARD.md").read_text()
    judge = build_judge(JudgeConfig(model=str(tmp_path / "out")))
    verdicts = judge.compare([grey_pair(20, 230), grey_pair(230, 20)])
    assert [verdict.label for verdict in verdicts] == [Label.RIGHT, Label.LEFT]
