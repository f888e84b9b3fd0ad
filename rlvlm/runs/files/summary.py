"""Summary of a run: the figures of `summary.json`, and the card `README.md`."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_json
from rlvlm.core.judging import Status
from rlvlm.judge_bench.figures import pair_figures, rank_correlation
from rlvlm.judge_bench.rows import beside, read_row, task_figures
from rlvlm.judges.agreement import wilson_interval
from rlvlm.runs.files.answers import RETURN, final_answers, logged_pairs, truth_name
from rlvlm.runs.files.checkpoints import RunState
from rlvlm.runs.files.folder import RunFolder
from rlvlm.runs.files.scores import DECODINGS
from rlvlm.runs.settings.config import GOAL_IMAGE, RunConfig
from rlvlm.runs.settings.kinds import StepsRun

FINAL_EVALUATIONS = 3
"""Number of last evaluations whose mean is the final success rate."""
_GOOD, _NEAR = 0.9, 0.05
"""Success from which a run needs no advice, and how far it may end below the true reward's run."""
_GOOD_LABELS, _FEW_LABELS = 0.8, 20
"""Share of right labels below which the judge is the first suspect, and how many must be known to say so."""
_GOOD_FIT = 0.85
"""Share of its own labels that a fit orders right, below which it needs more updates; above, more would overfit."""
_TITLES = {
    "learning_curve.png": "Learning curve",
    "vlm_accuracy.png": "Answers by difficulty",
    "labels_over_time.png": "Answers over time",
    "vlm_scores.png": "Scores against the truth",
    "judge_over_training.png": "The judge against the truth over training",
}
_AREA = "area under its curve"
_WATCHED = {
    "failures that the judge calls successes": metrics.JUDGE_FALSE_POSITIVES,
    "successes that it calls failures": metrics.JUDGE_FALSE_NEGATIVES,
    _AREA: metrics.JUDGE_AUC,
}
"""Metrics of the newest episodes, by the label shown."""
_WHEN = {
    "before training": "at step 0, before training",
    "at the end": "at the last evaluation",
    "at worst": "at the worst evaluation after the start",
}
_PAGES = {
    "judge_panel.html": "the judge's answers, with images",
    "episodes.html": "episodes of the last evaluation, image by image",
    "success_by_instruction.csv": "success of the last evaluation, instruction by instruction",
}


def summarise(folder: RunFolder, config: RunConfig, state: RunState, exit_reason: str) -> dict[str, Any]:
    """Returns the content of `summary.json` for a run whose tables are complete up to `state`; `exit_reason` is `done`,
    or why it stopped earlier.

    Returns:
        Rates in [0, 1], None if nothing was measured; seconds; MiB; counts. `success` is always the share of the last
        evaluation's episodes that end in success; the names of the others say what they count. All are None if the env
        does not define success.
    """
    evaluations = folder.evaluations.read()
    # the row of step 0 was measured before training, and shows the effect of demonstrations
    trained = [row for row in evaluations if int(row["step"])]
    # an env without a test of success leaves the cell empty
    has_success = all(row["success_rate"] for row in evaluations)
    success = [float(row["success_rate"]) for row in trained if has_success]
    returns = [float(row["episode_return"]) for row in trained]
    at_end = [float(row["success_at_end"]) for row in trained[-FINAL_EVALUATIONS:] if row.get("success_at_end")]
    # absent quantities are left out, so that a reader need not tell "none" from "not measured"
    return {
        "task": config.task,
        "seed": config.seed,
        "reward": config.reward_name,
        "exit_reason": exit_reason,
        "success": float(trained[-1].get("success_at_end") or success[-1]) if success else None,
        "final_success_rate": _mean(success[-FINAL_EVALUATIONS:]),
        "final_success_at_end": _mean(at_end),
        "best_success_rate": max((float(row["success_rate"]) for row in evaluations if has_success), default=None),
        "final_episode_return": _mean(returns[-FINAL_EVALUATIONS:]),
        "evaluations": len(trained),
        "has_success": has_success,
        **(_counted(trained[-1]) if trained else {}),
        "env_steps": state.env_steps,
        "wall_s": round(state.wall_s, 1),
        "steps_per_s": round(state.env_steps / state.wall_s, 1) if state.wall_s else None,
        "peak_rss_mb": round(state.peak_rss_mb),
        **({"changes": list(state.changes)} if state.changes else {}),
        **summarise_answers(folder),
        **({"decodings": shares} if (shares := summarise_decodings(evaluations)) else {}),
        **({"person": person} if (person := summarise_person(folder)) else {}),
        **({"judge": watched} if (watched := summarise_judge(folder)) else {}),
        **({"learned_reward": trust} if (trust := summarise_trust(folder)) else {}),
        **({"bench": rows} if (rows := beside_bench(folder, config)) else {}),
        **({"true_reward": beside} if (beside := beside_true_reward(folder, config)) else {}),
    }


