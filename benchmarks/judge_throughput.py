"""Labels per second of one judge asked in three ways: `python benchmarks/judge_throughput.py --out judge.json`.

(a) reference: the protocol of RL-VLM-F: two generate calls per pair, one pair after the other, over HTTP, base64 PNG.
(b) two_stage: the same two questions through rlvlm's Ray Serve deployment, in batches.
(c) direct: the label's probabilities from one forward pass, through the same deployment.

All three ask the same weights about the same pairs, on as many threads, in turns within each round, so that a busy
machine slows all. Accuracy is the agreement with the simulator's progress where that differs by 0.02 or more; every
label that is not left or right counts as wrong. `--random 8b` takes a Qwen3-VL of that size with random weights (for
speed alone), `--judge.quantization nf4`, `--judge.backend vllm` and `--gpus 1` choose how it runs.

Source of (a): RL-VLM-F, arXiv:2402.03681, app. B, as served by the reference systems' `POST /generate`.
"""

import base64
import io
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import httpx
import numpy as np
import tyro
from PIL import Image

from pocket_models.scenes import collect_scenes, draw_uniform_pairs, label_of
from rlvlm.core.judging import Label, Query
from rlvlm.judges import prompts
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.reading import parse_label
from rlvlm.pocket.models import weights_folder
from rlvlm.serving.config import PlacementConfig

NUMBER_OF = {Label.LEFT: 0, Label.RIGHT: 1, Label.TIE: -1, None: -2}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "8b": {
        "text": {
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 12288,
            "vocab_size": 151936,
        },
        "vision": {
            "hidden_size": 1152,
            "depth": 27,
            "num_heads": 16,
            "intermediate_size": 4304,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "0.01b": {
        "text": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512},
        "vision": {"depth": 4, "out_hidden_size": 256},
    },
}


@dataclass(frozen=True, kw_only=True)
class Config:
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    random: Literal["", "8b", "0.01b"] = ""
    """Size of a random-weight Qwen3-VL to measure in place of `judge.model`."""
    pairs: int = 32
    """Pairs per round and way."""
    rounds: int = 5
    gpus: float = 0.0
    """Share of a GPU of each judge's process."""
    replicas: int = 1
    """Replicas of each served judge; above 1 it may use more cores than the reference's one server does."""
    scenes: str = "drawer_open"
    seed: int = 0
    ways: tuple[Literal["reference", "two_stage", "direct"], ...] = ("reference", "two_stage", "direct")
    out: Path | None = None


def make_pairs(config: Config) -> tuple[list[Query], list[int]]:
    """Pairs as the preference loop draws them, with the true labels."""
    scenes = next(collect_scenes(config.scenes, "held_out", config.seed))
    drawn = draw_uniform_pairs(scenes, config.pairs, np.random.default_rng(config.seed))
    queries = [
        Query(goal=scenes.goal, left=scenes.images[[left]], right=scenes.images[[right]]) for left, right in drawn
    ]
    return queries, [label_of(*scenes.progress[pair]) for pair in drawn]


