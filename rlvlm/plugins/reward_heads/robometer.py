"""Robometer: progress at each frame of a clip, success, and which of two clips did better.

Source: Robometer 2026, arXiv:2603.02115: a Qwen3-VL-4B with three heads, read at a special token after each frame. At
most 8 frames; progress is the probability-weighted mean of 10 bins from 0 to 1. The positions of the tokens follow its
authors' code; the sentences around them are ours unless `judge.wording` gives the published ones.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLPreTrainedModel

from rlvlm.core.judging import Clip, Query
from rlvlm.core.steps import Frames, spread
from rlvlm.judges import prompts
from rlvlm.judges.config import Abilities, JudgeConfig
from rlvlm.judges.numeric import NumericJudge
from rlvlm.plugins.reward_heads.backbone import chat_inputs, load_head_model, rows_where, stamp_parts
from rlvlm.vlms.chats import Chat, image_parts, text_part
from rlvlm.vlms.loading import LoadedVLM

PROGRESS, PREFERENCE, SPLIT = "<|prog_token|>", "<|pref_token|>", "<|split_token|>"
TOKENS = (SPLIT, "<|reward_token|>", PREFERENCE, "<|sim_token|>", PROGRESS)
"""Special tokens in the order of the authors' embedding rows; two of them are never read."""
RENAMED = {r"^model\.model\.": "model.", r"^model\.lm_head\.": "lm_head."}
"""Prefixes of weight names in LeRobot's copy, which has the language model's output head and one more level."""
_LAST = "progress_head.4.weight"


class RobometerNetwork(Qwen3VLPreTrainedModel):
    """A Qwen3-VL without its output head, with three heads instead; weight names as published."""

    attention = None
    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]  # noqa: RUF012 - as transformers declares it

    def __init__(self, config: Qwen3VLConfig) -> None:
        super().__init__(config)
        width = config.get_text_config().hidden_size
        num_bins: int = getattr(config, "progress_bins", 10)
        self.model = Qwen3VLModel(config)
        self.progress_head = _head(width, num_bins)
        if num_bins == 1:
            self.progress_head.append(nn.Sigmoid())
        self.preference_head = _head(width, 1)
        self.success_head = _head(width, 1)
        self.frame_pool_attn = nn.Linear(width, 1, bias=False)  # for a variant without tokens; every checkpoint has it
        self.post_init()

    @staticmethod
    def settings(folder: Path, raw: dict[str, Any]) -> Qwen3VLConfig:
        """Returns the network's config; the number of bins is read from the weights."""
        inner = raw.get("vlm_config", raw)  # its place in LeRobot's copy
        if inner.get("model_type") != "qwen3_vl":
            raise ValueError(f"its model_type is {inner.get('model_type')!r}, not 'qwen3_vl'")
        config = Qwen3VLConfig.from_dict(inner)
        assert isinstance(config, Qwen3VLConfig)
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as weights:
                if _LAST in weights.keys():  # noqa: SIM118 - it is no dict
                    config.progress_bins = weights.get_slice(_LAST).get_shape()[0]
                    return config
        raise ValueError(f"no file has {_LAST}")

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Returns the [B, N, D] hidden states after the last norm."""
        return self.model(**inputs, use_cache=False).last_hidden_state


def _head(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, width // 2),
        nn.LayerNorm(width // 2),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(width // 2, outputs),
    )


class Robometer:
    """Adapts a `RobometerNetwork` to `numeric.NumericModel`; `config.score` is `progress` or `success`."""

    abilities = Abilities(compare=frozenset({"direct"}), score=frozenset({"progress", "success"}), goal_pictures=False)
    max_frames = prompts.MAX_FRAMES

    def __init__(self, model: LoadedVLM, config: JudgeConfig) -> None:
        self._model = model
        self._sentences = prompts.sentences_of(config)
        self._column = {"progress": 0, "success": 1}[config.score]
        self.revision = model.revision
        self.prompt, self.decoding = stamp_parts(config, model)

    @torch.inference_mode()
    def rate(self, clips: Sequence[Clip]) -> tuple[NDArray[np.float64], list[str]]:
        """Returns [N] scores in [0, 1] at the last frame, and a text for each."""
        model = self._model
        inputs = chat_inputs(model, [self._progress_chat(clip) for clip in clips], are_counted=True)
        hidden = model.model(inputs)
        # the end of a clip counts; the frames before are its context
        answers = [self._read(rows[-1:]) for rows in rows_where(hidden, inputs["input_ids"], model.token_id(PROGRESS))]
        texts = [f"progress {progress:.3f}, success {success:.3f}" for progress, success in answers]
        return np.array([answer[self._column] for answer in answers]), texts

    @torch.inference_mode()
    def prefer(self, queries: Sequence[Query]) -> tuple[NDArray[np.float64], list[str]]:
        """Returns [N] logits that the left clip is preferred, and a text for each."""
        model = self._model
        inputs = chat_inputs(model, [self._preference_chat(query) for query in queries], are_counted=True)
        hidden = model.model(inputs)
        rows = torch.cat(rows_where(hidden, inputs["input_ids"], model.token_id(PREFERENCE)))
        logits = model.model.preference_head(rows)[:, 0].float()
        return logits.double().cpu().numpy(), [f"left {share:.4f}" for share in torch.sigmoid(logits).tolist()]

    def share(self, margins: NDArray[np.float64]) -> NDArray[np.float64]:
        return 1 / (1 + np.exp(-margins))

    def _read(self, rows: Tensor) -> tuple[float, float]:
        """Returns progress and success, both in [0, 1], from one frame's hidden state [1, D]."""
        network = self._model.model
        bins = network.progress_head(rows)[0].float()
        # progress = sum_i p_i i / (bins - 1), the mean of the bins' centres
        centres = torch.linspace(0, 1, len(bins), device=bins.device)
        progress = bins[0] if len(bins) == 1 else (bins.softmax(0) * centres).sum()
        return progress.clamp(0, 1).item(), torch.sigmoid(network.success_head(rows)[0, 0].float()).item()

    def _progress_chat(self, clip: Clip) -> Chat:
        asked = self._sentences["robometer_progress"].replace("{goal}", prompts.check_goal(clip.goal))
        return [{"role": "user", "content": [text_part(asked), *_frames(clip.frames)]}]

    def _preference_chat(self, query: Query) -> Chat:
        said = {name: text.replace("{goal}", prompts.check_goal(query.goal)) for name, text in self._sentences.items()}
        content = [
            text_part(said["robometer_preference"]),
            text_part(said["robometer_left"]),
            *_frames(query.left),
            text_part(SPLIT),
            text_part(said["robometer_right"]),
            *_frames(query.right),
            text_part(said["robometer_request"]),
            text_part(PREFERENCE),
        ]
        return [{"role": "user", "content": content}]


def _frames(frames: Frames) -> Chat:
    """Returns parts of a turn: at most 8 frames, each followed by the token at which the model states its progress."""
    return [part for image in image_parts(spread(frames, prompts.MAX_FRAMES)) for part in (image, text_part(PROGRESS))]


def robometer_judge(config: JudgeConfig) -> NumericJudge:
    """Returns a judge with the model that `config.model` names. Raises as `backbone.load_head_model` does."""
    model = load_head_model(config, RobometerNetwork, tokens=TOKENS, renamed=RENAMED)
    return NumericJudge(config, Robometer(model, config))