def _counted(row: Mapping[str, str]) -> dict[str, int]:
    """Returns the number of episodes of an evaluation, and of distinct greedy ones."""
    played = int(row["episodes"])
    return {"episodes": played, "distinct": int(row.get("distinct_episodes") or played)}


def summarise_decodings(evaluations: Sequence[dict[str, str]]) -> dict[str, dict[str, float]]:
    """Returns the success of greedy and of sampled play, before and after training; empty if play is not sampled.

    Args:
        evaluations: rows of `eval.csv`; that of step 0 was measured before training.

    Returns:
        By `before training`, `at the end` and, with three evaluations or more, `at worst` (column by column, after the
        start): the columns of `DECODINGS`, the number of episodes of each decoding, and the number of distinct greedy
        ones.
    """
    if not evaluations or not evaluations[-1]["sampled_success_rate"]:
        return {}
    first, last = evaluations[0], evaluations[-1]
    chosen = ({} if int(first["step"]) else {"before training": first}) | {"at the end": last}
    wanted = [name for pair in DECODINGS.values() for name in pair if last[name]]
    measured = {when: {name: float(row[name]) for name in wanted} | _counted(row) for when, row in chosen.items()}
    later = [row for row in evaluations if int(row["step"])]
    if len(later) > 1:
        # the worst of each column separately: greedy and sampled play may dip at different times
        measured["at worst"] = {name: min(float(row[name]) for row in later) for name in wanted} | _counted(last)
    return measured


def summarise_judge(folder: RunFolder) -> dict[str, Any]:
    """Returns the newest figures of a rewarding judge's monitor, when and why it raised an alarm, if it did, and the
    number of stored episodes that fooled it.
    """
    figures: dict[str, Any] = {}
    rows = folder.metrics.read()
    for row in rows:
        # a figure that is measured now and then keeps its newest value
        figures |= {name: value for name, value in row.items() if name.startswith("judge/")}
    if figures:
        first = next((row for row in rows if row.get(metrics.JUDGE_ALARM)), None)
        figures["alarm_step"] = int(first[metrics.ENV_STEPS]) if first else None
        figures["alarm_reason"] = metrics.JUDGE_ALARMS[int(first[metrics.JUDGE_ALARM])] if first else None
        figures["fooled_by"] = len(folder.fooled.read())
    return figures


def summarise_person(folder: RunFolder) -> dict[str, float]:
    """Returns how many queries a person answered, in how many minutes, and how many stay open; empty without one."""
    names = {"answers": metrics.PERSON_ANSWERS, "minutes": metrics.PERSON_MINUTES, "open": metrics.QUERIES_OPEN}
    rows = [row for row in folder.metrics.read() if metrics.QUERIES_OPEN in row]
    return {name: rows[-1].get(metric, 0.0) for name, metric in names.items()} if rows else {}


