"""The plots of a run: learning curve, label quality by difficulty, labels over time."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlvlm.core import metrics
from rlvlm.core.steps import FloatArray
from rlvlm.judges.agreement import wilson_interval
from rlvlm.pages.answers import Answers
from rlvlm.pages.charts import ACCENT, INK, OUTCOMES, SCORED, STYLE, save, show_coinciding, titled
from rlvlm.pages.judge_charts import draw_difficulty, draw_scores
from rlvlm.runs.files.answers import final_answers, logged_pairs
from rlvlm.runs.files.folder import RunFolder
from rlvlm.runs.files.scores import DECODINGS

Rows = Sequence[Mapping[str, str]]

HEALTH = {
    "unreadable replies, sampled": (metrics.REPLY_INVALID, "#e76f51"),
    "groups that teach something": (metrics.GROUP_KEPT, "#457b9d"),
}
"""Shares of a rollout that show the health of training, by the label shown."""
NUM_BINS = 10


def write_plots(folder: RunFolder, title: str) -> list[Path]:
    """Draws every plot for which there is data into the run's `plots/`, and returns the files."""
    evaluations, queries, scores = folder.evaluations.read(), final_answers(folder.queries.read()), folder.scores.read()
    rows = folder.metrics.read()
    watched = [row for row in rows if metrics.JUDGE_SCORE in row]
    wanted: dict[str, Callable[[], Figure]] = {}
    if evaluations:
        wanted["learning_curve.png"] = lambda: draw_learning_curve(evaluations, queries or scores, rows, title)
    if queries:
        items, answers = logged_pairs(queries, "")
        wanted["vlm_accuracy.png"] = lambda: draw_difficulty(
            [Answers(name="", items=items, answers=answers)], by_count=True, title=title
        )
        wanted["labels_over_time.png"] = lambda: draw_labels_over_time(queries, title)
    if groups := scores_by_progress(scores):
        wanted["vlm_scores.png"] = lambda: draw_scores(groups, title=f"{title}: scores by true progress")
    if watched:
        wanted["judge_over_training.png"] = lambda: draw_judge_over_training(watched, title)
    folder.plots.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        return [save(figure(), folder.plots / name) for name, figure in wanted.items()]


