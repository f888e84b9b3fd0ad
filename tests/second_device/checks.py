"""What is run on the second device, in a process of its own: `python -m tests.second_device.checks LIBRARY FOLDER`.

With `cuda` in the place of the library it is run on a GPU.

Each check is a function of the device; it fails by raising, as a GPU would, where tensors of two devices meet.
"""

import functools
import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.config import chunk_defaults
from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.testing import FakeJudge
from rlvlm.vlms import devices
from tests.second_device import load


def sac(device: torch.device, folder: Path, *, model: str, update: str = "by_hand", **rewards: Any) -> None:
    """Rounds with novelty, a session, relabelling and an evaluation; a checkpoint of it is gone on with on the CPU."""

    def build() -> Any:
        settings: dict[str, Any] = {"source": "preference", "teacher": "judge", "model": model} | rewards
        size_px = 64 if model == "resnet18" else 16
        return (
            SACPebbleConfig()
            .settings(
                task="rlvlm.testing:TINY",
                env_settings=MetaWorldConfig(episode_steps=20, start="random", robot="visible"),
            )
            .settings(sac=SACConfig(hidden=(16, 16), batch_size=16, seed_steps=10, turn_steps=5, update=update))  # type: ignore[arg-type]
            .settings(
                reward=StepRewardConfig(**settings),
                feedback=FeedbackConfig(first_step=40, every_steps=20, queries=4, sampling="disagreement"),
                reward_model=RewardModelConfig(image_px=size_px, max_epochs=2, min_updates=0, hold_out_every=0),
                make_judge=functools.partial(FakeJudge),
            )
            .debugging(seed=0)
            .build_algo()
        )

    algorithm = build()
    for _ in range(4):
        algorithm.train()
    learner = algorithm.learner
    where = {tensor.device for tensor in (*learner.networks.state_dict().values(), learner.replay.rewards)}
    if algorithm.reward_switch.learned is not None:
        where |= {weight.device for weight in algorithm.reward_switch._loop._model.ensemble.parameters()}
    assert where == {device}, where
    assert len(algorithm.evaluate_policy(2).episodes) == 2
    algorithm.save_checkpoint(str(folder / "saved"))
    algorithm.train()
    again = build()
    again.load_checkpoint(str(folder / "saved"))
    again.train()
    for mine, other in zip(learner.networks.parameters(), again.learner.networks.parameters(), strict=True):
        np.testing.assert_array_equal(mine.detach().cpu(), other.detach().cpu())


def grpo(device: torch.device, folder: Path) -> None:
    """The supervised start, two updates, both kinds of evaluation, a checkpoint; all the same with Adam's averages in
    main memory while nothing is learned.
    """
    learned = []
    for offload in (False, True):
        algorithm: Any = (
            PolicyGradientAlgorithmConfig()
            .settings(task="push_block", env_settings=ChunkEnvConfig(episode_steps=32), policy=VLAConfig())
            .settings(
                sft=ChunkSFTConfig(episodes=4, updates=4), algo=chunk_defaults(groups=2, group_size=4, offload=offload)
            )
            .debugging(seed=0)
            .build_algo()
        )
        for _ in range(2):
            algorithm.train()
        assert {weight.device for weight in algorithm.policy.parameters()} == {device}
        algorithm.evaluate_policy(2)
        algorithm.save_checkpoint(str(folder / "saved"))
        algorithm.load_checkpoint(str(folder / "saved"))
        algorithm.train()
        averages = [state["exp_avg"].device for state in algorithm.learner._optimizer.state.values()]
        assert averages and set(averages) == {torch.device("cpu") if offload else device}, averages
        learned.append([weight.detach().cpu() for weight in algorithm.policy.parameters()])
    assert all(map(torch.equal, *learned)), "offloading changes what is learned"


CHECKS = {
    "sac, images": functools.partial(sac, model="image"),
    "sac, resnet18": functools.partial(sac, model="resnet18"),
    "sac, states, autograd": functools.partial(sac, model="state", update="autograd"),
    "sac, the judge's own word": functools.partial(sac, model="image", source="judged"),
    "grpo": grpo,
}


def main(library: str, folder: str, *names: str) -> None:
    """Runs checks, all or those named, where `cuda` means the second device; prints what came of each as JSON."""
    import ray
    from ray.rllib.core.learner.torch import torch_learner

    outcomes = {}
    device = torch.device("cuda:0") if library == "cuda" else load(Path(library))
    here: Any = torch_learner
    here.get_device = lambda config, gpus=0: device if gpus else torch.device("cpu")
    original = devices.pick_device
    for module in list(sys.modules.values()):
        if getattr(module, "pick_device", None) is original:
            module.pick_device = lambda *arguments: device  # type: ignore[attr-defined]
    ray.init(log_to_driver=False, logging_level=logging.ERROR)  # on the Ray that RAY_ADDRESS names, where there is one
    for number, name in enumerate(names or CHECKS):
        try:
            CHECKS[name](device, Path(folder) / str(number))
            outcomes[name] = "fine"
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main(*sys.argv[1:])
