"""`rlvlm sft` as a job: any policy, any number of learners, weighted, and exact after a stop."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlvlm.algorithms.checkpoint import MANIFEST, CorruptCheckpoint, write_manifest
from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.player import load_vla, load_vlm, take_vla
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.algorithms.sft_job import run_sft
from rlvlm.cli import main
from rlvlm.core import metrics
from rlvlm.core.console.signals import StoppedEarly
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.folder import open_folder
from rlvlm.envs.registry import make_env, task_env
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.tokens import ActionScale
from tests.algorithms.policy_gradient.tiny_runs import chunk_config, policy_config
from tests.runs.test_weighted_start import label

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Demonstrations of both kinds of env, and a model to learn from one of them."""
    from tests.tiny_vlm import save_tiny_vlm  # seconds, which the job's actors do without

    made = tmp_path_factory.mktemp("sft")
    save_tiny_vlm(made / "model", "qwen3_vl")
    for task, episodes in (("number_line", 12), ("push_block", 3)):
        assert main(["collect", task, "--episodes", str(episodes), "--out", str(made / task)]) == 0
    return made


def job(folder: Path, kind: str, policy: dict[str, Any] | None = None, **sft: Any) -> PolicyGradientAlgorithmConfig:
    """A job of eight updates; `kind` is replies, tokens or flow."""
    settings: dict[str, Any] = {"updates": 8, "batch_size": 8, "demonstrations": str(folder / "push_block")} | sft
    if kind != "replies":
        steps = task_env("push_block").episode_steps
        return chunk_config(head=kind, sft=ChunkSFTConfig(**settings), episode_steps=steps)
    settings = {"lr": 3e-3, "held_out": 0.2} | settings | {"demonstrations": str(folder / "number_line")}
    config = PolicyGradientAlgorithmConfig().settings(task="number_line", env_settings=task_env("number_line"))
    config.settings(policy=policy_config(folder / "model", **(policy or {})))
    return config.settings(sft=ReplySFTConfig(**settings), algo=PolicyGradientConfig(max_reply_tokens=4))


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "algorithm" / "policy.safetensors")


class Killed(Exception):
    """In the place of kill -9, after a checkpoint."""


@pytest.mark.parametrize("kind", ["replies", "tokens", "flow"])
def test_a_job_that_was_stopped_ends_as_one_that_was_not(folder, tmp_path, kind):
    config, lines = job(folder, kind), list[str]()
    whole = run_sft(config, 4, tmp_path / "whole", lines.append)

    def stop(line: str) -> None:
        if line.startswith("supervised start: update 1 of 8"):
            raise StoppedEarly
        if line.startswith("update 4 of 8"):
            raise Killed

    for cause in (StoppedEarly, Killed):
        with pytest.raises(cause):
            run_sft(config, 4, tmp_path / "parts", stop)
    parts = run_sft(config, 4, tmp_path / "parts", lines.append)
    assert "going on after update 4 of 8" in lines
    clocks = {metrics.SFT_WALL_S: 0.0}
    assert parts | clocks == whole | clocks
    one, other = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_job_goes_on_with_the_demonstrations_that_it_began_with(folder, tmp_path):
    run_sft(job(folder, "replies", updates=1), 1, tmp_path)
    with pytest.raises(UsageError, match="demonstrated answers to learn from, and there are"):
        run_sft(job(folder, "replies", held_out=0.5), 1, tmp_path)


@pytest.mark.parametrize("learns", ["lora", "all"])
def test_a_supervised_policy_of_replies_is_taken_over_by_a_run(folder, tmp_path, learns):
    config = job(folder, "replies", {"learns": learns, "lora_rank": 4})
    first = run_sft(config.settings(sft=replace(config.sft, updates=2)), 2, tmp_path)
    # the same folder, more updates
    second = run_sft(config.settings(sft=replace(config.sft, updates=10)), 4, tmp_path)
    assert second[metrics.SFT_HELD_OUT_LOSS] < first[metrics.SFT_HELD_OUT_LOSS]
    env = make_env("number_line", task_env("number_line"), 0)
    fresh = config.policy_for(env)
    before = {name: value.clone() for name, value in fresh.trained_state().items()}
    load_vlm(fresh, tmp_path / "algorithm")
    changed = {name for name, value in fresh.trained_state().items() if not torch.equal(value, before[name])}
    assert changed and not any("value_" in name for name in changed), "a critic learns in a run"
    other = replace(config.policy, learns="lora", lora_rank=2)
    with pytest.raises(CorruptCheckpoint, match="weights are of another policy"):
        load_vlm(config.copy(copy_frozen=False).settings(policy=other).policy_for(env), tmp_path / "algorithm")


