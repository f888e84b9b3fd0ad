"""Replies per second of a policy on one core: `python benchmarks/policy_engine.py --out engine.json`.

(a) generate: the references' way: one prompt at a time through the model's own `generate`, image included.
(b) generate, batched: the same, prompts padded into one batch, images encoded again.
(c) engine, new images: the policy engine, with every image encoded anew before each batch.
(d) engine: the policy engine, images encoded once and their features kept, as a frozen vision encoder allows.

All four answer the same turns with the same weights, at temperature 1, in turns within each round, so that a busy
machine slows all. Times are processor seconds of this process.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import tyro

from rlvlm.core.sampling import ReplyRequest
from rlvlm.envs.registry import make_env, task_env
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import load_policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    task: str = "number_line"
    policy: PolicyConfig = PolicyConfig(device="cpu")
    batches: tuple[int, ...] = (1, 8, 32, 64)
    """Turns answered together in (b), (c) and (d)."""
    rounds: int = 5
    max_new_tokens: int = 40
    threads: int = 1
    out: Path | None = None
    """File for the figures, as JSON."""


class Contest:
    """The turns that all ways answer."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.engine = PolicyEngine(load_policy(config.policy), max_batch=max(config.batches))
        env = make_env(config.task, task_env(config.task), 0)
        turns = [env.reset(seed=seed)[0] for seed in range(max(config.batches))]
        snapshots = np.stack([turn.snapshot for turn in turns])
        self.frames = env.draw(snapshots)
        keys = [key.tobytes() for key in env.image_key(snapshots)]
        self.requests = [
            ReplyRequest(prompt=turn.prompt, image=key, seed=seed)
            for seed, (turn, key) in enumerate(zip(turns, keys, strict=True))
        ]
        missing = self.engine.missing(keys)
        self.engine.show([keys[i] for i in missing], self.frames[missing])

    def generate(self, count: int) -> int:
        """The model's own generate for the first `count` turns together; the number of tokens written."""
        policy = self.engine.policy
        contents = [[{"type": "image"}, {"type": "text", "text": r.prompt}] for r in self.requests[:count]]
        chats = [policy.processor.apply_chat_template([{"role": "user", "content": content}]) for content in contents]
        inputs: Any = policy.processor(text=chats, images=[[frame] for frame in self.frames[:count]])
        with torch.no_grad():
            made = policy.model.generate(
                **inputs,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                suppress_tokens=policy.banned_ids.tolist(),
                max_new_tokens=self.config.max_new_tokens,
                eos_token_id=policy.stop_id,
                pad_token_id=policy.backbone.pad_id,
            )
        return int((made[:, inputs["input_ids"].shape[1] :] != policy.backbone.pad_id).sum())

    def one_by_one(self, count: int) -> int:
        """The references' way."""
        kept, total = self.requests, 0
        for place in range(count):
            self.requests = kept[place:]
            total += self.generate(1)
        self.requests = kept
        return total

    def sample(self, count: int) -> int:
        replies = self.engine.reply(self.requests[:count], max_new_tokens=self.config.max_new_tokens)
        return sum(len(reply.tokens.reply_ids) for reply in replies)

    def look_and_sample(self, count: int) -> int:
        self.engine.show([request.image for request in self.requests[:count]], self.frames[:count])
        return self.sample(count)


def measure(ways: dict[str, tuple[Callable[[int], int], int]], rounds: int) -> dict[str, dict[str, float]]:
    """Medians over rounds of replies and tokens per processor second, for each way and its number of turns."""
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        for name, (way, count) in ways.items():
            begin = time.process_time()
            tokens = way(count)
            elapsed = time.process_time() - begin
            if round_number:  # the first warms up
                rates[name].append((count / elapsed, tokens / elapsed))
    return {name: _medians(pairs) for name, pairs in rates.items()}


def _medians(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    replies, tokens = zip(*pairs, strict=True)
    return {"replies_per_s": round(statistics.median(replies), 1), "tokens_per_s": round(statistics.median(tokens), 1)}


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    torch.set_num_threads(config.threads)
    contest = Contest(config)
    ways: dict[str, tuple[Callable[[int], int], int]] = {"generate, one by one": (contest.one_by_one, 8)}
    for count in config.batches:
        ways[f"generate, batch {count}"] = contest.generate, count
        ways[f"engine, new images, batch {count}"] = contest.look_and_sample, count
        ways[f"engine, batch {count}"] = contest.sample, count
    figures = measure(ways, config.rounds)
    base = figures["generate, one by one"]["replies_per_s"]
    for name, rates in figures.items():
        times = rates["replies_per_s"] / base
        print(f"{name:32s} {rates['replies_per_s']:8.1f} replies/s {rates['tokens_per_s']:9.1f} tokens/s {times:6.1f}x")
    if config.out is not None:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        config.out.write_text(json.dumps({"task": config.task, "machine": machine, "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
