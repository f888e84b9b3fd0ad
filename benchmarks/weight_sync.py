"""Time that weights take from learners that share them out to the replicas that sample, by the model's size.

    python benchmarks/weight_sync.py --out sync.json
    python benchmarks/weight_sync.py --sizes 10 --backend vllm      # with `make vllm`

Models of Qwen2.5-VL's class with the proportions of its 3B config, random weights, float32; two learners on gloo
(FSDP2) and two replicas, on whatever cores there are. Medians, in seconds:

out: learners gather tensor by tensor and write buckets, the run's own process reads them.
in: the first replies with new weights, less the same replies with weights that are there; both replicas load them.
error: of a fixed reply's log-probs in the replicas after it, nats a token, beside the trainer's.

    python benchmarks/weight_sync.py --cast-mib 323 4096      # float32 weights of so many MiB for an engine in bfloat16
    python benchmarks/weight_sync.py --cast-mib 323 2048 --two-nodes

sends them from this process to another one through Ray's object store, as they are or cast here, by turns: out is cast
and put, in is fetched, checked and copied. The store has the size that a run plans for two versions in float32.
"""

import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ray
import torch
import tyro
from ray.cluster_utils import Cluster
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient, PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.sft_config import ReplySFTConfig
from rlvlm.algorithms.sharding import fetch_bucket, into_store
from rlvlm.core import metrics
from rlvlm.core.episodes import Observations
from rlvlm.envs.registry import task_env
from rlvlm.envs.slots import make_slot
from rlvlm.pocket.models import weights_folder
from rlvlm.policies.buckets import Bucket, fill_from_buckets, write_buckets
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.runs.start.build import built
from rlvlm.runs.start.ray_session import store_room
from rlvlm.serving.apps import running_policy
from rlvlm.serving.config import PolicyVllmConfig, ServedEngineConfig
from rlvlm.serving.engine import ServedEngine

SIZES = {10: (256, 7), 50: (512, 10), 200: (1024, 10)}
"""Width and layers, by millions of parameters."""
_TASK = "number_line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    sizes: tuple[int, ...] = tuple(SIZES)
    """Millions of parameters."""
    learns: tuple[Literal["all", "lora"], ...] = ("all", "lora")
    backend: Literal["transformers", "vllm"] = "transformers"
    learners: int = 2
    replicas: int = 2
    bucket_mib: int = 256
    rounds: int = 3
    cast_mib: tuple[int, ...] = ()
    """MiB of float32 weights that are sent to an engine in bfloat16, instead of all else."""
    two_nodes: bool = False
    """Whether that engine is on another node, which is in name alone: a Ray of its own on this machine."""
    out: Path | None = None
    """File for the figures, as JSON."""


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    torch.set_num_threads(1)
    cores = max(8, config.learners + config.replicas + 2)  # in Ray's books: those of the machine are shared
    store_bytes = store_room(2 * max(config.cast_mib) << 20) if config.cast_mib else 3 << 30
    here: dict[str, Any] = {"num_cpus": cores, "object_store_memory": store_bytes}
    if config.two_nodes:
        cluster = Cluster(initialize_head=True, head_node_args={**here, "include_dashboard": False})
        cluster.add_node(**here, resources={"engine": 1})
        ray.init(cluster.address, log_to_driver=False)
    else:
        ray.init(**here, include_dashboard=False, log_to_driver=False)
    report: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    for mib in config.cast_mib:
        report[f"{mib} MiB"] = cast(config, mib)
        print(f"{mib} MiB", json.dumps(report[f"{mib} MiB"]), flush=True)
    for millions in () if config.cast_mib else config.sizes:
        with tempfile.TemporaryDirectory() as folder:
            count = save_model(Path(folder), *SIZES[millions])
            for learns in config.learns:
                name = f"{count / 1e6:.0f} M, {learns}"
                report[name] = measured(config, folder, learns)
                print(name, json.dumps(report[name]), flush=True)
    if config.out:
        config.out.write_text(json.dumps(report, indent=2) + "\n")


