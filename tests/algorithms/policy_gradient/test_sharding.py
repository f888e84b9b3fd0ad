"""Learners that share out a policy's weights against one that holds them all, on one update of real models' classes."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from rlvlm.algorithms.checkpoint import load_policy_file, load_tree
from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.chunks import ChunkRunner
from rlvlm.algorithms.policy_gradient.config import LossConfig, PolicyGradientConfig, chunk_defaults
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.policy_gradient.turns import Actor, TurnRunner
from rlvlm.algorithms.sharding import gathered, local, put_buckets
from rlvlm.core import metrics
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.registry import make_env, task_env
from rlvlm.policies.buckets import Bucket, fill_from_buckets
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.rewards.config import ChunkRewardConfig
from rlvlm.runs.start.memory_plan import plan, size_of
from rlvlm.vlms.blocks import blocks_of
from tests.algorithms.policy_gradient.side_by_side import save_together, side_by_side, trained
from tests.algorithms.policy_gradient.tiny_runs import BI_LEVEL, policy_config
from tests.peak_memory import peak_of
from tests.published import SAVE, save_published
from tests.tiny_vlm import save_tiny_vlm

STEPS = (metrics.UPDATE_POLICY_LOSS, metrics.UPDATE_VALUE_LOSS, metrics.UPDATE_GRADIENT, metrics.UPDATE_KL)


def vlm(folder: str, learns: str, algo: dict[str, Any]) -> tuple[TokenLearner, list[Any]]:
    """A learner of the tiny Qwen2.5-VL in `folder`, and 9 turns by the same policy."""
    settings = {"num_envs": 3, "rollout_turns": 9, "minibatch_turns": 9, "epochs": 2, "max_reply_tokens": 12}
    settings |= {"loss": LossConfig(kl_weight=0.05, entropy_weight=0.01), "max_grad_norm": 0.5, "microbatch_turns": 2}
    config = (
        PolicyGradientAlgorithmConfig()
        .settings(task="number_line", env_settings=task_env("number_line"))
        .settings(policy=policy_config(folder, learns=learns, recompute=True))
        .settings(algo=PolicyGradientConfig(**(settings | algo)), total_steps=100)
        .debugging(seed=0)
    )
    runner = TurnRunner(config=config)
    policy = config.policy_for(make_env(config.task, config.env_settings, 0))
    policy.value_head[-1].weight.data.normal_(generator=torch.Generator().manual_seed(2))
    runner.actor = Actor(PolicyEngine(policy, 3), ReplySampling(max_new_tokens=12))
    runner.action_elements = policy.action_elements
    learner = begun(config, runner, policy)
    return learner, paid(runner.sample(num_turns=3))


def chunks(acts: VLAConfig, algo: dict[str, Any]) -> tuple[TokenLearner, list[Any]]:
    """A learner of the policy that `acts`, and two groups by the same policy."""
    settings = {"warm_up": 0, "lr": 1e-2, "rounds": 1, "groups": 2, "group_size": 3, "minibatches": 2}
    settings |= {"loss": LossConfig(average="trajectory", kl_weight=0.1), "kl_target": None, "microbatch_turns": 2}
    settings |= {"adam_eps": 1e-3}  # the gradient of a key bias is rounding errors, of which Adam takes the sign
    config = (
        PolicyGradientAlgorithmConfig()
        .settings(task="push_block", env_settings=ChunkEnvConfig(episode_steps=16), policy=acts)
        .settings(algo=chunk_defaults(**(settings | algo)), reward=ChunkRewardConfig())
        .debugging(seed=0)
    )
    runner = ChunkRunner(config=config)
    torch.manual_seed(0)
    policy = config.policy_for(runner.chunk_env)
    runner.policy, learner = policy, begun(config, runner, policy)
    episodes, _ = runner.sample(num_groups=2)
    return learner, paid(episodes)


def begun(config: Any, runner: Any, policy: Any) -> TokenLearner:
    """A learner of `config` that begins as `policy`."""
    learner = TokenLearner(config=config, module_spec=config.get_multi_rl_module_spec(spaces=runner.get_spaces()))
    learner.build()
    learner.watch(getattr(runner, "chunk_env", None))
    with torch.no_grad():
        for number, (name, weight) in enumerate(policy.trained_state().items()):
            if "lora_B" in name:  # a fresh adapter's are zero, and the others' gradients with them
                weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    learner.policy.load_trained_state(policy.trained_state())
    learner.begin()
    return learner


def paid(episodes: list[Any]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [replace(episode, rewards=rng.normal(size=len(episode)).astype(np.float32)) for episode in episodes]


def updated(make: Any, *arguments: Any) -> dict[str, Any]:
    """What one learner of several says after an update: its numbers, its weights, and the bytes that it holds."""
    learner, episodes = make(*arguments)
    learner.learn(episodes, 0.0)
    named = {name: weight for name, weight in learner.policy.named_parameters() if weight.grad is not None}
    held = [*learner.policy.parameters()]
    held += [one.grad for one in held if one.grad is not None]
    held += [value for state in learner._optimizer.state.values() for value in state.values() if value.ndim]
    return {
        "report": learner.report(),
        "weights": trained(learner),
        "gradients": {name: gathered(weight.grad) for name, weight in named.items()},
        "bytes": sum(local(one).nbytes for one in held),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_tiny_vlm(root / "vlm", "qwen2_5_vl")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("learns", ["all", "lora"])
def test_shared_out_learners_take_the_step_of_one(folder, learns):
    assert_step_of_one(vlm, str(folder / "vlm"), learns)


def assert_step_of_one(make: Any, path: str, learns: str) -> None:
    """An update by two learners that share out the policy of `make` is that of one alone."""
    (alone,) = side_by_side(1, updated, make, path, learns, {})
    assert alone["report"][metrics.UPDATE_FIRST_RATIO] <= 1e-4 and alone["report"][metrics.UPDATE_GRADIENT] > 1e-2
    first, second = side_by_side(2, updated, make, path, learns, {"num_learners": 2, "shard": True})
    assert first["weights"].keys() == alone["weights"].keys()
    for name, value in alone["weights"].items():
        torch.testing.assert_close(first["weights"][name], value, atol=1e-5, rtol=1e-5, msg=name)
    for name, value in alone["gradients"].items():
        torch.testing.assert_close(first["gradients"][name], value, atol=1e-5, rtol=1e-4, msg=name)
    assert not any(value.numel() for value in second["weights"].values())
    for one in (first, second):
        for name in STEPS:
            if name in alone["report"]:
                assert one["report"][name] == pytest.approx(alone["report"][name], rel=1e-5, abs=1e-5), name
        assert one["bytes"] == pytest.approx(alone["bytes"] / 2, rel=0.15), "each holds its share of everything"


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in SAVE if name != "qwen2_5_vl"])
def test_every_published_layout_is_shared_out(tmp_path, family):
    """By names of weights of either age, with weights tied or not: what two learners read is what one has."""
    path = str(save_published(tmp_path, family))
    (alone,) = side_by_side(1, updated, vlm, path, "lora", {})
    several = side_by_side(2, updated, vlm, path, "lora", {"num_learners": 2, "shard": True})
    for name in STEPS:
        assert several[0]["report"][name] == pytest.approx(alone["report"][name], rel=1e-5, abs=1e-5), name
    for name, value in alone["weights"].items():
        torch.testing.assert_close(several[0]["weights"][name], value, atol=1e-5, rtol=1e-5, msg=name)


def loaded(folders: list[str], learns: str, algo: dict[str, Any]) -> list[dict[str, float]]:
    """Of one learner of several, for each model: the most memory that it took while it was built and its weights were
    read, over what the process had before, and what it then holds, in bytes.
    """
    return [load(folder, learns, algo) for folder in folders]


def load(folder: str, learns: str, algo: dict[str, Any]) -> dict[str, float]:
    config = (
        PolicyGradientAlgorithmConfig()
        .settings(task="number_line", env_settings=task_env("number_line"))
        .settings(policy=policy_config(folder, learns=learns), algo=PolicyGradientConfig(**algo), total_steps=100)
        .debugging(seed=0)
    )
    spec = config.get_multi_rl_module_spec(spaces=TurnRunner(config=config).get_spaces())
    learner = TokenLearner(config=config, module_spec=spec)
    before, readings, is_over = anonymous_bytes(), [], threading.Event()

    def watch() -> None:
        while not is_over.wait(1e-3):
            readings.append(anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    learner.build()
    learner.watch()
    is_over.set()
    watcher.join()
    weights = [*learner.policy.parameters()]
    return {
        "most": max(readings) - before,
        "held": sum(local(weight).nbytes for weight in weights),
        "layer": max(
            sum(param.numel() * 4 for param in block.parameters()) for block in blocks_of(learner.policy.model)
        ),
        "model": float(sum(local(param.detach()).double().sum() for param in learner.policy.model.parameters())),
    }


def anonymous_bytes() -> int:
    """What this process has of memory that is no file's: pages of weights that are read in place do not count."""
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("learns", ["all", "lora"])
def test_a_learner_loads_its_share_and_no_more(tmp_path, learns):
    """Of 128 MB each of two learners takes its half, and never the memory of more than a layer on top."""
    folder = save_tiny_vlm(tmp_path / "large", "qwen2_5_vl")
    config = AutoConfig.from_pretrained(folder)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    text = {key: value for key, value in config.text_config.to_dict().items() if key != "layer_types"} | sizes
    text["head_dim"] = 128
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [32, 16, 16]}  # halves of a head
    config = type(config)(**(config.to_dict() | {"text_config": text}))
    config.vision_config.out_hidden_size = 512
    network = AutoModelForImageTextToText.from_config(config)
    network.save_pretrained(folder, max_shard_size="40MB")
    (folder / "model.safetensors").unlink()
    whole = sum(param.nbytes for param in network.parameters())
    assert whole > 100e6
    algo: dict[str, Any] = {"num_learners": 2, "shard": True}
    policy = PolicyConfig(model=str(folder), learns=learns, device="cpu")  # pyright: ignore[reportArgumentType]
    predicted = plan(size_of(policy, folder), policy, PolicyGradientConfig(**algo), on_gpu=False)
    # what the first model takes is mostly modules that are imported
    folders = [str(save_tiny_vlm(tmp_path / "tiny", "qwen2_5_vl")), str(folder)]
    both = [measured for _, measured in side_by_side(2, loaded, folders, learns, algo)]
    for one in both:
        assert one["held"] == pytest.approx(predicted.weights, rel=0.15), (one, predicted)
        room = one["layer"] + 1e6  # memory is given out in pages
        assert 0.8 * one["held"] <= one["most"] <= one["held"] + room, one
    if learns == "all":
        own = sum(float(value.detach().double().sum()) for value in network.parameters())
        assert sum(one["model"] for one in both) == pytest.approx(own, abs=1e-3), "all of it was read, once"


