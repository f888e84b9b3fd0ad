"""LeRobot's policies in our own modules: its numbers, what they are shown and told, loading, writing back, refusals.

`reference_KIND.npz` is what LeRobot 0.6.1 made of `tests/plugins/lerobot/tiny_lerobot.py`'s checkpoint and inputs, by
`environments/lerobot_reference.py chunk`.
"""

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import needs, python_of
from huggingface_hub import constants
from plugins.lerobot.tiny_lerobot import (
    CONFIG,
    CONFIGS,
    MEASURED,
    REAL_SIZES,
    REAL_VLM,
    STATISTICS,
    inputs,
    random_weight,
    shrink_pi0,
    tokenizer,
    write_lerobot,
)
from safetensors.torch import load_file, save_file
from transformers import SmolVLMConfig

from rlvlm.core.episodes import Observations
from rlvlm.core.errors import ModelUnavailable
from rlvlm.plugins.lerobot import pi0
from rlvlm.plugins.lerobot.checkpoint import Statistics, read_checkpoint
from rlvlm.plugins.lerobot.config import LeRobotConfig
from rlvlm.plugins.lerobot.images import to_pixels
from rlvlm.plugins.lerobot.loading import LoadedLeRobot, load_lerobot, outline, save_lerobot
from rlvlm.plugins.lerobot.network import LeRobotNetwork
from rlvlm.plugins.lerobot.policy import LeRobotPolicy
from rlvlm.plugins.lerobot.prompts import NO_TOKEN, StatePrompts
from rlvlm.plugins.lerobot.smolvla import SmolVLANetwork, SmolVLANetworkConfig
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.flow.config import FlowConfig
from rlvlm.policies.vla.policy import Sampling
from rlvlm.vlms.lora import save_adapter
from rlvlm.vlms.skeleton import pending, skeletons

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "environments/lerobot_reference.py"
WITH_LEROBOT = [pytest.param(kind, marks=needs("lerobot")) for kind in CONFIGS]
PUBLISHED = {name: {**getattr(pi0, name)} for name in ("GEMMA", "HEADS", "VISION")}
"""pi0's sizes, before they are made small."""
_PALIGEMMA = {"language_model": 2_508_531_712, "multi_modal_projector": 2_361_344, "vision_tower": 412_442_352}
PUBLISHED_PARAMETERS = {
    "pi0": {**_PALIGEMMA, "gemma_expert": 311_464_960, "heads": 3_248_160},
    "pi05": {**_PALIGEMMA, "gemma_expert": 427_932_672, "heads": 2_165_792},
}
EACH_KIND = pytest.mark.parametrize("folder", list(CONFIGS), indirect=True)
PREPROCESSED = "policy_preprocessor_step_5_normalizer_processor.safetensors"


def load(folder: Path, env: dict[str, Any] | None = None, **wants: Any) -> LoadedLeRobot:
    given: dict[str, Any] = {"cameras": ("front", "wrist"), "proprio_size": 5, "chunk_steps": 4, **(env or {})}
    space: Any = SimpleNamespace(
        **{"action_low": -np.ones(3), "action_high": np.ones(3), "scaled_actions": (True,) * 3, **given}
    )
    return load_lerobot(str(folder), "", LeRobotConfig(**wants), space)


def observed(loaded: LoadedLeRobot, rows: slice = slice(None), num: int = 3) -> list[torch.Tensor]:
    """Images, words and states of `inputs`, as `prefix` takes them."""
    given = inputs(num)
    states = loaded.checkpoint.state.scale.normalised(given["states"][rows])
    words = loaded.network.read(given["texts"][rows].tolist())
    return [torch.from_numpy(given["images"][rows]), words, torch.from_numpy(states)]


def velocity(loaded: LoadedLeRobot, rows: slice = slice(None)) -> torch.Tensor:
    """At the noise of `inputs`, at three times."""
    noise, times = torch.from_numpy(inputs()["noise"])[rows], torch.tensor([1.0, 0.5, 0.1])[rows]
    return loaded.network.velocity(loaded.network.prefix(*observed(loaded, rows)), noise, times)


def denoised(loaded: LoadedLeRobot, cache: Any, x: torch.Tensor) -> torch.Tensor:
    num = loaded.checkpoint.num_denoising_steps
    for step in range(num):
        x = x - loaded.network.velocity(cache, x, torch.full((len(x),), 1 - step / num)) / num
    return x


@torch.no_grad()
def assert_equal_to_lerobot(loaded: LoadedLeRobot, found: Any) -> None:
    given = inputs()
    noise = torch.from_numpy(given["noise"])
    cache = loaded.network.prefix(*observed(loaded))
    for time, expected in zip(given["times"], found["velocities"], strict=True):
        velocity = loaded.network.velocity(cache, noise, torch.full((3,), float(time)))
        np.testing.assert_allclose(velocity.numpy(), expected, atol=1e-5, rtol=0)
    chunk = denoised(loaded, cache, noise).numpy()
    np.testing.assert_allclose(chunk, found["denoised"], atol=1e-5, rtol=0)
    actions = loaded.checkpoint.action.scale.restored(chunk[:, :, :3])
    np.testing.assert_allclose(actions, found["actions"], atol=1e-5, rtol=0)


