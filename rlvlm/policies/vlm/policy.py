"""A chat VLM as policy: it reads an image and text, writes a reply, and computes the log-prob of any stored reply.

Algorithms train it; an `engine` asks it for replies.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlvlm.core.episodes import Answer, IntArray, Observations, SampledReply, TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import Frames
from rlvlm.envs.env import TurnEnv
from rlvlm.policies.advantage_prompt import positive
from rlvlm.policies.protocol import READING, SHOWN_AT_ONCE, Imitation, Prediction, Reading, SeenImages
from rlvlm.policies.reply_policy import ReplyPolicy, ReplySampling, draw
from rlvlm.policies.vlm.backbone import Backbone, Padded, SeenImage, pad
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.imitation import Example, examples_of, imitation_loss, lengths_of
from rlvlm.policies.weights import Shardable
from rlvlm.vlms.blocks import recompute_blocks
from rlvlm.vlms.files import copy_settings, locate
from rlvlm.vlms.lora import cast_adapters, save_adapter
from rlvlm.vlms.processors import Processor

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedTokenizerBase

_NO_REPLY: IntArray = np.zeros(0, np.int64)
_VISION = frozenset({"visual", "vision_tower", "vision_model", "multi_modal_projector", "connector", "image_newline"})
"""The families' names of the vision encoder, and of the layers between it and the language model."""


