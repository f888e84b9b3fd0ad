"""Time that a GRPO step waits for a slow judge: with its rollouts played in one part or in several, and with updates
that learn from the previous rollout (`algo.staleness`).

    python benchmarks/episode_scoring.py --video-s 0.5 --at-once 64

The judge sleeps, as one on another machine would let this one be idle; a server that scores `at_once` videos side by
side needs `video_s` for each such batch.
"""

import functools
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray
import tyro

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient, PolicyGradientAlgorithmConfig
from rlvlm.core import metrics
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.rewards.config import ChunkRewardConfig, MonitorConfig
from rlvlm.runs.settings.recipes import recipe


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is measured."""

    video_s: float = 0.5
    """Seconds that the judge takes for a batch of videos."""
    at_once: int = 64
    """Videos of a batch."""
    steps: int = 6
    """GRPO steps of each setting; the first two are not counted."""
    parts: tuple[int, ...] = (1, 4)
    """Parts of a rollout."""
    task: str = "push_block"
    """A task in chunks."""
    groups: int = 32
    """Groups of 8 episodes in a rollout."""
    demonstrations: int = 20
    """Episodes of the supervised start, which does not matter here."""


class SlowJudge:
    """Scores by a hash, after a sleep."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    @property
    def stamp(self) -> Stamp:
        return Stamp(judge="slow", revision="", prompt="none", decoding="")

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        raise NotImplementedError("it only scores")

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        time.sleep(-(-len(clips) // self._trial.at_once) * self._trial.video_s)
        return [Score(status=Status.OK, value=int(clip.frames.sum()) % 97 / 96, stamp=self.stamp) for clip in clips]


def main(trial: Trial) -> None:
    """Prints one JSON line per setting."""
    own = recipe(trial.task)
    assert own.kind.name == "chunks", f"{own.task} is no task in chunks"
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    for parts, staleness in itertools.product(trial.parts, (0, 1)):
        reward = ChunkRewardConfig(
            source="judged", num_frames=2, frame_px=32, parts=parts,
            monitor=MonitorConfig(preflight=0, controls=0),
        )  # fmt: skip
        algorithm = (
            PolicyGradientAlgorithmConfig()
            .settings(task=own.task, env_settings=own.policy_env, policy=own.policy)
            .settings(
                sft=replace(own.sft, demonstrations=trial.demonstrations, steps=50),
                algo=replace(own.algo, groups=trial.groups, rounds=1, staleness=staleness),
            )
            .settings(reward=reward, make_judge=functools.partial(SlowJudge, trial))
            .build_algo()
        )
        assert isinstance(algorithm, PolicyGradient)
        algorithm.prepare(lambda line: None)
        waits, wall = 0.0, 0.0
        for step in range(trial.steps):
            began = time.monotonic()
            algorithm.train()
            if step > 1:
                wall += time.monotonic() - began
                waits += algorithm.report()[metrics.REWARD_WAIT_S]
        row = {
            "parts": parts,
            "staleness": staleness,
            "step_s": wall / (trial.steps - 2),
            "waiting_share": waits / wall,
        }
        print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)
        algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Trial, description=__doc__))