@pytest.mark.slow
def test_bi_level_learners_that_each_hold_the_weights_take_the_step_of_one(folder):
    algo = {**BI_LEVEL, "max_grad_norm": 1e9}
    (alone,) = side_by_side(1, updated, vlm, str(folder / "vlm"), "all", algo)
    several = side_by_side(2, updated, vlm, str(folder / "vlm"), "all", algo | {"num_learners": 2})
    for one in several:
        for name, value in alone["weights"].items():
            torch.testing.assert_close(one["weights"][name], value, atol=1e-5, rtol=1e-5, msg=name)
        for name in STEPS:
            assert one["report"][name] == pytest.approx(alone["report"][name], rel=1e-4, abs=1e-5), name


def continued(
    make: Any, folder: str, learns: str, algo: dict[str, Any], before: Path | None, after: Path
) -> dict[str, float]:
    """An update from the checkpoint `before`, its numbers, and the checkpoint `after` it."""
    learner, episodes = make(folder, learns, algo)
    if before is not None:
        learner.load_tree(load_tree(before)["learner"])
    learner.learn(episodes, 0.0)
    save_together(learner, after)
    return learner.report()


@pytest.mark.slow
def test_four_learners_go_on_as_two_and_then_as_one(folder, tmp_path):
    one, several, path = None, None, str(folder / "vlm")
    for count in (4, 2, 1):
        after = [tmp_path / f"{name}-{count}" for name in ("one", "several")]
        (expected,) = side_by_side(1, continued, vlm, path, "all", {}, one, after[0])
        algo = {"offload": True, "microbatch_tokens": 700}
        algo |= {"num_learners": count, "shard": True} if count > 1 else {}
        report, *others = side_by_side(count, continued, vlm, path, "all", algo, several, after[1])
        assert len(others) == count - 1
        one, several = after
        for name in (*STEPS, metrics.UPDATES):
            assert report[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), (count, name)
        assert len(list(several.glob("adam*"))) == count, "each writes its own share"
        (left, right), (alone, shared) = [[get(one), get(several)] for get in (weights_in, averages_in)]
        for name, value in left.items():
            torch.testing.assert_close(right[name], value, atol=1e-4, rtol=1e-4, msg=name)
        for number, value in alone.items():
            np.testing.assert_allclose(shared[number]["exp_avg"], value["exp_avg"], atol=1e-4, err_msg=number)
    assert expected[metrics.UPDATES] == 3


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_policy_file(folder).weights)


