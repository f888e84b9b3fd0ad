"""Writes a judge report: a table on the terminal; a page, figures, JSON and CSV in a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.core.console.tables import plain_console, plain_table
from rlvlm.core.disk import make_output_folder, write_json, write_whole
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.judging import Label, Query, Status
from rlvlm.judge_bench.figures import outcome_of
from rlvlm.judge_bench.items import NUM_BINS
from rlvlm.judge_bench.rows import PAIR_NAMES, number_cell, share_cell
from rlvlm.judges.agreement import MIN_GAP, cohens_kappa
from rlvlm.judges.build import build_judge
from rlvlm.judges.cache import CachedJudge
from rlvlm.labels.images import MissingImage
from rlvlm.labels.records import Question
from rlvlm.labels.store import LabelStore, is_store
from rlvlm.pages.answers import OUTCOMES, Recorded, by_bin, outcomes, read_sources, summarise
from rlvlm.pages.judge_charts import draw_all
from rlvlm.runs.folder import find_folder
from rlvlm.runs.records import encode_png
from rlvlm.runs.tables import CsvTable
from rlvlm.templates import inline, render

BIN_COLUMNS = ("source", "bin", *(name.replace(" ", "_") for name in OUTCOMES))
MAX_MISTAKES = 6
"""Mistakes shown per source."""
_CARD_PX = 200


def report_judges(paths: Sequence[Path], out: Path, ask_swapped: int = 0) -> int:
    """Reports on the answers in runs and label stores, and returns the exit code.

    Args:
        paths: folders of runs or of label stores, or folders that contain runs.
        out: folder for judge_report.html, .json and .csv, and the figures.
        ask_swapped: number of questions of each run that are put to its judge again with the images exchanged.

    Raises:
        UsageError: there is nothing to report.
        JudgeUnavailable: a judge has to be asked and cannot be loaded.
    """
    if ask_swapped:
        for path in paths:
            ask_in_other_order(path, ask_swapped)
    sources = read_sources(paths)
    make_output_folder(out)
    rows = [summarise(source) for source in sources]
    shared = compare_answers(sources)
    pictures = draw_all(sources, out)
    # with each source the comparison with others on the same queries
    write_json(
        out / "judge_report.json",
        [row | {"same_queries": [other for other in shared if row["source"] == other["first"]]} for row in rows],
    )
    bins = [(source.name, by_bin(source)) for source in sources]
    CsvTable(out / "judge_report.csv", BIN_COLUMNS, "bin").write(
        {"source": source, "bin": place + 1} | {name.replace(" ", "_"): int(counts[name][place]) for name in OUTCOMES}
        for source, counts in bins
        for place in range(NUM_BINS)
    )
    write_whole(out / "judge_report.html", report_page(sources, rows, pictures, "Judge report", shared))
    console = plain_console(soft_wrap=True)
    for row in rows:
        said = [(name, cell) for name, cell in table_cells(row).items() if cell != "-"]
        console.print(str(row["source"]), style="bold")
        console.print(plain_table(("", ""), said, words=("",)))
    for row in shared:
        console.print(f"{row['first']} and {row['second']}, on the same queries", style="bold")
        console.print(plain_table(("", ""), shared_cells(row).items(), words=("",)))
    console.print(f"page and images: {out / 'judge_report.html'}")
    return EXIT_DONE


def ask_in_other_order(path: Path, count: int) -> None:
    """Puts up to `count` questions of a run to its judge again with left and right exchanged.

    The answers go into the run's store, under the same stamp, so that they are asked only once.

    Raises:
        UsageError: `path` is not a run with a judge and a store.
        JudgeUnavailable: the judge cannot be loaded.
    """
    folder = find_folder(path)
    config = folder.config()
    place = config.labels(folder.labels)
    if not config.reward.asks_judge or not is_store(place):
        raise UsageError(f"{path} has no judge's answers to ask again", "leave out --ask-swapped")
    store = LabelStore(place)
    judge = CachedJudge(build_judge(config.judge), store)  # answers that it gave before cost nothing
    # from a shared store, only this run's questions that this judge answered
    wanted = {row["question"] for row in folder.queries.read() if row.get("question")}
    asked = [
        item.question
        for item in store.answers()
        if item.question.id in wanted and item.answer.stamp == judge.stamp and item.answer.status is not Status.FAILED
    ]
    if not asked:
        raise UsageError(
            f"no answer in {place} is of the judge that {path} describes: {judge.stamp}",
            "ask with the weights and settings of the run, or leave out --ask-swapped",
        )
    # evenly spread over the run, as the questions change while the policy learns
    judge.compare(_queries(store, asked[:: -(-len(asked) // count)]))


def _queries(store: LabelStore, questions: Sequence[Question]) -> list[Query]:
    """Returns the questions in the other order, without those whose images cannot be read."""
    found = []
    for question in questions:
        try:
            left, right, goal = (
                [store.image(digest) for digest in side]
                for side in (question.right, question.left, question.goal_picture)
            )
        except MissingImage:
            continue
        query = Query(goal=question.goal, left=np.stack(left), right=np.stack(right))
        found.append(replace(query, goal_picture=np.stack(goal)) if goal else query)
    return found


def report_page(
    sources: Sequence[Recorded],
    rows: Sequence[Mapping[str, Any]],
    pictures: Mapping[str, Path],
    title: str,
    shared: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Returns the page's HTML.

    Takes the `rows` of `summarise`, one per source, the files of `draw_all`, and the results of `compare_answers`.
    """
    tables = [table_cells(row) for row in rows]
    lines = [(name, [table[name] for table in tables]) for name in tables[0]]
    return render(
        "judge_report.html.j2",
        title=title,
        total=sum(map(len, sources)),
        heads=[(row["source"], row["about"]) for row in rows],
        lines=[(name, cells) for name, cells in lines if set(cells) != {"-"}],
        pictures={name: inline(file) for name, file in pictures.items()},
        mistakes=[_mistakes(source) for source in sources],
        shared=[(f"{row['first']} and {row['second']}", shared_cells(row)) for row in shared],
    )


