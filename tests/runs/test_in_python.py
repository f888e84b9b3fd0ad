"""The public names, docs/python.md's examples as written, and `load_policy(run).act` in a user's own loop."""

import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray import serve
from tiny_episodes import tiny_episodes, transitions_of

import rlvlm
from rlvlm.algorithms.checkpoint import PolicyFile, save_tree
from rlvlm.algorithms.policy_gradient.player import policy_file
from rlvlm.algorithms.sac_pebble.player import KIND
from rlvlm.core.errors import UsageError
from rlvlm.envs.env import FIRST_HELD_OUT_STATE
from rlvlm.envs.images import FrameStore
from rlvlm.policies.squashed_gaussian import SquashedGaussian
from rlvlm.policies.vla.build import build_policy as build_vla
from rlvlm.policies.vla.tokens import ActionScale
from rlvlm.policies.vlm.loading import build_policy
from rlvlm.preferences.networks import reward_input
from rlvlm.preferences.reward_model import LearnedReward, RewardModel
from rlvlm.runs.files.checkpoints import RunState
from rlvlm.runs.files.folder import RunFolder, create_folder
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.runs.start.build import open_players

PAGE = (Path(rlvlm.__file__).parents[1] / "docs" / "python.md").read_text()
EXAMPLE, POLICY_EXAMPLE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_every_public_name_is_there_and_on_the_page():
    for name in rlvlm.PUBLIC:
        assert getattr(rlvlm, name).__name__ == name and f"`{name}" in PAGE
    assert sorted(dir(rlvlm)) == sorted([*rlvlm.PUBLIC, "__version__"]), "what Tab shows"
    with pytest.raises(AttributeError, match="public names: Clip"):
        assert rlvlm.no_such_name


def test_the_bare_import_is_light():
    code = "import sys, rlvlm; print({'torch', 'ray', 'numpy', 'gymnasium'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.ray
@pytest.mark.slow
def test_the_example_of_the_page_runs_as_written(local_ray, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said: list[tuple[Any, ...]] = []
    names: dict[str, Any] = {"print": lambda *words: said.append(words)}  # Ray writes to the terminal, too
    # the page's own lines, on a task that is drawn in no time
    exec(EXAMPLE.replace("drawer_open", "cartpole").replace("2_000", "1_200"), names)  # noqa: S102
    serve.shutdown()
    (success, _), (label,), (rewards,) = said
    assert 0 <= success <= 1 and str(label) in ("left", "right", "tie", "None") and len(rewards) == 2
    summary = names["run"].summary()
    assert summary["queries"] > 0 and summary["labels"]["failed"] == 0, "a served judge has answered"
    assert "data:image/png" in names["run"].panel.read_text()


@pytest.mark.slow
def test_the_example_of_a_trained_policy_runs_as_written(tmp_path, capsys):
    config = rlvlm.override(rlvlm.recipe("number_line"), {"out": tmp_path / "run"})
    env = rlvlm.make_env("number_line", config.env, seed=0)
    run = run_with(config, policy_file(build_policy(config.policy, env)))
    exec(POLICY_EXAMPLE.replace("runs/number_line/<time>", str(run.path)), {})  # noqa: S102 - the page's own lines
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 10 and all(line.split()[-1] in ("True", "False") for line in lines)


@pytest.mark.parametrize("reads", ["state", "image"])
def test_a_learned_reward_is_a_function_of_what_it_reads(reads, tmp_path):
    """A run of an env of one's own learns from states; its reward is the one that the run's agent got."""
    settings = {"reward.teacher": "oracle", "reward.model": reads, "reward_model.output": "normalised"}
    config = of_task("rlvlm.testing:TINY", tmp_path / "run", **settings)
    assert isinstance(config, StepsRun)
    env = rlvlm.make_env(config.task, config.env, seed=0)
    frames = FrameStore(env, config.reward_model.image_px, 64)
    model = RewardModel(reward_input(env, frames, config.reward, config.reward_model), config.reward_model, seed=5)
    model._scale = [0.1, 0.5]  # as after a fit
    policy = PolicyFile(kind=KIND, weights={"weight": torch.zeros(1)})
    run = run_with(config, policy, {"schedule": {"loop": {"model": model.get_state()}}})
    steps = transitions_of(*tiny_episodes(2))
    expected = LearnedReward(model).label(steps)

    reward = rlvlm.learned_reward(run)
    assert len(np.unique(expected)) > 5 and ("images [N, H, W, 3]" in reward.reads) == (reads == "image")
    if reads == "image":
        assert reward(env.draw(steps.snapshots, config.reward_model.image_px)) == pytest.approx(expected, abs=1e-5)
        return
    assert reward(steps.next_obs, steps.actions) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match=r"observations \[N, 4\] after the step, and the actions \[N, 2\] .* got"):
        reward(steps.actions, steps.next_obs)


