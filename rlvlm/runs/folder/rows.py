"""A run's events as rows of its tables."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from rlvlm.algorithms.evaluation import Evaluation
from rlvlm.core import metrics
from rlvlm.core.judging import Label
from rlvlm.preferences.records import QueryRecord, ScoreRecord

DECODINGS = {
    "success": ("success_rate", "sampled_success_rate"),
    "return above 0": ("strict_success_rate", "sampled_strict_success_rate"),
}
"""Columns of `eval.csv` with the share of greedy and of sampled episodes, by what is counted."""
_CODES = {Label.LEFT: 0, Label.RIGHT: 1}


def evaluation_row(evaluation: Evaluation, env_steps: int, wall_s: float) -> dict[str, Any]:
    """A row of `eval.csv`: means over the episodes of one evaluation."""
    episodes = evaluation.episodes
    learned = float(np.mean([episode.learned_return for episode in episodes]))
    return {
        "step": env_steps,
        "success_rate": float(np.mean([episode.is_success for episode in episodes])),
        "episode_return": float(np.mean([episode.env_return for episode in episodes])),
        "learned_return": learned if np.isfinite(learned) else None,
        "final_progress": float(np.mean([episode.progress[-1] for episode in episodes])),
        "episodes": len(episodes),
        "wall_s": wall_s,
        "sampled_success_rate": evaluation.metrics.get(metrics.EVAL_SAMPLED_SUCCESS),
        "strict_success_rate": evaluation.metrics.get(metrics.EVAL_STRICT_SUCCESS),
        "sampled_strict_success_rate": evaluation.metrics.get(metrics.EVAL_SAMPLED_STRICT_SUCCESS),
        "success_at_end": float(np.mean([episode.ends_in_success for episode in episodes])),
    }


def evaluation_rank(row: Mapping[str, Any]) -> tuple[float, float]:
    """What the best of several rows of `eval.csv` is chosen by: success, then the return."""
    return true_success(row), float(row["episode_return"])


def true_success(row: Mapping[str, Any]) -> float:
    """The share of successful episodes in a row of `eval.csv`.

    Where sampled play was evaluated too, it counts as much as greedy play: a greedy policy that went round in circles
    may sample well, and the other way round. In envs in turns no more count than have a return above 0: chance
    reaches many a goal in the end.
    """
    measured = [
        [float(row[name]) for name in names if row.get(name) not in (None, "")]
        for names in zip(*DECODINGS.values(), strict=True)
    ]
    return float(np.mean([min(shares) for shares in measured if shares]))


def query_row(record: QueryRecord) -> dict[str, Any]:
    """A row of `vlm_query_log.csv`."""
    verdict = record.verdict
    p_left, p_right, p_tie = verdict.probabilities or (None, None, None)
    return {
        "ground_truth_score_1": record.progress_left,
        "ground_truth_score_2": record.progress_right,
        "vlm_predicted_label": -1 if verdict.label is None else _CODES.get(verdict.label, -1),
        "timestamp": _time(record.timestamp),
        "train_iter": record.env_step,
        "status": str(verdict.status),
        "p_left": p_left,
        "p_right": p_right,
        "p_tie": p_tie,
        "session": record.session,
        "env_step": record.env_step,
        "index": record.index,
        "correct": record.correct,
        "return_1": record.return_left,
        "return_2": record.return_right,
        "latency_s": verdict.latency_s,
        "text": verdict.text,
        "question": verdict.question,
    }


def score_row(record: ScoreRecord) -> dict[str, Any]:
    """A row of `vlm_score_log.csv`."""
    score = record.score
    return {
        "ground_truth_score": record.progress,
        "vlm_score": score.value,
        "timestamp": _time(record.timestamp),
        "status": str(score.status),
        "session": record.session,
        "env_step": record.env_step,
        "index": record.index,
        "return": record.env_return,
        "latency_s": score.latency_s,
        "text": score.text,
        "question": score.question,
    }


def _time(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds")
