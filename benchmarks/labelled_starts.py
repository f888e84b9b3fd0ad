"""Gain from labels of a known quality for each weighting of the supervised start: the table in docs/experiments.

    python benchmarks/labelled_starts.py --data starts/data --prepare           # the recording and its labels, once
    python benchmarks/labelled_starts.py --data starts/data --out starts        # every learner, and GRPO from four
    python benchmarks/labelled_starts.py --data starts/data --out starts --part 3 --parts 8   # one process of eight
    python benchmarks/labelled_starts.py --out starts --figure docs/images/labelled_starts.png

`push_block`, 500 recorded episodes: 30 % by the script, as much by a player of whose chunks 85 % are by chance, a fifth
each by one that stops half-way and by chance alone. They are labelled by judges of an AUC of .5 to 1, whose noise is
fixed for each episode and each frame, and by the pocket scorer; each weighting learns from each. Beside them: the
script's episodes alone, all alike, and GRPO from either of two starts with as many episodes of its own. A result is a
line of `results-PART.jsonl`, and one that is there already, in any part, is not run again.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import tyro

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.chunks import ChunkSampler
from rlvlm.algorithms.policy_gradient.player import chunk_player, load_vla
from rlvlm.algorithms.sft_job import run_sft
from rlvlm.core import metrics
from rlvlm.demonstrations.chunk_form import form_of
from rlvlm.demonstrations.folder import create_folder, open_folder
from rlvlm.demonstrations.recorded_labels import write_labels
from rlvlm.demonstrations.recordings import Recordings, recordings_digest
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.envs.env import FIRST_HELD_OUT_STATE, ChunkEnv
from rlvlm.envs.playing import Slot, play
from rlvlm.envs.registry import make_env
from rlvlm.judge_bench.scoring import ScoredEpisode
from rlvlm.reports.score_value import learn_values
from rlvlm.runs.settings.recipes import recipe

TASK = "push_block"
SHARES = {"script": 0.3, "noisy": 0.3, "half-way": 0.2, "random": 0.2}
JUDGES = ("script", "none", "1", "0.7", "0.5", "pocket", "0.85", "0.6")
"""Who labels: a simulated judge of that AUC, the pocket scorer; script: who played is known; none: all are alike. Those
that say most first, for a table that is stopped."""
WEIGHTINGS = (
    *("filter", "strict", "progress", "advantage", "condition", "preference"),
    *("advantage by value", "condition by value", "iql by value"),
)
"""As of `--sft.weighting`; strict: filter, with the best `STRICT` of all episodes left; by value: of labels with what
`rlvlm score --value` learns from them."""
STRICT = 0.15
NAMES = {"filter": "filter at .5", "strict": "filter, best 15 %", "plain": "all alike", "plain + grpo": "and GRPO"}
P_CHANCE = 0.85
"""Share of the noisy player's chunks that are by chance, and imitated as if they were not."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table."""

    out: Path = Path("starts")
    """Folder of the results."""
    data: Path = Path("starts/data")
    """Folder of the recording and its labels, which are made where they are missing; several processes share it."""
    prepare: bool = False
    """Make the recording and its labels, and do nothing else."""
    part: int = 0
    """Number of this process's part, from 0; every so many learners are its own."""
    parts: int = 1
    """Parts, each run by a process."""
    episodes: int = 500
    """Recorded."""
    seeds: int = 2
    """Seeds of the supervised start."""
    updates: int = 600
    """Updates of the supervised start."""
    tested: int = 300
    """Held-out episodes, greedy and sampled."""
    judges: tuple[str, ...] = JUDGES
    """Who labels."""
    figure: Path | None = None
    """Draw what is in `out` into this file, and do nothing else."""


def record(path: Path, num: int) -> None:
    """Plays the mixture into a folder of demonstrations."""
    own: Any = recipe(TASK)
    env, settings = make_env(TASK, own.env.for_demonstrations(), 0), asdict(own.env.for_demonstrations())
    assert isinstance(env, ChunkEnv), "its kind"
    folder = create_folder(path, TASK, "chunks", env=settings, chunks=asdict(form_of(env)))
    rng = np.random.default_rng(0)
    players = [player for player, share in SHARES.items() for _ in range(round(share * num))]
    for number, player in enumerate(players):
        perturbed: list[bool] = []

        def act(slots: Any, player: str = player, perturbed: list[bool] = perturbed) -> list[Any]:
            before, chunk = slots[0].answers, env.scripted_chunk(0.05, rng)
            assert chunk is not None, "there is a script"
            # the script goes astray now and then, as in the recipe's own start; nobody imitates those chunks
            perturbed.append(player == "script" and bool(before) and rng.random() < own.sft.p_perturb)
            if perturbed[-1]:
                return [before[rng.integers(len(before))]]
            # only the hand's movements are by chance: all that a recording has is imitated, and the rest moves nothing
            if player == "random" or (player == "noisy" and rng.random() < P_CHANCE):
                chunk[:, :2] = rng.uniform(-1.0, 1.0, (len(chunk), 2))
            elif player == "half-way" and before:
                chunk[:, :2] = 0.0  # it stays where it is
            return [chunk]

        (slot,) = play([Slot(env)], [int(rng.integers(FIRST_HELD_OUT_STATE))], act)
        folder.add(
            EpisodeRecord(
                id=f"{player}-{number}", task=TASK, kind="chunks", seed=slot.start, player=player, goal=slot.goal,
                env_return=float(sum(slot.rewards)), success=bool(slot.infos[-1]["success"]),
                terminated=slot.is_terminated,
                arrays={
                    "snapshots": np.concatenate([obs.snapshots for obs in slot.seen]),
                    "proprio": np.concatenate([obs.proprio for obs in slot.seen[:-1]]),
                    "actions": np.stack(slot.answers),
                    "steps": np.array([info["steps"] for info in slot.infos[1:]], np.int64),
                    "perturbed": np.array(perturbed),
                    "progress": np.array([info["progress"] for info in slot.infos], np.float32),
                },
            )
        )  # fmt: skip


