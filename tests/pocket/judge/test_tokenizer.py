import pytest
from transformers import AutoTokenizer

from rlvlm.pocket.judge.texts import Topic, corpus, phrases
from rlvlm.pocket.judge.tokenizer import IMAGE, SPECIAL, build_tokenizer

PHRASE = "the drawer is {percent}% open"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(corpus([Topic(goal="open the drawer", phrase=PHRASE)]), phrases([PHRASE]))


def test_a_phrase_is_one_token_and_labels_are_spelt_as_in_qwen(tokenizer):
    assert tokenizer.tokenize("The second is nearer to the goal.") == ["The second is nearer to the goal."]
    assert tokenizer.tokenize("-1") == ["-", "1"]
    assert tokenizer.tokenize("37") == ["3", "7"]


def test_special_tokens_are_single(tokenizer):
    assert all(len(tokenizer(token).input_ids) == 1 for token in SPECIAL)


@pytest.mark.parametrize("text", ["open the drawer", "-1", "\n\n  0", "Ünïcödé 語 🙂", "<|im_start|>user\n\t{}"])
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_saved_folder_gives_the_same_tokens(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    asked = corpus([Topic(goal="open it", phrase=PHRASE)])[7]
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": asked}]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.count(IMAGE) == 1
    assert loaded(text).input_ids == tokenizer(text).input_ids
