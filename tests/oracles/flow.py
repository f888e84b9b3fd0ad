"""Flow matching for single numbers, in loops over Python floats; shares no code with the package.

Written from the formulas of Liu et al. 2025, arXiv:2505.05470 (SDE), Zhang et al. 2025, arXiv:2505.22094 (learned
noise) and Black et al. 2024, arXiv:2410.24164 (loss). The target of the closed forms is a normal distribution
N(m, s0^2): then x_t has the variance S_t = t^2 + (1 - t)^2 s0^2, and the velocity that flow matching learns is known.
"""

import math


def velocity(x, t, m, s0):
    """E[eps - a | x_t = x]."""
    slope = (t - (1 - t) * s0**2) / (t**2 + (1 - t) ** 2 * s0**2)
    return -m + slope * (x - (1 - t) * m)


def step(kernel, x, v, t, d, noise):
    """Mean and standard deviation of what follows x."""
    if kernel == "ode":
        return x - d * v, 0.0
    if kernel == "learned":
        return x - d * v, noise
    if kernel == "cps":
        action, eps = x - t * v, x + (1 - t) * v
        kept, fresh = math.cos(noise * math.pi / 2), math.sin(noise * math.pi / 2)
        return (1 - (t - d)) * action + (t - d) * kept * eps, (t - d) * fresh
    sigma = noise * math.sqrt(t / max(1 - t, d))
    drift = v + sigma**2 / (2 * t) * (x + (1 - t) * v)
    return x - d * drift, sigma * math.sqrt(d)


def final_moments(kernel, num_steps, noise, m, s0, correction=1.0):
    """Mean and standard deviation of the actions that K discrete steps make of standard normal noise.

    Args:
        kernel: ode, sde, learned or cps.
        num_steps: K.
        noise: of the kernel.
        m, s0: of the target.
        correction: of the SDE's drift by the score: 1 is right, 0 leaves it out, -1 has the wrong sign.
    """
    mean, variance, d = 0.0, 1.0, 1 / num_steps
    for k in range(num_steps):
        t = 1 - k / num_steps
        slope = (t - (1 - t) * s0**2) / (t**2 + (1 - t) ** 2 * s0**2)
        if kernel == "sde":
            sigma2 = noise**2 * t / max(1 - t, d)
            pull = correction * sigma2 / (2 * (t**2 + (1 - t) ** 2 * s0**2))  # of -score, a line through (1 - t) m
            drift = -m + (slope + pull) * (mean - (1 - t) * m)
            mean, variance = mean - d * drift, (1 - d * (slope + pull)) ** 2 * variance + sigma2 * d
            continue
        at_0 = step(kernel, 0.0, velocity(0.0, t, m, s0), t, d, noise)
        at_1 = step(kernel, 1.0, velocity(1.0, t, m, s0), t, d, noise)
        factor = at_1[0] - at_0[0]
        mean, variance = factor * mean + at_0[0], factor**2 * variance + at_0[1] ** 2
    return mean, math.sqrt(variance)


def log_prob_and_gradient(kernel, states, first, num_steps, noise, w, u, is_scored):
    """Sum of the log-densities of stored steps where v = w x + u t, and its derivatives by w and u.

    Args:
        kernel: sde, learned or cps.
        states: [K' + 1][H][D] one chunk.
        first: number of its first stored step.
        num_steps: K.
        noise: of the kernel.
        w, u: of the velocity.
        is_scored: [H][D].
    """
    total, by_w, by_u, d = 0.0, 0.0, 0.0, 1 / num_steps
    for j in range(len(states) - 1):
        t = 1 - (first + j) / num_steps
        for h, row in enumerate(states[j]):
            for i, x in enumerate(row):
                if not is_scored[h][i]:
                    continue
                v = w * x + u * t
                mean, std = step(kernel, x, v, t, d, noise)
                mean_by_v = step(kernel, x, v + 1, t, d, noise)[0] - mean  # it is linear in v
                if std < 1e-12:
                    continue
                z = (states[j + 1][h][i] - mean) / std
                total += -math.log(std) - 0.5 * math.log(2 * math.pi) - z * z / 2
                by_w += z / std * mean_by_v * x
                by_u += z / std * mean_by_v * t
    return total, by_w, by_u


def loss_and_gradient(actions, eps, t, w, u, is_real):
    """Flow-matching loss of one chunk where v = w x + u t, and its derivatives by w and u."""
    total, by_w, by_u, count = 0.0, 0.0, 0.0, 0
    for h, row in enumerate(actions):
        for i, action in enumerate(row):
            if not is_real[h][i]:
                continue
            x = t * eps[h][i] + (1 - t) * action
            error = w * x + u * t - (eps[h][i] - action)
            total, by_w, by_u, count = total + error**2, by_w + 2 * error * x, by_u + 2 * error * t, count + 1
    return total / count, by_w / count, by_u / count
