"""Which tokens hold the action: the same characters for any tokenizer."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlvlm.policies.vlm.policy import token_ends, tokens_of_span

TEXT = '{"thoughts": "größer 目标, so I add", "action": "turn left"}'
SPAN = (TEXT.index("turn left"), TEXT.index("turn left") + len("turn left"))


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [TEXT[:20], TEXT[30:]], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        [TEXT] * 3, trainers.UnigramTrainer(vocab_size=60, show_progress=False, unk_token="<unk>")
    )
    return tokenizer


def whole_words() -> Tokenizer:
    pieces = ['{"thoughts": "', "größer 目标, so I add", '", "action": "', "turn left", '"}']
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(set(TEXT)))}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens(pieces)
    return tokenizer


@pytest.fixture(params=[byte_level, unigram, whole_words], ids=lambda build: build.__name__)
def tokenizer(request):
    return PreTrainedTokenizerFast(tokenizer_object=request.param(), eos_token="<eos>")


def test_the_actions_tokens_spell_the_action(tokenizer):
    ids = np.array([*tokenizer(TEXT, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
    assert tokenizer.decode(ids[:-1]) == TEXT
    chosen = tokens_of_span(tokenizer, ids, SPAN)
    assert chosen.any() and not chosen[-1], "the stop token is no part of the action"
    begin, end = np.flatnonzero(chosen)[[0, -1]]
    assert chosen[begin : end + 1].all()
    ends = np.concatenate([[0], token_ends(tokenizer, ids)])
    assert (np.diff(ends) >= 0).all() and ends[-1] == len(TEXT) and len(ends) == 1 + len(ids)
    assert ends[begin] <= SPAN[0] < ends[begin + 1] and ends[end] < SPAN[1] <= ends[end + 1]
    # Nothing but the quotes may share a token with the action.
    assert TEXT[ends[begin] : ends[end + 1]].strip('": }').startswith("turn left")


def test_an_odd_spelling_is_followed_as_it_was_written():
    """`turn left` letter by letter, which no tokenizer would choose: nine tokens of the action all the same."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>")
    letters = [tokenizer.convert_tokens_to_ids("Ġ" if c == " " else c) for c in '{"action": "turn left"}']
    chosen = tokens_of_span(tokenizer, np.array(letters), (12, 21))
    assert np.flatnonzero(chosen).tolist() == list(range(12, 21))