def label(data: Path, file: Path, auc: float | None) -> None:
    """Labels of a judge whose scores of successes and failures have this area under the curve; None: who played is
    known, and the script's episodes alone are worth anything.
    """
    normal, noise = NormalDist(), np.random.default_rng(1)  # the same noise, whatever the judge is worth
    # z = d * truth + e with e ~ N(0, 1): P(z of a success > z of a failure) = Phi(d / sqrt 2)
    distance = np.inf if auc in (None, 1) else np.sqrt(2) * normal.inv_cdf(auc or 1)

    def said(truth: float, error: float) -> float:
        return truth if np.isinf(distance) else normal.cdf(distance * (truth - 0.5) + error)

    rows = []
    for number, episode in enumerate(open_folder(data).episodes()):
        own, progress = noise.normal(), episode.arrays["progress"]
        errors = (own + noise.normal(size=len(progress))) / np.sqrt(2)  # half of it is the episode's, half the frame's
        rows += [
            {"episode": number, "frame": frame, "progress": said(float(truth), error), "status": "ok"}
            for frame, (truth, error) in enumerate(zip(progress, errors, strict=True))
        ]
        is_good = episode.success if auc is not None else episode.player == "script"
        rows.append({"episode": number, "success": said(float(is_good), own), "status": "ok"})
    write_labels(
        file, recordings_digest(Recordings(path=data, form="folder", make_draw=lambda folder: _draw_nothing)), rows
    )


def _draw_nothing(snapshots: Any, camera: str) -> Any:
    """Nobody looks: a digest is of numbers alone."""


def trials(table: Table) -> list[dict[str, Any]]:
    """What is run, by name: judge, weighting and seed; what says most comes first, and a start before its GRPO."""
    alone = {"script": ("filter",), "none": ("plain",)}
    return [
        {"judge": judge, "weighting": weighting, "seed": seed}
        for seed in range(table.seeds)
        for judge in table.judges
        for weighting in alone.get(judge, WEIGHTINGS)
    ]


