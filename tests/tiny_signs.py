"""Makes `my_model`: a random language model of a few signs, for TRL."""

import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

set_seed(0)
words = ["<pad>", "<eos>", "lamp", "+", "-", "."]
tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="."))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left")
config = GPT2Config(
    vocab_size=len(words),
    n_positions=32,
    n_embd=32,
    n_layer=1,
    n_head=2,
    bos_token_id=1,
    eos_token_id=1,
    pad_token_id=0,
)
GPT2LMHeadModel(config).save_pretrained(sys.argv[1])
fast.save_pretrained(sys.argv[1])