def draw_learning_curve(evaluations: Rows, queries: Rows, rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draws success, returns, and any data on the rollouts' health and on queries, over env steps: from rows of
    `eval.csv`, of the query log or the score log, and of `metrics.jsonl`.
    """
    health = {
        label: (name, colour)
        for label, (name, colour) in HEALTH.items()
        if {row[name] for row in rows if name in row} not in ({0.0}, {1.0}, set())  # not if it is always none or all
    }
    steps, learned = column(evaluations, "step") / 1_000, column(evaluations, "learned_return")
    heights = {"success": 3.0, "returns": 2.0}
    # in a panel of its own: with a second scale over the true ones, any two rising curves can be made to coincide
    heights |= {"learned": 2.0} if np.isfinite(learned).any() else {}
    heights |= {"health": 1.6} if health else {}
    heights |= {"queries": 1.6} if queries else {}
    figure = titled(8, 1.1 * sum(heights.values()), title)
    found = figure.subplots(len(heights), 1, sharex=True, height_ratios=list(heights.values()))
    panels: dict[str, Axes] = dict(zip(heights, found, strict=True))

    _draw_success(panels["success"], evaluations)
    axes = panels["returns"]
    axes.plot(steps, column(evaluations, "episode_return"), color=INK, marker="o", markersize=3, label="evaluation")
    trained = [row for row in rows if metrics.TRAIN_EPISODE_RETURN in row]
    places = [row[metrics.ENV_STEPS] / 1_000 for row in trained]
    axes.plot(places, [row[metrics.TRAIN_EPISODE_RETURN] for row in trained], color=ACCENT, label="training")
    axes.set(ylabel="return", title="Episode return by the true reward")
    axes.legend(loc="best", title=show_coinciding(axes))
    if axes := panels.get("learned"):
        axes.plot(steps, learned, color=ACCENT, marker="s", markersize=3)
        axes.set(
            ylabel="return", title="Episode return by the reward that is trained on, which changes as it is learned"
        )
    if axes := panels.get("health"):
        places = [row[metrics.ENV_STEPS] / 1_000 for row in rows]
        for label, (name, colour) in health.items():
            shares = [100 * row.get(name, np.nan) for row in rows]
            axes.plot(places, shares, color=colour, linewidth=2, label=label)
        axes.set(ylabel="%", ylim=(-4, 104), title=" / ".join(health).capitalize())
        axes.legend(loc="best", fontsize=8, title=show_coinciding(axes))
    if axes := panels.get("queries"):
        draw_spent(axes, queries, steps.max())
    last = max(float(steps.max()), *(row[metrics.ENV_STEPS] / 1_000 for row in rows), 0.001)
    found[-1].set(xlabel="env steps, thousands", xlim=(-0.01 * last, 1.02 * last))
    return figure


def draw_labels_over_time(queries: Rows, title: str) -> Figure:
    """Draws the outcomes of each feedback session, and the accuracy of decided ones."""
    _, firsts, places = np.unique(column(queries, "session"), return_index=True, return_inverse=True)
    found, steps = np.array([outcome(row) for row in queries]), column(queries, "env_step")[firsts] / 1_000
    counts = {name: np.bincount(places[found == name], minlength=len(firsts)) for name in OUTCOMES}
    decided = counts["correct"] + counts["incorrect"]
    # NaN if a session decided nothing: the line has a gap there
    accuracy = 100 * counts["correct"] / np.where(decided, decided, np.nan)
    figure = titled(8, 4, title)
    axes = figure.add_subplot()
    # as wide as the closest two sessions allow
    width = 0.8 * min(np.diff(steps), default=1.0)
    base = np.zeros(len(firsts))
    for name, heights in counts.items():
        if heights.any():
            axes.bar(steps, heights, bottom=base, width=width, color=OUTCOMES[name], label=name)
        base += heights
    axes.set(xlabel="env steps, thousands", ylabel="queries per session", title="Answers over time")
    axes.set_ylim(0, 1.04 * base.max())
    right = axes.twinx()
    right.spines["right"].set_visible(True)
    right.plot(steps, accuracy, color=INK, marker="o", markersize=4, label="accuracy on decided pairs, %")
    right.set(ylabel="accuracy, %", ylim=(0, 104))
    right.grid(visible=False)
    handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    return figure


def scores_by_progress(scores: Rows) -> dict[str, FloatArray]:
    """Returns the scores of the log by tenths of the true progress, lowest first; unknown ones are left out."""
    given = [row for row in scores if row["vlm_score"] and row["ground_truth_score"]]
    truth, said = column(given, "ground_truth_score"), column(given, "vlm_score")
    # full progress belongs to the last tenth
    bins = np.minimum((truth * NUM_BINS).astype(int), NUM_BINS - 1)
    return {f"{10 * place} to {10 * place + 10} %": said[bins == place] for place in np.unique(bins).tolist()}


def draw_judge_over_training(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draws the judge's scores beside the truth, its error rates and its controls, over env steps: from the rows of
    `metrics.jsonl` with a judge's figures.
    """
    steps = np.array([row[metrics.ENV_STEPS] for row in rows]) / 1_000
    lines = (
        ("The judge's scores of the newest episodes", {
            "mean score": (metrics.JUDGE_SCORE, ACCENT),
            "true success": (metrics.JUDGE_TRUE_SUCCESS, OUTCOMES["correct"]),
        }),
        ("How it errs", {
            "false positives, of failures": (metrics.JUDGE_FALSE_POSITIVES, OUTCOMES["incorrect"]),
            "false negatives, of successes": (metrics.JUDGE_FALSE_NEGATIVES, ACCENT),
            "calibration error": (metrics.JUDGE_CALIBRATION, OUTCOMES["invalid"]),
            "area under the curve": (metrics.JUDGE_AUC, INK),
        }),
        ("The value that is learned from its outcomes", {
            "calibration error": (metrics.VALUE_CALIBRATION, OUTCOMES["invalid"]),
            "spread of its heads": (metrics.VALUE_SPREAD, ACCENT),
        }),
        ("Controls: the best scored, shown again", {
            "as it was": (metrics.JUDGE_CONTROL_SCORE, OUTCOMES["correct"]),
            "backwards": (metrics.JUDGE_BACKWARDS_SCORE, OUTCOMES["incorrect"]),
            "with another goal": (metrics.JUDGE_OTHER_GOAL_SCORE, OUTCOMES["invalid"]),
            "the robot's movement alone": (metrics.JUDGE_ROBOT_ALONE_SCORE, ACCENT),
            "its first moment alone": (metrics.JUDGE_START_SCORE, INK),
        }),
    )  # fmt: skip
    # without truth, or without controls, there is nothing to draw of them
    shown = [
        (heading, known)
        for heading, wanted in lines
        if (known := {label: line for label, line in wanted.items() if any(line[0] in row for row in rows)})
    ]
    figure = titled(10, 2.5 * len(shown), title)
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (heading, wanted) in zip(panels, shown, strict=True):
        for label, (name, colour) in wanted.items():
            values = np.array([row.get(name, np.nan) for row in rows])
            known = np.isfinite(values)  # controls are only asked now and then, and a line needs neighbours
            axes.plot(steps[known], values[known], color=colour, marker="o", markersize=3, linewidth=2, label=label)
        axes.set(title=heading, ylim=(-0.04, 1.04))
        note = textwrap.fill(show_coinciding(axes), 32)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), title=note)
    alarms = [step for step, row in zip(steps, rows, strict=True) if row.get(metrics.JUDGE_ALARM)]
    if alarms:
        for axes in panels:
            axes.axvline(alarms[0], color=OUTCOMES["incorrect"], linestyle="--")
        panels[0].annotate("alarm", (alarms[0], 1.0), color=OUTCOMES["incorrect"], ha="right", va="top")
    panels[-1].set(xlabel="env steps, thousands")
    return figure