def test_a_vla_learns_in_a_job_and_a_run_takes_it_over(folder, tmp_path):
    config = job(folder, "tokens")
    measured = run_sft(config, 8, tmp_path)
    env = make_env("push_block", config.env_settings, 0)
    policy = config.policy_for(env)
    take_vla(tmp_path / "algorithm", policy)
    assert measured[metrics.SFT_DEMONSTRATIONS] == 3
    assert policy.statistics == load_vla(tmp_path / "algorithm", env, config.policy).statistics != ""
    card = tmp_path / "algorithm/policy.json"
    card.write_text(card.read_text().replace('"head": "tokens"', '"head": "canary:POLICY"'))
    write_manifest(card.parent, [file.name for file in card.parent.iterdir() if file.name != MANIFEST])
    with pytest.raises(UsageError, match="names canary:POLICY, which the settings of its run do not"):
        load_vla(card.parent, env, config.policy)


# the first three differ by their numbers alone; the others by what is read, and by the loss
@pytest.mark.parametrize(
    ("kind", "weighting"),
    [
        *(("tokens", "filter"), ("replies", "progress"), ("flow", "advantage")),
        *itertools.product(("replies", "head", "tokens", "flow"), ("condition", "preference")),
    ],
)
def test_each_weighting_teaches_each_form_of_answer(folder, tmp_path, kind, weighting):
    data = folder / ("push_block" if kind in ("tokens", "flow") else "number_line")
    file = tmp_path / "labels.parquet"
    label(data, file)
    policy: dict[str, Any] = {"conditioned": weighting == "condition"}
    policy |= {"head": "actions"} if kind == "head" else {}
    is_reply = kind in ("replies", "head")
    config = job(folder, "replies" if is_reply else kind, policy, labels=str(file), weighting=weighting, updates=3)
    if not is_reply:
        config.settings(policy=replace(config.policy, conditioned=policy["conditioned"]))
    measured = run_sft(config, 3, tmp_path / "out")
    assert np.isfinite(measured[metrics.SFT_LOSS]) and 0 < measured[metrics.SFT_EFFECTIVE] <= 1


def test_a_policy_that_cannot_read_its_word_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("rlvlm.policies.vla.pocket._WORDS", 4)  # as a tokenizer that cuts long instructions
    label(folder / "push_block", tmp_path / "labels.parquet")
    config = job(folder, "tokens", labels=str(tmp_path / "labels.parquet"), weighting="condition", updates=1)
    config.settings(policy=replace(config.policy, conditioned=True))
    with pytest.raises(UsageError, match="the policy reads nothing behind 'push the"):
        run_sft(config, 1, tmp_path / "out")


def test_actions_are_scaled_by_the_weighted_steps(folder, tmp_path):
    data, file = folder / "push_block", tmp_path / "labels.parquet"
    label(data, file)  # the second of three episodes fails, to the judge
    run_sft(job(folder, "tokens", labels=str(file), weighting="filter", updates=1), 1, tmp_path / "out")
    env = make_env("push_block", task_env("push_block"), 0)
    policy = load_vla(tmp_path / "out" / "algorithm", env, VLAConfig())  # pyright: ignore[reportArgumentType] - its kind
    first, _, third = (record.arrays["actions"] for record in open_folder(data).episodes())
    wanted = ActionScale.of_actions(np.concatenate([first, third]).reshape(-1, first.shape[-1]), env.scaled_actions)
    assert policy.scale == wanted


@pytest.mark.ray
def test_two_learners_learn_as_one(local_ray, folder, tmp_path):
    found = []
    for number, learners in enumerate((0, 2)):
        # several draw other batches than one, so here a batch is all there is
        config = job(folder, "replies", updates=2, batch_size=64, lr=1e-5)
        config.settings(algo=replace(config.algo, num_learners=learners, microbatch_turns=3))
        found.append(run_sft(config, 2, tmp_path / str(number)))
    assert found[1][metrics.SFT_LOSS] == pytest.approx(found[0][metrics.SFT_LOSS], rel=1e-4)
    assert found[1][metrics.SFT_HELD_OUT_LOSS] == pytest.approx(found[0][metrics.SFT_HELD_OUT_LOSS], rel=1e-3)
