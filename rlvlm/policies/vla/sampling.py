"""Probabilities of action tokens, and drawing them: float32, over exactly the 256 bins, at one temperature.

What is drawn is an action, so the two names of the top bin count as one: its probability is their sum.
"""

import torch
from torch import Tensor

from rlvlm.policies.vla.tokens import ALIAS, TOP_BIN


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities `[..., 255]` of the actions that bins decode to, from logits `[..., 256]`, float32, nats."""
    # log p(top) = log(p(254) + p(255)): both decode to the same action
    every = torch.log_softmax(logits.float() / temperature, dim=-1)
    top = torch.logaddexp(every[..., TOP_BIN], every[..., ALIAS])
    return torch.cat([every[..., :TOP_BIN], top[..., None]], dim=-1)


def log_probs_of(logits: Tensor, bins: Tensor, temperature: float) -> Tensor:
    """Log-probabilities `[...]` of the actions that `bins` `[...]` stand for, float32, nats.

    The same numbers as `log_distribution` picked at `bins`, without making a second table.
    """
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, bins.clamp(max=TOP_BIN)[..., None])[..., 0]
    chosen = torch.where(bins >= TOP_BIN, torch.logaddexp(scaled[..., TOP_BIN], scaled[..., ALIAS]), chosen)
    return chosen - scaled.logsumexp(dim=-1)


def draw_bins(
    logits: Tensor, temperature: float, generator: torch.Generator, shared: int = 1, explored: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One bin for each token, and its log-probability.

    Args:
        logits: [..., 256].
        temperature: > 0.
        generator: on the CPU; draws uniform numbers.
        shared: so many equal parts of the last row of tokens are drawn with the same numbers: with the env steps of a
            chunk as parts, each dimension of its actions perturbed to the same side in all of them. Each token has the
            same distribution whatever this is.
        explored: [the last row of tokens] bool, those that are drawn; of the others the likeliest is taken, whose
            log-probability is then 0, as no other token's is. None: all are drawn.

    Returns:
        Bins [...] from 0 to 254, and their log-probabilities [...], float32.
    """
    scaled = logits.float() / temperature
    # the inverse of the distribution function: the first bin whose running sum exceeds a uniform number
    scaled -= scaled.amax(dim=-1, keepdim=True)
    rising = torch.exp(scaled).cumsum_(dim=-1)  # in place: these are the largest tensors of a rollout
    total = rising[..., -1:]
    *rows, num = logits.shape[:-1]
    uniform = torch.rand((*rows, num // shared), generator=generator).repeat((1,) * len(rows) + (shared,))
    uniform = uniform.to(logits.device)
    bins = torch.searchsorted(rising, uniform[..., None] * total).clamp(max=TOP_BIN)  # the alias becomes the top
    chosen = scaled.gather(-1, bins)
    top = torch.logaddexp(scaled[..., TOP_BIN], scaled[..., ALIAS])[..., None]
    log_probs = (torch.where(bins == TOP_BIN, top, chosen) - total.log())[..., 0]
    log_probs.clamp_(max=-torch.finfo(log_probs.dtype).tiny)  # what was certain was drawn all the same
    bins = bins[..., 0]
    if explored is not None and not explored.all():
        explored = explored.to(logits.device)
        bins = torch.where(explored, bins, likeliest_bins(logits))
        log_probs = torch.where(explored, log_probs, 0.0)
    return bins, log_probs


def likeliest_bins(logits: Tensor) -> Tensor:
    """The bin `[...]` from 0 to 254 of the likeliest action at temperature 1."""
    return log_distribution(logits, 1.0).argmax(dim=-1)


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy `[...]` of each token's action, nats."""
    distribution = log_distribution(logits, temperature)
    return -(distribution.exp() * distribution).sum(dim=-1)
