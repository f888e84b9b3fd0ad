"""`rlvlm score --value`: the probability of success at each frame of recorded episodes, learned from their labels.

Each network of the ensemble is trained without its own share of the episodes and predicts these: a value that had seen
how an episode ended would leave none of its answers an advantage.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlvlm.algorithms.outcome_value import MIN_DIFFERENCE, OutcomeValue
from rlvlm.algorithms.policy_gradient.critic import NUM_GOALS, goal_flags
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray
from rlvlm.demonstrations.recordings import Recordings
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.envs.pixels import resized
from rlvlm.judge_bench.scoring import ScoredEpisode, find_threshold
from rlvlm.judges.agreement import calibration_error
from rlvlm.rewards.config import SHAPING_VALUE

_IMAGE_PX = 16
"""Side of the images that a network sees."""
_NETWORKS = replace(SHAPING_VALUE, lr=2e-3, steps=50, monte_carlo=3)
_ROUNDS = 8
EXPECTILE = 0.7
"""Of the upper value, as in the paper for locomotion."""
_MIN_KNOWN = 8
"""Known successes, or failures, below which no share of wrong outcomes is taken from them."""


def learn_values(
    episodes: Sequence[ScoredEpisode], recordings: Recordings, seed: int
) -> tuple[list[ScoredEpisode], dict[str, str]]:
    """Returns the episodes with their values, and what there is to say about these, by name.

    An outcome is whether the episode's worth reaches the threshold, where the data's own successes determine one, whose
    wrong outcomes are then allowed for; else it is the worth itself.

    Args:
        episodes: labelled episodes, by number.
        recordings: the data.
        seed: seed of the networks.
    """
    features = _features(episodes, recordings)
    threshold, is_known = find_threshold(episodes)
    outcomes = {
        episode.number: float(episode.worth >= threshold) if is_known else episode.worth
        for episode in episodes
        if episode.number in features and np.isfinite(episode.worth)
    }
    if len(outcomes) < _NETWORKS.heads or np.ptp(list(outcomes.values())) < MIN_DIFFERENCE:
        return list(episodes), {"value": f"none is learned: the outcomes of {len(outcomes):,} episodes are all alike"}
    numbers = list(outcomes)
    truths = {episode.number: episode.truth for episode in episodes}
    wrong = [[outcomes[n] != truth for n in numbers if is_known and truths[n] is truth] for truth in (False, True)]
    false, missed = (float(np.mean(part)) if len(part) >= _MIN_KNOWN else 0.0 for part in wrong)
    rates = (false, missed)
    given = [features[number] for number in numbers]
    config = replace(_NETWORKS, episodes=len(numbers))
    columns = []
    for settings, expectile in ((config, 0.5), (replace(config, td_lambda=0.0), EXPECTILE)):
        value = OutcomeValue(
            settings, given[0].shape[1], seed, num_flags=NUM_GOALS, num_pixels=3 * _IMAGE_PX**2,
            expectile=expectile, leaves_out=True,
        )  # fmt: skip
        value.learn(given, np.array(list(outcomes.values()), np.float32), rates)
        for _ in range(_ROUNDS - 1):
            value.learn([], np.zeros(0, np.float32), rates)
        columns.append({number: value.predict(rows) for number, rows in features.items()})
    heads = {number: numbers.index(number) % config.heads for number in numbers}

    def own(found: FloatArray, number: int) -> FloatArray:
        return found[heads[number]] if number in heads else found.mean(0)

    valued = [
        replace(
            episode,
            values=np.stack([own(column[episode.number], episode.number) for column in columns], 1),
            outcome=outcomes.get(episode.number, np.nan),
        )
        if episode.number in features else episode
        for episode in episodes
    ]  # fmt: skip
    held = {
        number: outcomes[number] >= threshold if truths[number] is None else bool(truths[number]) for number in numbers
    }
    predicted = np.concatenate([own(columns[0][number], number) for number in numbers])
    true = np.concatenate([np.full(len(features[number]), held[number]) for number in numbers])
    spread = float(np.concatenate([columns[0][number].std(0) for number in numbers]).mean())
    against = "the data's own successes" if is_known else "the labels"
    said = f"of {len(numbers):,} outcomes; calibration error {calibration_error(predicted, true):.2f} against {against}"
    said += f", spread of its networks {spread:.2f}"
    if false or missed:
        said += f"; allows for {false:.0%} of failures called successes and {missed:.0%} of successes missed"
    return valued, {"value": said}


def _features(episodes: Sequence[ScoredEpisode], recordings: Recordings) -> dict[int, FloatArray]:
    """Returns [n, F] by episode number, of the frames that were asked about: a small image, proprioception, the time
    gone, and the goal. Episodes whose images cannot be read are left out.
    """
    asked = {episode.number: episode for episode in episodes if len(episode.frames)}
    longest = max((episode.num_frames for episode in asked.values()), default=1)
    found: dict[int, FloatArray] = {}
    for number, film in enumerate(recordings):
        if number not in asked or not isinstance(film, RobotTrajectory):
            continue
        frames = asked[number].frames
        try:
            images = np.stack([resized(image, _IMAGE_PX, _IMAGE_PX) for image in film.images(frames)[:, 0]])
        except UsageError:
            continue
        parts = [images.reshape(len(frames), -1) / 255, film.proprio[frames], frames[:, None] / longest]
        flags = np.tile(goal_flags(film.instruction), (len(frames), 1))
        found[number] = np.concatenate([*parts, flags], axis=1, dtype=np.float32)
    widths = [rows.shape[1] for rows in found.values()]
    most = max(set(widths), key=widths.count, default=0)  # other images or other robots are not one state
    return {number: rows for number, rows in found.items() if rows.shape[1] == most}