def outcome(row: Mapping[str, Any]) -> str:
    """Returns the outcome of a query from a log, or from a stored example, as a key of `OUTCOMES` or `SCORED`; if the
    truth ties there is no right label.
    """
    if row["status"] != "ok":
        return row["status"].replace("_", " ")
    if "vlm_score" in row:
        return "scored"
    return {"1": "correct", True: "correct", "0": "incorrect", False: "incorrect"}.get(row["correct"], "truth ties")


def column(rows: Rows, name: str) -> FloatArray:
    """Returns [N], the numbers of one column; NaN for an empty cell."""
    return np.array([float(row[name]) if row[name] else np.nan for row in rows], dtype=np.float32)


def _draw_success(axes: Axes, evaluations: Rows) -> None:
    """Draws greedy success and, if measured and different, sampled success and returns above 0."""
    steps, counts = column(evaluations, "step") / 1_000, column(evaluations, "episodes").astype(int)
    distinct = [int(row.get("distinct_episodes") or row["episodes"]) for row in evaluations]
    is_sampled = bool(evaluations[-1].get("sampled_success_rate"))
    if not evaluations[-1]["success_rate"]:
        axes.set(xticks=[], yticks=[])
        axes.set_title("The env does not define success")
        return
    axes.set(ylabel="episodes, %", ylim=(-4, 104))
    axes.set_title(
        f"Success in {counts[-1]} episodes of each decoding" if is_sampled else "Success of the deterministic policy"
    )
    decodings = {"greedy": OUTCOMES["correct"]} | ({"sampled": ACCENT} if is_sampled else {})
    for place, (decoding, colour) in enumerate(decodings.items()):
        success = column(evaluations, DECODINGS["success"][place])
        label = decoding if is_sampled else "at any step of the episode"
        axes.plot(steps, 100 * success, color=colour, marker="o", markersize=4, linewidth=2, label=label)
        # for a deterministic policy's few episodes an interval would be as wide as the axes: fill below the curve
        low, high = np.zeros(len(success)), success
        if is_sampled:
            independent = counts if place else distinct  # a repeated greedy episode adds no information
            bounds = [
                wilson_interval(round(share * count), count) for share, count in zip(success, independent, strict=True)
            ]
            low, high = np.array(bounds).T
        axes.fill_between(steps, 100 * low, 100 * high, color=colour, alpha=0.12, linewidth=0)
        if not place and all(row.get("success_at_end") for row in evaluations):
            at_end = column(evaluations, "success_at_end")
            if not np.array_equal(at_end, success):
                axes.plot(steps, 100 * at_end, color=INK, linestyle=":", marker=".", label="at the end of the episode")
        name = DECODINGS["return above 0"][place]
        if not evaluations[-1].get(name):
            continue
        above = column(evaluations, name)
        if not np.array_equal(above, success):
            axes.plot(steps, 100 * above, color=colour, linestyle="--", marker=".", label=f"{decoding}, return above 0")
    if is_sampled or len(axes.get_lines()) > 1:
        axes.legend(loc="best", title=show_coinciding(axes))


def draw_spent(axes: Axes, queries: Rows, last: float) -> None:
    """Draws the queries so far, up to `last` thousand env steps."""
    axes.set(title=f"Queries asked so far, {len(queries):,} in all", ylabel="queries")
    # the areas continue to the end of the run, where nothing more is asked
    steps = np.append(column(queries, "env_step") / 1_000, last)
    outcomes = np.array([outcome(row) for row in queries])
    colours = OUTCOMES | SCORED
    present = [name for name in colours if (outcomes == name).any()]
    spent = [np.append(counts := np.cumsum(outcomes == name), counts[-1]) for name in present]
    axes.stackplot(steps, spent, labels=present, colors=[colours[name] for name in present], step="post")
    axes.legend(loc="upper left", ncols=len(present), fontsize=8)
