"""Writes a judge report: a table on the terminal; a page, figures, JSON and CSV in a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.core.console.tables import plain_console
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
from rlvlm.pages.answers import OUTCOMES as BY_BIN
from rlvlm.pages.answers import Answers, by_bin, outcomes, read_sources, summarise
from rlvlm.pages.judge import answer_sections, pair_card
from rlvlm.pages.judge_charts import REFERENCE
from rlvlm.pages.page import Card, Section, Table, page, print_sections
from rlvlm.runs.files.folder import find_folder
from rlvlm.runs.files.tables import CsvTable

BIN_COLUMNS = ("source", "bin", *(name.replace(" ", "_") for name in BY_BIN))
MAX_MISTAKES = 6
"""Mistakes shown per source."""
_KAPPA = (
    "Kappa is 1 where two always agree and 0 where they agree as often as chance would have it. Of two figures the "
    "first is that of the one named first."
)
_READING = (
    "Accuracy on decided pairs: labels that name the side with more true progress. Undecided and unreadable answers, "
    "and pairs whose truth is a tie, do not count. The interval is Wilson's.",
    "Said left: share of decided labels that name the first image. Pairs are drawn at random, so far from 50 % means a "
    "preference for a place.",
    "Label swaps with the order: of the pairs asked in both orders, how many labels swap with the images. Runs ask in "
    "one order; rlvlm judge-report RUN --ask-swapped 100 asks in the other afterwards.",
    "The truth is the simulator's. No judge sees it: runs write it into the store after the answers.",
    f"Published answers are of {REFERENCE}, by another model about other images: the shape to expect, and no race.",
)


def report_judges(paths: Sequence[Path], out: Path, ask_swapped: int = 0) -> int:
    """Reports on the answers in runs and label stores, and returns the exit code.

    Args:
        paths: folders of runs or of label stores, or folders that contain runs.
        out: folder for judge_report.html, .json and .csv.
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
    # with each source the comparison with others on the same queries
    write_json(
        out / "judge_report.json",
        [row | {"same_queries": [other for other in shared if row["source"] == other["first"]]} for row in rows],
    )
    bins = [(source.name, by_bin(source)) for source in sources]
    CsvTable(out / "judge_report.csv", BIN_COLUMNS, "bin").write(
        {"source": source, "bin": place + 1} | {name.replace(" ", "_"): int(counts[name][place]) for name in BY_BIN}
        for source, counts in bins
        for place in range(NUM_BINS)
    )
    sections = report_sections(sources, rows, shared)
    write_whole(out / "judge_report.html", page("Judge report", sections))
    print_sections(sections)
    plain_console(soft_wrap=True).print(f"page: {out / 'judge_report.html'}")
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


def report_sections(
    sources: Sequence[Answers], rows: Sequence[Mapping[str, Any]], shared: Sequence[Mapping[str, Any]] = ()
) -> list[Section]:
    """Returns the sections of a report, from the `rows` of `summarise`, one per source, and the results of
    `compare_answers`.
    """
    named = {str(row["source"]): row for row in rows}
    about = [(source.name, f"{len(source):,} answers; {source.about}") for source in sources]
    same = [
        Table(
            heads=(f"{row['first']} and {row['second']}", "on the same queries"), rows=list(shared_cells(row).items())
        )
        for row in shared
    ]
    # of pairs alone: a bench has scores and controls too
    ends = {s.name: outcomes(s)[[item.case == "pair" for item in s.items]] for s in sources}
    found = [name for name in BY_BIN if any((end == name).any() for end in ends.values())]
    lines = [(name, *(f"{100 * (end == name).mean():.1f} %" for end in ends.values())) for name in found]
    sections = [Section(points=about, tables=[Table(heads=("answers", *named), rows=lines)])]
    if same:
        sections.append(Section(heading="The same queries, answered by two", tables=same, notes=[_KAPPA]))
    sections += answer_sections(named, sources)
    for source in sources:
        num_wrong, cards = _mistakes(source)
        note = "" if cards else "None: no decided label with a known truth is wrong."
        if num_wrong and not cards:
            note = f"{num_wrong:,} are wrong; their images are not in a store."
        heading = f"The most confident mistakes: {source.name}"
        sections.append(Section(heading=heading, notes_below=[note] if note else [], cards=cards))
    return [*sections, Section(heading="How to read this", notes_below=_READING)]


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


def compare_answers(sources: Sequence[Answers]) -> list[dict[str, Any]]:
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


def _against_truth(first: Answers, second: Answers, shared: Sequence[tuple[int, int]]) -> dict[str, Any]:
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


def _mistakes(source: Answers) -> tuple[int, list[Card]]:
    """Returns the number of a source's wrong answers, and cards of the most confident ones."""
    wrong = np.flatnonzero(outcomes(source) == "incorrect")
    gaps = np.array([abs(source.items[place].gap) for place in wrong])
    sure = np.array([0.0 if (p := source.answers[place].p) is None else max(p[:2]) for place in wrong])
    cards = []
    # most confident first; among equals the pair with the widest gap
    for place in wrong[np.lexsort((-gaps, -sure))][: 4 * MAX_MISTAKES]:  # more than shown: some have no images
        item, answer = source.items[place], source.answers[place]
        truths = item.truth[::-1] if answer.swapped else item.truth
        try:
            if source.store is None:
                break
            images = [source.store.image(digest) for digest in source.images[place]]
        except MissingImage:
            continue
        sides = [
            (name, image, f"truth {source.scale * truth:.3g}")
            for name, image, truth in zip(("left", "right"), images, truths, strict=True)
        ]
        cards.append(pair_card(item.goal, sides, answer.label, answer.p, answer.text))
    return len(wrong), cards[:MAX_MISTAKES]
