"""What labels of a known quality are worth to each weighting of the supervised start: the table in docs/experiments.

    python benchmarks/labelled_starts.py --out starts                # about 40 minutes on two cores
    python benchmarks/labelled_starts.py --out starts --no-pocket    # without the pocket scorer's labels
    python benchmarks/labelled_starts.py --out starts --figure docs/assets/labelled_starts.svg

`push_block`, 500 recorded episodes: 30 % by the script, as much by a noisy one, a fifth each by one that stops half-way
and by chance. They are labelled by judges of an AUC of .5 to 1, whose noise is fixed for each episode and each frame,
and by the pocket scorer; each weighting learns from each, on two seeds. Beside them: GRPO from the plain start, with as
many episodes of its own. A result is one line of `results.jsonl`, and one that is there already is not run again.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
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
from rlvlm.envs.env import FIRST_HELD_OUT_STATE, ChunkEnv
from rlvlm.envs.playing import Slot, play
from rlvlm.envs.registry import make_env
from rlvlm.runs.recipes import recipe

TASK = "push_block"
SHARES = {"script": 0.3, "noisy": 0.3, "half-way": 0.2, "random": 0.2}
AUCS = (1.0, 0.7, 0.5, 0.85, 0.6)  # those that say most first, for a table that is stopped
WEIGHTINGS = ("filter", "progress", "advantage", "condition", "preference")


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table."""

    out: Path
    """Folder of the recording, its labels and the results."""
    episodes: int = 500
    """Recorded."""
    seeds: int = 2
    """Seeds of the supervised start."""
    updates: int = 400
    """Updates of the supervised start."""
    tested: int = 200
    """Held-out episodes, greedy and sampled."""
    pocket: bool = True
    """Whether the pocket scorer labels too."""
    figure: Path | None = None
    """Draw what is in `results.jsonl` into this file, and do nothing else."""


def record(path: Path, num: int) -> None:
    """Plays the mixture into a folder of demonstrations."""
    env = make_env(TASK, recipe(TASK).env.for_demonstrations(), 0)
    assert isinstance(env, ChunkEnv), "its kind"
    folder = create_folder(
        path, TASK, "chunks", env=asdict(recipe(TASK).env.for_demonstrations()), chunks=asdict(form_of(env))
    )
    rng, middle = np.random.default_rng(0), (env.action_high + env.action_low) / 2
    players = [player for player, share in SHARES.items() for _ in range(round(share * num))]
    for number, player in enumerate(players):

        def act(slots: Any, player: str = player) -> list[Any]:
            if player == "random":
                return [rng.uniform(env.action_low, env.action_high, (env.chunk_steps, len(middle))).astype(np.float32)]
            chunk = env.scripted_chunk(0.15 if player == "noisy" else 0.05, rng)
            assert chunk is not None, "there is a script"
            # what stops half-way stays where it is
            return [
                np.tile(middle, (env.chunk_steps, 1)).astype(np.float32)
                if player == "half-way" and slots[0].answers
                else chunk
            ]

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
                    "progress": np.array([info["progress"] for info in slot.infos], np.float32),
                },
            )
        )  # fmt: skip


def label(data: Path, file: Path, auc: float) -> None:
    """Labels of a judge whose scores of successes and failures have this area under the curve."""
    normal, noise = NormalDist(), np.random.default_rng(1)  # the same noise, whatever the judge is worth
    # z = d * truth + e with e ~ N(0, 1): P(z of a success > z of a failure) = Phi(d / sqrt 2)
    distance = np.inf if auc == 1 else np.sqrt(2) * normal.inv_cdf(auc)

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
        rows.append({"episode": number, "success": said(float(episode.success), own), "status": "ok"})
    recordings = Recordings(path=data, form="folder", make_draw=lambda folder: lambda snapshots, camera: snapshots)
    write_labels(file, recordings_digest(recordings), rows)


def trials(table: Table) -> Iterator[dict[str, Any]]:
    """What is run, by name: judge, weighting and seed."""
    judges = [f"{auc:g}" for auc in AUCS] + ["pocket"] * table.pocket
    for seed in range(table.seeds):
        yield {"judge": "none", "weighting": "plain", "seed": seed}
        yield {"judge": "none", "weighting": "grpo", "seed": seed}
        for judge in judges:
            for weighting in WEIGHTINGS:
                yield {"judge": judge, "weighting": weighting, "seed": seed}