class Engine:
    """Holds weights in bfloat16."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        torch.set_num_threads(1)
        self.own = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}

    def load(self, buckets: list[Bucket]) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        fill_from_buckets(self.own, buckets, fetch_bucket)
        return time.monotonic() - began

    def holds(self, name: str) -> torch.Tensor:
        return self.own[name]


def cast(config: Config, mib: int) -> dict[str, Any]:
    """Medians of both ways, seconds; the first round is not counted."""
    state = {f"model.{number}": part for number, part in enumerate(torch.randn(mib << 18).split(8 << 18))}
    place = {"engine": 1} if config.two_nodes else {}
    engine: Any = ray.remote(num_cpus=1, resources=place)(Engine).remote(
        {name: value.shape for name, value in state.items()}
    )
    ways: dict[str, Any] = {"as it is": lambda value: value, "cast": lambda value: value.to(torch.bfloat16)}
    found = {way: [] for way in ways}
    buckets: list[Bucket] = []
    for number in range(config.rounds + 1):
        for way, whole in ways.items():
            began = time.monotonic()
            # the version before lies there until this one takes its place
            buckets = write_buckets(state, into_store, size=config.bucket_mib << 20, whole=whole)
            out_s = time.monotonic() - began
            seconds = out_s, ray.get(engine.load.remote(buckets))
            found[way] += [seconds] if number else []
            for name in (next(iter(state)), next(reversed(state))):
                assert torch.equal(ray.get(engine.holds.remote(name)), state[name].to(torch.bfloat16)), "to the bit"
    ray.kill(engine)
    medians = {way: torch.tensor(rows).median(0).values.tolist() for way, rows in found.items()}
    return {way: {"out": round(out_s, 3), "in": round(in_s, 3)} for way, (out_s, in_s) in medians.items()}


def save_model(folder: Path, width: int, layers: int) -> int:
    """Writes a random model with the pocket policy's tokens to `folder`; returns how many parameters it has."""
    tokenizer = AutoTokenizer.from_pretrained(weights_folder("policy"))
    marks = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    marks |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    text = {  # 2,048 wide, 11,008 within, heads of 128, one in 8 for keys and values
        "vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 43 * width // 8,
        "num_hidden_layers": layers, "num_attention_heads": width // 64, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "out_hidden_size": width, "num_heads": 2, "intermediate_size": 128,
        "fullatt_block_indexes": [1], "window_size": 56,
    }  # fmt: skip
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in marks.items()}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pixels = (2 * 14) ** 2
    Qwen2VLImageProcessorPil(patch_size=14, size={"shortest_edge": pixels, "longest_edge": 4 * pixels}).save_pretrained(
        folder
    )
    return sum(parameter.numel() for parameter in model.parameters())


def measured(config: Config, folder: str, learns: Literal["all", "lora"]) -> dict[str, float]:
    """Medians over rounds; the first is not counted."""
    policy = PolicyConfig(model=folder, device="cpu", learns=learns)
    vllm = PolicyVllmConfig(eager=True, max_tokens=1024)
    engine = ServedEngineConfig(
        num_replicas=config.replicas, num_cpus=0.5, bucket_mib=config.bucket_mib, backend=config.backend,
        **({"vllm": vllm} if config.backend == "vllm" else {}),
    )  # fmt: skip
    slot = make_slot(_TASK, task_env(_TASK))
    slot.begin(0)
    image = slot.env.draw(slot.turn.snapshot[None])
    num = 2 * config.replicas
    asked = Observations(texts=(slot.turn.prompt,) * num, images=slot.obs.images * num), range(num)
    with contextlib.ExitStack() as stack:
        count = len(slot.env.action_names)
        used = engine.vllm if config.backend == "vllm" else None
        app = stack.enter_context(running_policy(policy, count, engine.placement, "sync", batch_size=2, vllm=used))
        settings = (
            PolicyGradientAlgorithmConfig()
            .settings(task=_TASK, env_settings=task_env(_TASK))
            .settings(policy=policy, make_engine=partial(ServedEngine, app, config=engine))
            .settings(
                algo=PolicyGradientConfig(
                    num_learners=config.learners, shard=config.learners > 1, num_envs=4, rollout_turns=16
                ),
                sft=ReplySFTConfig(turns=0),
                total_steps=100,
            )  # fmt: skip
            .debugging(seed=0)
        )
        algorithm: PolicyGradient = stack.enter_context(built(settings))
        algorithm.prepare(lambda line: None)
        served: Any = algorithm.rollouts.engine
        served.show(list(slot.obs.images), image)
        found: dict[str, list[float]] = {"out": [], "in": []}
        mib = 0.0
        for number in range(config.rounds + 1):
            moved(algorithm, number)
            began = time.monotonic()
            algorithm._sync_weights()
            out_s = time.monotonic() - began
            algorithm._version += 1
            weights = algorithm._pack()
            mib = sum(place.end - place.begin for bucket in weights.buckets for place in bucket.tensors) / 2**20
            served.use(weights)
            seconds = []
            for _ in range(2):
                began = time.monotonic()
                served.reply(*asked, ReplySampling(max_new_tokens=4))
                seconds.append(time.monotonic() - began)
            if number:
                found["out"].append(out_s)
                found["in"].append(seconds[0] - seconds[1])
        error = served.report()[metrics.ENGINE_SYNC_ERROR]
    return {"MiB": round(mib, 1), **{name: round(statistics.median(all_), 3) for name, all_ in found.items()}} | {
        "error": error
    }


def moved(algorithm: PolicyGradient, number: int) -> None:
    """Has all learners' weights change a little, as an update would."""

    def move(learner: Any) -> None:
        with torch.no_grad():
            for value in learner.policy.trained_state().values():
                value.mul_(1.0 + 1e-3 * (number + 1))

    for answer in algorithm.learner_group.foreach_learner(move):  # pyright: ignore[reportOptionalMemberAccess]
        answer.get()


if __name__ == "__main__":
    main()
