"""A checkpoint of LeRobot as a flow policy: it acts in an env, its ratio is 1 before any update, and it learns."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plugins.lerobot.tiny_lerobot import shrink_pi0, write_lerobot, write_settings
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_weights

from rlvlm.algorithms.policy_gradient.config import chunk_defaults
from rlvlm.algorithms.policy_gradient.player import policy_file
from rlvlm.cli import main
from rlvlm.core.episodes import Observations
from rlvlm.core.errors import ModelUnavailable, UsageError
from rlvlm.core.guests import section_of
from rlvlm.envs.push_block import PushBlock
from rlvlm.envs.registry import make_env, task_env
from rlvlm.plugins.lerobot.config import LeRobotConfig
from rlvlm.plugins.lerobot.policy import LeRobotPolicy
from rlvlm.policies.vla.build import build_policy, read_config, read_policy
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.flow.config import FlowConfig
from rlvlm.policies.vla.policy import Sampling
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.settings.config_file import config_text, read_config_text
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.runs.start.memory_plan import fix_of, plan, size_of
from rlvlm.runs.start.preflight import check_before_run
from tests.runs.test_in_python import run_with


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "learns"), [("smolvla", "expert"), ("smolvla", "lora"), ("pi0", "expert"), ("pi05", "lora")]
)
def test_it_acts_and_learns(tmp_path, kind, learns, caplog, monkeypatch):
    shrink_pi0(monkeypatch)
    env = make_env("push_block", task_env("push_block"), 0)
    assert isinstance(env, PushBlock)
    folder = write_lerobot(tmp_path / "checkpoint", env, kind, chunk_size=env.chunk_steps + 2)
    wants = LeRobotConfig(learns=learns, image_px=24, has_values=True)  # pyright: ignore[reportArgumentType]
    config = VLAConfig(model=str(folder), head="flow", lerobot=wants, flow=FlowConfig(learn="all", steps=4, noise=1.0))
    torch.manual_seed(0)
    policy = build_policy(config, env)
    assert f"--policy.flow.steps {policy.checkpoint.num_denoising_steps}" in caplog.text
    obs = Observations.joined([env.reset_to(number)[0] for number in range(4)])
    policy.show(obs.images, policy.draw(env, obs.snapshots))
    sampled = policy.sample(obs, Sampling(temperature=1.0, generator=torch.Generator().manual_seed(0)))
    assert sampled.actions.shape == (4, env.chunk_steps, 7)
    found = policy.log_probs(obs, sampled.answers)
    np.testing.assert_allclose(found.log_probs.detach().numpy(), sampled.log_probs, atol=1e-5)
    optimizer = torch.optim.Adam([*policy.acting_parameters(), *policy.value_parameters()], 1e-3)
    for _ in range(3):
        loss = -policy.log_probs(obs, sampled.answers).log_probs.mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    assert loss < -found.log_probs.mean() - 0.01
    again = read_policy(policy.meta(), env)
    again.load_trained_state(policy.trained_state())
    again.show(obs.images, policy.draw(env, obs.snapshots))
    greedy = [one.sample(obs, Sampling()).actions for one in (policy, again)]
    np.testing.assert_allclose(greedy[0], greedy[1], atol=1e-5)
    # from noise, as LeRobot plays it: the checkpoint's own steps, by hand
    own = policy.checkpoint.num_denoising_steps
    x = torch.randn(4, policy.network.horizon, policy.network.action_width, generator=torch.Generator().manual_seed(3))
    noisy = policy.sample(obs, Sampling(from_noise=True, generator=torch.Generator().manual_seed(3)))
    with torch.no_grad():
        cache = policy.network.prefix(*policy.normalised(*policy.inputs(obs)))
        for step in range(own):
            x = x - policy.network.velocity(cache, x, torch.full((4,), 1 - step / own)) / own
    played = policy.scales["action"].restored(x[:, : env.chunk_steps, :7].numpy())
    assert own != policy.flow.steps
    np.testing.assert_allclose(noisy.actions, played, atol=1e-5)
    policy.export(tmp_path / "saved")
    plain = VLAConfig(model=str(tmp_path / "saved"), head="flow", flow=config.flow, lerobot=LeRobotConfig(image_px=24))
    loaded = build_policy(plain, env)
    loaded.show(obs.images, policy.draw(env, obs.snapshots))
    np.testing.assert_allclose(greedy[0], loaded.sample(obs, Sampling()).actions, atol=1e-5)
    size = size_of(config, folder)
    assert size.learned == sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    assert policy.lengths(obs, sampled.answers)[0] > 4 + env.chunk_steps
    assert policy.shardable().root is policy.network


@pytest.mark.parametrize(
    ("learns", "on_gpu", "expected"),
    [
        # 4 bytes of each number that learns, 2 or 4 of others; 4 for its gradient and 8 for Adam
        ("expert", True, 16 * 314_713_120 + 2 * 2_923_335_408),
        ("expert", False, 16 * 314_713_120 + 4 * 2_923_335_408),
        ("all", True, 16 * 3_238_048_528),
    ],
)
def test_the_plan_of_pi0_in_its_published_size_by_hand(tmp_path, learns, on_gpu, expected):
    sizes = {"chunk_size": 50, "max_state_dim": 32, "max_action_dim": 32, "image_resolution": (224, 224)}
    write_settings(tmp_path / "real", None, "pi0", {}, **sizes)
    config = VLAConfig(model=str(tmp_path / "real"), head="flow", lerobot=LeRobotConfig(learns=learns))
    size = size_of(config, tmp_path / "real")
    found = plan(size, config, chunk_defaults(microbatch_tokens=0), on_gpu=on_gpu)
    assert found.weights + found.gradients + found.adam == expected
    # the goal: the expert learns on a GPU of 24 GB, 22 GiB of them free
    assert (fix_of(size, config, chunk_defaults(microbatch_tokens=8_192), 22 * 2**30) is None) == (learns == "expert")


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_checkpoint_whose_actions_are_far_from_the_envs_is_refused(tmp_path, is_relative, monkeypatch):
    shrink_pi0(monkeypatch)
    env = make_env("push_block", task_env("push_block"), 0)
    assert isinstance(env, PushBlock)
    env.proprio_size = 7
    folder = write_lerobot(tmp_path / "checkpoint", env, "pi0", chunk_size=8, use_relative_actions=is_relative)
    policy = build_policy(config := VLAConfig(model=str(folder), head="flow"), env)
    assert isinstance(policy, LeRobotPolicy)
    # where actions are added to the state, it is the state that says how far demonstrations went
    policy.scales["proprio"] = replace(policy.scales["proprio"], q01=(0.0,) * 7, q99=(0.1,) * 7)
    assert policy.explored(env, 0.2).tolist() == [not is_relative] * 7
    # joint angles: of the actions, or of the state that movements are added to
    for file in folder.glob("*.safetensors"):
        if file.name != "model.safetensors":
            content = load_file(file)
            content["observation.state.mean" if is_relative else "action.mean"][3] = 2.2
            save_file(content, file)
    with pytest.raises(
        ModelUnavailable, match=r"dimension 3 of .* is typically 2\.2 .* the env takes -1 to 1"
    ) as caught:
        build_policy(config, env)
    assert ("added to the state" in str(caught.value)) == is_relative and caught.value.fix


def test_settings_without_effect_or_head_are_refused():
    with pytest.raises(ValueError, match="has no effect with policy.head"):
        VLAConfig(model="somewhere", lerobot=LeRobotConfig(at_once=2))
    with pytest.raises(ValueError, match="no head for learned noise"):
        VLAConfig(model="somewhere", head="flow", flow=FlowConfig(kernel="learned"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made_for", "changes", "words", "what"),
    [
        ({}, {}, "--policy.lerobot.gripper minus_one_opens", ""),
        ({}, {"type": "act"}, "", "of type 'act', which is not known here yet"),
        ({}, {"chunk_size": 6}, "", "chunks of 8 steps are to be run, the checkpoint makes 6"),
        ({"proprio_size": 3}, {}, "", "the state of the checkpoint has 3 numbers, the env's has 2"),
        ({"action_low": range(6)}, {}, "", "an action of the checkpoint has 6 numbers, the env's has 7"),
        ({"cameras": ("above", "wrist")}, {}, "", "sees through 2 cameras .above, wrist., the env has above"),
        ({}, {}, "--policy.lerobot.cameras wrist", "the env has above, and wrist were named"),
        ({}, {}, "--policy.lerobot.faults dark_borders", "no effect on a policy of type smolvla"),
        ({}, {}, "--policy.flow.kernel learned", "no head for learned noise"),
        ({}, {}, "--policy.flow.noise nan", "policy.flow.noise must be in"),
        ({}, {}, "--engine.num-replicas 2", "Unrecognized options: --engine.num-replicas"),
    ],
)
def test_a_checkpoint_of_lerobot_that_does_not_go_with_the_run_is_refused_before_ray_starts(
    made_for, changes, words, what, tmp_path
):
    env = {"cameras": ("above",), "proprio_size": 2, "action_low": [-1.0] * 7} | made_for
    env["action_high"] = [1.0] * len(env["action_low"])
    folder = write_lerobot(tmp_path / "checkpoint", SimpleNamespace(**env), chunk_size=8)
    settings = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(settings))
    named = ["push_block", "--policy.head", "flow", "--policy.model", str(folder), *words.split()]
    if not what:
        check_before_run(parse_run(named, "run").config)
        return
    with pytest.raises(UsageError, match=what) as caught:
        check_before_run(parse_run(named, "run").config)
    assert caught.value.fix


def test_a_guests_settings_work_like_the_cores():
    config = override(recipe("push_block"), {"policy.head": "flow", "policy.model": "a/b", "policy.lerobot.at_once": 3})
    assert section_of(config.policy, LeRobotConfig).at_once == 3
    assert read_config_text(config_text(config)) == config
    before = config_text(config).replace("  lerobot:", "  smolvla:").replace("    faults: []", "    patches: exact")
    assert read_config_text(before) == config, "as a run from before pi0 wrote it"
    text = config_text(config).replace("faults: []", "fault: []")
    with pytest.raises(UsageError, match=r"unknown key policy\.lerobot\.fault"):
        read_config_text(text)


def test_a_policy_saved_before_pi0_has_its_settings_under_the_old_names():
    config = asdict(VLAConfig(model="a/b", head="flow"))
    config["smolvla"] = config.pop("lerobot") | {"patches": "shifted", "at_once": 7}
    del config["smolvla"]["faults"]
    with pytest.raises(SystemExit):
        parse_run(["push_block", "--help"], "run")  # makes classes of the same fields
    read = read_config({"config": json.loads(json.dumps(config))})
    assert section_of(read, LeRobotConfig) == LeRobotConfig(at_once=7, faults=("shifted_patches",))


def test_a_run_without_such_a_checkpoint_needs_no_lerobot():
    """Neither its config nor a policy that it saved: a section has no effect without what it is about."""
    code = (
        "import shutil, sys\nfrom rlvlm.core import guests\nfound = guests.guests()\n"
        "left = {name: guest for name, guest in found.items() if name != 'lerobot'}\nguests.guests = lambda: left\n"
        "from rlvlm.policies.vla.build import read_config\nfrom rlvlm.policies.vla.config import VLAConfig\n"
        "from rlvlm.runs.settings.config_file import read_config_text\n"
        "config = read_config_text(sys.stdin.read())\nassert not hasattr(config.policy, 'lerobot')\n"
        "try: VLAConfig(head='flow', model='a/b')\n"
        "except ValueError as error: print(error)\n"
    )
    text = config_text(recipe("push_block"))
    child = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True)
    assert "it comes with the guest lerobot" in child.stdout, child.stderr


@pytest.mark.slow
def test_an_exported_run_has_the_trained_weights_and_not_the_base(tmp_path):
    env = make_env("push_block", task_env("push_block"), 0)
    base = write_lerobot(tmp_path / "base", env, chunk_size=8)
    settings = {
        "policy.head": "flow",
        "policy.model": str(base),
        "policy.lerobot.image_px": 24,
        "out": tmp_path / "run",
    }
    config: Any = override(recipe("push_block"), settings)
    trained = build_policy(config.policy, env)
    with torch.no_grad():
        for weight in trained.acting_parameters():
            weight += 0.1
    run = run_with(config, policy_file(trained))
    assert main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    theirs, first = (load_weights(folder / "model.safetensors") for folder in (tmp_path / "out", base))
    ours = {name.removeprefix("network."): weight for name, weight in trained.trained_state().items()}
    assert ours and all(torch.equal(theirs[name], weight) for name, weight in ours.items())
    assert all(torch.equal(theirs[name], first[name]) for name in first.keys() - ours.keys())
    assert "LeRobot's" in (tmp_path / "out/README.md").read_text()