@pytest.fixture(scope="module", autouse=True)
def _small_pi0() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shrink_pi0(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    kind = getattr(request, "param", "smolvla")
    return write_lerobot(tmp_path_factory.mktemp(kind) / "checkpoint", kind=kind)


def kind_of(folder: Path) -> str:
    return read_checkpoint(folder).kind


def reference(kind: str) -> Any:
    return np.load(Path(__file__).parent / f"reference_{kind}.npz")


@EACH_KIND
def test_velocities_and_a_denoised_chunk_are_lerobots(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_equal_to_lerobot(load(folder), reference(kind_of(folder)))
    assert "UNEXPECTED" not in caplog.text  # as transformers calls weights that nothing computes with


@pytest.mark.parametrize(
    ("folder", "faults"),
    [
        ("smolvla", ("shifted_patches",)),
        ("pi0", ("dark_borders",)),
        ("pi05", ("dark_borders",)),
        ("pi05", ("padded_state",)),
    ],
    indirect=["folder"],
)
def test_faults_of_a_release_are_repeated_where_they_are_asked_for_alone(folder: Path, faults: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equal_to_lerobot(load(folder, faults=faults), reference(kind_of(folder)))


def published_smolvla(folder: Path) -> SmolVLANetwork:
    """SmolVLA in its published size, without memory."""
    checkpoint = replace(read_checkpoint(folder), files={"config.json": {**CONFIG, **REAL_SIZES}})
    sizes, expert_sizes = asdict(checkpoint.sizes), asdict(checkpoint.expert_sizes(32))
    vlm = SmolVLMConfig.from_dict(REAL_VLM)
    with torch.device("meta"):
        return SmolVLANetwork(SmolVLANetworkConfig(vlm=vlm, sizes=sizes, expert_sizes=expert_sizes))


def test_sizes_are_those_of_the_published_450_million(folder: Path) -> None:
    network = published_smolvla(folder)
    parts: Counter[str] = Counter()
    for name, weight in network.named_parameters():
        parts[".".join(name.split(".")[2:5]) if ".vlm." in name else "expert"] += weight.numel()
    assert parts == {
        "vlm.model.vision_model": 86_433_024,
        "vlm.model.connector": 11_796_480,
        "vlm.model.text_model": 204_626_880,
        "vlm.lm_head.weight": 47_308_800,
        "expert": 99_880_992,
    }
    assert sum(parts.values()) == 450_046_176
    layer = network.get_submodule("model.vlm_with_expert.lm_expert.layers.1")
    shapes = {name: tuple(weight.shape) for name, weight in layer.named_parameters()}
    assert shapes["self_attn.k_proj.weight"] == (320, 320) and shapes["mlp.up_proj.weight"] == (2048, 720)


def lerobot(*arguments: object) -> None:
    # its environment has no rlvlm, and needs no hub
    around = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    subprocess.run([python_of("lerobot"), SCRIPT, *map(str, arguments)], check=True, timeout=300, env=around)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """LeRobot's own checkpoint of the same weights, whose VLM folder has all that LeRobot wants of one."""
    lerobot("make", path := tmp_path_factory.mktemp("lerobot") / "made", request.param)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("made", WITH_LEROBOT, indirect=True)
def test_lerobot_loads_a_written_folder_and_makes_the_same_chunk(made: Path, tmp_path: Path) -> None:
    kind = kind_of(made)
    same = write_lerobot(tmp_path / "same", kind=kind)
    assert (same / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
    np.savez(tmp_path / "inputs.npz", **inputs())
    for learns in ("expert", "lora"):
        torch.manual_seed(0)  # of the adapter
        loaded = load(made, learns=learns)
        with torch.no_grad():
            for weight in loaded.network.parameters():
                if weight.requires_grad:
                    weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        first = loaded.checkpoint.action.first + np.array([1.0, 2.0, 0.0], np.float32) * 0.1
        changed = replace(
            loaded, checkpoint=replace(loaded.checkpoint, action=replace(loaded.checkpoint.action, first=first))
        )
        saved = tmp_path / learns
        save_lerobot(changed.network, changed.checkpoint, saved)
        lerobot("chunk", saved, tmp_path / "inputs.npz", tmp_path / "out.npz")
        found = np.load(tmp_path / "out.npz")
        assert np.abs(found["actions"] - reference(kind)["actions"]).max() > 0.1
        assert_equal_to_lerobot(changed, found)
        assert_equal_to_lerobot(load(saved), found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_LEROBOT[1:])
def test_relative_actions_are_played_and_learned_as_lerobots_are(kind: str, tmp_path: Path) -> None:
    lerobot("make", tmp_path / "made", kind, "relative")
    given = inputs() | {"noise": np.zeros((3, 6, 7), np.float32)}  # from which greedy chunks are denoised
    np.savez(tmp_path / "inputs.npz", **given)
    space = {"cameras": ("front", "wrist"), "proprio_size": 5, "chunk_steps": 4}
    env: Any = SimpleNamespace(
        **space, action_low=np.full(3, -4.0), action_high=np.full(3, 4.0), scaled_actions=(True,) * 3
    )
    policy = LeRobotPolicy(VLAConfig(model=str(tmp_path / "made"), head="flow", flow=FlowConfig(steps=5)), env)
    policy.export(tmp_path / "saved")
    lerobot("chunk", tmp_path / "saved", tmp_path / "inputs.npz", tmp_path / "out.npz")
    found = np.load(tmp_path / "out.npz")
    seen = np.arange(3, dtype=np.float32)[:, None]
    obs = Observations(texts=tuple(given["texts"]), proprio=given["states"], snapshots=seen)
    policy.show(obs.images, given["images"])
    np.testing.assert_allclose(policy.sample(obs, Sampling()).actions, found["actions"][:, :4], atol=1e-5, rtol=0)
    origin, scale = policy.origin(obs.proprio), policy.scales["action"]
    np.testing.assert_array_equal(origin[:, 0], given["states"][:, :3] * [1, 0, 1])
    targets, changes = scale.normalised(given["demonstrated"] - origin), scale.spread > 0
    np.testing.assert_allclose(targets[..., changes], found["targets"][..., changes], atol=1e-5, rtol=0)


@pytest.mark.parametrize("folder", ["pi0"], indirect=True)
@pytest.mark.parametrize(
    ("names", "excluded", "expected"),
    [
        (["shoulder", "elbow", "left_Gripper.pos"], ["gripper"], (True, True, False)),
        (None, ["gripper"], (True, True, True)),
        (["left_gripper"], ["", "grip"], (False, True, True)),
        (["a", "b", "c", "d"], [], (True, True, True)),
    ],
)
def test_numbers_of_relative_actions_are_found_by_name(
    folder: Path, tmp_path: Path, names: Any, excluded: list[str], expected: tuple[bool, ...]
) -> None:
    shutil.copytree(folder, tmp_path / "relative")
    relative(action_names=names, exclude_joints=excluded)(tmp_path / "relative")
    assert read_checkpoint(tmp_path / "relative").relative == expected
    assert read_checkpoint(folder).relative == (False, False, False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_LEROBOT)
def test_names_and_shapes_of_the_published_size_are_lerobots(kind: str, tmp_path: Path) -> None:
    folder = write_lerobot(tmp_path / "small", kind=kind)
    lerobot("shapes", tmp_path / "shapes.json", kind)
    network = published_smolvla(folder) if kind == "smolvla" else published_pi0(folder)
    shapes = {name: list(weight.shape) for name, weight in network.state_dict().items()}
    expected = json.loads((tmp_path / "shapes.json").read_text())
    idle = {*network.unread, *network.tied}
    assert {name: shape for name, shape in expected.items() if name not in idle} == shapes
    assert len(shapes) == {"smolvla": 500, "pi0": 776, "pi05": 811}[kind]


def published_pi0(folder: Path) -> LeRobotNetwork:
    """pi0 or pi0.5 in its published size, without memory."""
    content = json.loads((folder / "config.json").read_text())
    real = {"chunk_size": 50, "max_state_dim": 32, "max_action_dim": 32, "image_resolution": [224, 224]}
    (folder / "config.json").write_text(json.dumps({**content, **real}))
    with pytest.MonkeyPatch.context() as patch:
        for name, table in PUBLISHED.items():
            for key, value in table.items():
                patch.setitem(getattr(pi0, name), key, value)
        return outline(folder, LeRobotConfig())


@pytest.mark.parametrize("folder", ["pi0", "pi05"], indirect=True)
def test_sizes_are_those_of_the_published_three_billion(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "real")
    network = published_pi0(tmp_path / "real")
    parts: Counter[str] = Counter()
    for name, weight in network.named_parameters():
        parts[next((part for part in (*_PALIGEMMA, "gemma_expert") if part in name), "heads")] += weight.numel()
    assert parts == PUBLISHED_PARAMETERS[kind_of(folder)]


@pytest.mark.parametrize(
    ("states", "min_numbers", "expected"),
    [
        ([0.0, -1.0, 1.0], 0, "Task: push it, State: 128 0 255;\nAction: "),
        ([-3.0, 0.999, 0.0078125], 0, "Task: push it, State: -1 255 129;\nAction: "),
        ([0.5], 3, "Task: push it, State: 192 128 128;\nAction: "),
    ],
)
def test_pi05_reads_its_state_in_256_bins(states: list[float], min_numbers: int, expected: str) -> None:
    letters = tokenizer("pi05")
    prompts = StatePrompts(letters, 200, min_numbers)
    found = prompts.completed(prompts.read([" push_it\n"]), torch.tensor([states]))[0]
    assert "".join(letters.id_to_token(token) for token in found.tolist()) == "<bos>" + expected


@EACH_KIND
def test_few_go_through_the_body_at_once_where_nothing_is_learned(folder: Path) -> None:
    whole, few = load(folder), load(folder, at_once=2)
    sizes: list[int] = []
    few.network.get_submodule(
        next(name for name, _ in few.network.named_modules() if name.endswith("embed_tokens"))
    ).register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    with torch.no_grad():
        expected, found = whole.network.prefix(*observed(whole, num=5)), few.network.prefix(*observed(few, num=5))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    few.network.prefix(*observed(few, num=5))
    assert sizes == [2, 2, 1, 5]


def test_images_keep_their_aspect_and_are_filled_up_on_the_left_and_on_top() -> None:
    white = torch.full((1, 2, 4, 8, 3), 255, dtype=torch.uint8)
    wide = to_pixels(white, 16)
    assert wide.shape == (1, 2, 3, 16, 16)
    assert (wide[..., :8, :] == -1).all() and (wide[..., 8:, :] == 1).all()
    centred = to_pixels(white, 16, is_centred=True, border=-3)[0, 0, 0, :, 0]
    assert centred.tolist() == [*[-3] * 4, *[1] * 8, *[-3] * 4]
    tall = to_pixels(white.transpose(2, 3), 16)
    assert (tall[..., :8] == -1).all() and (tall[..., 8:] == 1).all()
    # bilinear without smoothing: pixel i of 4 lies at 2 i + .5 of 8, between two that differ by 10
    ramp = (10 * torch.arange(8)).view(1, 1, 8, 1).expand(1, 8, 8, 3).to(torch.uint8)
    torch.testing.assert_close(to_pixels(ramp, 4)[0, 0, 0], (20 * torch.arange(4.0) + 5) / 127.5 - 1)


@pytest.mark.parametrize(
    ("faults", "side", "expected"),
    [
        ((), 32, [0, 1, 2, 3]),
        (("shifted_patches",), 32, [0, 0, 1, 2]),
        ((), 16, [0, 2]),
        ((), 64, [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_patches_have_positions_of_their_own(
    folder: Path, faults: tuple[str, ...], side: int, expected: list[int]
) -> None:
    network = load(folder, faults=faults).network
    embeddings = network.model["vlm_with_expert"]["vlm"]["model"]["vision_model"].embeddings
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_(), embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(16.0)[:, None].expand(-1, 16))
        found = embeddings(torch.zeros(1, 3, side, side), torch.ones(1))[0, :, 0]
    assert found.tolist() == [4 * row + column for row in expected for column in expected]


def test_prompts_end_with_a_new_line_and_are_cut_and_filled_up_behind(folder: Path) -> None:
    words = load(folder).network.read(["push it\n", "lift the red block", "push " * 20])
    assert words.tolist() == [
        [3, 11, 2, *[NO_TOKEN] * 5],
        [10, 4, 5, 6, 2, *[NO_TOKEN] * 3],
        [3] * 8,  # the new line is cut off as well
    ]


def test_cameras_are_found_by_name_or_named_and_else_taken_in_order(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def cameras(present: tuple[str, ...], *names: str) -> list[int]:
        return load(folder, {"cameras": present}, cameras=names).network.config.cameras

    assert cameras(("wrist", "top", "front")) == [2, 0]
    assert cameras(("a", "b", "c"), "c", "a") == [2, 0]
    assert not caplog.records
    assert cameras(("a", "front", "c")) == [0, 1]
    assert "no camera of the env is called as the checkpoint's front, wrist; a, front feed them" in caplog.text


@EACH_KIND
def test_a_camera_that_the_env_lacks_is_masked(folder: Path, tmp_path: Path) -> None:
    """As if the checkpoint had no such image feature, which is how LeRobot masks one."""
    alone = tmp_path / "alone"
    shutil.copytree(folder, alone)
    config(input_features={name: about for name, about in CONFIG["input_features"].items() if "wrist" not in name})(
        alone
    )
    masked = load(folder, {"cameras": ("front",)}, cameras=("front", "blank"))
    with torch.no_grad():
        torch.testing.assert_close(velocity(masked), velocity(load(alone, {"cameras": ("front",)})), atol=1e-5, rtol=0)
        assert (velocity(masked) - velocity(load(folder))).abs().max() > 1e-3
    with pytest.raises(ModelUnavailable, match="2 cameras .* and blank, blank were named"):
        load(folder, cameras=("blank", "blank"))


def test_names_before_and_numbers_outside_of_the_processor_are_honoured(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "own")
    renames = {
        "observation.images.above": "observation.images.front",
        "observation.images.hand": "observation.images.wrist",
    }
    changed_json(
        "policy_preprocessor.json",
        lambda content: (
            content["steps"][0]["config"].update(rename_map=renames),
            content["steps"][5]["config"].update(normalize_observation_keys=["observation.images.front"]),
        ),
    )(tmp_path / "own")
    loaded = load(tmp_path / "own", {"cameras": ("hand", "above")})
    assert loaded.network.config.cameras == [1, 0]
    states = np.float32([[1, 2, 3, 4, 5]])
    np.testing.assert_array_equal(loaded.checkpoint.state.scale.normalised(states), states)


@pytest.mark.slow
@pytest.mark.parametrize("learns", ["expert", "lora_expert", "lora", "all"])
@EACH_KIND
def test_only_trained_parts_take_gradients(folder: Path, learns: str) -> None:
    loaded = load(folder, learns=learns, recompute=True, lora_rank=2)
    plain = load(folder, learns=learns, recompute=False, lora_rank=2)
    plain.network.load_state_dict(loaded.network.state_dict())
    velocity(loaded).sum().backward()
    velocity(plain).sum().backward()
    names = {name for name, weight in loaded.network.named_parameters() if weight.requires_grad}
    for (name, weight), other in zip(loaded.network.named_parameters(), plain.network.parameters(), strict=True):
        # nothing reads what the last layer of the body makes but a critic
        assert (weight.grad is not None) == (name in names) or "text_model" in name or "language_model" in name
        if weight.grad is not None and other.grad is not None:
            torch.testing.assert_close(weight.grad, other.grad, atol=1e-5, rtol=1e-5)
    assert "lora" not in learns or loaded.adapter is not None
    of_expert = ("lm_expert", "gemma_expert", "action_", "state_proj", "time_mlp")
    if learns == "expert":
        assert all(any(part in name for part in of_expert) for name in names)
        assert {weight.dtype for weight in loaded.network.parameters()} == {torch.float32}
    elif learns == "all":
        unlearned = {name for name, _ in loaded.network.named_parameters()} - names
        assert unlearned <= {"model.vlm_with_expert.vlm.lm_head.weight"}
    else:
        layers = {"smolvla": (30, 71), "pi0": (23, 57), "pi05": (23, 57)}[kind_of(folder)]
        assert all("lora_" in name for name in names) and len(names) == 2 * layers[learns == "lora"]
        assert learns == "lora" or all("expert" in name or "time_mlp" in name for name in names)


@EACH_KIND
def test_the_expert_stays_in_full_precision_beside_a_coarse_body(folder: Path) -> None:
    coarse, fine = load(folder, dtype="bfloat16"), load(folder)
    weights = dict(fine.network.named_parameters())
    for name, weight in coarse.network.named_parameters():
        is_body = ".vlm." in name or ".paligemma." in name
        assert weight.dtype == (torch.bfloat16 if is_body else torch.float32)
        assert is_body or torch.equal(weight, weights[name])
    with torch.no_grad():
        found, expected = velocity(coarse), velocity(fine)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0)


@EACH_KIND
def test_a_value_head_sees_the_observation_and_stays_out_of_lerobots_folder(folder: Path, tmp_path: Path) -> None:
    loaded = load(folder, learns="lora_expert", has_values=True)
    network = loaded.network
    cache = network.prefix(*observed(loaded))
    assert network.state_values(cache, detach=True).tolist() == [0, 0, 0]
    with torch.no_grad():
        for weight in network.value_head.parameters():
            assert weight.requires_grad
            weight += 0.1
    alone = network.prefix(*observed(loaded, slice(1, 2)))
    together, one = network.state_values(cache, detach=True), network.state_values(alone, detach=True)
    assert together.std() > 1e-4 and torch.allclose(together[1], one[0], atol=1e-6)  # filling does not count
    images, words, states = observed(loaded)
    moved = network.state_values(network.prefix(images, words, states + 1.0), detach=True)
    assert (moved - together).abs().min() > 1e-5, "it sees the state"
    save_lerobot(network, loaded.checkpoint, tmp_path / "saved")
    assert load_file(tmp_path / "saved/model.safetensors").keys() == load_file(folder / "model.safetensors").keys()


@pytest.mark.slow
@EACH_KIND
def test_a_written_folder_holds_the_trained_policy(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)  # of the adapter
    loaded = load(folder, learns="lora", lora_rank=2)
    with torch.no_grad():
        for name, weight in loaded.network.named_parameters():
            if "lora_B" in name:
                weight += 0.1
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/old.txt").touch()
    save_lerobot(loaded.network, loaded.checkpoint, tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"] and not (tmp_path / "saved/old.txt").exists()
    for name in ("config.json", "policy_preprocessor.json", "policy_postprocessor.json"):
        assert json.loads((tmp_path / "saved" / name).read_text()) == json.loads((folder / name).read_text())
    _, second = MEASURED[kind_of(folder)]["observation.state"].values()
    np.testing.assert_allclose(again.checkpoint.state.second, second, rtol=1e-6)
    noise = torch.from_numpy(inputs()["noise"])
    with torch.no_grad():
        expected = denoised(loaded, loaded.network.prefix(*observed(loaded)), noise)
        found = denoised(again, again.network.prefix(*observed(again)), noise)
        before = load(folder)
        assert (denoised(before, before.network.prefix(*observed(before)), noise) - expected).abs().max() > 0.01
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)  # sums of the merged weights are rounded otherwise
    save_adapter(loaded.adapter, tmp_path / "adapter")
    gone_on = load(folder, learns="lora", adapter=str(tmp_path / "adapter"))
    with torch.no_grad():
        found = denoised(gone_on, gone_on.network.prefix(*observed(gone_on)), noise)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@EACH_KIND
def test_shapes_are_known_without_weights_and_weights_can_be_read_in_slices(folder: Path) -> None:
    whole = load(folder, learns="expert")
    outlined = outline(folder, LeRobotConfig(learns="expert"))
    about = {name: (weight.shape, weight.requires_grad) for name, weight in whole.network.named_parameters()}
    assert {name: (weight.shape, weight.requires_grad) for name, weight in outlined.named_parameters()} == about
    assert all(weight.is_meta for weight in outlined.parameters())
    with skeletons():
        network = load(folder).network
    waiting = pending(network)
    assert len(waiting) == len(about) and not any(name in about for name in network.unread)
    for weight in waiting:
        assert weight.source is not None
        np.testing.assert_array_equal(
            weight.source.read(0, weight.source.shape[0]).numpy(), random_weight(weight.source.key, weight.source.shape)
        )


def test_features_are_scaled_by_lerobots_formulas() -> None:
    first, second = np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32)
    values = np.array([[2.0, 2.0], [5.0, 3.0]], np.float32)
    for mode, expected in (
        ("IDENTITY", values),
        ("MEAN_STD", [[1 / 3, 0], [4 / 3, 0.25]]),
        ("QUANTILES", [[0, -1], [3, 0]]),  # nothing is clipped
    ):
        is_plain = mode == "IDENTITY"
        own = (np.zeros(2, np.float32), np.ones(2, np.float32)) if is_plain else (first, second)
        scale = Statistics(mode=mode, first=own[0], second=own[1]).scale
        np.testing.assert_allclose(scale.normalised(values), expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(scale.restored(scale.normalised(values)), values, rtol=1e-6)


def test_statistics_come_in_the_form_of_flow_policies(folder: Path) -> None:
    content = json.loads(read_checkpoint(folder).statistics)
    assert content["action"]["mode"] == "mean_std" and content.keys() == {"action", "proprio"}
    np.testing.assert_allclose(content["proprio"]["std"], STATISTICS["observation.state"]["std"], rtol=1e-6)
    np.testing.assert_allclose(content["action"]["q99"][0], 0.1 + 2.3263 * 0.3, rtol=1e-6)
    width = Statistics(mode="QUANTILE10", first=np.float32([1]), second=np.float32([3])).scale
    assert width.mode == "quantiles" and (width.q01, width.q99, width.mean) == ((1,), (3,), (2,))


def changed_json(name: str, change: Callable[[Any], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def config(**fields: Any) -> Callable[[Path], object]:
    return changed_json("config.json", lambda content: content.update(fields))


def vlm(**fields: Any) -> Callable[[Path], object]:
    return changed_json("vlm/config.json", lambda content: content.update(fields))


def normaliser(**fields: Any) -> Callable[[Path], object]:
    return changed_json("policy_preprocessor.json", lambda content: content["steps"][5].update(fields))


def statistics(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        content = load_file(folder / PREPROCESSED)
        change(content)
        save_file(content, folder / PREPROCESSED)

    return apply


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        change(content)
        save_file(content, folder / "model.safetensors")

    return apply


def relative(**fields: Any) -> Callable[[Path], object]:
    """Actions relative to the state, `fields` those of the step that makes them so."""

    def apply(folder: Path) -> None:
        config(use_relative_actions=True)(folder)
        for name, index in (("policy_preprocessor", 5), ("policy_postprocessor", 1)):
            about = {"enabled": True, **(fields if index == 5 else {})}
            changed_json(f"{name}.json", lambda content, i=index, of=about: content["steps"][i]["config"].update(of))(
                folder
            )

    return apply


HEAD = "model.action_out_proj.bias"
PI0_REFUSED: list[tuple[str, Callable[[Path], object]]] = [
    ("relative to the state is not the same .* False, True, False", changed_json(
        "policy_preprocessor.json", lambda content: content["steps"][5]["config"].update(enabled=True))),
    ("relative to the state is not the same .* True, False, False", config(use_relative_actions=True)),
    ("absolute_actions_processor on the wrong side of unnormalizer_processor", lambda folder: (
        relative()(folder),
        changed_json("policy_postprocessor.json", lambda content: content["steps"].reverse())(folder))),
    ("actions of 3 numbers are relative to a state of 2", lambda folder: (
        relative()(folder),
        changed_json("policy_preprocessor.json", lambda content: content["steps"][6]["config"].update(
            norm_map={}, features={"observation.state": {"type": "STATE", "shape": [2]}}))(folder))),
    ("paligemma_variant is 'gemma_9b'", config(paligemma_variant="gemma_9b")),
    ("action_expert_variant is .*gemma_2b.*; known are", config(action_expert_variant=["gemma_2b"])),
    ("whole patches of SigLIP", config(image_resolution=[36, 36])),
    ("has a step 'smolvla_new_line_processor'", changed_json(
        "policy_preprocessor.json", lambda content: content["steps"][2].update(
            registry_name="smolvla_new_line_processor"))),
    ("num_inference_steps must be", config(num_inference_steps=0)),
    ("lacks 1 weights: model.action_out_proj.bias", weights(lambda found: found.pop(HEAD))),
    ("weights in .* cannot be loaded", lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64)),
    ("the checkpoint's VLM is not here", changed_json(
        "policy_preprocessor.json", lambda content: content["steps"][3]["config"].update(
            tokenizer_name="google/paligemma-3b-pt-224"))),
]  # fmt: skip
REFUSED: list[tuple[str, Callable[[Path], object]]] = [
    ("type 'act', which is not known here yet", config(type="act")),
    ("type 'None', which is no policy", config(type=None)),
    ("no policy of LeRobot: .*deep", lambda folder: (folder / "config.json").write_text("[" * 100_000)),
    ("no policy of LeRobot", lambda folder: (folder / "config.json").write_text("[]")),
    ("older than LeRobot 0.4", lambda folder: (folder / "policy_postprocessor.json").unlink()),
    ("no model.safetensors; an adapter", lambda folder: (folder / "model.safetensors").unlink()),
    ("max_period. is missing", changed_json("config.json", lambda content: content.pop("max_period"))),
    ("n_obs_steps is 2", config(n_obs_steps=2)),
    ("adapt_to_pi_aloha is True", config(adapt_to_pi_aloha=True)),
    ("9 layers of a VLM that has 5", config(num_vlm_layers=9)),
    ("LeRobot cannot compute that either", config(num_expert_layers=2)),
    ("whole numbers", config(chunk_size="6")),
    ("must be square", config(resize_imgs_with_padding=[32, 64])),
    ("whole squares", config(resize_imgs_with_padding=[40, 40])),
    ("num_steps must be", config(num_steps=1e400)),
    ("max_action_dim is 2", config(max_action_dim=2)),
    ("a llama above a llama", vlm(model_type="llama")),
    ("no SmolVLM that can be read", vlm(text_config={"model_type": "llama", "hidden_size": "wide"})),
    ("scale 0", vlm(scale_factor=0)),
    ("1000000000 layers", changed_json(
        "vlm/config.json", lambda content: content["vision_config"].update(num_hidden_layers=10**9))),
    ("num_layers must be in", lambda folder: (
        config(num_vlm_layers=-1)(folder),
        changed_json("vlm/config.json", lambda content: content["text_config"].update(
            num_hidden_layers=10**9))(folder))),
    ("weights in .* cannot be loaded", changed_json(
        "vlm/config.json", lambda content: content["text_config"].update(vocab_size=10**12))),
    ("cannot be loaded|cannot be read", changed_json(
        "vlm/config.json", lambda content: content["text_config"].update(num_key_value_heads=0))),
    ("cannot be loaded|cannot be read", changed_json(
        "vlm/config.json", lambda content: content["vision_config"].update(hidden_act="no such"))),
    ("the checkpoint's VLM is not here", config(vlm_model_name="/nowhere/vlm")),
    ("tokenizer.json cannot be read", lambda folder: (folder / "vlm/tokenizer.json").write_text("{}")),
    ("has a step 'delta_actions'; known are", normaliser(registry_name="delta_actions")),
    ("statistics are \\*.safetensors in the same folder", normaliser(state_file="../there.safetensors")),
    ("statistics are missing: observation.state.mean", changed_json(
        "policy_preprocessor.json", lambda content: content["steps"][5].pop("state_file"))),
    ("statistics are missing: observation.state.std", statistics(lambda found: found.pop("observation.state.std"))),
    ("not finite", statistics(lambda found: found["observation.state.mean"].fill_(np.nan))),
    ("the feature has 5 numbers", statistics(lambda found: found.update({"observation.state.std": torch.ones(4)}))),
    ("negative width", statistics(lambda found: found["observation.state.std"].neg_())),
    ("different data sets", statistics(lambda found: found["action.mean"].add_(1))),
    ("is not a regular file", lambda folder: (
        (folder / PREPROCESSED).unlink(), os.mkfifo(folder / PREPROCESSED))),
    ("more than 1,048,576 bytes", lambda folder: os.truncate(folder / PREPROCESSED, 2**40)),
    ("cannot be used", lambda folder: (folder / PREPROCESSED).write_bytes(b"\xff" * 100)),
    ("padded on the left", changed_json(
        "policy_preprocessor.json", lambda content: content["steps"][3]["config"].update(padding_side="left"))),
    ("normalised by 'WHITEN'", changed_json(
        "policy_preprocessor.json", lambda content: content["steps"][5]["config"]["norm_map"].update(STATE="WHITEN"))),
    (f"lacks 1 weights: {HEAD}", weights(lambda found: found.pop(HEAD))),
    ("has besides 1 weights: model.more", weights(lambda found: found.update({"model.more": torch.zeros(1)}))),
    ("weights in .* cannot be loaded", weights(lambda found: found.update({HEAD: torch.zeros(9)}))),
]  # fmt: skip


@pytest.mark.parametrize(("words", "damage"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_folder_that_cannot_be_used_is_refused_with_its_fix(
    folder: Path, tmp_path: Path, words: str, damage: Callable[[Path], object]
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    for file in bad.glob("*.json"):  # they name their VLM's folder
        file.write_text(file.read_text().replace(str(folder), str(bad)))
    damage(bad)
    with pytest.raises(ModelUnavailable, match=words) as caught:
        load(bad)
    assert caught.value.fix


@pytest.mark.parametrize("folder", ["pi0"], indirect=True)
@pytest.mark.parametrize(("words", "damage"), PI0_REFUSED, ids=[words for words, _ in PI0_REFUSED])
def test_a_pi0_that_cannot_be_used_is_refused_with_its_fix(
    folder: Path, tmp_path: Path, words: str, damage: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    test_a_folder_that_cannot_be_used_is_refused_with_its_fix(folder, tmp_path, words, damage)


@pytest.mark.parametrize("folder", ["pi0"], indirect=True)
def test_names_of_weights_as_the_makers_of_pi0_wrote_them_are_known(folder: Path, tmp_path: Path) -> None:
    """They lack the first word, and the embeddings have the name of the output head."""
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    found = {name.removeprefix("model."): weight for name, weight in load_file(own / "model.safetensors").items()}
    head, embeddings = (name.removeprefix("model.") for name in next(iter(pi0.Pi0Network.tied.items())))
    found[head] = found.pop(embeddings)
    save_file(found, own / "model.safetensors")
    loaded = load(own)
    assert_equal_to_lerobot(loaded, reference("pi0"))
    with skeletons():
        assert all(weight.source is not None for weight in pending(load(own).network))
    save_lerobot(loaded.network, loaded.checkpoint, tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == load_file(folder / "model.safetensors").keys()
    assert torch.equal(saved[f"model.{head}"], saved[f"model.{embeddings}"])
    shutil.rmtree(own)
    with pytest.raises(ModelUnavailable, match="needed to write a whole checkpoint"):
        save_lerobot(loaded.network, loaded.checkpoint, tmp_path / "saved")


def test_a_policy_that_does_not_fit_the_env_is_refused(folder: Path) -> None:
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("state of the checkpoint has 5 numbers, the env's has 8", {"proprio_size": 8}, {}),
        ("an action of the checkpoint has 3 numbers, the env's has 7", {"action_low": np.zeros(7)}, {}),
        ("chunks of 7 steps are to be run, the checkpoint makes 6", {"chunk_steps": 7}, {}),
        ("2 cameras .front, wrist., the env has front", {"cameras": ("front",)}, {}),
        ("the env has front, wrist, and front, top were named", {}, {"cameras": ("front", "top")}),
    ]
    cases.append(("faults padded_state has no effect on a policy of type smolvla", {}, {"faults": ("padded_state",)}))
    for words, env, wants in cases:
        with pytest.raises(ModelUnavailable, match=words) as caught:
            load(folder, env, **wants)
        assert caught.value.fix
    for words, wants in (
        ("adapter has no effect", {"adapter": "somewhere"}),
        ("too coarse", {"learns": "all", "dtype": "bfloat16"}),
        ("at_once must be >= 1", {"at_once": 0}),
    ):
        with pytest.raises(ValueError, match=words):
            LeRobotConfig(**wants)


def test_cameras_that_lerobot_left_empty_are_none(tmp_path: Path) -> None:
    """LeRobot writes them beside the others, and masks them whenever it computes."""
    features = {**CONFIG["input_features"], "observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 4, 4]}}
    folder = write_lerobot(tmp_path / "checkpoint", empty_cameras=1, input_features=features)
    assert read_checkpoint(folder).cameras == ("observation.images.front", "observation.images.wrist")