def beside_bench(folder: RunFolder, config: RunConfig) -> list[list[str]]:
    """Returns rows of name, figure in this run, figure in the bench of its judge; empty if no bench is known.

    Both use the bench's definitions, and labels its own functions. Scores are those of the monitor's newest episodes;
    the thresholds above which a score claims success differ between the two.
    """
    measured = config.kind.measured(config)
    file = config.track.bench or (measured if measured.endswith(".json") else "")
    if not file:
        return []
    try:
        row = read_row(Path(file).expanduser())
    except UsageError as error:  # it existed when the run began; training is not lost because of it
        return [["bench", "-", str(error)]]
    if queries := final_answers(folder.queries.read()):
        own = pair_figures(*logged_pairs(queries, config.task))
        return beside("pairs", own, task_figures(row, config.task, "pairs"))
    names = {
        "auc": metrics.JUDGE_AUC, "ece": metrics.JUDGE_CALIBRATION, "false_positives": metrics.JUDGE_FALSE_POSITIVES
    }  # fmt: skip
    watched = summarise_judge(folder)
    own = {name: watched.get(metric) for name, metric in names.items()}
    return beside("scores", own, task_figures(row, config.task, "scores"))


def summarise_trust(folder: RunFolder) -> dict[str, float | None]:
    """Returns the step from which the learned reward is in use, None if never, how many answers it predicted by then,
    or in all, and which share of comparisons the last fit ordered right, and of the newest before it trained on them;
    empty if no reward was fitted.
    """
    fitted = [row for row in folder.metrics.read() if row.get(metrics.REWARD_IS_TRUSTED) is not None]
    if not fitted:
        return {}
    # the first time that it beat chance; it stays in use from then on
    trusted = next((row for row in fitted if row[metrics.REWARD_IS_TRUSTED]), None)
    row = trusted or fitted[-1]
    return {
        "in_force_from_step": None if trusted is None else int(trusted[metrics.ENV_STEPS]),
        "predicted": int(row.get(metrics.REWARD_NUM_PREDICTED, 0)),
        "foretold_right": int(row.get(metrics.REWARD_NUM_PREDICTED_RIGHT, 0)),
        "train_accuracy": fitted[-1].get(metrics.REWARD_ACCURACY),
        "newest_predicted": fitted[-1].get(metrics.REWARD_PREDICTED),
    }


def beside_true_reward(folder: RunFolder, config: RunConfig) -> dict[str, Any]:
    """Returns success and env steps of the longest run of the task's true reward in the folder beside this one; empty
    if there is none, or this run is one.
    """
    found = []
    for file in sorted(folder.path.parent.glob("*/summary.json")):  # of equally long runs always the same one
        try:
            other = read_json(file)
            if (other["task"], other["reward"]) == (config.task, "environment reward") and file.parent != folder.path:
                found.append({"success": float(other["success"]), "env_steps": int(other["env_steps"])})
        except (OSError, ValueError, TypeError, KeyError):  # an interrupted run, or one without success figures
            continue
    return max(found, key=lambda run: run["env_steps"], default={}) if config.reward.is_learned else {}


def what_to_change(config: RunConfig, summary: Mapping[str, Any]) -> list[str]:
    """Returns the card's section on what to change first, as Markdown lines, the most likely cause first: if a reward
    learned from labels ends below the true reward's run beside it or, without such a run, below 90 % success; else
    empty.
    """
    rate, beside = summary["success"], summary.get("true_reward")
    if not isinstance(config, StepsRun) or not config.reward.is_learned or rate is None:
        return []
    if summary["exit_reason"] != "done" or rate >= (beside["success"] - _NEAR if beside else _GOOD):
        return []
    lines = ["## What to change first\n", f"The policy ends {_percent(rate)} of episodes in success."]
    if beside:
        lines[-1] += f" The true reward's run beside this one: {_percent(beside['success'])}"
        lines[-1] += f" after {beside['env_steps']:,} env steps."
    causes = _causes(config, summary)
    return [*lines, "", *(f"{number}. {cause}" for number, cause in enumerate(causes, start=1)), ""]


