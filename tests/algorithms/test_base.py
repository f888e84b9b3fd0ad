"""RLlib's public calls, each on a real local Ray: what works, and what is refused by name."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import tune
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN, EVALUATION_RESULTS, NUM_EPISODES

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig
from rlvlm.algorithms.sac_pebble.algorithm import SACPebble, SACPebbleConfig
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.core.errors import UsageError
from rlvlm.envs.config import StepEnvConfig
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.rewards.config import StepRewardConfig
from tests.algorithms.policy_gradient.tiny_runs import build as build_ppo
from tests.algorithms.policy_gradient.tiny_runs import chunk_config

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]
SMALL = SACConfig(hidden=(16, 16), batch_size=16, seed_steps=20, turn_steps=10)


def config_of() -> SACPebbleConfig:
    return (
        SACPebbleConfig()
        .settings(task="rlvlm.testing:TINY", env_settings=StepEnvConfig(episode_steps=20), sac=SMALL)
        .settings(reward=StepRewardConfig(source="environment"))
        .debugging(seed=0)
    )


@pytest.fixture
def build():
    built: list[SACPebble] = []

    def make(config: SACPebbleConfig | None = None) -> SACPebble:
        algorithm = (config or config_of()).build_algo()
        assert isinstance(algorithm, SACPebble)
        built.append(algorithm)
        return algorithm

    yield make
    for algorithm in built:
        algorithm.stop()


def weights(algorithm: SACPebble) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in algorithm.get_module().state_dict().items()}


def of_sac(folder: Path) -> Any:
    return config_of().build_algo()


def of_grpo(folder: Path) -> Any:
    config = chunk_config(episode_steps=16, groups=3, group_size=3, rounds=1)
    return config.evaluation(evaluation_interval=1, evaluation_duration=2).build_algo()


def of_ppo(folder: Path) -> Any:
    return build_ppo(folder / "model", rollout_turns=8)


@pytest.mark.slow
@pytest.mark.parametrize("make", [of_sac, of_grpo, of_ppo], ids=["SAC", "GRPO", "PPO"])
def test_a_state_goes_on_as_if_there_had_been_no_stop(make, tmp_path):
    straight, by_state, by_path, by_save = algorithms = [make(tmp_path) for _ in range(4)]
    straight.train()
    by_state.set_state(straight.get_state())
    by_path.restore_from_path(straight.save_to_path(tmp_path / "path"))
    by_save.restore(straight.save(str(tmp_path / "save")))
    result = straight.train()
    if straight.config.evaluation_interval:
        assert result[EVALUATION_RESULTS][ENV_RUNNER_RESULTS][NUM_EPISODES] == 2
    expected = {name: value.clone() for name, value in straight.get_module().state_dict().items()}
    assert expected and straight.get_module("other") is None
    for again in (by_state, by_path, by_save):
        again.train()
        assert (again.env_steps, again.iteration) == (straight.env_steps, 2)
        found = again.get_module().state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name].numpy(), value.numpy(), err_msg=name)
    straight.restore_from_path(tmp_path / "path")  # back from where it has come to
    straight.train()
    for name, value in expected.items():
        np.testing.assert_array_equal(straight.get_module().state_dict()[name].numpy(), value.numpy(), err_msg=name)
    evaluated = straight.evaluate()
    assert 0 <= evaluated["success_rate"] <= 1 and math.isfinite(evaluated[ENV_RUNNER_RESULTS][EPISODE_RETURN_MEAN])
    with pytest.raises(UsageError, match="holds no config"):
        type(straight).from_checkpoint(str(tmp_path / "path"))
    for algorithm in algorithms:
        algorithm.stop()


def test_rllib_is_quiet_only_while_it_checks_and_builds(build):
    names = ("ray.rllib", "ray.tune.utils.util", "ray._common.deprecation")
    before = {name: logging.getLogger(name).level for name in names}
    try:
        for level in (logging.INFO, logging.DEBUG):
            for name in names:
                logging.getLogger(name).setLevel(level)
            if level == logging.INFO:
                config_of().validate()
            else:
                build()
            assert {logging.getLogger(name).level for name in names} == {level}
        build(config_of().debugging(log_level="WARN"))
        assert logging.getLogger("ray.rllib").level == logging.WARNING
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def test_partial_states_and_checkpoints_without_a_config_are_refused_with_a_fix(build, tmp_path):
    algorithm = build()
    refused = {
        "get_state()": lambda: algorithm.get_state(components=["learner_group"]),
        "save_to_path(folder)": lambda: algorithm.save_to_path(tmp_path, state={}),
        "restore_from_path(folder)": lambda: algorithm.restore_from_path(tmp_path, component="learner_group"),
        "restore_from_path('somewhere')": lambda: SACPebble.from_checkpoint("somewhere"),
    }
    for fix, call in refused.items():
        with pytest.raises(UsageError) as caught:
            call()
        assert fix in caught.value.fix


def test_evaluations_come_when_they_were_asked_for_and_change_nothing(build):
    seen: list[dict[str, Any]] = []
    looked = build(
        config_of()
        .evaluation(evaluation_interval=2, evaluation_duration=3)
        .callbacks(on_evaluate_end=lambda evaluation_metrics, **_: seen.append(evaluation_metrics))
    )
    blind = build()
    results = [looked.train(), looked.train()]
    blind.train(), blind.train()
    assert EVALUATION_RESULTS not in results[0]
    found = results[1][EVALUATION_RESULTS]
    assert found[ENV_RUNNER_RESULTS][NUM_EPISODES] == 3 and 0 <= found["success_rate"] <= 1
    assert math.isfinite(found[ENV_RUNNER_RESULTS][EPISODE_RETURN_MEAN]) and seen == [looked.evaluate()] * 2
    for name, value in weights(blind).items():
        np.testing.assert_array_equal(weights(looked)[name], value)


def test_the_step_size_and_the_discount_of_rllib_are_ours():
    config = config_of().training(lr=1e-2, gamma=0.5)
    config.validate()
    assert (config.sac.actor_lr, config.sac.critic_lr, config.sac.alpha_lr, config.sac.gamma) == (1e-2, 1e-2, 1e-2, 0.5)


def test_rllibs_defaults_are_accepted_when_chosen():
    plain = AlgorithmConfig()
    ours = config_of().settings(sac=replace(SMALL, gamma=0.9))
    ours.validate()
    assert (ours.sac.critic_lr, ours.sac.gamma) == (SMALL.critic_lr, 0.9), "nobody chose"
    config = ours.copy().training(lr=plain.lr, gamma=plain.gamma)
    by_tune = SACPebbleConfig().update_from_dict(ours.to_dict() | {"lr": plain.lr, "gamma": plain.gamma})
    for chosen in (config, by_tune):
        chosen.validate()
        assert (chosen.sac.critic_lr, chosen.sac.gamma) == (plain.lr, plain.gamma) == (1e-3, 0.99)


class Listener(RLlibCallback):
    def on_episode_end(self, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda config: config.training(grad_clip=1.0), "grad_clip of RLlib's .*SACConfig"),
        (lambda config: config.training(train_batch_size_per_learner=64), "train_batch_size_per_learner"),
        (lambda config: config.environment("CartPole-v1"), r"env of RLlib's .* \.settings"),
        (lambda config: config.env_runners(num_envs_per_env_runner=4), "num_envs_per_env_runner .*EnvConfig"),
        (lambda config: config.debugging(seed=-1), "seed must be 0 to"),
        (lambda config: config.debugging(seed=None), "seed must be 0 to .*, got None"),
        (lambda config: config.env_runners(explore=False), "explore of RLlib's"),
        (lambda config: config.rl_module(model_config={"fcnet_hiddens": [8]}), "model_config .*SACConfig"),
        (lambda config: config.multi_agent(policies_to_train=["default_policy"]), "policies_to_train of .* not used"),
        (lambda config: config.evaluation(evaluation_config={"explore": False}), "evaluation_config of RLlib's"),
        (lambda config: config.callbacks(on_sample_end=print), "on_sample_end would never be called"),
        (lambda config: config.callbacks(Listener), "on_episode_end would never be called"),
        (lambda config: config.evaluation(evaluation_num_env_runners=1), "evaluation_num_env_runners of .* whole"),
        (lambda config: config.evaluation(evaluation_duration_unit="timesteps"), "evaluation_duration_unit"),
        (lambda config: config.callbacks(on_checkpoint_loaded=print), "on_checkpoint_loaded would never be called"),
        (lambda config: config.settings(sacc=SMALL), "there is no setting sacc; there are env_settings, .*, sac"),
        # nobody has listed these: whatever is set and never read is found
        (lambda config: config.framework(torch_compile_learner=True), "torch_compile_learner of RLlib's"),
        (lambda config: config.env_runners(rollout_fragment_length=50), "rollout_fragment_length of RLlib's"),
        (lambda config: config.offline_data(input_="episodes"), "input_ of RLlib's|input of RLlib's"),
        (lambda config: config.reporting(log_gradients=True), "log_gradients of RLlib's"),
    ],
)
def test_settings_that_would_be_ignored_are_refused_by_name(change, says):
    with pytest.raises(ValueError, match=says):
        change(config_of()).validate()


def test_grpo_takes_over_nothing_of_rllib_s_training():
    acting = PolicyGradientAlgorithmConfig().settings(task="push_block", policy=VLAConfig())
    with pytest.raises(ValueError, match=r"gamma of RLlib's .*PolicyGradientConfig"):
        acting.copy().training(gamma=0.5).validate()
    with pytest.raises(ValueError, match=r"lr of RLlib's .*PolicyGradientConfig"):
        acting.copy().training(lr=AlgorithmConfig().lr).validate()


@pytest.mark.full
def test_population_based_training_moves_the_step_size(tmp_path):
    config = config_of()
    config.lr = tune.grid_search([1e-3, 3e-3])  # pyright: ignore[reportAttributeAccessIssue]
    scheduler = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        metric="score",
        mode="max",
        perturbation_interval=1,
        quantile_fraction=0.5,
        resample_probability=0.0,
        hyperparam_mutations={"lr": tune.loguniform(1e-4, 1e-2)},
    )
    results = tune.Tuner(
        SACPebble,
        param_space=config,
        tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=False),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            stop={"training_iteration": 3},
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        ),
    ).fit()
    assert not results.errors and len(results) == 2
    moved = {result.config["lr"] for result in results if result.config is not None}
    assert len(moved) == 2 and moved != {1e-3, 3e-3}, "one of the two took the other's step size and changed it"
