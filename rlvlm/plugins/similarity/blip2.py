"""BLIP-2 as a judge: how well an image matches the goal's sentence, by either of its two heads.

The score is the matching head's probability of a match, or (1 + c) / 2 of the contrastive cosine c, which is the BLIP-2
baseline of Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681. Source: Li et al. 2023 (BLIP-2), arXiv:2301.12597, sec. 3.2.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Blip2ForImageTextRetrieval

from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.numeric import NumericJudge
from rlvlm.judges.similarity import Pixels, SimilarityModel
from rlvlm.plugins.similarity.encoders import Encoder, load_encoder, random_blip2

_KIND = "a BLIP-2 model with a matching head, such as Salesforce/blip2-itm-vit-g"


def blip2_judge(config: JudgeConfig) -> NumericJudge:
    """Returns a judge with the model that `config.model` names. Raises as `load_encoder` does."""
    if config.similarity.baseline:
        raise ValueError(
            "judge.similarity.baseline needs vectors of image and text, which backend clip has; "
            "BLIP-2's matching head gives a probability alone"
        )
    encoder = load_encoder(config, Blip2ForImageTextRetrieval, ("itm_head",), _KIND, random_blip2)
    return NumericJudge(config, SimilarityModel(config, Blip2Rater(encoder, config)))


class Blip2Rater:
    """Scores a match, by the query transformer that attends to image and words together, or their cosine."""

    sees_goal_images = False

    def __init__(self, encoder: Encoder, config: JudgeConfig) -> None:
        self.revision = encoder.revision
        head = config.similarity.head
        self.traits = f"{'' if head == 'match' else f'head={head} '}dtype={encoder.dtype}"
        self._head = head
        self._encoder = encoder

    @torch.inference_mode()
    def rate(self, images: Sequence[Pixels], goals: Sequence[str | Pixels]) -> NDArray[np.float64]:
        """Returns [N] probabilities of a match, or (1 + cosine) / 2 of the nearest query token; see `ImageRater`."""
        encoder = self._encoder
        assert all(isinstance(text, str) for text in goals), "goal images are refused before"
        # the query tokens come first, and positions count from there
        inputs = encoder.read(list(map(str, goals)), padding_side="right")
        tokens, mask, config = inputs["input_ids"], inputs["attention_mask"], encoder.model.config
        if config.image_token_index is not None:  # this checkpoint expects placeholders for its query tokens
            places = tokens.new_full((len(tokens), config.num_query_tokens), config.image_token_index)
            tokens = torch.cat([places, tokens], dim=1)
            mask = torch.cat([torch.ones_like(places), mask], dim=1)
        is_match = self._head == "match"
        logits = encoder.model(
            **encoder.see(images), input_ids=tokens, attention_mask=mask, use_image_text_matching_head=is_match
        ).logits_per_image.double()  # [N, 2] classes of the matching head, or [N, N] cosines
        # every pair of N images and N texts has a cosine; each image with its own text is on the diagonal
        return (logits.softmax(-1)[:, 1] if is_match else (1 + logits.diagonal()) / 2).cpu().numpy()