def run(table: Table, trial: dict[str, Any]) -> dict[str, Any]:
    """Trains and tests one learner."""
    own: Any = recipe(TASK)
    seed, weighting = trial["seed"], trial["weighting"]
    data = table.out / "data"
    out = table.out / "-".join(map(str, trial.values()))
    labels = table.out / f"{'1' if weighting in ('plain', 'grpo') else trial['judge']}.parquet"
    if trial["judge"] == "pocket":
        labels = table.out / "pocket.labels" / "labels.parquet"
    is_plain = weighting in ("plain", "grpo")
    sft = replace(
        own.sft, demonstrations=str(data), labels=str(labels), updates=table.updates,
        # all episodes alike, failures too: nobody has said which they are
        **({"weighting": "filter", "min_worth": 0.0} if is_plain else {"weighting": weighting}),
    )  # fmt: skip
    policy = replace(own.policy, conditioned=weighting == "condition")
    if weighting == "grpo":
        start = table.out / "-".join(map(str, (trial | {"weighting": "plain"}).values()))
        steps = table.episodes * own.env.episode_steps
        words = [TASK, "--sft.start-from", str(start), "--seed", str(seed), "--steps", str(steps), "--out", str(out)]
        command = [sys.executable, "-m", "rlvlm.run", *words, "--eval.episodes", str(table.tested)]
        subprocess.run([*command, "--algo.rounds", "1", "--eval.every-steps", str(10 * steps)], check=True)
        last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        return {"greedy": last[metrics.EVAL_SUCCESS_RATE], "sampled": last[metrics.EVAL_SAMPLED_SUCCESS]}
    config = PolicyGradientAlgorithmConfig().envs(task=TASK, env_settings=own.policy_env).acting(policy=policy)
    measured = run_sft(config.learning(algo=own.algo, sft=sft).debugging(seed=seed), table.updates, out)
    env = make_env(TASK, own.policy_env.for_evaluation(), seed)
    assert isinstance(env, ChunkEnv), "its kind"
    player = chunk_player(ChunkSampler(policy=load_vla(out / "algorithm", env), env=env, algo=own.algo))
    evaluation, greedy = player.evaluate(table.tested)
    return {
        "greedy": float(np.mean([episode.is_success for episode in greedy])),
        "sampled": evaluation.metrics[metrics.EVAL_SAMPLED_SUCCESS],
        "effective": measured[metrics.SFT_EFFECTIVE], "counted": measured[metrics.SFT_COUNTED],
    }  # fmt: skip


def draw(file: Path, rows: list[dict[str, Any]]) -> None:
    """Success against the judge's worth, a line for each weighting."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4))
    for weighting in WEIGHTINGS:
        means = [
            [row["sampled"] for row in rows if (row["judge"], row["weighting"]) == (f"{auc:g}", weighting)]
            for auc in sorted(AUCS)
        ]
        axes.plot(sorted(AUCS), [np.mean(part) for part in means], marker="o", label=weighting)
    for weighting, style in (("plain", "--"), ("grpo", ":")):
        values = [row["sampled"] for row in rows if row["weighting"] == weighting]
        if values:
            axes.axhline(float(np.mean(values)), linestyle=style, color="black", label=weighting)
    axes.set(xlabel="AUC of the judge", ylabel="success, sampled", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)


def main(table: Table) -> None:
    results = table.out / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if table.figure is not None:
        draw(table.figure, rows)
        return
    data = table.out / "data"
    if not data.exists():
        record(data, table.episodes)
    for auc in AUCS:
        label(data, table.out / f"{auc:g}.parquet", auc)
    if table.pocket and not (table.out / "pocket.labels").exists():
        words = ["score", str(data), "--out", str(table.out / "pocket.labels"), "--judge.model", "scorer"]
        words += ["--judge.score", "success", "--every", "1"]
        subprocess.run([sys.executable, "-m", "rlvlm.cli", *words], check=True)
    for trial in trials(table):
        if any(trial.items() <= row.items() for row in rows):
            continue
        row = trial | run(table, trial)
        print(json.dumps(row), flush=True)
        with open(results, "a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Table))
