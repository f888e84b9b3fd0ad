"""The gradient of an update's loss, computed in micro-batches and summed over learners."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlvlm.algorithms.learners import add_up_gradients, all_reduce, local_shard
from rlvlm.algorithms.policy_gradient import losses
from rlvlm.algorithms.policy_gradient.batch import Batch, BatchMaker
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.sharding import clip_gradients
from rlvlm.core import metrics
from rlvlm.core.episodes import Answer, Observations
from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.envs.env import Env
from rlvlm.policies.protocol import Policy, Prediction, Reading, look

_LOG_RATIO_BOUND = 2.0
"""Bound on log-ratios of replies when an update's divergence is measured; otherwise one rare token dominates."""
_GAIN_CLIP = 0.2
"""Distance from 1 to which ratios are clipped when an update is tested."""
FIX = "lower algo.lr and algo.value_lr in the run's config.yaml, then `rlvlm resume`"
OWN = "loss/"
"""Prefix of the names of a loss's own metrics."""
_SUMS = (
    metrics.UPDATE_POLICY_LOSS, metrics.UPDATE_VALUE_LOSS, metrics.UPDATE_KL, metrics.UPDATE_CLIPPED,
    metrics.UPDATE_FIRST_RATIO, metrics.UPDATE_ENTROPY, "tokens", "turns", "entropy_tokens", "loss",
)  # fmt: skip
"""Metrics that are summed over micro-batches and learners."""