def averages_in(folder: Path) -> dict[str, Any]:
    return load_tree(folder)["learner"]["adam"]


def start_of(folder: str, kl_weight: float, before: Path | None, after: Path) -> tuple[list[str], int]:
    """What holds a learner's start, classes and bytes, after going on from `before`; it is saved to `after`."""
    algo = {"num_learners": 2, "shard": True, "loss": LossConfig(kl_weight=kl_weight)}
    learner, _ = vlm(folder, "all", algo)
    if before is not None:
        learner.load_tree(load_tree(before)["learner"])
    save_together(learner, after)
    kept = learner.batches.start.values()
    return sorted({type(one).__name__ for one in kept}), sum(local(one).nbytes for one in kept)


@pytest.mark.slow
def test_a_start_that_no_loss_compares_with_waits_in_main_memory_and_is_saved_whole(folder, tmp_path):
    path, files = str(folder / "vlm"), [tmp_path / name for name in ("swapped", "waiting", "again")]
    ((there, size), _) = side_by_side(2, start_of, path, 0.05, None, files[0])
    ((here, own_size), _) = side_by_side(2, start_of, path, 0.0, None, files[1])
    side_by_side(2, start_of, path, 0.0, files[1], files[2])
    assert (there, here, size) == (["DTensor"], ["Tensor"], own_size)  # slices of a GPU, and what of them lies here
    swapped, waiting, again = (load_tree(file)["learner"]["start"] for file in files)
    assert swapped
    for name, value in swapped.items():
        assert np.array_equal(waiting[name], value) and np.array_equal(again[name], value), name