class VLMPolicy(ReplyPolicy):
    """A chat VLM with a value head and, if `config.head` is `actions`, an action head. Always in eval mode: dropout
    would change the log-probs of a reply from those at sampling.

    Args:
        model: an `AutoModelForImageTextToText`, or PEFT's wrapper around one; its trainable parameters outside the
            vision encoder are trained.
        processor: processor from `rlvlm.vlms.processors`, which turns chats and images into the model's inputs.
        config: heads, and trained parts.
        num_actions: number of actions of an action head.

    Raises:
        ValueError: an action head with fewer than two actions.
        UsageError: the vision encoder is to be trained, but no part of it can.
    """

    def __init__(self, model: Any, processor: Processor, config: PolicyConfig, num_actions: int = 0) -> None:
        super().__init__()
        if config.head == "actions" and num_actions < 2:
            raise ValueError(f"an action head needs >= 2 actions, got {num_actions}; give the env's action names")
        self.model = model
        self.processor = processor
        self.config, self._is_conditioned = config, config.conditioned
        self.num_actions = num_actions
        self.images: SeenImages[SeenImage] = SeenImages(config.cache_mib << 20)
        self.backbone = Backbone(model.get_base_model() if hasattr(model, "get_base_model") else model, processor)
        self.tokenizer = processor.tokenizer
        self.stop_id = self.backbone.stop_id
        """Token id that ends a reply."""
        self.banned_ids = self.backbone.banned_ids
        """Token ids that a reply must not contain."""
        width = self.backbone.text_config.hidden_size
        # twice as wide: the last token of the prompt and the mean of the image, see `prompt_values`
        self.value_head = _head(2 * width, config.head_width, 1).to(self.device)
        self.action_head = (
            _head(width, config.head_width, num_actions).to(self.device) if config.head == "actions" else None
        )
        # a frozen encoder encodes each image of a run once, and its features are kept
        for name, parameter in model.named_parameters():
            if not config.train_vision and is_vision(name):
                parameter.requires_grad_(False)
        if config.train_vision and not any(p.requires_grad for name, p in model.named_parameters() if is_vision(name)):
            raise UsageError(
                "policy.train_vision has no effect: no adapter lies beside the vision encoder's layers",
                "--policy.learns all, or --policy.lora-targets that name them too",
            )
        self._looks_again = config.train_vision
        self._recomputes = recompute_blocks(model, config.recompute)
        self.eval()

    def train(self, mode: bool = True) -> "VLMPolicy":  # noqa: ARG002 - there is one mode
        """Stays in eval mode, except for 4-bit layers.

        In eval mode these convert their weights, on a CPU, to a form without gradients; bitsandbytes 0.50 still lets a
        backward pass through it and gives wrong ones. They have no dropout, so the mode changes nothing else.
        """
        super().train(False)
        for module in self.modules():
            if type(module).__name__ == "Linear4bit":
                module.training = True
        return self

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.backbone.device

    def load_trained_state(self, state: Mapping[str, Any]) -> None:
        super().load_trained_state(state)
        # computed with the former weights
        if self.config.train_vision:
            self.images.clear()

    def export(self, folder: Path) -> str:
        """See `Policy`: an adapter in PEFT's layout, or the whole model in that of transformers; without value head.

        Raises:
            UsageError: it acts by a head of its own.
        """
        if self.action_head is not None:
            raise UsageError(
                "its actions come from a head beside the model, for which transformers has no place",
                "load it with rlvlm.load_policy, or train one that answers in text: --policy.head text",
            )
        source, revision = locate(self.model.config._name_or_path, self.config.revision, "policy")
        base = self.config.model or "the pocket policy of rlvlm"
        if self.config.has_adapter:
            for settings in self.model.peft_config.values():  # not where it lay on this machine
                settings.base_model_name_or_path, settings.revision = base, self.config.revision or None
            save_adapter(self.model, folder)
            return f"PEFT's: an adapter for {base}, revision {revision}, `PeftModel.from_pretrained(base, FOLDER)`"
        self.model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)  # ours is for rollouts
        if self.config.new_words:
            self.tokenizer.save_pretrained(folder)
        copy_settings(source, folder)
        return "that of transformers: `AutoModelForImageTextToText.from_pretrained(FOLDER)`"

    def shardable(self) -> Shardable:
        heads = tuple(head for head in (self.value_head, self.action_head) if head is not None)
        return Shardable(root=self, methods=("log_probs", "values", "show", "imitation_loss"), heads=heads)

    def forget_stale_images(self) -> None:
        """Drops the features of all images if the vision encoder is trained; call it after it has changed."""
        if self._looks_again:
            self.images.clear()

    def stop_training_vision(self) -> None:
        """Freezes the vision encoder, which then encodes each image once; it is still saved."""
        self.forget_stale_images()
        self._looks_again = False

    def write(self, text: str) -> IntArray:
        """Returns [N] ids of a reply `text` as the policy would have sampled it, for training on demonstrations.

        Raises:
            ValueError: the text contains tokens of the chat's format.
        """
        ids = np.array([*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.stop_id], np.int64)
        # tokens that must not be sampled must not be learned either
        if np.isin(ids[:-1], [*self.banned_ids.tolist(), self.stop_id]).any():
            raise ValueError(f"a reply must not hold special tokens, got {text[:80]!r}")
        return ids

    def text_of(self, reply_ids: IntArray) -> str:
        """Returns the reply's text."""
        return decode(self.tokenizer, reply_ids)

    def num_elements(self, text: str) -> int:
        """Returns the number of tokens of a reply `text`; with an action head always one action."""
        return len(self.write(text)) if self.action_head is None else 1

    def action_elements(self, answer: Answer, span: tuple[int, int] | None) -> NDArray[np.bool_] | None:
        """Returns [N], True for the tokens of the action's value; all others belong to the thought. None with an action
        head, which has no others.
        """
        if self.action_head is not None:
            return None
        ids = answer["ids"]
        return np.zeros(len(ids), bool) if span is None else tokens_of_span(self.tokenizer, ids, span)

    def show(self, keys: Sequence[bytes], frames: Frames) -> None:
        """Encodes `frames` [N, H, W, 3] and stores the language model's input under `keys`; with k images per key they
        are [N, k, H, W, 3].

        Call it for the indices that `images.missing` returns, so that nothing is drawn or encoded twice.
        """
        if frames.ndim == 5:
            self._show_several(keys, frames)
            return
        # in chunks: an encoder's activations are larger than the features that are kept
        for begin in range(0, len(keys), SHOWN_AT_ONCE):
            part = list(frames[begin : begin + SHOWN_AT_ONCE])
            with torch.no_grad():
                features, grids = self.backbone.encode_images(part)
            for key, frame, seen, grid in zip(keys[begin:], part, features, grids, strict=False):
                # an encoder in training computes other features after each update
                kept = frame if self._looks_again else None
                self.images.add(key, SeenImage(features=seen, grids=(grid,), size_px=frames.shape[1:3], frame=kept))

    def _show_several(self, keys: Sequence[bytes], frames: Frames) -> None:
        """Shows [N, k, H, W, 3]: an image already seen in the prompt of an earlier turn is not encoded again."""
        parts = [[hashlib.sha256(frame.tobytes()).digest() for frame in several] for several in frames]
        names = [part for several in parts for part in several]
        shown = dict(zip(names, frames.reshape(-1, *frames.shape[-3:]), strict=True))
        known = {part: image for part, image in self.images.items().items() if part in shown}
        if new := [part for part in shown if part not in known]:
            self.show(new, np.stack([shown[part] for part in new]))
            known |= self.images.items()
        for key, own, several in zip(keys, parts, frames, strict=True):
            seen = [known[part] for part in own]
            kept = several if self._looks_again else None
            grids = tuple(grid for image in seen for grid in image.grids)
            features = torch.cat([image.features for image in seen], dim=1)
            self.images.add(key, SeenImage(features=features, grids=grids, size_px=seen[0].size_px, frame=kept))

    def prompts(self, obs: Observations) -> list[IntArray]:
        """Returns the ids of each prompt of `obs`, whose images were shown."""
        seen = self.images.get(obs.images)
        texts = positive(obs.texts) if self._is_conditioned else obs.texts
        return [
            self.backbone.encode(text, image.size_px, len(image.grids)) for text, image in zip(texts, seen, strict=True)
        ]

    def pad(self, obs: Observations, replies: Sequence[IntArray] = ()) -> Padded:
        """Returns the batch of `obs` with their `replies`, or of their prompts alone."""
        prompts, seen = self.prompts(obs), self.images.get(obs.images)
        positions = [self.backbone.position_ids(ids, image.grids) for ids, image in zip(prompts, seen, strict=True)]
        return pad(prompts, positions, replies or [_NO_REPLY] * len(obs), self.backbone.pad_id, self.device)

    def hidden(self, padded: Padded, images: Sequence[bytes], cache: "Cache | None" = None) -> Tensor:
        """Returns [B, P + N, D], the last hidden states of a whole batch; `cache` stores its keys and values."""
        return self.backbone.hidden(padded, self._features(images), cache)

    def read(
        self, obs: Observations, tokens: Sequence[IntArray], reading: Reading = READING, *, with_actions: bool = False
    ) -> Prediction:
        """Returns the policy's present prediction of stored replies, with text or an action head.

        Args:
            obs: observations that were answered; their images were shown.
            tokens: token ids of the replies.
            reading: how they were sampled, and what is asked for besides log-probs.
            with_actions: whether to return the action head's prediction after the prompt.
        """
        padded = self.pad(obs, tokens)
        hidden = self.hidden(padded, obs.images)
        before = hidden[:, padded.prompt_length - 1 : -1]  # [B, N, D] what each reply token was drawn from
        mask = padded.is_reply
        chosen, entropies = self.backbone.chosen_log_probs(
            before[mask], padded.replies[mask], reading.temperature, with_entropies=reading.with_entropies,
            in_slices=self._recomputes,
        )  # fmt: skip
        # padding is 0 and not computed: with a large vocabulary each position is expensive
        zeros = torch.zeros(mask.shape, device=self.device)
        token_values = None
        if reading.with_token_values:
            scenes = self._scenes(hidden, padded)[:, None].expand_as(before)
            token_values = self._value(before[mask], scenes[mask], reading.detach_values)
        return Prediction(
            log_probs=zeros.masked_scatter(mask, chosen),
            values=self.prompt_values(hidden, padded, reading.detach_values),
            entropies=None if entropies is None else zeros.masked_scatter(mask, entropies),
            token_values=None if token_values is None else zeros.masked_scatter(mask, token_values),
            actions=self._actions(hidden, padded) if with_actions else None,
        )

    def lengths(self, obs: Observations, answers: Sequence[Answer]) -> list[int]:
        """See `Policy`; an action head only reads the prompt."""
        is_read = self.action_head is None
        return [
            len(ids) + is_read * len(answer.get("ids", ()))
            for ids, answer in zip(self.prompts(obs), answers, strict=True)
        ]

    def imitation(self, shown: Sequence[TokenEpisode], env: TurnEnv, sft: Any, rng: object, log: object) -> Imitation:
        """See `Policy`: for episodes in turns; `sft` is a `ReplySFTConfig`, and no random numbers are used."""
        examples = examples_of(self, env, shown)

        def loss(rows: Tensor, weights: Tensor | None) -> Tensor:
            with self._as_shown():
                return self.imitation_loss([examples[row] for row in rows.tolist()], sft.reply_weight, weights)

        shown_as = np.array([example.number for example in examples], np.int64)
        with self._as_shown():
            return Imitation(loss=loss, shown=shown_as, lengths=lengths_of(self, examples))

    @contextmanager
    def _as_shown(self) -> Iterator[None]:
        """Uses prompts unchanged while the context is open: those of demonstrations have their own labels."""
        before, self._is_conditioned = self._is_conditioned, False
        try:
            yield
        finally:
            self._is_conditioned = before

    def imitation_loss(self, examples: Sequence[Example], reply_weight: float, weights: Tensor | None = None) -> Tensor:
        """Returns `imitation.imitation_loss`; learners that shard the policy call it together."""
        return imitation_loss(self, examples, reply_weight, weights)

    @torch.no_grad()
    def sample(self, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[SampledReply]:
        """See `ReplyPolicy`: texts, or the actions of a head, for which only the seeds and `greedy` matter.

        Raises:
            MachineError: an image was not shown.
            UsageError: a prompt and its reply would be longer than the model's window; a prompt is never cut.
        """
        if self.action_head is None:
            self.check_window(self.prompts(obs), sampling.max_new_tokens)
            # float32 adapters are cast to the layers' dtype once for all tokens, not twice for each
            with cast_adapters(self.model):
                return self._sample_texts(obs, seeds, sampling)
        self.check_window(self.prompts(obs), max_tokens=0)
        log_probs, values = self.act_log_probs(obs)
        chosen = sampling.pick(log_probs, seeds)
        picked = log_probs.gather(-1, chosen[:, None])[:, 0]
        return [
            SampledReply(
                answer={"ids": np.array([action], np.int64)},
                log_probs=np.array([log_prob], np.float32),
                action=action,
                value=value,
            )
            for action, log_prob, value in zip(chosen.tolist(), picked.tolist(), values.tolist(), strict=True)
        ]

    def _sample_texts(self, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[SampledReply]:
        """Returns replies that the language model writes: it reads the prompts of the batch once, and then one token at
        a time, with cached keys and values.
        """
        max_new_tokens = sampling.max_new_tokens
        noise = sampling.uniforms(seeds, max_new_tokens)
        padded = self.pad(obs)
        from transformers import DynamicCache  # slow to import

        cache = DynamicCache(config=self.backbone.text_config)
        hidden = self.hidden(padded, obs.images, cache)
        values = self.prompt_values(hidden, padded).tolist()
        # one token at a time for all replies together, until each has ended or reached its maximum length
        state = hidden[:, -1]
        chosen, log_probs = [], []
        is_open = torch.ones(len(obs), dtype=torch.bool, device=self.device)
        for step in range(max_new_tokens):
            table = self.backbone.next_token_log_probs(state, sampling.temperature)
            tokens = draw(table, None if noise is None else noise[step])
            log_probs.append(table.gather(-1, tokens[:, None])[:, 0])
            chosen.append(tokens)
            is_open = is_open & (tokens != self.stop_id)
            # the prediction after the last token is not needed
            if step + 1 == max_new_tokens or not is_open.any():
                break
            state = self._decode_step(padded, tokens, step, cache)
        # each ends with its first stop token, or where all were cut
        ids = torch.stack(chosen, 1)  # [B, N]
        is_stop = ids == self.stop_id
        lengths = torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, ids.shape[1]).tolist()
        all_ids, all_log_probs = ids.cpu().numpy(), torch.stack(log_probs, 1).cpu().numpy()
        replies = []
        for row, (length, is_complete) in enumerate(zip(lengths, is_stop.any(1).tolist(), strict=True)):
            # a view would keep the whole batch in memory as long as one of its replies
            own = all_ids[row, :length].copy()
            replies.append(
                SampledReply(
                    answer={"ids": own},
                    log_probs=all_log_probs[row, :length].copy(),
                    text=self.text_of(own),
                    value=values[row],
                    is_complete=is_complete,
                )
            )
        return replies

    def _decode_step(self, padded: Padded, tokens: Tensor, step: int, cache: "Cache") -> Tensor:
        """Returns [B, D] hidden states after one more token each. Finished replies are computed too, but not used."""
        # after the largest position of the prompt, in which an image may have fewer positions than tokens
        positions = (padded.positions.amax((0, 2)) + 1 + step)[None, :, None].expand(len(padded.positions), -1, 1)
        mask = padded.attention
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(tokens), step + 1)], 1)
        return self.backbone.decode_step(tokens, positions, mask, cache)

    def check_window(self, prompts: Sequence[IntArray], max_tokens: int) -> None:
        """Raises unless each of `prompts` fits into the model's window together with `max_tokens` of a reply.

        Raises:
            UsageError: one does not; a prompt is never cut.
        """
        longest, window = max(map(len, prompts), default=0), self.backbone.window
        if longest + max_tokens > window:
            raise UsageError(
                f"a prompt has {longest:,} tokens and its reply may have {max_tokens}; the model's window holds "
                f"{window:,}",
                "lower --policy.max-pixels (smaller images) or --algo.max-reply-tokens, or take a model with a larger "
                "window",
            )

    def log_probs(self, obs: Observations, answers: Sequence[Answer], reading: Reading = READING) -> Prediction:
        """See `Policy`; the action of an action head counts as an answer of one token."""
        tokens = [answer["ids"] for answer in answers]
        if self.action_head is None:
            return self.read(obs, tokens, reading)
        table, values = self.act_log_probs(obs, detach_values=reading.detach_values)
        # as if the action were a reply of one token, so that every loss of replies applies
        chosen = table.gather(-1, torch.tensor(np.stack(tokens), device=table.device))
        return Prediction(
            log_probs=chosen,
            values=values,
            entropies=-(table.exp() * table).sum(-1, keepdim=True) if reading.with_entropies else None,
            token_values=values[:, None] if reading.with_token_values else None,
        )

    def values(self, obs: Observations) -> Tensor:
        """Returns [B] values after each prompt."""
        padded = self.pad(obs)
        return self.prompt_values(self.hidden(padded, obs.images), padded)

    def prompt_values(self, hidden: Tensor, padded: Padded, detach: bool = False) -> Tensor:
        """Returns [B] values after each prompt.

        The head sees the last token of the prompt, as usual, and the mean of the image's tokens: if the next token
        depends little on the scene, the last token has no information for the critic.

        Args:
            hidden: [B, >= P, D] hidden states of `padded`.
            padded: the batch.
            detach: whether the value head's loss stops at the head.
        """
        return self._value(hidden[:, padded.prompt_length - 1], self._scenes(hidden, padded), detach)

    def act_log_probs(self, obs: Observations, *, detach_values: bool = False) -> tuple[Tensor, Tensor]:
        """Returns [B, A] log-probs of an action head's actions, and [B] values.

        Raises:
            ValueError: this policy acts by text.
        """
        if self.action_head is None:
            raise ValueError("this policy has no action head; set --policy.head actions")
        padded = self.pad(obs)
        hidden = self.hidden(padded, obs.images)
        return self._actions(hidden, padded), self.prompt_values(hidden, padded, detach_values)

    def _actions(self, hidden: Tensor, padded: Padded) -> Tensor:
        """Returns [B, A] log-probs of the action head's actions after each prompt; later tokens are ignored.

        Args:
            hidden: [B, >= P, D] hidden states of `padded`.
            padded: the batch.
        """
        assert self.action_head is not None, "asked of policies with an action head"
        last = hidden[:, padded.prompt_length - 1]  # it has attended to all tokens before
        return self.action_head(last.float()).log_softmax(-1)

    def _scenes(self, hidden: Tensor, padded: Padded) -> Tensor:
        """Returns [B, D], the mean over the image's tokens."""
        prompts = padded.ids[:, : padded.prompt_length]
        weights = (prompts == self.backbone.image_id)[..., None].to(hidden.dtype)
        return (hidden[:, : padded.prompt_length] * weights).sum(1) / weights.sum(1)

    def _value(self, states: Tensor, scenes: Tensor, detach: bool) -> Tensor:
        """Returns the value head's output for `states` [..., D] and their scenes [..., D]."""
        assert self.value_head is not None, "a chat VLM always has one"
        seen = torch.cat((states, scenes), -1)
        # a sum over one number is that number but no view: sharded learners need a separate output
        return self.value_head((seen.detach() if detach else seen).float()).sum(-1)

    def _features(self, keys: Sequence[bytes]) -> list[SeenImage]:
        """Returns the images of `keys`; a vision encoder in training encodes each again, once."""
        seen = self.images.get(keys)
        if not (self._looks_again and torch.is_grad_enabled()):
            return seen
        # parallel envs show the same image: one pass of the encoder, whose gradients are summed
        firsts = {key: image for key, image in zip(keys, seen, strict=True)}
        kept = [image.frame for image in firsts.values() if image.frame is not None]
        frames = [frame for each in kept for frame in each.reshape(-1, *each.shape[-3:])]
        features, again = iter(self.backbone.encode_images(frames)[0]), {}
        for key, image in firsts.items():
            fresh = torch.cat([next(features) for _ in image.grids], dim=1)
            again[key] = SeenImage(features=fresh, grids=image.grids, size_px=image.size_px)
        return [again[key] for key in keys]


