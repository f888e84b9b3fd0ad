"""A reward learned from comparisons or scores, as plain as possible: one member, one example, one step at a time.

It shares no code with `rlvlm.preferences`; it is given the first weights and the order in which comparisons are seen.
Christiano et al. 2017, arXiv:1706.03741, sec. 2.2: P(right is better) = exp R_right / (exp R_left + exp R_right), with
R the sum of predicted rewards over a segment; Kingma & Ba 2015, arXiv:1412.6980, algorithm 1.
"""

import math

import torch
from torch.nn.functional import conv2d, leaky_relu


def state_reward(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
    """Reward of one row [D + A]."""
    x = (row - weights["centre"]) / weights["scale"]
    for layer in (0, 2, 4):
        x = leaky_relu(weights[f"layers.{layer}.weight"] @ x + weights[f"layers.{layer}.bias"])
    return 3 * torch.tanh((weights["layers.6.weight"][0] @ x + weights["layers.6.bias"][0]) / 3)


def picture_reward(weights: dict[str, torch.Tensor], image: torch.Tensor) -> torch.Tensor:
    """Reward of one image [H, W, 3]."""
    x = image.permute(2, 0, 1)[None] / 255
    for layer, stride in ((0, 4), (2, 2), (4, 2), (6, 2)):
        kernel = weights[f"layers.{layer}.weight"]
        x = conv2d(x, kernel, weights[f"layers.{layer}.bias"], stride, kernel.shape[-1] // 2).clamp(min=0)
    return 3 * torch.tanh((weights["layers.9.weight"][0] @ x.reshape(-1) + weights["layers.9.bias"][0]) / 3)


def comparison_loss(returns, label):
    """Of the returns of left and right; `label` is 1 when the right one is better, else 0."""
    left, right = returns
    p_right = math.e**right / (math.e**left + math.e**right)
    return -torch.log(p_right if label else 1 - p_right)


def score_loss(returns, label):
    """Of the reward of a single frame with the score `label`: 0 stands for a reward of -1, 1 for 1."""
    (reward,) = returns
    return (reward - (2 * label - 1)) ** 2


def train(reward, weights, segments, labels, orders, batch_size, lr, loss_of=comparison_loss):
    """Trains one member.

    Args:
        reward: `state_reward` or `picture_reward`.
        weights: by name; trained in place. `centre` and `scale` stay as they are.
        segments: for each example the rows of each of its segments.
        labels: for each example what was said.
        orders: for each epoch the examples in the order in which they are seen.
        batch_size: examples per Adam step.
        lr: Adam's step size.
        loss_of: `comparison_loss` or `score_loss`.

    Returns:
        The mean loss of the batches of each epoch.
    """
    trained = [name for name in weights if name.startswith("layers")]
    first = {name: torch.zeros_like(weights[name]) for name in trained}
    second = {name: torch.zeros_like(weights[name]) for name in trained}
    step, epochs = 0, []
    for order in orders:
        batches = []
        for start in range(0, len(order), batch_size):
            for name in trained:
                weights[name] = weights[name].detach().requires_grad_()
            batch = order[start : start + batch_size]
            loss = torch.zeros(())
            for number in batch:
                returns = [sum(reward(weights, row) for row in side) for side in segments[number]]
                loss = loss + loss_of(returns, labels[number]) / len(batch)
            gradients = torch.autograd.grad(loss, [weights[name] for name in trained])
            step += 1
            for name, gradient in zip(trained, gradients, strict=True):
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.999 * second[name] + 0.001 * gradient**2
                unbiased_first, unbiased_second = first[name] / (1 - 0.9**step), second[name] / (1 - 0.999**step)
                weights[name] = weights[name].detach() - lr * unbiased_first / (unbiased_second.sqrt() + 1e-8)
            batches.append(float(loss.detach()))
        epochs.append(sum(batches) / len(batches))
    return epochs