@pytest.mark.slow
def test_slices_stay_float32_where_weights_are_computed_in_bfloat16(folder):
    algo = {"num_learners": 2, "shard": True}
    exact, coarse = (
        side_by_side(2, updated, vlm, str(folder / "vlm"), "all", algo | {"compute_dtype": dtype})[0]
        for dtype in ("same", "bfloat16")
    )
    assert {value.dtype for value in coarse["weights"].values()} == {torch.float32}
    assert coarse["bytes"] == exact["bytes"]
    norms = [one["report"][metrics.UPDATE_GRADIENT] for one in (exact, coarse)]
    assert norms[0] != norms[1] and norms[1] == pytest.approx(norms[0], rel=0.2)
    # Adam's steps are of 1e-4 and less, which bfloat16 would round away
    moved = [value for value in coarse["weights"].values() if not torch.equal(value, value.bfloat16().float())]
    assert len(moved) > 10


def put_in_buckets(folder: str) -> dict[str, Any]:
    """What each of two learners that share out 96 MiB takes at most while the weights are put in buckets of 8."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    state = {name: value.detach() for name, value in model.named_parameters()}

    def put(content: Any) -> str:
        file = f"{folder}/{time.monotonic_ns()}"
        content.tofile(file)
        return file

    put_buckets({"first": state["0.weight"]}, 8 << 20, put)  # what is made once is not counted
    buckets: list[Bucket] = []
    peak = peak_of(lambda: buckets.extend(put_buckets(state, 8 << 20, put)))
    whole = peak_of(lambda: [value.full_tensor() for value in state.values()])
    own = {name: torch.zeros(1024, 1024) for name in state}
    fill_from_buckets(own, buckets, lambda one: np.memmap(one.where, np.uint8, "r")) if buckets else None
    torch.manual_seed(0)
    again = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24))).state_dict()
    is_same = not buckets or all(torch.equal(value, again[name]) for name, value in own.items())
    return {"peak": peak, "whole": whole, "count": len(buckets), "is_same": is_same}


@pytest.mark.slow
def test_no_learner_holds_more_than_two_buckets_while_weights_are_handed_out(tmp_path):
    first, second = side_by_side(2, put_in_buckets, str(tmp_path))
    assert (first["count"], second["count"]) == (12, 0) and first["is_same"]
    for one in (first, second):
        # a bucket of 8, and a tensor of 4 that is there twice while it is gathered; on a busy machine the threads of
        # gloo let go of up to three tensors late, and all of them would be 96
        assert one["peak"] <= 30 << 20, {name: value / (1 << 20) for name, value in one.items()}
        assert one["whole"] > 80 << 20, "a whole copy would be seen"
