"""`README.md` in a run's folder: what was run, what came of it, how to do it again."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlvlm.core import metrics
from rlvlm.judges.agreement import wilson_interval
from rlvlm.runs.artifacts.summary import FINAL_EVALUATIONS
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.rows import DECODINGS

_TITLES = {
    "learning_curve.png": "Learning curve",
    "vlm_accuracy.png": "Answers by difficulty",
    "labels_over_time.png": "Answers over time",
    "vlm_scores.png": "Scores against the truth",
    "judge_over_training.png": "The judge against the truth over training",
}

_WATCHED = {
    "failures that the judge calls successes": metrics.JUDGE_FALSE_POSITIVES,
    "successes that it calls failures": metrics.JUDGE_FALSE_NEGATIVES,
    "area under its curve": metrics.JUDGE_AUC,
}
"""Of the newest episodes."""
_WHEN = {"before training": "at step 0, before training", "at the end": "at the last evaluation"}
_PAGES = {
    "judge_panel.html": "the judge's answers, with images",
    "episodes.html": "episodes of the last evaluation, image by image",
    "success_by_instruction.csv": "success of the last evaluation, instruction by instruction",
}


def run_card(  # one page, one argument per source of facts
    config: RunConfig, summary: Mapping[str, Any], environment: Mapping[str, Any], command: str, files: list[str]
) -> str:
    """The card's Markdown.

    Args:
        config: of the run.
        summary: as in `summary.json`.
        environment: as in `environment.json`.
        command: the command line that started it.
        files: paths inside the folder that exist, for the links.
    """
    parts = [
        f"# {config.task}, {summary['reward']}, seed {config.seed}",
        _verdict(summary),
        _decodings(summary.get("decodings") or {}),
        _results(summary),
        _images(files),
        "## How it was made\n",
        f"```\n{command}\n```\n",
        _setting(config, environment, summary.get("changes") or []),
        "Go on, if it was stopped: `rlvlm resume .`  Play the policy: `rlvlm eval . --video`\n",
    ]
    return "\n".join(part for part in parts if part)


def _verdict(summary: Mapping[str, Any]) -> str:
    end = "Finished" if summary["exit_reason"] == "done" else f"Stopped early ({summary['exit_reason']})"
    rate, count = summary["final_success_rate"], min(summary["evaluations"], FINAL_EVALUATIONS)
    mean = f"mean of the last {count} evaluations" if count > 1 else "one evaluation"
    unknown = "was evaluated before training alone" if summary["evaluations"] else "was not evaluated yet"
    success = unknown if rate is None else f"succeeds in {_percent(rate)} of episodes ({mean})"
    return f"\n{end} after {summary['env_steps']:,} env steps; the policy {success}.\n"


def _decodings(measured: Mapping[str, Mapping[str, float]]) -> str:
    """Greedy and sampled play before and after training, each share with what it may well be in brackets."""
    if not measured:
        return ""
    episodes = int(next(iter(measured.values()))["episodes"])
    lines = [f"| {episodes} episodes each | greedy | sampled |", "|---|---|---|"]
    for what, names in DECODINGS.items():
        for when, shares in measured.items():
            if names[0] in shares:
                cells = (_share(shares[name], episodes) for name in names)
                lines.append(f"| {what}, {_WHEN[when]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _share(share: float, count: int) -> str:
    low, high = wilson_interval(round(share * count), count)
    return f"{_percent(share)} ({100 * low:.0f} to {100 * high:.0f})"


def _results(summary: Mapping[str, Any]) -> str:
    labels = summary["labels"]
    rows = {
        "final success rate, at any step": _percent(summary["final_success_rate"]),
        "success at the end of the episode": _percent(summary.get("final_success_at_end")),
        "best success rate": _percent(summary["best_success_rate"]),
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
            rows[f"right, of the {labels['ok']:,} that decide"] = _percent(summary["label_accuracy"])
    if trust := summary.get("learned_reward"):
        rows["learned reward"] = _trust(trust)
    watched = summary.get("judge") or {}
    if metrics.JUDGE_ALARM in watched:
        since = watched.get("alarm_step")
        rows["judge's alarm"] = "none" if since is None else f"from step {since:,}: failures are called successes"
        for name, metric in _WATCHED.items():
            if metric in watched:
                rows[name] = f"{watched[metric]:.2f}" if metric == metrics.JUDGE_AUC else _percent(watched[metric])
    if summary.get("score_error") is not None and metrics.JUDGE_ALARM not in watched:  # that one says who succeeded
        rows["mean error of scores, of the whole scale"] = _percent(summary["score_error"])
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows.items())


def _trust(trust: Mapping[str, int | None]) -> str:
    since, count = trust["in_force_from_step"], trust["predicted"] or 0
    share = f"{trust['foretold_right']:,} of {count:,} answers predicted" if count else "no answer was predicted"
    if since is not None:
        return f"in force from step {since:,} on" + (f", {share} by then" if count else ", untested")
    return f"withheld, the agent explored: {share}, and a coin's could be as well"


def _images(files: list[str]) -> str:
    plots = [f"![{_TITLES[name]}](plots/{name})\n" for name in _TITLES if f"plots/{name}" in files]
    videos = [f"- video: [{file}]({file})" for file in files if file.endswith(".mp4")]
    links = "\n".join(videos + [f"- {text}: [{name}]({name})" for name, text in _PAGES.items() if name in files])
    return "\n".join(plots) + (f"\n{links}\n" if links else "")


def _setting(config: RunConfig, environment: Mapping[str, Any], changes: Sequence[str]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    judge = f"- judge: {config.judge.backend} {config.judge.model}".rstrip()
    judge += f", prompt {config.judge.prompt}, score {config.judge.score}\n"
    if config.serve.app:
        judge = f"- judge: Serve app {config.serve.app}\n"
    return (
        f"- commit {environment['commit'] or 'unknown'}; {packages}; Python {environment['python']}\n"
        f"- {environment['cpu']}, {environment['cpu_cores']} cores; {', '.join(environment['gpus']) or 'no GPU'}\n"
        f"{judge if config.asks_judge else ''}"
        f"- every setting: [config.yaml](config.yaml); {config.env_name}\n"
        + "".join(f"- changed on the way: {change}\n" for change in changes)
    )


def _percent(rate: float | None) -> str:
    return "not measured" if rate is None else f"{100 * rate:.1f} %"
