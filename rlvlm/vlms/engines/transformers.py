"""Engine for any chat VLM in `transformers`: the Qwen-VL and LLaVA families, including the pocket models."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rlvlm.core.steps import Frames
from rlvlm.vlms.chats import TOP_P, Chat, ChatReply, rendered, whole_answer, without_thought
from rlvlm.vlms.config import VLMConfig
from rlvlm.vlms.images import can_replace, resize
from rlvlm.vlms.loading import LoadedVLM
from rlvlm.vlms.lora import adapter_mark
from rlvlm.vlms.processors import PillowProcessor


class TransformersEngine:
    """Turns chats into texts or probabilities of texts.

    Args:
        vlm: model from `loading.load_vlm`.
        config: settings with the seed of sampling and, for `traits`, the kind of weights.
    """

    def __init__(self, vlm: LoadedVLM, config: VLMConfig) -> None:
        self._vlm = vlm
        self._config = config
        self.revision = vlm.revision
        self.traits = f"dtype={vlm.dtype} quantization={config.quantization}{adapter_mark(config.adapter)}"

    @torch.inference_mode()
    def generate(
        self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float, choices: Sequence[str] = ()
    ) -> list[ChatReply]:
        """Returns the model's reply to each chat: greedy at temperature 0, else sampled from the config's seed.

        With `choices` it is one of them: the most likely, or one sampled by their probabilities.
        """
        if choices:
            log_p = self.choice_log_p(chats, choices)
            if temperature > 0:  # the argmax of logits plus Gumbel noise samples from their softmax
                log_p = log_p / temperature + np.random.default_rng(self._config.seed).gumbel(size=log_p.shape)
            return [ChatReply(text=choices[int(best)]) for best in log_p.argmax(axis=1)]
        model, tokenizer = self._vlm.model, self._vlm.processor.tokenizer
        texts = self._texts(chats)
        inputs = self._vlm.inputs(texts, chats)
        # top_k 0: by default transformers keeps only 50 tokens, whatever top-p would keep
        sampling = (
            {"do_sample": False}
            if temperature == 0
            else {"do_sample": True, "temperature": temperature, "top_p": TOP_P, "top_k": 0}
        )
        devices = [model.device] if model.device.type == "cuda" else []
        # samples depend on the config's seed only, and leave the trainer's generator unchanged
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self._config.seed)
            tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling)
        tokens = tokens[:, inputs["input_ids"].shape[1] :]  # [B, N]
        stops = torch.as_tensor(model.generation_config.eos_token_id, device=tokens.device)
        # a reply without a stop token was cut: its last word may be half a number
        is_whole = torch.isin(tokens, stops).any(-1).tolist()
        answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        written = map(whole_answer, texts, answers)
        return [ChatReply(text=text, is_whole=whole) for text, whole in zip(written, is_whole, strict=True)]

    @torch.inference_mode()
    def choice_log_p(self, chats: Sequence[Chat], choices: Sequence[str]) -> NDArray[np.float64]:
        """Returns [B, C], the log-probability that the reply begins with each choice's whole token sequence.

        If of the three labels only `-1` takes two tokens (the Qwen tokenizers) this is a single forward pass: the first
        of the two is appended to the chat; the position before it gives the first token of all labels, its own position
        the second token of `-1`.
        """
        texts = list(map(without_thought, self._texts(chats)))
        inputs = self._vlm.inputs(texts, chats)
        ids_of = [self._vlm.processor.tokenizer.encode(text, add_special_tokens=False) for text in choices]
        scores = np.full((len(chats), len(choices)), -np.inf)
        for prefix in longest_prefixes(ids_of):
            logits = self._vlm.model(**_append(inputs, prefix), logits_to_keep=len(prefix) + 1, use_cache=False).logits
            # float64: small differences of log-probabilities decide between labels, and bfloat16 has only three digits
            log_p = logits.double().log_softmax(-1).cpu()  # [B, len(prefix) + 1, vocabulary]
            for index, ids in enumerate(ids_of):
                if tuple(ids[:-1]) == prefix[: len(ids) - 1]:
                    scores[:, index] = log_p[:, range(len(ids)), ids].sum(-1).numpy()
        return scores

    def shrink(self, frames: Frames) -> Frames:
        """Returns the frames [L, H, W, 3] resized as by the processor, or unchanged if its method is unknown."""
        image_processor = self._vlm.processor.image_processor
        if not (isinstance(self._vlm.processor, PillowProcessor) and can_replace(image_processor)):
            return frames
        return np.stack([resize(frame, image_processor) for frame in frames])

    def release_memory(self) -> None:
        """Empties torch's cache of GPU memory."""
        torch.cuda.empty_cache()

    def _texts(self, chats: Sequence[Chat]) -> list[str]:
        return [rendered(chat, self._vlm.processor.apply_chat_template) for chat in chats]


def longest_prefixes(texts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Returns prefixes to append to a chat, one at a time, so that every token of `texts` is predicted.

    These are the texts without their last tokens, each once, and none that is the beginning of another.
    """
    # a prefix of another prefix is evaluated with it
    prefixes = list(dict.fromkeys(tuple(ids[:-1]) for ids in texts))
    return [
        prefix
        for prefix in prefixes
        if not any(other != prefix and other[: len(prefix)] == prefix for other in prefixes)
    ]


def _append(inputs: dict[str, torch.Tensor], tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """Returns the inputs with `tokens` added at the end of every chat."""
    shape = inputs["input_ids"].shape
    extended = dict(inputs)
    for name, tensor in inputs.items():
        if tensor.shape == shape:
            # inputs with an entry per token grow with them: type ids and masks too
            fill = {"input_ids": list(tokens), "attention_mask": [1] * len(tokens)}.get(name, [0] * len(tokens))
            tail = torch.tensor(fill, dtype=tensor.dtype, device=tensor.device).expand(shape[0], -1)
            extended[name] = torch.cat([tensor, tail], dim=1)
    return extended
