"""RynnValue: seconds left until the task is done, read at special tokens after each frame.

Source: Huang et al. 2026, arXiv:2608.09853: a Qwen3-VL that answers in 256 bins from 0 to 512 s, evenly spaced in
symlog. Each answer is read at a group of equal tokens whose hidden states are concatenated; the tokens of a group
attend to each other and to everything before, and no other token attends to them. The relative head and the written
verdict, which the model also has, are loaded but not used.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLPreTrainedModel

from rlvlm.core.judging import Clip, Query
from rlvlm.core.steps import spread
from rlvlm.judges import prompts
from rlvlm.judges.config import Abilities, JudgeConfig
from rlvlm.judges.numeric import NumericJudge
from rlvlm.plugins.reward_heads.backbone import chat_inputs, load_head_model, rows_where, stamp_parts
from rlvlm.vlms.chats import Chat, image_parts, text_part
from rlvlm.vlms.loading import LoadedVLM

VALUE, RELATIVE = "<value>", "<relative_value>"
_ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh, "leaky_relu": nn.LeakyReLU}


class RynnValueNetwork(Qwen3VLPreTrainedModel):
    """A Qwen3-VL with heads for seconds; weight names as published."""

    attention = "eager"
    """Attention that accepts our masks over all pairs; the published model uses it too."""
    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]  # noqa: RUF012 - as transformers declares it

    def __init__(self, config: Qwen3VLConfig) -> None:
        super().__init__(config)
        settings: dict[str, Any] = config.rynnvalue
        width = config.get_text_config().hidden_size
        bins = settings["value_tokenizer_config"]["bins"]
        self.model = Qwen3VLModel(config)
        self.value_heads = nn.ModuleList(
            _Head(settings["value_head_config"], width * settings["value_token_repeat"], bins)
            for _ in range(settings["num_value_heads"])
        )
        relative = settings["relative_value_head_config"]
        self.relative_value_head = relative and _Head(
            relative,
            width * settings["relative_value_token_repeat"],
            settings["relative_value_tokenizer_config"]["bins"],
        )
        self.post_init()

    @staticmethod
    def settings(folder: Path, raw: dict[str, Any]) -> Qwen3VLConfig:
        """Returns the network's config; the settings of the heads are kept in its `rynnvalue`."""
        # transformers does not know this name: its own loader would refuse the folder
        if raw.get("model_type") != "rynn_value_lang":
            raise ValueError(f"its model_type is {raw.get('model_type')!r}, not 'rynn_value_lang'")
        scale = raw["value_tokenizer_config"]
        if scale["support_transform"] != "symlog" or raw.get("value_head_config") is None:
            raise ValueError("its values are not read by a head in symlog bins, as the published models' are")
        config = Qwen3VLConfig.from_dict({**raw, "model_type": "qwen3_vl", "attn_implementation": None})
        assert isinstance(config, Qwen3VLConfig)
        wanted = {"num_value_heads": 1, "value_token_repeat": 1, "relative_value_token_repeat": 1}
        config.rynnvalue = {
            **{name: int(raw.get(name, least)) for name, least in wanted.items()},
            "value_tokenizer_config": scale,
            "value_head_config": raw["value_head_config"],
            "relative_value_tokenizer_config": raw.get("relative_value_tokenizer_config"),
            "relative_value_head_config": raw.get("relative_value_head_config"),
        }
        return config

    def forward(self, inputs: dict[str, Tensor], groups: Tensor) -> Tensor:
        """Returns the [B, N, D] hidden states after the last norm.

        Args:
            inputs: from `chat_inputs`.
            groups: [B, N] group of each token, -1 for tokens without a group.
        """
        inputs = dict(inputs)
        there = inputs.pop("attention_mask").bool()
        model: Any = self.model  # transformers types ids by their numbers' width
        # computed here: the model derives positions from a 2D mask, and gets a mask of all pairs
        positions, _ = model.get_rope_index(
            inputs["input_ids"],
            mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=inputs["image_grid_thw"],
            attention_mask=there.long(),
        )
        closed = torch.finfo(self.dtype).min
        mask = torch.zeros(groups.shape[0], 1, groups.shape[1], groups.shape[1], dtype=self.dtype, device=groups.device)
        mask.masked_fill_(~open_pairs(there, groups)[:, None], closed)
        outputs = model(**inputs, attention_mask=mask, position_ids=positions, use_cache=False)
        return outputs.last_hidden_state


