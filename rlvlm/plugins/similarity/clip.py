"""CLIP, SigLIP and similar models as judges: the cosine of image and goal, with an optional baseline.

The score of an image s for a goal g is (1 + r) / 2, where r is their cosine or, with `judge.similarity.baseline` b, the
reward of `baseline.baseline_reward`. The goal is a text, or an image if the question has one.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel

from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.numeric import NumericJudge
from rlvlm.judges.similarity import Pixels, SimilarityModel
from rlvlm.plugins.similarity.baseline import Units, baseline_reward, unit
from rlvlm.plugins.similarity.encoders import Encoder, load_encoder, random_clip

_KIND = "a model with image and text features, such as openai/clip-vit-base-patch32 or google/siglip-base-patch16-224"


def clip_judge(config: JudgeConfig) -> NumericJudge:
    """Returns a judge with the model that `config.model` names. Raises as `load_encoder` does."""
    parts = ("get_image_features", "get_text_features")
    rater = ClipRater(load_encoder(config, AutoModel, parts, _KIND, random_clip), config)
    return NumericJudge(config, SimilarityModel(config, rater))


class ClipRater:
    """Scores similarity in the embedding space that images and texts share."""

    sees_goal_images = True

    def __init__(self, encoder: Encoder, config: JudgeConfig) -> None:
        settings = config.similarity
        self.revision = encoder.revision
        self._encoder = encoder
        self._is_padded = encoder.model.config.model_type.startswith("siglip")
        self._alpha = settings.alpha
        self._texts: dict[str, NDArray[np.float64]] = {}
        self._baseline = self._of_text(settings.baseline) if settings.baseline else None
        baseline = f"baseline={settings.baseline!r} alpha={settings.alpha:g} " if settings.baseline else ""
        self.traits = f"{baseline}dtype={encoder.dtype}"

    @torch.inference_mode()
    def rate(self, images: Sequence[Pixels], goals: Sequence[str | Pixels]) -> NDArray[np.float64]:
        """Returns [N] scores in [0, 1]; see `judges.similarity.ImageRater`. Repeated goals are encoded once."""
        # a batch about one goal image would encode it once per question
        wanted = {_key(goal): goal for goal in goals if not isinstance(goal, str)}
        inputs = self._encoder.see([*images, *wanted.values()])
        # in float64: the projection below subtracts vectors that are nearly equal
        seen = _units(self._encoder.model.get_image_features(**inputs))
        drawn = dict(zip(wanted, seen[len(images) :], strict=True))
        states = seen[: len(images)]
        towards = np.stack([self._of_text(goal) if isinstance(goal, str) else drawn[_key(goal)] for goal in goals])
        if self._baseline is None:
            rewards = (states * towards).sum(-1)  # the cosine of each image and its goal
        else:
            rewards = baseline_reward(states, towards, self._baseline, self._alpha)
        return np.clip((1 + rewards) / 2, 0.0, 1.0)  # from [-1, 1] to [0, 1]; rounding may leave it

    def _of_text(self, text: str) -> NDArray[np.float64]:
        """Returns the [E] unit vector of a text; cached, since a run has one goal."""
        if text not in self._texts:
            # padded to full length and without a mask, as in its training: shorter inputs give other vectors
            inputs = self._encoder.read([text], **({"padding": "max_length"} if self._is_padded else {}))
            if self._is_padded:
                inputs.pop("attention_mask", None)
            with torch.inference_mode():
                self._texts[text] = _units(self._encoder.model.get_text_features(**inputs))[0]
        return self._texts[text]


def _units(features: torch.Tensor) -> Units:
    """Returns [N, E] unit vectors, whether the model returns features alone or in an output record."""
    return unit(getattr(features, "pooler_output", features).double().cpu().numpy())


def _key(image: Pixels) -> tuple[tuple[int, ...], bytes]:
    return image.shape, image.tobytes()
