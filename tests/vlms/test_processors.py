from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, PreTrainedTokenizerFast

from rlvlm.vlms.config import VLMConfig
from rlvlm.vlms.engines.vllm import VllmEngine
from rlvlm.vlms.processors import load_processor
from tests.tiny_vlm import save_tiny_internvl, save_tiny_llava


def load(folder, **changes):
    return load_processor(folder, AutoConfig.from_pretrained(folder), VLMConfig(**changes))


def test_the_processor_puts_as_many_marks_as_the_image_has_merged_patches(tiny_vlms):
    # by hand: 64 x 32 pixels are 4 x 2 patches of 16 px; 2 x 2 patches merge into one mark: 2 marks
    processor = load(tiny_vlms["qwen3_vl"])
    tall = np.zeros((64, 32, 3), np.uint8)
    content = [{"type": "image"}, {"type": "text", "text": "a"}]
    chat = processor.apply_chat_template([{"role": "user", "content": content}])
    inputs = processor([chat, "b"], [[tall], []])
    image_id = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 2]]
    assert (inputs["input_ids"] == image_id).sum(-1).tolist() == [2, 0]
    assert inputs["mm_token_type_ids"].sum(-1).tolist() == [2, 0]
    assert inputs["attention_mask"].sum(-1).tolist()[1] == 1 and inputs["attention_mask"][1, -1] == 1  # padded left


def test_images_without_marks_are_refused(tiny_vlms):
    processor = load(tiny_vlms["qwen3_vl"])
    with pytest.raises(ValueError, match="1 images need as many marks"):
        processor(["no mark"], [[np.zeros((32, 32, 3), np.uint8)]])


def test_pixel_bounds_come_from_the_config(tiny_vlms):
    image = np.zeros((256, 256, 3), np.uint8)

    def num_patches(**changes) -> int:
        return len(load(tiny_vlms["qwen3_vl"], **changes).image_processor(images=[image])["pixel_values"])

    assert num_patches() == 16  # the folder's own bound is 64 x 64 px
    assert num_patches(max_pixels=128 * 128) == 64
    assert num_patches(min_pixels=96 * 96) == 36


@pytest.mark.parametrize("is_in_template", [False, True])
def test_a_chat_begins_with_one_bos_token_where_the_tokenizer_has_one(tmp_path, is_in_template):
    """LLaVA's template leaves it to Llama's tokenizer, as its published processor does; Gemma's template writes it."""
    folder = save_tiny_llava(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save_pretrained(folder)
    template = folder / "chat_template.jinja"
    if is_in_template:
        template.write_text("{{ bos_token }}" + template.read_text())
    processor = load(folder)
    content = [{"type": "image"}, {"type": "text", "text": "a"}]
    chat = processor.apply_chat_template([{"role": "user", "content": content}])
    ids = processor([chat], [[np.zeros((28, 28, 3), np.uint8)]])["input_ids"][0].tolist()
    assert ids[0] == bos and ids.count(bos) == 1
    # vLLM is sent one mark for an image, and everything else as our own engine reads it
    engine = VllmEngine.__new__(VllmEngine)
    engine._core = SimpleNamespace(processor=processor)
    mark = processor.tokenizer.convert_tokens_to_ids("<image>")
    asked = engine._chat_tokens(engine._text([{"role": "user", "content": content}]))
    assert asked == [token for token, run in groupby(ids) for _ in ((0,) if token == mark else run)]
    assert engine._tokens("a") == processor.tokenizer.encode("a", add_special_tokens=False) and bos not in asked[1:]


def test_internvls_images_become_crops_of_visual_tokens_between_their_marks(tmp_path):
    # by hand: 4 tokens a crop; a square fits one crop, 112 x 56 pixels are two and an overview of the whole
    processor = load(save_tiny_internvl(tmp_path))
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "a"}]
    chat = processor.apply_chat_template([{"role": "user", "content": content}])
    inputs = processor([chat], [[np.zeros((56, 56, 3), np.uint8), np.zeros((112, 56, 3), np.uint8)]])
    ids = inputs["input_ids"][0].tolist()
    begin, end, token = (
        processor.tokenizer.convert_tokens_to_ids(mark) for mark in ("<img>", "</img>", "<IMG_CONTEXT>")
    )
    assert len(inputs["pixel_values"]) == 4 and ids.count(token) == 16
    first = ids.index(begin)
    assert ids[first : first + 6] == [begin, *[token] * 4, end] and ids.count(begin) == ids.count(end) == 2
