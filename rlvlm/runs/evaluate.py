"""`rlvlm eval DIR`: plays a run's policy on the true task. Needs neither Ray nor the judge."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from rlvlm.algorithms.evaluation import Evaluation, PlayedEpisode, evaluate, num_distinct
from rlvlm.core.console.tables import plain_console, plain_table
from rlvlm.core.disk import write_json
from rlvlm.core.errors import EXIT_DONE, MachineError
from rlvlm.judges.agreement import wilson_interval
from rlvlm.runs.files.checkpoints import Checkpoint
from rlvlm.runs.files.folder import RunFolder
from rlvlm.runs.files.scores import evaluation_row
from rlvlm.runs.files.video import write_videos
from rlvlm.runs.start.build import film_draw, open_players

_UNDEFINED = "-"
"""Replaces success if the env has no test of it."""
_MOST_SHOWN = 20
"""Maximum number of episodes that are listed one by one."""


def evaluate_run(
    folder: RunFolder, checkpoint: Checkpoint, episodes: int, with_video: bool, out: Path | None = None
) -> int:
    """Plays episodes with the deterministic policy and the players it is compared with, and prints the results.

    Args:
        folder: folder of the run.
        checkpoint: checkpoint of the run to play.
        episodes: number of episodes, >= 1.
        with_video: whether each episode is filmed.
        out: folder of `evaluation.json` and `videos/`; None takes the run's. If it cannot be written, the figures are
            still printed.

    Raises:
        ModelUnavailable: the large model to which an adapter belongs cannot be loaded.
        MachineError: `out` cannot be written to.
    """
    console = plain_console(soft_wrap=True)
    config = folder.config()
    players = open_players(config, checkpoint.algorithm)
    last = max(checkpoint.step for checkpoint in folder.checkpoints.all())
    also = "" if checkpoint.step == last else f", the best; the last is of step {last:,}"
    console.print(f"policy of step {checkpoint.step:,}{also}, of {folder.path}")
    with console.status(f"playing {episodes} episodes each"):
        played = evaluate(players.own, episodes)
        compared = {players.name: _measured(played, players.milestones)}
        for name, player in players.others.items():
            compared[name] = _measured(evaluate(player, episodes), players.milestones)
    each = [
        {
            "success": episode.is_success,
            "success_at_end": episode.ends_in_success,
            "return": round(episode.env_return, 3),
            "final_progress": round(float(episode.progress[-1]), 4),
        }
        for episode in played
    ]
    if episodes <= _MOST_SHOWN:
        heads = ("episode", "success at the end", "at any step", "true return", "progress at the end")
        rows = []
        # if the env does not define success, a `no` would be a false claim
        known = {True: "yes", False: "no"} if players.has_success else dict.fromkeys((True, False), _UNDEFINED)
        for number, episode in enumerate(each, start=1):
            at_end, success = (known[episode[what]] for what in ("success_at_end", "success"))
            rows.append((str(number), at_end, success, f"{episode['return']:.1f}", f"{episode['final_progress']:.0%}"))
        console.print(plain_table(heads, rows))
    console.print(_table_of_players(compared, list(players.milestones), players.has_success))
    if not players.has_success:
        console.print("this env does not define success, so returns are compared")
    if alike := [name for name, figures in compared.items() if figures["distinct"] < figures["episodes"]]:
        console.print(
            f"{', '.join(alike)}: fewer starts than episodes, so some episodes repeat; the last column "
            "counts the distinct ones, and intervals are of those"
        )
    row = evaluation_row(Evaluation(episodes=played, has_success=players.has_success), checkpoint.step, 0.0)
    result = {key: value for key, value in row.items() if value is not None and key != "wall_s"}
    # the figures are already printed: an unwritable folder loses no evaluation
    out = out or folder.path
    try:
        write_json(out / "evaluation.json", result | {"each": each, "compared": compared})
        if with_video:
            with film_draw(config, players.draw) as draw:
                for file in write_videos(out / "videos", played, checkpoint.step, draw, players.has_success):
                    console.print(f"video {file}")
    except OSError as error:
        fix = f"rlvlm eval {shlex.quote(str(folder.path))} --out DIR writes elsewhere"
        raise MachineError(f"the figures above could not be written to {out}: {error.strerror}", fix) from error
    return EXIT_DONE


def _measured(played: Sequence[PlayedEpisode], milestones: Mapping[str, float]) -> dict[str, float]:
    """Returns shares of episodes with confidence intervals by the number of distinct ones, and means; a milestone
    counts once reached, at any step.
    """
    # a repeated episode adds no information, so intervals count the distinct ones
    distinct = num_distinct(played)
    counted = {
        "success_at_end": sum(each.ends_in_success for each in played),
        "success": sum(each.is_success for each in played),
        "above_zero": sum(each.env_return > 0 for each in played),
        **{name: sum(each.reaches(least) for each in played) for name, least in milestones.items()},
    }
    measured: dict[str, float] = {"episodes": len(played), "distinct": distinct}
    for name, count in counted.items():
        low, high = wilson_interval(round(count * distinct / len(played)), distinct)
        measured |= {name: count / len(played), f"{name}_low": low, f"{name}_high": high}
    return measured | {
        "episode_return": float(np.mean([each.env_return for each in played])),
        "length": float(np.mean([len(each.env_rewards) for each in played])),
    }


def _table_of_players(
    compared: Mapping[str, Mapping[str, float]], milestones: Sequence[str], has_success: bool
) -> Table:
    """Returns a table of the players' results, with 95 % intervals of shares if there are several distinct episodes."""
    reached = [f"{name}, %" for name in milestones]
    # if a reward is never positive, such as a cost, no return shows whether anything was achieved
    has_gain = any(figures["above_zero"] or figures["episode_return"] >= 0 for figures in compared.values())
    gain, above = (["return > 0, %"], ["above_zero"]) if has_gain else ([], [])
    heads = ("who", "success at end, %", "at any step, %", *reached, *gain, "return", "length", "distinct")
    rows = []
    for name, figures in compared.items():
        cells = []
        for what in ("success_at_end", "success", *milestones, *above):
            if not has_success and what.startswith("success"):
                cells.append(_UNDEFINED)
                continue
            interval = f" ({100 * figures[what + '_low']:.0f} to {100 * figures[what + '_high']:.0f})"
            cells.append(f"{100 * figures[what]:.1f}{interval if figures['distinct'] > 1 else ''}")
        means = (f"{figures['episode_return']:.2f}", f"{figures['length']:.1f}")
        rows.append((name, *cells, *means, f"{figures['distinct']:.0f} of {figures['episodes']:.0f}"))
    return plain_table(heads, rows, words=("who",))