def decode(tokenizer: Any, ids: IntArray) -> str:
    """Returns the text of `ids` [N], without special tokens and without cleaning up spaces."""
    return tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def token_ends(tokenizer: "PreTrainedTokenizerBase", ids: IntArray) -> IntArray:
    """Returns [N], the end of each token of `ids` in the decoded text, in characters; never decreases.

    The offsets come from decoding ever longer prefixes of the sampled ids. Tokenizing the text again would give other
    tokens: a policy need not spell a word as its tokenizer does. A token with only part of a character ends where the
    character begins.
    """
    text = decode(tokenizer, ids)
    ends = np.zeros(len(ids), np.int64)
    for count in range(1, len(ids) + 1):
        ends[count - 1] = len(os.path.commonprefix((decode(tokenizer, ids[:count]), text)))
    return np.maximum.accumulate(ends)


def tokens_of_span(tokenizer: "PreTrainedTokenizerBase", ids: IntArray, span: tuple[int, int]) -> NDArray[np.bool_]:
    """Returns [N], True for each token with a part of the characters `span` (begin, end) of the decoded text."""
    begin, end = span
    ends = token_ends(tokenizer, ids)
    begins = np.concatenate([[0], ends[:-1]])
    return (begins < end) & (ends > begin)


def is_vision(name: str) -> bool:
    """Returns whether a parameter belongs to a vision encoder, or to the layers between it and the language model."""
    return not _VISION.isdisjoint(name.split("."))


def _head(width: int, hidden: int, outputs: int) -> nn.Sequential:
    """Makes two layers in float32; the last begins at zero, so that values are 0 and actions equally likely."""
    last = nn.Linear(hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), last)