def run_with(config: RunConfig, policy: PolicyFile, tree: dict[str, Any] | None = None) -> RunFolder:
    """The folder of a run whose only checkpoint holds `policy`, and `tree` beside it."""
    folder = create_folder(config, ["test"], datetime(2026, 11, 1))
    state = RunState(env_steps=1, wall_s=0.0, peak_rss_mb=0.0)
    tree = tree or {"learner": {"start": {}}}
    folder.checkpoints.save(state, lambda path: save_tree(path, tree, policy), is_best=True)
    return folder


def of_task(task: str, out: Path, **values: object) -> RunConfig:
    return rlvlm.override(rlvlm.recipe(task), {"out": out, **values})


def test_a_network_that_acts_in_numbers(tmp_path):
    config = of_task("rlvlm.testing:TINY", tmp_path / "run", **{"env.episode_steps": 5})
    env = rlvlm.make_env(config.task, config.env, seed=0)
    network = SquashedGaussian(env.observation_space.shape[0], env.action_space.shape[0], [8])
    run = run_with(config, PolicyFile(kind=KIND, weights=network.state_dict()))
    [played] = open_players(config, run.checkpoints.best().algorithm).own.play([7])

    policy = rlvlm.load_policy(run)
    obs, _ = env.reset(seed=7)
    rewards, is_over = [], False
    while not is_over:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
        rewards.append(reward)
        is_over = terminated or truncated
    np.testing.assert_allclose(rewards, played.env_rewards, rtol=1e-5)
    with pytest.raises(ValueError, match=r"obs must be \[4\], got \[3\]"):
        policy.act(np.zeros(3))


@pytest.mark.slow
@pytest.mark.parametrize("head", ["text", "actions"])
def test_a_vlm_that_acts_in_text_or_by_a_head(head, tmp_path):
    config = of_task("number_line", tmp_path / "run", **{"policy.head": head})
    env = rlvlm.make_env(config.task, config.env, seed=0)
    trained = build_policy(config.policy, env)
    for parameter in [*trained.value_parameters(), *(trained.action_head or torch.nn.Identity()).parameters()]:
        torch.nn.init.normal_(parameter, std=0.01, generator=torch.Generator().manual_seed(5))
    run = run_with(config, policy_file(trained))
    [played] = open_players(config, run.checkpoints.best().algorithm).own.play([7])

    policy = rlvlm.load_policy(str(run.path))
    turn, _ = env.reset(seed=7)
    replies, rewards, is_over = [], [], False
    while not is_over:
        replies.append(policy.act(env.draw(turn.snapshot[None])[0], turn.prompt))
        turn, reward, terminated, truncated, _ = env.step(replies[-1])
        rewards.append(reward)
        is_over = terminated or truncated
    assert tuple(replies) == played.captions and rewards == played.env_rewards.tolist()
    image = env.draw(turn.snapshot[None])[0]
    first, *others = (policy.act(image, turn.prompt, greedy=False, seed=seed) for seed in range(12))
    assert policy.act(image, turn.prompt, greedy=False, seed=0) == first, "a seed repeats its reply"
    assert set(others) != {first}, "and seeds differ"
    with pytest.raises(ValueError, match=r"image must be \[H, W, 3\] uint8, got \[2, 2\] float64"):
        policy.act(np.zeros((2, 2)), "Go.")


@pytest.mark.slow
def test_a_vla_that_acts_in_chunks(tmp_path):
    config = of_task("push_block", tmp_path / "run", **{"policy.pocket.hidden": 32, "policy.pocket.image_px": 16})
    env = rlvlm.make_env(config.task, config.env.for_evaluation(), seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (50, len(env.action_low))).astype(np.float32)
    scale = ActionScale.of_actions(actions, env.scaled_actions)
    fresh: Any = build_vla(config.policy, env)
    fresh.scale = scale
    run = run_with(config, policy_file(fresh))
    [played] = open_players(config, run.checkpoints.best().algorithm).own.play([FIRST_HELD_OUT_STATE])

    policy = rlvlm.load_policy(run.checkpoints.best().path)
    obs, _ = env.reset(options={"state_id": FIRST_HELD_OUT_STATE})
    rewards, is_over = [], False
    while not is_over:
        images = np.stack([env.draw(obs.snapshots, policy.image_px, camera)[0] for camera in env.cameras])
        obs, _, terminated, truncated, info = env.step(policy.act(images, obs.texts[0], obs.proprio[0]))
        rewards += info["env_rewards"].tolist()
        is_over = terminated or truncated
    np.testing.assert_allclose(rewards, played.env_rewards, rtol=1e-5)
    with pytest.raises(ValueError, match=r"images must be \[1, 16, 16, 3\] uint8"):
        policy.act(images[:, :8], "push", obs.proprio[0])


def test_code_that_a_folder_names_is_not_imported_unasked(tmp_path):
    config = of_task("rlvlm.testing:TINY", tmp_path / "run")
    file = create_folder(config, ["test"], datetime(2026, 11, 1)).path / "config.yaml"
    file.write_text(file.read_text().replace("rlvlm.testing:TINY", "odd_env:TASK"))
    with pytest.raises(UsageError, match="names code outside of rlvlm, odd_env:TASK"):
        rlvlm.load_policy(tmp_path / "run")
