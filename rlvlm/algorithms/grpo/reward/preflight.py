"""Tries a judge on episodes whose outcome is known, before anything is learned from its word.

The algorithm does so once, when it prepares.
"""

from collections.abc import Callable

import numpy as np

from rlvlm.algorithms.grpo.config import AdvantageConfig, ScoreConfig
from rlvlm.algorithms.grpo.reward.scoring import VideoScorer
from rlvlm.core import metrics
from rlvlm.core.errors import UsageError
from rlvlm.envs.chunk_env import FIRST_HELD_OUT_STATE, ChunkEnv
from rlvlm.rewards.scorers import Scorer
from rlvlm.rewards.scoring_items import ScoringItem, spread

_MOST_TRIES = 20
"""Episodes of the script per known success that is looked for."""
_LARGE_NOISE = 0.6
"""Of a script that is to fail, added to actions scaled to [-1, 1]."""


def preflight_scorer(
    scorer: VideoScorer,
    env: ChunkEnv,
    scores: ScoreConfig,
    advantage: AdvantageConfig,
    seed: int,
    make_forgetful: Callable[[], Scorer],
    log: Callable[[str], None],
) -> dict[str, float]:
    """Has a judge tell known successes from known failures, and repeat itself where its noise is to be measured.

    Args:
        scorer: of the run; a calibrated threshold is set in it.
        env: with a script that succeeds and fails; it is left somewhere.
        scores: how many episodes are tried, and of how many frames.
        advantage: whether noise is measured.
        seed: of the run.
        make_forgetful: makes the same judge without a memory, which answers the same question anew each time.
        log: takes a line on what is being done now.

    Returns:
        What was found, by names in `rlvlm.core.metrics`; nothing where nobody is asked, or nothing is known.

    Raises:
        JudgeUnavailable: the judge cannot tell them apart.
        UsageError: a threshold is to be calibrated, or noise measured, and no episodes are known.
    """
    is_measured = advantage.scorer_noise == "measured"
    count = scores.monitor.preflight if scores.asks_judge or is_measured else 0
    if not count:
        return {}
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(7,)))
    known = known_episodes(env, count, scores.num_frames, rng)
    unknown = "the task has no script that succeeds and fails"
    if not known and scores.threshold == "calibrated":
        fix = "--reward.threshold with a number, or None"
        raise UsageError(f"nothing calibrates the threshold: {unknown}", fix)
    if not known and is_measured:
        fix = "--algo.advantage.scorer-noise with a number"
        raise UsageError(f"nothing to measure the judge's noise on: {unknown}", fix)
    if not known:
        log(f"the judge is not tried on known episodes: {unknown}")
        return {}
    found: dict[str, float] = {}
    if scores.asks_judge:
        log(f"trying the judge on {len(known)} episodes whose outcome is known")
        preflight = scorer.preflight_on(known)
        found |= {metrics.JUDGE_PREFLIGHT_AUC: preflight.area, metrics.JUDGE_PREFLIGHT_THRESHOLD: preflight.threshold}
        log(f"the judge tells successes from failures: {preflight}")
    if is_measured:
        log(f"having {len(known)} episodes scored twice")
        noise = found[metrics.JUDGE_PREFLIGHT_NOISE] = scorer.measure_noise(known, make_forgetful())
        log(
            f"an episode's score has a standard deviation of {noise:.3f}: groups whose own is not "
            f"above {advantage.noise_factor * noise:.3f} teach nothing"
        )
    return found


def known_episodes(env: ChunkEnv, count: int, num_frames: int, rng: np.random.Generator) -> list[ScoringItem]:
    """Episodes whose outcome is known, for a judge to be tried on: as many failures as successes, and of `count` each
    at most.

    Failures are of two kinds: the script with so much noise that it fails, and the first half of a success. Initial
    states without a script are left out.

    Args:
        env: with a script; it is left somewhere.
        count: of each kind of outcome.
        num_frames: shown of each.
        rng: of initial states and noise.
    """
    successes: list[ScoringItem] = []
    failures: list[ScoringItem] = []
    for number in range(_MOST_TRIES * count):
        if min(len(successes), len(failures)) >= count:
            break
        obs, info = env.reset(options={"state_id": int(rng.integers(FIRST_HELD_OUT_STATE))})
        snapshots, progress, is_over = [obs.snapshots], [float(info["progress"])], False
        while not is_over:
            chunk = env.scripted_chunk(_LARGE_NOISE if number % 2 else 0.0, rng)
            if chunk is None:
                break
            _, _, terminated, truncated, info = env.step(chunk)
            snapshots.append(info["snapshots"])
            progress.append(float(info["progress"]))
            is_over = terminated or truncated
        if not is_over:
            continue
        success = bool(info["success"])
        if success and number % 4 == 0 and len(snapshots) > 2:  # one of a single chunk has no half
            half = (len(snapshots) + 1) // 2
            snapshots, progress, success = snapshots[:half], progress[:half], False
        kind = successes if success else failures
        if len(kind) < count:
            kind.append(
                ScoringItem(
                    goal=obs.instructions[0],
                    snapshots=spread(np.concatenate(snapshots), num_frames),
                    is_success=success,
                    progress=progress[-1],
                )
            )
    fewest = min(len(successes), len(failures))
    return [*successes[:fewest], *failures[:fewest]]
