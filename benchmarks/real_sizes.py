"""Models of published sizes with random weights, on one GPU: speed and memory of acting, learning and judging.

    python benchmarks/real_sizes.py policy           # Qwen2.5-VL-3B with LoRA on number_line
    python benchmarks/real_sizes.py vla              # OpenVLA-OFT 7B with LoRA on push_block
    python benchmarks/real_sizes.py smolvla          # SmolVLA 450M, its expert alone; pi0 and pi05 with 3.3 billion too
    python benchmarks/real_sizes.py judge            # Qwen3-VL-8B compares images, in bfloat16 and in NF4
    python benchmarks/real_sizes.py judge --small    # tiny sizes: what a CPU can try
    python benchmarks/real_sizes.py pi0 --folder /dev/shm --write-only    # the checkpoint alone, in /dev/shm/pi0

The engine and the learner of a run, in one process and without Ray. Weights are drawn, so nothing is learned; how fast
and how large is the same. The tokenizer has a token per byte, so prompts are some four times as long as with the
published one, and replies are as long as they may be, for a random model hardly ever stops.
"""

import gc
import json
import operator
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
import tyro
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.memory_plan import DEPTHS, VISION
from benchmarks.update_memory import WIDTHS
from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.chunks import ChunkRunner
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig, chunk_defaults
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.policy_gradient.turns import Actor, TurnRunner
from rlvlm.algorithms.sft_config import ReplySFTConfig
from rlvlm.algorithms.sft_replies import demonstrate
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.judging import Query
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.registry import make_env, task_env
from rlvlm.envs.slots import make_slot
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.plugins.lerobot.config import LeRobotConfig
from rlvlm.plugins.lerobot.loading import outline
from rlvlm.plugins.openvla.config import OpenVLAConfig
from rlvlm.plugins.openvla.network import CheckpointConfig, OpenVLANetwork
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.flow.config import FlowConfig
from rlvlm.policies.vlm.backbone import prompt_ids
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.rewards.config import ChunkRewardConfig
from rlvlm.runs.start.memory_plan import Workload, plan, size_of
from rlvlm.vlms.devices import use_expandable_segments
from tests.plugins.lerobot.tiny_lerobot import REAL_SIZES, REAL_VLM, VLM, shrink_pi0, write_settings
from tests.plugins.openvla.tiny_openvla import SMALL, STATISTICS, WORDS
from tests.tiny_vlm import IMAGE, build_tokenizer

QWEN3_VL_8B: dict[str, Any] = {
    "text_config": {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True
        },
    },
    "vision_config": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
        "out_hidden_size": 4096, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
    },
    "tie_word_embeddings": False,
}  # fmt: skip
"""From the published config."""
PI_REAL = ("chunk_size", "n_action_steps", "max_state_dim", "max_action_dim")
"""Sizes that LeRobot has alike for SmolVLA and pi0."""
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}