def table_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns a row's figures as text, by name; the names are those of a judge bench."""
    pairs, cost = row["figures"]["pairs"], row["figures"]["cost"]
    p50, p95 = cost["latency_p50_s"], cost["latency_p95_s"]
    return {
        "answers": f"{row['answers']:,}",
        PAIR_NAMES["accuracy"]: share_cell(pairs["accuracy"]),
        PAIR_NAMES["undecided"]: share_cell(pairs["undecided"]),
        **{name: f"{100 * row[name] / row['answers']:.1f} %" for name in ("invalid", "failed")},
        PAIR_NAMES["said_left"]: share_cell(pairs["said_left"]),
        PAIR_NAMES["consistent"]: share_cell(pairs["consistent"]),
        PAIR_NAMES["ece"]: number_cell(pairs["ece"], 3),
        "p50 / p95": "-" if p50 is None else f"{1_000 * p50:,.0f} / {1_000 * p95:,.0f} ms",
        "tokens per answer": number_cell(cost["tokens"], 0),
        "USD per 1,000 answers": number_cell(cost["usd_per_1000"]),
        "faults": "; ".join(fault["name"] for fault in row["faults"]) or "-",
    }


def shared_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns a row of `compare_answers` as text, by name; of two figures the first source's comes first."""
    of = f", of {row['checked']:,} whose truth differs"
    return {
        "queries that both answered": f"{row['queries']:,}",
        "the same label": share_cell(row["agree"]),
        "Cohen's kappa": number_cell(row["kappa"]),
        PAIR_NAMES["accuracy"] + of: " / ".join(map(share_cell, row["accuracy"])),
        "Cohen's kappa with the truth": " / ".join(map(number_cell, row["kappa_truth"])),
        "seconds per answer, median": " / ".join(number_cell(seconds, 1) for seconds in row["median_s"]),
    }


