"""Effect of off-policy data on learning: from an engine that differs on purpose, or from old rollouts.

    python benchmarks/off_policy.py number_line --temperatures 1.5 --noise 1 --seeds 0 1 2
    python benchmarks/off_policy.py push_block --steps 400000 --staleness 0 1 2 --seeds 0 1 2 --out stale.json

Runs of a task's recipe in one process, from the same supervised start of each seed:

- with an engine (tasks of replies) that is not quite the policy that is trained, as one in 8 bits or with kernels of
  its own, only more: its logits carry fresh noise, or it samples at a temperature that the trainer does not know. It
  reports the log-probs of what it sampled from, so the difference can be corrected: without and with
  `algo.loss.correction token`;
- with rollouts of weights that are `algo.staleness` updates old, which are the same whoever plays and however fast.

Of each: greedy and sampled success of the policy itself before and after, in [0, 1]; the mean |trainer / engine - 1|
over the first minibatch, which a run's warning compares with 5 %; the share of tokens whose weight was truncated; and
gradient steps per update, which ends where it is further than `algo.max_kl` from what was sampled.
"""

import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import tyro
from ray.tune.trainable import trainable

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient
from rlvlm.core import metrics
from rlvlm.core.episodes import Observations, SampledReply
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.start.build import algorithm_settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    task: tyro.conf.Positional[str]
    steps: int = 5_120
    """Env steps of each run, over which its step sizes fall."""
    seeds: tuple[int, ...] = (0,)
    staleness: tuple[int, ...] = ()
    """Ages of rollouts, in updates, of envs in chunks: an env runner plays each once an update."""
    noise: tuple[float, ...] = ()
    """Standard deviations of what a noisy engine adds to each logit, nats."""
    temperatures: tuple[float, ...] = ()
    """At which other engines sample, in units of the trainer's; 1 is the policy itself."""
    episodes: int = 200
    """Episodes of each evaluation."""
    out: Path | None = None
    """File for the figures, as JSON."""


class OtherEngine(PolicyEngine):
    """Samples from something near the policy, and gives the log-probs of what it sampled from.

    Args:
        policy: that is trained.
        max_batch: requests that go through the model together.
        noise: standard deviation of what is added to each log-probability before it is normalised again, nats.
        temperature: in units of that which it is asked for.
    """

    def __init__(self, policy: VLMPolicy, max_batch: int, noise: float = 0.0, temperature: float = 1.0) -> None:
        super().__init__(policy, max_batch)
        self.is_exact = False
        """Whether it samples from the policy itself, to evaluate that."""
        self._noise, self._temperature = noise, temperature
        self._generator = torch.Generator().manual_seed(0)

    def reply(self, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[SampledReply]:
        """As the engine in process, from another distribution at every token."""
        backbone: Any = self.policy.backbone
        exact = backbone.next_token_log_probs

        def near(state: torch.Tensor, asked: float) -> torch.Tensor:
            table = exact(state, asked * self._temperature)
            if self._noise:
                table = table + self._noise * torch.randn(table.shape, generator=self._generator)
            return table.log_softmax(-1)

        if not self.is_exact:
            backbone.next_token_log_probs = near  # of the instance, so the learner's passes do not see it
        try:
            return super().reply(obs, seeds, sampling)
        finally:
            vars(backbone).pop("next_token_log_probs", None)


def train(config: Config, seed: int, loss: dict[str, Any], algo: dict[str, Any], **other: float) -> dict[str, float]:
    """One run, with settings of its loss and of its algorithm, and an `OtherEngine` of the settings `other`."""
    run = recipe(config.task)
    settings: Any = run.algo
    settings = replace(settings, loss=replace(settings.loss, **loss), **algo)
    run = replace(run, steps=config.steps, seed=seed, algo=settings)
    engines: list[OtherEngine] = []

    def make_engine(policy: VLMPolicy, *_: Any) -> OtherEngine:
        engines.append(OtherEngine(policy, settings.num_envs, **other))
        return engines[-1]

    torch.set_num_threads(1)
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        # for RLlib's empty folder
        trainable.DEFAULT_STORAGE_PATH = folder  # pyright: ignore[reportPrivateImportUsage]
        algorithm = algorithm_settings(run, None, make_engine if other else None).build_algo()
        assert isinstance(algorithm, PolicyGradient)
        algorithm.prepare(lambda line: None)

        def success() -> tuple[float, float]:
            for engine in engines:
                engine.is_exact = True
            evaluation = algorithm.evaluate_policy(config.episodes)
            for engine in engines:
                engine.is_exact = False
            found, reached = evaluation.metrics, float(np.mean([episode.is_success for episode in evaluation.episodes]))
            sampled = found.get(metrics.EVAL_SAMPLED_STRICT_SUCCESS, found[metrics.EVAL_SAMPLED_SUCCESS])
            return found.get(metrics.EVAL_STRICT_SUCCESS, reached), sampled

        start = success()
        while algorithm.env_steps < config.steps:
            algorithm.train()
            rounds.append(algorithm.report())
        end = success()
        algorithm.stop()
    return {
        "greedy at first": start[0],
        "sampled at first": start[1],
        "greedy": end[0],
        "sampled": end[1],
        "first ratio error": rounds[0].get(metrics.UPDATE_FIRST_RATIO, float("nan")),
        "truncated": float(np.mean([row.get(metrics.ENGINE_TRUNCATED, 0.0) for row in rounds])),
        "steps per update": float(np.mean([row.get(metrics.UPDATE_STEPS, 0.0) for row in rounds])),
    }


def main(show: Callable[[str], None] = print) -> None:
    config = tyro.cli(Config, description=__doc__)
    # RLlib starts one by itself, with a dashboard; all that is measured runs in this process, or in one env runner
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    once = {"rounds": 1, "env_runners": 1} if config.staleness else {}
    variants: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, float]]] = {
        f"staleness {staleness}": ({}, {**once, "staleness": staleness}, {}) for staleness in config.staleness
    }
    engines = {f"noise {noise:g}": {"noise": noise} for noise in config.noise}
    engines |= {f"temperature {temperature:g}": {"temperature": temperature} for temperature in config.temperatures}
    for name, other in engines.items():
        for correction in ("none", "token"):
            variants[f"{name}, correction {correction}"] = ({"correction": correction}, {}, other)
    figures: dict[str, list[dict[str, float]]] = {}
    for name, (loss, algo, other) in variants.items():
        began = time.monotonic()
        figures[name] = [train(config, seed, loss, algo, **other) for seed in config.seeds]
        shown = {key: " ".join(f"{run[key]:.3f}" for run in figures[name]) for key in figures[name][0]}
        words = ", ".join(f"{key} {values}" for key, values in shown.items())
        show(f"{name}: {words}  ({time.monotonic() - began:.0f} s)")
    if config.out is not None:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        config.out.write_text(json.dumps({"machine": machine, "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
