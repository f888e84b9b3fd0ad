"""The numbers a run comes down to: `summary.json`, the run card and the comparison of runs read them here."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.judging import Status
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.checkpoints import RunState
from rlvlm.runs.folder.rows import DECODINGS
from rlvlm.runs.folder.run_folder import RunFolder

FINAL_EVALUATIONS = 3
"""The final success rate is the mean of this many last evaluations."""


def summarise(folder: RunFolder, config: RunConfig, state: RunState, exit_reason: str) -> dict[str, Any]:
    """What `summary.json` says.

    Args:
        folder: the run, with its tables complete up to `state`.
        config: its configuration.
        state: where it stopped.
        exit_reason: `done`, or why it stopped earlier.

    Returns:
        Rates in [0, 1], None where nothing was measured; seconds; MiB; counts.
    """
    evaluations = folder.evaluations.read()
    trained = [row for row in evaluations if int(row["step"])]
    success = [float(row["success_rate"]) for row in trained]
    returns = [float(row["episode_return"]) for row in trained]
    at_end = [float(row["success_at_end"]) for row in trained[-FINAL_EVALUATIONS:] if row.get("success_at_end")]
    return {
        "task": config.task,
        "seed": config.seed,
        "reward": config.reward_name,
        "exit_reason": exit_reason,
        "final_success_rate": _mean(success[-FINAL_EVALUATIONS:]),
        "final_success_at_end": _mean(at_end),
        "best_success_rate": max((float(row["success_rate"]) for row in evaluations), default=None),
        "final_episode_return": _mean(returns[-FINAL_EVALUATIONS:]),
        "evaluations": len(trained),
        "env_steps": state.env_steps,
        "wall_s": round(state.wall_s, 1),
        "steps_per_s": round(state.env_steps / state.wall_s, 1) if state.wall_s else None,
        "peak_rss_mb": round(state.peak_rss_mb),
        **({"changes": list(state.changes)} if state.changes else {}),
        **summarise_answers(folder),
        **({"decodings": shares} if (shares := summarise_decodings(evaluations)) else {}),
        **({"judge": watched} if (watched := summarise_judge(folder)) else {}),
        **({"learned_reward": trust} if (trust := summarise_trust(folder)) else {}),
    }


def summarise_decodings(evaluations: Sequence[dict[str, str]]) -> dict[str, dict[str, float]]:
    """Success of greedy and of sampled play, before training and at its end; empty where play is not sampled.

    Args:
        evaluations: rows of `eval.csv`; that of step 0 was measured before training.

    Returns:
        By `before training` and `at the end`: the columns of `DECODINGS`, and the number of episodes of each decoding.
    """
    if not evaluations or not evaluations[-1]["sampled_success_rate"]:
        return {}
    first, last = evaluations[0], evaluations[-1]
    chosen = ({} if int(first["step"]) else {"before training": first}) | {"at the end": last}
    wanted = [name for pair in DECODINGS.values() for name in pair if last[name]]
    return {
        when: {name: float(row[name]) for name in wanted} | {"episodes": int(row["episodes"])}
        for when, row in chosen.items()
    }


def summarise_judge(folder: RunFolder) -> dict[str, float | int | None]:
    """The newest figures of the monitor of a judge that rewards, and the step of its alarm; empty without one."""
    figures: dict[str, float | int | None] = {}
    rows = folder.metrics.read()
    for row in rows:
        figures |= {name: value for name, value in row.items() if name.startswith("judge/")}
    if figures:
        alarms = (int(row[metrics.ENV_STEPS]) for row in rows if row.get(metrics.JUDGE_ALARM))
        figures["alarm_step"] = next(alarms, None)
    return figures


def summarise_trust(folder: RunFolder) -> dict[str, int | None]:
    """Since which step the learned reward is in force, None where it never was, and how many answers it predicted by
    then, or in all; empty where no reward was fitted.
    """
    fitted = [row for row in folder.metrics.read() if row.get(metrics.REWARD_IS_TRUSTED) is not None]
    if not fitted:
        return {}
    trusted = next((row for row in fitted if row[metrics.REWARD_IS_TRUSTED]), None)
    row = trusted or fitted[-1]
    return {
        "in_force_from_step": None if trusted is None else int(trusted[metrics.ENV_STEPS]),
        "predicted": int(row.get(metrics.REWARD_NUM_FORETOLD, 0)),
        "foretold_right": int(row.get(metrics.REWARD_NUM_FORETOLD_RIGHT, 0)),
    }


def summarise_answers(folder: RunFolder) -> dict[str, Any]:
    """What `summarise_queries` says of a run's comparisons and scores, and how far the scores are from the truth."""
    queries, rows = folder.queries.read(), folder.scores.read()
    # a run that was interrupted may have been told the same again, from its store
    scores = list({row["question"] or str(place): row for place, row in enumerate(rows)}.values())
    return summarise_queries([*queries, *scores]) | {"score_error": score_error(scores)}


def summarise_queries(rows: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Counts by status, and the share of right ones among the decided whose truth is known.

    Args:
        rows: of `vlm_query_log.csv` and `vlm_score_log.csv`; scores are neither right nor wrong.
    """
    by_status = Counter(row["status"] for row in rows)
    judged = [row["correct"] == "1" for row in rows if row.get("correct")]
    return {
        "queries": len(rows),
        "labels": {str(status): by_status[status] for status in Status},
        "label_accuracy": _mean(judged),
    }


def score_error(rows: Sequence[dict[str, str]]) -> float | None:
    """Mean distance of scores in [0, 1] from the true progress; None where nothing was scored.

    Args:
        rows: of `vlm_score_log.csv`.
    """
    return _mean([abs(float(row["vlm_score"]) - float(row["ground_truth_score"])) for row in rows if row["vlm_score"]])


def _mean(values: Sequence[float]) -> float | None:
    return round(float(np.mean(values)), 4) if values else None