def open_pairs(there: Tensor, groups: Tensor) -> Tensor:
    """Returns a [B, N, N] mask: whether a token (row) attends to another (column).

    Each token attends to all earlier ones without a group, and to all of its own group.

    Args:
        there: [B, N] whether a token is not padding.
        groups: [B, N] group of each token, -1 for none.
    """
    causal = torch.ones(groups.shape[1], groups.shape[1], dtype=torch.bool, device=groups.device).tril()
    # so an answer's tokens may hold several hidden states, and no answer is seen by the next one
    own = (groups[:, :, None] == groups[:, None, :]) & (groups >= 0)[:, :, None]
    free = (groups < 0)[:, None, :] & there[:, None, :]
    return own | causal & free


def group_tokens(ids: Tensor, tokens: Sequence[int]) -> Tensor:
    """Returns the [B, N] group of each token of `ids` [B, N]: the index of its run of equal `tokens`, or -1."""
    is_own = torch.isin(ids, torch.tensor(list(tokens), device=ids.device))
    # equal neighbours are one group: an image separates two groups of one kind
    before = torch.nn.functional.pad(ids[:, :-1], (1, 0), value=-1)
    starts = is_own & (ids != before)
    return torch.where(is_own, starts.cumsum(dim=1) - 1, -1)


def seconds_of(logits: Tensor, smallest: float, largest: float) -> Tensor:
    """Returns [...] seconds for the logits of bins [..., bins]: symexp of their mean position in symlog."""
    first, last = (math.copysign(math.log1p(abs(bound)), bound) for bound in (smallest, largest))
    centres = torch.linspace(first, last, logits.shape[-1], device=logits.device)
    # seconds = symexp(sum_i p_i c_i), c_i evenly spread in symlog(x) = sign(x) log(1 + |x|)
    middle = (logits.float().softmax(-1) * centres).sum(-1)
    return middle.sign() * middle.abs().expm1()


class _Head(nn.Module):
    """Maps a group's concatenated hidden states to bins; linear, or a residual network as in BRO (arXiv:2405.16158)."""

    def __init__(self, settings: dict[str, Any], inputs: int, outputs: int) -> None:
        super().__init__()
        kinds = {"linear": lambda: nn.Linear(inputs, outputs), "bro": lambda: _Bro(settings, inputs, outputs)}
        if settings.get("head_type", "linear") not in kinds:
            raise ValueError(f"its heads are {settings['head_type']!r}, known are {', '.join(kinds)}")
        self.proj = kinds[settings.get("head_type", "linear")]()

    def forward(self, rows: Tensor) -> Tensor:
        return self.proj(rows)


class _Bro(nn.Module):
    def __init__(self, settings: dict[str, Any], inputs: int, outputs: int) -> None:
        super().__init__()
        width = settings.get("hidden_dims", 1024)
        self._activation = _ACTIVATIONS[settings.get("activation", "relu")]()
        self.input_layer = nn.Linear(inputs, width)
        self.input_norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(_Residual(width, self._activation) for _ in range(settings.get("depth", 2)))
        self.final_layer = nn.Linear(width, outputs)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self._activation(self.input_norm(self.input_layer(rows)))
        for block in self.blocks:
            rows = block(rows)
        return self.final_layer(rows)


class _Residual(nn.Module):
    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation
        self.fc1, self.ln1 = nn.Linear(width, width), nn.LayerNorm(width)
        self.fc2, self.ln2 = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.ln2(self.fc2(self._activation(self.ln1(self.fc1(rows)))))


