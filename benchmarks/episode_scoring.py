"""How long a GRPO step waits for a judge that is slow, with its rollouts played in one part and in several.

    python benchmarks/episode_scoring.py --video-s 0.5 --at-once 64

The judge sleeps, as one on another machine would let this one be idle; a server that scores `at_once` videos side by
side needs `video_s` for each such batch.
"""

import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray
import tyro

from rlvlm import metrics
from rlvlm.algorithms.grpo.algorithm import VLAGRPO, VLAGRPOConfig
from rlvlm.algorithms.grpo.config import GRPOConfig, ScoreConfig, SFTConfig
from rlvlm.envs.registry import task_env
from rlvlm.rewards.config import MonitorConfig
from rlvlm.types.judging import Clip, Query, Score, Stamp, Status, Verdict


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is measured."""

    video_s: float = 0.5
    """Seconds that the judge takes for a batch of videos."""
    at_once: int = 64
    """Videos of a batch."""
    steps: int = 4
    """GRPO steps of each setting; the first is not counted."""
    parts: tuple[int, ...] = (1, 4)
    """Parts of a rollout."""


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
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    for parts in trial.parts:
        scores = ScoreConfig(
            source="judged", num_frames=2, frame_px=32, parts=parts, monitor=MonitorConfig(preflight=0, controls=0)
        )
        algorithm = (
            VLAGRPOConfig()
            .worlds(task="push_block", world=task_env("push_block"))
            .learning(sft=SFTConfig(demonstrations=20, steps=50), grpo=GRPOConfig(rounds=1))
            .rewards(scores=scores, make_judge=functools.partial(SlowJudge, trial))
            .build_algo()
        )
        assert isinstance(algorithm, VLAGRPO)
        algorithm.prepare(lambda line: None)
        waits, wall = 0.0, 0.0
        for step in range(trial.steps):
            began = time.monotonic()
            algorithm.train()
            if step:
                wall += time.monotonic() - began
                waits += algorithm.report()[metrics.REWARD_WAIT_S]
        row = {"parts": parts, "step_s": wall / (trial.steps - 1), "waiting_share": waits / wall}
        print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)
        algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Trial, description=__doc__))