class Gradients:
    """Computes the gradient of an update's loss over some of its turns, in micro-batches, for all learners together.

    Args:
        policy: policy in training.
        env: env of the task; draws images the policy has not seen.
        algo: settings of the loss and of micro-batches.
        has_critic: whether the policy's values are trained too.
        batches: the learner's batch maker, which splits rows and knows whether values are per token.
    """

    def __init__(
        self, policy: Policy, env: Env, algo: PolicyGradientConfig, has_critic: bool, batches: BatchMaker
    ) -> None:
        self._policy, self._env, self._algo = policy, env, algo
        self._has_critic, self._batches = has_critic, batches

    def is_warming_up(self, num_updates: int) -> bool:
        """Returns whether only the critic is trained after `num_updates` updates."""
        return self._has_critic and num_updates < self._algo.value_warm_up

    def backward(
        self,
        batch: Batch,
        rows: Tensor,
        parameters: Sequence[nn.Parameter],
        num_updates: int,
        gains: Tensor | None = None,
    ) -> dict[str, float]:
        """Leaves the gradient of `rows`, over all learners, in `parameters`; returns the metrics of the step.

        Args:
            batch: batch of the update.
            rows: rows of this step, in micro-batches; each learner processes its share.
            parameters: parameters in training.
            num_updates: updates so far; in the first ones only the critic is trained, see `is_warming_up`.
            gains: gain of each env, if the policy before the step is tested on these rows: their gain is added.
        """
        for parameter in parameters:
            parameter.grad = None
        part_sums, own_means = self._add_gradients(batch, rows, self.is_warming_up(num_updates), gains)
        add_up_gradients(parameters)
        sums: dict[str, float] = dict(zip(_SUMS, all_reduce(part_sums).tolist(), strict=True))
        norm = clip_gradients(parameters, self._algo.max_grad_norm)  # of the sum: each learner's own would differ
        if not (math.isfinite(sums["loss"]) and math.isfinite(norm)):
            raise NumericsError(
                f"the loss ({sums['loss']}; algo.loss.policy {self._algo.loss.policy}) or its gradient ({norm}) is not "
                f"finite after {num_updates} updates",
                FIX,
                {"advantages": batch.advantages[rows.to(batch.advantages.device)].float().cpu().numpy()},
            )
        return _per_answer(sums, batch) | {metrics.UPDATE_GRADIENT: norm} | own_means

    def _add_gradients(
        self, batch: Batch, rows: Tensor, is_warming_up: bool, gains: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """Adds the gradient of this learner's share of `rows`; returns the share's `_SUMS`, and the means of the loss's
        own metrics.
        """
        algo = self._algo
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=self._policy.device)
        own_sums: dict[str, Tensor] = {}
        # Weights refer to the whole update, of which a minibatch is an estimate.
        # The mean over turns is taken in each minibatch; a sum over the update is divided among its minibatches.
        scale = len(batch.answers) / len(rows) if algo.loss.average == "turn" else algo.minibatches or 1.0
        parts = self.micro_batches(batch, local_shard(rows))
        # Learners that gather weights together make equally many passes: the last ones of some have no effect.
        for number in range(self._batches.agree(len(parts))):
            part = parts[number] if number < len(parts) else rows[:1]
            mini = self._mini_batch(batch, part, scale)
            policy_loss, value_loss, rest, clipped, measured = losses.total_loss(algo.loss, mini)
            value_loss = value_loss * (len(part) / len(rows))  # a mean over the part, while the policy's is a sum
            # a critic that knows nothing yet would teach the policy its errors
            total = value_loss if is_warming_up else policy_loss + value_loss + rest
            if number >= len(parts):  # a backward pass gathers weights too
                (total * 0.0).backward()
                continue
            total.backward()
            with torch.no_grad():
                found = self._measured(batch, part, mini, gains) | {
                    metrics.UPDATE_POLICY_LOSS: policy_loss,
                    metrics.UPDATE_VALUE_LOSS: value_loss,
                    "loss": total,
                }
                found[metrics.UPDATE_CLIPPED] = clipped * found["tokens"]
                sums += torch.stack([torch.as_tensor(found[name], device=sums.device).double() for name in _SUMS])
                for name, mean in measured.items():
                    own_sums[name] = own_sums.get(name, 0.0) + mean * len(part)
        # not summed over learners: a small minibatch leaves some without rows, and so without names to sum
        count = max(1, sum(map(len, parts)))
        return sums, {f"{OWN}{name}": float(total) / count for name, total in own_sums.items()}

    def _mini_batch(self, batch: Batch, rows: Tensor, scale: float) -> losses.MiniBatch:
        """Returns `rows` of a batch with the policy's present prediction; weights are multiplied by `scale`."""
        obs, answers = batch.obs.at(rows.tolist()), [batch.answers[row] for row in rows.tolist()]
        now = self._predict(obs, answers, int(batch.lengths[rows.tolist()].max()))
        own = partial(narrow, rows=rows, width=now.log_probs.shape[1])
        return losses.MiniBatch(
            log_probs=now.log_probs,
            old_log_probs=own(batch.log_probs),
            weights=own(batch.weights) * scale,
            is_action=own(batch.is_action),
            advantages=own(batch.advantages),
            action_size=batch.action_size,
            values=now.values if now.token_values is None else now.token_values,
            old_values=own(batch.values),
            returns=own(batch.returns) if self._has_critic and batch.returns is not None else None,
            entropies=now.entropies,
            reference=None if batch.reference is None else own(batch.reference),
            obs=obs,
            answers=answers,
            extras={name: own(column) for name, column in batch.extras.items()},
        )

    @staticmethod
    def _measured(batch: Batch, rows: Tensor, mini: losses.MiniBatch, gains: Tensor | None) -> dict[str, Any]:
        """Returns sums over the tokens of `rows`, by their names in `_SUMS`, without those of losses; adds the gain of
        each env to `gains`.
        """
        is_token = mini.weights > 0
        log_ratio = torch.where(is_token, mini.log_probs - mini.old_log_probs, 0.0)
        if gains is not None:
            gain = losses.surrogate_gain(log_ratio, mini.advantages.view(len(rows), -1), is_token, _GAIN_CLIP)
            gains.index_add_(0, batch.slots[rows].to(gains.device), gain)
        # KL(old || new) at each sampled token by k3: r - 1 - log r, r = new / old
        bound = math.inf if batch.chunk_elements else _LOG_RATIO_BOUND
        near = log_ratio.clamp(-bound, bound)
        entropies = log_ratio[:0] if mini.entropies is None else mini.entropies.detach()
        looked_at = is_token[: len(entropies)]
        return {
            metrics.UPDATE_KL: (near.exp() - 1 - near).sum(),
            metrics.UPDATE_FIRST_RATIO: (log_ratio.exp() - 1).abs().sum(),
            metrics.UPDATE_ENTROPY: (entropies * looked_at).sum(),
            "tokens": is_token.sum(),
            "turns": len(rows),
            "entropy_tokens": looked_at.sum(),
        }

    def _predict(self, obs: Observations, answers: Sequence[Answer], longest: int) -> Prediction:
        """Returns the policy's present prediction of some answers, the longest of which has `longest` elements.

        Raises:
            UsageError: the prediction has another shape.
        """
        look(self._policy, self._env, obs, self._batches.agree)  # others may have played
        reading = Reading(
            temperature=self._algo.temperature,
            detach_values=self._algo.is_value_detached,
            with_entropies=self._algo.loss.entropy_weight > 0,
            with_token_values=self._batches.has_token_values,
        )
        found = self._policy.log_probs(obs, answers, reading)
        if list(found.log_probs.shape) != [len(answers), longest]:
            raise UsageError(
                f"the policy {type(self._policy).__name__} gave log-probs of shape {list(found.log_probs.shape)} for "
                f"{len(answers)} answers of {longest} elements at most",
                "give one for each element that it sampled, [B, N]",
            )
        return found

    def micro_batches(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """Splits `rows` into micro-batches."""
        return [torch.tensor(part) for part in self._batches.micro_batches(batch.obs, batch.answers, rows.tolist())]


def narrow(column: Tensor, rows: Tensor, width: int) -> Tensor:
    """Returns [B] or [B, N], the `rows` of a batch's column. Columns per token, padded to the rollout's longest answer,
    are cut to `width`, the longest of these rows.
    """
    column = column[rows.to(column.device)]
    return column[:, :width] if column.ndim == 2 else column


def _per_answer(sums: dict[str, float], batch: Batch) -> dict[str, float]:
    """Returns `_SUMS` with divergence per answer and ratios and entropy per token."""
    tokens = max(sums["tokens"], 1.0)
    # the last chunk may be cut
    answers = tokens / batch.chunk_elements if batch.chunk_elements else sums["turns"]
    return sums | {
        metrics.UPDATE_KL: sums[metrics.UPDATE_KL] / answers,
        metrics.UPDATE_CLIPPED: sums[metrics.UPDATE_CLIPPED] / tokens,
        metrics.UPDATE_FIRST_RATIO: sums[metrics.UPDATE_FIRST_RATIO] / tokens,
        metrics.UPDATE_ENTROPY: sums[metrics.UPDATE_ENTROPY] / max(sums["entropy_tokens"], 1.0),
    }
