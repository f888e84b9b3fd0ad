"""`rlvlm export`: a run's policy as transformers and PEFT load it, and runs that cannot be written so."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

import rlvlm
from rlvlm.algorithms.checkpoint import PolicyFile
from rlvlm.algorithms.policy_gradient.player import policy_file
from rlvlm.algorithms.sac_pebble.player import KIND
from rlvlm.cli import main
from rlvlm.commands.export import command
from rlvlm.core.errors import UsageError
from rlvlm.pocket.models import weights_folder
from rlvlm.policies.squashed_gaussian import SquashedGaussian
from rlvlm.policies.vlm.loading import build_policy
from rlvlm.runs.files.folder import RunFolder
from tests.runs.test_in_python import of_task, run_with


def trained_run(out: Path, **settings: object) -> tuple[RunFolder, Any]:
    """A run of number_line, and its policy, whose trained weights have all been moved."""
    config = of_task("number_line", out, **settings)
    policy = build_policy(config.policy, rlvlm.make_env(config.task, config.env, seed=0))
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return run_with(config, policy_file(policy)), policy


@pytest.mark.slow
@pytest.mark.parametrize("learns", ["all", "lora"])
def test_a_trained_vlm_is_read_by_transformers_and_peft(learns, tmp_path):
    base = weights_folder("policy")
    named = {"policy.model": str(base)} if learns == "lora" else {}
    run, policy = trained_run(tmp_path / "run", **{"policy.learns": learns, **named})
    out = tmp_path / "out"
    assert main(["export", str(run.path), "--out", str(out)]) == 0
    model: Any = AutoModelForImageTextToText.from_pretrained(out if learns == "all" else base)
    if learns == "lora":
        model = peft.PeftModel.from_pretrained(model, out)
        assert not (out / "model.safetensors").exists()
    else:
        assert len(AutoTokenizer.from_pretrained(out)) >= len(AutoTokenizer.from_pretrained(base))
        assert model.get_input_embeddings().weight.shape[0] >= len(AutoTokenizer.from_pretrained(out))
    theirs, ours = model.state_dict(), policy.model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    readme = (out / "README.md").read_text()
    assert "| task | number_line |" in readme and "| env steps | 1 |" in readme and "`test`" in readme
    with pytest.raises(UsageError, match="is there already, and not empty"):
        command([str(run.path), "--out", str(out)], "export")


@pytest.mark.slow
def test_policies_without_a_layout_of_others_are_refused(tmp_path):
    headed, _ = trained_run(tmp_path / "head", **{"policy.head": "actions"})
    config = of_task("rlvlm.testing:TINY", tmp_path / "steps", **{"env.episode_steps": 5})
    env = rlvlm.make_env(config.task, config.env, seed=0)
    network = SquashedGaussian(env.observation_space.shape[0], env.action_space.shape[0], [8])
    steps = run_with(config, PolicyFile(kind=KIND, weights=network.state_dict()))
    for run, words in ((headed, "come from a head"), (steps, "no layout for it")):
        with pytest.raises(UsageError, match=words) as caught:
            command([str(run.path), "--out", str(tmp_path / "out")], "export")
        assert "load_policy" in caught.value.fix and not list(tmp_path.glob("*out*"))