def _causes(config: StepsRun, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yields causes of a learned reward's failure and what to do about each, the most likely first."""
    reward, feedback, model = config.reward, config.feedback, config.reward_model
    trust, right = summary.get("learned_reward") or {}, summary["label_accuracy"]
    fit, unseen = trust.get("train_accuracy"), trust.get("newest_predicted")
    is_wrong = right is not None and right < _GOOD_LABELS and summary["labels_checked"] >= _FEW_LABELS
    if alarm := (summary.get("judge") or {}).get("alarm_reason"):
        yield (
            f"The judge: its monitor gave an alarm, {alarm}. More of its labels teach more of the same: look at "
            f"judge_panel.html, and try another with `rlvlm judge-bench {config.task}`."
        )
    if not summary.get("true_reward"):
        yield (
            "The true reward, to compare with: the same command with `--reward.source environment`, into a folder "
            "beside this one. Where it ends no higher, no label helps: look at the env and at the number of steps."
        )
    if is_wrong and reward.asks_judge:
        yield (
            f"The judge: {_percent(right)} of its labels are right. `rlvlm judge-bench {config.task}` tries others, "
            "other prompts and both orders."
        )
    elif is_wrong:
        yield (
            f"The teacher, {reward.teacher}: {_percent(right)} of its labels are right; with fewer than half they "
            "teach the opposite."
        )
    if reward.model != "state":
        yield "The reward model: `--reward.model state`, where the observation holds what the images show."
    if fit is not None and fit < _GOOD_FIT and not is_wrong:
        yield (
            f"Its fit: it orders {_percent(fit)} of the labels it trained on. Set `--reward-model.max-updates "
            f"{2 * model.max_updates}`."
        )
    if not alarm:
        held = (
            ""
            if unseen is None
            else f" Of the newest labels {_percent(unseen)} were predicted before they were trained on."
        )
        yield f"More labels and steps: `--feedback.queries {2 * feedback.queries} --steps {2 * config.steps}`.{held}"


def summarise_answers(folder: RunFolder) -> dict[str, Any]:
    """Returns `summarise_queries` of a run's comparisons and scores, and the error of the scores."""
    queries, rows = final_answers(folder.queries.read()), folder.scores.read()
    # an interrupted run may have logged the same answer again, from its store
    scores = list({row["question"] or str(place): row for place, row in enumerate(rows)}.values())
    order = score_order(scores)
    known = {"score_error": score_error(scores)} | ({} if order is None else {"score_order": order})
    return summarise_queries([*queries, *scores]) | known


def summarise_queries(rows: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Returns counts by status of rows of `vlm_query_log.csv` and `vlm_score_log.csv`, and the share of right ones
    among decided ones with a known truth; scores are neither right nor wrong.
    """
    by_status = Counter(row["status"] for row in rows)
    judged = [row["correct"] == "1" for row in rows if row.get("correct")]
    by_return = bool(rows) and truth_name(rows) == RETURN
    return {
        "queries": len(rows),
        "labels": {str(status): by_status[status] for status in Status},
        "label_accuracy": _mean(judged),
        "labels_checked": len(judged),
        **({"labels_checked_by": RETURN} if by_return else {}),
    }


def score_error(rows: Sequence[dict[str, str]]) -> float | None:
    """Returns the mean distance of scores in [0, 1] from the true progress, for rows of `vlm_score_log.csv`; None if
    there are no scores, or the env measures no progress.
    """
    known = [row for row in rows if row["vlm_score"] and row["ground_truth_score"]]
    return _mean([abs(float(row["vlm_score"]) - float(row["ground_truth_score"])) for row in known])


def score_order(rows: Sequence[dict[str, str]]) -> float | None:
    """Returns the rank correlation of scores with true returns, if the env measures no progress to compare them with;
    None otherwise, and if there are no scores.
    """
    scored = [row for row in rows if row["vlm_score"] and not row["ground_truth_score"]]
    if len(scored) < 2:
        return None
    found = rank_correlation(*([float(row[name]) for row in scored] for name in ("vlm_score", "return")))
    return round(found, 4) if math.isfinite(found) else None


def _mean(values: Sequence[float]) -> float | None:
    return round(float(np.mean(values)), 4) if values else None


def run_readme(  # one page, one argument per source of facts
    config: RunConfig, summary: Mapping[str, Any], environment: Mapping[str, Any], command: str, files: list[str]
) -> str:
    """Returns the card's Markdown, from `summary.json`, `environment.json` and `command.txt`; `files` are the existing
    files, as paths in the folder, for the links.
    """
    end = "Finished" if summary["exit_reason"] == "done" else f"Stopped early ({summary['exit_reason']})"
    rate, measured = summary["success"], summary.get("decodings") or {}
    success = "was not evaluated yet" if rate is None else f"ends {_percent(rate)} of episodes in success"
    if not summary["has_success"]:
        success = "was judged by its return: the env does not define success"
    elif rate is not None and summary["distinct"] == 1 < summary["episodes"]:
        success += f" (last evaluation: {summary['episodes']} times the same episode, from one start)"
    elif rate is not None:
        success += " (last evaluation)"
    lines = [
        f"# {config.task}, {summary['reward']}, seed {config.seed}\n",
        f"{end} after {summary['env_steps']:,} env steps; the policy {success}.\n",
    ]
    if measured:  # greedy and sampled play before and after training, each share with its interval in brackets
        episodes = int(next(iter(measured.values()))["episodes"])
        lines += [f"| {episodes} episodes each | greedy | sampled |", "|---|---|---|"]
        for what, names in DECODINGS.items():
            for when, shares in measured.items():
                cells = []
                # a repeated greedy episode adds no information
                independent = (int(shares["distinct"]), episodes)
                for name, count in zip(names, independent, strict=True) if names[0] in shares else ():
                    share = shares[name]
                    low, high = wilson_interval(round(share * count), count)
                    cells.append(f"{_percent(share)} ({100 * low:.0f} to {100 * high:.0f})")
                lines += [f"| {what}, {_WHEN[when]} | {' | '.join(cells)} |"] if cells else []
        lines.append("")
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in _results(summary).items()), ""]
    if rows := summary.get("bench"):
        lines += ["| the judge | in this run | in its bench |", "|---|---|---|"]
        lines += [f"| {' | '.join(cells)} |" for cells in rows]
        lines.append("")
    lines += what_to_change(config, summary)
    lines += [f"![{title}](plots/{name})\n" for name, title in _TITLES.items() if f"plots/{name}" in files]
    lines += [f"- video: [{file}]({file})" for file in files if file.endswith(".mp4")]
    lines += [f"- {text}: [{name}]({name})" for name, text in _PAGES.items() if name in files]
    lines += ["", "## How to reproduce it\n", f"```\n{command}\n```\n"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    lines += [
        f"- commit {environment['commit'] or 'unknown'}; {packages}; Python {environment['python']}",
        f"- {environment['cpu']}, {environment['cpu_cores']} cores; {', '.join(environment['gpus']) or 'no GPU'}",
    ]
    if config.reward.asks_judge:
        judge = f"{config.judge.backend} {config.judge.model}".rstrip()
        own = f"{judge}, prompt {config.judge.prompt}, score {config.judge.score}"
        shown = f"; with every question it is shown [an image of the goal]({GOAL_IMAGE})" if config.goal_file else ""
        lines.append(f"- judge: {f'Serve app {config.serve.app}' if config.serve.app else own}{shown}")
    how = f"{config.env.start_words}{config.env.episode_steps} steps per episode"
    lines.append(f"- every setting: [config.yaml](config.yaml); {how}")
    lines += [f"- changed during the run: {change}" for change in summary.get("changes") or []]
    lines.append("\nResume it, if it was stopped: `rlvlm resume .`  Play the policy: `rlvlm eval . --video`\n")
    return "\n".join(lines)


def _evaluated(summary: Mapping[str, Any]) -> dict[str, str]:
    """Returns the rows of the card's table on evaluations: success, or the return if the env has no test of it."""
    count = min(summary["evaluations"], FINAL_EVALUATIONS)
    mean = f"mean of the last {count} evaluations" if count > 1 else "last evaluation"
    rows = {
        "success at the end of the episode, last evaluation": _percent(summary["success"]),
        f"the same, {mean}": _percent(summary["final_success_at_end"]),
        f"success at any step, {mean}": _percent(summary["final_success_rate"]),
        "success at any step, best evaluation": _percent(summary["best_success_rate"]),
    }
    if not summary["has_success"]:
        final = summary["final_episode_return"]
        rows = {f"true return, {mean}": "not measured" if final is None else f"{final:.4g}"}
    if "distinct" in summary:
        rows["distinct episodes of the last evaluation"] = f"{summary['distinct']:,} of {summary['episodes']:,}"
    return rows


def _results(summary: Mapping[str, Any]) -> dict[str, str]:
    """Returns the rows of the card's table."""
    labels = summary["labels"]
    rows = _evaluated(summary) | {
        "env steps": f"{summary['env_steps']:,}",
        "wall time": f"{summary['wall_s'] / 60:.1f} min",
        "peak memory, all processes": f"{summary['peak_rss_mb']:,} MiB",
    }
    if summary["queries"]:
        rows["queries"] = f"{summary['queries']:,}"
        rows["no preference / unreadable / no answer"] = " / ".join(
            f"{labels[status]:,}" for status in ("no_preference", "invalid", "failed")
        )
        if summary["label_accuracy"] is not None:  # scores are neither right nor wrong, nor are ties of the truth
            checked = f"{summary['labels_checked']:,} of {labels['ok']:,}"
            truth = summary.get("labels_checked_by", "progress")
            rows[f"right, of the {checked} decided ones whose {truth} differs"] = _percent(summary["label_accuracy"])
    if person := summary.get("person"):
        rows["answered by a person"] = f"{person['answers']:,.0f} queries, {person['minutes']:.1f} min"
        if person["open"]:
            how = "answer them with `rlvlm labels ask .`, then `rlvlm resume . --steps N` goes on with the answers"
            rows["left unanswered by the person"] = f"{person['open']:,.0f} queries; {how}"
    if trust := summary.get("learned_reward"):
        since, count = trust["in_force_from_step"], trust["predicted"]
        share = f"{trust['foretold_right']:,} of {count:,} answers predicted" if count else "no answer was predicted"
        rows["learned reward"] = f"not used, so the agent kept exploring: {share}, no better than chance"
        if since is not None:
            rows["learned reward"] = f"used from step {since:,} on, {f'{share} by then' if count else 'untested'}"
    watched = summary.get("judge") or {}
    rows |= _watched_rows(watched)
    if summary["score_error"] is not None and metrics.JUDGE_ALARM not in watched:  # the alarm counts successes
        rows["mean error of scores, of the whole scale"] = _percent(summary["score_error"])
    if (order := summary.get("score_order")) is not None:
        rows["rank correlation of scores with the true return"] = f"{order:.2f}"
    return rows


def _watched_rows(watched: Mapping[str, Any]) -> dict[str, str]:
    """Returns the figures of a judge's monitor; empty if there was none."""
    if metrics.JUDGE_ALARM not in watched:
        return {}
    since = watched.get("alarm_step")
    rows = {"judge's alarm": "none" if since is None else f"from step {since:,}: {watched['alarm_reason']}"}
    if count := watched.get("fooled_by"):
        rows["distinct failures that it called successes, kept"] = f"{count:,} in [fooled.jsonl](fooled.jsonl)"
    for name, metric in _WATCHED.items():
        if metric in watched:
            rows[name] = f"{watched[metric]:.2f}" if metric == metrics.JUDGE_AUC else _percent(watched[metric])
    if metrics.JUDGE_AUC in watched:
        low, high = watched.get(metrics.JUDGE_AUC_LOW), watched.get(metrics.JUDGE_AUC_HIGH)
        few = ", of too few successes or failures to conclude anything"
        rows[_AREA] += few if low is None or high is None else f" ({low:.2f} to {high:.2f})"
    return rows


def _percent(rate: float | None) -> str:
    return "not measured" if rate is None else f"{100 * rate:.1f} %"