@dataclass(frozen=True, kw_only=True)
class Config:
    part: tyro.conf.Positional[Literal["policy", "vla", "smolvla", "pi0", "pi05", "judge"]]
    small: bool = False
    """Tiny sizes, on whatever there is."""
    updates: int = 3
    """Rollouts and updates, of which the first is not counted."""
    rows: int = 64
    """Envs that are played at once, or episodes of a VLA in all."""
    turns: int = 4
    """Turns of each env in a rollout."""
    quantization: Literal["none", "nf4"] = "none"
    """Of the policy's frozen weights."""
    folder: Path | None = None
    """Where the weights are written, e.g. in /dev/shm; a temporary one by default."""
    write_only: bool = False
    """Whether the weights stay in a folder below `folder` that is called like the part, and nothing is measured."""
    out: Path | None = None


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    use_expandable_segments()  # as a run does
    torch.manual_seed(0)
    writers = {"policy": write_policy, "vla": write_vla, "judge": write_judge}
    write = writers.get(config.part, write_flow)
    if config.write_only:
        if config.folder is None:
            raise SystemExit("--write-only needs --folder DIR, where the weights stay")
        print(write(config, config.folder / config.part))
        return
    runners = {"policy": run_policy, "vla": run_vla, "judge": run_judge}
    with TemporaryDirectory(dir=config.folder) as root:
        report = runners.get(config.part, run_flow)(config, write(config, Path(root) / "model"))
    report["card"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    text = json.dumps(report, indent=2)
    print(text)
    if config.out:
        config.out.write_text(text + "\n")


def write_policy(config: Config, folder: Path) -> Path:
    """A random Qwen2.5-VL-3B."""
    text = {**WIDTHS["qwen2.5-vl-3b"], **DEPTHS["qwen2.5-vl-3b"]}
    sections, vision = [16, 24, 24], {**VISION, "out_hidden_size": text["hidden_size"]}
    if config.small:
        text, sections = dict(_SMALL), [4, 2, 2]
        vision = {"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 64}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    return write_vlm(Qwen2_5_VLConfig, text, vision, folder, patch_px=14)


def run_policy(config: Config, folder: Path) -> dict[str, Any]:
    """A chat VLM that acts in text, and PPO with a value head."""
    algo = PolicyGradientConfig(
        num_envs=config.rows, rollout_turns=config.rows * config.turns, minibatch_turns=config.rows * config.turns // 4,
        epochs=1, max_reply_tokens=64, microbatch_tokens=8_192,
    )  # fmt: skip
    policy = PolicyConfig(model=str(folder), device=device(), learns="lora", quantization=config.quantization)
    env = task_env("number_line")
    settings = (
        PolicyGradientAlgorithmConfig()
        .settings(task="number_line", env_settings=env, policy=policy, algo=algo, total_steps=10_000)
        .debugging(seed=0)
    )
    runner = TurnRunner(config=settings)
    learner = TokenLearner(config=settings, module_spec=settings.get_multi_rl_module_spec(spaces=runner.get_spaces()))
    learner.build()
    learner.watch()
    reset_peak()
    sft = ReplySFTConfig(turns=64, updates=config.updates)
    learner.begin_imitation(demonstrate(make_slot("number_line", env.for_demonstrations()), sft, 0), sft)
    assert learner.imitator is not None, "begun"
    learner.imitator.train(sft.updates)
    started = peak()
    learner.begin()
    runner.actor = Actor(PolicyEngine(learner.policy, config.rows), ReplySampling(max_new_tokens=algo.max_reply_tokens))
    runner.action_elements = learner.policy.action_elements
    found = measured(config, learner, lambda: runner.sample(num_turns=config.turns))
    # what a run's memory check says of it, before anything is loaded
    slot = make_slot("number_line", env)
    slot.begin(0)
    tokens = len(prompt_ids(learner.policy.processor, slot.turn.prompt, slot.env.image_px))
    work = Workload(prompt_tokens=tokens, sft_rows=sft.batch_size, is_sampled=True)
    planned = plan(size_of(policy, folder), policy, algo, on_gpu=device() == "cuda", workload=work)
    gib = {name: round(value / 2**30, 2) for name, value in asdict(planned).items()}
    images = learner.policy.images.nbytes / 2**30
    return found | {
        "prompt_tokens": tokens,
        "start_gib": round(started, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if device() == "cuda" else 0.0,
        "process_gib": round(process_bytes() / 2**30, 2),
        "images_gib": round(images, 2),
        "planned_gib": round(planned.total / 2**30, 2),
        "planned": gib,
    }


def process_bytes() -> int:
    """Bytes of the GPU in use by the driver's own count: this process's, where no other is on the card."""
    if not torch.cuda.is_available():
        return 0
    free_bytes, total = torch.cuda.mem_get_info()
    return total - free_bytes


def write_vla(config: Config, folder: Path) -> Path:
    """A random OpenVLA-OFT 7B."""
    with new_weights():
        network = OpenVLANetwork(CheckpointConfig.from_dict(SMALL if config.small else {"model_type": "openvla"}))
    network.save_pretrained(folder)
    layout = SMALL if config.small else {"model_type": "openvla"}
    (folder / "config.json").write_text(json.dumps(layout))
    (folder / "dataset_statistics.json").write_text(json.dumps({"libero_10_no_noops": STATISTICS}))
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 29_871}
    vocabulary |= {word: 100 + place for place, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    del network
    free()
    return folder


def run_vla(config: Config, folder: Path) -> dict[str, Any]:
    """A VLA that acts in chunks of tokens, and GRPO without a critic."""
    return run_chunks(config, VLAConfig(model=str(folder), openvla=OpenVLAConfig(device=device())))


def write_flow(config: Config, folder: Path) -> Path:
    """A random flow policy in LeRobot's layout."""
    kind, changes = config.part, {}
    if not config.small:
        pixels = {"image_resolution": (224, 224)}
        changes = REAL_SIZES if kind == "smolvla" else {**{name: REAL_SIZES[name] for name in PI_REAL}, **pixels}
    env = make_env("push_block", task_env("push_block"), 0)
    changes = {**changes, "chunk_size": max(env.chunk_steps, changes.get("chunk_size", 0))}
    write_settings(folder, env, kind, VLM if config.small else REAL_VLM, **changes)
    network = outline(folder, _lerobot(config)).to(torch.bfloat16).to_empty(device=device())
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(std=0.02)
    save_file(network.state_dict(), folder / "model.safetensors")
    del network
    free()
    return folder


def run_flow(config: Config, folder: Path) -> dict[str, Any]:
    """A flow policy with one noisy step of ten, and GRPO without a critic."""
    flow = FlowConfig(steps=10, learn="one", noise=0.5, start_std=1.0)
    return run_chunks(config, VLAConfig(model=str(folder), head="flow", lerobot=_lerobot(config), flow=flow))


def _lerobot(config: Config) -> LeRobotConfig:
    if config.small and config.part != "smolvla":
        shrink_pi0(operator)
    return LeRobotConfig(device=device(), image_px=32 if config.small else 256)


def run_chunks(config: Config, policy: VLAConfig) -> dict[str, Any]:
    """A VLA on push_block, and GRPO without a critic."""
    groups = max(1, config.rows // 8)
    algo = chunk_defaults(warm_up=0, rounds=1, groups=groups, group_size=8, minibatches=4, microbatch_turns=16, lr=2e-5)
    settings = (
        PolicyGradientAlgorithmConfig()
        .settings(task="push_block", env_settings=ChunkEnvConfig(episode_steps=8 * config.turns), policy=policy)
        .settings(algo=algo, reward=ChunkRewardConfig())
        .debugging(seed=0)
    )
    runner = ChunkRunner(config=settings)
    learner = TokenLearner(config=settings, module_spec=settings.get_multi_rl_module_spec(spaces=runner.get_spaces()))
    learner.build()
    learner.watch(runner.chunk_env)
    learner.begin()
    runner.policy = learner.policy
    return measured(config, learner, lambda: runner.sample(num_groups=groups)[0])


def measured(config: Config, learner: TokenLearner, sample: Callable[[], list[TokenEpisode]]) -> dict[str, Any]:
    """Rates and memory of `config.updates` rollouts and updates, without the first, and the last one's mismatch."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(config.updates):
        reset_peak()
        began = time.perf_counter()
        episodes = sample()
        synchronise()
        played = time.perf_counter()
        acting = peak()
        reset_peak()
        # rewards of a random model are all alike, and would teach nothing
        learner.learn(
            [replace(episode, rewards=rng.normal(size=len(episode)).astype(np.float32)) for episode in episodes], 0.0
        )
        synchronise()
        ended = time.perf_counter()
        decisions = sum(map(len, episodes))
        tokens = sum(len(prob) for episode in episodes for prob in episode.log_probs)
        rows.append((played - began, ended - played, decisions, tokens, acting, peak()))
        learner.policy.forget_stale_images()
    sampling, learning, decisions, tokens, acting, updating = np.array(rows[1:] or rows, float).mean(0)
    report = learner.report()
    return {
        "parameters": sum(param.numel() for param in learner.policy.parameters()),
        "trained": sum(param.numel() for param in learner.policy.parameters() if param.requires_grad),
        "env_steps_per_rollout": sum(episode.num_steps for episode in episodes),
        "decisions_per_s": round(decisions / sampling, 2),
        "sampled_tokens_per_s": round(tokens / sampling, 1),
        "rollout_s": round(sampling, 2),
        "update_s": round(learning, 2),
        "acting_gib": round(acting, 2),
        "updating_gib": round(updating, 2),
        "update": {name: value for name, value in report.items() if "ratio" in name or "kl" in name or "loss" in name},
    }


def write_judge(config: Config, folder: Path) -> Path:
    """A random Qwen3-VL-8B."""
    text, vision = dict(QWEN3_VL_8B["text_config"]), dict(QWEN3_VL_8B["vision_config"])
    if config.small:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
        text = {**_SMALL, "rope_parameters": rope}
        vision = {"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 84}
        vision |= {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return write_vlm(Qwen3VLConfig, text, vision, folder, patch_px=16)


def run_judge(config: Config, folder: Path) -> dict[str, Any]:
    """A chat VLM that compares pairs of images of 300 pixels."""
    found: dict[str, Any] = {}
    for quantization in ("none",) if config.small else ("none", "nf4"):
        for prompt in ("direct", "single_stage"):
            judge_config = JudgeConfig(
                backend="transformers", model=str(folder), device=device(), prompt=prompt, batch_size=32,
                max_new_tokens=64, quantization=quantization, image_px=28 if config.small else 300,
            )  # fmt: skip
            reset_peak()
            judge = build_judge(judge_config)
            loaded = peak()
            px = judge_config.image_px
            frames = np.random.default_rng(0).integers(0, 256, (config.rows * 2, 2, 1, px, px, 3), np.uint8)
            queries = [Query(goal="open the drawer", left=left, right=right) for left, right in frames]
            judge.compare(queries[:32])
            began = time.perf_counter()
            judge.compare(queries)
            synchronise()
            found[f"{quantization}, {prompt}"] = {
                "labels_per_s": round(len(queries) / (time.perf_counter() - began), 2),
                "loaded_gib": round(loaded, 2),
                "busy_gib": round(peak(), 2),
            }
            del judge
            free()
    return found


def write_vlm(family: Any, text: dict[str, Any], vision: dict[str, Any], folder: Path, patch_px: int) -> Path:
    """A random chat VLM of these sizes, in bfloat16, with a tokenizer of bytes."""
    tokenizer = build_tokenizer()
    ids = {"image_token_id": IMAGE, "video_token_id": "<|video_pad|>"}
    ids |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    named = {name: tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    tied = bool(text.pop("tie_word_embeddings", False))
    layout = family(text_config=text | ends, vision_config=vision, tie_word_embeddings=tied, **named)
    with new_weights():
        model = AutoModelForImageTextToText.from_config(layout)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"shortest_edge": (2 * patch_px) ** 2, "longest_edge": 300 * 300}
    Qwen2VLImageProcessorPil(patch_size=patch_px, size=sizes).save_pretrained(folder)
    del model
    free()
    return folder


@contextmanager
def new_weights() -> Iterator[None]:
    """Weights are drawn where the GPU is, in bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device()):
            yield
    finally:
        torch.set_default_dtype(before)


def device() -> Literal["cuda", "cpu"]:
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak() -> float:
    """GiB of the GPU that torch held at most."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
