"""Parts of a chat VLM: images to visual tokens, text to ids, both to hidden states, hidden states to log-probs.

Every family with a vision encoder and a separate language model works the same here: the image is encoded, its tokens
replace the prompt's placeholders, and the language model processes the result. Unlike the models' own forward pass,
this allows encoding an image once, however often it is used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlvlm.core.episodes import IntArray
from rlvlm.core.errors import UsageError
from rlvlm.vlms.processors import Processor
from rlvlm.vlms.skeleton import device_of

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedTokenizerBase

Grid = tuple[int, int, int]
_NEVER = -1e9
"""Logit of a banned token; finite, so that entropies and gradients stay finite."""
_REMEMBERED_PROMPTS = 4_096
_LOGITS_AT_ONCE = 2**25
"""Maximum logits computed at once, for a slice of tokens: 128 MiB in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenImage:
    """An image as the language model sees it."""

    features: Tensor
    """[layers, N, D] visual tokens; the last layer replaces the image's placeholders, the others are added within the
    language model (deep stack)."""
    grids: tuple[tuple[int, int, int], ...]
    """Patches in time, height and width, for each image; zeros for models without such positions. With several images
    in a prompt their tokens are concatenated."""
    size_px: tuple[int, int]
    """(H, W) of each image."""
    frame: NDArray[np.uint8] | None = None
    """[H, W, 3], or [k, H, W, 3] for k images; stored only if the vision encoder is trained, to encode it again."""

    @property
    def nbytes(self) -> int:
        """Bytes of features and frame."""
        features = self.features.numel() * self.features.element_size()
        return features + (0 if self.frame is None else self.frame.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """A batch of prompts of up to P tokens and replies of up to N tokens.

    A row is `[padding | prompt | reply | padding]`: all prompts end in the same column and all replies begin in the
    next, both in sampling and in training. So values are read in one column, log-probs in a fixed range of columns, and
    sampling and training agree on each token's position.
    """

    ids: Tensor
    """[B, P + N] token ids."""
    positions: Tensor
    """[R, B, P + N] rotary positions; R is 3 (time, height, width) for models with such positions, else 1."""
    attention: Tensor | None
    """[B, P + N] 1 for tokens that may be attended to; None if no prompt is padded: the causal mask hides everything to
    the right of a token, and without a mask attention takes its fast path."""
    is_reply: Tensor
    """[B, N] True for the tokens of a reply."""
    prompt_length: int
    """P, the length of the padded prompts."""

    @property
    def replies(self) -> Tensor:
        """[B, N] token ids of the replies."""
        return self.ids[:, self.prompt_length :]


def pad(
    prompts: Sequence[IntArray],
    positions: Sequence[Tensor],
    replies: Sequence[IntArray],
    pad_id: int,
    device: torch.device,
) -> Padded:
    """Returns one batch of `prompts` with their `replies`.

    Args:
        prompts: [P] ids of each prompt.
        positions: [R, P] of each prompt; a reply continues at the largest position plus one.
        replies: [N] ids of each; empty if there is none yet.
        pad_id: id of padding.
        device: device of the result.
    """
    width, max_reply = max(len(prompt) for prompt in prompts), max(len(reply) for reply in replies)
    ids = torch.full((len(prompts), width + max_reply), pad_id)
    attention = torch.zeros_like(ids)
    where = torch.zeros((positions[0].shape[0], *ids.shape), dtype=torch.long)
    for row, (prompt, position, reply) in enumerate(zip(prompts, positions, replies, strict=True)):
        begin, end = width - len(prompt), width + len(reply)
        ids[row, begin:width] = torch.tensor(prompt)
        ids[row, width:end] = torch.tensor(reply)
        attention[row, begin:end] = 1
        where[:, row, begin:width] = position
        where[:, row, width:] = position.max() + 1 + torch.arange(max_reply)
    is_padded_left = any(len(prompt) < width for prompt in prompts)
    return Padded(
        ids=ids.to(device),
        positions=where.to(device),
        attention=attention.to(device) if is_padded_left else None,
        is_reply=attention[:, width:].bool().to(device),
        prompt_length=width,
    )


class Backbone:
    """The parts of a chat VLM.

    Args:
        model: an `AutoModelForImageTextToText`, perhaps with an adapter's layers; not copied.
        processor: processor from `rlvlm.vlms.processors`, which turns chats and images into the model's inputs.
    """

    def __init__(self, model: Any, processor: Processor) -> None:
        self.model = model
        self.processor = processor
        tokenizer = processor.tokenizer
        self.language: Any = getattr(model.model, "language_model", None) or model.model.text_model
        """Language model without its output head."""
        self.stop_id: int = turn_end(processor, model.generation_config.eos_token_id)
        """Token id that ends a reply."""
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.stop_id
        """Token id of padding."""
        self.image_id: int = model.config.image_token_id
        """Token id of a visual token's placeholder."""
        self.text_config: Any = model.config.get_text_config()
        """Config of the language model, from which a key-value cache is made."""
        self.window: int = self.text_config.max_position_embeddings
        """Maximum tokens of prompt and reply, for which the language model has positions."""
        self.banned_ids = self._banned(tokenizer)
        """[banned] token ids that a reply must not contain: those of images, padding and the chat's format, and ids
        without a token. They are masked both when sampling and when recomputing, or the two distributions would
        differ."""
        self._prompts: dict[tuple[str, tuple[int, int], int], IntArray] = {}
        self._positions: dict[tuple[bytes, tuple[Grid, ...]], Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return device_of(self.model)

    def encode(self, prompt: str, size_px: tuple[int, int], num_images: int = 1) -> IntArray:
        """Returns [P] ids of one user turn with images of `size_px` (H, W) and `prompt`, up to where the reply begins.

        Raises:
            UsageError: the text contains tokens of the chat's format, which could end the turn or add an image.
        """
        # an env repeats the same few prompts, and tokenizing is slower than a look-up
        ids = self._prompts.get((prompt, size_px, num_images))
        if ids is None:
            token_ids = self.processor.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            # an env's text is untrusted, and could end the user's turn or write the model's reply
            if np.isin(token_ids, [*self.banned_ids.tolist(), self.stop_id]).any():
                raise UsageError(
                    f"a prompt must not hold tokens of the chat's format, got {prompt[:80]!r}", "say it in plain words"
                )
            ids = prompt_ids(self.processor, prompt, size_px, num_images)
            _remember(self._prompts, (prompt, size_px, num_images), ids)
        return ids

    def position_ids(self, prompt_ids: IntArray, grids: tuple[Grid, ...]) -> Tensor:
        """Returns [R, P] rotary positions of one prompt: time, height and width, or one row for other models."""
        key = prompt_ids.tobytes(), grids
        if key not in self._positions:
            ids = torch.tensor(prompt_ids)[None]
            positions = torch.arange(len(prompt_ids))[None]
            if hasattr(self.model.model, "get_rope_index"):
                kinds = (ids == self.image_id).int()
                positions = self.model.model.get_rope_index(
                    ids, mm_token_type_ids=kinds, image_grid_thw=torch.tensor(grids)
                )[0][:, 0]
            _remember(self._positions, key, positions)
        return self._positions[key]

    def encode_images(self, frames: Sequence[NDArray[np.uint8]]) -> tuple[list[Tensor], list[Grid]]:
        """Returns visual tokens [layers, tokens, D] of each of N `frames` [H, W, 3], with gradients, and grids."""
        marks = self.processor.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}])
        inputs = self.processor(text=[marks] * len(frames), images=[[frame] for frame in frames])
        # each family has some of these and needs them all
        pixels = {
            name: tensor.to(self.device)
            for name, tensor in inputs.items()
            if name in ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes")
        }
        seen = self.model.model.get_image_features(**pixels)
        layers = [*(getattr(seen, "deepstack_features", None) or []), seen.pooler_output]
        counts = (inputs["input_ids"] == self.image_id).sum(1).tolist()
        # by image, by crop of an image, or all in a row: concatenated they are the same in every family
        rows = [layer if isinstance(layer, Tensor) else torch.cat(list(layer)) for layer in layers]
        split = [row.flatten(0, -2).split(counts) for row in rows]
        grids = inputs["image_grid_thw"].tolist() if "image_grid_thw" in inputs else [[0, 0, 0]] * len(frames)
        return [torch.stack(parts) for parts in zip(*split, strict=True)], [(t, h, w) for t, h, w in grids]

    def hidden(self, padded: Padded, images: Sequence[SeenImage], cache: "Cache | None" = None) -> Tensor:
        """Returns [B, P + N, D], the last hidden states of a whole batch; those at padding are undefined.

        Args:
            padded: prompts and replies.
            images: B of them.
            cache: stores keys and values, if given.
        """
        ids, positions, attention, back = padded.ids, padded.positions, padded.attention, None
        if attention is not None and cache is None:
            # Causality hides the tokens after a row's end: with its padding moved there, no mask is needed.
            columns, begins = torch.arange(ids.shape[1], device=ids.device), attention.argmax(1, keepdim=True)
            forth, back = (columns + begins) % len(columns), (columns - begins) % len(columns)
            ids, positions, attention = ids.gather(1, forth), torch.take_along_dim(positions, forth[None], 2), None
        # by layer of the deep stack, the images of the batch concatenated, in the order of their placeholders
        layers = [torch.cat(rows) for rows in zip(*(image.features for image in images), strict=True)]
        embedded = self.language.get_input_embeddings()(ids)
        is_image = ids == self.image_id
        embedded = embedded.masked_scatter(is_image[..., None], layers[-1].to(embedded.dtype))
        # Qwen3-VL adds features of earlier layers of the encoder to the first layers of the language model
        deep = {"visual_pos_masks": is_image, "deepstack_visual_embeds": layers[:-1]} if len(layers) > 1 else {}
        if hasattr(self.model, "create_masks_for_generate"):  # tokens of an image attend to each other, as in Gemma 3
            attention = self.model.create_masks_for_generate(
                config=self.text_config, inputs_embeds=embedded, attention_mask=attention, past_key_values=cache,
                position_ids=positions[0], token_type_ids=is_image.int(),
            )  # fmt: skip
        hidden = self._language(embedded, positions, attention, cache, deep)
        return hidden if back is None else torch.take_along_dim(hidden, back[..., None], 1)

    def decode_step(self, tokens: Tensor, positions: Tensor, attention: Tensor | None, cache: "Cache | None") -> Tensor:
        """Returns [B, D], the last hidden states of one more token each.

        Args:
            tokens: [B].
            positions: [R, B, 1].
            attention: [B, tokens so far] 1 for tokens that may be attended to; None for all.
            cache: keys and values of the tokens before.
        """
        embedded = self.language.get_input_embeddings()(tokens[:, None])
        return self._language(embedded, positions, attention, cache, {})[:, -1]

    def next_token_log_probs(self, hidden: Tensor, temperature: float) -> Tensor:
        """Returns [..., V] float32 log-probs of the token after `hidden` [..., D]; banned tokens have probability 0."""
        return table_of(self.model.get_output_embeddings(), self.banned_ids, hidden, temperature)

    def chosen_log_probs(
        self, hidden: Tensor, tokens: Tensor, temperature: float, *, with_entropies: bool, in_slices: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns [M] float32 log-probs of `tokens` [M], each sampled after `hidden` [M, D], and [M] entropies if
        requested.

        Args:
            hidden: last hidden states at the positions before the tokens.
            tokens: ids.
            temperature: temperature at which they were sampled.
            with_entropies: whether to return entropies, in nats.
            in_slices: whether to compute some tokens at a time, and again in the backward pass, to avoid storing
                [M, V]: with a vocabulary of 150,000 that is 0.6 MB a token, three times over.
        """

        def compute(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
            log_probs = self.next_token_log_probs(states, temperature)  # [tokens, V]
            entropies = -(log_probs.exp() * log_probs).sum(-1) if with_entropies else None
            return log_probs.gather(-1, chosen[:, None])[:, 0], entropies

        if not in_slices:
            return compute(hidden, tokens)
        size = slice_tokens(self.model.get_output_embeddings().weight.shape[0])
        parts = [
            checkpoint(compute, *part, use_reentrant=False) if torch.is_grad_enabled() else compute(*part)
            for part in zip(hidden.split(size), tokens.split(size), strict=True)
        ]
        chosen, entropies = zip(*parts, strict=True)
        return torch.cat(chosen), torch.cat(entropies) if with_entropies else None

    def _language(
        self, embedded: Tensor, positions: Tensor, attention: Tensor | None, cache: "Cache | None", deep: dict[str, Any]
    ) -> Tensor:
        return self.language(
            inputs_embeds=embedded,
            position_ids=positions if len(positions) > 1 else positions[0],
            attention_mask=attention,
            past_key_values=cache,
            use_cache=cache is not None,
            **deep,
        ).last_hidden_state

    def _banned(self, tokenizer: "PreTrainedTokenizerBase") -> Tensor:
        added = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
        # embeddings are padded to a round number: ids beyond the tokenizer's have weights but no text
        unused = range(len(tokenizer), self.model.get_output_embeddings().weight.shape[0])
        banned = {*tokenizer.all_special_ids, *added, *unused, self.image_id} - {self.stop_id}
        return torch.tensor(sorted(banned))


def prompt_ids(processor: Processor, prompt: str, size_px: tuple[int, int], num_images: int = 1) -> IntArray:
    """Returns [P] ids of a user turn with images of `size_px` (H, W) and `prompt`; `processor` as in `Backbone`."""
    content = [*[{"type": "image"}] * num_images, {"type": "text", "text": prompt}]
    chat = processor.apply_chat_template([{"role": "user", "content": content}])
    # an image's number of tokens depends only on its size, so a black one will do
    black = [np.zeros((*size_px, 3), np.uint8)] * num_images
    return processor(text=[chat], images=[black])["input_ids"][0].numpy()


def table_of(head: Callable[[Tensor], Tensor], banned_ids: Tensor, hidden: Tensor, temperature: float) -> Tensor:
    """Returns [..., V] float32 log-probs by `head` of the token after `hidden` [..., D]; banned ids have none."""
    logits = head(hidden).float() / temperature
    return logits.index_fill(-1, banned_ids.to(logits.device), _NEVER).log_softmax(-1)


def slice_tokens(vocabulary: int) -> int:
    """Returns how many tokens' log-probs to compute at once if memory is scarce: slices of equal memory."""
    return max(1, _LOGITS_AT_ONCE // vocabulary)


def turn_end(processor: Processor, stops: int | Sequence[int] | None) -> int:
    """Returns the token that ends an answer in the chat's own format; the end of text if the format has none.

    Args:
        processor: with the chat template. Gemma's tokenizer ends a text with another token than its chats end a turn.
        stops: tokens at which the model's config stops generation.
    """
    tokenizer = processor.tokenizer
    known = {tokenizer.eos_token_id, *([stops] if isinstance(stops, int) else stops or ())}
    chat = [{"role": role, "content": [{"type": "text", "text": "a"}]} for role in ("user", "assistant")]
    asked = processor.apply_chat_template(chat[:1])
    answered = processor.apply_chat_template(chat, add_generation_prompt=False)
    tail = answered[len(asked) :] if answered.startswith(asked) else ""
    ends = [index for index in tokenizer(tail, add_special_tokens=False)["input_ids"] if index in known]
    return ends[0] if ends else tokenizer.eos_token_id


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    """Adds to `memory`, dropping the oldest entry if it is full."""
    if len(memory) >= _REMEMBERED_PROMPTS:
        del memory[next(iter(memory))]
    memory[key] = value
