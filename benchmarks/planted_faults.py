"""The table of planted faults in docs/benched_judges.md: `python benchmarks/planted_faults.py`, half a minute.

Asks each judge of `rlvlm.plugins.known_judges.planted` about `tiny` and prints which faults the bench names and which
grade it gives; then how often honest judges lose a grade to a fault that they do not have (`--honest`, draws of each).
`--items FILE.zip --out DIR` asks about a frozen suite instead and writes an entry of each judge for the page of judges.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.core.disk import write_whole
from rlvlm.envs.registry import task_env
from rlvlm.judge_bench.bench import make_task, summarise
from rlvlm.judge_bench.prediction import predict, predict_row, read_curve
from rlvlm.judge_bench.suites import SUITES, find_suite
from rlvlm.judge_bench.task_items import make_items
from rlvlm.plugins.judge_table.entries import entry_of, entry_text, read_questions
from rlvlm.plugins.known_judges.planted import PLANTED
from rlvlm.testing.item_judge import bench, honest

SIZE_PX = 100


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked."""

    honest: int = 0
    """Honest judges of each accuracy."""
    items: Path | None = None
    """A frozen suite."""
    out: Path = Path("entries")
    """Folder of the entries."""


def write_entries(items: Path, out: Path) -> None:
    """Asks each judge about a frozen suite and writes its entry."""
    suite, questions = find_suite(str(items)), read_questions(items)
    made = {task: make_task(suite, task, size_px=SIZE_PX, seed=0, asks_turns=False) for task in suite.tasks}
    for name, planted in PLANTED.items():
        text = entry_text(entry_of(bench(suite, made, planted.judge()), planted.what, questions))
        write_whole(out / f"planted_{name.replace(' ', '_')}.json", text)
        sys.stdout.write(f"{name}\n")


def main(settings: Settings) -> None:
    """Prints both tables, or writes entries."""
    if settings.items is not None:
        write_entries(settings.items, settings.out)
        return
    suite, runs = SUITES["tiny"], read_curve()
    made = {task: make_items(suite, task, task_env(task), SIZE_PX, 0, False) for task in suite.tasks}
    lines = ["| what is wrong | named | grade |", "|---|---|---|"]
    for planted in PLANTED.values():
        row = summarise(bench(suite, made, planted.judge()))
        grades = {(expected.task, expected.kind): expected.grade for expected in predict_row(row, runs)}
        wanted = [(planted.pairs, "pairs"), (planted.scores, "scores")]
        said = "; ".join(f"{task}, {kind}: {grades[task, kind]}" for task, kind in wanted if (task, kind) in grades)
        found = [fault["name"] for fault in row["faults"] if fault["name"] in planted.names]
        lines.append(f"| {planted.what} | {'; '.join(found) or 'out of reach'} | {said} |")
    sys.stdout.write("\n".join(lines) + "\n")
    for accuracy in (0.75, 0.8, 0.85, 0.9, 0.95) if settings.honest else ():
        names: Counter[str] = Counter()
        lost = count = 0
        for number in range(settings.honest):
            row = summarise(bench(suite, made, honest(accuracy, str(number))))
            names.update(fault["name"] for fault in row["faults"])
            pairs = list(zip(predict(row["teacher"], runs), predict_row(row, runs), strict=True))
            lost += sum(plain.grade != graded.grade for plain, graded in pairs)
            count += len(pairs)
        sys.stdout.write(f"right in {accuracy:.0%}: {lost} of {count} grades lost, {dict(names)}\n")
    for items in made.values():
        items.close()


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
