"""The pocket VLA's forward pass for one observation, in numpy with loops; shares no code with the package.

Written from the description of OpenVLA-OFT (Kim et al. 2025, arXiv:2502.19645): an instruction scales and shifts what
each convolution finds (FiLM), every action token of a chunk comes out of one pass. The spatial softmax is that of
Levine et al. 2016, arXiv:1504.00702.
"""

import zlib

import numpy as np


def _conv(image, weight, bias, stride, padding, dilation=1):
    """[C, H, W] to [O, H', W']."""
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    size = (weight.shape[2] - 1) * dilation + 1
    height = (padded.shape[1] - size) // stride + 1
    width = (padded.shape[2] - size) // stride + 1
    out = np.zeros((len(weight), height, width))
    for o in range(len(weight)):
        for y in range(height):
            for x in range(width):
                patch = padded[:, y * stride : y * stride + size : dilation, x * stride : x * stride + size : dilation]
                out[o, y, x] = (patch * weight[o]).sum() + bias[o]
    return out


def _linear(w, name, x):
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def _conditioned(w, name, maps, said):
    both = _linear(w, name, said)
    count = len(maps)
    return np.maximum(maps * (1 + both[:count, None, None]) + both[count:, None, None], 0)


def logits_and_offsets(w, images, instruction, proprio):
    """[tokens, 256] and [ways] of images [cameras, H, W, 3], an instruction and proprioception [P].

    Args:
        w: weights by name, float64.
        images: uint8.
        instruction: words.
        proprio: in env units.
    """
    vocabulary = len(w["words.weight"]) - 1
    spoken = instruction.lower().split()
    spoken += [f"{spoken[i]} {spoken[i + 1]}" for i in range(len(spoken) - 1)]
    rows = [w["words.weight"][zlib.crc32(text.encode()) % vocabulary] for text in spoken[:32]]
    said = np.sum(rows, axis=0) / len(rows) if rows else np.zeros(w["words.weight"].shape[1])
    seen = []
    for image in images:
        pixels = image.transpose(2, 0, 1) / 127.5 - 1
        maps = _conditioned(w, "look_for", _conv(pixels, w["look.weight"], w["look.bias"], 2, 2), said)
        for number in range(sum(name.startswith("look_around.") for name in w) // 2):
            weight, bias, reach = w[f"look_around.{number}.weight"], w[f"look_around.{number}.bias"], 2 ** (number + 1)
            maps = maps + _conditioned(w, f"look_around_for.{number}", _conv(maps, weight, bias, 1, reach, reach), said)
        maps = _conditioned(w, "find_for", _conv(maps, w["find.weight"], w["find.bias"], 1, 1), said)
        side = maps.shape[1]
        line = np.linspace(-1, 1, side)
        where = []
        for channel, sharpness in zip(maps, w["log_sharpness"][:, 0], strict=True):
            odds = np.exp(channel * np.exp(sharpness) - (channel * np.exp(sharpness)).max())
            odds /= odds.sum()
            where += [(odds * line[:, None]).sum(), (odds * line[None, :]).sum()]
        seen += [*where, *maps.mean((1, 2))]
    hidden = np.maximum(_linear(w, "trunk.0", np.concatenate([seen, said, proprio])), 0)
    hidden = np.maximum(_linear(w, "trunk.2", hidden), 0)
    tokens = _linear(w, "queries", hidden).reshape(len(w["bias"]), -1)
    centred = tokens - tokens.mean(1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    normed = normed * w["norm.weight"] + w["norm.bias"]
    return normed @ w["bins"].T + w["bias"], _linear(w, "offset_head", hidden)