def compare_answers(sources: Sequence[Recorded]) -> list[dict[str, Any]]:
    """Compares every two sources of different judges on the queries that both answered.

    Returns:
        One row per two sources that share a query that both could read: `first` and `second`, their names; `queries`
        that both answered; `agree`, the share of equal labels (a tie is a label), and `kappa`, Cohen's; and lists of
        two, one value for each source: `accuracy`, the share of right labels among the decided; `kappa_truth`, Cohen's
        kappa with the truth, over the `checked` queries whose truth is known and no tie; `median_s`, seconds per
        answer. Unknown values are None.
    """
    rows = []
    for first, second in combinations(sources, 2):
        indices = [{key: index for index, key in enumerate(source.keys) if key} for source in (first, second)]
        # both named a side or a tie; unreadable answers are left out
        shared = [
            (indices[0][key], indices[1][key])
            for key in indices[0]
            if key in indices[1] and first.answers[indices[0][key]].label and second.answers[indices[1][key]].label
        ]
        if not shared or first.judge == second.judge:
            continue
        labels = [[source.answers[pair[side]].label for pair in shared] for side, source in enumerate((first, second))]
        rows.append(
            {
                "first": first.name,
                "second": second.name,
                "queries": len(shared),
                "agree": float(np.mean([left == right for left, right in zip(*labels, strict=True)])),
                "kappa": cohens_kappa(*labels),
                **_against_truth(first, second, shared),
            }
        )
    return rows


def _against_truth(first: Recorded, second: Recorded, shared: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Returns `checked`, and the lists of two."""
    figures: dict[str, Any] = {"checked": 0, "accuracy": [], "kappa_truth": [], "median_s": []}
    for side, source in enumerate((first, second)):
        answered = [(source.items[pair[side]], source.answers[pair[side]]) for pair in shared]
        checked = [(item, answer) for item, answer in answered if abs(item.gap) > MIN_GAP]  # also excludes NaN
        right = [outcome_of(item, answer) == "right" for item, answer in checked if answer.label != Label.TIE]
        truths = [str(Label.of(*item.truth)) for item, _ in checked]
        seconds = [answer.latency_s for _, answer in answered if answer.latency_s > 0]
        figures["checked"] = len(checked)
        figures["accuracy"].append(float(np.mean(right)) if right else None)
        figures["kappa_truth"].append(cohens_kappa([answer.label for _, answer in checked], truths))
        figures["median_s"].append(float(np.median(seconds)) if seconds else None)
    return figures


def _mistakes(source: Recorded) -> tuple[str, int, list[dict[str, Any]]]:
    """Returns a source's name, its number of wrong answers, and cards of the most confident ones."""
    wrong = np.flatnonzero(outcomes(source) == "incorrect")
    gaps = np.array([abs(source.items[place].gap) for place in wrong])
    sure = np.array([0.0 if (p := source.answers[place].p) is None else max(p[:2]) for place in wrong])
    cards = []
    # most confident first; among equals the pair with the widest gap
    for place in wrong[np.lexsort((-gaps, -sure))][: 4 * MAX_MISTAKES]:  # more than shown: some have no images
        try:
            cards.append(
                {"text": source.answers[place].text, "sides": [_side(source, int(place), side) for side in (0, 1)]}
            )
        except MissingImage:
            continue
    return source.name, len(wrong), cards[:MAX_MISTAKES]


def _side(source: Recorded, place: int, side: int) -> dict[str, Any]:
    """Returns one image of a question, with its truth and the judge's confidence."""
    if source.store is None:
        raise MissingImage("the answers come from no store")
    image = source.store.image(source.images[place][side])
    # every n-th pixel is enough for a card, and faster than resampling
    step = -(-max(image.shape[:2]) // _CARD_PX)
    name, answer, item = ("left", "right")[side], source.answers[place], source.items[place]
    return {
        "name": name,
        "is_said": answer.label == name,
        "picture": f"data:image/png;base64,{encode_png(image[::step, ::step])}",
        "truth": source.scale * item.truth[1 - side if answer.swapped else side],
        "sure": None if answer.p is None else answer.p[side],
    }