def run(table: Table, trial: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Trains and tests one learner, and from some of the starts GRPO too."""
    own: Any = recipe(TASK)
    judge, weighting, seed = trial.values()
    out = table.out / "-".join(map(str, trial.values()))
    began = time.monotonic()
    settings: dict[str, Any] = {"weighting": weighting, "labels": str(labels_of(table, judge))}
    if weighting == "plain":  # all episodes alike, failures too: nobody has said which they are
        settings = {"weighting": "filter", "labels": str(labels_of(table, "1")), "min_worth": 0.0}
    elif weighting == "strict":
        worths = pq.read_table(settings["labels"], columns=["success"])["success"].drop_null().to_numpy()
        settings |= {"weighting": "filter", "min_worth": round(float(np.quantile(worths, 1 - STRICT)), 6)}
    elif weighting.endswith(" by value"):
        settings = {"weighting": weighting.split()[0], "labels": str(valued(table, judge))}
    elif (judge, weighting) == ("pocket", "filter"):  # as the page of `rlvlm score` advises
        page = json.loads((table.data / "pocket.labels" / "score.json").read_text())
        settings["min_worth"] = round(page["threshold"], 3)
    sft = replace(own.sft, demonstrations=str(table.data / "recording"), updates=table.updates, **settings)
    policy = replace(own.policy, conditioned=weighting.startswith("condition"))
    config = PolicyGradientAlgorithmConfig().settings(task=TASK, env_settings=own.policy_env, policy=policy)
    measured = run_sft(config.settings(algo=own.algo, sft=sft).debugging(seed=seed), table.updates, out)
    env = make_env(TASK, own.policy_env.for_evaluation(), seed)
    assert isinstance(env, ChunkEnv), "its kind"
    player = chunk_player(ChunkSampler(policy=load_vla(out / "algorithm", env, own.policy), env=env, algo=own.algo))
    evaluation, greedy = player.evaluate(table.tested)
    yield trial | {
        "greedy": float(np.mean([episode.is_success for episode in greedy])),
        "sampled": evaluation.metrics[metrics.EVAL_SAMPLED_SUCCESS],
        "effective": measured[metrics.SFT_EFFECTIVE], "counted": measured[metrics.SFT_COUNTED],
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    if weighting in ("plain", "filter") and judge in ("none", "1"):
        steps, after = table.episodes * own.env.episode_steps, f"{out}-grpo"
        words = [TASK, "--sft.start-from", str(out), "--seed", str(seed), "--steps", str(steps), "--out", after]
        words += ["--eval.episodes", str(table.tested), "--algo.rounds", "1", "--eval.every-steps", str(10 * steps)]
        subprocess.run([sys.executable, "-m", "rlvlm.run", *words], check=True)
        last = json.loads((Path(after) / "metrics.jsonl").read_text().splitlines()[-1])
        ends = {"greedy": last[metrics.EVAL_SUCCESS_RATE], "sampled": last[metrics.EVAL_SAMPLED_SUCCESS]}
        yield trial | {"weighting": f"{weighting} + grpo"} | ends


def labels_of(table: Table, judge: str) -> Path:
    """Where a judge's labels are."""
    return table.data / ("pocket.labels/labels.parquet" if judge == "pocket" else f"{judge}.parquet")


def valued(table: Table, judge: str) -> Path:
    """Returns the labels of a judge with a value learned from them, which is learned where it is missing."""
    source, data = labels_of(table, judge), table.data / "recording"
    file = source.with_name(f"{source.stem}.valued.parquet")
    if file.exists():
        return file
    env, rows = make_env(TASK, recipe(TASK).env, 0), pq.read_table(source).to_pylist()
    recordings = Recordings(
        path=data, form="folder", make_draw=lambda folder: lambda snapshots, camera: env.draw_sized(snapshots, 32)
    )
    worths = {row["episode"]: row["success"] for row in rows if row["frame"] is None and row["success"] is not None}
    episodes = [
        ScoredEpisode(
            number=number, name=film.name, goal=film.instruction, num_frames=len(film.actions), truth=film.success,
            frames=np.arange(len(film.actions)), success=worths.get(number, np.nan),
        )
        for number, film in enumerate(recordings) if isinstance(film, RobotTrajectory)
    ]  # fmt: skip
    found = {episode.number: episode for episode in learn_values(episodes, recordings, 0)[0]}
    for row in rows:
        episode = found[row["episode"]]
        if row["frame"] is None:
            row["value"] = episode.outcome
        elif len(episode.values):
            row["value"], row["upper_value"] = episode.values[row["frame"]].tolist()
    write_labels(file, recordings_digest(recordings), rows)
    return file


def prepare(table: Table) -> None:
    """Makes the recording and its labels, where they are missing."""
    data = table.data / "recording"
    if not data.exists():
        record(data, table.episodes)
    for judge in table.judges:
        file = labels_of(table, "1" if judge == "none" else judge)
        if file.exists():
            continue
        if judge == "pocket":
            words = ["score", str(data), "--out", str(file.parent), "--judge.model", "scorer"]
            words += ["--judge.score", "success", "--every", "1"]
            subprocess.run([sys.executable, "-m", "rlvlm.cli", *words], check=True)
        else:
            label(data, file, None if judge == "script" else 1.0 if judge == "none" else float(judge))


def draw(file: Path, rows: list[dict[str, Any]]) -> None:
    """Success against the judge's worth, a line for each weighting; thin bars from the worst seed to the best."""
    import matplotlib.pyplot as plt

    def found(judge: str, weighting: str) -> list[float]:
        return [row["greedy"] for row in rows if (row["judge"], row["weighting"]) == (judge, weighting)]

    figure, axes = plt.subplots(figsize=(6.4, 4))
    aucs = sorted(float(judge) for judge in JUDGES if judge[0].isdigit())
    for number, weighting in enumerate(WEIGHTINGS):
        parts = [found(f"{auc:g}", weighting) or [np.nan] for auc in aucs]
        means = np.array([np.mean(part) for part in parts])
        beside = [means - [min(part) for part in parts], [max(part) for part in parts] - means]
        across = np.array(aucs) + 0.004 * (number - 2.5)  # bars beside each other
        axes.errorbar(across, means, beside, marker="o", elinewidth=0.8, label=NAMES.get(weighting, weighting))
    for judge, weighting, style in (("script", "filter", "-"), ("none", "plain", "--"), ("none", "plain + grpo", ":")):
        if values := found(judge, weighting):
            label = NAMES.get(weighting, weighting) if judge == "none" else "the script's episodes alone"
            axes.axhline(float(np.mean(values)), linestyle=style, color="black", linewidth=1, label=label)
    axes.set(xlabel="AUC of the judge", ylabel="success, greedy", ylim=(-0.02, None))
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """All results of all parts."""
    lines = [line for file in sorted(folder.glob("results-*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def main(table: Table) -> None:
    if table.figure is not None:
        draw(table.figure, rows_of(table.out))
        return
    prepare(table)
    if table.prepare:
        return
    table.out.mkdir(parents=True, exist_ok=True)
    for trial in trials(table)[table.part :: table.parts]:
        if any(trial.items() <= row.items() for row in rows_of(table.out)):
            continue
        for row in run(table, trial):
            print(json.dumps(row), flush=True)
            with open(table.out / f"results-{table.part}.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Table))