class RynnValue:
    """Adapts a `RynnValueNetwork` to `numeric.NumericModel`: score = 1 - log(1 + seconds) / log(1 + max seconds)."""

    abilities = Abilities(compare=frozenset({"direct"}), score=frozenset({"progress"}), goal_pictures=False)
    max_frames = prompts.MAX_FRAMES

    def __init__(self, model: LoadedVLM, config: JudgeConfig) -> None:
        self._model = model
        self._sentences = prompts.sentences_of(config)
        self._settings: dict[str, Any] = model.model.config.rynnvalue
        self.revision = model.revision
        self.prompt, self.decoding = stamp_parts(config, model)

    @torch.inference_mode()
    def rate(self, clips: Sequence[Clip]) -> tuple[NDArray[np.float64], list[str]]:
        """Returns [N] scores in [0, 1] at the last frame, and a text for each."""
        seconds = self._seconds([self._chat(clip.goal, clip.frames) for clip in clips])
        # score = 1 - log(1 + s) / log(1 + s_max): equal ratios of time left are equal steps of the score
        most = math.log1p(self._settings["value_tokenizer_config"]["max_value"])
        scores = (1 - seconds.clamp(min=0).log1p() / most).clamp(0, 1)
        return scores.double().cpu().numpy(), [f"{value:.2f} s left" for value in seconds.tolist()]

    @torch.inference_mode()
    def prefer(self, queries: Sequence[Query]) -> tuple[NDArray[np.float64], list[str]]:
        """Returns [N] seconds left after the right clip minus those after the left one, and a text for each."""
        sides = [(query.goal, frames) for query in queries for frames in (query.left, query.right)]
        seconds = self._seconds([self._chat(goal, frames) for goal, frames in sides]).view(-1, 2)
        seconds = seconds.double().cpu().numpy()  # in bfloat16 two different sides could be equal
        texts = [f"{left:.2f} s and {right:.2f} s left" for left, right in seconds.tolist()]
        return seconds[:, 1] - seconds[:, 0], texts

    def share(self, margins: NDArray[np.float64]) -> None:
        """Returns None: a difference of seconds is no probability."""

    def _seconds(self, chats: Sequence[Chat]) -> Tensor:
        """Returns [N] seconds left at the last frame, averaged over the heads."""
        model, settings = self._model, self._settings
        inputs = chat_inputs(model, chats, are_counted=False)
        ids = inputs["input_ids"]
        hidden = model.model(inputs, group_tokens(ids, [model.token_id(VALUE), model.token_id(RELATIVE)]))
        repeat, scale = settings["value_token_repeat"], settings["value_tokenizer_config"]
        rows = torch.stack([states[-repeat:].flatten() for states in rows_where(hidden, ids, model.token_id(VALUE))])
        heads = [seconds_of(head(rows), scale["min_value"], scale["max_value"]) for head in model.model.value_heads]
        return torch.stack(heads).mean(dim=0)

    def _chat(self, goal: str, frames: NDArray[np.uint8]) -> Chat:
        """Returns task and questions, then each frame with its groups; the model's own text would follow."""
        names = ("rynnvalue_task", "rynnvalue_relative", "rynnvalue_remaining")
        content = [text_part(self._sentences[name].replace("{goal}", prompts.check_goal(goal))) for name in names]
        for number, image in enumerate(image_parts(spread(frames, prompts.MAX_FRAMES))):
            between = [text_part(RELATIVE)] * self._settings["relative_value_token_repeat"] if number else []
            content += [image, *between, *[text_part(VALUE)] * self._settings["value_token_repeat"]]
        return [{"role": "user", "content": content}]


def rynnvalue_judge(config: JudgeConfig) -> NumericJudge:
    """Returns a judge with the model that `config.model` names. Raises as `backbone.load_head_model` does."""
    model = load_head_model(config, RynnValueNetwork, tokens=(VALUE, RELATIVE), renamed={})
    return NumericJudge(config, RynnValue(model, config))