def make_random(size: str, folder: Path) -> Path:
    """A Qwen3-VL of that size with random weights, with the pocket judge's tokenizer and images' processor."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    shutil.copytree(weights_folder(), folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(weights_folder())
    for name, values in SIZES[size].items():
        part = getattr(config, f"{name}_config")
        for key, value in values.items():
            setattr(part, key, value)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


# --- the reference's way ----------------------------------------------------------------------------------------------


def serve_reference(config: JudgeConfig, port: Any) -> None:
    """A plain HTTP server in front of the model: one chat per request, greedy, as the reference systems run it."""
    import torch

    from rlvlm.judges.build import build_judge

    torch.set_num_threads(1)
    judge: Any = build_judge(config)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for part in [part for message in body["messages"] for part in message["content"]]:
                if part["type"] == "image":
                    part["image"] = decode(part["image"])
            text = judge.generate(
                [body["messages"]], max_new_tokens=body["max_tokens"], temperature=body["temperature"]
            )[0]
            answer = json.dumps({"text": text}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    port.put(server.server_port)
    server.serve_forever()


def encode(image: np.ndarray) -> str:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def decode(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"))


class ReferenceClient:
    """Asks for a report on two images, then for the label in that report; one pair after the other."""

    def __init__(self, port: int, config: JudgeConfig) -> None:
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
        self._max_tokens = config.max_new_tokens

    def __call__(self, queries: Sequence[Query]) -> list[int]:
        return [self._label(query) for query in queries]

    def _label(self, query: Query) -> int:
        report = self._generate(prompts.compare_messages("two_stage", query))
        return NUMBER_OF[parse_label(self._generate(prompts.label_messages(query.goal, report)))]

    def _generate(self, messages: list[Any]) -> str:
        for message in messages:
            message["content"] = [
                part | {"image": encode(part["image"])} if part["type"] == "image" else part
                for part in message["content"]
            ]
        body = {"messages": messages, "max_tokens": self._max_tokens, "temperature": 0}
        return self._http.post("/generate", json=body).raise_for_status().json()["text"]


# --- the run ----------------------------------------------------------------------------------------------------------


def start_ways(config: Config, stack: ExitStack) -> dict[str, Callable[[Sequence[Query]], list[int]]]:
    """Every way of asking, ready."""
    import ray

    from rlvlm.serving.apps import start_judge

    ways: dict[str, Callable[[Sequence[Query]], list[int]]] = {}
    if "reference" in config.ways:
        context = multiprocessing.get_context("spawn")
        port = context.Queue()
        server = context.Process(target=serve_reference, args=(config.judge, port), daemon=True)
        server.start()
        stack.callback(server.kill)
        ways["reference"] = ReferenceClient(port.get(timeout=1800), config.judge)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    stack.callback(ray.shutdown)
    for prompt in [way for way in config.ways if way != "reference"]:
        placement = PlacementConfig(num_replicas=config.replicas, num_cpus=1, num_gpus=config.gpus, timeout_s=1800)
        judge = replace(config.judge, prompt=prompt)
        running = stack.enter_context(start_judge(judge, placement, prompt))
        ways[prompt] = lambda queries, judge=running: [NUMBER_OF[verdict.label] for verdict in judge.compare(queries)]
    return ways


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    with ExitStack() as stack:
        if config.random:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            judge = replace(config.judge, backend="transformers", model=str(make_random(config.random, folder)))
            config = replace(config, judge=judge)
        queries, truth = make_pairs(config)
        ways = start_ways(config, stack)
        labels = {name: ask(queries[:2]) for name, ask in ways.items()}  # warm
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(config.rounds):
            for name, ask in ways.items():
                start = time.perf_counter()
                labels[name] = ask(queries)
                seconds[name].append(time.perf_counter() - start)
            figures = ", ".join(f"{name} {len(queries) / times[-1]:.2f}/s" for name, times in seconds.items())
            print(f"round {number + 1}: {figures}", file=sys.stderr)
    report = summary(config, seconds, labels, truth)
    print(json.dumps(report, indent=2))
    if config.out:
        config.out.write_text(json.dumps(report, indent=2) + "\n")


def summary(config: Config, seconds: dict[str, list[float]], labels: dict[str, list[int]], truth: list[int]) -> dict:
    decided = [place for place, label in enumerate(truth) if label >= 0]
    rates = {name: [len(truth) / time_s for time_s in times] for name, times in seconds.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {}
    if "reference" in rates:
        for name in rates:
            ratios[name] = statistics.median(
                ours / theirs for ours, theirs in zip(rates[name], rates["reference"], strict=True)
            )
    return {
        "model": config.judge.model or config.judge.backend,
        "random_weights": config.random,
        "quantization": config.judge.quantization,
        "dtype": config.judge.dtype,
        "pairs": len(truth),
        "rounds": config.rounds,
        "batch_size": config.judge.batch_size,
        "labels_per_s": {name: round(value, 3) for name, value in medians.items()},
        "labels_per_s_by_round": {name: [round(value, 3) for value in values] for name, values in rates.items()},
        "times_reference": {name: round(value, 2) for name, value in ratios.items()},
        "accuracy": {
            name: round(sum(got[place] == truth[place] for place in decided) / max(1, len(decided)), 4)
            for name, got in labels.items()
        },
        "decided_by_truth": len(decided),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.processor() or platform.platform()}",
    }


if __name__ == "__main__":
    main()
